"""The verb `show`: attention maps, against the stock class and what a mask must hide."""

import json
import re

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForPreTraining, AutoTokenizer
from typer.testing import CliRunner

from anyformer import AnyformerConfig, from_hf
from anyformer.modeling import HEADS
from anyformer.recipes.errors import UserError
from anyformer.recipes.planning.subject import read_subject
from anyformer.recipes.run import run_recipe
from anyformer.recipes.tokens.byte_tokenizer import byte_tokenizer
from anyformer.recipes.views.chosen import MOST_MAPS, choose
from anyformer.recipes.views.maps import attention_weights, maps_of
from anyformer.recipes.views.picture import draw
from anyformer.recipes.views.weights import open_weights
from anyformer.scripts.cli import app

TEXT = "the cat sat on the mat"
TINY = {"vocab_size": 300, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3}
TINY |= {"num_attention_heads": 4, "initializer_range": 0.3, "pad_token_id": 0, "eos_token_id": 1}


def run(*words, status=0):
    result = CliRunner().invoke(app, ["show", *map(str, words)])
    assert result.exit_code == status, result.output
    return result.output


def built(head="causal_lm", **fields):
    torch.manual_seed(0)
    return HEADS[head](AnyformerConfig(**(TINY | fields), attn_implementation="eager")).eval()


def test_weights_are_those_of_the_stock_class(tiny_checkpoint):
    stock = AutoModelForCausalLM.from_pretrained(tiny_checkpoint, attn_implementation="eager").eval()
    model, tokenizer = from_hf(stock), AutoTokenizer.from_pretrained(tiny_checkpoint)
    model.set_attn_implementation("eager")
    (maps,) = maps_of(model, tokenizer, TEXT)
    with torch.no_grad():
        expected = stock(**tokenizer(TEXT, return_tensors="pt"), output_attentions=True).attentions
    assert len(maps.weights) == len(expected) == 2
    for ours, theirs in zip(maps.weights, expected, strict=True):
        torch.testing.assert_close(ours, theirs[0], atol=1e-5, rtol=0)
        torch.testing.assert_close(ours.sum(-1), torch.ones(ours.shape[:2]), atol=1e-5, rtol=0)
        seen = torch.ones(ours.shape, dtype=torch.bool).tril()
        assert ((ours > 0) == seen).all()


def test_an_encoder_looks_both_ways(tiny_bert):
    stock = AutoModelForPreTraining.from_pretrained(tiny_bert, attn_implementation="eager").eval()
    model, tokenizer = from_hf(stock), AutoTokenizer.from_pretrained(tiny_bert)
    model.set_attn_implementation("eager")
    (maps,) = maps_of(model, tokenizer, "one two three")
    assert maps.queries == maps.keys == ("[CLS]", "·one", "·two", "·three", "[SEP]")
    with torch.no_grad():
        expected = stock(**tokenizer("one two three", return_tensors="pt"), output_attentions=True).attentions
    for ours, theirs in zip(maps.weights, expected, strict=True):
        torch.testing.assert_close(ours, theirs[0], atol=1e-5, rtol=0)
        assert (ours > 0).all()


