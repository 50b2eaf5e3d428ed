"""The page of `anyformer compare`, in a browser."""

import json
import re
from html import unescape

import pytest
from chromium import Chromium
from contrast import contrasts
from made_runs import HOSTILE, write_run

from anyformer.recipes.comparison.collect import compare_runs
from anyformer.recipes.comparison.page import render
from anyformer.recipes.pages import save_page


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    """Pages of two runs, and of seven with all that can be odd."""
    place = tmp_path_factory.mktemp("pages")
    folders = [write_run(place / f"<b>{number}</b>-usual", shift=number / 5) for number in range(5)]
    folders.append(write_run(place / "other-rows", name_of_rows="another", prompt="spell"))
    folders.append(write_run(place / ("a-folder-with-a-very-long-name" * 3), finished=False))
    score = {"name": f"pass@1 {HOSTILE}", "value": 0.5, "low": 0.4, "high": 0.6, "count": 9, "data": HOSTILE}
    for folder in folders[:2]:
        (folder / "scores.json").write_text(json.dumps({"scores": [score]}))
    files = {}
    for count in (2, 7):
        files[count] = place / f"{count}.html"
        save_page(render(compare_runs(folders[:count])), files[count])
    return files


@pytest.mark.parametrize("runs", [2, 7])
def test_fits_both_widths_and_is_readable(page, runs, tmp_path):
    browser = Chromium(tmp_path)
    for width in (1280, 390):
        found = browser.measured(page[runs], width)
        assert found["console"] == []
        assert found["inner"] == width and found["scroll"] <= width
        assert len(found["pictures"]) == 2 and all(w > 300 and h > 150 for w, h in found["pictures"])
        assert found["words"] and all(word["size"] >= 11 and word["inside"] for word in found["words"])
        assert found["small"] >= 11
        assert found["title"].startswith("<b>0</b>-usual and <b>1</b>-usual")
        assert found["scripts"] == 1  # that of the test


def test_asks_for_nothing_and_shows_both_runs(page, tmp_path):
    browser = Chromium(tmp_path)
    assert browser.opened(page[2]) == ([], [])
    for width in (1280, 390):
        picture = browser.screenshot(page[2], width)
        colours = {colour: count for count, colour in picture.getcolors(picture.width * picture.height)}
        for colour in ((0x2F, 0x6F, 0xB0), (0xC9, 0x6A, 0x12)):  # of the curves and of the dots beside names
            assert colours.get(colour, 0) > 300


def test_what_runs_hold_is_escaped(page):
    for file in page.values():
        html = file.read_text(encoding="utf-8")
        assert "<script" not in html and "<img" not in html and "<b>0</b>" not in html
        assert HOSTILE in unescape(html)


def test_nothing_in_a_page_steers_a_terminal(tmp_path):
    """Pages are read with cat, too; line breaks of answers stay."""
    folders = [write_run(tmp_path / name, prompt="a\x1b[31mb") for name in ("one", "two\x07")]
    score = {"name": "pass@1\x1b]0;x\x07", "value": 0.5, "low": 0.4, "high": 0.6, "count": 9, "data": "d\x9b"}
    (folders[0] / "scores.json").write_text(json.dumps({"scores": [score]}))
    html = render(compare_runs(folders))
    assert [char for char in set(html) if not char.isprintable() and char not in "\n\t"] == []
    assert "a‹U+001B›[31mb" in html and "pass@1‹U+001B›]0;x‹U+0007›" in html and "d‹U+009B›" in html
    assert "two‹U+0007›" in html and "two\nthree" in html


def test_pictures_are_of_the_page(page):
    html = page[7].read_text(encoding="utf-8")
    pictures = re.findall(r"<svg.*?</svg>", html, re.DOTALL)
    assert len(pictures) == 2
    ids = re.findall(r'\bid="([^"]+)"', "".join(pictures))
    assert len(ids) == len(set(ids))
    # Six colours, then the first again with another dash.
    assert {f"var(--run{number})" for number in range(6)} <= set(re.findall(r"var\(--run\d\)", pictures[0]))
    assert "stroke-dasharray" in pictures[0] and "#01020" not in html


def test_says_what_is_apart(page):
    html = page[7].read_text(encoding="utf-8")
    assert "no held-out row is the same, as tokens, of 12 and 12" in html
    assert "is unfinished after step 10 of 10" in html
    assert html.count("within chance") + html.count("worse") >= 4
    first = unescape(page[2].read_text(encoding="utf-8"))
    assert "0.2353" not in first.partition("held-out loss")[0]


def test_words_of_the_comparison_stand_out(page):
    pairs = [("good", "card"), ("bad", "card"), ("soft", "card"), ("text", "card")]
    found = contrasts(page[2].read_text(encoding="utf-8"), pairs)
    assert len(found) == 2 * len(pairs) and min(found.values()) >= 4.5, found
    # Lines of pictures: 3 to 1, WCAG 2.2, success criterion 1.4.11.
    lines = contrasts(page[2].read_text(encoding="utf-8"), [(f"run{number}", "card") for number in range(6)])
    assert min(lines.values()) >= 3, lines
