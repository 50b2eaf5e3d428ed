"""Runs inside the sandbox's own interpreter: gives up what it can, then runs a program. See `sandbox`.

Started by path, never imported: it needs the standard library alone. On standard input it gets one JSON object:
`steps` (source texts), `folder`, `limits`, `token` and `report` (descriptors). To `report` it writes a line of JSON,
what of the isolation is missing, and behind it what it reads from `token`, once every step has run to its end.
"""

import ctypes
import json
import os
import resource
import sys
import traceback
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

NOBODY = 65534
TOKEN_BYTES = 32
# From <sched.h>, <sys/mount.h>, <linux/mount.h>, <sys/prctl.h> and <linux/capability.h>.
_NEW_USER = 0x10000000
_NEW_SPACES = 0x00020000 | 0x08000000 | 0x20000000 | 0x40000000  # mounts, IPC, processes, network
_PRIVATE, _NO_SUID_NO_DEV = 0x4000 | 0x40000, 0x2 | 0x4
_MOUNT_SETATTR, _HERE, _RECURSIVE, _READ_ONLY = 442, -100, 0x8000, 0x1
_DIE_WITH_PARENT, _KEEP_PRIVILEGES, _NO_NEW_PRIVILEGES = 1, 8, 38
_CAPABILITIES_3 = 0x20080522
_READ_EVERYTHING, _CHANGE_USER = 2, 1 << 6 | 1 << 7
_KILLED = 9


def main() -> NoReturn:
    task = json.loads(sys.stdin.buffer.read())
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    missing = _give_up(task["folder"], task["limits"])
    os.write(task["report"], json.dumps(missing).encode() + b"\n")
    # The first process of the namespace cannot be killed from inside, and all others end with it.
    if first := os.fork():
        os._exit(_status(first))
    if program := os.fork():
        os._exit(_status(program))
    _run(task["steps"], task["token"], task["report"])


def _status(process: int) -> int:
    """The exit status of one child, as a shell tells it, when it has ended; other children are reaped meanwhile."""
    while True:
        ended, status = os.wait()
        if ended == process:
            return os.WEXITSTATUS(status) if os.WIFEXITED(status) else 128 + os.WTERMSIG(status)


def _run(steps: list[str], token: int, report: int) -> NoReturn:
    read, write, leave = os.read, os.write, os._exit  # as they were before the program could change them
    module = types.ModuleType("program")
    sys.modules["program"] = module
    try:
        for step in steps:
            # Each text is compiled by itself: none can open a string that swallows the next.
            exec(compile(step, "<program>", "exec"), module.__dict__)
        write(report, read(token, TOKEN_BYTES))
        sys.stdout.flush()
    except BaseException as error:  # whatever it raises, exits included
        try:
            traceback.print_exception(error, limit=-3)
            sys.stderr.flush()
        finally:
            leave(1)
    leave(0)


# What is given up


def _give_up(folder: str, limits: dict[str, int]) -> list[str]:
    """Returns: what could not be had, in words."""
    missing: list[str] = []
    libc = ctypes.CDLL(None, use_errno=True)
    root = os.geteuid() == 0
    user = _free_user() if root else os.geteuid()
    others = _tasks_of(user)
    inside = _try(lambda: _enter_spaces(libc), missing, "no network, and a view of its own of processes")
    os.chdir(folder)
    if inside:
        _try(lambda: _close_files(libc, folder, limits["disk"], user), missing, "files outside its folder read-only")
    else:
        missing.append("files outside its folder read-only")
    keep: int | None = 0
    if root:
        # Root's processes are not counted by any limit, and root's files are everybody's.
        keep = _privileges_of(user)
        _try(lambda: _become(user, keep, folder, libc), missing, "another user than root")
    _try(lambda: _keep_privileges(libc, keep or 0), missing, "no privileges")
    _try(lambda: _call(libc.prctl(_NO_NEW_PRIVILEGES, 1, 0, 0, 0)), missing, "no new privileges")
    _try(lambda: _call(libc.prctl(_DIE_WITH_PARENT, _KILLED, 0, 0, 0)), missing, "the end of a run with its parent")
    # This process and the first of the namespace count, too; a user's namespace counts its own alone.
    _set_limits(limits, missing, others=2 + (others if root or not inside else 0))
    return missing


def _try(step: Callable[[], None], missing: list[str], what: str) -> bool:
    try:
        step()
    except (OSError, ValueError, AttributeError) as error:  # AttributeError: a system without that call
        missing.append(f"{what} ({getattr(error, 'strerror', None) or error})")
        return False
    return True


