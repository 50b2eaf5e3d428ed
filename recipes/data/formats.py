"""The forms that rows of training data take, and what each becomes.

Every row comes out in the canonical form of its format:

    text                  {"text": ...}
    prompt-completion     {"prompt": ..., "completion": ...}
    messages              {"messages": [{"role": ..., "content": ...}, ...]}
    preference            {"prompt": ..., "chosen": ..., "rejected": ...}, and "margin": number where it is given
    unpaired-preference   {"prompt": ..., "completion": ..., "label": true or false}
    classification        {"text": ..., "label": a class as text or whole number, a list of names, or any number}
    token-classification  {"tokens": [text, ...], "tags": [text or whole number, ...]}
    source-target         {"source": ..., "target": ...}
    prompt                {"prompt": ..., and all other columns as they are}

Prompts, completions, chosen and rejected are all text or all lists of messages; a message that is not to be trained on
has `"train": False`. A reason why a row cannot be used never quotes the row's content.
"""

import sys
from collections.abc import Callable, Collection
from typing import Any, NamedTuple

from .files import clip, type_name

FORMATS = (
    "text",
    "prompt-completion",
    "messages",
    "preference",
    "unpaired-preference",
    "classification",
    "token-classification",
    "source-target",
    "prompt",
    "tokens",  # a folder of token shards, which has no rows of its own: see `recipes/shards`
)
# Margins are differences of rewards; beyond this the loss is all margin.
MAX_MARGIN = 1_000_000
ROLES = ("system", "user", "assistant")

Row = dict[str, Any]


class Unusable(Exception):
    """Why a row cannot be used."""


class Shape(NamedTuple):
    """A form of row met in practice.

    Attributes:
        name: what it is called in reports.
        format: the format of what it becomes.
        keys: the columns that mark it.
        optional: further columns that it uses.
        convert: raises `Unusable`.
        keeps_rest: the other columns stay in the row.
        on_request: only taken where `data.format` asks for its format, because it leaves out what the row is about.
    """

    name: str
    format: str
    keys: tuple[str, ...]
    optional: tuple[str, ...]
    convert: Callable[[Row], Row]
    keeps_rest: bool = False
    on_request: bool = False

    def fits(self, row: Row) -> bool:
        return set(self.keys) <= row.keys()

    def describe(self, converted: Row) -> str:
        """What a row was taken for: all rows of a run must agree in it."""
        kind = self.name
        if isinstance(converted.get("prompt"), list) and "messages" not in kind:
            kind += " as messages"
        if self.format == "classification":
            kind += f" with labels as {_kind_of_label(converted['label'])}"
        if self.format == "token-classification":
            kind += f" with tags as {_kind_of_label(converted['tags'][0])}"
        return kind


# Parts of rows


def _text(value: Any, name: str, *, may_be_empty: bool = False) -> str:
    if not isinstance(value, str):
        raise Unusable(f"{name} must be text, found {type_name(value)}")
    if not may_be_empty and not value.strip():
        raise Unusable(f"{name} is empty")
    if not value.isascii() and any("\ud800" <= char <= "\udfff" for char in value):
        raise Unusable(f"{name} holds half of a surrogate pair, which is no character")
    return value


def _messages(value: Any, name: str, *, role_key: str = "role", content_key: str = "content") -> list[Row]:
    if not isinstance(value, list):
        raise Unusable(f"{name} must be a list of messages, found {type_name(value)}")
    if not value:
        raise Unusable(f"{name} is empty")
    messages = []
    for index, message in enumerate(value):
        here = f"{name}[{index}]"
        if not isinstance(message, dict):
            raise Unusable(f"{here} must be an object with {role_key} and {content_key}")
        for key in ("tool_calls", "function_call"):
            # Leaving these out would train on something else than the file says.
            if message.get(key) is not None:
                raise Unusable(f"{here} has {key}, which is not supported")
        role = message.get(role_key)
        role = _SHAREGPT_ROLES.get(role, role) if role_key == "from" and isinstance(role, str) else role
        if role not in ROLES:
            raise Unusable(f"{here}.{role_key} must be system, user or assistant")
        content = _text(message.get(content_key), f"{here}.{content_key}", may_be_empty=True)
        messages.append({"role": role, "content": content} | _switch(message, here))
    return messages


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


