"""Dataclass fields read from source, against the classes themselves."""

import sys
import textwrap
from pathlib import Path

import pytest

from anyformer.recipes.introspection import UNKNOWN, class_fields


def write(text: str, name: str) -> None:
    Path(name).parent.mkdir(parents=True, exist_ok=True)
    Path(name).write_text(textwrap.dedent(text))


def test_fields_equal_those_of_the_real_classes():
    """Names and literal defaults, against the imported classes."""
    import dataclasses

    from peft import LoraConfig
    from trl import SFTConfig

    from anyformer import AnyformerConfig

    cases = [
        ("trl.trainer.sft_config", SFTConfig),
        ("trl", SFTConfig),
        ("peft.tuners.lora.config", LoraConfig),
        ("anyformer.modeling.configuration_anyformer", AnyformerConfig),
    ]
    for module, cls in cases:
        read = class_fields(module, cls.__name__)
        real = {field.name: field for field in dataclasses.fields(cls) if field.init}
        assert set(read) == set(real)
        for name, field in read.items():
            if field.default is not UNKNOWN:
                assert field.default == real[name].default, name


def test_an_unknown_class_or_module():
    with pytest.raises(LookupError, match="no class NoSuchConfig"):
        class_fields("trl", "NoSuchConfig")
    with pytest.raises(LookupError, match=r"no source found for module trl\.nowhere"):
        class_fields("trl.nowhere", "X")


def test_source_types(tmp_path, monkeypatch):
    """Annotations of every form, from a package that would fail on import."""
    monkeypatch.chdir(tmp_path)
    write(
        """\
        from dataclasses import dataclass, field
        from enum import Enum
        from typing import Any, ClassVar, Literal, Optional, Union
        import missing_module
        class Colour(Enum):
            RED = "red"
            BLUE = "blue"
        @dataclass
        class Inner:
            size: int = 1
        class NoData:
            nothing: int = 1
        @dataclass
        class Base(NoData):
            a: int = 1
            b: "str | None" = None
            constant: ClassVar[int] = 1
            gone: int = 0
        @dataclass
        class Config(Base):
            a: float = 2.0
            colour: Colour | str = "red"
            inner: Optional[Inner] = None
            pick: str = field(default="x", metadata={"choices": ["x", "y"]})
            odd: missing_module.Thing = None
            half: Union[str, missing_module.Thing, None] = None
            items: list[int | str] = field(default_factory=list)
            gone: int = field(init=False, default=0)
            word: Literal["p", "q"] = "p"
        """,
        "brokenpackage/config.py",
    )
    write("from .config import Config as Config\nimport missing_module\n", "brokenpackage/__init__.py")
    monkeypatch.syspath_prepend(str(tmp_path))
    fields = class_fields("brokenpackage", "Config")
    assert list(fields) == ["a", "b", "colour", "inner", "pick", "odd", "half", "items", "word"]
    shown = {name: str(field.type).replace("typing.", "") for name, field in fields.items()}
    assert shown["a"] == "<class 'float'>"
    assert shown["b"] == "Optional[str]"
    assert shown["colour"] == "Literal['red', 'blue']"
    assert shown["pick"] == "Literal['x', 'y']"
    assert shown["odd"] == "Any"
    assert shown["half"] == "Optional[str]"
    assert shown["items"] == "list[Union[int, str]]"
    assert shown["word"] == "Literal['p', 'q']"
    assert [f.default for f in fields.values()][:3] == [2.0, None, "red"]
    assert "brokenpackage" not in sys.modules
