"""What a drafter learns: targets, contexts, padding, packing; its config."""

import pytest
import torch
from drafts import ATTENTIONS, TRAINED, fit
from transformers import AutoConfig, AutoModel

from anyformer import AnyformerDrafter, AnyformerDrafterConfig
from anyformer.modeling.draft_heads import DraftBatch
from anyformer.modeling.speculation import Progress

STEPS, LENGTH = 3, 14


@pytest.fixture
def pair(tiny):
    """A base in fp64, so that what differs is no rounding, and a drafter whose weights are all random."""

    def build(kind, **fields):
        base = tiny(vocab_size=19, **fields).double().requires_grad_(False)
        torch.manual_seed(3)
        drafter = AnyformerDrafter.from_base(base, kind=kind, num_draft_tokens=STEPS)
        with torch.no_grad():
            for weight in drafter.parameters():
                weight += 0.1 * torch.randn_like(weight)
        return base, drafter.eval()

    return build


def texts(rows=1, length=LENGTH, seed=1):
    return torch.randint(3, 19, (rows, length), generator=torch.Generator().manual_seed(seed))


def by_drafting(base, drafter, text, read):
    """Logits [STEPS, vocab] of a draft behind the first `read` tokens that goes the way of the text."""
    drafting = drafter.drafting(base)
    with torch.no_grad():
        features = base.model(text[:, :read], use_cache=False).last_hidden_state
        drafting.advance(Progress(features, text[:, 1 : read + 1], torch.arange(read + 1)[None], None))
        ahead = text[:, read + 1 :].split(1, dim=1)
        return torch.cat([base.logits_of(drafting.states(list(ahead[:step])))[0, :1] for step in range(STEPS)])


