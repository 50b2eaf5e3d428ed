"""From a config to its diagram: the model is built without storage, so that blocks of a researcher's own are in it."""

from collections.abc import Iterator
from typing import Any

from torch import nn

from ...modeling.classifier_heads import AnyformerForTokenClassification
from ...modeling.layers import AnyformerLayer, DualParallelLayer, ParallelLayer, PostNormLayer
from ..planning.fake_model import empty_model, stacks_of
from .structure import Box, Column, Diagram, Item, Layer, Sum, fold
from .wording import NORMS, activation, attention_box, cross_box, inside, mlp_box, norm_box, number, own

PLACES = {
    "pre": "before each block",
    "post": "after each sum",
    "sandwich": "before and after each block",
    "branch": "after each block, within the branch",
    "parallel": "one before attention and feed-forward, side by side",
    "parallel_dual": "one before each of attention and feed-forward, side by side",
}


def diagram_of(name: str, config: Any, head: str) -> Diagram:
    """The diagram of a config.

    Args:
        head: a key of `modeling.HEADS`.
    """
    model = empty_model(config, head)
    stacks = stacks_of(model)
    columns = [_column(stack, config, len(stacks)) for stack in stacks]
    heads = tuple(_heads(model, config))
    last = columns[-1]
    columns[-1] = Column(last.title, last.source, last.before, last.groups, (*last.after, *heads), _result(head))
    return Diagram(name, tuple(columns), tuple(_facts(config, stacks[-1])))


def _result(head: str) -> str:
    return {"base": "hidden states", "masked_lm": "logits of the hidden tokens"}.get(head, "logits")


def _column(stack: Any, config: Any, stacks: int) -> Column:
    causal = stack.causal
    title = "Decoder" if causal else "Encoder"
    source = "tokens" if stacks == 1 else "tokens written so far" if causal else "tokens of the source"
    layers = [_layer(layer, config, stack.positions) for layer in stack.layers]
    after = () if isinstance(stack.norm, nn.Identity) else (norm_box(stack.norm, config),)
    result = "hidden states" if stacks == 1 or causal else "the encoder's states"
    return Column(title, source, tuple(_embeddings(stack, config, stacks)), fold(layers), after, result)


def _embeddings(stack: Any, config: Any, stacks: int) -> Iterator[Box]:
    lines = [f"{config.vocab_size:,} × {config.hidden_size:,}"]
    if stacks == 2:
        lines.append("shared by encoder and decoder" if config.share_embeddings else "of this side alone")
    if config.embedding_multiplier != 1:
        lines.append(f"× {number(config.embedding_multiplier)}")
    kind = config.position_embedding
    if kind == "learned":
        offset = f" behind {config.position_offset} unused rows" if config.position_offset else ""
        lines.append(f"+ learned positions, {config.max_position_embeddings:,}{offset}")
    elif kind == "sinusoidal":
        order = "alternating" if config.position_layout == "interleaved" else "sines first"
        lines.append(f"+ sinusoidal positions, {order}")
    elif kind not in ("rope", "alibi", "relative", "none"):
        lines += [f"positions: {own(stack.positions, 'position_embedding', config)}", *inside(stack.positions)]
    if stack.token_type_embeddings is not None:
        lines.append(f"+ token types, {config.type_vocab_size}")
    yield Box("embedding", "Token embeddings", tuple(lines))
    if not isinstance(stack.embed_norm, nn.Identity):
        yield norm_box(stack.embed_norm, config)


def _layer(layer: Any, config: Any, positions: nn.Module) -> Layer:
    if not isinstance(layer, AnyformerLayer):
        return Layer((Box("other", own(layer, "norm_position", config), tuple(inside(layer))),))
    note = f"× {number(config.residual_multiplier)}" if config.residual_multiplier != 1 else ""
    blocks = {"attention": attention_box(layer.self_attn, config, layer.place, positions)}
    if layer.cross_attn is not None:
        blocks["cross"] = cross_box(layer.cross_attn, config)
    blocks["mlp"] = mlp_box(layer.mlp, config)

    def norm(block: str, after: bool) -> tuple[Box, ...]:
        name = layer.norms.get(block, (None, None))[after]
        module = None if name is None else getattr(layer, name)
        return () if module is None or isinstance(module, nn.Identity) else (norm_box(module, config),)

    kind = type(layer)
    if kind.wire is ParallelLayer.wire:
        shared = norm("attention", False)
        return Layer((Sum(((blocks["attention"],), (blocks["mlp"],)), shared, note),))
    if kind.wire is DualParallelLayer.wire:
        ways = tuple((*norm(name, False), blocks[name]) for name in ("attention", "mlp"))
        return Layer((Sum(ways, (), note),))
    items: list[Item] = []
    if kind.wire is not AnyformerLayer.wire or kind.add not in (AnyformerLayer.add, PostNormLayer.add):
        items.append(Box("other", own(layer, "norm_position", config), ("joins the following in its own way",)))
    for name, box in blocks.items():
        if kind.add is PostNormLayer.add:
            items += [Sum(((box,),), (), note), *norm(name, True)]
        else:
            items.append(Sum(((*norm(name, False), box, *norm(name, True)),), (), note))
    return Layer(tuple(items))


