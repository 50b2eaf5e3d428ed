"""Answers to prompts, in batches: the template, the stop tokens and the ids of training."""

import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

from .console import quiet_libraries
from .errors import UserError
from .generator import Generator, open_generator, require_text

Template = Literal["auto", "chat", "none"]
# A text, or messages up to the one that is to be answered.
Prompt = str | list[dict[str, str]]


def generate(
    path: str,
    prompts: Sequence[Prompt],
    *,
    system: str | None = None,
    template: Template = "auto",
    max_new_tokens: int = 256,
    temperature: float = 0.0,
    top_p: float = 1.0,
    seed: int = 0,
    batch_size: int = 8,
    draft: str | None = None,
    trust_remote_code: bool = False,
    tell: Callable[[str], None] = lambda text: print(text, file=sys.stderr),
) -> Iterator[str]:
    """The answers to `prompts`, in their order.

    Args:
        path: a run, a model folder or a Hub id.
        system: a system message, with a chat template.
        template: "chat": each prompt is a user's message; "none": the text that the model goes on with; "auto": as
            the tokenizer has a template or not; what was trained as objective seq2seq gets none.
        temperature: 0: the likeliest token each time. top_p: sampling from so much of the probability.
        draft: what drafts, see `drafting.with_draft`; the prompts are then answered one by one.
        tell: gets what is to be known of an answer's length: that the model's positions ended it, or that a text is
            longer than those that the model was trained for; and behind the last answer what came of the drafts.

    Raises:
        UserError: no model or tokenizer there, a model that writes nothing, no chat template, an empty prompt, one
            that leaves no room, or a draft that does not fit.
    """
    quiet_libraries()
    from transformers import set_seed

    options = sampling(temperature, top_p)
    generator = open_generator(path, trust_remote_code=trust_remote_code)
    if draft is not None:
        from .drafting import with_draft

        generator = with_draft(generator, draft, trust_remote_code=trust_remote_code)
    encoded = [_encoded(prompt, number, generator, system, template) for number, prompt in enumerate(prompts, 1)]
    longest = generator.longest_prompt
    for number, ids in enumerate(encoded, 1):
        if len(ids) > longest:
            more = "" if generator.reads_apart else " and an answer"
            raise UserError(f"prompt {number} has {len(ids)} tokens, and the model has positions for {longest}{more}")
    # In one row with its prompt an answer has the less room, the longer that is.
    roomy = longest if generator.reads_apart else generator.room(max_new_tokens)
    set_seed(seed)
    number, beyond = 0, False
    for rows in batches_of(encoded, batch_size, roomy):
        for prompt, ids in zip(rows, generator.answer(rows, max_new_tokens, **options), strict=True):
            number += 1
            if generator.ends_early(len(prompt), ids, max_new_tokens):
                tell(f"prompt {number}: {ENDS_EARLY}")
            elif not beyond and generator.is_beyond(len(prompt), ids):
                beyond = True
                tell(f"prompt {number}: {BEYOND.format(generator.trained_length)}")
            yield generator.decode(ids).strip()
    if generator.draft is not None:
        tell(generator.draft.describe())


ENDS_EARLY = "the answer is cut off where the model's positions end"
BEYOND = (
    "prompt and answer are longer than the {} tokens that the model was trained for (max_position_embeddings). It goes "
    "on, but may get worse"
)


def sampling(temperature: float, top_p: float = 1.0) -> dict[str, Any]:
    """Arguments of `generate`; a temperature of 0 is the likeliest token each time.

    Raises:
        UserError: a temperature so small that the probabilities overflow.
    """
    if not temperature:
        return {"do_sample": False}
    if not 0.01 <= temperature < float("inf"):
        raise UserError(f"temperature is {temperature}: give 0, for the likeliest token each time, or at least 0.01")
    return {"do_sample": True, "temperature": temperature, "top_p": top_p}


def batches_of(encoded: Sequence[list[int]], size: int, roomy: int) -> Iterator[list[list[int]]]:
    """Batches in order; a prompt over `roomy` tokens is alone, so that it shortens no other's answer."""
    batch: list[list[int]] = []
    for ids in encoded:
        if batch and (len(batch) == size or len(ids) > roomy or len(batch[-1]) > roomy):
            yield batch
            batch = []
        batch.append(ids)
    yield batch


def _encoded(prompt: Prompt, number: int, generator: Generator, system: str | None, template: Template) -> list[int]:
    for text in [prompt] if isinstance(prompt, str) else [turn["content"] for turn in prompt]:
        if not text.strip():
            raise UserError(f"prompt {number} is empty")
        require_text(text, f"prompt {number}")
    require_text(system or "", "the system message")
    if not isinstance(prompt, str):
        return _conversation(prompt, number, generator, system, template)
    if template == "none" or (template == "auto" and not generator.has_template):
        if system:
            raise UserError("a system message needs a chat template, and none is used")
        return generator.tokenizer(prompt)["input_ids"]
    if generator.tokenizer.chat_template is None:
        raise UserError("the tokenizer has no chat template: give --template none")
    turns = [{"role": "system", "content": system}] if system else []
    return generator.encode([*turns, {"role": "user", "content": prompt}])


def _conversation(
    turns: list[dict[str, str]], number: int, generator: Generator, system: str | None, template: Template
) -> list[int]:
    """Messages through the chat template."""
    if template == "none" or generator.tokenizer.chat_template is None:
        raise UserError(f"prompt {number}: is made of messages, which need a chat template: give it as plain text")
    if system and turns[0]["role"] == "system":
        raise UserError(f"prompt {number}: begins with a system message already: leave out --system")
    return generator.encode([{"role": "system", "content": system}, *turns] if system else turns)


def read_prompts(file: Path) -> list[Prompt]:
    """The prompts of a file: one a line of plain text, or the `prompt` of each row of JSONL, a text or messages.

    Raises:
        UserError: a file that cannot be read, or holds no prompt.
    """
    from .data.files import BadRow, place, read_rows
    from .data.formats import Unusable, prompt_of

    if not file.is_file():
        raise UserError(f"{file}: no such file")
    if file.suffix == ".jsonl":
        prompts: list[Prompt] = []
        for line, row in read_rows(file):
            if isinstance(row, BadRow):
                raise UserError(f"{place(file, line)}: {row.reason}")
            try:
                prompts.append(prompt_of(row))
            except Unusable as error:
                raise UserError(f"{place(file, line)}: {error}") from error
    else:
        try:
            prompts = [*(line for line in file.read_text(encoding="utf-8-sig").split("\n") if line.strip())]
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"{file}: cannot be read as UTF-8 text ({error})") from error
    if not prompts:
        raise UserError(f"{file}: holds no prompt")
    return prompts
