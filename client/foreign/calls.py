"""Lists the system calls that an added teacher's program may make, and builds the kernel filter for them.

``client.foreign.confined`` calls it. ``calls.toml`` has three lists, with each call's number on x86-64 and ARM64:

* *Allowed* calls concern the program's own memory, files and threads.
* *Checked* calls are allowed for some arguments (:func:`_block`).
* *Pretended* calls return success and do nothing.

Every other call is refused, also a call of a newer kernel that the lists do not know. Refused are in particular calls
that reach another process of the same user (signals, tracing, limits, priorities, shared memory, queues), namespaces,
mounts, and sockets with an address. Source: seccomp(2), bpf(4); the list began as the one that container engines use.
"""

from __future__ import annotations

import struct
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

MACHINES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
"""The supported machines, with the architecture number by which a seccomp filter recognises each."""

_LOAD, _AND, _EQUAL, _AT_LEAST, _ANY_BIT, _GIVE = 0x20, 0x54, 0x15, 0x35, 0x45, 0x06
_KILL, _ALLOW, _FAIL = 0x80000000, 0x7FFF0000, 0x00050000
_DONE, _NOT_PERMITTED, _NO_SUCH_CALL = _FAIL, _FAIL | 1, _FAIL | 38
_OTHER_NUMBERS = 0x40000000  # from here on, x32's second numbering of x86-64's calls

_NAMESPACES = 0x7E020000  # every CLONE_NEW flag that clone takes
_ADOPTED, _TRACED = 0x8000, 0x2000  # CLONE_PARENT, CLONE_PTRACE
_PRCTL = (
    *(2, 3, 15, 16, 21, 22, 23, 27, 29, 30, 38, 39, 40, 47),  # own name, timer slack, filters, and read-only calls
    *(50, 51, 52, 53, 54, 55, 56, 63, 64, 0x53564D41),  # vector length, speculation, pointer keys, names of memory
)
_FCNTL_REFUSED = (8, 10, 15, 1024, 1026, 1031)  # signals to an owner, leases, directory watches, larger pipes
_IOCTL_REFUSED = (0x540E, 0x5410, 0x5412, 0x541C, 0x541D, 0x5423, 0x8901, 0x8902)  # terminals, signals to an owner

Line = tuple[int, int, int, int]


@dataclass(frozen=True, slots=True)
class SystemCalls:
    """The system calls in ``calls.toml``: each call's number on one kind of machine, by the call's name."""

    machine: int
    allowed: dict[str, int]
    pretended: dict[str, int]
    checked: dict[str, int]


@cache
def known_calls(machine: str) -> SystemCalls:
    """Read the lists of ``calls.toml`` for a machine.

    Args:
        machine: One of :data:`MACHINES`.

    Returns:
        The machine's calls.
    """
    column = list(MACHINES).index(machine)
    lists = tomllib.loads(Path(__file__).with_name("calls.toml").read_text(encoding="utf-8"))
    own = {
        kind: {name: numbers[column] for name, numbers in table.items() if numbers[column] >= 0}
        for kind, table in lists.items()
    }
    return SystemCalls(MACHINES[machine], own["allowed"], own["pretended"], own["checked"])


def call_filter(machine: str, *, scoped_signals: bool, group: int) -> bytes:
    """Build the seccomp filter, in the form that the kernel takes.

    Args:
        machine: One of :data:`MACHINES`.
        scoped_signals: True if Landlock confines signals to the program's own processes (version 6 and newer).
            Otherwise the filter lets the program signal only its own process group and its first process.
        group: Process id of the program, which is also the id of its process group.

    Returns:
        Instructions of eight bytes each.
    """
    calls = known_calls(machine)
    lines: list[Line] = [(_LOAD, 0, 0, 4), (_EQUAL, 1, 0, calls.machine), _give(_KILL), (_LOAD, 0, 0, 0)]
    lines += [(_AT_LEAST, 0, 1, _OTHER_NUMBERS), _give(_KILL)]
    for name, number in calls.checked.items():
        block = _block(name, scoped_signals=scoped_signals, group=group)
        lines += [(_EQUAL, 0, len(block), number), *block]
    for numbers, answer in ((calls.pretended.values(), _DONE), (calls.allowed.values(), _ALLOW)):
        for first, after in _runs(numbers):
            lines += [(_AT_LEAST, 0, 2, first), (_AT_LEAST, 1, 0, after), _give(answer)]
    newest = max(max(table.values()) for table in (calls.allowed, calls.pretended, calls.checked))
    lines += [(_AT_LEAST, 0, 1, newest + 1), _give(_NO_SUCH_CALL), _give(_NOT_PERMITTED)]
    return b"".join(struct.pack("=HBBI", *line) for line in lines)


