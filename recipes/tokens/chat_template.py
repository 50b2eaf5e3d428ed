"""Where the turns of a conversation stand in the text that a chat template makes of it.

A conversation is rendered a second time with placeholders for its texts; where they come out, the texts must stand, and
everything around must be the same. A turn that the template lays out anew, as it does with tool calls and reasoning,
lies between what stands before and behind it. What cannot be told for certain is refused.
"""

import json
import re
from collections.abc import Callable, Sequence
from functools import cached_property
from itertools import pairwise, product
from typing import Any, NamedTuple

from ..errors import UserError
from .alignment import Span, between, placed, stems_from

Message = dict[str, Any]
Tools = list[Any] | None

_PLACEHOLDER = "anyformerPLACEHOLDER"
_MARKERS = re.compile(r"\{%-?\s*generation\s*-?%\}")
# A made-up call; its id is one that templates take which want nine letters or digits.
_CALL: dict[str, Any] = {"id": "anyformer", "type": "function", "function": {"name": "f", "arguments": {}}}


class _Failed(Exception):
    """A template refuses a conversation, or breaks on it."""


class _Call(NamedTuple):
    """What a template writes around the calls of a message.

    Attributes:
        leads: what may stand between the header and the first text of the message, the longest first.
        tail: behind the last arguments, the end token included.
        end: that token.
    """

    leads: tuple[str, ...]
    tail: str
    end: str


