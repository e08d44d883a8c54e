"""start: a job outside Celery starts once at a time, never after its end, again only as the next attempt."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import pytest

from celery_leaderbeat.tick import slot_to_us
from tests.protocol.ground import ENTRY, Ground, slot

NEVER = 1 << 62
ENDS = ["done", "failed", "abandoned"]
LEADERS = [
    "claimed",
    "returned",
    "sent",
    "unconfirmed",
    "running",
    "retrying",
    *ENDS,
    "missed",
    "skipped",
    "refused",
]


@dataclass(frozen=True)
class Answer:
    verdict: str
    left: int
    fields: dict[str, str]


def _ask(
    ground: Ground,
    run: str = "r1",
    on_crash: str = "rerun",
    *,
    max_attempts: int = 3,
    lease: float = 30.0,
    ttl: float = 3600.0,
    number: int = 1,
) -> Answer:
    verdict, left, *fields = ground.store.run(
        "start",
        [ground.record_key(number), ground.keys.entries, ground.keys.counts],
        [
            run,
            on_crash,
            max_attempts if on_crash == "rerun" else 1,
            round(lease * 1000),
            round(ttl * 1000),
            f"host:{run}",
            ground.key(number),
            ENTRY,
            slot_to_us(slot(number)),
        ],
    )
    return Answer(verdict, left, dict(zip(fields[::2], fields[1::2], strict=True)))


def _start(ground: Ground, run: str = "r1", on_crash: str = "rerun", **options: Any) -> None:
    answer = _ask(ground, run, on_crash, **options)
    assert answer.verdict == "run", answer


def _events(ground: Ground) -> list[dict[str, str]]:
    return [fields for _, fields in ground.client.xrange(ground.keys.events)]


def _names(ground: Ground) -> list[str]:
    return [fields["event"] for fields in _events(ground)]


@pytest.mark.parametrize("on_crash", ["skip", "rerun"])
def test_a_slot_that_nobody_has_started_runs_and_the_record_says_who_runs_it(
    ground: Ground, on_crash: str
) -> None:
    answer = _ask(ground, "r1", on_crash, max_attempts=4, lease=60, ttl=90)
    assert answer == Answer("run", 0, ground.fields(1))
    record = ground.record(1)
    assert (record.state, record.run, record.worker) == ("running", "r1", "host:r1")
    assert (record.key, record.entry, record.slot) == (ground.key(1), ENTRY, slot(1))
    assert (record.epoch, record.attempt, record.on_crash) == (0, 1, on_crash)
    assert record.started_at is not None
    assert abs(record.started_at * 1000 - ground.now_ms()) < 5_000
    assert ground.fields(1)["max_attempts"] == ("4" if on_crash == "rerun" else "1")
    assert 55_000 < int(ground.fields(1)["run_until"]) - ground.now_ms() <= 60_000
    assert 80_000 < ground.ttl(1) <= 90_000
    assert ground.ledger.counts() == {"started": 1}


def test_the_start_is_an_event(ground: Ground) -> None:
    _start(ground)
    assert _events(ground) == [
        {
            "event": "started",
            "entry": ENTRY,
            "key": ground.key(1),
            "epoch": "0",
            "attempt": "1",
            "worker": "host:r1",
        }
    ]


@pytest.mark.parametrize("other", ["skip", "rerun"])
@pytest.mark.parametrize("on_crash", ["skip", "rerun"])
def test_a_slot_that_runs_elsewhere_is_waited_for_as_long_as_its_lease_lasts(
    ground: Ground, on_crash: str, other: str
) -> None:
    _start(ground, "r1", on_crash, lease=60)
    before, events = ground.fields(1), _events(ground)
    answer = _ask(ground, "r2", other)
    assert (answer.verdict, answer.fields) == ("wait", before)
    assert 55_000 < answer.left <= 60_000
    assert (ground.fields(1), _events(ground)) == (before, events)


def test_slots_start_one_by_one(ground: Ground) -> None:
    _start(ground, "r1", number=1)
    _start(ground, "r2", number=2)
    assert [ground.record(number).run for number in (1, 2)] == ["r1", "r2"]


@pytest.mark.parametrize("state", ENDS)
@pytest.mark.parametrize("on_crash", ["skip", "rerun"])
def test_a_slot_that_has_ended_does_not_start_again(ground: Ground, on_crash: str, state: str) -> None:
    _start(ground)
    ground.let_run_lease_end(1)
    ground.write(1, state=state)
    before, events = ground.fields(1), _events(ground)
    assert _ask(ground, "r2", on_crash) == Answer("ended", 0, before)
    assert (ground.fields(1), _events(ground)) == (before, events)


@pytest.mark.parametrize("on_crash", ["skip", "rerun"])
def test_a_run_that_has_ended_does_not_start_again_when_it_asks_again(ground: Ground, on_crash: str) -> None:
    _start(ground, "r1", on_crash)
    assert ground.finish(1, "r1", "done")
    assert _ask(ground, "r1", on_crash).verdict == "ended"


@pytest.mark.parametrize("on_crash", ["skip", "rerun"])
def test_the_same_run_asking_again_gets_the_same_answer_and_its_lease_from_now_on(
    ground: Ground, on_crash: str
) -> None:
    _start(ground, "r1", on_crash, lease=60, ttl=90)
    before = ground.fields(1)
    ground.let_run_lease_end(1)
    ground.client.pexpire(ground.record_key(1), 5_000)
    answer = _ask(ground, "r1", on_crash, lease=60, ttl=90)
    assert answer.verdict == "run"
    assert {**answer.fields, "run_until": ""} == {**before, "run_until": ""}
    assert 55_000 < int(ground.fields(1)["run_until"]) - ground.now_ms() <= 60_000
    assert 80_000 < ground.ttl(1) <= 90_000
    assert ground.ledger.counts() == {"started": 1}
    assert _names(ground) == ["started"]


def test_the_run_of_a_later_attempt_asking_again_gets_the_same_answer(ground: Ground) -> None:
    _start(ground, "r1")
    ground.let_run_lease_end(1)
    for _ in range(3):
        assert _ask(ground, "r2").fields["attempt"] == "2"
    assert _names(ground) == ["started", "died", "rerun", "started"]


def test_a_run_that_lost_the_slot_before_it_saw_the_answer_does_not_begin(ground: Ground) -> None:
    _start(ground, "r1")
    ground.let_run_lease_end(1)
    _start(ground, "r2")
    assert _ask(ground, "r1").verdict == "wait"


def test_a_slot_whose_process_died_is_taken_over_as_the_next_attempt(ground: Ground) -> None:
    _start(ground, "r1")
    ground.let_run_lease_end(1)
    answer = _ask(ground, "r2", lease=60)
    assert answer == Answer("run", 0, ground.fields(1))
    record = ground.record(1)
    assert (record.state, record.run, record.worker, record.attempt) == ("running", "r2", "host:r2", 2)
    assert 55_000 < int(ground.fields(1)["run_until"]) - ground.now_ms() <= 60_000
    assert ground.ledger.counts() == {"started": 1, "rerun": 1}
    assert [(event["event"], event["attempt"]) for event in _events(ground)] == [
        ("started", "1"),
        ("died", "1"),
        ("rerun", "2"),
        ("started", "2"),
    ]


def test_the_ghost_of_a_superseded_attempt_neither_renews_nor_ends_the_slot(ground: Ground) -> None:
    _start(ground, "r1")
    ground.let_run_lease_end(1)
    _start(ground, "r2")
    assert not ground.renew_run(1, "r1")
    assert not ground.finish(1, "r1", "done")
    assert ground.finish(1, "r2", "done")
    assert ground.state(1) == "done"


def test_a_run_that_renews_its_lease_is_not_taken_over(ground: Ground) -> None:
    _start(ground, "r1")
    ground.let_run_lease_end(1)
    assert ground.renew_run(1, "r1")
    assert _ask(ground, "r2").verdict == "wait"
    assert ground.finish(1, "r1", "done")


def test_after_its_last_attempt_the_slot_is_abandoned(ground: Ground) -> None:
    for number in (1, 2):
        _start(ground, f"r{number}", max_attempts=2, ttl=90)
        ground.let_run_lease_end(1)
    ground.client.pexpire(ground.record_key(1), 5_000)
    answer = _ask(ground, "r3", max_attempts=2, ttl=90)
    assert answer == Answer("abandoned", 0, ground.fields(1))
    record = ground.record(1)
    assert (record.state, record.worker, record.attempt) == ("abandoned", "host:r2", 2)
    assert record.reason == "its run on host:r2 died, as attempt 2 of 2"
    assert record.finished_at is not None
    assert 80_000 < ground.ttl(1) <= 90_000
    assert ground.ledger.counts() == {"started": 1, "rerun": 1, "abandoned": 1}
    assert _names(ground)[-2:] == ["died", "abandoned"]
    assert _ask(ground, "r4", max_attempts=9).verdict == "ended"


@pytest.mark.parametrize("on_crash", ["skip", "rerun"])
def test_a_slot_that_runs_at_most_once_is_abandoned_when_its_process_has_died(
    ground: Ground, on_crash: str
) -> None:
    _start(ground, "r1", "skip")
    ground.let_run_lease_end(1)
    assert _ask(ground, "r2", on_crash).verdict == "abandoned"
    assert ground.record(1).reason == "its run on host:r1 died, as attempt 1 of 1"
    assert _ask(ground, "r3", on_crash).verdict == "ended"


def test_a_run_that_was_abandoned_says_nothing_any_more(ground: Ground) -> None:
    _start(ground, "r1", "skip")
    ground.let_run_lease_end(1)
    _ask(ground, "r2", "skip")
    before = ground.fields(1)
    assert not ground.renew_run(1, "r1")
    assert not ground.finish(1, "r1", "done")
    assert ground.fields(1) == before


def test_who_wants_one_attempt_at_most_leaves_the_next_one_to_others(ground: Ground) -> None:
    _start(ground, "r1", "rerun")
    ground.let_run_lease_end(1)
    before, events = ground.fields(1), _events(ground)
    assert _ask(ground, "r2", "skip") == Answer("wait", 0, before)
    assert (ground.fields(1), _events(ground)) == (before, events)
    _start(ground, "r3", "rerun")


def test_who_wants_one_attempt_at_most_sees_that_the_last_one_has_died(ground: Ground) -> None:
    _start(ground, "r1", "rerun", max_attempts=1)
    ground.let_run_lease_end(1)
    assert _ask(ground, "r2", "skip").verdict == "abandoned"


def test_the_first_start_settles_how_many_attempts_there_are(ground: Ground) -> None:
    _start(ground, "r1", max_attempts=2)
    ground.let_run_lease_end(1)
    _start(ground, "r2", max_attempts=1)
    ground.let_run_lease_end(1)
    assert _ask(ground, "r3", max_attempts=5).verdict == "abandoned"


@pytest.mark.parametrize("on_crash", ["skip", "rerun"])
@pytest.mark.parametrize("state", LEADERS)
def test_a_slot_of_a_leader_does_not_start_here(ground: Ground, state: str, on_crash: str) -> None:
    term = ground.elect()
    ground.claim(term, 1)
    ground.write(1, state=state, run="r1", run_until=0)
    before = ground.fields(1)
    for run in ("r1", "r2"):
        assert _ask(ground, run, on_crash) == Answer("foreign", 0, before)
    assert ground.fields(1) == before
    assert "started" not in ground.ledger.counts()


@pytest.mark.parametrize("number", [1, 2])
def test_a_slot_that_the_entry_of_this_name_has_left_behind_does_not_start(
    ground: Ground, number: int
) -> None:
    ground.claim(ground.elect(), 2)
    ground.client.delete(ground.record_key(2))
    assert _ask(ground, number=number) == Answer("foreign", 0, {})
    assert ground.state(number) == ""


def test_a_slot_that_is_ahead_of_the_entry_of_this_name_starts_and_is_not_claimed(ground: Ground) -> None:
    term = ground.elect()
    ground.claim(term, 1)
    _start(ground, number=2)
    assert ground.ask(term, 2, batch="next") == ["running"]
    assert ground.last_decided() == 2, "whoever has started it has decided it"
    ground.finish(2, "r1", "done")
    assert ground.ask(term, 2, batch="next") == ["done"]


@pytest.mark.parametrize("state", ["running", "done"])
def test_a_leaders_message_for_a_slot_that_was_started_here_is_refused(ground: Ground, state: str) -> None:
    _start(ground)
    ground.write(1, state=state)
    before = ground.fields(1)
    assert ground.begin(1, 7, "r2").kind == "refuse"
    assert ground.fields(1) == before


@pytest.mark.parametrize("text", ["", "no JSON", "[]", "{}", json.dumps({"slot": "soon"})])
def test_an_entry_that_cannot_be_read_has_left_nothing_behind(ground: Ground, text: str) -> None:
    ground.client.hset(ground.keys.entries, ENTRY, text)
    _start(ground)


def test_another_entry_does_not_matter(ground: Ground) -> None:
    ground.client.hset(ground.keys.entries, "other", json.dumps({"slot": str(NEVER)}))
    _start(ground)


@pytest.mark.parametrize("end", ENDS[:2])
def test_no_leader_has_to_look_after_the_slot_at_any_time(ground: Ground, end: str) -> None:
    def looked_after() -> set[str]:
        return ground.unfinished() | set(ground.client.hkeys(ground.keys.entries))

    _start(ground, "r1")
    assert looked_after() == set()
    ground.let_run_lease_end(1)
    assert ground.renew_run(1, "r1")
    assert looked_after() == set()
    ground.let_run_lease_end(1)
    _start(ground, "r2")
    assert ground.renew_run(1, "r2")
    assert looked_after() == set()
    assert ground.finish(1, "r2", end)
    assert looked_after() == set()
