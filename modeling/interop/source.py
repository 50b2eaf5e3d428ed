"""Where a foreign model comes from: a folder, a Hub id, a GGUF file, or a model in memory.

Each source gives its config and its tensors by foreign name; tensors of a folder are mapped from the files, so
reading them costs no second copy.
"""

import copy as copying
import json
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
import transformers
from huggingface_hub import snapshot_download
from huggingface_hub.errors import (
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    StrictDataclassError,
)
from safetensors import SafetensorError, safe_open
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PreTrainedModel
from transformers.configuration_utils import PreTrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from .family import ConversionError


class Source:
    """A foreign model: `config`, `tensors()`, and `generation_config` where there is one."""

    config: PreTrainedConfig
    generation_config: GenerationConfig | None = None

    @property
    def stock_class(self) -> str | None:
        """Name of the class that wrote the model, where it says so."""
        return (self.config.architectures or [None])[0]

    def tensors(self, library_layout: bool = False) -> Iterator[tuple[str, torch.Tensor]]:
        """Names and tensors as the stock class holds them.

        Args:
            library_layout: files hold another layout, and the stock class must be loaded to turn it.
        """
        raise NotImplementedError


@dataclass
class ModelSource(Source):
    """A model in memory; its tensors are copied, so that training one model does not change the other."""

    model: PreTrainedModel

    @property
    def config(self) -> PreTrainedConfig:  # type: ignore[override]
        config = self.model.config
        quantization = getattr(config, "quantization_config", None)
        if isinstance(quantization, dict):
            method = quantization.get("quant_method")
        else:
            method = getattr(quantization, "quant_method", None)
        if method == "gguf":  # the library has dequantised the weights and leaves the entry behind
            config = copying.deepcopy(config)
            del config.quantization_config
        return config

    @property
    def generation_config(self) -> GenerationConfig | None:  # type: ignore[override]
        return getattr(self.model, "generation_config", None)

    @property
    def stock_class(self) -> str:
        return type(self.model).__name__

    def tensors(self, library_layout: bool = False) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in self.model.state_dict().items():
            yield name, tensor.detach().clone()


# What reading a damaged or foreign file raises, header and tensors alike.
_UNREADABLE_GGUF = (ValueError, KeyError, IndexError, OSError, EOFError, RuntimeError, struct.error)


class GGUFSource(Source):
    """A GGUF file; transformers dequantises it into the stock class."""

    def __init__(self, path: Path, dtype: torch.dtype | None) -> None:
        if not path.is_file():
            raise ConversionError(f"{path}: no such file")
        try:
            self.config = AutoConfig.from_pretrained(str(path.parent), gguf_file=path.name)
        except _UNREADABLE_GGUF as error:
            raise ConversionError(f"{path}: not a GGUF file that transformers reads: {error}") from error
        self._path = path
        self._arguments = {"gguf_file": path.name, "dtype": dtype or torch.float32, "config": self.config}
        self._folder = str(path.parent)

    @cached_property
    def _model(self) -> PreTrainedModel:
        try:
            return AutoModelForCausalLM.from_pretrained(self._folder, **self._arguments)
        except _UNREADABLE_GGUF as error:
            raise ConversionError(f"{self._path}: damaged or cut short: {error}") from error

    @property
    def generation_config(self) -> GenerationConfig | None:  # type: ignore[override]
        return self._model.generation_config

    @property
    def stock_class(self) -> str | None:
        """As the library opens such a file; the weights are not read for it."""
        return MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(self.config.model_type)

    def tensors(self, library_layout: bool = False) -> Iterator[tuple[str, torch.Tensor]]:
        yield from self._model.state_dict().items()


# Names of the first BERT files, which the library still reads.
_OLD_NAMES = {"LayerNorm.gamma": "LayerNorm.weight", "LayerNorm.beta": "LayerNorm.bias"}


