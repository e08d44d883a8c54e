"""Tick keys, stamps and task ids."""

from __future__ import annotations

import json
import subprocess
import sys
import uuid
from datetime import datetime, timedelta, timezone
from typing import Any
from zoneinfo import ZoneInfo

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from celery_leaderbeat.errors import StampError
from celery_leaderbeat.tick import (
    ATTEMPT_HEADER,
    EPOCH_HEADER,
    PUT_OFF_HEADER,
    RUN_HEADER,
    SLOT_HEADER,
    TICK_KEY_HEADER,
    Stamp,
    parse_tick_key,
    slot_from_us,
    slot_text,
    slot_to_us,
    task_id,
    tick_key,
)

UTC = timezone.utc
SLOT = datetime(2026, 10, 2, 3, tzinfo=UTC)
KEY = "nightly@2026-10-02T03:00:00Z"
STAMP = Stamp(key=KEY, entry="nightly", slot=SLOT, epoch=7)
MAX_US = slot_to_us(datetime.max.replace(tzinfo=UTC))
MIN_US = slot_to_us(datetime.min.replace(tzinfo=UTC))


def stamped(**changes: Any) -> dict[str, object]:
    """The headers of `STAMP` with changes by header name without its prefix; None removes one."""
    headers = {**STAMP.headers(), **{f"leaderbeat_{name}": value for name, value in changes.items()}}
    return {name: value for name, value in headers.items() if value is not None}


@pytest.mark.parametrize(
    ("microsecond", "text"),
    [
        (0, "2026-10-02T03:00:00Z"),
        (250_000, "2026-10-02T03:00:00.250Z"),
        (1_000, "2026-10-02T03:00:00.001Z"),
        (1, "2026-10-02T03:00:00.000001Z"),
        (333_333, "2026-10-02T03:00:00.333333Z"),
    ],
)
def test_a_slot_has_as_many_digits_as_it_needs_and_no_more(microsecond: int, text: str) -> None:
    assert slot_text(SLOT.replace(microsecond=microsecond)) == text
    assert tick_key("nightly", SLOT.replace(microsecond=microsecond)) == f"nightly@{text}"


def test_the_same_instant_in_another_zone_has_the_same_key() -> None:
    berlin = SLOT.astimezone(ZoneInfo("Europe/Berlin"))
    assert tick_key("nightly", berlin) == KEY
    assert slot_to_us(berlin) == slot_to_us(SLOT)


def test_both_passes_of_a_repeated_hour_have_their_own_key() -> None:
    first = datetime(2026, 10, 25, 2, tzinfo=ZoneInfo("Europe/Berlin"))
    assert slot_text(first) == "2026-10-25T00:00:00Z"
    assert slot_text(first.replace(fold=1)) == "2026-10-25T01:00:00Z"


def test_a_naive_slot_is_refused() -> None:
    naive = SLOT.replace(tzinfo=None)
    for function in (slot_text, slot_to_us, lambda slot: tick_key("nightly", slot)):
        with pytest.raises(ValueError, match="naive"):
            function(naive)


def test_years_before_1000_keep_their_four_digits() -> None:
    assert slot_text(datetime(33, 4, 3, tzinfo=UTC)) == "0033-04-03T00:00:00Z"


@settings(max_examples=500)
@given(entry=st.text(), us=st.integers(MIN_US, MAX_US))
@example(entry="a@2026-10-02T03:00:00Z", us=0)
@example(entry="{x}:* ü@", us=1)
def test_parsing_undoes_formatting_for_any_entry_and_instant(entry: str, us: int) -> None:
    slot = slot_from_us(us)
    assert slot_to_us(slot) == us
    assert parse_tick_key(tick_key(entry, slot)) == (entry, slot)
    assert parse_tick_key(tick_key(entry, slot))[1].tzinfo is UTC


@given(us=st.integers(MIN_US, MAX_US))
def test_microseconds_are_exact(us: int) -> None:
    assert slot_from_us(us) - datetime(1970, 1, 1, tzinfo=UTC) == timedelta(microseconds=us)


@pytest.mark.parametrize(
    "key",
    [
        "",
        "nightly",
        "2026-10-02T03:00:00Z",
        "nightly@",
        "nightly@2026-10-02T03:00:00",
        "nightly@2026-10-02T03:00:00+00:00",
        "nightly@2026-10-02 03:00:00Z",
        "nightly@2026-10-02T03:00:00.000Z",
        "nightly@2026-10-02T03:00:00.250000Z",
        "nightly@2026-10-02T03:00:00.25Z",
        "nightly@2026-13-02T03:00:00Z",
        "nightly@2026-10-02T24:00:00Z",
        "nightly@٢٠٢٦-10-02T03:00:00Z",
        "nightly@2026-10-02T03:00:00Z\n",
        "nightly@2026-10-02T03:00:00Z@",
        None,
        7,
        b"nightly@2026-10-02T03:00:00Z",
    ],
)
def test_what_isnt_exactly_a_tick_key_is_refused_with_its_value(key: Any) -> None:
    with pytest.raises(StampError) as raised:
        parse_tick_key(key)
    assert repr(key) in str(raised.value)


