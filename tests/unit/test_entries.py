"""Entries are loaded one by one, and one that fails stays alone."""

from __future__ import annotations

import logging
from datetime import datetime, timedelta, timezone
from types import SimpleNamespace
from typing import Any

import pytest
from celery import Celery, Task
from celery.beat import BeatLazyFunc, ScheduleEntry
from celery.schedules import BaseSchedule, crontab, schedule

from celery_leaderbeat.agenda import Agenda
from celery_leaderbeat.entries import check_entry, load_plans
from celery_leaderbeat.errors import EntryError
from celery_leaderbeat.expiry import seconds_until, with_instants
from celery_leaderbeat.message import build_message
from celery_leaderbeat.plan import ASK_AGAIN_AFTER, POLICY_OPTION, Plan
from celery_leaderbeat.policy import Miss, Policy, Send
from celery_leaderbeat.task import FencedTask

T0 = datetime(2026, 10, 2, 3, 0, tzinfo=timezone.utc)
SECOND = timedelta(seconds=1)


@pytest.fixture
def app() -> Celery:
    app = Celery("unit", broker="redis://", set_as_current=False)
    yield app
    app.close()


def build(app: Celery) -> Any:
    return lambda **fields: ScheduleEntry(**fields, app=app)


def plan(app: Celery, name: str = "tick", every: Any = 1.0, **entry: Any) -> Plan:
    raw = {"task": "unit.task", "schedule": every, **entry}
    plans = load_plans({name: check_entry(name, raw, build(app))}, {}, None, {})
    return plans[name]


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        (None, ["'bad'", "None", "'task'", "'schedule'"]),
        ("text", ["'bad'", "dict"]),
        ({"task": "t", "schedule": 1, "argz": ()}, ["'argz'", "args"]),
        ({"schedule": 1}, ["'task'"]),
        ({"task": "t"}, ["'schedule'"]),
        ({"task": "t", "schedule": "*/5 * * * *"}, ["'schedule'", "crontab"]),
        ({"task": "t", "schedule": object()}, ["'schedule'", "timedelta"]),
        ({"task": 5, "schedule": 1}, ["'task'", "5"]),
        ({"task": "t", "schedule": 1, "args": "abc"}, ["'args'", "list"]),
        ({"task": "t", "schedule": 1, "kwargs": [1]}, ["'kwargs'", "dict"]),
        ({"task": "t", "schedule": 1, "options": "q"}, ["'options'", "dict"]),
    ],
)
def test_a_bad_entry_is_named_with_its_key_and_what_to_write(app: Celery, raw: Any, words: list[str]) -> None:
    with pytest.raises(EntryError) as caught:
        check_entry("bad", raw, build(app))
    for word in ["'bad'", *words]:
        assert word in str(caught.value)


@pytest.mark.parametrize("name", [5, None, ""])
def test_an_entry_needs_a_name(app: Celery, name: Any) -> None:
    with pytest.raises(EntryError, match="must be a string"):
        check_entry(name, {"task": "t", "schedule": 1}, build(app))


def test_a_bad_policy_or_interval_costs_only_its_own_entry(
    app: Celery, caplog: pytest.LogCaptureFixture
) -> None:
    raw = {
        "good": {"task": "t", "schedule": 5.0},
        "policy": {"task": "t", "schedule": 5.0, "options": {"leaderbeat": {"catchup": "all"}}},
        "mapping": {"task": "t", "schedule": 5.0, "options": {"leaderbeat": "all"}},
        "negative": {"task": "t", "schedule": -5.0},
    }
    entries = {name: check_entry(name, item, build(app)) for name, item in raw.items()}
    with caplog.at_level(logging.ERROR):
        plans = load_plans(entries, {}, None, {})
    assert set(plans) == {"good"}
    assert sorted(record.entry for record in caplog.records) == ["mapping", "negative", "policy"]
    assert "catch_up" in caplog.text


def test_the_starting_deadline_of_crontabs_is_no_deadline_of_intervals(app: Celery) -> None:
    raw = {
        "cron": {"task": "t", "schedule": crontab(minute=0, app=app)},
        "interval": {"task": "t", "schedule": 60.0},
    }
    entries = {name: check_entry(name, item, build(app)) for name, item in raw.items()}
    plans = load_plans(entries, {}, 90, {})
    assert plans["cron"].policy.deadline == 90
    assert plans["interval"].policy.deadline is None


class Failing(BaseSchedule):
    """A schedule that fails as long as it is told to."""

    def __init__(self, **kwargs: Any) -> None:
        self.fails = False
        super().__init__(**kwargs)

    def slots_after(self, after: datetime) -> Any:
        if self.fails:
            raise RuntimeError("no slots today")
        first = after.replace(microsecond=0) + SECOND
        return iter([first + i * SECOND for i in range(1000)])