def _runs(numbers: Iterable[int]) -> list[tuple[int, int]]:
    """Group numbers into ranges of consecutive numbers, each as (first, one after the last)."""
    runs: list[tuple[int, int]] = []
    for number in sorted(set(numbers)):
        if runs and runs[-1][1] == number:
            runs[-1] = (runs[-1][0], number + 1)
        else:
            runs.append((number, number + 1))
    return runs


def _give(answer: int) -> Line:
    return (_GIVE, 0, 0, answer)


def _argument(number: int, *, high: bool = False) -> Line:
    return (_LOAD, 0, 0, 16 + 8 * number + 4 * high)


def _one_of(values: Iterable[int]) -> list[Line]:
    """Allow the system call if the 32 bits that the filter loaded last are one of ``values``; otherwise refuse it."""
    found = [line for value in values for line in ((_EQUAL, 0, 1, value & 0xFFFFFFFF), _give(_ALLOW))]
    return [*found, _give(_NOT_PERMITTED)]


def _none_of(values: Iterable[int]) -> list[Line]:
    """Refuse the system call if the 32 bits that the filter loaded last are one of ``values``; otherwise allow it."""
    found = [line for value in values for line in ((_EQUAL, 0, 1, value), _give(_NOT_PERMITTED))]
    return [*found, _give(_ALLOW)]


def _is(line: Line, value: int) -> list[Line]:
    """Refuse the system call unless ``line`` loads the 32 bits ``value``; otherwise continue."""
    return [line, (_EQUAL, 1, 0, value), _give(_NOT_PERMITTED)]


def _block(name: str, *, scoped_signals: bool, group: int) -> list[Line]:
    """Return the filter instructions that allow or refuse a checked system call by its arguments.

    Limits, priority and processor affinity may be changed only for process 0, which means the calling process. Signals
    are restricted only if Landlock does not confine them.

    Args:
        name: Name of the system call, one of :attr:`SystemCalls.checked`.
        scoped_signals: True if Landlock confines signals; see :func:`call_filter`.
        group: Process id of the program, which is also the id of its process group.
    """
    match name:
        case "clone":  # threads and children are allowed, but no new namespace and no other parent
            return [
                _argument(0),
                (_ANY_BIT, 0, 1, _NAMESPACES | _ADOPTED | _TRACED),
                _give(_NOT_PERMITTED),
                _give(_ALLOW),
            ]
        case "clone3":  # its flags are in memory, which a filter cannot read; the C library falls back to clone
            return [_give(_NO_SUCH_CALL)]
        case "prlimit64" | "sched_setaffinity":
            return [*_is(_argument(0), 0), _give(_ALLOW)]
        case "setpriority":
            return [*_is(_argument(0), 0), *_is(_argument(1), 0), _give(_ALLOW)]
        case "kill" if not scoped_signals:
            return [_argument(0), *_one_of((0, group, -group))]
        case "tkill" | "tgkill" if not scoped_signals:
            return [_argument(0), *_one_of((group,))]
        case "kill" | "tkill" | "tgkill":
            return [_give(_ALLOW)]
        case "fcntl":
            return [_argument(1), *_none_of(_FCNTL_REFUSED)]
        case "ioctl":
            return [_argument(1), *_none_of(_IOCTL_REFUSED)]
        case "prctl":
            return [_argument(0), *_one_of(_PRCTL)]
        case "socketpair":  # Unix stream or seqpacket only: these cannot send to an address
            return [*_is(_argument(0), 1), _argument(1), (_AND, 0, 0, 0xF), *_one_of((1, 5))]
        case "sendto":  # only on a connected pair, without an address
            return [*_is(_argument(4), 0), *_is(_argument(4, high=True), 0), _give(_ALLOW)]
        case _:
            raise ValueError(f"checked call without a check: {name}")
