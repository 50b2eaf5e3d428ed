"""Messages, tool calls and tools of a row, as files have them, in one form; see `formats`."""

import json
from typing import Any

from .files import type_name
from .parsing import Fault, parse_json

# Columns that may hold messages.
MESSAGES = frozenset({"messages", "conversations", "prompt", "completion", "chosen", "rejected"})
ROLES = ("system", "user", "assistant", "tool")
_SHAREGPT_ROLES = {
    "human": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bing": "assistant",
    "function_call": "assistant",
    "observation": "tool",
}

# What some files keep beside an answer: the thoughts before it.
_REASONING = ("reasoning_content", "reasoning", "thinking")

Row = dict[str, Any]


class Unusable(Exception):
    """Why a row cannot be used."""


def text_of(value: Any, name: str, *, may_be_empty: bool = False) -> str:
    if not isinstance(value, str):
        raise Unusable(f"{name} must be text, found {type_name(value)}")
    if not may_be_empty and not value.strip():
        raise Unusable(f"{name} is empty")
    if not value.isascii() and any("\ud800" <= char <= "\udfff" for char in value):
        raise Unusable(f"{name} holds half of a surrogate pair, which is no character")
    return value


def messages_of(value: Any, name: str, *, role_key: str = "role", content_key: str = "content") -> list[Row]:
    if not isinstance(value, list):
        raise Unusable(f"{name} must be a list of messages, found {type_name(value)}")
    if not value:
        raise Unusable(f"{name} is empty")
    return [_message(message, f"{name}[{index}]", role_key, content_key) for index, message in enumerate(value)]


def _message(message: Any, here: str, role_key: str, content_key: str) -> Row:
    if not isinstance(message, dict):
        raise Unusable(f"{here} must be an object with {role_key} and {content_key}")
    if lost := [key for key in _REASONING if message.get(key)]:
        # Leaving it out would train an answer without the thoughts that led to it.
        raise Unusable(f"{here} has {lost[0]}, which is not read: write it into {content_key} as the template would")
    if message.get("function_call") is not None:
        # Leaving it out would train on something else than the file says.
        raise Unusable(f"{here} has function_call, which OpenAI has given up: write tool_calls")
    given = message.get(role_key)
    role = _SHAREGPT_ROLES.get(given, given) if role_key == "from" and isinstance(given, str) else given
    if role not in ROLES:
        raise Unusable(f"{here}.{role_key} must be system, user, assistant or tool")
    content, calls = message.get(content_key), message.get("tool_calls")
    if role_key == "from" and given == "function_call":
        content, calls = "", _json(content, f"{here}.{content_key}")
        calls = calls if isinstance(calls, list) else [calls]
    if calls:  # some libraries write an empty list or null into every message
        if role != "assistant":
            raise Unusable(f"{here} has tool_calls, which only an assistant's message may have")
        content = "" if content is None else content
    found = {"role": role, "content": text_of(content, f"{here}.{content_key}", may_be_empty=True)}
    if calls:
        found["tool_calls"] = _calls(calls, f"{here}.tool_calls")
    if role == "tool":
        names = {key: message[key] for key in ("tool_call_id", "name") if message.get(key) is not None}
        found |= {key: text_of(text, f"{here}.{key}") for key, text in names.items()}
    return found | _switch(message, here)


_USED = {"role", "content", "from", "value", "train", "weight", "tool_calls"}


def not_used(value: Any, name: str) -> set[str]:
    """What the messages of a column hold beside what is read of them, such as `messages.name`."""
    if not isinstance(value, list):
        return set()
    found = set()
    for message in filter(lambda item: isinstance(item, dict), value):
        used = _USED | ({"tool_call_id", "name"} if message.get("role") == "tool" else set())
        # Libraries write null, or an empty list, for what a message does not have.
        found |= {f"{name}.{str(key)[:40]}" for key in message.keys() - used if message[key] not in (None, [], "")}
    return found


def sharegpt_messages(value: Any, name: str) -> list[Row]:
    """ShareGPT's `from` and `value`, or what files of that kind have in the same column in OpenAI's form."""
    openai = isinstance(value, list) and value and isinstance(value[0], dict) and "role" in value[0]
    keys = {} if openai else {"role_key": "from", "content_key": "value"}
    return messages_of(value, name, **keys)


