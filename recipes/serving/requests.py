"""A request to the server, checked before the library's handlers read it.

They answer mistakes of the client with status 500, a list of images with text about nothing, and three wanted answers
with one. What they cannot do is refused here.
"""

import json
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from pydantic import ValidationError

from .fields import BadRequest, Limits
from .schema import REQUESTS, BiasedSampling, ChatRequest, Message, ResponseRequest, Sampling
from .settings import PER_ANSWER, SAMPLING, Settings, defaults


def check(path: str, body: bytes, limits: Limits) -> None:
    """Read the body of a request to one of `REQUESTS`.

    Raises:
        BadRequest: no JSON, a field that is unknown, of the wrong type or out of range, or something that the server
            cannot do.
    """
    fields = _read(body)
    try:
        request = REQUESTS[path].model_validate(fields, context=limits)
    except ValidationError as error:
        where, reason = _most_telling(error, fields)
        raise BadRequest(f"{where}: {reason}" if where else reason, where) from error
    model = fields.get("model")
    if model is not None and model != limits.model:
        raise BadRequest(f"model: this server answers as {limits.model!r}, not as {model!r}", "model")
    if isinstance(request, Sampling):
        for field, reason in _impossible(request, limits):
            raise BadRequest(f"{field}: {reason}", field)


def _read(body: bytes) -> dict[str, Any]:
    try:
        fields = json.loads(body)
        json.dumps(fields, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        half = error.object[error.start]
        raise BadRequest(f"the request holds {half!a}, half a character: send the whole of it") from error
    except (ValueError, RecursionError) as error:
        raise BadRequest(f"the request is no JSON: {error}") from error
    if not isinstance(fields, dict):
        raise BadRequest("the request is no JSON object")
    return fields


def _most_telling(error: ValidationError, fields: dict[str, Any]) -> tuple[str, str]:
    """The place and the reason; of a union's branches that of the one which went furthest, and knew the type."""
    placed = [(_place(found, fields), found) for found in error.errors()]
    place, found = max(placed, key=lambda pair: (len(pair[0]), not pair[1]["type"].endswith("_type")))
    reason = "Input should be an object" if found["type"] == "model_type" else found["msg"]
    return ".".join(place), reason.removeprefix("Value error, ")


def _place(found: Any, fields: dict[str, Any]) -> list[str]:
    """The keys that lead to an error; the others of pydantic's name the branches of unions."""
    place, node = [], fields
    for key in found["loc"]:
        if isinstance(node, str):  # JSON in JSON
            with suppress(ValueError):
                node = json.loads(node)
        if (isinstance(node, dict) and key in node) or (isinstance(node, list) and isinstance(key, int)):
            place.append(str(key))
            node = node[key]
    return [*place, str(found["loc"][-1])] if found["type"] == "missing" else place


def _impossible(request: Sampling, limits: Limits) -> Iterator[tuple[str, str]]:
    for field, value in (request.model_extra or {}).items():
        if value is None or field in request.labels:
            continue
        if field not in request.only:
            yield field, "is not read by this server; leave it out"
        elif value not in request.only[field]:
            usual = " or ".join(map(repr, request.only[field]))
            yield field, f"{value!r} is not supported by this server; leave it out, or send {usual}"
    lengths = {name: getattr(request, name) for name in request.lengths if getattr(request, name) is not None}
    if len(set(lengths.values())) > 1:
        yield request.lengths[0], f"says another length than {request.lengths[1]}; send one of them"
    if isinstance(request, ChatRequest | ResponseRequest):
        yield from _not_in_template(request, limits)
    yield from _drawn_amiss(request, limits.samples)
    if limits.shared is not None:
        yield from _not_shared(request, limits.shared)


def _not_in_template(request: ChatRequest | ResponseRequest, limits: Limits) -> Iterator[tuple[str, str]]:
    """What the chat template leaves out of the prompt."""
    turns = request.messages if isinstance(request, ChatRequest) else request.input
    where = "messages" if isinstance(request, ChatRequest) else "input"
    if not limits.template:
        yield where, "this model has no chat template, and goes on with texts: ask /v1/completions"
    if request.tools and "tools" not in limits.template:
        yield "tools", "the chat template of this model has no place for tools"
    called = [turn for turn in turns if getattr(turn, "type", "") == "function_call" or _calls(turn)]
    if called and "tool_calls" not in limits.template:
        yield where, "the chat template of this model has no place for calls of tools"
    for name in getattr(request, "chat_template_kwargs", None) or ():
        if name not in limits.variables:
            known = ", ".join(sorted(limits.variables)) or "none"
            yield "chat_template_kwargs", f"{name!r} is no variable of the chat template that can be set: {known}"


def _calls(turn: Any) -> bool:
    return isinstance(turn, Message) and bool(turn.tool_calls)


def asks_to_sample(temperature: float | None, top_p: float | None) -> bool | None:
    """Whether the fields of OpenAI's interface ask to draw tokens; None: they do not say."""
    if temperature is not None:
        return temperature > 0
    return None if top_p in (None, 1) else True


def _samples(request: Sampling, usual: bool) -> bool:
    asked = asks_to_sample(request.temperature, request.top_p)
    if asked is None:
        asked = request.generation_config.do_sample if request.generation_config else None
    return usual if asked is None else asked


def _drawn_amiss(request: Sampling, usual: bool) -> Iterator[tuple[str, str]]:
    """Settings of sampling where nobody has asked to sample; who says `do_sample: false` knows."""
    settings = request.generation_config or Settings()
    if _samples(request, usual):
        if request.temperature is None and settings.temperature == 0:
            yield "generation_config.temperature", "at 0 nothing is drawn: set do_sample to false"
    elif settings.do_sample is None:
        for name in SAMPLING:
            if getattr(settings, name) not in (None, defaults()[name]):
                yield f"generation_config.{name}", "has no effect without do_sample: true"


def _not_shared(request: Sampling, shared: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Under continuous batching the library samples all requests alike, and ignores what one of them asks for."""
    described = ("do_sample", *SAMPLING) if shared["do_sample"] else ("do_sample",)
    values = ", ".join(f"{name}={shared[name]}" for name in described if shared.get(name) is not None)
    sampled = _samples(request, shared["do_sample"])
    for field, name, value in _asked(request):
        same = value == shared.get(name)
        if name in ("do_sample", *SAMPLING):
            same = sampled == shared["do_sample"] and (same or not sampled)
        if not same:
            yield (
                field,
                f"under continuous batching all requests are sampled alike ({values}); leave it out, or ask a server "
                "without it",
            )


def _asked(request: Sampling) -> Iterator[tuple[str, str, Any]]:
    """The fields that are set, the settings that they stand for, and their values."""
    for name in ("temperature", "top_p", "seed"):
        if (value := getattr(request, name)) is not None:
            yield name, name, value
    if isinstance(request, BiasedSampling):
        if request.frequency_penalty:
            yield "frequency_penalty", "repetition_penalty", 1 + request.frequency_penalty
        if request.stop:
            yield "stop", "stop_strings", request.stop
        if request.logit_bias:
            yield "logit_bias", "sequence_bias", request.logit_bias
    settings = request.generation_config or Settings()
    for name in Settings.model_fields:
        if name not in PER_ANSWER and (value := getattr(settings, name)) is not None:
            yield f"generation_config.{name}", name, value
