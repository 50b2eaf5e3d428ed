"""Named variants: each architectural choice is one config field, each value one class registered under it.

A researcher adds a variant with two lines and no edit elsewhere::

    @MLPS.register("my_mlp")
    class MyMLP(nn.Module): ...

    AnyformerConfig(mlp="my_mlp")

A class is called as the built-in ones of its field are: feed-forward blocks and routers with the config, norms with
(size, eps), position embeddings with (config, causal), attentions and layers with what `GroupedQueryAttention` and
`AnyformerLayer` take. It answers `forward` as they do.

The built-in names stand here, free of torch, so that a config can be validated without building anything.
"""

from collections.abc import Callable, Iterator


class Registry:
    """The classes that one config field can name.

    Args:
        field: the `AnyformerConfig` field whose values these are.
        builtin: names that the modules of this package register when they are imported.
    """

    def __init__(self, field: str, *builtin: str) -> None:
        self.field = field
        self._names: dict[str, type | None] = dict.fromkeys(builtin)

    def register(self, name: str) -> Callable[[type], type]:
        """Class decorator that makes `name` a value of the field.

        Raises:
            ValueError: when another class already has the name.
        """

        def decorate(cls: type) -> type:
            present = self._names.get(name)
            if present is not None and present.__qualname__ != cls.__qualname__:
                raise ValueError(
                    f"{self.field}={name!r} is already the class {present.__qualname__}; choose another name"
                )
            self._names[name] = cls
            return cls

        return decorate

    def __getitem__(self, name: str) -> type:
        cls = self._names.get(name)
        if cls is None:
            raise KeyError(f"{self.field}={name!r} has no class; known: {', '.join(self)}")
        return cls

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)


ATTENTIONS = Registry("attention", "gqa", "mla")
POSITION_EMBEDDINGS = Registry("position_embedding", "rope", "learned", "sinusoidal", "alibi", "relative", "none")
NORMS = Registry(
    "norm",
    "rmsnorm",
    "rmsnorm_offset",
    "rmsnorm_plain",
    "layernorm",
    "layernorm_nobias",
    "layernorm_offset",
    "layernorm_plain",
)
LAYERS = Registry("norm_position", "pre", "post", "sandwich", "branch", "parallel", "parallel_dual")
MLPS = Registry("mlp", "gated", "dense", "clamped")
ROUTERS = Registry("router", "softmax", "sigmoid")
DRAFTERS = Registry("kind", "medusa", "eagle", "mtp")  # of AnyformerDrafterConfig

CHOICES = {r.field: r for r in (ATTENTIONS, POSITION_EMBEDDINGS, NORMS, LAYERS, MLPS, ROUTERS)}

# Fields whose values name no class of their own.
VALUES = {
    "architecture": ("decoder", "encoder", "encoder-decoder"),
    "position_layout": ("half", "interleaved"),
    "qk_norm": ("none", "head", "separate", "full"),
    "group_score": ("max", "top2"),
    "classifier_pooling": ("first", "last", "mean"),
    "initialization": ("normal", "depth_scaled", "fan_in"),
}
LAYER_TYPES = ("full_attention", "sliding_attention", "global_sliding_attention")
MLP_LAYER_TYPES = ("dense", "sparse")