def _switch(message: Row, here: str) -> Row:
    """`{"train": False}` for a turn that is not trained on: `train: false`, or OpenAI's `weight: 0`."""
    train, weight = message.get("train"), message.get("weight")
    if train is not None and not isinstance(train, bool):
        raise Unusable(f"{here}.train must be true or false, found {type_name(train)}")
    if weight is not None and (isinstance(weight, bool) or weight not in (0, 1)):
        raise Unusable(f"{here}.weight must be 0 or 1")
    if train is not None and weight is not None and train != bool(weight):
        raise Unusable(f"{here} has train and weight, which contradict each other")
    return {"train": False} if train is False or weight == 0 else {}


def ends_with_assistant(messages: list[Row], name: str) -> list[Row]:
    last = messages[-1]
    if last["role"] != "assistant":
        raise Unusable(f"{name} must end with an assistant message, ends with {last['role']}")
    if not last.get("tool_calls"):
        text_of(last["content"], f"the last assistant message of {name}")
    return messages


def answer(value: Any, name: str) -> str | list[Row]:
    return ends_with_assistant(messages_of(value, name), name) if isinstance(value, list) else text_of(value, name)


def system_message(row: Row) -> list[Row]:
    text = "" if row.get("system") is None else text_of(row["system"], "system", may_be_empty=True)
    return [{"role": "system", "content": text}] if text.strip() else []


# Tools


def _json(value: Any, name: str) -> Any:
    """A value that may be written as JSON text."""
    if not isinstance(value, str):
        return value
    try:
        return parse_json(value)
    except Fault as fault:
        raise Unusable(f"{name} is text that is no JSON: {fault}") from None


def _calls(value: Any, name: str) -> list[Row]:
    if not isinstance(value, list):
        raise Unusable(f"{name} must be a list of calls, found {type_name(value)}")
    return [_call(call, f"{name}[{index}]") for index, call in enumerate(value)]


def _call(call: Any, here: str) -> Row:
    function, where = _function(call, here, "arguments")
    arguments = _json(function.get("arguments"), f"{where}.arguments")
    if not isinstance(arguments, dict):
        raise Unusable(f"{where}.arguments must be an object, or one as JSON text, found {type_name(arguments)}")
    _characters(arguments, f"{where}.arguments")
    found: Row = {"type": "function", "function": {"name": function["name"], "arguments": arguments}}
    if call.get("id") is not None:
        found["id"] = text_of(call["id"], f"{here}.id")
    return found


def _function(value: Any, here: str, beside: str) -> tuple[Row, str]:
    """A function as OpenAI has it, in `function`, or by itself; and where it is."""
    if not isinstance(value, dict):
        raise Unusable(f"{here} must be an object with name and {beside}, found {type_name(value)}")
    if value.get("type", "function") != "function" and ("function" in value or "name" not in value):
        raise Unusable(f"{here}.type must be function")
    function, where = (value["function"], f"{here}.function") if "function" in value else (value, here)
    if not isinstance(function, dict):
        raise Unusable(f"{where} must be an object with name and {beside}, found {type_name(function)}")
    text_of(function.get("name"), f"{where}.name")
    return function, where


def _characters(value: Any, name: str) -> None:
    """Raises Unusable for half characters anywhere in a JSON value."""
    text_of(json.dumps(value, ensure_ascii=False, default=str), name)


def tools_of(row: Row) -> Row:
    """`{"tools": [...]}` where a row offers tools: a list of functions with JSON schemas, or such a list as JSON text;
    else nothing."""
    value = row.get("tools")
    if value is None or value == "":
        return {}
    tools = _json(value, "tools")
    if not isinstance(tools, list):
        raise Unusable(f"tools must be a list of functions, or one as JSON text, found {type_name(tools)}")
    found = []
    for index, tool in enumerate(tools):
        here = f"tools[{index}]"
        function, where = _function(_json(tool, here), here, "parameters")
        parameters = _json(function.get("parameters"), f"{where}.parameters")
        if parameters is not None and not isinstance(parameters, dict):
            raise Unusable(f"{where}.parameters must be a JSON schema, found {type_name(parameters)}")
        _characters(function, where)
        schema = {} if parameters is None else {"parameters": parameters}
        found.append({"type": "function", "function": function | schema})
    return {"tools": found} if found else {}
