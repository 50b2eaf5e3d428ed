"""The line that the trainer's logs become."""

from types import SimpleNamespace

from anyformer.recipes.progress import TrainingProgress


def line_of(**logs):
    lines: list[str] = []
    progress = TrainingProgress()
    progress.training_bar = SimpleNamespace(write=lines.append)
    state = SimpleNamespace(is_world_process_zero=True, global_step=5, max_steps=20)
    progress.on_log(SimpleNamespace(), state, None, logs=logs)
    return lines


def test_one_short_line():
    figures = {"tokens_per_second": 12345.6, "mfu": 0.4123, "data_wait": 0.001, "memory_gb": 1.5, "tokens": 10}
    assert line_of(loss=2.0, grad_norm=1.5, learning_rate=1e-3, epoch=0.5, **figures) == [
        "step 5/20  loss 2.0000  gradient norm 1.50  learning rate 1.0e-03  MFU 41.2%  12,346 tokens/s"
    ]


def test_waiting_for_data_is_said_where_there_is_some():
    assert line_of(loss=2.0, tokens_per_second=10.0, data_wait=0.25) == [
        "step 5/20  loss 2.0000  10 tokens/s  waits for data 25%"
    ]


def test_what_is_not_known_is_not_shown():
    assert line_of(loss=2.0) == ["step 5/20  loss 2.0000"] and line_of(train_runtime=3.0) == []
