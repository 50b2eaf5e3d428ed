"""The forms that rows of training data take, and what each becomes.

Every row comes out in the canonical form of its format:

    text                  {"text": ...}
    prompt-completion     {"prompt": ..., "completion": ...}
    messages              {"messages": [message, ...]}
    preference            {"prompt": ..., "chosen": ..., "rejected": ...}, and "margin": number where it is given
    scored                {"prompt": ..., "completions": [..., ...], "scores": [number, ...]}
    unpaired-preference   {"prompt": ..., "completion": ..., "label": true or false}
    classification        {"text": ..., "label": a class as text or whole number, a list of names, or any number}
    token-classification  {"tokens": [text, ...], "tags": [text or whole number, ...]}
    source-target         {"source": ..., "target": ...}
    prompt                {"prompt": ..., and all other columns as they are}

Prompts, completions, chosen and rejected are all text or all lists of messages. A message is

    {"role": "system", "user", "assistant" or "tool", "content": text, which may be empty}

and has, where the file says so, `"train": False` (it is not to be trained on); of an assistant `"tool_calls"`, a list
of

    {"type": "function", "function": {"name": text, "arguments": {...}}}, and "id": text

and of a tool's result `"tool_call_id"` and `"name"`. A row of messages has `"tools"` where it offers some: a list of

    {"type": "function", "function": {"name": text, ... the rest as the file has it}}

A reason why a row cannot be used never quotes the row's content.
"""

import sys
from collections.abc import Callable, Collection
from typing import Any, NamedTuple

from . import scored
from .files import clip, type_name
from .messages import (
    Row,
    Unusable,
    answer,
    ends_with_assistant,
    messages_of,
    sharegpt_messages,
    system_message,
    text_of,
    tools_of,
)

FORMATS = (
    "text",
    "prompt-completion",
    "messages",
    "preference",
    "scored",
    "unpaired-preference",
    "classification",
    "token-classification",
    "source-target",
    "prompt",
    "tokens",  # a folder of token shards, which has no rows of its own: see `recipes/shards`
)
# Margins are differences of rewards; beyond this the loss is all margin.
MAX_MARGIN = 1_000_000
# Other names of columns that are met.
_ALIASES = {"completions": ("responses",), "scores": ("rewards",)}


Gather = Callable[[list[Row]], scored.Gathered]


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
        also: another name under which `data.format` may ask for it: that of the rows before they are gathered.
        gather: makes the canonical rows of a source, of the format `also`, into rows of `format`.
        whole: a row has all that is gathered of its prompt.
    """

    name: str
    format: str
    keys: tuple[str, ...]
    optional: tuple[str, ...]
    convert: Callable[[Row], Row]
    keeps_rest: bool = False
    on_request: bool = False
    also: str = ""
    gather: Gather | None = None
    whole: bool = True

    def fits(self, row: Row) -> bool:
        return all(any(name in row for name in (key, *_ALIASES.get(key, ()))) for key in self.keys)

    def asked_for(self, wanted: str) -> bool:
        """Whether `data.format` asks for it, or leaves the choice."""
        return wanted in (self.format, self.also) if wanted != "auto" else not self.on_request

    @property
    def columns(self) -> set[str]:
        """All columns that it may use."""
        return {name for key in (*self.keys, *self.optional) for name in (key, *_ALIASES.get(key, ()))}

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


def _prompt(value: Any) -> str | list[Row]:
    if not isinstance(value, list):
        return text_of(value, "prompt")
    messages = messages_of(value, "prompt")
    if not any(message["content"].strip() for message in messages):
        raise Unusable("prompt is empty")
    return messages


def _with_tools(row: Row, converted: Row) -> Row:
    """The converted row with the tools of the file's."""
    tools = tools_of(row)
    if tools and not (isinstance(converted.get("prompt"), list) or "messages" in converted):
        raise Unusable("tools are offered in conversations: prompt and answers must be lists of messages")
    return converted | tools


def _label(value: Any, name: str) -> str | int:
    if isinstance(value, str):
        return text_of(value, name)
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
    return {"messages": ends_with_assistant(messages_of(row["messages"], "messages"), "messages")}


def _from_sharegpt(row: Row) -> Row:
    messages = sharegpt_messages(row["conversations"], "conversations")
    return {"messages": system_message(row) + ends_with_assistant(messages, "conversations")}


def _from_prompt_completion(row: Row) -> Row:
    prompt, completion = row["prompt"], row["completion"]
    if isinstance(prompt, list) != isinstance(completion, list) and None not in (prompt, completion):
        raise Unusable("prompt and completion must be both text or both lists of messages")
    return {"prompt": _prompt(prompt), "completion": answer(completion, "completion")}


