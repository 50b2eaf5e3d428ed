"""One conversation under one chat template: whether all of it is written, and where its turns stand."""

import re
from collections.abc import Sequence
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING

from .alignment import Span, between, placed, stems_from
from .placeholders import CALL, PLACEHOLDER, Call, Failed, Message, Names, Tools

if TYPE_CHECKING:
    from .chat_template import ChatTemplate


class LeftOut(Exception):
    """What of a conversation a template does not write."""


class Conversation:
    """One conversation under one template."""

    def __init__(self, template: "ChatTemplate", messages: list[Message], tools: Tools) -> None:
        self.template, self.messages, self.tools = template, messages, tools
        self.calling = [i for i, message in enumerate(messages) if message.get("tool_calls")]
        if self.calling:
            _ = template.call_forms  # settles how calls are handed over
        self.marked: list[Span] = []
        if template.marked:
            self.full, self.marked = template.render_marked(messages, tools)
        else:
            self.full = template.try_render(messages, tools)
        self.mark = PLACEHOLDER
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
            names, message = Names(str(i), self.mark), self.messages[i]
            calls = [names.masked(call, number) for number, call in enumerate(message["tool_calls"])]
            text = self.name(i) if message["content"].strip() else message["content"]
            masked[i] = message | {"content": text, "tool_calls": calls}
        return self.template.try_render(masked, self.tools)

    def _split(self, turns: Sequence[int]) -> tuple[list[str], list[int]] | None:
        masked = list(self.messages)
        for i in turns:
            masked[i] = self.messages[i] | {"content": self.name(i)}
        try:
            text = self.template.try_render(masked, self.tools)
        except Failed:
            return None
        pieces = re.split(rf"{self.mark}([0-9]+)cx", text)
        return pieces[::2], [int(number) for number in pieces[1::2]]

    # What is written at all

    def check_all_is_written(self) -> None:
        """Raises:
        LeftOut: training would be on something else than the row says; names what.
        """
        if self.tools and self.template.try_render(self.messages) == self.full:
            raise LeftOut(
                "ignores tools: it writes the same without them. Use a template that writes tools, or take them out"
            )
        for i in self.calling:
            names = Names(str(i), self.mark)
            if not names.all_in(self.with_calls_masked, len(self.messages[i]["tool_calls"])):
                raise LeftOut(
                    f"ignores tool calls: it does not write those of message {i + 1} (assistant) with their arguments. "
                    "Use a template that writes tool calls, or write them into the message's content"
                )
        if self.with_texts_masked is None:
            return
        written = set(self.with_texts_masked[1])
        for i, message in enumerate(self.messages):
            if message["content"].strip() and i not in written:
                raise LeftOut(
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
        match = self.template.end.match(self.full, end) if self.template.end else None
        stops = match is not None and match.group(1) == self.template.end_token
        if answers and not stops:
            return None
        return start - lead, match.end() if match and stops else end

    def _lead_before(self, turn: int, before: str, start: int) -> int:
        """How many characters before a text are the model's to write, since the generation prompt ends there."""
        template = self.template
        if before not in template.leads:
            known = len(template.lead) if before.endswith(template.lead) else 0
            prompt = self._prompt_of(turn)
            room = start - len(prompt)
            template.leads[before] = room if prompt and 0 <= room <= len(before) else known
        return template.leads[before]

    def _prompt_of(self, turn: int) -> str:
        """The generation prompt of a turn, where the whole begins with it."""
        if not turn or not self.template.prompts:
            return ""
        try:
            prompt = self.template.try_render(self.messages[:turn], self.tools, add_generation_prompt=True)
        except Failed:
            return ""
        return prompt if self.full.startswith(prompt) else ""

    def _laid_out_anew(self, turns: list[int]) -> list[Span] | None:
        """The template makes something else of an answer, such as its reasoning taken apart: a turn is what lies
        between the header before it and its end token."""
        masked = self._split(turns)
        if masked is None or masked[1] != turns or any(self.messages[i]["role"] != "assistant" for i in turns):
            return None
        end, lead, pieces = self.template.end_token, self.template.lead, masked[0]
        behind = [self.template.end.match(piece) if self.template.end else None for piece in pieces[1:]]
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
            tail = form.tail.replace(CALL["id"], self.messages[i]["tool_calls"][-1].get("id", ""))
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

    def _form_of(self, turn: int) -> Call | None:
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
                before = (
                    template.try_render(self.messages[:turn], self.tools, add_generation_prompt=True) if turn else ""
                )
                through = template.try_render(self.messages[: turn + 1], self.tools)
            except Failed:  # a beginning that the template takes for incomplete
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
                certain = stems_from(written, message["content"], template.lead)
            if not certain:
                return None
            spans.append((len(before), end))
        return spans


def _overlap(one: Span, other: Span) -> bool:
    return one[0] < other[1] and other[0] < one[1]
