"""The page of `anyformer data`, in a browser."""

import json
import re
from html import unescape

import pytest
from chromium import Chromium
from contrast import contrasts

from anyformer.recipes.inspection import inspect_recipe
from anyformer.recipes.inspection.page import render, write_page
from anyformer.recipes.loading import load_recipe

HOSTILE = "<script>document.title='taken'</script><img src=x onerror=\"document.title='taken'\">"
LEARNED = (0xBF, 0xE8, 0xCF)


@pytest.fixture
def page(tmp_path, tiny_checkpoint):
    """A function: a page on preference pairs, or on packed texts, or on prompts and completions."""

    def make(kind: str):
        rows = {
            "sft": [{"prompt": f"count {i} {HOSTILE if i == 1 else ''}\n", "completion": " one two"} for i in range(9)],
            "dpo": [
                {"prompt": f"count {i}", "chosen": " one" * (1 + i % 3), "rejected": " two" * (1 + i % 4) + HOSTILE}
                for i in range(30)
            ],
            "pretrain": [{"text": f"the cat sat on the mat {i} " * (1 + i % 5)} for i in range(20)],
        }[kind]
        objective = {"pretrain": "{kind: pretrain, packing: documents, max_length: 128}"}.get(kind, f"{{kind: {kind}}}")
        length = "" if kind == "pretrain" else "max_length: 220"
        (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
        (tmp_path / "r.yaml").write_text(
            f"model: {{path: {tiny_checkpoint}}}\nobjective: {objective}\ntrain: {{{length}}}\n"
            f"data: {{source: {tmp_path / 'rows.jsonl'}, eval_fraction: 0.3}}\n"
        )
        file = tmp_path / f"{kind}.html"
        inspection = inspect_recipe(load_recipe(tmp_path / "r.yaml"), f"my <{kind}>")
        write_page(inspection, file)
        return inspection, file

    return make


@pytest.mark.parametrize("kind", ["sft", "dpo", "pretrain"])
def test_fits_and_reads_at_both_widths(page, kind, tmp_path):
    browser, (_, file) = Chromium(tmp_path), page(kind)
    for width in (1280, 390):
        found = browser.measured(file, width)
        assert found["console"] == []
        assert found["inner"] == width and found["scroll"] <= width
        assert len(found["pictures"]) >= 2 and all(w > 250 and h > 60 for w, h in found["pictures"])
        assert found["words"] and all(word["size"] >= 11 and word["inside"] for word in found["words"])
        assert found["small"] >= 11
        assert found["title"] == f"Data of my <{kind}> · Anyformer"
        assert found["scripts"] == 1  # that of the test


def test_asks_for_nothing_and_has_its_colours(page, tmp_path):
    browser, (_, file) = Chromium(tmp_path), page("sft")
    assert browser.opened(file) == ([], [])
    for width in (1280, 390):
        picture = browser.screenshot(file, width)
        assert picture.width == width
        colours = {colour: count for count, colour in picture.getcolors(picture.width * picture.height)}
        assert len(colours) > 50
        assert colours.get(LEARNED, 0) > 300  # learned tokens of the legend and of the row that is open


def test_a_page_that_asks_for_something_is_found_out(tmp_path):
    """The checks above can fail."""
    browser, file = Chromium(tmp_path), tmp_path / "bad.html"
    file.write_text(
        "<html><head><meta http-equiv='Content-Security-Policy' content=\"default-src 'none'; img-src *\"></head><body>"
        "<img src='http://127.0.0.1:9/x.png'><hr width='2000'><svg viewBox='0 0 10 10' width='10'>"
        "<text font-size='3'>x</text></svg><script>throw 1</script></body></html>"
    )
    console, asked = browser.opened(file)
    assert console and asked == ["http://127.0.0.1:9/x.png"]
    found = browser.measured(file, 390)
    assert found["scroll"] > 390 and found["words"][0]["size"] < 11


def test_rows_are_escaped(page):
    inspection, file = page("sft")
    html = file.read_text(encoding="utf-8")
    assert "<script" not in html and "<img" not in html
    assert "my &lt;sft&gt;" in html
    row = next(number for number, shown in enumerate(inspection.shown) if len(shown.view.sequences[0].ids) > 60)
    found = re.findall(r"<details.*?</details>", html, re.DOTALL)[row]
    tokens = [unescape(text) for text in re.findall(r'<span class="t[^>]*>(.*?)</span>', found, re.DOTALL)]
    assert "".join(tokens) == f"count·1·{HOSTILE.replace(' ', '·')}↵·one·two<|im_end|>"


def test_what_is_learned_is_marked(page):
    inspection, file = page("sft")
    html = file.read_text(encoding="utf-8")
    first = re.findall(r"<details.*?</details>", html, re.DOTALL)[0]
    learned = "".join(re.findall(r'<span class="t l[ s]*"[^>]*>(.*?)</span>', first, re.DOTALL))
    assert unescape(learned) == "·one·two<|im_end|>"
    assert first.count('class="t l s"') == 1  # the end token
    assert len(re.findall(r'<span class="t', first)) == len(inspection.shown[0].view.sequences[0].ids)


def test_pairs_stand_side_by_side(page):
    inspection, file = page("dpo")
    html = file.read_text(encoding="utf-8")
    row = re.findall(r"<details.*?</details>", html, re.DOTALL)[0]
    assert [unescape(name).strip() for name in re.findall(r"<h4[^>]*>(.*?)<small>", row)] == [
        "prompt",
        "chosen",
        "rejected",
    ]
    beside = row[row.index('<div class="beside">') :]
    assert "chosen" in beside and "rejected" in beside and ">prompt" not in beside
    assert "Chosen and rejected answers" in html and inspection.train.pairs is not None


def test_packed_documents_are_set_apart(page):
    inspection, file = page("pretrain")
    html = file.read_text(encoding="utf-8")
    fullest = next(shown for shown in inspection.shown if "the most documents" in shown.why)
    starts = fullest.view.sequences[0].starts
    assert starts
    row = next(part for part in re.findall(r"<details.*?</details>", html, re.DOTALL) if "the most documents" in part)
    assert row.count('class="border"') == len(starts) + 1


def test_words_stand_out_in_light_and_dark(page):
    inspection, _ = page("sft")
    pairs = [("text", "card"), ("text", "page"), ("soft", "card"), ("soft", "page"), ("learned-text", "learned")]
    pairs += [("read-text", "read"), ("special-text", "special"), ("warn-text", "warn"), ("limit", "card")]
    found = contrasts(render(inspection), pairs)
    assert len(found) == 2 * len(pairs)
    assert min(found.values()) >= 4.5, found
