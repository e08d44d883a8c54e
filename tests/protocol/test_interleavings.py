"""Every interleaving of two leaders and two workers, on a real server, against the invariants of the design."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator

import pytest

from tests.protocol.conftest import EXPLORED_DB
from tests.protocol.explorer import explore
from tests.protocol.images import Images
from tests.protocol.world import Rules
from tests.support.servers import RedisServer

Tell = Callable[[str, str], None]

#: What takes minutes is explored under this variable, which `make test-long` sets.
EXHAUSTIVE = os.environ.get("LEADERBEAT_EXHAUSTIVE", "").lower() in ("1", "true", "yes")

_exhaustive = pytest.mark.skipif(not EXHAUSTIVE, reason="takes minutes: `make test-long`")
_patient = pytest.mark.timeout(7200)


def _named(rules: Rules) -> str:
    words = [f"prefer {rules.prefer}", f"{rules.elections} elections", f"{rules.faults} faults"]
    words += [f"{rules.slots} slots"] if rules.slots > 1 else []
    words += [f"fencing {rules.mode}"] if rules.mode != "slot" else []
    words += [] if rules.acks_late else ["early acks"]
    words += ["misses"] if rules.misses else []
    words += [f"on_crash {rules.on_crash}"] if rules.on_crash != "auto" else []
    words += [f"{rules.max_attempts} attempts"] if rules.max_attempts > 1 else []
    return ", ".join(words)


@pytest.fixture(scope="module")
def memory() -> Iterator[dict[object, object]]:
    known: dict[object, object] = {}
    yield known
    known.clear()


@pytest.fixture
def check(
    one_server: RedisServer, memory: dict[object, object], tell: Tell
) -> Iterator[Callable[[Rules], None]]:
    """Explore, and tell how much there was."""
    images = Images(one_server.url(EXPLORED_DB), one_server.client(EXPLORED_DB), memory)

    def run(rules: Rules) -> None:
        began = time.monotonic()
        found = explore(rules, images)
        tell("interleavings", f"{_named(rules)}: {found}, {time.monotonic() - began:.1f} s")
        assert found.at_rest

    yield run
    images.close()


def _each(*several: Rules) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("rules", several, ids=_named)


@_each(
    Rules(prefer="missed", elections=4, faults=0),
    Rules(prefer="missed", elections=2, faults=1),
    Rules(prefer="missed", elections=1, faults=2),
    Rules(prefer="duplicate", elections=3, faults=0),
    Rules(prefer="duplicate", elections=2, faults=1),
    Rules(prefer="duplicate", elections=1, faults=2),
)
def test_a_slot_is_sent_by_one_epoch_run_once_at_a_time_and_brought_to_its_end(
    check: Callable[[Rules], None], rules: Rules
) -> None:
    check(rules)


@_each(
    Rules(prefer="missed", slots=2, workers=1, elections=2, faults=0),
    Rules(prefer="missed", slots=2, workers=1, elections=1, faults=1),
    Rules(prefer="duplicate", slots=2, workers=1, elections=1, faults=1),
)
def test_two_slots_of_an_entry_that_are_claimed_together_end_each_on_its_own(
    check: Callable[[Rules], None], rules: Rules
) -> None:
    check(rules)


@_each(
    Rules(prefer="missed", acks_late=False, elections=2, faults=1),
    Rules(prefer="duplicate", acks_late=False, elections=2, faults=1),
)
def test_a_task_that_acknowledges_early_is_never_run_twice(
    check: Callable[[Rules], None], rules: Rules
) -> None:
    check(rules)


@_each(
    Rules(prefer="missed", misses=True, elections=2, faults=1),
    Rules(prefer="duplicate", misses=True, elections=2, faults=1),
)
def test_a_slot_that_a_leader_decides_to_miss_is_sent_by_nobody_after_it(
    check: Callable[[Rules], None], rules: Rules
) -> None:
    check(rules)


@_each(
    Rules(prefer="missed", mode="current", elections=2, faults=1),
    Rules(prefer="missed", mode="observed", elections=2, faults=1),
    Rules(prefer="duplicate", mode="current", elections=2, faults=0),
    Rules(prefer="duplicate", mode="observed", elections=2, faults=0),
)
def test_a_stricter_fencing_refuses_at_the_start_alone(check: Callable[[Rules], None], rules: Rules) -> None:
    check(rules)


@_each(
    Rules(prefer="missed", on_crash="rerun", max_attempts=2, elections=2, faults=1),
    Rules(prefer="missed", on_crash="rerun", max_attempts=3, elections=1, faults=2),
    Rules(prefer="duplicate", on_crash="rerun", max_attempts=2, elections=1, faults=2),
    Rules(prefer="missed", on_crash="rerun", max_attempts=2, acks_late=False, elections=1, faults=2),
    Rules(prefer="missed", on_crash="rerun", max_attempts=2, misses=True, elections=1, faults=2),
)
def test_what_died_in_mid_run_is_run_again_to_its_end_and_the_dead_run_says_nothing(
    check: Callable[[Rules], None], rules: Rules
) -> None:
    check(rules)


@_each(
    Rules(prefer="missed", on_crash="skip", elections=2, faults=1),
    Rules(prefer="missed", on_crash="skip", elections=1, faults=3),
    Rules(prefer="duplicate", on_crash="skip", elections=1, faults=2),
)
def test_where_a_crash_is_to_be_skipped_a_slot_is_run_at_most_once(
    check: Callable[[Rules], None], rules: Rules
) -> None:
    check(rules)


@_exhaustive
@_patient
@_each(
    Rules(prefer="missed", elections=3, faults=1),
    Rules(prefer="missed", elections=3, faults=2),
    Rules(prefer="duplicate", elections=4, faults=0),
    Rules(prefer="duplicate", elections=3, faults=1),
    Rules(prefer="duplicate", elections=2, faults=2),
    Rules(prefer="missed", slots=2, elections=2, faults=1),
    Rules(prefer="duplicate", slots=2, elections=2, faults=0),
    Rules(prefer="duplicate", slots=2, elections=1, faults=2),
    Rules(prefer="missed", slots=2, workers=1, misses=True, elections=2, faults=1),
    Rules(prefer="missed", acks_late=False, elections=2, faults=2),
    Rules(prefer="duplicate", acks_late=False, elections=2, faults=2),
    Rules(prefer="duplicate", mode="current", elections=2, faults=1),
    Rules(prefer="duplicate", mode="observed", elections=2, faults=1),
    Rules(prefer="missed", on_crash="rerun", max_attempts=2, elections=2, faults=2),
    Rules(prefer="missed", on_crash="rerun", max_attempts=2, slots=2, workers=1, elections=1, faults=1),
    Rules(prefer="duplicate", on_crash="rerun", max_attempts=2, elections=2, faults=1),
    Rules(prefer="duplicate", on_crash="rerun", max_attempts=3, elections=1, faults=2),
    Rules(prefer="duplicate", on_crash="rerun", max_attempts=2, acks_late=False, elections=2, faults=1),
    Rules(prefer="duplicate", on_crash="skip", elections=2, faults=1),
)
def test_more_of_everything_changes_nothing(check: Callable[[Rules], None], rules: Rules) -> None:
    check(rules)


@_exhaustive
@_patient
@_each(
    Rules(prefer="missed", elections=1, faults=3),
    Rules(prefer="duplicate", elections=1, faults=3),
    Rules(prefer="missed", elections=2, faults=3),
    Rules(prefer="missed", on_crash="rerun", max_attempts=3, elections=1, faults=3),
    Rules(prefer="duplicate", on_crash="skip", elections=1, faults=3),
)
def test_three_faults_in_one_story_change_nothing(check: Callable[[Rules], None], rules: Rules) -> None:
    check(rules)
