"""`anyformer plan`: what a run will cost."""

from typing import Annotated

import typer


def command(
    name: Annotated[
        str,
        typer.Argument(
            metavar="NAME",
            help="A recipe or a preset, by file or shipped name (see `anyformer list`); a run's folder; a model's "
            "folder, .gguf file or Hub id, of which the config alone is read.",
        ),
    ],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="OVERRIDES",
            help="Changes to the recipe, as `anyformer train` takes them; of a preset or a model, to the recipe that "
            "is assumed for it, such as train.per_device_train_batch_size=4 or adapter.kind=lora.",
        ),
    ] = None,
    gpu: Annotated[
        str | None, typer.Option(metavar="SIZE", help="Memory of one GPU, as 80GB: does it fit, and what would help?")
    ] = None,
    gpus: Annotated[
        int | None,
        typer.Option(min=1, max=2**20, help="GPUs that weights, gradients and optimiser state are split over."),
    ] = None,
    batch: Annotated[int | None, typer.Option(min=1, max=2**16, help="Rows of a forward pass on one device.")] = None,
    length: Annotated[int | None, typer.Option(min=1, max=2**20, help="Tokens of a row.")] = None,
    context: Annotated[int | None, typer.Option(min=1, max=2**30, help="Tokens of a text, for the KV cache.")] = None,
    tokens: Annotated[str | None, typer.Option(metavar="NUMBER", help="Tokens of the whole run, as 15T.")] = None,
    throughput: Annotated[
        str | None, typer.Option(metavar="RATE", help="Tokens a second of all devices, or a run's folder.")
    ] = None,
    flops: Annotated[
        str | None, typer.Option(metavar="RATE", help="FLOP/s of one device, as 989T, or a GPU's name, as H100.")
    ] = None,
    stage: Annotated[str | None, typer.Option(help="Of a folder of stages: which one.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the plan as JSON and nothing else.")] = False,
) -> None:
    """Say what a run will cost: parameters, FLOPs, memory, time; from the config alone.

    For example: anyformer plan llama-3-8b --gpu 80GB --gpus 8 --tokens 1T --flops H100
    """
    from ..recipes.planning.show import show_plan_of

    show_plan_of(
        name,
        overrides or (),
        stage=stage,
        gpu=gpu,
        gpus=gpus,
        batch=batch,
        length=length,
        context=context,
        tokens=tokens,
        throughput=throughput,
        flops=flops,
        as_json=as_json,
    )
