"""What is said of slots that aren't sent: how loud, how often, and by which signal."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from datetime import datetime, timedelta, timezone
from typing import Any

import pytest

from celery_leaderbeat.errors import StoreError
from celery_leaderbeat.reports import Reports
from celery_leaderbeat.signals import slots_missed, slots_skipped

T0 = datetime(2026, 10, 2, 3, tzinfo=timezone.utc)
LATER = T0 + timedelta(minutes=4)
APP = object()


@pytest.fixture
def signals() -> Iterator[list[tuple[str, dict[str, Any]]]]:
    """What was signalled: the signal's name and its arguments."""
    seen: list[tuple[str, dict[str, Any]]] = []

    def on_missed(sender: Any, signal: Any, **arguments: Any) -> None:
        assert sender is APP
        seen.append(("missed", arguments))

    def on_skipped(sender: Any, signal: Any, **arguments: Any) -> None:
        assert sender is APP
        seen.append(("skipped", arguments))

    slots_missed.connect(on_missed)
    slots_skipped.connect(on_skipped)
    yield seen
    slots_missed.disconnect(on_missed)
    slots_skipped.disconnect(on_skipped)


@pytest.fixture(autouse=True)
def all_levels(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, logger="celery_leaderbeat.reports")


def said(caplog: pytest.LogCaptureFixture) -> list[tuple[str, str]]:
    return [(record.levelname, record.getMessage()) for record in caplog.records]


ARGUMENTS = {"entry": "job", "first": T0, "last": LATER, "count": 5, "reason": "catch_up is none"}


def test_missed_slots_are_one_warning_and_one_signal_for_a_range(
    caplog: pytest.LogCaptureFixture, signals: list[Any]
) -> None:
    Reports(APP).missed("job", T0, LATER, 5, "catch_up is none")
    text = (
        "Entry 'job': 5 slots from 2026-10-02T03:00:00Z to 2026-10-02T03:04:00Z are missed: catch_up is none."
    )
    assert said(caplog) == [("WARNING", text)]
    (record,) = caplog.records
    assert (record.action, record.entry, record.count, record.reason) == (  # type: ignore[attr-defined]
        "missed",
        "job",
        5,
        "catch_up is none",
    )
    assert signals == [("missed", ARGUMENTS)]


def test_each_range_of_missed_slots_is_told(caplog: pytest.LogCaptureFixture, signals: list[Any]) -> None:
    reports = Reports(APP)
    for _ in range(3):
        reports.missed("job", T0, T0, 1, "it can't be sent")
    assert [level for level, _ in said(caplog)] == ["WARNING"] * 3
    assert said(caplog)[0][1] == ("Entry 'job': the slot 2026-10-02T03:00:00Z is missed: it can't be sent.")
    assert len(signals) == 3


def test_an_entry_that_prefers_a_duplicate_raises_no_alarm(
    caplog: pytest.LogCaptureFixture, signals: list[Any]
) -> None:
    Reports(APP).missed("job", T0, LATER, 5, "catch_up is none", prefer="duplicate")
    assert [level for level, _ in said(caplog)] == ["INFO"]
    assert signals == []
    caplog.clear()
    Reports(APP).missed("job", T0, LATER, 5, "catch_up is none", prefer="missed")
    assert [level for level, _ in said(caplog)] == ["WARNING"]
    assert signals == [("missed", ARGUMENTS)]


def test_skipping_is_told_once_while_it_goes_on_for_one_reason_and_signalled_each_time(
    caplog: pytest.LogCaptureFixture, signals: list[Any]
) -> None:
    reports = Reports(APP)
    for _ in range(3):
        reports.skipped("job", T0, T0, 1, "paused")
    assert [level for level, _ in said(caplog)] == ["INFO", "DEBUG", "DEBUG"]
    assert said(caplog)[0][1] == "Entry 'job': the slot 2026-10-02T03:00:00Z is skipped: paused."
    one = {"entry": "job", "first": T0, "last": T0, "count": 1, "reason": "paused"}
    assert signals == [("skipped", one)] * 3


def test_another_reason_another_entry_and_a_send_in_between_are_news(
    caplog: pytest.LogCaptureFixture,
) -> None:
    reports = Reports(APP)
    reports.skipped("job", T0, T0, 1, "paused")
    reports.skipped("job", T0, T0, 1, "paused: new prices")
    reports.skipped("other", T0, T0, 1, "paused: new prices")
    reports.sent("job")
    reports.skipped("job", T0, T0, 1, "paused: new prices")
    reports.skipped("other", T0, T0, 1, "paused: new prices")
    assert [level for level, _ in said(caplog)] == ["INFO", "INFO", "INFO", "INFO", "DEBUG"]
    reports.sent("never skipped")


def test_missed_slots_dont_end_the_skipping(caplog: pytest.LogCaptureFixture) -> None:
    reports = Reports(APP)
    reports.skipped("job", T0, T0, 1, "paused")
    reports.missed("job", T0, T0, 1, "older than the deadline of 5 s")
    reports.skipped("job", T0, T0, 1, "paused")
    assert [level for level, _ in said(caplog)] == ["INFO", "WARNING", "DEBUG"]


def test_a_receiver_that_fails_changes_nothing(caplog: pytest.LogCaptureFixture) -> None:
    def failing(**_: Any) -> None:
        raise RuntimeError("a receiver")

    slots_missed.connect(failing)
    try:
        Reports(APP).missed("job", T0, T0, 1, "catch_up is none")
    finally:
        slots_missed.disconnect(failing)
    assert ("WARNING", "Entry 'job': the slot 2026-10-02T03:00:00Z is missed: catch_up is none.") in said(
        caplog
    )


@pytest.mark.parametrize(
    ("raised", "words"),
    [(None, ["said"]), (StoreError("away"), []), (SystemExit(), ["said"]), (KeyboardInterrupt(), ["said"])],
    ids=repr,
)
def test_what_the_ledger_decides_is_said_even_where_the_beat_is_told_to_stop_meanwhile(
    raised: BaseException | None, words: list[str]
) -> None:
    heard: list[str] = []
    with contextlib.suppress(BaseException), Reports(APP).after(lambda: heard.append("said")):
        if raised is not None:
            raise raised
    assert heard == words