def _ends_with_assistant(messages: list[Row], name: str) -> list[Row]:
    if messages[-1]["role"] != "assistant":
        raise Unusable(f"{name} must end with an assistant message, ends with {messages[-1]['role']}")
    _text(messages[-1]["content"], f"the last assistant message of {name}")
    return messages


def _prompt(value: Any) -> str | list[Row]:
    if not isinstance(value, list):
        return _text(value, "prompt")
    messages = _messages(value, "prompt")
    if not any(message["content"].strip() for message in messages):
        raise Unusable("prompt is empty")
    return messages


def _optional(row: Row, name: str) -> str:
    return "" if row.get(name) is None else _text(row[name], name, may_be_empty=True)


def _system(row: Row) -> list[Row]:
    text = _optional(row, "system")
    return [{"role": "system", "content": text}] if text.strip() else []


def _label(value: Any, name: str) -> str | int:
    if isinstance(value, str):
        return _text(value, name)
    if isinstance(value, bool) or not isinstance(value, int):
        raise Unusable(f"{name} must be text or a whole number, found {_number_or_type(value)}")
    if value < 0:
        raise Unusable(f"{name} is negative: classes are counted from 0")
    return value


def _number_or_type(value: Any) -> str:
    return "a number with a fraction" if isinstance(value, float) else type_name(value)


def _kind_of_label(value: str | float | list[str]) -> str:
    return "lists" if isinstance(value, list) else "text" if isinstance(value, str) else "numbers"


# One row -> its canonical form


def _from_messages(row: Row) -> Row:
    return {"messages": _ends_with_assistant(_messages(row["messages"], "messages"), "messages")}


def _from_sharegpt(row: Row) -> Row:
    value = row["conversations"]
    openai = isinstance(value, list) and value and isinstance(value[0], dict) and "role" in value[0]
    keys = {} if openai else {"role_key": "from", "content_key": "value"}
    messages = _messages(value, "conversations", **keys)
    return {"messages": _system(row) + _ends_with_assistant(messages, "conversations")}


def _from_prompt_completion(row: Row) -> Row:
    prompt, completion = row["prompt"], row["completion"]
    if isinstance(prompt, list) != isinstance(completion, list) and None not in (prompt, completion):
        raise Unusable("prompt and completion must be both text or both lists of messages")
    return {"prompt": _prompt(prompt), "completion": _answer(completion, "completion")}


def _answer(value: Any, name: str) -> str | list[Row]:
    return _ends_with_assistant(_messages(value, name), name) if isinstance(value, list) else _text(value, name)


def _from_alpaca(row: Row) -> Row:
    request = _text(row["instruction"], "instruction")
    extra = _optional(row, "input")
    prompt = f"{request}\n\n{extra}" if extra.strip() else request
    answer = {"role": "assistant", "content": _text(row["output"], "output")}
    return {"prompt": [*_system(row), {"role": "user", "content": prompt}], "completion": [answer]}


def _from_preference(row: Row) -> Row:
    """Chosen and rejected may repeat the prompt, as many published files do; it is taken off."""
    return _preference(row) | _margin(row)


def _margin(row: Row) -> Row:
    """By how much the chosen answer is better, where the row says so."""
    margin = row.get("margin")
    if margin is None:
        return {}
    if isinstance(margin, bool) or not isinstance(margin, int | float):
        raise Unusable(f"margin must be a number, found {type_name(margin)}")
    if not abs(margin) <= MAX_MARGIN:  # neither is NaN
        raise Unusable(f"margin must be a finite number of at most {MAX_MARGIN:,} in size")
    return {"margin": float(margin)}