def _from_alpaca(row: Row) -> Row:
    request = text_of(row["instruction"], "instruction")
    extra = "" if row.get("input") is None else text_of(row["input"], "input", may_be_empty=True)
    prompt = f"{request}\n\n{extra}" if extra.strip() else request
    output = {"role": "assistant", "content": text_of(row["output"], "output")}
    return {"prompt": [*system_message(row), {"role": "user", "content": prompt}], "completion": [output]}


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
        return _pair(_prompt(prompt), text_of(chosen, "chosen"), text_of(rejected, "rejected"))
    answers = [_answer_messages(value, name) for value, name in ((chosen, "chosen"), (rejected, "rejected"))]
    if isinstance(prompt, list):
        asked = _prompt(prompt)
        repeated = all(len(side) > len(asked) and side[: len(asked)] == asked for side in answers)
        if not repeated and not all(side[0]["role"] == "assistant" for side in answers):
            raise Unusable("chosen and rejected must be answers, or begin with all messages of prompt")
        return _pair(asked, *(side[len(asked) :] if repeated else side for side in answers))
    if all(side[0]["role"] == "assistant" for side in answers):
        raise Unusable("prompt, chosen and rejected must be all text or all lists of messages")
    # The prompt once as text, and again as messages in front of the answers.
    converted = _split_prompt(*answers)
    if converted["prompt"][-1]["content"].strip() != text_of(prompt, "prompt").strip():
        raise Unusable("prompt is not the last user message of chosen and rejected")
    return converted


def _answer_messages(value: Any, name: str) -> list[Row]:
    return ends_with_assistant(messages_of(value, name), name)


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


def _from_scored(row: Row) -> Row:
    """Several answers with a score each."""
    prompt = _prompt(row["prompt"])
    (name, answers), (scores_name, scores) = (_given(row, key) for key in ("completions", "scores"))
    for what, value in ((name, answers), (scores_name, scores)):
        if not isinstance(value, list):
            raise Unusable(f"{what} must be a list, found {type_name(value)}")
        if not value:
            raise Unusable(f"{what} is empty")
    if len(answers) != len(scores):
        raise Unusable(f"{len(answers)} {name} but {len(scores)} {scores_name}")
    found = [answer(value, f"{name}[{i}]") for i, value in enumerate(answers)]
    if any(isinstance(value, list) != isinstance(prompt, list) for value in found):
        raise Unusable(f"prompt and {name} must be all text or all lists of messages")
    numbers = [scored.score(value, f"{scores_name}[{i}]") for i, value in enumerate(scores)]
    return {"prompt": prompt, "completions": found, "scores": numbers}


def _from_score(row: Row) -> Row:
    """One answer with its score."""
    pair = _from_prompt_completion(row)
    number = scored.score(row["score"], "score")
    return {"prompt": pair["prompt"], "completions": [pair["completion"]], "scores": [number]}


def _given(row: Row, key: str) -> tuple[str, Any]:
    """A column under its own name or another one, and that name."""
    name = next(name for name in (key, *_ALIASES.get(key, ())) if name in row)
    return name, row[name]


def _from_unpaired(row: Row) -> Row:
    label = row["label"]
    if not isinstance(label, bool):
        raise Unusable(f"label must be true (wanted) or false (unwanted), found {type_name(label)}")
    return _from_prompt_completion(row) | {"label": label}


def _from_classification(row: Row) -> Row:
    text, label = text_of(row["text"], "text"), row["label"]
    if isinstance(label, list):  # none, one or several names
        return {"text": text, "label": [text_of(name, f"label[{i}]") for i, name in enumerate(label)]}
    if isinstance(label, str):
        return {"text": text, "label": text_of(label, "label")}
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
    words = [text_of(token, f"tokens[{i}]") for i, token in enumerate(tokens)]
    labels = [_label(tag, f"tags[{i}]") for i, tag in enumerate(tags)]
    if len({type(label) for label in labels}) > 1:
        raise Unusable("tags mixes text and numbers")
    return {"tokens": words, "tags": labels}


def _from_source_target(row: Row) -> Row:
    return {name: text_of(row[name], name) for name in ("source", "target")}


def _from_prompt(row: Row) -> Row:
    prompt = _prompt(row["prompt"])
    calls = isinstance(prompt, list) and any("tool_calls" in message for message in prompt)
    if calls or (isinstance(prompt, list) and tools_of(row)):
        # What answers prompts renders the messages by themselves.
        raise Unusable("prompt has tools or tool_calls, which are not supported where answers are sampled")
    if isinstance(prompt, list):
        if prompt[-1]["role"] == "assistant":
            raise Unusable("prompt ends with an assistant message, which leaves nothing to answer: leave that one out")
        # Nothing of a prompt is trained on, whatever a message says.
        prompt = [{name: message[name] for name in ("role", "content")} for message in prompt]
    return row | {"prompt": prompt}


