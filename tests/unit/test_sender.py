"""What a leader makes of the answers of Redis and of the broker, without either."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime, timedelta, timezone
from types import SimpleNamespace
from typing import Any

import pytest
from celery import Celery

from celery_leaderbeat import sender as sender_module
from celery_leaderbeat.batch import Batch
from celery_leaderbeat.clock import Clock, FleetClock
from celery_leaderbeat.dispatch import Dispatcher
from celery_leaderbeat.errors import StoreError
from celery_leaderbeat.message import Message, Outcome, build_message
from celery_leaderbeat.plan import Plan
from celery_leaderbeat.policy import Policy
from celery_leaderbeat.records import Claim
from celery_leaderbeat.reports import Reports
from celery_leaderbeat.sender import Sender
from celery_leaderbeat.settings import Settings
from celery_leaderbeat.shadow import Shadow
from celery_leaderbeat.term import Term

NOW = datetime.now(timezone.utc).replace(microsecond=0)
TERM = Term(value="x", holder="me", epoch=7)


class _Ledger:
    """Grants all claims but those of some slots, for which the server has an error."""

    def __init__(self) -> None:
        self.refused: set[str] = set()
        self.claimed: list[str] = []
        self.confirmed: list[str] = []

    def claim(self, term: Term, batch: str, claims: Sequence[Claim]) -> list[str]:
        if any(claim.key in self.refused for claim in claims):
            raise StoreError("WRONGTYPE")
        self.claimed += [claim.key for claim in claims]
        return ["claimed"] * len(claims)

    def confirm(self, epoch: int, batch: str, outcomes: Mapping[str, str]) -> list[str]:
        self.confirmed += outcomes
        return list(outcomes.values())

    def give_back(self, epoch: int, batch: str, keys: Sequence[str], reason: str) -> list[str]:
        return ["returned"] * len(keys)

    def close(self) -> None:
        pass


class _Publisher:
    """One whose broker does what it is told to."""

    usable = ready = True

    def __init__(self, outcome: Callable[[Message], Outcome]) -> None:
        self._outcome = outcome
        self.published: list[str] = []

    def abandon(self) -> None:
        pass

    def publish(
        self, messages: list[Message], allowed: Callable[[], bool], on_sent: Callable[[Message], None]
    ) -> Iterator[Message]:
        for message in messages:
            assert message.handling.take()
            self.published.append(message.key)
            message.settle(self._outcome(message))
            assert message.outcome is not None
            if message.outcome.kind == "sent":
                on_sent(message)
            yield message


class _Stage:
    """A sender between a ledger and a broker of the tests' own."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        app = Celery("unit", broker="memory://", set_as_current=False)
        app.conf.leaderbeat_redis_url = "redis://127.0.0.1:1"
        self.ledger = _Ledger()
        monkeypatch.setattr(sender_module, "Ledger", lambda *_: self.ledger)
        self.kind: Any = "sent"
        self.publisher = _Publisher(lambda _: Outcome(self.kind, "why"))
        monkeypatch.setattr(sender_module, "Publisher", lambda *_: self.publisher)
        self.proven = 0
        self.stepped_down: list[str] = []
        elector: Any = SimpleNamespace(
            shadow=Shadow(),
            trusts=lambda term: True,
            progress=lambda: None,
            proven=self._prove,
            step_down=lambda term, reason: self.stepped_down.append(reason),
        )
        entry = SimpleNamespace(task="proj.task", args=(), kwargs={}, options={})
        self.plans = {name: Plan(name, entry, timedelta(minutes=1), "f", Policy()) for name in ("one", "two")}
        for plan in self.plans.values():
            plan.start(NOW - timedelta(minutes=9))
        self.advanced: list[str] = []
        ledger: Any = self.ledger
        self.sender = Sender(
            app,
            Settings.from_app(app),
            FleetClock(Clock()),
            elector,
            self.plans,
            ledger,
            Reports(app),
            lambda plan, slot: self.advanced.append(f"{plan.name} {slot}"),
        )
        self.sender.start()

    def _prove(self) -> None:
        self.proven += 1

    def message(self, entry: str, number: int) -> Message:
        """The message of the slot of that minute."""
        slot = NOW + timedelta(minutes=number - 9)
        return build_message(self.plans[entry], slot, TERM.epoch, "unit")

    def send(self, *messages: Message) -> None:
        sent = self.sender.send(Batch(TERM, self.plans, list(messages)))
        assert sent == list(messages)
        assert all(message.settled for message in sent)