class FolderSource(Source):
    """A folder with config.json and safetensors shards."""

    def __init__(self, folder: Path, trust_remote_code: bool = False) -> None:
        self.folder = folder
        if not (folder / "config.json").is_file():
            raise ConversionError(f"{folder}: no config.json, so this is not a model folder")
        try:
            self.config = AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)
        except (StrictDataclassError, ValueError, TypeError, KeyError, OSError) as error:
            raise ConversionError(f"{folder / 'config.json'}: {error}") from error
        if (folder / "generation_config.json").is_file():
            try:
                self.generation_config = GenerationConfig.from_pretrained(folder)
            except (ValueError, TypeError, OSError) as error:
                raise ConversionError(f"{folder / 'generation_config.json'}: {error}") from error

    def shards(self) -> list[Path]:
        index = self.folder / "model.safetensors.index.json"
        names = ["model.safetensors"]
        # As the library reads a folder: saved anew with fewer shards, it may still hold the old index.
        if index.is_file() and not (self.folder / names[0]).is_file():
            try:
                names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                raise ConversionError(f"{index}: no index of shards: {error}") from error
        shards = [self.folder / name for name in names]
        for shard in shards:
            if not shard.is_file():
                raise ConversionError(
                    f"{shard}: missing. Weights are read from safetensors; save a .bin checkpoint once with "
                    "`save_pretrained`"
                )
        return shards

    def tensors(self, library_layout: bool = False) -> Iterator[tuple[str, torch.Tensor]]:
        if library_layout:
            yield from self._loaded().state_dict().items()
            return
        for shard in self.shards():
            try:
                with safe_open(shard, framework="pt") as file:
                    for name in file.keys():  # noqa: SIM118  safe_open is no mapping
                        tensor = file.get_tensor(name)
                        for old, new in _OLD_NAMES.items():
                            name = name.replace(old, new)
                        yield name, tensor
            except SafetensorError as error:
                raise ConversionError(f"{shard}: damaged or cut short: {error}") from error

    def _loaded(self) -> PreTrainedModel:
        self.shards()  # says which file is missing
        stock = getattr(transformers, self.stock_class or "", None)
        if stock is None:
            raise ConversionError(
                f"{self.folder / 'config.json'}: architectures={self.config.architectures!r} names no class"
            )
        try:
            model, info = stock.from_pretrained(self.folder, dtype="auto", output_loading_info=True)
        except (SafetensorError, RuntimeError, ValueError, OSError) as error:
            raise ConversionError(f"{self.folder}: the weights cannot be read: {error}") from error
        for what, names in (("no weights for", info["missing_keys"]), ("weights left over:", info["unexpected_keys"])):
            if names:
                raise ConversionError(f"{self.folder}: {what} {', '.join(sorted(names)[:5])}")
        return model


# What of a repository is fetched: the whole model, or what says its shape.
WHOLE = ("*.json", "*.safetensors", "*.model", "*.txt", "*.jinja")
CONFIG = ("config.json", "generation_config.json")


def open_source(
    source: str | Path | PreTrainedModel,
    *,
    files: Sequence[str] = WHOLE,
    dtype: torch.dtype | None = None,
    revision: str | None = None,
    trust_remote_code: bool = False,
) -> Source:
    """The `Source` for a model, a folder, a `.gguf` file or a Hub id.

    Args:
        files: patterns of what is fetched of a Hub id.

    Raises:
        ConversionError: where there is nothing to read.
    """
    if isinstance(source, PreTrainedModel):
        return ModelSource(source)
    if not isinstance(source, str | Path):
        raise ConversionError(
            f"a {type(source).__name__} is neither a transformers model nor a path; of a PEFT model pass what "
            "merge_and_unload() returns"
        )
    path = Path(source)
    if path.suffix == ".gguf":
        return GGUFSource(path, dtype)
    if path.is_dir():
        return FolderSource(path, trust_remote_code)
    try:
        folder = snapshot_download(
            str(source),
            revision=revision,
            allow_patterns=list(files),
        )
    except (
        HFValidationError,
        HfHubHTTPError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        OSError,
    ) as error:
        first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ConversionError(
            f"{source}: neither a local folder nor a Hub repository that can be read ({first})"
        ) from error
    return FolderSource(Path(folder), trust_remote_code)