@pytest.mark.parametrize("kind", TRAINED)
@pytest.mark.parametrize("attention", ATTENTIONS)
def test_it_learns_from_the_states_from_which_it_will_draft(pair, attention, kind):
    base, drafter = pair(kind, **ATTENTIONS[attention])
    text = texts()
    with torch.no_grad():
        predictions = drafter.draft_head.predictions(drafter._batch(base, text, None, None))
    for read in (1, 2, 5, LENGTH - 1 - STEPS):
        drafted = by_drafting(base, drafter, text, read)
        for step, predicted in enumerate(predictions):
            # Token `read` is the base's own choice; the draft begins behind it.
            state = predicted.states[:, read + 1 + step - predicted.first]
            torch.testing.assert_close(base.logits_of(state)[0], drafted[step], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kind", TRAINED)
def test_losses_are_the_papers_of_drafts_made_one_by_one(pair, kind):
    base, drafter = pair(kind)
    text = texts()
    out = drafter(base=base, input_ids=text)
    with torch.no_grad():
        features = base.model(text, use_cache=False).last_hidden_state[0]
    losses, hits = torch.zeros(STEPS, LENGTH).double(), torch.zeros(STEPS, LENGTH)
    counted = torch.zeros(STEPS, LENGTH)
    for read in range(1, LENGTH - 1):
        reach = min(STEPS, LENGTH - 1 - read)
        drafting = drafter.drafting(base)
        with torch.no_grad():
            places = torch.arange(read + 1)[None]
            drafting.advance(Progress(features[None, :read], text[:, 1 : read + 1], places, None))
            for step in range(reach):
                ahead = list(text[:, read + 1 : read + 1 + step].split(1, dim=1)) if step else []
                state = drafting.states(ahead)[0, 0]
                at = read + 1 + step  # the token drafted
                logits = base.logits_of(state)
                loss = -logits.log_softmax(-1)[text[0, at]]
                if kind == "eagle":
                    teacher = base.logits_of(features[at - 1]).softmax(-1)
                    apart = (state - features[at - 1]).abs()
                    near = torch.where(apart < 1, apart**2 / 2, apart - 0.5).mean()
                    loss = near - 0.1 * (teacher * logits.log_softmax(-1)).sum()
                losses[step, at], hits[step, at] = loss, logits.argmax() == text[0, at]
                counted[step, at] = 1
    wanted = losses.sum(1) / counted.sum(1)
    torch.testing.assert_close(out.losses.double(), wanted, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(out.accuracies.double(), (hits.sum(1) / counted.sum(1)).double(), atol=1e-5, rtol=1e-5)
    weights = {"medusa": [0.8, 0.64, 0.512], "eagle": [1.0, 0.8, 0.64], "mtp": [1 / 3] * 3}[kind]
    torch.testing.assert_close(out.loss.item(), (wanted * torch.tensor(weights)).sum().item(), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kind", TRAINED)
@pytest.mark.parametrize("attention", ATTENTIONS)
def test_padding_and_packing_change_nothing(pair, attention, kind):
    base, drafter = pair(kind, **ATTENTIONS[attention])
    one, two = texts(seed=1), texts(seed=2)
    alone = [drafter(base=base, input_ids=text).losses for text in (one, two)]
    mean = (alone[0] + alone[1]) / 2  # of equally many targets
    for sides in ((3, 0), (0, 3)):
        rows = torch.cat([torch.nn.functional.pad(text, sides) for text in (one, two)])
        mask = torch.nn.functional.pad(torch.ones(2, LENGTH, dtype=torch.long), sides)
        padded = drafter(base=base, input_ids=rows, attention_mask=mask).losses
        torch.testing.assert_close(padded, mean, atol=1e-5, rtol=1e-5)
    places = torch.arange(LENGTH).repeat(2)[None]
    packed = drafter(base=base, input_ids=torch.cat((one, two), dim=1), position_ids=places).losses
    torch.testing.assert_close(packed, mean, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kind", TRAINED)
def test_labels_say_what_is_learned(pair, kind):
    base, drafter = pair(kind)
    text = texts(2)
    # Of one target alone each step has the loss of that target.
    single = torch.full_like(text, -100)
    single[0, 7] = text[0, 7]
    shorter = drafter(base=base, input_ids=text[:1, :8], labels=single[:1, :8]).losses
    torch.testing.assert_close(drafter(base=base, input_ids=text, labels=single).losses, shorter, atol=1e-5, rtol=1e-5)
    none = drafter(base=base, input_ids=text, labels=torch.full_like(text, -100))
    assert none.loss == 0 and none.loss.requires_grad
    # A share of what the whole batch holds.
    whole, share = drafter(base=base, input_ids=text), drafter(base=base, input_ids=text, num_items_in_batch=100)
    torch.testing.assert_close(share.loss, whole.loss * 2 * (LENGTH - 1) / 100)
    for length in (1, 2):  # nothing to draft
        assert drafter(base=base, input_ids=text[:, :length]).loss == 0


@pytest.mark.parametrize("kind", TRAINED)
def test_all_weights_learn_and_the_base_does_not(tiny, kind):
    base = tiny(vocab_size=19).requires_grad_(False)
    before = {name: weight.clone() for name, weight in base.state_dict().items()}
    drafter = AnyformerDrafter.from_base(base, kind=kind, num_draft_tokens=STEPS)
    text = texts(1, 40)
    first = drafter(base=base, input_ids=text)
    first.loss.backward()
    assert all(weight.grad is not None for weight in drafter.parameters())
    drafter.zero_grad()
    start = {name: weight.clone() for name, weight in drafter.state_dict().items()}
    fit(drafter, base, text, steps=40)
    assert not any(torch.equal(weight, start[name]) for name, weight in drafter.state_dict().items())
    last = drafter(base=base, input_ids=text)
    assert (last.losses < first.losses).all()
    assert all(torch.equal(weight, before[name]) for name, weight in base.state_dict().items())
    # Nothing of the base is kept.
    assert all(weight.shape[0] != 19 for weight in drafter.state_dict().values())


def test_medusa_starts_as_what_the_base_predicts(tiny):
    base = tiny()
    text = texts()
    for drafter in (
        AnyformerDrafter.from_base(base, "medusa"),
        AnyformerDrafter(AnyformerDrafterConfig.of_base(base.config)),
    ):
        with torch.no_grad():
            predictions = drafter.draft_head.predictions(drafter._batch(base, text, None, None))
            features = base.model(text).last_hidden_state
        for predicted in predictions:
            assert torch.equal(predicted.states, features[:, : predicted.states.shape[1]])


def test_under_an_adapter_the_features_are_the_adapters(tiny):
    from peft import LoraConfig, get_peft_model

    base = tiny(vocab_size=19)
    drafter = AnyformerDrafter.from_base(base, "eagle")
    plain = drafter(base=base, input_ids=texts()).losses
    wrapped = get_peft_model(base, LoraConfig(target_modules=["q_proj"], init_lora_weights=False)).eval()
    assert not torch.allclose(drafter(base=wrapped, input_ids=texts()).losses, plain)
    with wrapped.disable_adapter():
        torch.testing.assert_close(drafter(base=wrapped, input_ids=texts()).losses, plain)


def test_wrong_calls_are_refused(pair):
    base, drafter = pair("mtp")
    text = texts(2)
    with pytest.raises(ValueError, match=r"attention_mask is \[2, 1, 14, 14\]"):
        drafter(base=base, input_ids=text, attention_mask=torch.ones(2, 1, LENGTH, LENGTH))
    with pytest.raises(ValueError, match="in training mode"):
        drafter(base=base.train(), input_ids=text)
    with pytest.raises(ValueError, match="not for Linear"):
        drafter(base=torch.nn.Linear(2, 2), input_ids=text)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"kind": "hydra"}, "kind='hydra' is not known; choices: medusa, eagle, mtp"),
        ({"num_draft_tokens": 0}, "num_draft_tokens=0 must be a number from 1 to 64"),
        ({"num_draft_tokens": 65}, "num_draft_tokens=65"),
        ({"base": {"vocab_size": 9}}, "base lacks hidden_size, num_hidden_layers"),
        ({"num_heads": 3}, "'num_heads' .* is no field of AnyformerDrafterConfig"),
        ({"num_draft_token": 3}, "did you mean 'num_draft_tokens'"),
        ({"kind": 3}, "kind"),
    ],
)
def test_configs_that_make_no_sense_are_refused(tiny, fields, message):
    base = AnyformerDrafterConfig.of_base(tiny().config).base
    with pytest.raises(Exception, match=message):
        AnyformerDrafterConfig(**{"base": base} | fields)