class ChatTemplate:
    """A tokenizer's chat template, and what it writes around an assistant's message.

    Attributes:
        end_token: the added token that ends the last assistant turn, or None.
        marked: it has `{% generation %}` markers.
        prompts: its generation prompt is what it writes before an answer.
        warnings: oddities of the template that matter in training.
    """

    def __init__(self, tokenizer: Any):
        if not getattr(tokenizer, "chat_template", None):
            raise UserError(
                "The rows are conversations, but the tokenizer has no chat template. Use the tokenizer of an "
                "instruction-tuned model, set a template, or give prompt and completion as plain text."
            )
        self.tokenizer = tokenizer
        self.warnings: list[str] = []
        tokens = {str(token) for token in tokenizer.added_tokens_decoder.values()}
        tokens |= set(tokenizer.all_special_tokens)
        longest_first = sorted(filter(None, tokens), key=len, reverse=True)
        self._end = re.compile(rf"\s*({'|'.join(map(re.escape, longest_first))})") if tokens else None
        self._last = re.compile(rf"({'|'.join(map(re.escape, longest_first))})\s*\Z") if tokens else None
        self.marked = bool(_MARKERS.search(str(tokenizer.chat_template)))
        # How calls are handed over: with an empty text beside them or none, and with arguments as JSON text or not.
        self._empty_text = True
        self._arguments_as_text = False
        self._probe()

    # Rendering

    def render(self, messages: Sequence[Message], tools: Tools = None, **options: Any) -> str:
        """The text of a conversation, as `apply_chat_template` writes it.

        Raises:
            UserError: the template refuses it.
        """
        try:
            return self._render(messages, tools, **options)
        except _Failed as error:
            raise UserError(f"The chat template refuses the conversation: {error}") from error

    def _render(self, messages: Sequence[Message], tools: Tools = None, **options: Any) -> str:
        return self._guarded(
            lambda: self.tokenizer.apply_chat_template(
                self._handed_over(messages), tools=tools, tokenize=False, **options
            )
        )

    def _render_marked(self, messages: Sequence[Message], tools: Tools) -> tuple[str, list[Span]]:
        """The text, and what the template's own markers hold of it."""
        from transformers.utils.chat_template_utils import render_jinja_template

        texts, marked = self._guarded(
            lambda: render_jinja_template(
                [self._handed_over(messages)],
                tools=tools,
                chat_template=self.tokenizer.get_chat_template(tools=tools),
                return_assistant_tokens_mask=True,
                **self.tokenizer.special_tokens_map,
            )
        )
        return texts[0], [(start, end) for start, end in marked[0] if start < end]

    @staticmethod
    def _guarded(render: Callable[[], Any]) -> Any:
        import jinja2

        try:
            return render()
        # What a template does to a value it did not expect is Python's own error.
        except (jinja2.TemplateError, TypeError, ValueError, LookupError, AttributeError) as error:
            raise _Failed(str(error)) from error

    def _handed_over(self, messages: Sequence[Message]) -> list[Message]:
        """Messages as the template wants them: without our own keys, and calls in the form that it can write."""
        found = []
        for message in messages:
            given = {name: value for name, value in message.items() if name != "train"}
            if given.get("tool_calls"):
                if not given["content"] and not self._empty_text:
                    del given["content"]
                if self._arguments_as_text:
                    given["tool_calls"] = [_with_text(call) for call in given["tool_calls"]]
            found.append(given)
        return found

    # Made-up exchanges

    def _probe(self) -> None:
        """Learn from a made-up exchange what follows an answer and what stands before it."""
        question, answer = {"role": "user", "content": "Question"}, {"role": "assistant", "content": _PLACEHOLDER}
        try:
            full, asked = self._render([question, answer]), self._render([question])
            prompted = self._render([question], add_generation_prompt=True)
        except _Failed as error:
            raise UserError(f"The chat template fails on a plain exchange: {error}") from error
        if full.count(_PLACEHOLDER) != 1:
            raise UserError("The chat template does not write an assistant message's text exactly once.")
        start = full.index(_PLACEHOLDER)
        match = self._end.match(full, start + len(_PLACEHOLDER)) if self._end else None
        self.end_token = match.group(1) if match else None
        # What stands between the generation prompt and the answer (a space, an empty think block) is the
        # model's to write. A template without a generation prompt leaves only blank space to the model.
        self._lead = ""
        self.prompts = prompted != asked and full.startswith(prompted) and len(prompted) <= start
        self.leads: dict[str, int] = {}  # text before an answer -> how much of it is the model's to write
        if full.startswith(prompted) and len(prompted) <= start:
            between_them = full[len(prompted) : start]
            self._lead = between_them if prompted != asked or not between_them.strip() else ""
            if between_them.strip() and prompted == asked:
                self.warnings.append(
                    "the chat template ignores add_generation_prompt: generation would start before the "
                    "assistant's header, which is not trained on"
                )
        else:
            self.warnings.append(
                "the chat template's generation prompt differs from what it writes before an assistant "
                "message: the model will be prompted otherwise than it was trained"
            )

    def require_end_token(self) -> None:
        """Raises UserError where a model trained on this template could never learn to stop."""
        if self.end_token is None:
            raise UserError(
                "The chat template writes no end-of-turn token known to the tokenizer after an assistant "
                "message: the model would never learn to stop. Let it write eos_token there, or add "
                "the token that it writes to the vocabulary."
            )
        if self.marked:
            exchange = [{"role": "user", "content": "Question"}, {"role": "assistant", "content": _PLACEHOLDER}]
            text, blocks = self._render_marked(exchange, None)
            stop = text.index(self.end_token, text.index(_PLACEHOLDER)) + len(self.end_token)
            if not any(start < stop <= end for start, end in blocks):
                raise UserError(
                    f"The chat template's {{% generation %}} markers leave out {self.end_token}, which ends an "
                    "assistant's turn: the model would never learn to stop. Move {% endgeneration %} behind it."
                )

    @cached_property
    def call_end(self) -> str | None:
        """The token that ends a turn that calls a tool; None where the template writes no calls."""
        form = self.call_forms[False]
        return form.end if form else None

    @cached_property
    def call_forms(self) -> dict[bool, _Call | None]:
        """What is written around the calls of a message without and with text; settles how they are handed over."""
        for self._arguments_as_text, self._empty_text in product((False, True), (True, False)):
            if alone := self._call_form(""):
                return {False: alone, True: self._call_form(f"{_PLACEHOLDER}0cx")}
        self._arguments_as_text, self._empty_text = False, True
        return {False: None, True: None}

    def _call_form(self, content: str) -> _Call | None:
        call = {"role": "assistant", "content": content, "tool_calls": [_Names("0", _PLACEHOLDER).masked(_CALL, 0)]}
        result = {"role": "tool", "content": "1", "tool_call_id": _CALL["id"], "name": _CALL["function"]["name"]}
        question, answer = {"role": "user", "content": "Question"}, {"role": "assistant", "content": "0"}
        # Reasoning and its tags are written otherwise before a result, and before a later question.
        later = [question, answer]
        found = [
            self._call_in([question, call, *rest], [question, answer, *twin], content)
            for rest, twin in (([], []), ([result, answer], []), ([result, answer, *later], later))
        ]
        last = found[0]
        match = self._last.search(last[1]) if last and self._last else None
        if last is None or match is None:
            return None
        tail = last[1][: match.end(1)]
        leads = {lead for lead, behind in filter(None, found) if behind.startswith(tail)}
        return _Call(tuple(sorted(leads, key=len, reverse=True)), tail, match.group(1))

    def _call_in(self, messages: list[Message], twin: list[Message], content: str) -> tuple[str, str] | None:
        """What stands between the header and a made-up call, and all that follows the call; None where that is not
        certain. The twin of the conversation has the answer 0 in the call's place."""
        try:
            full, plain = self._render(messages), self._render(twin)
            prompted = self._render(messages[:1], add_generation_prompt=True)
        except _Failed:
            return None
        names = _Names("0", _PLACEHOLDER)
        # Python's own way of writing an object is no JSON: such a template wants its arguments as text.
        if not names.all_in(full, 1) or f"'{names.key(0)}'" in full or content not in full:
            return None
        firsts = {match.group(): match for match in reversed(list(re.finditer(rf"{_PLACEHOLDER}0\w+?x", full)))}
        start, end = min(m.start() for m in firsts.values()), max(m.end() for m in firsts.values())
        if self.prompts and full.startswith(prompted) and len(prompted) <= start:
            header = len(prompted)
        else:
            header = next((i for i, (one, other) in enumerate(zip(full, plain, strict=False)) if one != other), 0)
            # What they share may reach into what stands before every answer.
            back = (i for i in range(len(self._lead) + 1) if plain.startswith(f"{self._lead}0", header - i))
            inside = next(back, 0 if plain[header : header + 1] == "0" else None)
            if inside is None:
                return None
            header -= inside
        return full[header:start], full[end:]

    # Turns in a conversation

    def locate(
        self, messages: Sequence[Message], turns: list[int], row: int, tools: Tools = None
    ) -> tuple[str, list[Span]]:
        """Render a conversation and find some of its messages.

        Args:
            turns: indices of the messages, in order.
            row: number of the row, for messages.
            tools: the tools that the row offers.

        Returns:
            The text and the (start, end) of each of these messages in it, end-of-turn token included. Of a template
            with `{% generation %}` markers the spans of assistant turns are what these hold.

        Raises:
            UserError: the template refuses the conversation or leaves a part of it out, or the places are not certain.
        """
        try:
            for _ in range(3):  # a template may write the time: then rendering once more settles it
                conversation = _Conversation(self, list(messages), tools)
                conversation.check_all_is_written()
                spans = conversation.spans(turns)
                if spans is not None or conversation.full == self._render(messages, tools):
                    break
        except _Failed as error:
            raise UserError(f"Row {row}: the chat template refuses the conversation: {error}") from error
        except _LeftOut as error:
            raise UserError(f"Row {row}: the chat template {error}") from error
        if spans is None:
            raise UserError(
                f"Row {row}: cannot tell for certain where the {len(turns)} supervised turns stand in what "
                "the chat template writes. Set objective.loss_on to all, or use a template that writes "
                "messages unchanged and ends every assistant turn with the same token."
            )
        return conversation.full, spans


