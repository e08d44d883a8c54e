"""Short random stories: no guarantee is broken in any of them.

A story has replicas, workers and entries of random policies, and a selection of faults that strike for half a minute;
then all is quiet, and it is judged. `make simulate` tells ten thousand others, `make simulate SEED=n` one line by line.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.simulation.simulate import Total
from tests.simulation.stories import tell
from tests.simulation.trouble import KINDS
from tests.support.faketime_server import FrozenServer

#: Apart from those of `make simulate`.
_FIRST = 1_000_001
_SHARES, _STORIES = 10, 50


@pytest.mark.parametrize("share", range(_SHARES))
def test_no_guarantee_is_broken_whatever_fails(
    frozen_server: FrozenServer, count_stories: Callable[[int, str], None], share: int
) -> None:
    total = Total()
    for seed in range(_FIRST + share * _STORIES, _FIRST + (share + 1) * _STORIES):
        told = tell(frozen_server, seed)
        assert not told.broken, f"make simulate SEED={seed}\n{told.about}"
        total.add(told)
    # Faults that never happen prove nothing.
    assert sum(total.faults[kind] > 0 for kind in KINDS) > len(KINDS) * 3 // 4
    assert sum(total.ends.values()) > 2 * _STORIES
    count_stories(_STORIES, f"random: {next(total.lines())}")


def test_a_number_tells_the_same_story_each_time(frozen_server: FrozenServer) -> None:
    # That of the first number is a short one.
    stories = [tell(frozen_server, _FIRST + 1, keep=True) for _ in range(2)]
    first, second = (story.journal for story in stories)
    assert first is not None
    assert second is not None
    assert len(first.lines) > 50
    assert first.lines == second.lines
