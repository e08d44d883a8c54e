"""In which order xdist's workers take the tests: what takes long first, spread over all of them.

`--dist worksteal` cuts the tests into as many shares as there are workers. Who is through with its own takes from
the end of another's. So each share begins with some of the long ones, and what is left at the end is short.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

__all__ = ["shares_of", "spread"]

Item = TypeVar("Item")

#: Modules whose tests share what takes long to make: they stay together.
_TOGETHER = ("tests/example/test_demo.py", "tests/protocol/test_interleavings.py")
#: What a test, or such a module, takes of one worker's time, very roughly, in seconds.
_LONG = {
    "tests/chaos/test_chaos.py": 135,
    "tests/protocol/test_interleavings.py": 120,
    "tests/example/test_demo.py": 75,
    "tests/simulation/test_hour.py": 60,
    "tests/simulation/test_losses.py": 60,
    "tests/time/test_oracle.py": 8,
    "tests/simulation/": 8,
}


def spread(items: Sequence[Item], workers: int, path_of: Callable[[Item], str]) -> list[Item]:
    """The tests in an order whose shares all begin with long ones. Others keep theirs.

    Parameters:
        items: the tests.
        workers: how many shares there will be.
        path_of: the file of a test, as its id begins.
    """
    blocks: dict[tuple[int, str], list[Item]] = {}
    short: list[Item] = []
    for number, item in enumerate(items):
        path = path_of(item)
        seconds = next((seconds for begin, seconds in _LONG.items() if path.startswith(begin)), 0)
        if not seconds:
            short.append(item)
        else:
            blocks.setdefault((-seconds, path if path in _TOGETHER else f"{number:06}"), []).append(item)
    dealt: list[list[Item]] = [[] for _ in range(workers)]
    loads = [0] * workers
    for key in sorted(blocks):
        least = loads.index(min(loads))
        loads[least] -= key[0]
        dealt[least] += blocks[key]
    ordered: list[Item] = []
    for long, size in zip(dealt, shares_of(len(items), workers), strict=True):
        room = max(size - len(long), 0)
        ordered += long + short[:room]
        short = short[room:]
    return ordered + short


def shares_of(number: int, workers: int) -> list[int]:
    """How many tests each worker is given at first."""
    sizes = []
    for left in range(workers, 0, -1):
        sizes.append(number // left)
        number -= sizes[-1]
    return sizes
