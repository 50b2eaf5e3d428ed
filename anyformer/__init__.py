"""Any Transformer from one Hugging Face config, and a suite that trains it from YAML.

`import anyformer` makes `AutoModelForCausalLM.from_pretrained` open anyformer folders. It costs no import of torch:
the classes are registered the moment transformers' Auto classes are imported, or at once where they already are.
The names below are the public API; each is imported when it is first used.
"""

import importlib
import importlib.abc
import importlib.machinery
import importlib.metadata
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .modeling import AnyformerConfig as AnyformerConfig
    from .modeling import AnyformerDrafter as AnyformerDrafter
    from .modeling import AnyformerDrafterConfig as AnyformerDrafterConfig
    from .modeling import AnyformerForCausalLM as AnyformerForCausalLM
    from .modeling import AnyformerForConditionalGeneration as AnyformerForConditionalGeneration
    from .modeling import AnyformerForMaskedLM as AnyformerForMaskedLM
    from .modeling import AnyformerForPreTraining as AnyformerForPreTraining
    from .modeling import AnyformerForQuestionAnswering as AnyformerForQuestionAnswering
    from .modeling import AnyformerForSequenceClassification as AnyformerForSequenceClassification
    from .modeling import AnyformerForTokenClassification as AnyformerForTokenClassification
    from .modeling import AnyformerModel as AnyformerModel
    from .modeling.interop import from_hf as from_hf
    from .modeling.interop import to_hf as to_hf

__version__ = importlib.metadata.version("anyformer")

_PUBLIC = {
    "AnyformerConfig": "modeling",
    "AnyformerDrafter": "modeling",
    "AnyformerDrafterConfig": "modeling",
    "AnyformerForCausalLM": "modeling",
    "AnyformerForConditionalGeneration": "modeling",
    "AnyformerForMaskedLM": "modeling",
    "AnyformerForPreTraining": "modeling",
    "AnyformerForQuestionAnswering": "modeling",
    "AnyformerForSequenceClassification": "modeling",
    "AnyformerForTokenClassification": "modeling",
    "AnyformerModel": "modeling",
    "from_hf": "modeling.interop",
    "to_hf": "modeling.interop",
}
__all__ = [*sorted(_PUBLIC), "__version__"]


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'anyformer' has no attribute {name!r}")
    return getattr(importlib.import_module(f".{_PUBLIC[name]}", __name__), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


class _RegisterWithAuto(importlib.abc.MetaPathFinder):
    """Imports `anyformer.modeling`, which registers itself, once transformers' Auto package has been imported.

    Not at once: half-loaded modules of transformers import the Auto package, and `anyformer.modeling` needs them
    whole. So every transformers module is counted in and out, and the outermost one to finish does it.
    """

    auto = "transformers.models.auto"

    def __init__(self) -> None:
        self.loading = 0

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> Any:
        if not fullname.startswith("transformers."):
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def execute_and_register(module: Any) -> None:
            self.loading += 1
            try:
                execute(module)
            finally:
                self.loading -= 1
            if not self.loading and self.auto in sys.modules and self in sys.meta_path:
                sys.meta_path.remove(self)
                importlib.import_module(".modeling", __name__)

        spec.loader.exec_module = execute_and_register  # type: ignore[method-assign]
        return spec


if _RegisterWithAuto.auto in sys.modules:
    importlib.import_module(".modeling", __name__)
else:
    sys.meta_path.insert(0, _RegisterWithAuto())
