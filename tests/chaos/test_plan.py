"""The plan of faults, which the seed alone decides."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.chaos.plan import KINDS, Fault, kinds_for, make_plan, processes_of

BEATS, WORKERS = ("beat0", "beat1", "beat2"), ("worker0", "worker1")
FIRST_OF_SEED_7 = [
    "   1.83 s  pause          worker0         for 5.02 s",
    "   3.32 s  pause          leader          for 8.27 s (as it sends for a plain task)",
    "   5.94 s  cut            leader:broker   for 4.27 s",
]


def plan(seed: int, seconds: float = 600.0, topology: str = "standalone") -> tuple[Fault, ...]:
    return make_plan(seed, seconds, beats=BEATS, workers=WORKERS, kinds=kinds_for(topology))


def test_a_seed_gives_the_same_plan_every_time_and_another_seed_another_one() -> None:
    assert plan(7) == plan(7)
    assert plan(7) != plan(8)


def test_a_seed_in_a_bug_report_means_the_same_tomorrow() -> None:
    # Whoever changes the rules of the plan changes this line, and says so.
    faults = make_plan(7, 600.0, beats=BEATS, workers=WORKERS, kinds=("kill", "pause", "cut"))
    assert list(map(str, faults[:3])) == FIRST_OF_SEED_7


def test_the_order_in_which_kinds_are_named_does_not_matter() -> None:
    kinds = kinds_for("standalone")
    backwards = make_plan(7, 600.0, beats=BEATS, workers=WORKERS, kinds=kinds[::-1])
    assert backwards == plan(7)


@pytest.mark.parametrize("topology", ["standalone", "sentinel"])
def test_two_minutes_have_each_kind_of_fault(topology: str) -> None:
    for seed in range(20):
        assert {fault.kind for fault in plan(seed, 130.0, topology)} == set(kinds_for(topology)), seed


def test_half_an_hour_has_three_hundred_faults() -> None:
    assert all(len(plan(seed, 1800.0)) >= 300 for seed in range(10))


def test_nothing_is_struck_by_two_faults_at_a_time() -> None:
    for seed in range(20):
        busy: dict[str, float] = {}
        for fault in plan(seed):
            for process in processes_of(fault.target, BEATS):
                assert fault.at >= busy.get(process, 0.0), f"seed {seed}: {fault}"
                busy[process] = fault.at + fault.seconds


def test_all_faults_are_over_at_the_end() -> None:
    assert all(fault.at + fault.seconds < 600 for seed in range(20) for fault in plan(seed))


def test_beats_and_workers_and_both_of_their_links_are_struck() -> None:
    targets = Counter(fault.target for fault in plan(1, 3600.0))
    who = (*BEATS, *WORKERS, "leader")
    links = {f"{name}:{link}" for name in who for link in ("ledger", "broker")}
    assert {*who, *links, "ledger", "beats"} == set(targets)


def test_some_faults_outlast_the_leases_and_some_do_not() -> None:
    pauses = [fault.seconds for fault in plan(1, 3600.0) if fault.kind == "pause"]
    assert min(pauses) < 1 < 4.5 < max(pauses)


def test_the_leader_is_often_killed_or_frozen_while_its_link_is_slow() -> None:
    faults = plan(1, 3600.0)
    slow = [fault for fault in faults if fault.kind == "delay" and fault.target.startswith("leader:")]
    struck = [fault for fault in faults if fault.kind in ("kill", "pause") and fault.target == "leader"]
    both = [
        fault for fault in slow if any(fault.at < other.at < fault.at + fault.seconds for other in struck)
    ]
    assert len(both) > len(slow) / 3 > 3


def test_each_kind_is_explained_by_whom_it_strikes() -> None:
    assert {kind.strikes for kind in KINDS.values()} == {"process", "link", "ledger", "beat", "beats"}
