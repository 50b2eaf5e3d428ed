"""A conversation in the terminal: the template, the stop tokens and the ids of training."""

from collections.abc import Callable
from typing import Any

from .console import quiet_libraries
from .errors import UserError
from .generation import sampling
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

    An encoder-decoder reads the conversation as its source; without a chat template, each line by itself.

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
    turns = list(start)
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
            turns = list(start)
        elif line:
            turns.append({"role": "user", "content": line})
            if not generator.has_template:
                turns = turns[-1:]  # the source that it reads is a line by itself
            answer = _answer(generator, turns, max_new_tokens, options)
            if answer is None:
                print("That is more than the model has positions for. /clear forgets the conversation so far.")
                turns.pop()
            else:
                turns.append({"role": "assistant", "content": answer})


def _answer(
    generator: Generator, turns: list[dict[str, str]], max_new_tokens: int, options: dict[str, Any]
) -> str | None:
    """The answer, printed as it comes; None where the conversation leaves no room for one."""
    from transformers import TextStreamer

    tokenizer: Any = generator.tokenizer
    prompt = generator.encode(turns) if generator.has_template else tokenizer(turns[-1]["content"])["input_ids"]
    if len(prompt) > generator.longest_prompt:
        return None
    streamer = TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
    (ids,) = generator.answer([prompt], max_new_tokens, streamer=streamer, **options)
    return generator.decode(ids)
