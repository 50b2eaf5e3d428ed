"""`python -m anyformer`: the command line, for `accelerate launch -m anyformer …` and torchrun."""

from .scripts.cli import main

if __name__ == "__main__":
    main()
