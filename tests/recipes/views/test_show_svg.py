"""The SVG of `show`: it fits, it reads in light and dark, and nothing in it runs or is fetched."""

import re
import xml.etree.ElementTree as ET
from pathlib import Path

import matplotlib
import pytest
from chromium import Chromium
from PIL import ImageFont

from anyformer import AnyformerConfig
from anyformer.recipes.loading import load_preset
from anyformer.recipes.views.build import diagram_of
from anyformer.recipes.views.parameters import parameters_of, table
from anyformer.recipes.views.svg import DARK, LIGHT, as_svg

NAMES = ["llama-3-8b", "t5-base", "deepseek-v3", "gemma2-9b", "transformer-base", "bert-base"]
HEADS = {"decoder": "causal_lm", "encoder": "masked_lm", "encoder-decoder": "seq2seq_lm"}
SPACE = "{http://www.w3.org/2000/svg}"
HOSTILE = '</title><script>document.title="taken"</script><image href="http://127.0.0.1:9/x.png"/>&"'
MIXED = {"vocab_size": 99, "hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 4, "norm": "layernorm"}
MIXED |= {"residual_multiplier": 0.22, "layer_types": ["sliding_attention", "full_attention"], "sliding_window": 3}


def svg_of(config, name="x"):
    head = HEADS[config.architecture]
    return as_svg(diagram_of(name, config, head), list(table(parameters_of(config, head))))


def preset(name):
    return svg_of(AnyformerConfig(**load_preset(name)), name)


def pictures():
    for name in NAMES:
        yield name, preset(name)
    for place in ("parallel", "parallel_dual", "branch"):
        yield place, svg_of(AnyformerConfig(**MIXED, norm_position=place))


def boxes_of(root):
    for rect in root.iter(f"{SPACE}rect"):
        kind, *sizes = (rect.get(key) for key in ("class", "x", "y", "width", "height"))
        yield kind, *map(float, sizes)


def words_of(root):
    """Text, left, right and base line, measured in the widest of the fonts that the file names."""
    folder = Path(matplotlib.get_data_path()) / "fonts/ttf"
    for word in root.iter(f"{SPACE}text"):
        kind, x, y = word.get("class"), float(word.get("x")), float(word.get("y"))
        file = "DejaVuSansMono-Bold.ttf" if kind in ("strong", "title") else "DejaVuSansMono.ttf"
        wide = ImageFont.truetype(str(folder / file), 16 if kind == "title" else 13).getlength(word.text)
        yield word.text, *((x - wide, x) if kind == "right" else (x, x + wide)), y


def test_words_stay_in_their_boxes_and_do_not_meet():
    for name, svg in pictures():
        root = ET.fromstring(svg)
        *_, width, height = map(float, root.get("viewBox").split())
        words = list(words_of(root))
        parts = [box for box in boxes_of(root) if box[0] not in ("page", "group")]
        assert len(parts) >= 5
        for text, left, right, base in words:
            assert left >= 0 and right <= width and base <= height - 4, (name, text)
            for _, x, y, wide, high in parts:
                if y < base < y + high and right > x and left < x + wide:
                    assert x + 4 <= left and right <= x + wide - 4 and base <= y + high - 4, (name, text)
        for i, (text, left, right, base) in enumerate(words):
            for other, begin, end, below in words[i + 1 :]:
                assert abs(base - below) >= 13 or right <= begin or end <= left, (name, text, other)


def test_boxes_stay_in_their_groups_and_do_not_meet():
    for name, svg in pictures():
        boxes = list(boxes_of(ET.fromstring(svg)))
        parts = [box for box in boxes if box[0] not in ("page", "group")]
        groups = [box for box in boxes if box[0] == "group"]
        assert groups
        for i, (_, x, y, wide, high) in enumerate(parts):
            for _, left, top, width, height in groups:
                apart = y + high <= top or top + height <= y or x + wide <= left or left + width <= x
                within = left < x and x + wide < left + width and top < y and y + high < top + height
                assert apart or within, name
            for _, left, top, width, height in parts[i + 1 :]:
                assert y + high < top or top + height < y or x + wide < left or left + width < x, name


def test_what_is_written_into_it_is_escaped():
    svg = svg_of(AnyformerConfig(**MIXED), HOSTILE)
    root = ET.fromstring(svg)
    assert root.find(f"{SPACE}title").text == HOSTILE
    assert "<script" not in svg and "<image" not in svg
    assert re.findall(r"https?://[^\"'& ]+", svg.replace("http://127.0.0.1:9/x.png", "")) == [SPACE.strip("{}")]


def _luminance(colour):
    """WCAG 2.2, relative luminance."""
    channels = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize("colours", [LIGHT, DARK], ids=["light", "dark"])
def test_words_stand_out(colours):
    """A contrast of 4.5 to 1 for words and 3 to 1 for lines, WCAG 2.2, success criteria 1.4.3 and 1.4.11."""

    def contrast(one, other):
        low, high = sorted((_luminance(colours[one]), _luminance(colours[other])))
        return (high + 0.05) / (low + 0.05)

    for back in ("page", "embedding", "attention", "cross", "mlp", "head", "norm", "other"):
        assert contrast("text", back) >= 4.5, back
    assert contrast("soft", "page") >= 4.5 and contrast("line", "page") >= 3


@pytest.mark.parametrize("name", NAMES)
def test_a_browser_finds_every_word_inside(name, tmp_path):
    browser, file = Chromium(tmp_path), tmp_path / "page.html"
    svg = preset(name)
    rules = "default-src 'none'; style-src 'unsafe-inline'"
    head = f'<meta charset="utf-8"><meta http-equiv="Content-Security-Policy" content="{rules}">'
    file.write_text(f"<!doctype html><html><head>{head}</head><body><main>{svg}</main></body></html>", encoding="utf-8")
    found = browser.measured(file, 1280)
    assert found["console"] == [] and found["scroll"] <= 1280
    assert len(found["words"]) >= 20 and all(word["inside"] and word["size"] >= 12.9 for word in found["words"])
    wide, high = map(float, ET.fromstring(svg).get("viewBox").split()[2:])
    assert found["pictures"] == [[pytest.approx(wide), pytest.approx(high)]]


def test_a_browser_opens_it_alone(tmp_path):
    browser, file = Chromium(tmp_path), tmp_path / "hostile.svg"
    file.write_text(svg_of(AnyformerConfig(**MIXED), HOSTILE), encoding="utf-8")
    assert browser.opened(file) == ([], [])
    picture = browser.screenshot(file, 900)
    colours = {colour for _, colour in picture.getcolors(picture.width * picture.height)}
    for kind in ("page", "embedding", "attention", "mlp", "head", "norm"):
        light = LIGHT[kind]
        assert tuple(int(light[i : i + 2], 16) for i in (1, 3, 5)) in colours, kind