def _heads(model: Any, config: Any) -> Iterator[Box]:
    """What stands on the body."""
    body = model.base_model
    width = f"{config.hidden_size:,}"
    if getattr(body, "pooler", None) is not None:
        yield Box("head", "Pooler", (f"first token, {width} → {width}, tanh",))
    for name, module in model.named_children():
        if module is body or module is None or not any(True for _ in module.parameters()):
            continue
        if name == "lm_head_transform":
            bias = ", bias" if config.head_transform_bias else ""
            lines = (f"{width} → {width}{bias}", activation(config.hidden_act), norm_box(module.norm, config).title)
            yield Box("head", "Transform", lines)
        elif name == "lm_head":
            yield Box("head", "Language-model head", tuple(_lm_head(config)))
        elif isinstance(module, nn.Linear):
            yield Box("head", _HEADS.get(name, name), tuple(_linear_head(name, module, model)))
        else:
            yield Box("head", f"{name}: {type(module).__name__}", tuple(inside(module)))


_HEADS = {"score": "Classifier", "qa_outputs": "Beginning and end of the answer", "nsp_head": "Next sentence"}


def _linear_head(name: str, module: nn.Linear, model: Any) -> Iterator[str]:
    yield f"{module.in_features:,} → {module.out_features:,}{', bias' if module.bias is not None else ''}"
    if name == "score":
        which = {"first": "the first token", "last": "the last token", "mean": "the mean of all tokens"}
        every = isinstance(model, AnyformerForTokenClassification)
        yield "reads every token" if every else f"reads {which[model.config.classifier_pooling]}"


def _lm_head(config: Any) -> Iterator[str]:
    bias = ", bias" if config.lm_head_bias else ""
    yield f"{config.hidden_size:,} → {config.vocab_size:,}{bias}"
    if config.tie_word_embeddings:
        yield "tied: the weight of the token embeddings"
    if config.logit_scale != 1:
        yield f"logits × {number(config.logit_scale)}"
    if config.final_logit_softcapping is not None:
        yield f"logits capped softly at {number(config.final_logit_softcapping)}"


def _facts(config: Any, stack: Any) -> Iterator[tuple[str, str]]:
    """What is true of the whole model."""
    layers = f"{config.num_hidden_layers} layers"
    if config.architecture == "encoder-decoder":
        layers = f"{config.num_encoder_layers} + {layers}"
    yield "shape", f"{config.architecture}, {layers}, width {config.hidden_size:,}"
    yield "longest text", f"{config.max_position_embeddings:,} tokens"
    if config.position_embedding == "none":
        yield "positions", "none"
    norm = stack.norm if not isinstance(stack.norm, nn.Identity) else None
    title = norm_box(norm, config).title if norm is not None else config.norm
    where = PLACES.get(config.norm_position, config.norm_position)
    yield "norms", f"{NORMS.get(config.norm, title)}, eps {config.norm_eps:g}, {where}"
    names = ("attention", "hidden", "activation", "embedding", "classifier")
    rates = {name: getattr(config, f"{name}_dropout") for name in names}
    if any(rates.values()):
        yield "dropout", ", ".join(f"{name} {number(rate)}" for name, rate in rates.items() if rate)
    losses = {"router_aux_loss_coef": "balancing", "router_z_loss_coef": "router z", "z_loss_coef": "z"}
    if added := [f"{word} {number(getattr(config, name))}" for name, word in losses.items() if getattr(config, name)]:
        yield "added losses", ", ".join(added)
    ranges = "".join(f", {part} {number(std)}" for part, std in (config.initializer_ranges or {}).items())
    std = "" if config.initialization == "fan_in" else f" {number(config.initializer_range)}"
    yield "initial weights", f"{config.initialization.replace('_', ' ')}{std}{ranges}"