def test_a_task_id_never_changes_between_processes_and_releases() -> None:
    assert task_id("leaderbeat:proj", KEY, 1) == "e17c6bb2-d8e0-544f-8f41-b0e344f6dc01"
    assert uuid.UUID(task_id("leaderbeat:proj", KEY, 1)).version == 5
    code = f"from celery_leaderbeat.tick import task_id; print(task_id('leaderbeat:proj', {KEY!r}, 1))"
    other = subprocess.run(
        [sys.executable, "-c", code],
        env={"PYTHONPATH": ":".join(sys.path)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert other.stdout.strip() == task_id("leaderbeat:proj", KEY, 1)


def test_task_ids_differ_by_prefix_key_and_attempt() -> None:
    ids = {
        task_id(prefix, key, attempt)
        for prefix in ("app", "app1")
        for key in ("x@2026-10-02T03:00:00Z", "1x@2026-10-02T03:00:00Z")
        for attempt in (1, 2, 11)
    }
    assert len(ids) == 12


def test_a_task_id_takes_any_text() -> None:
    assert task_id("ü", "\ud800@2026-10-02T03:00:00Z", 1)


def test_headers_carry_the_four_facts_and_survive_json() -> None:
    assert STAMP.headers() == {
        "leaderbeat_tick_key": KEY,
        "leaderbeat_fencing_epoch": 7,
        "leaderbeat_slot": "2026-10-02T03:00:00Z",
        "leaderbeat_attempt": 1,
    }
    assert json.loads(json.dumps(STAMP.headers())) == STAMP.headers()


def test_run_and_put_off_are_headers_only_when_set() -> None:
    stamp = Stamp(key=KEY, entry="nightly", slot=SLOT, epoch=7, attempt=2, run="r1", put_off=3)
    assert stamp.headers()[RUN_HEADER] == "r1"
    assert stamp.headers()[PUT_OFF_HEADER] == 3
    assert Stamp.from_headers(stamp.headers()) == stamp


@given(
    entry=st.text(),
    us=st.integers(0, MAX_US),
    epoch=st.integers(1, 2**53),
    attempt=st.integers(1, 99),
    run=st.text(),
    put_off=st.integers(0, 99),
)
def test_a_stamp_survives_its_headers(
    entry: str, us: int, epoch: int, attempt: int, run: str, put_off: int
) -> None:
    slot = slot_from_us(us)
    stamp = Stamp(tick_key(entry, slot), entry, slot, epoch, attempt, run, put_off)
    assert Stamp.from_headers(json.loads(json.dumps(stamp.headers()))) == stamp


@pytest.mark.parametrize("headers", [None, {}, {"id": "x"}, {TICK_KEY_HEADER: None}, {EPOCH_HEADER: 7}])
def test_a_message_without_a_tick_key_has_no_stamp(headers: Any) -> None:
    assert Stamp.from_headers(headers) is None


def test_other_headers_are_no_matter() -> None:
    assert Stamp.from_headers({**STAMP.headers(), "mine": object()}) == STAMP


@pytest.mark.parametrize(
    ("changes", "name", "value"),
    [
        ({"tick_key": "nightly"}, TICK_KEY_HEADER, "'nightly'"),
        ({"tick_key": ""}, TICK_KEY_HEADER, "''"),
        ({"tick_key": 5}, TICK_KEY_HEADER, "5"),
        ({"fencing_epoch": None}, EPOCH_HEADER, "missing"),
        ({"fencing_epoch": 0}, EPOCH_HEADER, "0"),
        ({"fencing_epoch": -1}, EPOCH_HEADER, "-1"),
        ({"fencing_epoch": True}, EPOCH_HEADER, "True"),
        ({"fencing_epoch": "7"}, EPOCH_HEADER, "'7'"),
        ({"fencing_epoch": 7.0}, EPOCH_HEADER, "7.0"),
        ({"slot": None}, SLOT_HEADER, "missing"),
        ({"slot": "2026-10-02T04:00:00Z"}, SLOT_HEADER, "'2026-10-02T04:00:00Z'"),
        ({"slot": 17}, SLOT_HEADER, "17"),
        ({"attempt": None}, ATTEMPT_HEADER, "missing"),
        ({"attempt": 0}, ATTEMPT_HEADER, "0"),
        ({"attempt": "1"}, ATTEMPT_HEADER, "'1'"),
        ({"run": 5}, RUN_HEADER, "5"),
        ({"put_off": -1}, PUT_OFF_HEADER, "-1"),
        ({"put_off": False}, PUT_OFF_HEADER, "False"),
    ],
)
def test_an_incomplete_or_malformed_stamp_names_the_header_and_its_value(
    changes: dict[str, Any], name: str, value: str
) -> None:
    with pytest.raises(StampError) as raised:
        Stamp.from_headers(stamped(**changes))
    assert name in str(raised.value)
    assert value in str(raised.value)