@pytest.mark.parametrize("attention", ["gqa", "mla"])
def test_padding_and_windows_are_hidden(attention):
    latent = {"kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8}
    model = built(
        attention=attention,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        sliding_window=3,
        **(latent if attention == "mla" else {}),
    )
    length, padding = 8, 2
    ids, mask = torch.randint(3, 300, (2, length)), torch.ones(2, length, dtype=torch.long)
    mask[1, :padding] = 0
    found = attention_weights(model, {"input_ids": ids, "attention_mask": mask})["attentions"]
    rows, columns = torch.arange(length)[:, None], torch.arange(length)[None]
    for kind, weights in zip(model.config.layer_types, found, strict=True):
        seen = columns <= rows
        if kind == "sliding_attention":
            seen &= columns > rows - 3
        assert ((weights[0] > 0) == seen).all()
        real = weights[1, :, padding:]
        assert (real[..., :padding] == 0).all()
        assert ((real[..., padding:] > 0) == seen[padding:, padding:]).all()
        torch.testing.assert_close(real.sum(-1), torch.ones(4, length - padding), atol=1e-5, rtol=0)


def test_a_sink_takes_its_share():
    model = built(attention_sinks=True)
    (weights, *_) = attention_weights(model, {"input_ids": torch.tensor([[5, 6, 7]])})["attentions"]
    assert (weights.sum(-1) < 0.99).all()


def test_an_encoder_decoder_has_three_kinds():
    model = built("seq2seq_lm", architecture="encoder-decoder", num_encoder_layers=2, decoder_start_token_id=0)
    tokenizer = byte_tokenizer()
    encoder, decoder, cross = maps_of(model, tokenizer, "abcd", "xy")
    ids = tokenizer("abcd")["input_ids"]
    assert len(encoder.keys) == len(ids) and len(decoder.keys) == 3 and cross.keys == encoder.keys
    assert [len(kind.weights) for kind in (encoder, decoder, cross)] == [2, 3, 3]
    assert all((weights > 0).all() for weights in (*encoder.weights, *cross.weights))
    assert all((weights.triu(1) == 0).all() for weights in decoder.weights)
    assert cross.weights[0].shape == (4, 3, len(ids))
    # By hand, the first layer's: the encoder's weights do not depend on what the decoder reads.
    with torch.no_grad():
        alone = model.model.encoder(torch.tensor([ids]), output_attentions=True).attentions
    torch.testing.assert_close(encoder.weights[0], alone[0][0], atol=1e-5, rtol=0)
    written = maps_of(model, tokenizer, "abcd")[1]
    assert 1 <= len(written.keys) <= 17


@pytest.mark.parametrize("end", ["svg", "png"])
def test_a_picture_is_written(end, tiny_checkpoint, tmp_path):
    file = tmp_path / f"maps.{end}"
    found = json.loads(run(tiny_checkpoint, "--prompt", f"{TEXT} $x$ 日本", "--attention", file, "--json"))
    assert found["attention"]["layers"] == [0, 1] and found["attention"]["heads"] == [0, 1, 2, 3]
    content = file.read_bytes()
    if end == "png":
        assert content.startswith(b"\x89PNG")
    else:
        words = re.findall(r"<text[^>]*>(.*?)</text>", content.decode("utf-8"), re.DOTALL)
        assert content.count(b"<image") == 8 and {"layer 0", "layer 1", "head 3"} <= set(words)
        tokens = found["attention"]["maps"][0]["keys"]
        assert "$" in "".join(tokens) and [words.count(token) > 0 for token in tokens] == [True] * len(tokens)
        assert b'xlink:href="http' not in content and b"<script" not in content


def test_layers_and_heads_are_chosen(tiny_checkpoint, tmp_path):
    file = tmp_path / "maps.svg"
    out = run(tiny_checkpoint, "--prompt", TEXT, "--attention", file, "--layers", "1", "--heads", "0,2-3")
    assert "Attention of 1 layers and 3 heads written to" in out
    words = file.read_text(encoding="utf-8")
    assert words.count("<image") == 3 and "head 2" in words and "head 1" not in words and "layer 0" not in words


def test_of_many_maps_some_are_drawn():
    config = AnyformerConfig(num_hidden_layers=80, num_attention_heads=64, hidden_size=128)
    some = choose(config, None, None)
    assert len(some.layers) == len(some.heads) == 8 and some.partial
    assert (some.layers[0], some.layers[-1], some.heads[0], some.heads[-1]) == (0, 79, 0, 63)
    assert len(choose(config, "0", None).heads) == 64
    assert len(choose(config, None, "5,7").layers) * 2 <= MOST_MAPS
    whole = choose(AnyformerConfig(num_hidden_layers=12, num_attention_heads=12), None, None)
    assert len(whole.layers) == len(whole.heads) == 12 and not whole.partial
    with pytest.raises(UserError, match="at most 144"):
        choose(config, "0-79", "0-9")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--prompt", "one " * 400], "too many for a picture: at most 64"),
        (["--prompt", ""], "the text is empty"),
        (["--prompt", "a\udcff"], "half a character"),
        (["--prompt", TEXT, "--layers", "0-9"], "--layers: 9 is out of range: the model has 2 layers, 0 to 1"),
        (["--prompt", TEXT, "--heads", "4"], "--heads: 4 is out of range"),
        (["--prompt", TEXT, "--heads", "x"], "is no list of numbers"),
        (["--prompt", TEXT, "--layers", "1-0"], "runs backwards"),
        (["--prompt", TEXT, "--answer", "x"], "only an encoder-decoder"),
    ],
)
def test_mistakes_of_maps_are_told_in_a_line(words, said, tiny_checkpoint, tmp_path):
    output = run(tiny_checkpoint, *words, "--attention", tmp_path / "a.svg", status=2)
    assert said in output and len(output.splitlines()) == 1 and not (tmp_path / "a.svg").exists()


