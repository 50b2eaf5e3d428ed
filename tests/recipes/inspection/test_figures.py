"""Figures on rows and tokens, against figures worked out by hand."""

import pytest

from anyformer.recipes.inspection.charts import histogram
from anyformer.recipes.inspection.collect import given_away
from anyformer.recipes.inspection.places import find_places
from anyformer.recipes.inspection.statistics import Distribution, Histogram, Pairs, repeats, token_figures
from anyformer.recipes.inspection.wording import share
from anyformer.recipes.tokens.views import Length, RowView, TokenSequence, answered, learned, read_only

STOP, BREAK = 9, 8


def figures(*views: RowView):
    return token_figures(enumerate(views, 1), len(views), stops={STOP}, is_blank=lambda token: token == BREAK)


def row(*ids: int, labels: list[int] | None = None, starts=(), limit: int = 10) -> RowView:
    labels = [-100, *ids[1:]] if labels is None else labels
    sequence = TokenSequence(list(ids), labels, starts=starts, ends=True)
    return RowView((sequence,), lengths={"row": Length(len(ids), limit)})


def test_a_histogram_counts_whole_numbers():
    found = Histogram.of([1, 2, 2, 3, 9], whole=True)
    # Five values want five bars: (9 - 1 + 1) / 5 = 1.8, so each is 2 wide.
    assert found.edges == (0, 2, 4, 6, 8, 10)
    assert found.counts == (1, 3, 0, 0, 1)


def test_a_histogram_of_one_value():
    assert Histogram.of([7, 7], whole=True) == Histogram((7, 8), (2,))
    assert Histogram.of([0.5, 0.5]).counts == (2,)


def test_a_histogram_of_fractions():
    found = Histogram.of([0.0, 0.1, 0.25, 0.5])
    assert found.edges == pytest.approx((0, 0.1, 0.2, 0.3, 0.4, 0.5))
    assert found.counts == (1, 1, 1, 0, 1)  # the last edge belongs to the last bar


def test_tenths_hold_their_lower_edge():
    tenths = [n / 10 for n in range(11)]
    assert Histogram.between([0.0, 0.3, 0.29, 0.7, 1.0], tenths).counts == (1, 0, 1, 1, 0, 0, 0, 1, 0, 1)


def test_a_distribution():
    found = Distribution.of([4, 1, 3, 2], limit=5)
    assert (found.count, found.smallest, found.largest, found.mean, found.median) == (4, 1, 4, 2.5, 2.5)
    hundred = Distribution.of(list(range(1, 101)))
    assert (hundred.p90, hundred.p99, hundred.median) == (90, 99, 50.5)


def test_what_is_learned_of_rows():
    found = figures(row(1, 2, 3, STOP), row(1, 2, labels=[-100, 2]), row(5, labels=[-100]))
    assert (found.rows, found.tokens, found.supervised) == (3, 7, 4)
    # 3/4, 1/2 and 0.
    assert found.shares is not None and found.shares.counts == (1, 0, 0, 0, 0, 1, 0, 1, 0, 0)
    assert (found.longest, found.shortest, found.fullest) == (1, 3, None)
    assert found.lengths["row"].limit == 10 and found.lengths["row"].mean == pytest.approx(7 / 3)


def test_stop_tokens():
    ends = row(1, 2, STOP)
    before_break = row(1, STOP, BREAK)  # the template writes a line break, which is learned with loss_on: all
    masked_after = row(1, STOP, 3, labels=[-100, STOP, -100])
    open_end = row(1, 2, 3)
    silent = row(1, 2, labels=[-100, -100])
    found = figures(ends, before_break, masked_after, open_end, silent).stops
    assert (found.checked, found.stopped, found.others) == (4, 3, [4])


def test_packed_documents_end_each():
    packed = row(1, 2, STOP, 1, 2, 1, STOP, labels=[-100, 2, STOP, -100, 2, -100, STOP], starts=(3, 5))
    found = figures(packed, row(1, STOP))
    assert (found.documents, found.fullest) == (4, 1)
    assert (found.stops.checked, found.stops.stopped, found.stops.others) == (4, 3, [1])


def test_pairs():
    def pair(chosen: int, rejected: int) -> RowView:
        sides = (learned([2] * chosen, "chosen"), learned([3] * rejected, "rejected"))
        return RowView((read_only([1, 1], "prompt"),), sides)

    found = figures(pair(1, 2), pair(2, 2), pair(3, 1), pair(1, 4))
    pairs = found.pairs
    assert pairs is not None
    assert (pairs.shorter_chosen, pairs.equal, pairs.longer_chosen, pairs.shorter_share) == (2, 1, 1, 0.5)
    assert (pairs.chosen.mean, pairs.rejected.mean) == (1.75, 2.25)
    assert pairs.chosen.histogram.edges == pairs.rejected.histogram.edges == (1, 2, 3, 4, 5)
    assert (pairs.chosen.histogram.counts, pairs.rejected.histogram.counts) == ((2, 1, 1, 0), (1, 2, 0, 1))
    assert (found.tokens, found.supervised) == (24, 16)
    assert Pairs.of([(1, 2)]).shorter_share == 1


