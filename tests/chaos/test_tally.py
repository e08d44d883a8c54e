"""What the tally counts of schedulers that stamp nothing."""

from __future__ import annotations

import pytest

from tests.chaos.schedule import Entry
from tests.chaos.tally import Tally, tally
from tests.chaos.tap import Arrival

ENTRIES = {"e": Entry("e", "plain", 0.0, 10.0)}


@pytest.mark.parametrize(
    ("times", "found"),
    [
        ([3, 13, 23, 33, 43, 53], Tally(6, 6, 0, 0)),
        # Another phase after a pause is no loss by itself.
        ([3, 13, 27, 37, 47, 57], Tally(6, 6, 0, 0)),
        ([3, 13, 33, 43, 53], Tally(6, 5, 0, 1)),
        ([3, 3.1, 3.2, 13, 23, 23.5, 33, 43, 53], Tally(6, 9, 3, 0)),
        ([33, 43, 53], Tally(6, 3, 0, 3)),
        ([3, 13], Tally(6, 2, 0, 4)),
        ([], Tally(6, 0, 0, 6)),
        ([-5, 3, 13, 23, 33, 43, 53, 61], Tally(6, 6, 0, 0)),
    ],
)
def test_what_is_missing_is_lost_and_what_comes_too_soon_is_doubled(times: list[float], found: Tally) -> None:
    arrivals = [Arrival(1000.0 + t, "beat0", "e", 1) for t in times]
    assert tally(ENTRIES, arrivals, 1000.0, 1060.0) == found


def test_entries_do_not_mix_and_unknown_ones_do_not_count() -> None:
    two = {**ENTRIES, "f": Entry("f", "plain", 0.0, 10.0)}
    arrivals = [Arrival(1000.0 + t, "beat0", key, 1) for t in range(3, 60, 10) for key in ("e", "f", "g")]
    assert tally(two, arrivals, 1000.0, 1060.0) == Tally(12, 12, 0, 0)