def _call(result: int) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def _free_user() -> int:
    """A user of this run's own, so that the processes of no other are counted; nobody where there are so few."""
    for user in (2**20 + os.getpid(), NOBODY):
        try:
            os.seteuid(user)
            os.seteuid(0)
            return user
        except OSError:  # a container with fewer users
            continue
    return 0


def _privileges_of(user: int) -> int | None:
    """What another user needs besides, to import modules where only root may look; None: it cannot be told."""
    try:
        os.seteuid(user)
        try:
            with Path(os.__file__).open("rb"):
                return 0
        finally:
            os.seteuid(0)
    except PermissionError:
        return 1 << _READ_EVERYTHING
    except OSError:
        return None


def _become(user: int, keep: int | None, folder: str, libc: Any) -> None:
    if keep is None or user == 0:
        raise OSError(0, "this system has no other")
    os.chown(folder, user, user)
    _call(libc.prctl(_KEEP_PRIVILEGES, 1, 0, 0, 0))
    _keep_privileges(libc, keep | _CHANGE_USER)
    os.setgroups([])
    os.setresgid(user, user, user)
    os.setresuid(user, user, user)


def _enter_spaces(libc: Any) -> None:
    user, group = os.geteuid(), os.getegid()
    if user == 0:
        return _call(libc.unshare(_NEW_SPACES))
    _call(libc.unshare(_NEW_SPACES | _NEW_USER))
    Path("/proc/self/setgroups").write_text("deny")
    Path("/proc/self/uid_map").write_text(f"{user} {user} 1")
    Path("/proc/self/gid_map").write_text(f"{group} {group} 1")
    return None


def _close_files(libc: Any, folder: str, disk: int, user: int) -> None:
    """Everything is read-only, but for a folder in memory of limited size; nothing is told of other processes."""
    _call(libc.mount(b"none", b"/", None, ctypes.c_ulong(_PRIVATE), None))
    attributes = (ctypes.c_uint64 * 4)(_READ_ONLY, 0, 0, 0)
    set_attributes = [ctypes.c_long(_MOUNT_SETATTR), ctypes.c_long(_HERE), b"/", ctypes.c_long(_RECURSIVE)]
    _call(libc.syscall(*set_attributes, ctypes.byref(attributes), ctypes.c_size_t(ctypes.sizeof(attributes))))
    flags = ctypes.c_ulong(_NO_SUID_NO_DEV)
    options = f"size={disk},mode=700,uid={user}".encode()
    _call(libc.mount(b"none", os.fsencode(folder), b"tmpfs", flags, options))
    _call(libc.mount(b"none", b"/proc", b"tmpfs", flags, b"size=4096,mode=555"))
    os.chdir(folder)


def _set_limits(limits: dict[str, int], missing: list[str], *, others: int) -> None:
    wanted = {
        # A signal first that tells it from other ends, a second later one that cannot be caught.
        "RLIMIT_CPU": (limits["cpu_seconds"], "a limit of computing time"),
        "RLIMIT_AS": (limits["memory"], "a limit of memory"),
        "RLIMIT_NPROC": (limits["processes"] + others, "a limit of processes"),
        "RLIMIT_FSIZE": (limits["disk"], "a limit of a file's size"),
        "RLIMIT_NOFILE": (64, "a limit of open files"),
        "RLIMIT_CORE": (0, "no memory dumps"),
    }
    for name, (value, words) in wanted.items():
        kind, bounds = getattr(resource, name), (value, value + (name == "RLIMIT_CPU"))
        _try(lambda kind=kind, bounds=bounds: resource.setrlimit(kind, bounds), missing, words)  # type: ignore[misc]
    if os.geteuid() == 0:
        missing.append("a limit of processes (root has none)")


def _tasks_of(user: int) -> int:
    """Threads of a user on the machine, as far as /proc tells."""
    count = 0
    for process in Path("/proc").glob("[0-9]*"):
        try:
            count += len(list((process / "task").iterdir())) if process.stat().st_uid == user else 0
        except OSError:  # it has ended
            continue
    return count


def _keep_privileges(libc: Any, which: int) -> None:
    """Give up all capabilities but those of a mask."""
    header = (ctypes.c_uint32 * 2)(_CAPABILITIES_3, 0)
    sets = (ctypes.c_uint32 * 6)(which, which, 0, 0, 0, 0)
    _call(libc.capset(ctypes.byref(header), ctypes.byref(sets)))


if __name__ == "__main__":
    main()