def test_a_schedule_that_fails_later_is_asked_again_and_loses_no_slot(
    app: Celery,
) -> None:
    item = Plan(
        "tick", SimpleNamespace(options={}), Failing(app=app), "f", Policy(catch_up="all", lookback=100)
    )
    item.start(T0)
    assert item.when == T0 + SECOND
    item.schedule.fails = True
    item.advance(T0 + SECOND)
    assert "no slots today" in str(item.failure)
    assert item.when == T0 + SECOND + ASK_AGAIN_AFTER
    item.schedule.fails = False
    decisions = item.decide(T0 + 4 * SECOND, T0)
    assert [d.slot for d in decisions if isinstance(d, Send)] == [T0 + i * SECOND for i in (2, 3, 4)]


def test_a_slot_that_is_given_back_comes_first_and_only_once(app: Celery) -> None:
    item = plan(app)
    item.start(T0)
    item.advance(T0 + SECOND)
    item.give_back(T0 + SECOND)
    item.give_back(T0 + SECOND)
    assert item.when == T0 + SECOND
    decisions = item.decide(T0 + SECOND, T0)
    assert decisions == [Send(T0 + SECOND)]
    item.advance(T0 + SECOND)
    assert not item.returned
    assert item.last == T0 + SECOND


def test_a_doomed_slot_is_missed_in_its_turn_and_the_others_are_sent(app: Celery) -> None:
    item = plan(app, options={"leaderbeat": {"catch_up": "all"}})
    item.start(T0)
    item.doom(T0 + 2 * SECOND, "no such queue")
    decisions = item.decide(T0 + 3 * SECOND, T0)
    doomed = T0 + 2 * SECOND
    assert decisions == [
        Send(T0 + SECOND),
        Miss(doomed, doomed, 1, "no such queue"),
        Send(T0 + 3 * SECOND),
    ]
    for decision in decisions[:2]:
        item.advance(decision.slot if isinstance(decision, Send) else decision.last)
    assert item.decide(T0 + 3 * SECOND, T0) == [Send(T0 + 3 * SECOND)]


def test_the_agenda_gives_the_longest_due_first_and_forgets_old_places(app: Celery) -> None:
    plans = [plan(app, name, every) for name, every in (("a", 3.0), ("b", 1.0), ("c", 2.0))]
    for item in plans:
        item.start(T0)
    agenda = Agenda(plans)
    assert agenda.next_time() == T0 + SECOND
    assert [item.name for item in agenda.take(T0 + 2 * SECOND, 10)] == ["b", "c"]
    assert agenda.next_time() == T0 + 3 * SECOND
    plans[0].advance(T0 + 3 * SECOND)
    agenda.put(plans[0])
    assert agenda.next_time() == T0 + 6 * SECOND
    assert agenda.take(T0 + 5 * SECOND, 10) == []


def test_the_agenda_takes_no_more_than_it_is_asked_for(app: Celery) -> None:
    plans = [plan(app, f"e{i}") for i in range(5)]
    for item in plans:
        item.start(T0)
    agenda = Agenda(plans)
    assert len(agenda.take(T0 + SECOND, 2)) == 2
    assert len(agenda.take(T0 + SECOND, 10)) == 3


def test_a_message_copies_the_entrys_dicts_and_keeps_its_own_headers(app: Celery) -> None:
    options = {
        "headers": {"x": {"deep": [1]}},
        "queue": "q",
        "task_id": "mine",
        "retry": True,
        "leaderbeat": {"prefer": "duplicate"},
    }
    item = plan(app, options=options, args=(BeatLazyFunc(lambda: 7), 1), kwargs={"k": BeatLazyFunc(str, 5)})
    message = build_message(item, T0, epoch=9, prefix="p")
    assert message.args == (7, 1)
    assert message.kwargs == {"k": "5"}
    assert message.options["headers"] == {
        "x": {"deep": [1]},
        "celery_beat_task": True,
        "leaderbeat_tick_key": "tick@2026-10-02T03:00:00Z",
        "leaderbeat_fencing_epoch": 9,
        "leaderbeat_slot": "2026-10-02T03:00:00Z",
        "leaderbeat_attempt": 1,
    }
    assert set(message.options) == {"headers", "queue"}
    message.options["headers"]["x"]["deep"].append(2)
    assert options["headers"] == {"x": {"deep": [1]}}
    assert message.prefer == "duplicate"
    assert build_message(item, T0, epoch=10, prefix="p").task_id == message.task_id


