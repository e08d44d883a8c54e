"""A standby says how the leader's schedule differs, by what it has read along anyway."""

from __future__ import annotations

import json
from datetime import datetime, timedelta, timezone
from typing import Any

import pytest
from celery import Celery

from celery_leaderbeat import Scheduler, scheduler
from celery_leaderbeat.comparison import Comparison
from celery_leaderbeat.election import Elector
from celery_leaderbeat.schedule_diff import schedule_fingerprint
from celery_leaderbeat.settings import Settings
from celery_leaderbeat.shadow import Shadow
from celery_leaderbeat.term import Term

NOW = datetime(2026, 10, 2, 3, tzinfo=timezone.utc)
LEADERS = {"same": "interval:1us", "added": "interval:2us"}


def _stored(fingerprint: str, **fields: str) -> str:
    return json.dumps({"slot": "1790910000000000", "fingerprint": fingerprint, **fields})


def _comparison() -> Comparison:
    app = Celery("proj", broker="memory://", set_as_current=False)
    # Nothing listens there: no request is made.
    app.conf.leaderbeat_redis_url = "redis://127.0.0.1:1/0"
    return Comparison(Settings.from_app(app), {"same": "interval:1us"})


def _term() -> Term:
    return Term("lease", "leader", 7, fingerprint=schedule_fingerprint(LEADERS))


def test_the_shadow_knows_the_fingerprints_of_the_entries_that_are_there() -> None:
    shadow = Shadow()
    stored = {name: _stored(fingerprint) for name, fingerprint in LEADERS.items()}
    stored["gone"] = _stored("interval:3us", removed="1790910000000000")
    shadow.see({**stored, "damaged": "x"}, NOW, NOW)
    assert shadow.fingerprints() == LEADERS
    shadow.decided("added", NOW + timedelta(minutes=1), "interval:4us")
    assert shadow.fingerprints() == {**LEADERS, "added": "interval:4us"}


def test_the_differences_are_said_once_and_without_a_request(caplog: pytest.LogCaptureFixture) -> None:
    comparison, term = _comparison(), _term()
    assert comparison.wanted(term)
    comparison.look(term, LEADERS)
    assert "it has 'added', which this one has not" in caplog.text
    assert not comparison.wanted(term)


def test_entries_that_are_not_yet_the_leaders_are_looked_at_again(caplog: pytest.LogCaptureFixture) -> None:
    comparison, term = _comparison(), _term()
    comparison.look(term, {"same": "interval:1us"})
    assert comparison.wanted(term)
    assert not caplog.records
    for _ in range(9):
        comparison.look(term, {})
    assert "its entries aren't known" in caplog.text
    assert not comparison.wanted(term)


def test_an_entry_that_this_replica_has_refused_isnt_called_absent(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    app = Celery("proj", broker="redis://127.0.0.1:1/0", set_as_current=False)
    app.conf.beat_schedule = {
        "same": {"task": "tasks.job", "schedule": 1.0},
        "added": {"task": "tasks.job", "schedule": 1.0, "options": {"leaderbeat": {"prefre": "duplicate"}}},
        "odd": {"task": "tasks.job", "schedule": object()},
    }
    made: list[Comparison] = []

    def remember(*args: Any) -> Comparison:
        made.append(Comparison(*args))
        return made[0]

    monkeypatch.setattr(scheduler, "Comparison", remember)
    monkeypatch.setattr(Elector, "start", lambda self: None)
    Scheduler(app)._start()
    leaders = dict.fromkeys(("same", "added", "odd"), "interval:1000000us")
    made[0].look(Term("lease", "leader", 7, fingerprint=schedule_fingerprint(leaders)), leaders)
    assert "it has 'added', 'odd', which this one has refused (see its ERROR above)" in caplog.text
    app.close()