def _preference(row: Row) -> Row:
    prompt, chosen, rejected = (row[name] for name in ("prompt", "chosen", "rejected"))
    if not isinstance(chosen, list) and not isinstance(rejected, list):
        if isinstance(prompt, list):
            raise Unusable("prompt, chosen and rejected must be all text or all lists of messages")
        return _pair(_prompt(prompt), _text(chosen, "chosen"), _text(rejected, "rejected"))
    answers = [_answer_messages(value, name) for value, name in ((chosen, "chosen"), (rejected, "rejected"))]
    if isinstance(prompt, list):
        asked = _prompt(prompt)
        repeated = all(len(answer) > len(asked) and answer[: len(asked)] == asked for answer in answers)
        if not repeated and not all(answer[0]["role"] == "assistant" for answer in answers):
            raise Unusable("chosen and rejected must be answers, or begin with all messages of prompt")
        return _pair(asked, *(answer[len(asked) :] if repeated else answer for answer in answers))
    if all(answer[0]["role"] == "assistant" for answer in answers):
        raise Unusable("prompt, chosen and rejected must be all text or all lists of messages")
    # The prompt once as text, and again as messages in front of the answers.
    converted = _split_prompt(*answers)
    if converted["prompt"][-1]["content"].strip() != _text(prompt, "prompt").strip():
        raise Unusable("prompt is not the last user message of chosen and rejected")
    return converted


def _answer_messages(value: Any, name: str) -> list[Row]:
    return _ends_with_assistant(_messages(value, name), name)


def _from_implicit_preference(row: Row) -> Row:
    if isinstance(row["chosen"], str) and isinstance(row["rejected"], str):
        raise Unusable("chosen and rejected are text, so a prompt is needed beside them")
    return _split_prompt(*(_answer_messages(row[name], name) for name in ("chosen", "rejected"))) | _margin(row)


def _split_prompt(chosen: list[Row], rejected: list[Row]) -> Row:
    """The messages that both begin with are the prompt."""
    shared = 0
    while shared < min(len(chosen), len(rejected)) and chosen[shared] == rejected[shared]:
        shared += 1
    # An answer that both begin with belongs to the prompt only with the question after it.
    while shared and chosen[shared - 1]["role"] != "user":
        shared -= 1
    if not shared:
        raise Unusable("chosen and rejected must begin with the same messages, up to one of the user")
    return _pair(chosen[:shared], chosen[shared:], rejected[shared:])


def _chosen(pair: Row) -> Row:
    return {"prompt": pair["prompt"], "completion": pair["chosen"]}


def _pair(prompt: Any, chosen: Any, rejected: Any) -> Row:
    if chosen == rejected:
        raise Unusable("chosen and rejected are the same")
    return {"prompt": prompt, "chosen": chosen, "rejected": rejected}


def _from_unpaired(row: Row) -> Row:
    label = row["label"]
    if not isinstance(label, bool):
        raise Unusable(f"label must be true (wanted) or false (unwanted), found {type_name(label)}")
    return _from_prompt_completion(row) | {"label": label}


def _from_classification(row: Row) -> Row:
    text, label = _text(row["text"], "text"), row["label"]
    if isinstance(label, list):  # none, one or several names
        return {"text": text, "label": [_text(name, f"label[{i}]") for i, name in enumerate(label)]}
    if isinstance(label, str):
        return {"text": text, "label": _text(label, "label")}
    if isinstance(label, bool) or not isinstance(label, int | float):
        raise Unusable(f"label must be text, a number or a list of text, found {type_name(label)}")
    if not abs(label) <= sys.float_info.max:  # neither is NaN, nor a whole number of 400 digits
        raise Unusable("label is not a finite number")
    return {"text": text, "label": label}