def test_only_one_side_may_decide_about_a_message(app: Celery) -> None:
    message = build_message(plan(app), T0, epoch=1, prefix="p")
    assert not message.handling.taken
    assert message.handling.take()
    assert message.handling.taken
    assert not message.handling.take()
    assert not message.sending.taken


@pytest.mark.parametrize(
    ("expires", "seconds"),
    [
        (None, None),
        (10, 10.0),
        (0, 0.0),
        (-1.5, -1.5),
        (True, None),
        (timedelta(seconds=5), 5.0),
        (timedelta(0), 0.0),
        (T0 - SECOND, -1.0),
        (T0 + SECOND, 1.0),
        ("2026-10-02T02:59:59Z", -1.0),
        ("2026-10-02T05:00:01+02:00", 1.0),
        ("2026-10-02T03:00:07", 7.0),
        ("soon", None),
        ("", None),
        (datetime(2026, 10, 2, 2, 59), -60.0),
        (datetime(2026, 10, 2, 3, 1), 60.0),
        ([5], None),
    ],
)
def test_the_time_until_a_message_expires_counts_from_its_send(expires: Any, seconds: float | None) -> None:
    found = seconds_until(expires, T0)
    assert found == seconds
    assert found is None or type(found) is float


def test_seconds_from_the_send_are_counted_from_the_fleets_time() -> None:
    options = {"expires": 10, "countdown": 2.5, "queue": "q"}
    counted = with_instants(options, T0)
    assert counted == {"expires": T0 + 10 * SECOND, "eta": T0 + 2.5 * SECOND, "queue": "q"}
    assert options == {"expires": 10, "countdown": 2.5, "queue": "q"}


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"expires": T0, "eta": T0},
        {"expires": "2026-10-02T02:59:59Z"},
        {"expires": True, "countdown": None},
        {"expires": 1e300, "countdown": float("nan")},
        {"expires": timedelta(seconds=5)},
    ],
)
def test_what_is_no_number_of_seconds_is_left_to_celery(options: dict[str, Any]) -> None:
    assert with_instants(options, T0).items() >= options.items()


def test_a_message_says_which_attempt_it_is_and_who_asked(app: Celery) -> None:
    item = plan(app)
    message = build_message(item, T0, epoch=9, prefix="p", attempt=3, request="r", force=True)
    assert message.options["headers"]["leaderbeat_attempt"] == 3
    assert (message.request, message.force, message.stamp.attempt) == ("r", True, 3)
    first = build_message(item, T0, epoch=9, prefix="p")
    assert (first.request, first.force) == ("", False)
    assert first.task_id != message.task_id, "each attempt has a task id of its own"


# Policies that need to know when a slot is done


class Fenced(FencedTask):
    """A FencedTask that acknowledges late."""

    name = "late"
    acks_late = True


class FencedEarly(FencedTask):
    """A FencedTask that acknowledges early."""

    name = "early"


class Plain(Task):
    """Any other task."""

    name = "plain"


TASKS = {task.name: task() for task in (Fenced, FencedEarly, Plain)}


def planned(app: Celery, task: str, policy: Any, defaults: Any = None) -> dict[str, Plan]:
    raw = {
        "task": task,
        "schedule": 5.0,
        **({"options": {POLICY_OPTION: policy}} if policy is not None else {}),
    }
    return load_plans({"job": check_entry("job", raw, build(app))}, defaults or {}, None, TASKS)


@pytest.mark.parametrize(
    ("policy", "words"),
    [
        ({"on_crash": "rerun"}, ["on_crash 'rerun'", "set on_crash to 'auto'"]),
        ({"on_crash": "rerun", "max_attempts": 2}, ["on_crash 'rerun'"]),
        ({"overlap": "skip"}, ["overlap 'skip'", "set overlap to 'allow'"]),
        ({"overlap": "queue"}, ["overlap 'queue'"]),
        ({"on_crash": "rerun", "overlap": "skip"}, ["on_crash 'rerun'"]),
    ],
)
@pytest.mark.parametrize("where", ["own", "defaults"])
def test_a_policy_that_needs_done_markers_is_refused_for_a_task_that_leaves_none(
    app: Celery, policy: dict[str, Any], words: list[str], where: str, caplog: pytest.LogCaptureFixture
) -> None:
    own, defaults = (policy, {}) if where == "own" else (None, policy)
    assert planned(app, "plain", own, defaults) == {}
    (record,) = caplog.records
    assert (record.levelname, record.action, record.entry) == ("ERROR", "entry_refused", "job")
    message = record.getMessage()
    for word in ("'job'", "task plain isn't a FencedTask", "marked as done", "base=FencedTask", *words):
        assert word in message
    assert message.endswith("The other entries run.")


