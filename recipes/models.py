"""The model and the tokenizer that a recipe names; what a path may be, `model_paths` says."""

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .context_extension import complete_rope, extend_context
from .errors import UserError
from .loading import load_preset
from .model_paths import PACKAGE, resolve_path
from .tokens.byte_tokenizer import BYTES, byte_tokenizer
from .tokens.learned_tokenizer import learn_tokenizer, learned_size

if TYPE_CHECKING:
    import torch

    from ..modeling import AnyformerConfig, AnyformerPreTrainedModel
    from ..modeling.interop import LogitComparison

# Config fields that a checkpoint's weights do not depend on.
FREE_FIELDS = {
    "activation_dropout",
    "attention_dropout",
    "classifier_dropout",
    "classifier_pooling",
    "embedding_dropout",
    "hidden_dropout",
    "max_position_embeddings",
    "rope_parameters",
    "router_aux_loss_coef",
    "router_bias_update_rate",
    "router_z_loss_coef",
    "use_cache",
    "z_loss_coef",
}
# One of these stands in a folder that has a tokenizer.
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "vocab.txt")
# One text for the comparison of logits: 512 tokens of it, or all there are.
CHECK_TOKENS = 512


def load_tokenizer(model: Any, *, ends: bool = True, texts: Callable[[], Iterable[str]] | None = None) -> Any:
    """The tokenizer of a recipe's `model` section; see `load_tokenizer_from`.

    Args:
        texts: of the recipe's training rows, for a tokenizer that is learned from them.
    """
    if size := learned_size(model.tokenizer):
        if texts is None:
            raise UserError(f"model.tokenizer: {model.tokenizer} is learned from a recipe's rows, and there are none")
        return learn_tokenizer(texts(), size, encoder=not ends)
    return load_tokenizer_from(
        resolve_path(model.tokenizer or model.path),
        revision=None if model.tokenizer else model.revision,
        trust_remote_code=model.trust_remote_code,
        ends=ends,
    )


def load_tokenizer_from(
    path: str, *, revision: str | None = None, trust_remote_code: bool = False, ends: bool = True
) -> Any:
    """The tokenizer beside a model, with a pad token.

    Args:
        ends: the model has to learn where to stop, as every decoder does and no encoder.

    Raises:
        UserError: there is none that can be read, or it has no token to end with, or to pad with.
    """
    tokenizer = read_tokenizer(path, revision=revision, trust_remote_code=trust_remote_code)
    if ends and tokenizer.eos_token_id is None:
        raise UserError(f"the tokenizer of {path!r} has no eos token, so a model could not learn to stop")
    if tokenizer.pad_token_id is None:
        if tokenizer.eos_token_id is None:
            raise UserError(f"the tokenizer of {path!r} has no pad token: set it in its tokenizer_config.json")
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def read_tokenizer(path: str, *, revision: str | None = None, trust_remote_code: bool = False) -> Any:
    """The tokenizer beside a model, or `builtin:bytes`, as it is.

    Raises:
        UserError: there is none that can be read.
    """
    from transformers import AutoTokenizer

    if path == BYTES:
        return byte_tokenizer()

    arguments: dict[str, Any] = {"trust_remote_code": trust_remote_code, "revision": revision}
    where = path
    if path.endswith(".gguf"):
        arguments["gguf_file"] = Path(path).name
        where = str(Path(path).parent)
    here = Path(where).expanduser().exists()
    if not here and where.startswith((".", "/", "~")):
        raise UserError(f"no tokenizer can be read from {path!r}: there is no such file or folder")
    try:
        return AutoTokenizer.from_pretrained(where, **arguments)
    except Exception as error:  # the library raises a dozen kinds, down to bare Exception from its Rust part
        asked = "" if here else "there is no such folder, and of the Hub: "
        raise UserError(f"no tokenizer can be read from {path!r}: {asked}{first_line(error)}") from error


def holds_tokenizer(path: str) -> bool:
    """Whether a folder has a tokenizer."""
    return any((Path(path) / name).is_file() for name in TOKENIZER_FILES)


def auto_class_of(architecture: str) -> str | None:
    """The Auto class that opens one of our classes, by its name; None for another's."""
    from ..modeling import AUTO_MAP

    return next((auto for auto, path in AUTO_MAP.items() if path.rpartition(".")[2] == architecture), None)


