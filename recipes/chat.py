"""A conversation in the terminal: the template, the stop tokens and the ids of training."""

from collections.abc import Callable
from typing import Any

from .console import quiet_libraries
from .errors import UserError
from .generation import BEYOND, ENDS_EARLY, sampling
from .generator import Generator, open_generator, require_text


def chat(
    path: str,
    *,
    system: str | None = None,
    max_new_tokens: int = 256,
    temperature: float = 0.0,
    seed: int = 0,
    draft: str | None = None,
    trust_remote_code: bool = False,
    read: Callable[[str], str] = input,
) -> None:
    """Read a line, answer it, and so on, until /exit or the end of input.

    An encoder-decoder reads the conversation as its source; without a chat template, each line by itself. Nothing of a
    conversation is ever left out: where positions end, it is said and nothing more is answered; where they go on, it
    is said once that the model was not trained for so long a text.

    Args:
        path: a run, a model folder or a Hub id.
        draft: what drafts, see `drafting.with_draft`; what came of it is said at the end.
        read: asks for a line; replaced in tests.

    Raises:
        UserError: no model or tokenizer there, or one that writes nothing, or a decoder without a chat template.
    """
    quiet_libraries()
    from transformers import set_seed

    require_text(system or "", "the system message")
    options = sampling(temperature)  # refused before anything is loaded
    generator = open_generator(path, trust_remote_code=trust_remote_code)
    if draft is not None:
        from .drafting import with_draft

        generator = with_draft(generator, draft, trust_remote_code=trust_remote_code)
    if not generator.has_template:
        if not generator.reads_apart:
            raise UserError(
                f"{path}: the tokenizer has no chat template; this is no chat model. `anyformer generate` goes on with "
                "a text"
            )
        if system:
            raise UserError(f"{path}: a system message needs a chat template, and the model was trained without one")
    set_seed(seed)
    _converse(generator, system, max_new_tokens, options, read)
    if generator.draft is not None:
        print(generator.draft.describe())


def _converse(
    generator: Generator, system: str | None, max_new_tokens: int, options: dict[str, Any], read: Callable[[str], str]
) -> None:
    start = [{"role": "system", "content": system}] if system else []
    turns, beyond = list(start), False
    while True:
        try:
            line = read("you> ").strip()
            line.encode("utf-8")
        except EOFError:
            print()
            return
        except UnicodeError:  # where the terminal's encoding is not known, such bytes come as half characters
            print("That line is not UTF-8: set the terminal to UTF-8 and type it again.")
            continue
        if line in ("/exit", "/quit"):
            return
        if line == "/clear":
            turns, beyond = list(start), False
        elif line:
            turns.append({"role": "user", "content": line})
            if not generator.has_template:
                turns = turns[-1:]  # the source that it reads is a line by itself
            prompt = _encoded(generator, turns)
            if len(prompt) > generator.longest_prompt:
                print(f"That is more than the model has positions for. {_CLEAR}")
                turns.pop()
                continue
            ids = _answer(generator, prompt, max_new_tokens, options)
            if generator.ends_early(len(prompt), ids, max_new_tokens):
                print(f"({ENDS_EARLY}. {_CLEAR})")
            elif not beyond and generator.is_beyond(len(prompt), ids):
                beyond = True
                print(f"({BEYOND.format(generator.trained_length)}. {_CLEAR})")
            turns.append({"role": "assistant", "content": generator.decode(ids)})


_CLEAR = "/clear forgets the conversation so far."


def _encoded(generator: Generator, turns: list[dict[str, str]]) -> list[int]:
    tokenizer: Any = generator.tokenizer
    return generator.encode(turns) if generator.has_template else tokenizer(turns[-1]["content"])["input_ids"]


def _answer(generator: Generator, prompt: list[int], max_new_tokens: int, options: dict[str, Any]) -> list[int]:
    """The answer, printed as it comes."""
    from transformers import TextStreamer

    streamer = TextStreamer(generator.tokenizer, skip_prompt=True, skip_special_tokens=True)
    (ids,) = generator.answer([prompt], max_new_tokens, streamer=streamer, **options)
    return ids