@pytest.mark.parametrize(
    "policy",
    [
        None,
        {},
        {"on_crash": "skip"},
        {"on_crash": "auto", "overlap": "allow"},
        {"prefer": "duplicate", "jitter": 9},
    ],
)
@pytest.mark.parametrize("task", ["plain", "early", "late", "not imported"])
def test_what_needs_no_done_marker_goes_with_every_task(
    app: Celery, task: str, policy: Any, caplog: pytest.LogCaptureFixture
) -> None:
    assert set(planned(app, task, policy)) == {"job"}
    assert not caplog.records


@pytest.mark.parametrize(
    "policy",
    [
        {"on_crash": "rerun"},
        {"overlap": "skip", "on_crash": "skip"},
        {"overlap": "queue", "on_crash": "rerun"},
    ],
)
@pytest.mark.parametrize("task", ["late", "not imported"])
def test_it_goes_with_a_fenced_task_and_one_that_beat_hasnt_imported_is_taken_on_trust(
    app: Celery, task: str, policy: Any, caplog: pytest.LogCaptureFixture
) -> None:
    (found,) = planned(app, task, policy).values()
    assert {key: getattr(found.policy, key) for key in policy} == policy
    assert not caplog.records


def test_an_entry_may_take_back_a_default_that_its_task_cant_have(app: Celery) -> None:
    defaults = {"on_crash": "rerun", "max_attempts": 5, "overlap": "skip"}
    own = {"on_crash": "auto", "overlap": "allow"}
    (found,) = planned(app, "plain", own, defaults).values()
    assert (found.policy.on_crash, found.policy.overlap) == ("auto", "allow")


@pytest.mark.parametrize(("policy", "warns"), [({"on_crash": "rerun"}, True), ({"overlap": "queue"}, False)])
def test_rerun_of_a_task_that_acknowledges_early_runs_with_a_warning(
    app: Celery, policy: Any, warns: bool, caplog: pytest.LogCaptureFixture
) -> None:
    assert set(planned(app, "early", policy)) == {"job"}
    said = [(r.levelname, r.action, r.entry) for r in caplog.records]
    assert said == ([("WARNING", "rerun_without_acks_late", "job")] if warns else [])
    if warns:
        for word in ("'job'", "on_crash 'rerun'", "early", "Set acks_late = True"):
            assert word in caplog.text


@pytest.mark.parametrize("overlap", ["skip", "queue"])
def test_an_overlap_that_a_redelivery_can_break_is_warned_about(
    app: Celery, overlap: str, caplog: pytest.LogCaptureFixture
) -> None:
    assert set(planned(app, "late", {"overlap": overlap})) == {"job"}
    assert [(r.levelname, r.action) for r in caplog.records] == [("WARNING", "overlap_with_redelivery")]
    assert "Set on_crash to 'rerun' or 'skip'" in caplog.text


def test_a_refused_policy_costs_only_its_own_entry(app: Celery, caplog: pytest.LogCaptureFixture) -> None:
    raw = {
        "good": {"task": "early", "schedule": 5.0, "options": {POLICY_OPTION: {"overlap": "skip"}}},
        "bad": {"task": "plain", "schedule": 5.0, "options": {POLICY_OPTION: {"overlap": "skip"}}},
        "typo": {"task": "late", "schedule": 5.0, "options": {POLICY_OPTION: {"overlaps": "skip"}}},
    }
    entries = {name: check_entry(name, item, build(app)) for name, item in raw.items()}
    assert set(load_plans(entries, {}, None, TASKS)) == {"good"}
    assert [record.entry for record in caplog.records] == ["bad", "typo"]
    assert "did you mean 'overlap'?" in caplog.text


def test_a_schedule_with_no_slot_at_all_is_named(app: Celery) -> None:
    item = Plan("never", None, schedule(1.0, app=app), "f", Policy())
    item.start(datetime(9998, 12, 31, tzinfo=timezone.utc))
    assert item.when is None


@pytest.mark.parametrize(
    ("own", "expires"),
    [({}, 20), ({"expires": 5}, 5), ({"expires": None}, None)],
    ids=["task", "entry", "never"],
)
def test_messages_expire_when_their_task_says_so_unless_the_entry_does(
    app: Celery, own: dict[str, Any], expires: float | None
) -> None:
    class ShortLived(Task):
        expires = 20

    raw = {"task": "unit.task", "schedule": 1.0, "options": own}
    entries = {"tick": check_entry("tick", raw, build(app))}
    (item,) = load_plans(entries, {}, None, {"unit.task": ShortLived()}).values()
    assert build_message(item, T0, 1, "prefix").options.get("expires") == expires
    # Born expired only where its own time is over.
    item.start(T0)
    assert [type(decision) for decision in item.decide(T0 + SECOND, T0)] == [Send]
