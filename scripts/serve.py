"""`anyformer serve`: a model behind an HTTP interface."""

from typing import Annotated

import typer


def command(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A run, a model folder or a Hub id.")],
    host: Annotated[str, typer.Option(help="The address to listen at.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="The port; 0: any that is free.")] = 8000,
    continuous_batching: Annotated[
        bool, typer.Option("--continuous-batching", help="Requests share each pass; all are sampled alike.")
    ] = False,
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Run code from the repository.")
    ] = False,
) -> None:
    """Serve a model at the endpoints of OpenAI's interface, for any client of it, such as `transformers chat`."""
    from ..recipes.serving import serve

    serve(model, host=host, port=port, continuous_batching=continuous_batching, trust_remote_code=trust_remote_code)