class _LeftOut(Exception):
    """What of a conversation a template does not write."""


class _Conversation:
    """One conversation under one template."""

    def __init__(self, template: ChatTemplate, messages: list[Message], tools: Tools) -> None:
        self.template, self.messages, self.tools = template, messages, tools
        self.calling = [i for i, message in enumerate(messages) if message.get("tool_calls")]
        if self.calling:
            _ = template.call_forms  # settles how calls are handed over
        self.marked: list[Span] = []
        if template.marked:
            self.full, self.marked = template._render_marked(messages, tools)
        else:
            self.full = template._render(messages, tools)
        self.mark = _PLACEHOLDER
        while self.mark in self.full:
            self.mark += "Q"

    def name(self, turn: int) -> str:
        return f"{self.mark}{turn}cx"

    @cached_property
    def with_texts_masked(self) -> tuple[list[str], list[int]] | None:
        """The pieces around the texts of all messages, and whose these are; None where the template refuses."""
        return self._split([i for i, message in enumerate(self.messages) if message["content"].strip()])

    @cached_property
    def with_calls_masked(self) -> str:
        """The conversation with names, arguments and the text of every message that calls masked."""
        masked = list(self.messages)
        for i in self.calling:
            names, message = _Names(str(i), self.mark), self.messages[i]
            calls = [names.masked(call, number) for number, call in enumerate(message["tool_calls"])]
            text = self.name(i) if message["content"].strip() else message["content"]
            masked[i] = message | {"content": text, "tool_calls": calls}
        return self.template._render(masked, self.tools)

    def _split(self, turns: Sequence[int]) -> tuple[list[str], list[int]] | None:
        masked = list(self.messages)
        for i in turns:
            masked[i] = self.messages[i] | {"content": self.name(i)}
        try:
            text = self.template._render(masked, self.tools)
        except _Failed:
            return None
        pieces = re.split(rf"{self.mark}([0-9]+)cx", text)
        return pieces[::2], [int(number) for number in pieces[1::2]]

    # What is written at all

    def check_all_is_written(self) -> None:
        """Raises:
        _LeftOut: training would be on something else than the row says; names what.
        """
        if self.tools and self.template._render(self.messages) == self.full:
            raise _LeftOut(
                "ignores tools: it writes the same without them. Use a template that writes tools, or take them out"
            )
        for i in self.calling:
            names = _Names(str(i), self.mark)
            if not names.all_in(self.with_calls_masked, len(self.messages[i]["tool_calls"])):
                raise _LeftOut(
                    f"ignores tool calls: it does not write those of message {i + 1} (assistant) with their arguments. "
                    "Use a template that writes tool calls, or write them into the message's content"
                )
        if self.with_texts_masked is None:
            return
        written = set(self.with_texts_masked[1])
        for i, message in enumerate(self.messages):
            if message["content"].strip() and i not in written:
                raise _LeftOut(
                    f"leaves out message {i + 1} ({message['role']}): it does not write its content. Take the message "
                    "out, or use a template that writes it"
                )

    # Where it is written

    def spans(self, turns: list[int]) -> list[Span] | None:
        """The places of the turns; None where they are not certain."""
        if not turns:
            return []
        if self.template.marked and all(self.messages[turn]["role"] == "assistant" for turn in turns):
            return self._by_markers(turns)
        return self._found(turns)

    def _by_markers(self, turns: list[int]) -> list[Span] | None:
        answers = [i for i, message in enumerate(self.messages) if message["role"] == "assistant"]
        if len(answers) == len(self.marked):  # a block for each turn
            return [self.marked[answers.index(turn)] for turn in turns]
        # Several blocks in a turn: those that lie in its own place, with what follows on them.
        own = self._found(answers)
        if own is None:
            return None
        blocks: list[Span] = []
        for start, end in self.marked:
            joined = bool(blocks) and blocks[-1][1] == start
            blocks[len(blocks) - joined :] = [(blocks[-1][0] if joined else start, end)]
        homes = [[i for i, span in zip(answers, own, strict=True) if _overlap(block, span)] for block in blocks]
        if any(len(home) != 1 for home in homes):
            return None
        return [block for block, home in zip(blocks, homes, strict=True) if home[0] in turns]

    def _found(self, turns: list[int]) -> list[Span] | None:
        """By what the template writes around the turns, without markers."""
        calls = [turn for turn in turns if turn in self.calling]
        plain = [turn for turn in turns if turn not in self.calling]
        places: dict[int, Span] = {}
        for wanted, ways in (
            (plain, (self._among_all, self._as_they_are, self._laid_out_anew, self._by_prefixes)),
            (calls, (self._around_calls, self._by_prefixes)),
        ):
            found = next((spans for way in ways if wanted and (spans := way(wanted)) is not None), None)
            if wanted and found is None:
                return None
            places |= dict(zip(wanted, found or [], strict=True))
        spans = [places[turn] for turn in turns]
        apart = all(one[1] <= other[0] for one, other in pairwise(spans))
        return spans if apart and all(start < end for start, end in spans) else None

    def _among_all(self, turns: list[int]) -> list[Span] | None:
        """All texts of the conversation stand where their placeholders did."""
        if self.with_texts_masked is None or not set(turns) <= set(self.with_texts_masked[1]):
            return None
        return self._placed(*self.with_texts_masked, turns)

    def _as_they_are(self, turns: list[int]) -> list[Span] | None:
        """The texts of these turns do; the others decide what the template writes."""
        masked = self._split(turns)
        return self._placed(*masked, turns) if masked else None

    def _placed(self, pieces: list[str], order: list[int], turns: list[int]) -> list[Span] | None:
        if len(set(order)) != len(order) or not set(turns) <= set(order):
            return None
        contents = [(self.messages[i]["role"], self.messages[i]["content"]) for i in order]
        found = placed(pieces, contents, self.full)
        if found is None:
            return None
        spans = {i: self._with_ends(i, before, *span) for i, before, span in zip(order, pieces, found, strict=False)}
        if any(spans[turn] is None for turn in turns):
            return None
        return [span for turn in turns if (span := spans[turn]) is not None]

    def _with_ends(self, turn: int, before: str, start: int, end: int) -> Span | None:
        """The place of a text with what the model writes before it, and the token that ends its turn."""
        answers = self.messages[turn]["role"] == "assistant"
        lead = self._lead_before(turn, before, start) if answers else 0
        match = self.template._end.match(self.full, end) if self.template._end else None
        stops = match is not None and match.group(1) == self.template.end_token
        if answers and not stops:
            return None
        return start - lead, match.end() if match and stops else end

    def _lead_before(self, turn: int, before: str, start: int) -> int:
        """How many characters before a text are the model's to write, since the generation prompt ends there."""
        template = self.template
        if before not in template.leads:
            known = len(template._lead) if before.endswith(template._lead) else 0
            prompt = self._prompt_of(turn)
            room = start - len(prompt)
            template.leads[before] = room if prompt and 0 <= room <= len(before) else known
        return template.leads[before]

    def _prompt_of(self, turn: int) -> str:
        """The generation prompt of a turn, where the whole begins with it."""
        if not turn or not self.template.prompts:
            return ""
        try:
            prompt = self.template._render(self.messages[:turn], self.tools, add_generation_prompt=True)
        except _Failed:
            return ""
        return prompt if self.full.startswith(prompt) else ""

    def _laid_out_anew(self, turns: list[int]) -> list[Span] | None:
        """The template makes something else of an answer, such as its reasoning taken apart: a turn is what lies
        between the header before it and its end token."""
        masked = self._split(turns)
        if masked is None or masked[1] != turns or any(self.messages[i]["role"] != "assistant" for i in turns):
            return None
        end, lead, pieces = self.template.end_token, self.template._lead, masked[0]
        behind = [self.template._end.match(piece) if self.template._end else None for piece in pieces[1:]]
        if not end or any(match is None or match.group(1) != end for match in behind):
            return None
        spans = between([*(piece.removesuffix(lead) for piece in pieces[:-1]), pieces[-1]], self.full)
        if spans is None:
            return None
        found = []
        for turn, match, (start, stop) in zip(turns, behind, spans, strict=True):
            content, written = self.messages[turn]["content"], self.full[start:stop]
            if match is None or not stems_from(written, content, lead) or written.count(end) > content.count(end):
                return None
            found.append((start, stop + match.end()))
        return found

    def _around_calls(self, turns: list[int]) -> list[Span] | None:
        """A turn that calls lies between the header before it and the end token behind its last call."""
        pieces = re.split(rf"({self.mark}[0-9]+(?:c|[nkv][0-9]+)x)", self.with_calls_masked)
        owner = [int(re.match(r"[0-9]+", name[len(self.mark) :])[0]) for name in pieces[1::2]]  # type: ignore[index]
        anchors: list[str] = []
        behind, start = "", 0  # what stands behind the call before, from its end token on
        for i in self.calling:
            places = [at for at, turn in enumerate(owner) if turn == i]
            form = self._form_of(i)
            if form is None or places != list(range(start, start + len(places))) or not places:
                return None
            before, after = behind or pieces[0], pieces[2 * places[-1] + 2]
            lead = next((lead for lead in form.leads if before.endswith(lead)), None)
            tail = form.tail.replace(_CALL["id"], self.messages[i]["tool_calls"][-1].get("id", ""))
            if lead is None or not after.startswith(tail):
                return None
            anchors.append(before.removesuffix(lead))
            # What stands before the end token may depend on what is called.
            behind, start = after[len(tail) - len(form.end) :], places[-1] + 1
        spans = between([*anchors, behind], self.full) if start == len(owner) else None
        if spans is None:
            return None
        found = {}
        for i, (left, right) in zip(self.calling, spans, strict=True):
            form, prompt = self._form_of(i), self._prompt_of(i)
            agreed = left == len(prompt) if prompt else True
            if form is None or not agreed or not self._calls_in(self.full[left:right], self.messages[i]):
                return None
            found[i] = (left, right + len(form.end))
        return [found[turn] for turn in turns]

    def _form_of(self, turn: int) -> _Call | None:
        return self.template.call_forms[bool(self.messages[turn]["content"].strip())]

    @staticmethod
    def _calls_in(written: str, message: Message) -> bool:
        """Whether the functions are named in it, one after another."""
        position = 0
        for call in message["tool_calls"]:
            position = written.find(call["function"]["name"], position)
            if position < 0:
                return False
        return True

    def _by_prefixes(self, turns: list[int]) -> list[Span] | None:
        """The text up to each turn, with the generation prompt, and the text through it must both begin the whole."""
        template, spans = self.template, []
        for turn in turns:
            message = self.messages[turn]
            if message["role"] != "assistant":
                return None
            try:
                before = template._render(self.messages[:turn], self.tools, add_generation_prompt=True) if turn else ""
                through = template._render(self.messages[: turn + 1], self.tools)
            except _Failed:  # a beginning that the template takes for incomplete
                return None
            end_token = template.call_end if message.get("tool_calls") else template.end_token
            end = len(through.rstrip())
            written = through[len(before) : end]
            if not (before and self.full.startswith(before) and self.full.startswith(through)):
                return None
            if not (end_token and written.endswith(end_token) and written != end_token):
                return None
            written = written.removesuffix(end_token)
            if message.get("tool_calls"):
                certain = self._calls_in(written, message)
            else:
                certain = stems_from(written, message["content"], template._lead)
            if not certain:
                return None
            spans.append((len(before), end))
        return spans