def load_pretrained(
    path: str, *, trust_remote_code: bool = False, auto_class: str | None = None, sharded: bool = False
) -> Any:
    """A saved model, ready to use.

    Args:
        auto_class: the Auto class to open it with; default: AutoModelForCausalLM.
        sharded: each process of the run reads its part; all of them call this.

    Raises:
        UserError: there is no model, or it needs code that the user has not agreed to run.
    """
    import transformers

    from ..modeling.interop import import_model
    from .adapters import open_adapter, opens_by_itself
    from .parallel.whole import shards_wanted

    where, auto_class = resolve_path(path), auto_class or "AutoModelForCausalLM"
    try:
        if where.endswith(".gguf"):
            return import_model(where)[0].eval()
        folder = adapter_folder(where)
        if folder is not None and not opens_by_itself(folder):
            return open_adapter(folder, auto_class, trust_remote_code=trust_remote_code)
        auto, options = getattr(transformers, auto_class), shards_wanted() if sharded else {}
        return auto.from_pretrained(where, dtype="auto", trust_remote_code=trust_remote_code or None, **options).eval()
    except Exception as error:  # as above: anything that reading a broken folder can raise
        raise UserError(f"{path}: no model can be opened there: {first_line(error)}") from error


def adapter_folder(path: str) -> Path | None:
    """The folder of an adapter, downloaded where `path` is a Hub id; None where a whole model is."""
    from huggingface_hub import snapshot_download
    from transformers.utils import find_adapter_config_file

    config = find_adapter_config_file(path)
    if config is None or Path(path).is_dir():
        return None if config is None else Path(path)
    return Path(snapshot_download(path, allow_patterns=["adapter_*", "*.json"]))


def config_and_tokenizer(
    model: Any,
    shapes: Sequence[str] = ("decoder",),
    rows_for: Callable[[int], int] | None = None,
    texts: Callable[[], Iterable[str]] | None = None,
) -> "tuple[AnyformerConfig, Any]":
    """Config and tokenizer of a recipe's `model` section, without loading a weight.

    Args:
        shapes: the architectures that the objective can train.
        rows_for: rows that the embedding will be given, from those that it has; default: it stays as it is.
        texts: of the recipe's training rows, for a tokenizer that is learned from them.

    Raises:
        UserError: no such model, an unknown family, a config that makes no sense, a shape that the objective cannot
            train, or a tokenizer of another model.
    """
    from huggingface_hub.errors import StrictDataclassError

    from ..modeling.interop import ConversionError

    try:
        if model.preset:
            preset = load_preset(model.preset)
            shape = (preset | model.config).get("architecture")
            tokenizer = load_tokenizer(model, ends=shape != "encoder", texts=texts)
            config = config_of_preset(model, tokenizer)
        else:
            config = config_of_checkpoint(model)
            tokenizer = load_tokenizer(model, ends=config.architecture != "encoder")
    except (ConversionError, StrictDataclassError, TypeError) as error:
        raise UserError(f"model: {error}") from error
    check_shape(config, model, shapes)
    rows = rows_for(config.vocab_size) if rows_for else config.vocab_size
    if len(tokenizer) > rows:
        raise UserError(
            f"model: the tokenizer has {len(tokenizer)} tokens but the model's vocab_size is {rows}: "
            "they do not belong together, or model.config.vocab_size must be larger"
        )
    return config, tokenizer


def check_shape(config: "AnyformerConfig", model: Any, shapes: Sequence[str]) -> None:
    """Raises:
    UserError: the objective does not train models of this architecture.
    """
    if config.architecture not in shapes:
        raise UserError(
            f"model: {model.path or model.preset} has architecture {config.architecture!r}; the objective trains "
            f"{' or '.join(shapes)}"
        )


def config_of_preset(model: Any, tokenizer: Any = None) -> "AnyformerConfig":
    """The config of a recipe's `model` section with a preset, as its `config` changes it.

    Args:
        tokenizer: whose vocabulary the model has; None: the preset's own.
    """
    from ..modeling import AnyformerConfig

    ids = {} if tokenizer is None else _ids_of(tokenizer)
    config = AnyformerConfig(**(load_preset(model.preset) | ids | model.config))
    extend(config, model)  # of a pipeline's stage that starts from a model which is not there yet
    return config


