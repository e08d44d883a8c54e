"""A candidate of a newer release gets its chances, and the lease isn't passed to and fro."""

from __future__ import annotations

from celery_leaderbeat.handover import Handovers


def test_a_candidate_that_did_not_keep_the_lead_waits_twice_as_long_each_time() -> None:
    handovers = Handovers(first=15.0)
    now, waits = 100.0, []
    assert handovers.may("new", now)
    for _ in range(7):
        handovers.give("new", now)
        began = now
        while not handovers.may("new", now):
            now += 0.5
        waits.append(now - began)
    assert waits == [15, 30, 60, 120, 240, 300, 300]


def test_each_candidate_has_chances_of_its_own() -> None:
    handovers = Handovers(first=15.0)
    handovers.give("one", 0.0)
    assert not handovers.may("one", 14.9)
    assert handovers.may("two", 0.0)


def test_candidates_of_long_ago_are_forgotten() -> None:
    handovers = Handovers(first=15.0)
    for n in range(1000):
        handovers.give(f"candidate {n}", 0.0)
    assert handovers.may("candidate 0", 0.0)
    assert not handovers.may("candidate 999", 0.0)
