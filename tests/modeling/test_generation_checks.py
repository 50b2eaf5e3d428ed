"""What `generate` refuses before it begins, and what it does not."""

import numpy as np
import pytest
import torch
from peft import PromptTuningConfig, get_peft_model
from transformers.generation import GenerationMixin

from anyformer import AnyformerForCausalLM
from anyformer.modeling.generation_checks import COUNTS

TOKENS = torch.tensor([[5, 6, 7]])


@pytest.mark.parametrize("name", COUNTS)
@pytest.mark.parametrize("value", [0, -1, 1.5, "x", True])
def test_counts_begin_at_1(tiny, name, value):
    with pytest.raises(ValueError, match=f"{name}=.*: a number from 1"):
        tiny().generate(TOKENS, max_new_tokens=2, **{name: value})


@pytest.mark.parametrize("two", [2, np.int64(2), torch.tensor(2)])
def test_counts_may_be_of_any_whole_type(tiny, two):
    assert tiny().generate(TOKENS, max_new_tokens=2, num_beams=two, num_return_sequences=two).shape[0] == 2


@pytest.mark.parametrize("drafter", ["foo", AnyformerForCausalLM])
def test_a_drafter_is_a_loaded_model(tiny, drafter):
    with pytest.raises(ValueError, match=r"assistant_model=.*: a loaded model or drafter"):
        tiny().generate(TOKENS, max_new_tokens=2, assistant_model=drafter)


def test_a_prompt_may_be_empty_behind_what_is_read_before_it(tiny):
    """A soft prompt, or a source."""
    empty = torch.zeros(1, 0, dtype=torch.long)
    prompted = get_peft_model(tiny(), PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4))
    assert prompted.generate(input_ids=empty, attention_mask=empty, max_new_tokens=3, min_new_tokens=3).shape[1] >= 3
    model = tiny(head="seq2seq_lm", architecture="encoder-decoder", decoder_start_token_id=1)
    source = model.get_encoder()(input_ids=TOKENS)
    assert model.generate(input_ids=empty, encoder_outputs=source, max_new_tokens=3).shape[0] == 1


def test_other_ways_to_generate_go_on(tiny):
    """The library's own, unbound, and an embedding that was put in by hand."""
    model = tiny()
    assert GenerationMixin.generate(model, TOKENS, max_new_tokens=70, min_new_tokens=70).shape[1] == 73
    model.set_input_embeddings(torch.nn.Embedding(120, model.config.hidden_size))
    assert model.generate(torch.tensor([[5, 110]]), max_new_tokens=2).shape[0] == 1


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        (torch.tensor([[5, 101]]), "holds token 101, and the vocabulary goes from 0 to 100: was it made by another"),
        (torch.tensor([[5, -2]]), "holds token -2"),
        (torch.zeros(1, 0, dtype=torch.long), r"has shape \(1, 0\): at least one text"),
        (torch.zeros(0, 4, dtype=torch.long), r"has shape \(0, 4\): at least one text"),
        (torch.ones(1, 3), r"is a tensor of torch.float32 and shape \(1, 3\)"),
        (torch.tensor([5, 6]), r"is a tensor of torch.int64 and shape \(2,\)"),
    ],
)
@pytest.mark.parametrize("name", [None, "inputs", "input_ids"])
def test_a_prompt_is_of_the_vocabulary(tiny, tokens, message, name):
    given = {} if name is None else {name: tokens}
    with pytest.raises(ValueError, match=message):
        tiny().generate(*(() if given else (tokens,)), max_new_tokens=2, **given)


def test_the_source_of_two_stacks_is_looked_at_too(tiny):
    model = tiny(head="seq2seq_lm", architecture="encoder-decoder", decoder_start_token_id=1)
    with pytest.raises(ValueError, match="holds token 500"):
        model.generate(torch.tensor([[5, 500]]), max_new_tokens=2)
    assert model.generate(TOKENS, max_new_tokens=2, num_beams=2, num_return_sequences=2).shape[0] == 2


def test_embeddings_alone_or_with_an_empty_prompt_go_on(tiny):
    model = tiny()
    embeds = model.get_input_embeddings()(TOKENS).detach()
    alone = model.generate(inputs_embeds=embeds, max_new_tokens=3, min_new_tokens=3)
    assert torch.equal(alone, model.generate(TOKENS, max_new_tokens=3, min_new_tokens=3)[:, 3:])
    empty = torch.zeros(1, 0, dtype=torch.long)
    assert torch.equal(model.generate(empty, inputs_embeds=embeds, max_new_tokens=3, min_new_tokens=3), alone)