def _from_mbpp(row: Row) -> Row:
    return {name: value for name, value in row.items() if name != "text"} | {"prompt": text_of(row["text"], "text")}


def prompt_of(row: Row) -> Any:
    """The prompt of a row, a text or messages up to the one that is to be answered.

    Raises:
        Unusable: there is none.
    """
    if "prompt" not in row:
        raise Unusable("has no `prompt`")
    return _from_prompt(row)["prompt"]


def _offering(convert: Callable[[Row], Row]) -> Callable[[Row], Row]:
    """A conversion that takes the tools of a row along."""
    return lambda row: _with_tools(row, convert(row))


_SCORED = (
    (("prompt", "completions", "scores"), "", _offering(_from_scored)),
    (("prompt", "completion", "score"), ", an answer a row", _offering(_from_score)),
)

# The richest first: a row is taken for the first that it fits.
SHAPES = (
    Shape(
        "preference pairs",
        "preference",
        ("prompt", "chosen", "rejected"),
        ("margin", "tools"),
        _offering(_from_preference),
    ),
    Shape(
        "preference pairs, their shared messages taken as the prompt",
        "preference",
        ("chosen", "rejected"),
        ("margin", "tools"),
        _offering(_from_implicit_preference),
    ),
    Shape("messages", "messages", ("messages",), ("tools",), _offering(_from_messages)),
    Shape(
        "ShareGPT (conversations), converted to messages",
        "messages",
        ("conversations",),
        ("system", "tools"),
        _offering(_from_sharegpt),
    ),
    *(Shape(f"scored answers{how}", "scored", keys, ("tools",), convert) for keys, how, convert in _SCORED),
    *(
        Shape(
            f"scored answers{how}, the best against the worst",
            "preference",
            keys,
            ("tools",),
            convert,
            also="scored",
            gather=scored.pairs,
            whole=not how,
        )
        for keys, how, convert in _SCORED
    ),
    Shape(
        "unpaired preference (prompt, completion, label)",
        "unpaired-preference",
        ("prompt", "completion", "label"),
        ("tools",),
        _offering(_from_unpaired),
    ),
    Shape(
        "prompt and completion",
        "prompt-completion",
        ("prompt", "completion"),
        ("tools",),
        _offering(_from_prompt_completion),
    ),
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
        ("tools",),
        _offering(lambda row: _chosen(_from_preference(row))),
        on_request=True,
    ),
    Shape(
        "the chosen answers of preference pairs, their shared messages taken as the prompt",
        "prompt-completion",
        ("chosen", "rejected"),
        ("tools",),
        _offering(lambda row: _chosen(_from_implicit_preference(row))),
        on_request=True,
    ),
    Shape(
        "the best of scored answers",
        "prompt-completion",
        ("prompt", "completions", "scores"),
        ("tools",),
        _offering(_from_scored),
        on_request=True,
        gather=scored.best,
    ),
    Shape("tokens and tags", "token-classification", ("tokens", "tags"), (), _from_token_classification),
    Shape("source and target", "source-target", ("source", "target"), (), _from_source_target),
    Shape("text and label", "classification", ("text", "label"), (), _from_classification),
    Shape("text", "text", ("text",), (), lambda row: {"text": text_of(row["text"], "text")}),
    Shape("prompt alone", "prompt", ("prompt",), (), _from_prompt, keeps_rest=True),
    Shape(
        "MBPP (text, test_list), its text taken as the prompt", "prompt", ("text", "test_list"), (), _from_mbpp, True
    ),
)


_BEST = next(shape for shape in SHAPES if shape.gather is scored.best)
CHOSEN_HINT = " as they are; data.format: prompt-completion takes the chosen answers alone"


def hint(row: Row, formats: Collection[str]) -> str:
    """What would make a row usable that fits no shape, or ""."""
    if {"chosen", "rejected"} <= row.keys() and "prompt-completion" in formats:
        return f"is preference pairs, which the objective cannot use{CHOSEN_HINT}"
    if _BEST.fits(row) and "prompt-completion" in formats:
        return (
            "is scored answers, which the objective cannot use as they are; data.format: prompt-completion takes the "
            "best answers alone"
        )
    value = row.get("translation")
    if isinstance(value, dict) and "source-target" in formats:
        return (
            f"translation holds a text for each language ({clip(value)}): say which is which, as "
            "data.columns: {source: translation.en, target: translation.de} does"
        )
    return ""