def config_of_checkpoint(model: Any, *, config_alone: bool = False) -> "AnyformerConfig":
    """The config of a recipe's `model` section with a path, as its `config` changes it.

    Args:
        config_alone: of a Hub id nothing but the config is fetched.

    Raises:
        UserError: a field that the weights depend on.
    """
    from ..modeling import HEADS, AnyformerConfig
    from ..modeling.interop.convert import family_of
    from ..modeling.interop.source import CONFIG, WHOLE, open_source

    source = open_source(
        resolve_path(model.path),
        files=CONFIG if config_alone else WHOLE,
        revision=model.revision,
        trust_remote_code=model.trust_remote_code,
    )
    if source.config.model_type == AnyformerConfig.model_type:
        config = AnyformerConfig(**source.config.to_dict())
    else:
        family = family_of(source.config)
        head = family.head_of(source.stock_class)
        config = family.from_foreign_config(source.config, head)
        config.architectures = [HEADS[head].__name__]  # what the checkpoint holds
    for name in model.config:
        if name not in FREE_FIELDS:
            raise UserError(
                f"model.config.{name}: the weights of {model.path} were made for {getattr(config, name, None)!r}; of a "
                f"checkpoint only these can be changed: {', '.join(sorted(FREE_FIELDS))}"
            )
    _check_length(config, model)
    changes = dict(model.config)
    if "rope_parameters" in changes:
        changes["rope_parameters"] = complete_rope(config, changes["rope_parameters"] or {})
    for name, value in changes.items():
        setattr(config, name, value)
    if config.rope_parameters:
        config.standardize_rope_params()
    extend(config, model)
    config.validate()
    return config


def extend(config: "AnyformerConfig", model: Any) -> None:
    """Do to the config what the section's `context_extension` says.

    Raises:
        UserError: this model cannot be extended so.
    """
    if (extension := getattr(model, "context_extension", None)) is not None:
        extend_context(config, extension.method, extension.length)


def _check_length(config: "AnyformerConfig", model: Any) -> None:
    """Raises:
    UserError: another `max_position_embeddings` than the weights, or this scaling, can have.
    """
    wanted, trained = model.config.get("max_position_embeddings"), config.max_position_embeddings
    if wanted in (None, trained):
        return
    if config.position_embedding == "learned":
        raise UserError(
            f"model.config.max_position_embeddings: {model.path} has learned positions for {trained} tokens, and no "
            "others can be made of them: leave it out"
        )
    rope = model.config.get("rope_parameters", config.rope_parameters)
    if "'dynamic'" in str(rope) and wanted > trained:
        raise UserError(
            f"model.config.max_position_embeddings: rope_type 'dynamic' stretches texts beyond it, so it must stay the "
            f"length that the model was trained for, {trained}; model.context_extension with method ntk changes the "
            "base for good"
        )


def empty_model(
    config: "AnyformerConfig", head: str, attention: str, dtype: "torch.dtype | None"
) -> "AnyformerPreTrainedModel":
    """A model whose weights are memory that nothing was written to, and so takes no room; buffers have their values.

    Accelerate, which fills it from the first process, tells parameters apart by their place in memory.
    """
    import torch
    from accelerate import init_empty_weights

    from ..modeling import HEADS

    config._attn_implementation = attention
    with init_empty_weights(include_buffers=False):
        model: Any = HEADS[head](config)
    model = model.to(dtype) if dtype else model
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            setattr(module, name, torch.nn.Parameter(torch.empty_like(parameter, device="cpu")))
    model.tie_weights()
    return model


def load_model(
    model: Any, config: "AnyformerConfig", *, seed: int, head: str = "causal_lm"
) -> "tuple[AnyformerPreTrainedModel, str]":
    """The weights, imported, opened, or made anew from `seed` for a preset; and the family they came from.

    Args:
        head: key of `modeling.HEADS`, for a preset; a checkpoint comes with its own, see `with_head`.

    Raises:
        UserError: the weights cannot be read or contradict the config.
    """
    import torch
    from transformers import set_seed

    from ..modeling import HEADS
    from ..modeling.interop import ConversionError, import_model

    dtype = None if model.dtype == "auto" else getattr(torch, model.dtype)
    config._attn_implementation = model.attn_implementation
    set_seed(seed)
    if model.preset:
        try:
            built = HEADS[head](config)
        except ValueError as error:  # an attention that this architecture cannot use
            raise UserError(f"model.attn_implementation: {first_line(error)}") from error
        return (built.to(dtype) if dtype else built), config.model_type
    try:
        loaded, report = import_model(
            resolve_path(model.path),
            dtype=dtype,
            config=config,
            revision=model.revision,
            trust_remote_code=model.trust_remote_code,
        )
    except (ConversionError, ValueError, RuntimeError, ImportError, OSError) as error:
        raise UserError(f"model {model.path!r}: {first_line(error)}") from error
    return loaded, report.family


