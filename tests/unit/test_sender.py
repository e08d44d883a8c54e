"""What a sender takes for a sign of life of the broker."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime, timezone
from types import SimpleNamespace
from typing import Any

import pytest
from celery import Celery

from celery_leaderbeat.batch import Batch
from celery_leaderbeat.clock import Clock, FleetClock
from celery_leaderbeat.message import Message, Outcome
from celery_leaderbeat.sender import Sender
from celery_leaderbeat.settings import Settings
from celery_leaderbeat.term import Term
from celery_leaderbeat.tick import Stamp, tick_key

SLOT = datetime(2026, 10, 2, 3, tzinfo=timezone.utc)


def message(entry: str) -> Message:
    stamp = Stamp(key=tick_key(entry, SLOT), entry=entry, slot=SLOT, epoch=7, attempt=1)
    return Message(
        entry=entry,
        slot=SLOT,
        stamp=stamp,
        task="t",
        task_id="id",
        prefer="missed",
        args=(),
        kwargs={},
        options={},
    )


class Stage:
    """A sender between an elector, a broker watch and a publisher that only note what they are told."""

    def __init__(self) -> None:
        app = Celery("proj", broker="memory://", set_as_current=False)
        app.conf.leaderbeat_redis_url = "redis://127.0.0.1:1/0"
        self.told: list[str] = []
        self.outcome = Outcome("sent")
        self.plans: Any = {name: SimpleNamespace(name=name, failures=0) for name in ("before", "new")}
        elector: Any = SimpleNamespace(
            progress=lambda: None,
            trusts=lambda term: True,
            proven=lambda: self.told.append("proven"),
            step_down=None,
        )
        ledger: Any = SimpleNamespace(confirm=lambda *args: None)
        clock = FleetClock(Clock())
        reports: Any = SimpleNamespace(missed=lambda *args: None)
        self.sender = Sender(
            app, Settings.from_app(app), clock, elector, self.plans, ledger, reports, lambda *args: None
        )
        watch: Any = SimpleNamespace(
            taken=lambda: self.told.append("taken"),
            not_sent=lambda began, outcome: self.told.append("not sent"),
            look=lambda term, tried: None,
        )
        self.sender._watch = watch
        self.sender._publisher = SimpleNamespace(usable=True, publish=self._publish)  # type: ignore[assignment]

    def _publish(self, messages: list[Message], **_: Any) -> Iterator[Message]:
        for message in messages:
            message.outcome, message.settled = self.outcome, True
            yield message

    def publish(self, *messages: Message) -> list[str]:
        batch = Batch(Term("lease", "one", 7), self.plans, list(messages))
        self.sender._publish(batch, list(messages))
        return self.told


@pytest.fixture
def stage() -> Stage:
    return Stage()


@pytest.mark.parametrize("kind", ["sent", "unknown"])
def test_what_was_sent_before_is_no_sign_of_the_broker(stage: Stage, kind: Any) -> None:
    stage.sender._sent_before.note(message("before"), Outcome(kind, "why"))
    assert stage.publish(message("before")) == []


def test_what_was_sent_before_hides_no_failure_of_what_is_published_with_it(stage: Stage) -> None:
    stage.sender._sent_before.note(message("before"), Outcome("sent"))
    stage.outcome = Outcome("unknown", "no answer")
    assert stage.publish(message("before"), message("new")) == ["not sent"]


def test_a_message_that_is_taken_is_a_sign_of_the_broker(stage: Stage) -> None:
    assert stage.publish(message("new")) == ["proven", "taken"]