@pytest.fixture
def stage(monkeypatch: pytest.MonkeyPatch) -> _Stage:
    return _Stage(monkeypatch)


def test_no_later_slot_of_an_entry_passes_one_whose_claim_redis_refuses(stage: _Stage) -> None:
    ones = [stage.message("one", number) for number in (1, 2, 3)]
    two = stage.message("two", 1)
    stage.ledger.refused = {ones[1].key}
    stage.send(*ones, two)
    assert stage.ledger.claimed == stage.publisher.published == [ones[0].key, two.key]
    assert [message.held for message in (*ones, two)] == [False, True, True, False]
    assert len(stage.advanced) == 2


@pytest.mark.parametrize("kind", ["sent", "unknown"])
def test_what_was_sent_before_says_nothing_of_the_broker(
    stage: _Stage, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage.kind = kind
    stage.send(stage.message("one", 1))
    proven = stage.proven
    assert proven == (kind == "sent")
    signs: list[str] = []
    monkeypatch.setattr(stage.sender._watch, "taken", lambda: signs.append("taken"))
    monkeypatch.setattr(stage.sender._watch, "not_sent", lambda *_: signs.append("not sent"))
    again = stage.message("one", 1)
    stage.send(again)
    assert again.outcome == Outcome(stage.kind, "why")
    assert stage.publisher.published == [again.key], "it wasn't published again"
    assert (stage.proven, signs) == (proven, [])
    stage.kind = "sent"
    stage.send(stage.message("one", 1), stage.message("two", 1))
    assert (stage.proven, signs) == (proven + 1, ["taken"])


def test_that_a_slot_waits_for_the_broker_is_a_warning_once(
    stage: _Stage, caplog: pytest.LogCaptureFixture
) -> None:
    stage.kind = "unreachable"
    for _ in range(3):
        stage.send(stage.message("one", 1), stage.message("two", 1))
    stage.send(stage.message("one", 2))
    waiting = [record for record in caplog.records if "is not sent yet: why" in record.getMessage()]
    assert [(record.levelname, record.tick_key) for record in waiting] == [  # type: ignore[attr-defined]
        ("WARNING", stage.message("one", 1).key),
        ("WARNING", stage.message("two", 1).key),
        ("WARNING", stage.message("one", 2).key),
    ]
    caplog.clear()
    stage.kind = "unsent"
    for _ in range(2):
        stage.send(stage.message("one", 3))
    assert [record.levelname for record in caplog.records] == ["WARNING", "WARNING"], (
        "what is refused is said"
    )


@pytest.mark.parametrize(
    ("kind", "prefer", "said"),
    [
        ("unknown", "missed", 1),
        ("unknown", "duplicate", 0),
        ("unreachable", "missed", 0),
        ("sent", "missed", 0),
    ],
)
def test_a_slot_that_stays_unconfirmed_is_said_to_be_missed_though_the_beat_is_told_to_stop_meanwhile(
    stage: _Stage,
    kind: str,
    prefer: Any,
    said: int,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def told_to_stop() -> None:
        # As in the handler of the signal, once the broker has answered.
        stage.sender.close(0.1)
        raise SystemExit

    stage.plans["one"].policy = Policy(prefer=prefer)
    stage.kind = kind
    # Called for each message whose outcome has come.
    monkeypatch.setattr(stage.sender._elector, "progress", told_to_stop)
    with pytest.raises(SystemExit):
        stage.sender.send(Batch(TERM, stage.plans, [stage.message("one", 1)]))
    lines = [record for record in caplog.records if getattr(record, "action", "") == "missed"]
    assert [line.getMessage().rpartition("missed: ")[2] for line in lines] == ["unconfirmed: why."] * said


def test_an_outage_of_the_ledger_is_one_sentence(caplog: pytest.LogCaptureFixture) -> None:
    app = Celery("unit", broker="memory://", set_as_current=False)
    app.conf.leaderbeat_redis_url = "redis://127.0.0.1:1/0"
    elector: Any = SimpleNamespace(shadow=Shadow(), progress=lambda: None, step_down=None)
    dispatcher = Dispatcher(app, Settings.from_app(app), FleetClock(Clock()), elector, {})
    dispatcher.tick(TERM)
    (record,) = caplog.records
    assert record.getMessage().startswith(
        "The ledger is out of reach, and nothing is sent until it answers: "
    )
    assert record.getMessage().endswith("Connection refused.")
    assert not record.getMessage().endswith("..")
