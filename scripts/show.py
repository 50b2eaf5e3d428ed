"""`anyformer show`: what a model is made of, and where its heads look."""

from pathlib import Path
from typing import Annotated

import typer


def command(
    name: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help="A preset or a recipe, by file or shipped name (see `anyformer list`); a run's folder; a model's "
            "folder, .gguf file or Hub id. The diagram reads the config alone.",
        ),
    ],
    svg: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the diagram as SVG too.")] = None,
    prompt: Annotated[
        str | None, typer.Option(metavar="TEXT", help="A text whose attention maps are drawn; needs weights.")
    ] = None,
    attention: Annotated[Path | None, typer.Option(metavar="FILE", help="Where the maps go: .svg or .png.")] = None,
    answer: Annotated[
        str | None,
        typer.Option(metavar="TEXT", help="Of an encoder-decoder: what its decoder reads; default: what it writes."),
    ] = None,
    layers: Annotated[
        str | None, typer.Option(metavar="NUMBERS", help="Layers whose maps are drawn, as 0-3,11.")
    ] = None,
    heads: Annotated[str | None, typer.Option(metavar="NUMBERS", help="Heads whose maps are drawn, as 0,5.")] = None,
    stage: Annotated[str | None, typer.Option(help="Of a folder of stages: which one.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the parts as JSON and nothing else.")] = False,
) -> None:
    """Draw what a model is made of, count its parameters, and picture its attention.

    For example: anyformer show llama-3-8b --svg llama.svg
    """
    from ..recipes.views.show import show_model

    show_model(
        name,
        stage=stage,
        svg=svg,
        prompt=prompt,
        answer=answer,
        attention=attention,
        layers=layers,
        heads=heads,
        as_json=as_json,
    )
