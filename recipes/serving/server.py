"""`anyformer serve`: one model at the endpoints of `transformers serve`, with bad requests refused."""

import asyncio
import inspect
import socket
from typing import Any

from ..console import quiet_libraries
from ..errors import UserError
from ..generator import Generator, open_generator
from ..tokens.supervised import stop_ids
from .fields import BadRequest, Limits
from .requests import check
from .schema import REQUESTS

# A longer body is no conversation: 16 bytes a token fill a context of a million tokens.
LONGEST_BODY = 2**24


def serve(
    path: str,
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    continuous_batching: bool = False,
    trust_remote_code: bool = False,
) -> None:
    """Serve a model until interrupted.

    Args:
        path: a run, a model folder or a Hub id; the name that clients call it by.
        port: 0: any that is free.
        continuous_batching: requests share each pass through the model, and are sampled alike, as
            `generation_config.json` says.

    Raises:
        UserError: the server's packages are not installed, the port is taken, or there is no model that can be served.
    """
    quiet_libraries()
    from transformers.utils.import_utils import is_serve_available

    if not is_serve_available():
        raise UserError("the packages of the server are not installed: pip install 'anyformer[serving]'")
    import uvicorn

    listener = _listen(host, port)
    with listener:
        generator = open_generator(path, trust_remote_code=trust_remote_code)
        app, state = build_app(path, generator, continuous_batching=continuous_batching)
        place = f"[{host}]" if ":" in host else host
        print(f"{path} at http://{place}:{listener.getsockname()[1]}/v1; Ctrl-C ends it", flush=True)
        try:
            uvicorn.Server(uvicorn.Config(app, log_level="warning", access_log=False)).run(sockets=[listener])
        finally:
            state.shutdown()  # the thread of continuous batching would keep the process


def _listen(host: str, port: int) -> socket.socket:
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, port), family=family)
    except OSError as error:
        raise UserError(f"cannot listen at {host}, port {port}: {error.strerror or error}") from error


def build_app(name: str, generator: Generator, *, continuous_batching: bool = False) -> tuple[Any, Any]:
    """The application, and the state whose `shutdown` ends its threads.

    Args:
        name: what clients call the model.

    Raises:
        UserError: the model cannot be served, or not by continuous batching.
    """
    if generator.reads_apart:
        raise UserError(f"{name}: is an encoder-decoder, and only decoders can be served; see `anyformer generate`")
    from transformers.cli.serving.chat_completion import ChatCompletionHandler
    from transformers.cli.serving.completion import CompletionHandler
    from transformers.cli.serving.response import ResponseHandler
    from transformers.cli.serving.server import build_server
    from transformers.cli.serving.systemone import SystemOneHandler
    from transformers.cli.serving.transcription import TranscriptionHandler

    from .parts import Models, OwnReading, State, text_limit

    config = generator.model.generation_config
    for setting in ("num_beams", "num_return_sequences"):
        if (getattr(config, setting) or 1) > 1:
            raise UserError(
                f"{name}: generation_config.json holds {setting}={getattr(config, setting)}, and the server writes one "
                "answer, token by token: take it out"
            )
    config.eos_token_id = stop_ids(generator.tokenizer)
    config.pad_token_id = generator.tokenizer.pad_token_id
    models, state = Models(name, generator), State(generator, continuous_batching)
    if continuous_batching:
        try:
            state.together.init_cb(generator.model, config)
        except ValueError as error:
            raise UserError(f"{name}: {error}") from error

    def own(handler: type) -> Any:
        return type(handler.__name__, (OwnReading, handler), {})(models, state)

    app = build_server(
        models,
        own(ChatCompletionHandler),
        completion_handler=own(CompletionHandler),
        response_handler=own(ResponseHandler),
        transcription_handler=TranscriptionHandler(models, state),
        systemone_handler=SystemOneHandler(models, state),
        generation_state=state,
    )
    template, variables = _template_of(generator.tokenizer)
    limits = Limits(
        model=name,
        positions=text_limit(generator),
        vocab_size=generator.model.config.vocab_size,
        samples=bool(config.do_sample),
        template=template,
        variables=variables,
        shared=state.together.settings if continuous_batching else None,
    )
    _refuse_bad_requests(app, limits)
    return app, state


def _template_of(tokenizer: Any) -> tuple[str, frozenset[str]]:
    """The chat template, "" where there is none, and those of its variables that nobody else sets."""
    from transformers.utils.chat_template_utils import _get_template_variables

    found = tokenizer.chat_template or ""
    template = found if isinstance(found, str) else "\n".join(found.values())
    taken = {"messages", *inspect.signature(tokenizer.apply_chat_template).parameters, *tokenizer.special_tokens_map}
    return template, _get_template_variables(template) - taken


def _refuse_bad_requests(app: Any, limits: Limits) -> None:
    from fastapi import Request
    from fastapi.responses import JSONResponse

    def refusal(error: BadRequest) -> JSONResponse:
        fields = {"message": str(error), "type": "invalid_request_error", "code": None, "param": error.field or None}
        return JSONResponse({"error": fields}, status_code=400)

    @app.middleware("http")
    async def checked(request: Request, call_next: Any) -> Any:
        path = request.url.path
        if request.method == "POST" and path in REQUESTS:
            try:
                if "content-length" not in request.headers:  # of pieces nobody knows how many come
                    raise BadRequest("the request does not say its length: send a Content-Length")
                _require_size(int(request.headers["content-length"]))
                body = await request.body()
                _require_size(len(body))
                await asyncio.to_thread(check, path, body, limits)
            except BadRequest as error:
                return refusal(error)
        if path.startswith("/v1/audio"):
            return refusal(BadRequest("sound is not served: the model reads and writes text"))
        if path == "/v1/systemone" and limits.shared is not None:
            return refusal(BadRequest("decisions are not batched: ask a server without continuous batching"))
        return await call_next(request)

    @app.exception_handler(BadRequest)
    async def refused(_: Request, error: BadRequest) -> JSONResponse:
        return refusal(error)


def _require_size(length: int) -> None:
    if length > LONGEST_BODY:
        raise BadRequest(f"the request has {length} bytes; at most {LONGEST_BODY} are read")