@pytest.mark.parametrize(
    ("pairs", "said"),
    [
        ([(1, 2)] * 15 + [(2, 1)] * 5, "the shorter answer is chosen in 75.0 % of the 20 pairs"),
        ([(1, 2)] * 14 + [(2, 1)] * 6, ""),
        ([(3, 2)] * 20 + [(2, 2)] * 50, "the longer answer is chosen in 100 % of the 20 pairs"),
        ([(1, 2)] * 19, ""),
    ],
)
def test_lengths_that_give_the_answer_away(pairs, said):
    found = given_away(Pairs.of(pairs))
    assert found.startswith(said) and bool(found) == bool(said)


def test_classes_and_values():
    one = RowView((read_only([1]),), classes=("a", "b"))
    found = figures(one, one._replace(classes=("a",)), one._replace(classes=(), value=0.5))
    assert found.classes == [("a", 2), ("b", 1)]
    assert found.values is not None and found.values.mean == 0.5
    assert found.supervised == 0 and found.shares is None


def test_an_answer_is_learned_and_its_prompt_is_not():
    assert answered([1, 2], [3]).labels == [-100, -100, 3]


# Rows


def pc(prompt: str, completion: str) -> dict:
    return {"prompt": prompt, "completion": completion}


def test_repeats():
    train = [pc("a", "1"), pc("b", "2"), pc("a", "1"), pc("b", "3"), pc("a", "1"), pc("c", "4"), pc("b", "2")]
    found = repeats(train, [pc("c", "4"), pc("a", "9"), pc("d", "5")])
    assert (found.repeated, found.repeated_examples) == (3, [[1, 3, 5], [2, 7]])
    # Three rows ask b; the different ones among them are named.
    assert (found.conflicting, found.conflicting_examples) == (3, [[2, 4]])
    assert (found.held_out_rows, found.held_out_examples) == (1, [(1, 6)])
    assert (found.held_out_prompts, found.held_out_prompt_examples) == (2, [(1, 6), (2, 1)])
    assert found.named == ({1, 2, 3, 4, 5, 6, 7}, {1, 2})


def test_examples_are_few_and_counts_are_whole():
    train = [pc(str(n % 20), "x") for n in range(200)]
    found = repeats(train, train)
    assert found.repeated == 180 and found.held_out_rows == 200
    assert len(found.repeated_examples) == len(found.held_out_examples) == 5
    assert all(len(group) == 5 for group in found.repeated_examples)


def test_texts_have_no_answers_to_contradict():
    found = repeats([{"text": "a  b"}, {"text": "a b"}], [])
    assert (found.repeated, found.conflicting) == (0, 0)


def test_labels_that_contradict():
    found = repeats([{"text": "a", "label": "x"}, {"text": "a", "label": "y"}], [])
    assert (found.conflicting, found.conflicting_examples) == (2, [[1, 2]])


def test_rows_are_found_in_their_files(tmp_path):
    first, second = tmp_path / "a.jsonl", tmp_path / "b.csv"
    first.write_text('{"q": "a", "completion": "1"}\n\nbroken\n{"q": "b", "completion": "2"}\n')
    second.write_text('q,completion\na,1\n"c","3"\n')
    wanted = {1: pc("a", "1"), 2: pc("b", "2"), 3: pc("a", "1"), 4: pc("c", "3"), 5: pc("nowhere", "")}
    files = [str(first), str(second), "a package"]
    assert find_places(wanted, files, {"prompt": "q"}) == {
        1: f"{first}, line 1",
        2: f"{first}, line 4",
        3: f"{second}, line 2",
        4: f"{second}, line 3",
    }


# Words and shapes


def test_shares_are_never_rounded_to_all_or_nothing():
    assert [share(n, 10_000) for n in (0, 1, 5_000, 9_999, 10_000)] == ["0 %", "0.1 %", "50.0 %", "99.9 %", "100 %"]


@pytest.mark.parametrize(("limit", "drawn"), [(12, True), (1000, False), (None, False)])
def test_a_limit_is_drawn_where_it_is_near(limit, drawn):
    values = Histogram.of([1, 2, 2, 3, 9], whole=True)
    picture = histogram("t", "c", [values], unit="tokens", limit=limit, whole=True)
    assert (picture.mark is not None) == drawn
    # Bars are as high as their counts: 3 is three times 1.
    heights = [bar.height for bar in picture.bars]
    assert heights == pytest.approx([heights[0], 3 * heights[0], heights[0]], abs=0.2)
    assert picture.bars[1].title == "2 to 3 tokens: 3"