class _Names(NamedTuple):
    """Placeholders for the calls of one message."""

    turn: str
    mark: str

    def function(self, number: int) -> str:
        return f"{self.mark}{self.turn}n{number}x"

    def key(self, number: int) -> str:
        return f"{self.mark}{self.turn}k{number}x"

    def value(self, number: int) -> str:
        return f"{self.mark}{self.turn}v{number}x"

    def masked(self, call: Message, number: int) -> Message:
        """A call with its name and arguments masked."""
        function = {"name": self.function(number), "arguments": {self.key(number): self.value(number)}}
        return call | {"type": "function", "function": function}

    def all_in(self, text: str, calls: int) -> bool:
        names = (name(number) for number in range(calls) for name in (self.function, self.key, self.value))
        return all(name in text for name in names)


def _with_text(call: Message) -> Message:
    """A call with its arguments as JSON text."""
    function = call["function"]
    arguments = json.dumps(function["arguments"], ensure_ascii=False)
    return call | {"function": function | {"arguments": arguments}}


def _overlap(one: Span, other: Span) -> bool:
    return one[0] < other[1] and other[0] < one[1]


def prompt_text(tokenizer: Any, messages: Sequence[Message], tools: Tools = None) -> str:
    """A conversation that is to be answered, as it stands before the answer in training."""
    if any(message.get("tool_calls") for message in messages):
        template = ChatTemplate(tokenizer)
        _ = template.call_end
        return template.render(messages, tools, add_generation_prompt=True)
    turns = [{name: value for name, value in message.items() if name != "train"} for message in messages]
    return tokenizer.apply_chat_template(turns, tools=tools, add_generation_prompt=True, tokenize=False)


def answer_text(message: Message) -> str:
    """An answer as a person reads it: its text, and its calls as JSON."""
    calls = [json.dumps(call["function"], ensure_ascii=False) for call in message.get("tool_calls", ())]
    return "\n".join(filter(None, [message["content"], *calls]))
