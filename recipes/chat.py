"""A conversation in the terminal: the template, the stop tokens and the ids of training."""

from collections.abc import Callable
from typing import Any

from .console import quiet_libraries
from .errors import UserError
from .evaluation import virtual_tokens
from .generation import sampling
from .models import load_pretrained, load_tokenizer_from, resolve_path
from .tokenize_sft import stop_ids


def chat(
    path: str,
    *,
    system: str | None = None,
    max_new_tokens: int = 256,
    temperature: float = 0.0,
    seed: int = 0,
    trust_remote_code: bool = False,
    read: Callable[[str], str] = input,
) -> None:
    """Read a line, answer it, and so on, until /exit or the end of input.

    Args:
        path: a run, a model folder or a Hub id.
        read: asks for a line; replaced in tests.

    Raises:
        UserError: no model or tokenizer there, or no chat template.
    """
    from transformers import set_seed

    quiet_libraries()
    sampling(temperature)  # refused before anything is loaded
    model = load_pretrained(path, trust_remote_code=trust_remote_code)
    tokenizer = load_tokenizer_from(resolve_path(path), trust_remote_code=trust_remote_code)
    if tokenizer.chat_template is None:
        raise UserError(f"{path}: the tokenizer has no chat template; this is no chat model")
    set_seed(seed)
    start = [{"role": "system", "content": system}] if system else []
    turns = list(start)
    while True:
        try:
            line = read("you> ").strip()
        except EOFError:
            print()
            return
        except UnicodeDecodeError:
            print("That line is not UTF-8: set the terminal to UTF-8 and type it again.")
            continue
        if line in ("/exit", "/quit"):
            return
        if line == "/clear":
            turns = list(start)
        elif line:
            turns.append({"role": "user", "content": line})
            answer = _answer(model, tokenizer, turns, max_new_tokens, temperature)
            if answer is None:
                print("That is more than the model has positions for. /clear forgets the conversation so far.")
                turns.pop()
            else:
                turns.append({"role": "assistant", "content": answer})


def _answer(
    model: Any, tokenizer: Any, turns: list[dict[str, str]], max_new_tokens: int, temperature: float
) -> str | None:
    """The answer, printed as it comes; None where the conversation leaves no room for one."""
    import torch
    from transformers import TextStreamer

    text = tokenizer.apply_chat_template(turns, add_generation_prompt=True, tokenize=False)
    # The template has written the special tokens already, as in training.
    inputs = tokenizer(text, add_special_tokens=False, return_tensors="pt").to(model.device)
    length = inputs["input_ids"].shape[1]
    room = model.config.max_position_embeddings - virtual_tokens(model) - length
    if room < 1:
        return None
    with torch.no_grad():
        output = model.generate(
            **inputs,
            **sampling(temperature),
            max_new_tokens=min(max_new_tokens, room),
            eos_token_id=stop_ids(tokenizer),
            pad_token_id=tokenizer.pad_token_id,
            streamer=TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True),
        )
    return tokenizer.decode(output[0, length:], skip_special_tokens=True)
