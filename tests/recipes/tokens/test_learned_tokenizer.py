"""A tokenizer that is learned from a recipe's training rows."""

import json

import pytest
from recipe_files import fault, write
from transformers import AutoTokenizer
from tuning import assert_equal_weights

from anyformer.recipes.errors import UserError
from anyformer.recipes.loading import load_recipe
from anyformer.recipes.prepare import prepare
from anyformer.recipes.run import run_recipe
from anyformer.recipes.tokens.byte_tokenizer import SPECIAL
from anyformer.recipes.tokens.learned_tokenizer import learn_tokenizer, learned_size

TEXTS = [f"the number {n} follows the number {n - 1}, and 中 é follow both" for n in range(60)]


def test_a_decoders_tokenizer_adds_nothing_and_loses_nothing(tmp_path):
    learn_tokenizer(TEXTS, 300, encoder=False).save_pretrained(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    assert len(tokenizer) == 300
    assert tokenizer.convert_ids_to_tokens([0, 1, 2, 3]) == list(SPECIAL.values())
    for text in (*TEXTS, "never seen: ζ\t\n  ", ""):
        assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    assert "Ġnumber" in tokenizer.get_vocab()


def test_the_same_texts_give_the_same_tokenizer():
    one, other = (learn_tokenizer(iter(TEXTS), 320, encoder=True) for _ in range(2))
    assert one.backend_tokenizer.to_str() == other.backend_tokenizer.to_str()


def test_an_encoders_tokenizer_marks_ends_and_pairs(tmp_path):
    learn_tokenizer(TEXTS, 300, encoder=True).save_pretrained(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    plain = tokenizer("the number", add_special_tokens=False)["input_ids"]
    follow = tokenizer("both", add_special_tokens=False)["input_ids"]
    start, end = tokenizer.bos_token_id, tokenizer.eos_token_id
    assert (tokenizer.cls_token_id, tokenizer.sep_token_id) == (start, end)
    assert tokenizer("the number")["input_ids"] == [start, *plain, end]
    pair = tokenizer("the number", "both", return_token_type_ids=True, return_special_tokens_mask=True)
    assert pair["input_ids"] == [start, *plain, end, *follow, end]
    assert pair["token_type_ids"] == [0] * (len(plain) + 2) + [1] * (len(follow) + 1)
    assert pair["special_tokens_mask"] == [1, *[0] * len(plain), 1, *[0] * len(follow), 1]
    assert tokenizer.num_special_tokens_to_add(pair=True) == 3


def test_sizes_are_read_from_the_name():
    assert learned_size("builtin:bpe:4096") == 4096
    assert [learned_size(name) for name in (None, "builtin:bytes", "some/tokenizer")] == [None] * 3
    for name in ("builtin:bpe:", "builtin:bpe:many", "builtin:bpe:259", "builtin:bpe:-5", "builtin:bpe:²"):
        with pytest.raises(UserError, match="at least 260"):
            learned_size(name)


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def recipe(model: str, data: str = "{source: texts.jsonl, eval_fraction: 0.3}", kind: str = "pretrain") -> str:
    return f"model: {model}\ndata: {data}\nobjective: {{kind: {kind}, max_length: 16}}\ntrain: {{max_steps: 1}}\n"


NEW = "{preset: mini-llama, tokenizer: 'builtin:bpe:280', config: {num_hidden_layers: 1}}"


@pytest.mark.usefixtures("here")
def test_no_held_out_row_is_learned_from():
    # Each row repeats a word of its own: whether it became a token tells whether the row was read.
    words = [f"{a}{b}q{a}{b}" for a in "bcdfghk" for b in "lmnprst"]
    rows = [" ".join([word] * 40) for word in words]
    write("".join(json.dumps({"text": row}) + "\n" for row in rows), "texts.jsonl")
    wide = NEW.replace("280", "900")
    found = prepare(load_recipe(write(recipe(wide))))
    known = {token.strip("Ġ") for token in found.tokenizer.get_vocab()}
    trained = [row["text"].split()[0] for row in found.splits.train]
    held = [row["text"].split()[0] for row in found.splits.eval]
    assert held and not known & set(held)
    # The learning holds a few of its own out, to measure itself.
    assert len(known & set(trained)) >= len(trained) - 1
    assert found.config.vocab_size == len(found.tokenizer) and found.config.eos_token_id == 2


@pytest.mark.usefixtures("here")
def test_plain_prompts_and_completions_are_learned_from_as_one_text():
    rows = [{"prompt": f"{text} twoc", "completion": "alls"} for text in TEXTS * 4]
    write("".join(json.dumps(row) + "\n" for row in rows), "pairs.jsonl")
    text = recipe(NEW, "{source: pairs.jsonl, eval_fraction: 0}", kind="sft").replace(", max_length: 16", "")
    known = prepare(load_recipe(write(text.replace("280", "400")))).tokenizer.get_vocab()
    assert "Ġtwocalls" in known


@pytest.mark.usefixtures("here")
def test_what_cannot_be_learned_from_is_refused():
    chats = [{"messages": [{"role": role, "content": text} for role in ("user", "assistant")]} for text in TEXTS]
    write("".join(json.dumps(chat) + "\n" for chat in chats), "chats.jsonl")
    text = recipe(NEW, "{source: chats.jsonl}", kind="sft").replace(", max_length: 16", "")
    with pytest.raises(
        UserError, match=r"learned from rows of text, .* or of plain prompt and completion; these hold me"
    ):
        prepare(load_recipe(write(text)))
    said = fault(recipe(NEW.replace("280", "many")))
    assert "model.tokenizer: 'builtin:bpe:many' names no size" in said
    said = fault(recipe("{path: some/model, tokenizer: 'builtin:bpe:4096'}"))
    assert "is learned for a new model (model.preset)" in said


@pytest.mark.usefixtures("here")
def test_a_resumed_run_learns_the_same_tokenizer(interrupted):
    write("".join(json.dumps({"text": text}) + "\n" for text in TEXTS), "texts.jsonl")
    text = recipe(NEW.replace("num_hidden_layers: 1", "num_hidden_layers: 1, hidden_size: 32, num_attention_heads: 2"))
    text = text.replace("max_steps: 1", "max_steps: 24, save_steps: 17, per_device_train_batch_size: 2")
    name = write(text + "eval: {samples: 0}\n")
    whole = run_recipe(load_recipe(name, ["train.output_dir=whole"]))
    halted = load_recipe(name, ["train.output_dir=halted"])
    with interrupted():
        run_recipe(halted)
    resumed = run_recipe(halted, resume=True)
    assert_equal_weights(whole, resumed)
    one, other = ((folder / "tokenizer.json").read_bytes() for folder in (whole, resumed))
    assert one == other