def test_a_base_that_makes_no_sense_is_refused(tiny):
    base = AnyformerDrafterConfig.of_base(tiny().config).base
    with pytest.raises(Exception, match="num_key_value_heads=3 must divide num_attention_heads=4"):
        AnyformerDrafterConfig(base=base | {"num_key_value_heads": 3})
    with pytest.raises(Exception, match=r"'heads' .* is no field of AnyformerConfig"):
        AnyformerDrafterConfig(base=base | {"heads": 3})


def test_a_folder_keeps_config_and_weights_and_says_what_it_lacks(tiny, tmp_path):
    from safetensors.torch import load_file, save_file

    base = tiny(sliding_window=5, rope_parameters={"rope_type": "linear", "rope_theta": 100.0, "factor": 2.0})
    drafter = AnyformerDrafter.from_base(base.to(torch.bfloat16), "mtp", 2)
    drafter.save_pretrained(tmp_path)
    again = AutoModel.from_pretrained(tmp_path)
    assert type(again) is AnyformerDrafter and again.dtype == torch.bfloat16
    assert again.config.base == drafter.config.base and again.config.num_draft_tokens == 2
    assert all(torch.equal(weight, again.state_dict()[name]) for name, weight in drafter.state_dict().items())
    assert AutoConfig.from_pretrained(tmp_path, num_draft_tokens=1).num_draft_tokens == 1
    with pytest.raises(ValueError, match="num_draft_token"):
        AutoConfig.from_pretrained(tmp_path, num_draft_token=1)
    weights = load_file(tmp_path / "model.safetensors")
    weights.pop("draft_head.depths.1.eh_proj.weight")
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"no weights for draft_head\.depths\.1\.eh_proj\.weight"):
        AnyformerDrafter.from_pretrained(tmp_path)


def test_a_layer_is_dense_with_full_attention_and_the_bases_rope(tiny):
    base = tiny(
        num_experts=4,
        layer_types=["full_attention", "sliding_attention"],
        sliding_window=5,
        rope_parameters={
            "full_attention": {"rope_type": "default", "rope_theta": 500.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 10.0},
        },
    )
    layer = AnyformerDrafterConfig.of_base(base.config, kind="eagle").layer_config()
    assert layer.layer_types == ["full_attention"] and layer.num_experts == 0 and layer.num_hidden_layers == 1
    assert layer.rope_parameters["rope_theta"] == 500.0


def test_a_batch_knows_documents_and_padding(pair):
    base, drafter = pair("medusa")
    batch = drafter._batch(
        base, texts(1, 7), torch.tensor([[0, 1, 1, 1, 1, 1, 0]]), torch.tensor([[0, 0, 1, 2, 0, 1, 0]])
    )
    assert isinstance(batch, DraftBatch)
    assert batch.documents.tolist() == [[-1, 0, 0, 0, 1, 1, -1]]