# What a run may start at random over the body of a checkpoint; a whole vocabulary it may not.
NEW_PARTS = ("score.", "qa_outputs.", "nsp_head.", "lm_head_transform.", "lm_head.bias", "model.pooler.")


def with_head(
    model: "AnyformerPreTrainedModel", config: "AnyformerConfig", head: str, *, seed: int
) -> "AnyformerPreTrainedModel":
    """The model under another head; tensors that both have are shared, not copied, what is new starts from `seed`.

    Raises:
        UserError: the checkpoint has no such head and it is none that can start at random.
    """
    import torch
    from transformers import set_seed

    from ..modeling import HEADS

    wanted = HEADS[head]
    if type(model) is wanted:
        return model
    with torch.device("meta"):
        built: Any = wanted(config)
    built.load_state_dict(_under(model, built), strict=False, assign=True)
    built.tie_weights()
    device = next(model.parameters()).device
    missing = [n for n, p in built.named_parameters() if p.is_meta]
    if not all(name.startswith(NEW_PARTS) for name in missing):
        raise UserError(
            f"model: the checkpoint holds a {type(model).__name__}, which has no {', '.join(missing[:3])}: the "
            f"objective trains a {wanted.__name__}"
        )
    set_seed(seed)
    for module in built.modules():
        own = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
        if any(tensor.is_meta for tensor in own):
            module.to_empty(device=device, recurse=False)
            built._init_weights(module)
    return built.to(model.dtype).train(model.training)


def _under(model: Any, built: Any) -> dict[str, Any]:
    """The state dict of one class under the names of another: the body stands at the top or inside `model`."""
    held, wanted = model.state_dict(), set(built.state_dict())
    inside, outside = {f"model.{n}": t for n, t in held.items()}, {n.removeprefix("model."): t for n, t in held.items()}
    return max(({n: t for n, t in names.items() if n in wanted} for names in (held, inside, outside)), key=len)


def compare_with_stock(model: "AnyformerPreTrainedModel", tokenizer: Any, stock: Any = None) -> "LogitComparison":
    """Compare logits with the stock class, which shares the tensors: no second copy is held.

    Args:
        tokenizer: turns a text into the tokens to compare on; None: random tokens.
        stock: the exported model; default: made here.
    """
    import torch

    from ..modeling.interop import compare_logits, to_hf

    if tokenizer is None:
        generator = torch.Generator().manual_seed(0)
        tokens = torch.randint(0, model.config.vocab_size, (CHECK_TOKENS,), generator=generator)
    else:
        text = Path(__file__).read_text(encoding="utf-8")
        tokens = torch.tensor(tokenizer(text, add_special_tokens=False)["input_ids"][:CHECK_TOKENS])
    tokens = tokens[: model.config.max_position_embeddings]
    return compare_logits(model, stock or to_hf(model, copy=False), tokens)


def require_equal(comparison: "LogitComparison", name: str) -> str:
    """The comparison in words.

    Raises:
        UserError: the logits differ by more than the order of additions explains.
    """
    if not comparison.equal:
        raise UserError(
            f"the logits differ from {name} by {comparison.plain:.2e} (left-padded {comparison.padded:.2e}) where "
            f"{comparison.tolerance:.0e} is allowed. Please report the model"
        )
    return (
        f"logits against {name}: largest difference {comparison.plain:.1e} on {comparison.tokens} tokens, "
        f"{comparison.padded:.1e} on a left-padded batch of 3 (largest logit {comparison.scale:.1f})"
    )


def hub_id(model: Any) -> str | None:
    """The base model's Hub id, where that is what `model.path` names."""
    path = model.path
    local = not path or path.startswith(PACKAGE) or path.endswith(".gguf") or Path(path).exists()
    return None if local else path


def _ids_of(tokenizer: Any) -> dict[str, Any]:
    return {
        "vocab_size": len(tokenizer),
        "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
    }


def first_line(error: Exception) -> str:
    """The first line that says something: the library puts the validator's name before the reason."""
    lines = [line.strip().removeprefix("ValueError: ") for line in str(error).strip().splitlines()]
    kept = [line for line in lines if line and not line.startswith("Class validation error")]
    return kept[0] if kept else type(error).__name__
