"""What a run or an evaluation computed with."""

# Packages whose versions decide what is computed.
VERSIONED = ("anyformer", "torch", "transformers", "peft", "trl", "accelerate", "datasets")


def versions() -> dict[str, str]:
    """Of all packages that decide."""
    from importlib.metadata import version

    return {name: version(name) for name in VERSIONED}


def environment() -> dict[str, str]:
    """What a run computed on."""
    import platform

    import torch

    device = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.machine()
    return {
        "python": platform.python_version(),
        "system": platform.system(),
        "device": device,
        "threads": str(torch.get_num_threads()),
    }
