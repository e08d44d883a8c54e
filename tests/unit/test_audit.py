"""What `explain` makes of slots: each has one end, and a reason where there is one."""

from __future__ import annotations

from datetime import datetime, timedelta, timezone
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from celery_leaderbeat import audit as module
from celery_leaderbeat.audit import Audit, Explanation, Known, explain
from celery_leaderbeat.definitions import Definition
from celery_leaderbeat.records import ENDS, EntryRecord, Request, SlotRecord, UnsentRange
from celery_leaderbeat.tick import slot_text, slot_to_us, tick_key

T0 = datetime(2026, 10, 2, 3, tzinfo=timezone.utc)
MINUTE = timedelta(minutes=1)
IN_FORCE = Definition("interval:60000000us", T0 - timedelta(days=9))
#: Long enough for no record to have expired.
RETENTION = 86_400.0


def minute(number: float) -> datetime:
    return T0 + number * MINUTE


def record(number: float, state: str, **fields: Any) -> SlotRecord:
    key = tick_key("job", minute(number))
    table = {"state": state, "entry": "job", "slot": str(slot_to_us(minute(number)))}
    return SlotRecord.read(key, table | {name: str(value) for name, value in fields.items()})


def unsent(state: str, first: float, last: float, reason: str, count: int = 1) -> UnsentRange:
    return UnsentRange(state, minute(first), minute(last), count, reason)


def entry(last: float | None) -> EntryRecord | None:
    if last is None:
        return None
    return EntryRecord(minute(last), IN_FORCE.fingerprint, 0, 0, 0, None, ())


def explained(
    *numbers: float,
    decided: float | None = 10,
    records: tuple[SlotRecord, ...] = (),
    ranges: tuple[UnsentRange, ...] = (),
    now: float = 10.5,
    retention: float = RETENTION,
    unsent_from: datetime | None = None,
    definition: Definition | None = IN_FORCE,
    requests: tuple[Request, ...] = (),
) -> list[Explanation]:
    known = Known(
        entry=entry(decided),
        records={found.key: found for found in records},
        unsent=ranges,
        requests=requests,
        unsent_from=unsent_from,
        retention=retention,
        now=minute(now),
    )
    return explain("job", [(minute(number), definition) for number in numbers], known)


def ends(found: list[Explanation]) -> list[tuple[str, str]]:
    return [(slot.end, slot.reason) for slot in found]


# With a record


@pytest.mark.parametrize("state", [*ENDS, "sent", "claimed", "returned", "retrying"])
def test_a_record_speaks_for_itself(state: str) -> None:
    (found,) = explained(5, records=(record(5, state, reason="because", attempt=2),))
    assert (found.key, found.slot, found.end, found.reason) == (
        "job@2026-10-02T03:05:00Z",
        minute(5),
        state,
        "because",
    )
    assert found.called_for
    assert found.record is not None
    assert found.record.attempt == 2


def test_an_unconfirmed_slot_is_missed() -> None:
    found = explained(5, records=(record(5, "unconfirmed", reason="unconfirmed: nobody knows"),))
    assert ends(found) == [("missed", "unconfirmed: nobody knows")]


def test_a_run_whose_lease_is_over_says_that_it_died() -> None:
    until = int(minute(10.5).timestamp() * 1000)
    for run_until, reason in ((until + 1, ""), (until, ""), (until - 1, "its run on w1:5 died")):
        found = explained(5, records=(record(5, "running", worker="w1:5", run_until=run_until),))
        assert ends(found) == [("running", reason)]


def test_a_record_counts_more_than_a_range_that_it_lies_in() -> None:
    ranges = (unsent("skipped", 1, 9, "paused", 9),)
    found = explained(4, 5, 6, records=(record(5, "done", request="r"),), ranges=ranges)
    assert ends(found) == [("skipped", "paused"), ("done", ""), ("skipped", "paused")]


def test_a_slot_that_only_left_a_trace_wasnt_called_for() -> None:
    (found,) = explained(5.3, definition=None, records=(record(5.3, "done"),))
    assert (found.called_for, found.end) == (False, "done")


# In a range


def test_a_range_explains_each_of_its_slots_and_no_other() -> None:
    ranges = (
        unsent("missed", 2, 4, "older than lookback reaches", 3),
        unsent("skipped", 6, 6, "paused: new prices"),
        unsent("missed", 7, 8, "catch_up is none", 2),
    )
    records = tuple(record(number, "done") for number in (1, 5, 9))
    assert ends(explained(*range(1, 10), records=records, ranges=ranges)) == [
        ("done", ""),
        *[("missed", "older than lookback reaches")] * 3,
        ("done", ""),
        ("skipped", "paused: new prices"),
        *[("missed", "catch_up is none")] * 2,
        ("done", ""),
    ]


def test_of_ranges_within_each_other_the_one_that_ends_first_counts() -> None:
    ranges = (unsent("missed", 5, 5, "inner"), unsent("skipped", 1, 9, "outer", 9))
    assert ends(explained(4, 5, 6, ranges=ranges)) == [
        ("skipped", "outer"),
        ("missed", "inner"),
        ("skipped", "outer"),
    ]


@given(
    st.lists(st.integers(0, 60), min_size=2, max_size=20, unique=True).map(sorted),
    st.integers(-1, 61),
)
def test_the_search_finds_what_a_look_at_every_range_finds(bounds: list[int], number: int) -> None:
    pairs = list(zip(bounds[::2], bounds[1::2], strict=False))
    ranges = tuple(unsent("missed", first, last, f"{first}") for first, last in pairs)
    expected = next((f"{first}" for first, last in pairs if first <= number <= last), None)
    known = Known(entry(99), {}, ranges, (), None, RETENTION, minute(100))
    found = known.range_of(minute(number))
    assert (found and found.reason) == expected


