"""Seeded bugs: with a guard taken out, one of the tests finds out, and soon.

Each bug is planted alone. With `LEADERBEAT_EXHAUSTIVE=1` (`make simulate-bugs`) all nets are cast: the short random
stories from the first seed on, the stories of the crash points, the interleavings of the scripts, and the scripts'
contract tests. In a run of all tests, `tests/protocol/test_guards.py` takes out the same guards of the scripts.
(Which seed finds a bug changes with each question that replicas ask of Redis, so no seed is kept.)
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest

from tests.protocol.conftest import EXPLORED_DB
from tests.protocol.explorer import explore
from tests.protocol.guards import GUARDS
from tests.protocol.images import Images
from tests.protocol.test_guards import CONTRACTS, contract_that_fails
from tests.protocol.world import Violation
from tests.simulation.bugs import BUGS, Bug
from tests.simulation.stories import tell as tell_seed
from tests.simulation.strikes import tell_story
from tests.support.faketime_server import FrozenServer
from tests.support.servers import RedisServer

EXHAUSTIVE = os.environ.get("LEADERBEAT_EXHAUSTIVE", "").lower() in ("1", "true", "yes")

#: Stories that may be told until a bug is found.
_SEEDS = 1000
#: No story of the crash points has so many of them.
_POINTS = 70
_MIXES = [
    {"prefer": prefer, "on_crash": on_crash, "overlap": "allow", "catch_up": "latest"}
    for prefer in ("missed", "duplicate")
    for on_crash in ("auto", "rerun")
]


def _named(bug: Bug) -> str:
    return bug.name


@dataclass
class _Found:
    """After how many stories a bug was found, and what was wrong."""

    stories: int
    wrong: str


def _by_seeds(server: FrozenServer, first: int, most: int) -> _Found | None:
    for number in range(most):
        try:
            told = tell_seed(server, first + number)
        except AssertionError as exc:
            # The world itself came to a halt.
            return _Found(number + 1, str(exc).partition("\n")[0])
        if told.broken:
            return _Found(number + 1, told.broken[0])
    return None


def _by_crash_points(server: FrozenServer) -> _Found | None:
    stories = 0
    for mix, blow in itertools.product(_MIXES, ("killed", "frozen")):
        for point in range(1, _POINTS):
            stories += 1
            try:
                if not tell_story(server, "fenced.late", mix, {point: blow}):
                    break
            except AssertionError as exc:
                return _Found(stories, str(exc).splitlines()[1].strip())
    return None


def _by_interleavings(server: RedisServer, bug: Bug) -> Violation | None:
    for guard in GUARDS:
        if (guard.script, guard.name) == (bug.place, bug.guard) and guard.rules is not None:
            images = Images(server.url(EXPLORED_DB), server.client(EXPLORED_DB), {})
            try:
                explore(guard.rules, images)
            except Violation as found:
                return found
            finally:
                images.close()
    return None


def _nets(bug: Bug, frozen: FrozenServer, server: RedisServer) -> Iterator[str]:
    """What finds the bug, and after how much."""
    found = _by_seeds(frozen, 1, _SEEDS)
    if found is not None:
        yield f"random stories (seed {found.stories}: {found.wrong})"
    found = _by_crash_points(frozen)
    if found is not None:
        yield f"crash points (story {found.stories}: {found.wrong})"
    violation = _by_interleavings(server, bug)
    if violation is not None:
        yield f"interleavings ({violation.guarantee}, {len(violation.story) - 1} moves)"
    if isinstance(bug.place, str):
        contract = contract_that_fails(server, CONTRACTS[bug.place])
        if contract is not None:
            yield f"contract ({contract})"


@pytest.mark.parametrize("bug", [bug for bug in BUGS if isinstance(bug.place, str) and bug.guard], ids=_named)
def test_a_seeded_bug_of_a_script_is_a_guard_with_a_contract(bug: Bug) -> None:
    """Each of those guards is shown to be needed by `tests/protocol/test_guards.py`."""
    assert (bug.place, bug.guard, bug.text) in {(guard.script, guard.name, guard.text) for guard in GUARDS}


if EXHAUSTIVE:

    @pytest.mark.timeout(3600)
    @pytest.mark.parametrize("bug", BUGS, ids=_named)
    def test_a_seeded_bug_is_found(
        bug: Bug,
        frozen_server: FrozenServer,
        one_server: RedisServer,
        monkeypatch: pytest.MonkeyPatch,
        tell: Callable[[str], None],
    ) -> None:
        bug.plant(monkeypatch)
        nets = list(_nets(bug, frozen_server, one_server))
        tell(f"without {bug.name}: {'; '.join(nets) or 'nothing'}")
        assert nets