def test_a_folder_without_weights_is_refused(tiny_checkpoint, tmp_path):
    (tmp_path / "config.json").write_text((tiny_checkpoint / "config.json").read_text())
    run(tmp_path)
    output = run(tmp_path, "--prompt", TEXT, "--attention", tmp_path / "a.svg", status=2)
    assert str(tmp_path) in output and len(output.splitlines()) == 1


def test_a_file_that_cannot_be_written_is_named(tiny_checkpoint, tmp_path):
    target = tmp_path / "folder.svg"
    target.mkdir()
    assert "is a folder" in run(tiny_checkpoint, "--svg", target, status=2)


@pytest.mark.parametrize("merge", ["true", "false"])
def test_a_trained_recipe_is_looked_at(recipe, tmp_path, merge):
    """Its file and its run's folder lead to the same maps: those of the adapter on its base."""
    trained = recipe(f"adapter.merge={merge}", "train.max_steps=2", "train.save_steps=2", "eval.samples=1")
    run_recipe(trained)
    maps = []
    for name in (tmp_path / "recipe.yaml", tmp_path / "run"):
        model, tokenizer = open_weights(read_subject(str(name)))
        maps.append(maps_of(model, tokenizer, TEXT)[0].weights)
    base = from_hf(str(trained.model.path))
    base.set_attn_implementation("eager")
    before = maps_of(base, tokenizer, TEXT)[0].weights
    assert all(torch.equal(one, other) for one, other in zip(*maps, strict=True))
    assert not torch.allclose(maps[0][1], before[1], atol=1e-4)
    assert "Attention of 2 layers" in run(tmp_path / "run", "--prompt", TEXT, "--attention", tmp_path / "a.png")


@pytest.mark.parametrize("kind", ["prompt-tuning", "p-tuning", "prefix-tuning"])
def test_a_soft_prompt_is_looked_at(recipe, tmp_path, kind):
    run_recipe(recipe(f"adapter={{kind: {kind}, num_virtual_tokens: 3}}", "train.max_steps=1", "eval.samples=1"))
    model, tokenizer = open_weights(read_subject(str(tmp_path / "run")))
    (maps,) = maps_of(model, tokenizer, TEXT)
    count = len(tokenizer(TEXT)["input_ids"])
    looking = count if kind == "prefix-tuning" else count + 3
    assert maps.keys[:4] == ("‹1›", "‹2›", "‹3›", "the") and len(maps.keys) == count + 3
    assert maps.queries == maps.keys[-looking:]
    for weights in maps.weights:
        assert weights.shape[1:] == (looking, count + 3)
        torch.testing.assert_close(weights.sum(-1), torch.ones(weights.shape[:2]), atol=1e-5, rtol=0)
        assert ((weights > 0) == torch.ones(weights.shape, dtype=torch.bool).tril(count + 3 - looking)).all()
    if kind == "prompt-tuning":
        base = model.get_base_model()
        words = base.get_input_embeddings()(tokenizer(TEXT, return_tensors="pt")["input_ids"])
        with torch.no_grad():
            embeds = torch.cat([model.get_prompt(1), words], 1)
            expected = base(inputs_embeds=embeds, output_attentions=True).attentions
        for ours, theirs in zip(maps.weights, expected, strict=True):
            torch.testing.assert_close(ours, theirs[0], atol=1e-6, rtol=0)
    file = tmp_path / "a.svg"
    assert "Attention of 2 layers" in run(tmp_path / "run", "--prompt", TEXT, "--attention", file)
    assert "‹3›" in file.read_text(encoding="utf-8")
    said = run(tmp_path / "run", "--prompt", "a b " * 40, "--attention", tmp_path / "b.png", status=2)
    assert "are too many for a picture: at most 61 behind the 3 of the soft prompt" in said


def test_a_kind_without_a_chosen_layer_is_left_out(tmp_path):
    model = built("seq2seq_lm", architecture="encoder-decoder", num_encoder_layers=2, decoder_start_token_id=0)
    maps = maps_of(model, byte_tokenizer(), "ab", "x")
    draw(maps, choose(model.config, "2", "0"), "x", tmp_path / "a.svg")
    words = (tmp_path / "a.svg").read_text(encoding="utf-8")
    assert "Decoder" in words and "Cross-attention" in words and "Encoder" not in words and words.count("<image") == 2
