"""Where the turns of a conversation stand in the text that a chat template makes of it.

A conversation is rendered a second time with placeholders for its texts; where they come out, the texts must stand, and
everything around must be the same. A turn that the template lays out anew, as it does with tool calls and reasoning,
lies between what stands before and behind it. What cannot be told for certain is refused.
"""

import json
import re
from collections.abc import Callable, Sequence
from functools import cached_property
from itertools import product
from typing import Any

from ..errors import UserError
from .alignment import Span
from .conversation import Conversation, LeftOut
from .placeholders import CALL, PLACEHOLDER, Call, Failed, Message, Names, Tools

_MARKERS = re.compile(r"\{%-?\s*generation\s*-?%\}")


class ChatTemplate:
    """A tokenizer's chat template, and what it writes around an assistant's message.

    Attributes:
        end_token: the added token that ends the last assistant turn, or None.
        marked: it has `{% generation %}` markers.
        prompts: its generation prompt is what it writes before an answer.
        lead: what it writes between the generation prompt and an answer: the model's to write.
        end: matches an added token, blank space before it included; None where there are none.
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
        self.end = re.compile(rf"\s*({'|'.join(map(re.escape, longest_first))})") if tokens else None
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
            return self.try_render(messages, tools, **options)
        except Failed as error:
            raise UserError(f"The chat template refuses the conversation: {error}") from error

    def try_render(self, messages: Sequence[Message], tools: Tools = None, **options: Any) -> str:
        return self._guarded(
            lambda: self.tokenizer.apply_chat_template(
                self._handed_over(messages), tools=tools, tokenize=False, **options
            )
        )

    def render_marked(self, messages: Sequence[Message], tools: Tools) -> tuple[str, list[Span]]:
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
            raise Failed(str(error)) from error

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
        question, answer = {"role": "user", "content": "Question"}, {"role": "assistant", "content": PLACEHOLDER}
        try:
            full, asked = self.try_render([question, answer]), self.try_render([question])
            prompted = self.try_render([question], add_generation_prompt=True)
        except Failed as error:
            raise UserError(f"The chat template fails on a plain exchange: {error}") from error
        if full.count(PLACEHOLDER) != 1:
            raise UserError("The chat template does not write an assistant message's text exactly once.")
        start = full.index(PLACEHOLDER)
        match = self.end.match(full, start + len(PLACEHOLDER)) if self.end else None
        self.end_token = match.group(1) if match else None
        # What stands between the generation prompt and the answer (a space, an empty think block) is the
        # model's to write. A template without a generation prompt leaves only blank space to the model.
        self.lead = ""
        self.prompts = prompted != asked and full.startswith(prompted) and len(prompted) <= start
        self.leads: dict[str, int] = {}  # text before an answer -> how much of it is the model's to write
        if full.startswith(prompted) and len(prompted) <= start:
            between_them = full[len(prompted) : start]
            self.lead = between_them if prompted != asked or not between_them.strip() else ""
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
            exchange = [{"role": "user", "content": "Question"}, {"role": "assistant", "content": PLACEHOLDER}]
            text, blocks = self.render_marked(exchange, None)
            stop = text.index(self.end_token, text.index(PLACEHOLDER)) + len(self.end_token)
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
    def call_forms(self) -> dict[bool, Call | None]:
        """What is written around the calls of a message without and with text; settles how they are handed over."""
        for self._arguments_as_text, self._empty_text in product((False, True), (True, False)):
            if alone := self._call_form(""):
                return {False: alone, True: self._call_form(f"{PLACEHOLDER}0cx")}
        self._arguments_as_text, self._empty_text = False, True
        return {False: None, True: None}

    def _call_form(self, content: str) -> Call | None:
        call = {"role": "assistant", "content": content, "tool_calls": [Names("0", PLACEHOLDER).masked(CALL, 0)]}
        result = {"role": "tool", "content": "1", "tool_call_id": CALL["id"], "name": CALL["function"]["name"]}
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
        return Call(tuple(sorted(leads, key=len, reverse=True)), tail, match.group(1))

    def _call_in(self, messages: list[Message], twin: list[Message], content: str) -> tuple[str, str] | None:
        """What stands between the header and a made-up call, and all that follows the call; None where that is not
        certain. The twin of the conversation has the answer 0 in the call's place."""
        try:
            full, plain = self.try_render(messages), self.try_render(twin)
            prompted = self.try_render(messages[:1], add_generation_prompt=True)
        except Failed:
            return None
        names = Names("0", PLACEHOLDER)
        # Python's own way of writing an object is no JSON: such a template wants its arguments as text.
        if not names.all_in(full, 1) or f"'{names.key(0)}'" in full or content not in full:
            return None
        firsts = {match.group(): match for match in reversed(list(re.finditer(rf"{PLACEHOLDER}0\w+?x", full)))}
        start, end = min(m.start() for m in firsts.values()), max(m.end() for m in firsts.values())
        if self.prompts and full.startswith(prompted) and len(prompted) <= start:
            header = len(prompted)
        else:
            header = next((i for i, (one, other) in enumerate(zip(full, plain, strict=False)) if one != other), 0)
            # What they share may reach into what stands before every answer.
            back = (i for i in range(len(self.lead) + 1) if plain.startswith(f"{self.lead}0", header - i))
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
                conversation = Conversation(self, list(messages), tools)
                conversation.check_all_is_written()
                spans = conversation.spans(turns)
                if spans is not None or conversation.full == self.try_render(messages, tools):
                    break
        except Failed as error:
            raise UserError(f"Row {row}: the chat template refuses the conversation: {error}") from error
        except LeftOut as error:
            raise UserError(f"Row {row}: the chat template {error}") from error
        if spans is None:
            raise UserError(
                f"Row {row}: cannot tell for certain where the {len(turns)} supervised turns stand in what "
                "the chat template writes. Set objective.loss_on to all, or use a template that writes "
                "messages unchanged and ends every assistant turn with the same token."
            )
        return conversation.full, spans


def _with_text(call: Message) -> Message:
    """A call with its arguments as JSON text."""
    function = call["function"]
    arguments = json.dumps(function["arguments"], ensure_ascii=False)
    return call | {"function": function | {"arguments": arguments}}


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