# With neither


def test_what_nobody_has_decided_is_overdue() -> None:
    waiting = ("overdue", "no leader has decided about it yet")
    assert ends(explained(11, 12, decided=10, now=12.5)) == [waiting, waiting]
    assert ends(explained(1, decided=None)) == [waiting]
    ended = Definition(IN_FORCE.fingerprint, IN_FORCE.since, minute(20))
    assert ends(explained(11, decided=10, now=12, definition=ended)) == [("skipped", "its entry was removed")]


def test_what_somebody_has_asked_for_and_has_no_record_yet_is_overdue() -> None:
    asked = Request("r1", "backfill", "job", minute(2), minute(4), force=False, by="me@here", at=minute(9))
    waits = ("overdue", "me@here has asked for it, and its turn hasn't come")
    found = ends(explained(2, 3, 4, 5, requests=(asked,)))
    assert found[1:3] == [waits, waits]
    assert {end for end, _ in (found[0], found[3])} == {"unexplained"}
    once = Request("r2", "run", "job", minute(3), minute(3), force=False, by="me@here", at=minute(9))
    assert ends(explained(3, requests=(once,))) == [waits]


def test_what_was_decided_and_has_no_record_is_unexplained_while_its_record_should_be_there() -> None:
    (found,) = explained(9, decided=10)
    assert found.end == "unexplained"
    assert found.reason
    (found,) = explained(10, decided=10)
    assert found.end == "unexplained", "the last decided slot is decided"


@pytest.mark.parametrize(
    ("retention", "period", "age", "end"),
    [
        (600, 1, 10, "unexplained"),
        (600, 1, 10.1, "forgotten"),
        (60, 5, 15, "unexplained"),
        (60, 5, 15.1, "forgotten"),
    ],
)
def test_a_record_is_kept_for_the_retention_or_three_periods(
    retention: float, period: float, age: float, end: str
) -> None:
    definition = Definition(f"interval:{round(period * 60_000_000)}us", minute(-99))
    (found,) = explained(0, decided=99, now=age, retention=retention, definition=definition)
    assert found.end == end
    assert (found.reason == "its record has expired") == (end == "forgotten")


def test_the_period_of_a_slot_is_the_time_to_the_one_that_follows() -> None:
    """So it is for the claim, which sets how long the record is kept."""
    definition = Definition("crontab:0,1 3 * * *@UTC", minute(-99))
    found = explained(0, 1, decided=99, now=10, retention=60, definition=definition)
    assert [slot.end for slot in found] == ["forgotten", "unexplained"]


def test_of_a_slot_whose_period_is_not_known_no_more_is_expected_than_the_retention() -> None:
    found = explained(0, decided=99, now=1.1, retention=60, definition=Definition("custom", minute(-99)))
    assert [slot.end for slot in found] == ["forgotten"]


def test_ranges_that_are_no_longer_kept_are_forgotten_and_not_unexplained() -> None:
    found = explained(1, 5, decided=10, unsent_from=minute(3))
    assert [slot.end for slot in found] == ["forgotten", "unexplained"]
    assert "isn't kept" in found[0].reason


def test_no_slots_need_no_explanation() -> None:
    assert explained() == []


SLOTS = st.lists(st.integers(0, 40), unique=True, max_size=20).map(sorted)


@given(
    slots=SLOTS,
    decided=st.none() | st.integers(0, 40),
    states=st.dictionaries(st.integers(0, 40), st.sampled_from([*ENDS, "unconfirmed", "running", "sent"])),
    bounds=SLOTS,
    now=st.integers(0, 5000),
)
def test_every_slot_gets_exactly_one_of_the_ends_that_are_documented(
    slots: list[int], decided: int | None, states: dict[int, str], bounds: list[int], now: int
) -> None:
    documented = module.__doc__ or ""
    ranges = tuple(
        unsent("missed", first, last, "gone") for first, last in zip(bounds[::2], bounds[1::2], strict=False)
    )
    records = tuple(record(number, state) for number, state in states.items())
    found = explained(*slots, decided=decided, records=records, ranges=ranges, now=now, retention=60)
    assert [slot.slot for slot in found] == [minute(number) for number in slots]
    for number, slot in zip(slots, found, strict=True):
        assert f"`{slot.end}`" in documented
        if number in states:
            assert slot.end == {"unconfirmed": "missed"}.get(states[number], states[number])
        elif any(first <= number <= last for first, last in zip(bounds[::2], bounds[1::2], strict=False)):
            assert (slot.end, slot.reason) == ("missed", "gone")
        else:
            assert slot.end in ("overdue", "forgotten", "unexplained")
            assert slot.reason
            assert (slot.end == "overdue") == (decided is None or number > decided)


# The sums


def test_an_audit_counts_and_picks_by_end() -> None:
    slots = explained(
        1, 2, 3, records=(record(1, "done"), record(3, "done")), ranges=(unsent("missed", 2, 2, "deadline"),)
    )
    found = Audit("job", T0, minute(5), None, (), tuple(slots))
    assert found.counts == {"done": 2, "missed": 1}
    assert [slot_text(slot.slot) for slot in found.having("done")] == [
        "2026-10-02T03:01:00Z",
        "2026-10-02T03:03:00Z",
    ]
    assert found.having("unexplained") == []
