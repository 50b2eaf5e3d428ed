"""What is asked for: by the command line, and by what a launcher sets in the environment."""

import re

import pytest

from anyformer.recipes.errors import UserError
from anyformer.recipes.parallel.strategy import STRATEGIES, Parallel, asked_for, launch_file
from anyformer.recipes.parallel.zero import environment

GROUP = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1"}
FSDP = {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"}


@pytest.mark.parametrize(
    ("launch", "environ", "expected"),
    [
        (None, {}, Parallel()),
        ("one", {}, Parallel()),
        ("ddp", {}, Parallel()),  # of one process there is nothing to reduce
        (None, GROUP, Parallel("ddp", 2, 1)),
        ("fsdp2", GROUP, Parallel("fsdp2", 2, 1)),
        ("tp", GROUP, Parallel("tp", 2, 1)),
        (None, GROUP | FSDP, Parallel("fsdp2", 2, 1)),
        ("fsdp2", GROUP | FSDP, Parallel("fsdp2", 2, 1)),
        (None, GROUP | {"ACCELERATE_USE_DEEPSPEED": "true"}, Parallel("deepspeed", 2, 1)),
    ],
)
def test_what_is_asked_for(launch, environ, expected):
    assert asked_for(launch, None, environ) == expected


@pytest.mark.parametrize(
    ("launch", "processes", "environ", "said"),
    [
        ("fsdp", None, GROUP, "no such strategy; did you mean fsdp2? There are one, ddp, fsdp2, tp, deepspeed"),
        ("zigzag", None, GROUP, "no such strategy; there are one, ddp, fsdp2, tp, deepspeed"),
        ("one", 2, {}, "--launch one is one process: leave out --processes 2, or --launch ddp"),
        ("tp", None, GROUP | FSDP, "the launcher is set up for fsdp2"),
        ("ddp", None, GROUP | FSDP, "the launcher is set up for fsdp2"),
        (None, 4, GROUP, "--processes 4, but the launcher started 2"),
        (None, 2, {}, "needs --launch too, which says how: ddp, fsdp2 or tp"),
        ("one", None, GROUP, "the launcher started 2 processes"),
        ("fsdp2", None, {}, "one process only: it would train without being sharded"),
        (None, None, FSDP, "one process only"),
        (None, None, GROUP | FSDP | {"FSDP_VERSION": "1"}, "FSDP version 1: set fsdp_config.fsdp_version to 2"),
        (None, None, GROUP | {"ACCELERATE_USE_FSDP": "true"}, "FSDP version 1"),
        (None, None, GROUP | {"ACCELERATE_USE_MEGATRON_LM": "true"}, "Megatron-LM"),
        # What Accelerate's MULTI_CPU leaves: an address to meet at, and nobody to meet.
        (None, None, {"ACCELERATE_MIXED_PRECISION": "no", "MASTER_ADDR": "127.0.0.1"}, "started one alone"),
    ],
)
def test_contradictions_are_refused(launch, processes, environ, said):
    with pytest.raises(UserError, match=re.escape(said)):
        asked_for(launch, processes, environ)


@pytest.mark.parametrize("strategy", STRATEGIES[1:])
def test_each_strategy_has_a_file_that_accelerate_reads(strategy):
    from accelerate.commands.config.config_args import load_config_from_file

    config = load_config_from_file(str(launch_file(strategy)))
    kinds = {"ddp": "MULTI_GPU", "fsdp2": "FSDP", "tp": "MULTI_GPU", "deepspeed": "DEEPSPEED"}
    assert config.distributed_type.value == kinds[strategy] and config.num_processes == 2


def test_deepspeed_is_told_the_same_by_every_launcher():
    """By us, where torchrun started the processes, and by Accelerate of the same file."""
    from accelerate.commands.config.config_args import load_config_from_file
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser
    from accelerate.utils.launch import prepare_deepspeed_cmd_env

    file = str(launch_file("deepspeed"))
    arguments = launch_command_parser().parse_args(["--config_file", file, "--main_process_port", "0", "script.py"])
    arguments, _, _ = _validate_launch_command(arguments)
    arguments.deepspeed_fields_from_accelerate_config = ""
    _, theirs = prepare_deepspeed_cmd_env(arguments)
    ours = environment(load_config_from_file(file).deepspeed_config)
    assert len(ours) == 6 and {name: theirs[name] for name in ours} == ours
    assert theirs["ACCELERATE_MIXED_PRECISION"] == "no"  # the recipe says


def test_only_rows_of_their_own_count():
    assert [Parallel(s, 4, 0).replicas for s in ("ddp", "fsdp2", "tp", "deepspeed")] == [4, 4, 1, 4]
