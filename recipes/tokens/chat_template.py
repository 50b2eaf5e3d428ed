"""Where the answers of a conversation stand in the text that a chat template makes of it."""

import re
from typing import Any

from ..errors import UserError

Span = tuple[int, int]


class ChatTemplate:
    """A tokenizer's chat template, and what it writes around an assistant's message.

    Attributes:
        end_token: the added token that ends the last assistant turn, or None.
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
        self._probe()

    def render(self, messages: list[dict[str, str]], **options: Any) -> str:
        return self.tokenizer.apply_chat_template(messages, tokenize=False, **options)

    def _probe(self) -> None:
        """Learn from a made-up exchange what follows an answer and what stands before it."""
        import jinja2

        question = {"role": "user", "content": "Question"}
        answer = {"role": "assistant", "content": _PLACEHOLDER}
        try:
            full = self.render([question, answer])
            asked = self.render([question])
            prompted = self.render([question], add_generation_prompt=True)
        except jinja2.TemplateError as error:
            raise UserError(f"The chat template fails on a plain exchange: {error}") from error
        if full.count(_PLACEHOLDER) != 1:
            raise UserError("The chat template does not write an assistant message's text exactly once.")
        start = full.index(_PLACEHOLDER)
        match = self._end.match(full, start + len(_PLACEHOLDER)) if self._end else None
        self.end_token = match.group(1) if match else None
        # What stands between the generation prompt and the answer (a space, an empty think block) is the
        # model's to write. A template without a generation prompt leaves only blank space to the model.
        self._lead = ""
        if full.startswith(prompted) and len(prompted) <= start:
            between = full[len(prompted) : start]
            self._lead = between if prompted != asked or not between.strip() else ""
            if between.strip() and prompted == asked:
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

    def locate(self, messages: list[dict[str, str]], turns: list[int], row: int) -> tuple[str, list[Span]]:
        """Render a conversation and find some of its messages.

        Args:
            turns: indices of the messages, in order.
            row: number of the row, for messages.

        Returns:
            The text and the (start, end) of each of these messages in it, end-of-turn token included.
        """
        import jinja2

        try:
            full = self.render(messages)
            if not turns:
                return full, []
            spans = self._by_placeholders(messages, turns, full)
            if spans is None and all(messages[turn]["role"] == "assistant" for turn in turns):
                spans = self._by_prefixes(messages, turns, full)
        except jinja2.TemplateError as error:
            raise UserError(f"Row {row}: the chat template refuses the conversation: {error}") from error
        if spans is None:
            raise UserError(
                f"Row {row}: cannot tell for certain where the {len(turns)} supervised turns stand in what "
                "the chat template writes. Set objective.loss_on to all, or use a template that writes "
                "messages unchanged and ends every assistant turn with the same token."
            )
        return full, spans

    def _by_placeholders(self, messages: list[dict[str, str]], turns: list[int], full: str) -> list[Span] | None:
        """Render once more with placeholders; what stands around them must make up the text again."""
        names = {turn: f"{_PLACEHOLDER}{turn}x" for turn in turns}
        masked = [{**message, "content": names[i]} if i in names else message for i, message in enumerate(messages)]
        pieces = re.split(f"{_PLACEHOLDER}[0-9]+x", self.render(masked))
        if len(pieces) != len(turns) + 1:
            return None
        for trim in (str, str.strip, str.rstrip, str.lstrip):
            contents = [trim(messages[turn]["content"]) for turn in turns]
            joined = [text for pair in zip(pieces, contents, strict=False) for text in pair] + pieces[-1:]
            if "".join(joined) == full:
                return self._spans(pieces, contents, [messages[turn]["role"] for turn in turns], full)
        return None

    def _spans(self, pieces: list[str], contents: list[str], roles: list[str], full: str) -> list[Span] | None:
        spans, position = [], 0
        for before, content, role in zip(pieces, contents, roles, strict=False):
            position += len(before)
            answers = role == "assistant"
            lead = len(self._lead) if answers and before.endswith(self._lead) else 0
            end = self._turn_end(full, position + len(content))
            if end is None and answers:
                return None
            spans.append((position - lead, end or position + len(content)))
            position += len(content)
        return spans

    def _turn_end(self, full: str, position: int) -> int | None:
        match = self._end.match(full, position) if self._end else None
        return match.end() if match and match.group(1) == self.end_token else None

    def _by_prefixes(self, messages: list[dict[str, str]], turns: list[int], full: str) -> list[Span] | None:
        """For templates that rewrite an answer (reasoning taken apart): the text up to each turn, with the
        generation prompt, and the text through it must both begin the whole."""
        spans = []
        for turn in turns:
            before = self.render(messages[:turn], add_generation_prompt=True) if turn else ""
            through = self.render(messages[: turn + 1])
            end = len(through.rstrip())
            written = through[len(before) : end]
            if not (before and full.startswith(before) and full.startswith(through)):
                return None
            if not (self.end_token and written.endswith(self.end_token) and written != self.end_token):
                return None
            # The answer's own last line must stand before the end token.
            last_line = written.removesuffix(self.end_token).rstrip().split("\n")[-1].strip()
            if not messages[turn]["content"].rstrip().endswith(last_line):
                return None
            spans.append((len(before), end))
        return spans


_PLACEHOLDER = "anyformerPLACEHOLDERanswer"
