"""A crash at every call of a short story, for every legal mix of policies: the guarantees hold, the audit explains.

A story is three slots of one entry, with two replicas and two workers. It is told again and again; in the k-th
telling, whoever comes to the k-th point is killed there, or frozen for longer than all leases (see `strikes`). The
last telling is the one in which nobody comes to the k-th point.

In other tellings somebody else is struck soon after: while the others make up for the first blow.

`LEADERBEAT_EXHAUSTIVE=1` tells every story for every `catch_up`, and far more of the latter kind.
"""

from __future__ import annotations

import itertools
import os
import random
from collections.abc import Callable, Mapping
from typing import Any

import pytest

from tests.simulation.entries import MIXES, mix_name
from tests.simulation.strikes import tell_story
from tests.support.faketime_server import FrozenServer

EXHAUSTIVE = os.environ.get("LEADERBEAT_EXHAUSTIVE", "").lower() in ("1", "true", "yes")

#: Stories of two blows for each mix.
_DOUBLES = 500 if EXHAUSTIVE else 10
#: Where the crash of each call isn't the matter, every other point will do.
_STEP, _EACH = (1, "each") if EXHAUSTIVE else (2, "every other")
#: Each mix of the other policies, with one `catch_up` after the other.
_FEWER = [mix for i, mix in enumerate(MIXES) if i % 3 == (i // 3) % 3]
_CHOSEN = MIXES if EXHAUSTIVE else _FEWER


#: Mixes for tasks that acknowledge early, or that aren't FencedTasks and never say that they are done.
_OTHERS = [
    (task, mix)
    for mix in _FEWER
    for task in ("fenced.early", "plain.late")
    if mix["overlap"] == "allow" and (task, mix["on_crash"]) != ("plain.late", "rerun")
]


@pytest.mark.timeout(3600 if EXHAUSTIVE else 300)
@pytest.mark.parametrize("mix", _CHOSEN, ids=mix_name)
def test_whoever_is_killed_at_whichever_point_no_guarantee_is_broken(
    frozen_server: FrozenServer, count_stories: Callable[[int, str], None], mix: Mapping[str, Any]
) -> None:
    stories = _strike_everywhere(frozen_server, "fenced.late", mix, "killed")
    count_stories(stories, f"{mix_name(mix)}: killed at each point")


@pytest.mark.timeout(3600 if EXHAUSTIVE else 300)
@pytest.mark.parametrize("mix", _CHOSEN, ids=mix_name)
def test_nor_where_somebody_is_frozen_for_longer_than_all_leases(
    frozen_server: FrozenServer, count_stories: Callable[[int, str], None], mix: Mapping[str, Any]
) -> None:
    stories = _strike_everywhere(frozen_server, "fenced.late", mix, "frozen", _STEP)
    count_stories(stories, f"{mix_name(mix)}: frozen at {_EACH} point")


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("task", "mix"), _OTHERS, ids=[f"{task}-{mix_name(mix)}" for task, mix in _OTHERS])
def test_nor_where_a_task_acknowledges_early_or_never_says_that_it_is_done(
    frozen_server: FrozenServer, count_stories: Callable[[int, str], None], task: str, mix: Mapping[str, Any]
) -> None:
    stories = _strike_everywhere(frozen_server, task, mix, "killed", _STEP)
    count_stories(stories, f"{mix_name(mix)}, {task}: killed at {_EACH} point")


@pytest.mark.timeout(3600 if EXHAUSTIVE else 300)
@pytest.mark.parametrize("mix", _CHOSEN, ids=mix_name)
def test_nor_by_a_second_blow_while_the_others_make_up_for_the_first(
    frozen_server: FrozenServer, count_stories: Callable[[int, str], None], mix: Mapping[str, Any]
) -> None:
    rng = random.Random(mix_name(mix))
    struck = 0
    for _ in range(_DOUBLES):
        first = rng.randrange(1, 40)
        blows = {
            first: rng.choice(("killed", "frozen")),
            first + rng.randrange(1, 16): rng.choice(("killed", "frozen")),
        }
        struck += len(tell_story(frozen_server, "fenced.late", mix, blows)) == 2
    count_stories(_DOUBLES, f"{mix_name(mix)}: two blows")
    assert struck > _DOUBLES // 4


def _strike_everywhere(
    server: FrozenServer, task: str, mix: Mapping[str, Any], blow: str, step: int = 1
) -> int:
    """Tell the story for one point after the other, until there is none; at how many somebody was struck."""
    for stories in itertools.count():
        if not tell_story(server, task, mix, {1 + stories * step: blow}):
            assert stories > 10
            return stories
    raise AssertionError("unreachable")
