"""What is due: runs of a long backlog get the verdicts that their slots would get one by one."""

from __future__ import annotations

import functools
import time
from collections.abc import Iterator
from datetime import datetime, timedelta, timezone
from types import SimpleNamespace
from typing import Any

import pytest
from celery import Celery, schedules
from hypothesis import given, settings
from hypothesis import strategies as st

from celery_leaderbeat.due import due_slots, send_times
from celery_leaderbeat.pauses import Pause, Pauses
from celery_leaderbeat.plan import Plan
from celery_leaderbeat.policy import (
    REASON_LOOKBACK,
    Due,
    Miss,
    Policy,
    Send,
    Skip,
    deadline_reason,
    decide,
)
from celery_leaderbeat.timeline import slots_between

UTC = timezone.utc
NOW = datetime(2026, 10, 25, 3, 0, 20, tzinfo=UTC)
MINUTE = timedelta(minutes=1)
HOUR = timedelta(hours=1)
DAY = timedelta(days=1)


@functools.cache
def app() -> Celery:
    made = Celery("due", set_as_current=False)
    made.conf.timezone = "Europe/Berlin"
    return made


def cron(**fields: Any) -> Any:
    return schedules.crontab(app=app(), **fields)


def walked(
    schedule: Any, policy: Policy, after: datetime, until: datetime, known: set[datetime]
) -> list[Due]:
    """Every slot that was to be sent by `until`, one by one."""
    found = []
    for slot, at in send_times("job", schedule, policy.jitter, after):
        if at > until:
            break
        if slot not in known:
            found.append(Due(slot, at))
    return found


#: Around the repeated hour in Berlin.
some_schedules = st.sampled_from(
    [
        *(cron(), cron(minute="*/7"), cron(minute=0), cron(hour="1-3"), cron(hour="*/2", minute="0,30")),
        *(cron(hour=4, minute=0), timedelta(seconds=90), timedelta(minutes=11)),
    ]
)
policies = st.builds(
    lambda catch_up, lookback, **more: Policy(
        catch_up=catch_up, lookback=1 if catch_up == "none" else lookback, **more
    ),
    catch_up=st.sampled_from(["latest", "all", "none"]),
    lookback=st.integers(1, 6),
    deadline=st.none() | st.sampled_from([0.0, 20.0, 60.0, 3600.0, 3620.0, 7777.7, 1e9]),
    jitter=st.sampled_from([0.0, 0.0, 10.0, 300.0, 1e6]),
)
minutes_ago = st.integers(0, 1500)
some_pauses = st.lists(
    st.builds(
        lambda ago, length, seconds, note: Pause(
            NOW - ago * MINUTE - timedelta(seconds=seconds),
            None if length is None else NOW - ago * MINUTE + length * MINUTE,
            note,
        ),
        minutes_ago,
        st.none() | st.integers(0, 300),
        st.sampled_from([0, 20]),
        st.sampled_from(["", "a", "b"]),
    ),
    max_size=3,
)


@settings(max_examples=1_000, deadline=None)
@given(
    some_schedules,
    policies,
    minutes_ago,
    minutes_ago,
    some_pauses,
    st.lists(st.integers(1, 4) | minutes_ago, max_size=3),
)
def test_runs_are_decided_as_their_slots_would_be_one_by_one(
    schedule: Any, policy: Policy, ago: int, led: int, pauses: list[Pause], numbers: list[int]
) -> None:
    after = NOW - ago * MINUTE
    slots = list(slots_between(schedule, after, NOW))
    known = {slots[-number] for number in numbers if 0 < number <= len(slots)}
    judge = functools.partial(decide, policy, led_since=NOW - led * MINUTE, now=NOW, pauses=Pauses(pauses))
    due = list(due_slots("job", schedule, policy, after, NOW, now=NOW, pauses=Pauses(pauses), known=known))
    assert judge(due) == judge(walked(schedule, policy, after, NOW, known))
    # One run for each stretch, and the newest slots: never the whole backlog.
    assert len(due) <= 2 * (len(pauses) + 1 + len(known)) * (policy.lookback + 3)


def test_a_slot_that_is_decided_elsewhere_takes_no_place_in_the_lookback() -> None:
    newest = NOW.replace(second=0)
    due = due_slots("job", cron(), Policy(), NOW - 5 * MINUTE, NOW, now=NOW, pauses=Pauses(), known={newest})
    assert decide(Policy(), due, led_since=NOW, now=NOW) == [
        Miss(newest - 4 * MINUTE, newest - 2 * MINUTE, 3, REASON_LOOKBACK),
        Send(newest - MINUTE),
    ]


def test_a_run_after_a_year_of_minutes_takes_no_time() -> None:
    plan = Plan(
        "job",
        SimpleNamespace(options={}),
        cron(),
        "f",
        Policy(deadline=2 * HOUR.total_seconds(), catch_up="all", lookback=3),
    )
    plan.start(NOW - 365 * DAY)
    pauses = Pauses(
        [Pause(NOW - 100 * DAY, NOW - 99 * DAY, "moving"), Pause(NOW - 40 * MINUTE, NOW - 30 * MINUTE)]
    )
    begin = time.perf_counter()
    decisions = plan.decide(NOW, NOW, pauses)
    # A walk takes half a second.
    assert time.perf_counter() - begin < 0.1
    newest = NOW.replace(second=0)
    old, fresh = deadline_reason(7200), REASON_LOOKBACK
    assert decisions == [
        Miss(newest - 365 * DAY + MINUTE, newest - 100 * DAY, 265 * 1440, old),
        Skip(newest - 100 * DAY + MINUTE, newest - 99 * DAY, 1440, "paused: moving"),
        Miss(newest - 99 * DAY + MINUTE, newest - 120 * MINUTE, 99 * 1440 - 120, old),
        Miss(newest - 119 * MINUTE, newest - 40 * MINUTE, 80, fresh),
        Skip(newest - 39 * MINUTE, newest - 30 * MINUTE, 10, "paused"),
        Miss(newest - 29 * MINUTE, newest - 3 * MINUTE, 27, fresh),
        Send(newest - 2 * MINUTE),
        Send(newest - MINUTE),
        Send(newest),
    ]


@pytest.mark.parametrize("jitter", [0.0, 5.0])
def test_a_schedule_that_is_asked_goes_on_from_its_own_slots(jitter: float) -> None:
    class SevenLater(schedules.BaseSchedule):  # type: ignore[misc]
        """Its next slot is seven minutes after the last one, whichever that was."""

        def slots_after(self, after: datetime) -> Iterator[datetime]:
            while True:
                after += 7 * MINUTE
                yield after

    schedule, policy = SevenLater(app=app()), Policy(deadline=1500.0, jitter=jitter)
    after = NOW - HOUR
    pauses = Pauses([Pause(NOW - 50 * MINUTE, NOW - 48 * MINUTE)])
    for known in ({after + 14 * MINUTE}, {after + 15 * MINUTE}):
        due = due_slots("job", schedule, policy, after, NOW, now=NOW, pauses=pauses, known=known)
        right = [after + number * 7 * MINUTE for number in range(1, 9)]
        assert [item.slot for item in due] == [slot for slot in right if slot not in known]
