"""Tests whose slots are a minute or more apart keep away from them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.turns import away_from_slots, periods_of

MIDNIGHT = 1_795_996_800.0


class Clock:
    """Goes on only while somebody waits."""

    def __init__(self, now: float) -> None:
        self.now = now

    def wait(self, seconds: float) -> None:
        assert seconds > 0
        self.now += seconds


def begins_at(periods: list[float], now: float) -> float:
    clock = Clock(now)
    away_from_slots(periods, lambda: clock.now, clock.wait)
    return clock.now


@pytest.mark.parametrize(
    ("periods", "into", "begins"),
    [
        ([], 59.9, 59.9),
        ([60.0], 0.75, 2.0),
        ([60.0], 44.0, 44.0),
        ([60.0], 46.0, 62.0),
        ([3600.0], 3530.0, 3530.0),
        ([3600.0], 3541.0, 3602.0),
        ([60.0, 86400.0], 86399.9, 86402.0),
    ],
)
def test_it_waits_in_the_last_and_first_seconds_of_a_period(
    periods: list[float], into: float, begins: float
) -> None:
    assert begins_at(periods, MIDNIGHT + into) == pytest.approx(MIDNIGHT + begins)


@given(
    periods=st.lists(st.sampled_from([60.0, 900.0, 3600.0, 86400.0, 10_000_000.0]), max_size=3),
    into=st.floats(0, 86400, allow_nan=False),
)
def test_no_slot_is_close_when_it_ends(periods: list[float], into: float) -> None:
    begins = begins_at(periods, MIDNIGHT + into)
    assert begins - (MIDNIGHT + into) <= 75
    for period in periods:
        assert 2 - 1e-3 <= begins % period <= period - min(60, period / 4) + 1e-3


def test_the_periods_are_those_of_the_entries() -> None:
    entries = {
        "each minute": {"crontab": {}},
        "hourly": {"crontab": {"minute": 0}},
        "day": {"every": 86400.0},
        "short": {"every": 2.0},
        "own": {"custom": "project.Own"},
    }
    assert periods_of(entries) == {60.0, 3600.0, 86400.0}
