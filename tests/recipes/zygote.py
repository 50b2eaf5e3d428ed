"""A process that has imported everything and forks a child for each command that it reads, so that runs start at once.

A line of standard input is {"arguments": of `anyformer`, "log": a file}, with {"script": a file} in place of the
command another program, and {"processes": n} as a launcher starts them. It prints the children's process ids as a list,
and when they have ended their exit statuses, negative for a signal.
"""

import json
import os
import runpy
import socket
import sys
import threading
import traceback


def warm_up() -> None:
    import datasets
    import matplotlib.pyplot
    import peft
    import torch
    import transformers
    import trl

    import anyformer
    import anyformer.recipes.objectives
    import anyformer.recipes.run

    torch.set_num_threads(1)
    assert datasets and matplotlib and peft and transformers.Trainer and trl.SFTTrainer and anyformer


def child(order: dict, rank: int, port: int) -> int:
    log = os.open(order["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for number in (1, 2):
        os.dup2(log, number)
    count = order.get("processes", 1)
    if count > 1:
        os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(count)}
        os.environ |= {"LOCAL_WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    try:
        if "script" in order:
            sys.argv = [order["script"], *order["arguments"]]
            runpy.run_path(order["script"], run_name="__main__")
        else:
            from anyformer.scripts.cli import main

            sys.argv = ["anyformer", *order["arguments"]]
            main()
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else 0 if end.code is None else 1
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def serve() -> None:
    warm_up()
    # Of Python's none may run: a fork takes one thread along. Allocators know how to be forked.
    assert threading.enumerate() == [threading.main_thread()]
    print("ready", flush=True)
    for line in sys.stdin:
        order, port, children = json.loads(line), free_port(), []
        for rank in range(order.get("processes", 1)):
            number = os.fork()
            if number == 0:
                status = child(order, rank, port)
                sys.stdout.flush()
                os._exit(status)  # what the parent has open is not the child's to close
            children.append(number)
        print(json.dumps(children), flush=True)
        print(json.dumps([os.waitstatus_to_exitcode(os.waitpid(number, 0)[1]) for number in children]), flush=True)


if __name__ == "__main__":
    serve()
