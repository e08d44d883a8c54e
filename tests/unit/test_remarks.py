"""What a standby says of the leader's release."""

from __future__ import annotations

import json
import logging
from typing import Any

import pytest
from celery import Celery

from celery_leaderbeat.clock import Clock
from celery_leaderbeat.remarks import Remarks
from celery_leaderbeat.settings import Settings
from celery_leaderbeat.term import Term


class _Standby:
    """The remarks of a standby of one release, and its warnings."""

    def __init__(self, release: Any, caplog: pytest.LogCaptureFixture) -> None:
        app = Celery("unit", broker="memory://", set_as_current=False)
        app.conf.update(leaderbeat_redis_url="redis://localhost", leaderbeat_release=release)
        self._remarks = Remarks(Settings.from_app(app), Clock())
        self._caplog = caplog
        self._epoch = 0
        caplog.set_level(logging.DEBUG, "celery_leaderbeat")

    def sees(self, release: str | None, app: str = "unit") -> list[str]:
        """A new term of a leader of that release begins; the warnings are returned."""
        self._epoch += 1
        lease = {"holder": f"host:{self._epoch}:x", "epoch": self._epoch, "app": app}
        term = Term.read(json.dumps(lease | ({"release": release} if release else {})))
        self._caplog.clear()
        self._remarks.stands_by(term, 1000)
        self._remarks.stands_by(term, 900)
        return [record.getMessage() for record in self._caplog.records if record.levelno >= logging.WARNING]


def test_two_releases_without_an_order_are_said_with_both_values_and_the_remedy(
    caplog: pytest.LogCaptureFixture,
) -> None:
    (said,) = _Standby("2026-11-30", caplog).sees("v1.9")
    assert said == (
        "The leader host:1:x is of release 'v1.9', and this replica of release '2026-11-30': no order between a number "
        "and a time is known, so the lead isn't handed over, whichever is newer. Set leaderbeat_release to values of one "
        "kind on all replicas: to numbers or dotted versions, or to times."
    )
    (record,) = (found for found in caplog.records if found.levelno == logging.WARNING)
    assert record.action == "releases_unordered"  # type: ignore[attr-defined]
    assert len(_Standby(7, caplog).sees("2026-11-30T14:05:00Z")) == 1


def test_each_pair_is_said_once_whoever_leads_and_however_its_value_is_written(
    caplog: pytest.LogCaptureFixture,
) -> None:
    standby = _Standby("2026-11-30", caplog)
    assert len(standby.sees("1.9")) == 1
    assert standby.sees("1.9") == []
    assert standby.sees("v1.9.0") == []
    assert len(standby.sees("1.10")) == 1
    assert standby.sees("2026-12-01") == []
    assert standby.sees("1.9") == []


@pytest.mark.parametrize(
    ("own", "leaders"),
    [
        ("1.9", "1.10"),
        ("1.10", "1.9"),
        ("1.9", "1.9"),
        ("2026-11-30", "2026-12-01"),
        ("2026-11-30", "2026-11-30T00:00:00Z"),
        (None, "1.9"),
        (None, "2026-11-30"),
        ("1.9", None),
        ("2026-11-30", None),
        (None, None),
        # Of a later version of the package.
        ("1.9", "main-abc"),
    ],
)
def test_nothing_is_said_of_releases_that_have_an_order_are_equal_or_unset(
    own: str | None, leaders: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    assert _Standby(own, caplog).sees(leaders) == []


def test_of_another_application_only_that_it_is_one_is_said(caplog: pytest.LogCaptureFixture) -> None:
    (said,) = _Standby("1.9", caplog).sees("2026-11-30", app="other")
    assert "belongs to the application 'other'" in said
