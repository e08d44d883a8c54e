"""How the command line reads times and writes what it is told."""

from __future__ import annotations

from datetime import datetime, timedelta, timezone
from zoneinfo import ZoneInfo

import pytest

from celery_leaderbeat import _cli_text as text
from celery_leaderbeat import audit, orders

BERLIN = ZoneInfo("Europe/Berlin")
T0 = datetime(2026, 10, 2, 3, tzinfo=timezone.utc)


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("2026-10-02T05:00", T0),
        ("2026-10-02 05:00:00", T0),
        (" 2026-10-02T03:00:00Z ", T0),
        ("2026-10-02T03:00z", T0),
        ("2026-10-02T08:30+05:30", T0),
        ("2026-10-02", datetime(2026, 10, 1, 22, tzinfo=timezone.utc)),
        ("2026-10-02T03:00:00.250Z", T0 + timedelta(milliseconds=250)),
        ("2026-12-02T04:00", datetime(2026, 12, 2, 3, tzinfo=timezone.utc)),
        # In a gap the offset before the change holds, in a repeated hour the first pass, as for slots.
        ("2026-03-29T02:30", datetime(2026, 3, 29, 1, 30, tzinfo=timezone.utc)),
        ("2026-10-25T02:30", datetime(2026, 10, 25, 0, 30, tzinfo=timezone.utc)),
    ],
)
def test_a_time_without_an_offset_is_read_in_the_apps_zone(written: str, meant: datetime) -> None:
    found = text.read_instant(written, BERLIN)
    assert found == meant
    assert found.tzinfo is timezone.utc


@pytest.mark.parametrize(
    "written", ["", "now", "02:00", "2026-13-01", "1759374000", "0001-01-01T00:00+10:00"]
)
def test_what_is_no_time_is_refused_with_how_to_write_one(written: str) -> None:
    with pytest.raises(ValueError, match="is no time: write it as 2026-10-02T03:00 ") as caught:
        text.read_instant(written, BERLIN)
    assert repr(written) in str(caught.value)


@pytest.mark.parametrize(
    ("written", "seconds"),
    [
        ("2h", 7200),
        ("90m", 5400),
        ("1d12h", 129_600),
        ("1w 2d", 777_600),
        (" 45S ", 45),
        ("1.5h", 5400),
        ("0h1s", 1),
    ],
)
def test_a_duration_has_units(written: str, seconds: float) -> None:
    assert text.read_duration(written) == timedelta(seconds=seconds)


@pytest.mark.parametrize(
    "written", ["", "2", "h", "2x", "-2h", "0s", "2h and 5m", "1..5h", "9999999999w", "2 h"]
)
def test_what_is_no_duration_is_refused_with_how_to_write_one(written: str) -> None:
    with pytest.raises(ValueError, match="is no duration: write a number above 0 with its unit") as caught:
        text.read_duration(written)
    assert repr(written) in str(caught.value)


def test_the_ends_are_those_that_audit_documents() -> None:
    for end in text.ENDS:
        assert f"`{end}`" in (audit.__doc__ or "")
    assert (audit.__doc__ or "").count("`") == 2 * len(text.ENDS)


@pytest.mark.parametrize(
    ("fields", "line"),
    [
        (
            {
                "event": "claimed",
                "entry": "job",
                "key": "job@2026-10-02T03:00:00Z",
                "epoch": "7",
                "attempt": "1",
            },
            "claimed     job@2026-10-02T03:00:00Z (epoch 7, attempt 1)",
        ),
        (
            {
                "event": "missed",
                "entry": "job",
                "from": "1790910000000000",
                "to": "1790910060000000",
                "count": "2",
            },
            "missed      job (from 2026-10-02T03:00:00Z, to 2026-10-02T03:01:00Z, count 2)",
        ),
        ({"event": "paused", "entry": "", "until": "", "by": "ann"}, "paused      all entries (by ann)"),
        ({"event": "elected", "epoch": "7", "why": "free"}, "elected     (epoch 7, why free)"),
        ({"event": "resumed", "entry": "job"}, "resumed     job"),
    ],
)
def test_an_event_is_one_line(fields: dict[str, str], line: str) -> None:
    assert text.event_line("1790910000250-0", fields) == f"2026-10-02T03:00:00.250Z {line}"


def test_an_event_as_json_has_numbers_and_times() -> None:
    fields = {
        "event": "missed",
        "entry": "5",
        "epoch": "7",
        "from": "1790910000000000",
        "count": "2",
        "reason": "5",
    }
    assert text.event_json("1790910000250-3", fields) == {
        "id": "1790910000250-3",
        "at": "2026-10-02T03:00:00.250Z",
        "event": "missed",
        "entry": "5",
        "epoch": 7,
        "from": "2026-10-02T03:00:00Z",
        "count": 2,
        "reason": "5",
    }


def test_who_asks_is_known_without_a_user_name(monkeypatch: pytest.MonkeyPatch) -> None:
    def nobody() -> str:
        raise KeyError("uid 12345")

    monkeypatch.setattr("getpass.getuser", nobody)
    assert orders.whoami().startswith("?@")
