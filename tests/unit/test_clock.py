"""One clock for the fleet, whatever a replica's own clock shows."""

from __future__ import annotations

import logging
import random

import pytest

from celery_leaderbeat.clock import Clock, FleetClock
from celery_leaderbeat.clock_watch import OffsetWatch, StepWatch


class Stepping(Clock):
    """A host whose wall clock can be stepped, and whose monotonic clock can't."""

    def __init__(self) -> None:
        self.ticks = 100.0
        self.shown = 1_000_000.0

    def monotonic(self) -> float:
        return self.ticks

    def wall(self) -> float:
        return self.shown


def test_a_step_of_the_wall_clock_moves_nothing() -> None:
    host = Stepping()
    fleet = FleetClock(host)
    fleet.observe(2_000_000.0, sent=99.9, received=100.0)
    for step in (3600.0, -7200.0):
        host.shown += step
        assert fleet.now() == 2_000_000.0
    host.ticks += 5
    assert fleet.now() == 2_000_005.0


def test_the_estimate_is_never_ahead_of_the_server() -> None:
    host = Stepping()
    fleet = FleetClock(host)
    # The server read its clock at some moment between 99 and 100; at 100 its clock shows at least that.
    fleet.observe(2_000_000.0, sent=99.0, received=100.0)
    assert fleet.now() <= 2_000_001.0
    assert fleet.now() == 2_000_000.0


def test_a_quick_round_trip_counts_for_more_than_the_slow_ones_that_follow() -> None:
    host = Stepping()
    fleet = FleetClock(host)
    fleet.observe(2_000_000.0, sent=99.99, received=100.0)
    for _ in range(20):
        host.ticks += 5
        shown = 2_000_000.0 + host.ticks - 100.0
        # The server read its clock at the begin of a round trip of two seconds.
        fleet.observe(shown - 2, sent=host.ticks - 2, received=host.ticks)
        assert shown - 0.05 < fleet.now() <= shown


def test_the_answer_that_a_frozen_process_finds_when_it_thaws_sets_no_clock_back() -> None:
    host = Stepping()
    fleet = FleetClock(host)
    fleet.observe(2_000_000.0, sent=99.99, received=100.0)
    steps, offset = StepWatch(fleet), OffsetWatch(fleet)
    # It had asked before it was frozen, and was frozen for 400 s.
    host.ticks = 520.0
    fleet.observe(2_000_020.0, sent=119.99, received=520.0)
    assert 2_000_419.0 < fleet.now() <= 2_000_420.0
    assert steps.step() == 0.0
    host.shown = 2_000_420.0
    offset.look()
    offset.look()
    assert fleet.offset == pytest.approx(0.0, abs=0.2)


def test_the_fleets_clock_is_never_ahead_and_is_late_by_less_than_the_quickest_of_the_latest_round_trips() -> (
    None
):
    for seed in range(300):
        rng = random.Random(seed)
        host, drift = Stepping(), rng.uniform(-1e-4, 1e-4)
        fleet = FleetClock(host)
        trips: list[float] = []
        for _ in range(40):
            host.ticks += rng.choice((0.5, 5.0, 20.0))
            sent = host.ticks
            there, back = (rng.choice((0.0005, 0.01, 2.0, 100.0)) for _ in range(2))
            read = 2_000_000.0 + (sent + there) * (1 + drift)
            host.ticks += there + back
            fleet.observe(read, sent=sent, received=host.ticks)
            trips.append(there + back)
            late = 2_000_000.0 + host.ticks * (1 + drift) - fleet.now()
            assert -1e-6 <= late <= min(trips[-3:]) + 0.3, seed


def test_a_slow_round_trip_is_no_wall_clock_that_is_off(caplog: pytest.LogCaptureFixture) -> None:
    host = Stepping()
    fleet = FleetClock(host)
    watch = OffsetWatch(fleet)
    # The server's answer took two seconds to come.
    fleet.observe(999_998.0, sent=97.99, received=100.0)
    watch.look()
    watch.look()
    assert fleet.offset == 0.0
    assert not caplog.records
    # More than that is no excuse.
    host.shown += 90.0
    watch.look()
    watch.look()
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert fleet.offset == pytest.approx(-90.0, abs=2.1)


def test_before_any_measurement_and_with_the_local_clock_the_host_decides() -> None:
    host = Stepping()
    assert FleetClock(host).now() == host.shown
    local = FleetClock(host, "local")
    local.observe(2_000_000.0, sent=99.9, received=100.0)
    assert local.now() == host.shown
    assert local.offset == 1_000_000.0
    assert FleetClock(host).offset == 0.0


def test_a_measurement_that_contradicts_the_estimate_counts_at_once_however_slow_it_was() -> None:
    host = Stepping()
    fleet = FleetClock(host)
    fleet.observe(2_000_000.0, sent=99.99, received=100.0)
    for stepped in (2_003_600.0, 1_996_400.0):
        host.ticks += 5
        fleet.observe(stepped, sent=host.ticks - 1, received=host.ticks)
        assert fleet.now() == stepped


def test_a_host_that_slept_catches_up_with_the_next_measurement() -> None:
    host = Stepping()
    fleet = FleetClock(host)
    fleet.observe(2_000_000.0, sent=99.99, received=100.0)
    # Its monotonic clock stood still for ten minutes.
    host.ticks += 5
    fleet.observe(2_000_605.0, sent=104.5, received=105.0)
    assert fleet.now() == 2_000_605.0


def test_a_step_of_the_fleets_clock_is_noticed_and_the_passing_of_time_is_not() -> None:
    host = Stepping()
    fleet = FleetClock(host)
    fleet.observe(2_000_000.0, sent=99.99, received=100.0)
    watch = StepWatch(fleet)
    host.ticks += 1000
    host.shown += 3600
    assert watch.step() == 0.0
    fleet.observe(2_004_600.0, sent=1099.99, received=1100.0)
    assert watch.step() == 3600.0
    assert watch.step() == 0.0
    local = FleetClock(host, "local")
    watch = StepWatch(local)
    host.ticks += 10
    host.shown += 10
    assert watch.step() == 0.0
    host.shown -= 3600
    assert watch.step() == -3600.0


class Jerky(Stepping):
    """A process that is frozen for a minute within a look at two clocks."""

    frozen = False

    def wall(self) -> float:
        if self.frozen:
            self.frozen = False
            self.ticks += 60
        return self.shown


def test_a_process_that_is_frozen_within_a_look_sees_no_step() -> None:
    host = Jerky()
    watch = StepWatch(FleetClock(host, "local"))
    host.frozen = True
    host.shown += 60
    assert watch.step() == 0.0


def test_a_wall_clock_that_is_off_is_told_once_and_again_when_it_is_right(
    caplog: pytest.LogCaptureFixture,
) -> None:
    host = Stepping()
    fleet = FleetClock(host)
    fleet.observe(1_000_000.0, sent=99.99, received=100.0)
    watch = OffsetWatch(fleet)
    told = []
    with caplog.at_level(logging.INFO):
        for offset in (0.0, 0.9, 1.5, 0.9, 1.5, 1.5, 0.9, 1.5, 0.4, 0.4, 0.9, -2.0, -2.0):
            caplog.clear()
            host.shown = 1_000_000.0 + offset
            watch.look()
            told += [(offset, record.levelname) for record in caplog.records]
    assert told == [(1.5, "WARNING"), (0.4, "INFO"), (-2.0, "WARNING")]
