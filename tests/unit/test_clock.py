"""One clock for the fleet, whatever a replica's own clock shows."""

from __future__ import annotations

from celery_leaderbeat.clock import Clock, FleetClock


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


def test_the_smallest_round_trip_wins_until_it_is_a_minute_old() -> None:
    host = Stepping()
    fleet = FleetClock(host)
    fleet.observe(2_000_000.0, sent=99.99, received=100.0)
    host.ticks = 110.0
    fleet.observe(2_000_009.0, sent=108.0, received=110.0)
    assert fleet.now() == 2_000_010.0
    host.ticks = 161.0
    fleet.observe(2_000_060.0, sent=159.0, received=161.0)
    assert fleet.now() == 2_000_060.0


def test_before_any_measurement_and_with_the_local_clock_the_host_decides() -> None:
    host = Stepping()
    assert FleetClock(host).now() == host.shown
    local = FleetClock(host, "local")
    local.observe(2_000_000.0, sent=99.9, received=100.0)
    assert local.now() == host.shown
    assert local.offset == 1_000_000.0
    assert FleetClock(host).offset == 0.0


def test_a_step_of_the_servers_clock_counts_at_once() -> None:
    for step in (3600.0, -3600.0, 2.0, -2.0):
        host = Stepping()
        fleet = FleetClock(host)
        fleet.observe(2_000_000.0, sent=99.999, received=100.0)
        fleet.observe(2_000_001.0 + step, sent=100.5, received=101.0)
        host.ticks = 101.0
        assert fleet.now() == 2_000_001.0 + step


def test_a_slow_answer_is_no_step() -> None:
    host = Stepping()
    fleet = FleetClock(host)
    fleet.observe(2_000_000.0, sent=99.999, received=100.0)
    # Asked at 101, answered by the server at once or just before the end.
    for server in (2_000_001.0, 2_000_009.0):
        fleet.observe(server, sent=101.0, received=109.0)
        host.ticks = 109.0
        assert fleet.now() == 2_000_009.0