def _from_token_classification(row: Row) -> Row:
    tokens, tags = row["tokens"], row["tags"]
    for name, value in (("tokens", tokens), ("tags", tags)):
        if not isinstance(value, list):
            raise Unusable(f"{name} must be a list, found {type_name(value)}")
    if not tokens:
        raise Unusable("tokens is empty")
    if len(tokens) != len(tags):
        raise Unusable(f"{len(tokens)} tokens but {len(tags)} tags")
    words = [_text(token, f"tokens[{i}]") for i, token in enumerate(tokens)]
    labels = [_label(tag, f"tags[{i}]") for i, tag in enumerate(tags)]
    if len({type(label) for label in labels}) > 1:
        raise Unusable("tags mixes text and numbers")
    return {"tokens": words, "tags": labels}


def _from_source_target(row: Row) -> Row:
    return {name: _text(row[name], name) for name in ("source", "target")}


def _from_prompt(row: Row) -> Row:
    prompt = _prompt(row["prompt"])
    if isinstance(prompt, list):
        if prompt[-1]["role"] == "assistant":
            raise Unusable("prompt ends with an assistant message, which leaves nothing to answer: leave that one out")
        # Nothing of a prompt is trained on, whatever a message says.
        prompt = [{name: message[name] for name in ("role", "content")} for message in prompt]
    return row | {"prompt": prompt}


def prompt_of(row: Row) -> Any:
    """The prompt of a row, a text or messages up to the one that is to be answered.

    Raises:
        Unusable: there is none.
    """
    if "prompt" not in row:
        raise Unusable("has no `prompt`")
    return _from_prompt(row)["prompt"]


_SHAREGPT_ROLES = {"human": "user", "gpt": "assistant", "chatgpt": "assistant", "bing": "assistant"}

# The richest first: a row is taken for the first that it fits.
SHAPES = (
    Shape("preference pairs", "preference", ("prompt", "chosen", "rejected"), ("margin",), _from_preference),
    Shape(
        "preference pairs, their shared messages taken as the prompt",
        "preference",
        ("chosen", "rejected"),
        ("margin",),
        _from_implicit_preference,
    ),
    Shape("messages", "messages", ("messages",), (), _from_messages),
    Shape(
        "ShareGPT (conversations), converted to messages", "messages", ("conversations",), ("system",), _from_sharegpt
    ),
    Shape(
        "unpaired preference (prompt, completion, label)",
        "unpaired-preference",
        ("prompt", "completion", "label"),
        (),
        _from_unpaired,
    ),
    Shape("prompt and completion", "prompt-completion", ("prompt", "completion"), (), _from_prompt_completion),
    Shape(
        "Alpaca (instruction, input, output), converted to messages",
        "prompt-completion",
        ("instruction", "output"),
        ("input", "system"),
        _from_alpaca,
    ),
    Shape(
        "the chosen answers of preference pairs",
        "prompt-completion",
        ("prompt", "chosen", "rejected"),
        (),
        lambda row: _chosen(_from_preference(row)),
        on_request=True,
    ),
    Shape(
        "the chosen answers of preference pairs, their shared messages taken as the prompt",
        "prompt-completion",
        ("chosen", "rejected"),
        (),
        lambda row: _chosen(_from_implicit_preference(row)),
        on_request=True,
    ),
    Shape("tokens and tags", "token-classification", ("tokens", "tags"), (), _from_token_classification),
    Shape("source and target", "source-target", ("source", "target"), (), _from_source_target),
    Shape("text and label", "classification", ("text", "label"), (), _from_classification),
    Shape("text", "text", ("text",), (), lambda row: {"text": _text(row["text"], "text")}),
    Shape("prompt alone", "prompt", ("prompt",), (), _from_prompt, keeps_rest=True),
)


CHOSEN_HINT = " as they are; data.format: prompt-completion takes the chosen answers alone"


def hint(row: Row, formats: Collection[str]) -> str:
    """What would make a row usable that fits no shape, or ""."""
    if {"chosen", "rejected"} <= row.keys() and "prompt-completion" in formats:
        return f"is preference pairs, which the objective cannot use{CHOSEN_HINT}"
    value = row.get("translation")
    if isinstance(value, dict) and "source-target" in formats:
        return (
            f"translation holds a text for each language ({clip(value)}): say which is which, as "
            "data.columns: {source: translation.en, target: translation.de} does"
        )
    return ""
