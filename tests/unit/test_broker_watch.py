"""When a leader waits for the broker, and when it leaves the lead to another."""

from __future__ import annotations

import logging

import pytest

from celery_leaderbeat.broker_watch import BrokerWatch
from celery_leaderbeat.clock import Clock
from celery_leaderbeat.message import Outcome
from celery_leaderbeat.term import Term

TERM = Term(value="x", holder="me", epoch=1)
SILENCE = 7.5


class _Clock(Clock):
    time = 100.0

    def monotonic(self) -> float:
        return self.time


class _Watched:
    """A watch, its clock, and the reasons for which it has stepped down."""

    def __init__(self) -> None:
        self.clock = _Clock()
        self.reasons: list[str] = []
        self.watch = BrokerWatch(self.clock, SILENCE, lambda _term, reason: self.reasons.append(reason))
        self.watch.begin()

    def looks(self, seconds: float, *, fails: bool = False) -> None:
        """Let time pass, with a look at the broker and at the watch every half second."""
        for _ in range(round(2 * seconds)):
            if fails:
                self.watch.failed(self.clock.time, "no answer")
            else:
                self.watch.heard()
            self.clock.time += 0.5
            self.watch.look(TERM)


@pytest.fixture
def watched() -> _Watched:
    return _Watched()


def test_a_silent_broker_costs_the_lead_once_in_each_silence(watched: _Watched) -> None:
    watched.looks(7.5, fails=True)
    assert not watched.reasons
    watched.looks(0.5, fails=True)
    assert watched.reasons == ["it can't publish: no answer"]
    watched.looks(7.5, fails=True)
    assert len(watched.reasons) == 1
    watched.looks(0.5, fails=True)
    assert len(watched.reasons) == 2


def test_the_silence_ends_with_any_sign_of_life(watched: _Watched) -> None:
    for _ in range(5):
        watched.looks(7, fails=True)
        watched.looks(0.5)
    assert not watched.reasons


def test_a_broker_that_answers_and_takes_no_message_costs_the_lead(watched: _Watched) -> None:
    unknown = Outcome("unknown", "no confirm")
    for _ in range(3):
        watched.watch.not_sent(watched.clock.time, unknown)
        watched.watch.look(TERM, tried=True)
        assert not watched.reasons
        watched.looks(2.5)
    watched.looks(0.5)
    assert not watched.reasons, "nothing was tried just now"
    watched.watch.not_sent(watched.clock.time, unknown)
    watched.watch.look(TERM, tried=True)
    assert watched.reasons == ["it can't publish: no confirm"]


def test_what_the_broker_takes_or_refuses_in_between_starts_the_count_anew(watched: _Watched) -> None:
    for _ in range(10):
        watched.watch.not_sent(watched.clock.time, Outcome("unknown", "no confirm"))
        watched.watch.look(TERM, tried=True)
        watched.looks(2.5)
        watched.watch.taken()
    assert not watched.reasons


def test_an_alarm_of_the_broker_never_costs_the_lead(watched: _Watched) -> None:
    watched.watch.not_sent(watched.clock.time, Outcome("unknown", "no confirm"))
    for _ in range(100):
        watched.watch.heard()
        watched.watch.not_sent(watched.clock.time, Outcome("blocked", "an alarm"))
        watched.watch.look(TERM, tried=True)
        watched.looks(1)
    assert not watched.reasons


def test_the_wait_grows_while_the_broker_takes_nothing_and_is_over_with_a_new_term(watched: _Watched) -> None:
    waits = []
    for _ in range(50):
        watched.watch.not_sent(watched.clock.time, Outcome("unreachable", "refused"))
        waits.append(watched.watch.held_for)
        watched.clock.time += 5.0
    assert waits[0] == pytest.approx(0.1)
    assert max(waits[:3]) < 0.5 < max(waits) <= 5.0
    watched.watch.not_sent(watched.clock.time, Outcome("unreachable", "refused"))
    watched.watch.begin()
    assert watched.watch.held_for <= 0


class _AnswersInBetween(BrokerWatch):
    """A watch to which the other thread says, right after each look at a failure, that the broker has answered."""

    _seen: tuple[float, str] | None = None

    @property
    def _failing(self) -> tuple[float, str] | None:
        seen, self._seen = self._seen, None
        return seen

    @_failing.setter
    def _failing(self, failing: tuple[float, str] | None) -> None:
        self._seen = failing


def test_a_failure_is_noted_whatever_the_other_thread_hears_meanwhile() -> None:
    watch = _AnswersInBetween(_Clock(), SILENCE, lambda _term, _reason: None)
    watch.begin()
    watch.failed(1.0, "no answer")
    watch.not_sent(2.0, Outcome("unknown", "no confirm"))
    assert watch._seen == (1.0, "no confirm")


def test_an_outage_is_told_once_and_so_is_its_end_whatever_terms_begin_in_between(
    watched: _Watched, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        for _ in range(2):
            watched.looks(2, fails=True)
            watched.watch.begin()
        watched.looks(2)
    assert [record.levelname for record in caplog.records] == ["WARNING", "INFO"]
    assert "answers again" in caplog.records[-1].getMessage()
