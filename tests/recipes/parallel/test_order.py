"""Rows of an epoch over processes: each once, and what fills the last step is not learned."""

import pytest
import torch
from accelerate.data_loader import BatchSamplerShard, SeedableRandomSampler
from torch.utils.data import BatchSampler

from anyformer.recipes.parallel.order import Filled, FilledSampler, SeededOrder, can_fill, unlearned


def epoch_of(rows: int, batch: int, processes: int, epoch: int = 0) -> list[list[list[int]]]:
    """The batches of each process, as Accelerate deals them out."""
    order = SeedableRandomSampler(range(rows), data_seed=5)
    sampler = FilledSampler(order, rows, -rows % (batch * processes))
    sampler.set_epoch(epoch)
    batches = BatchSampler(sampler, batch, drop_last=False)
    # A sampler for each process, as each has its own in a run.
    shards = [BatchSamplerShard(batches, processes, rank) for rank in range(processes)]
    found = []
    for shard in shards:
        sampler.set_epoch(epoch)
        found.append(list(shard))
    return found


@pytest.mark.parametrize("rows", [1, 5, 8, 23, 24])
@pytest.mark.parametrize("processes", [1, 2, 3])
def test_every_row_comes_once_and_all_processes_have_as_many_batches(rows, processes):
    shards = epoch_of(rows, 4, processes)
    assert len({len(batches) for batches in shards}) == 1
    seen = sorted(row for batches in shards for batch in batches for row in batch)
    assert seen[:rows] == list(range(rows))
    assert all(row >= rows for row in seen[rows:]) and len(seen) % (4 * processes) == 0


def test_a_step_has_the_rows_of_one_process():
    """The same rows in each step, in the same order of batches, for 1 and 2 processes."""
    (one,), two = epoch_of(23, 4, 1), epoch_of(23, 2, 2)
    for step, rows in enumerate(one):
        pair = [row for batches in two for row in batches[step]]
        assert [row for row in pair if row < 23] == [row for row in rows if row < 23]


def test_epochs_differ_and_come_again():
    first, second = epoch_of(23, 4, 2, epoch=0), epoch_of(23, 4, 2, epoch=1)
    assert first != second and first == epoch_of(23, 4, 2, epoch=0)


def test_rows_that_fill_have_nothing_to_learn():
    rows = [{"input_ids": [5, 6, 7], "labels": [-100, 6, 7], "position_ids": [0, 1, 2]}]
    assert Filled(rows)[0] == rows[0] and len(Filled(rows)) == 1
    assert Filled(rows)[1] == {"input_ids": [5, 6], "labels": [-100, -100], "position_ids": [0, 1]}
    masked = unlearned({"input_ids": [5, 6, 7], "special_tokens_mask": [1, 0, 1], "next_sentence_label": 1})
    assert masked == {"input_ids": [5, 6], "next_sentence_label": -100, "labels": [-100, -100]}


def test_a_filled_data_set_ends():
    """What measures all rows, as a sampler that groups them by length does, goes by iteration."""
    rows = [{"input_ids": [5, 6], "labels": [-100, 6]}] * 3
    assert len(list(Filled(rows))) == 3


def test_which_rows_can_fill():
    row = {"input_ids": torch.tensor([1]), "labels": torch.tensor([1])}
    assert can_fill(row, False) and not can_fill({"input_ids": [1]}, False) and can_fill({"input_ids": [1]}, True)
    assert not can_fill({"input_ids": [1], "labels": 3}, False)  # a class: there is no label that counts for nothing
    assert not can_fill({"prompt": [1], "chosen": [2]}, False)


def test_a_seeded_order_depends_on_seed_and_epoch_alone():
    class Drawn:
        generator = None

        def __len__(self):
            return 6

        def __iter__(self):
            return iter(torch.randperm(6, generator=self.generator).tolist())

    def drawn(seed, epoch):
        order = SeededOrder(Drawn(), seed)
        order.set_epoch(epoch)
        return list(order)

    assert drawn(1, 2) == drawn(1, 2) and drawn(1, 2) != drawn(1, 3) and drawn(1, 2) != drawn(2, 2)
    order = SeededOrder(Drawn(), 1)
    assert [list(order), list(order)] == [drawn(1, 0), drawn(1, 1)]
