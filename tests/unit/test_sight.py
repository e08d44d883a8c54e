"""Who led last and was cut off: for how long the others' silence says that none of them has led since."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timedelta, timezone
from math import inf, isclose
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from celery_leaderbeat.shadow import Shadow
from celery_leaderbeat.sight import Sight
from celery_leaderbeat.standing import ALL_BACK, SILENCE, Seen, Why, may_stand
from celery_leaderbeat.store import Look

AT = datetime(2026, 11, 30, 12, 0, tzinfo=timezone.utc)
#: Longest between two looks at a lease that is free, in seconds: the wait, and what the answers take.
LOOK = 0.35


class Cut:
    """A leader that was cut off, and two others that it knew.

    Parameters:
        stood: its subscription wasn't broken.
        unknown: so many more were there whose names it didn't know.
        cut: for how many seconds it had no answer.

    Attributes:
        now: the time since, in seconds.
        back: those of the others that are seen to live.
        asked: how often the server was asked for one of them.
    """

    def __init__(self, stood: bool = False, unknown: int = 0, cut: float = 0.0) -> None:
        self.now, self.asked = 0.0, 0
        self.back: Sequence[str] = ()
        listener: Any = SimpleNamespace(subscription=1, subscribed=True, shown=lambda _: 1)
        store: Any = SimpleNamespace(subscribers=self._subscribers, keys=SimpleNamespace(alive=str))
        clock: Any = SimpleNamespace(
            clock=SimpleNamespace(monotonic=lambda: self.now), utcnow=lambda: AT + timedelta(seconds=self.now)
        )
        self.shadow = shadow = Shadow()
        self.sight = Sight(clock, store, listener, shadow, "one", named_within=15.0)
        # It hears wake-ups itself.
        look = Look(None, 0, 0.0, 3 + unknown, {}, {}, ["one", "two", "three"])
        shadow.leads(AT + timedelta(seconds=15))
        self.sight.held(AT, self.sight.before(), look)
        if not stood:
            listener.subscription = 2
        self.now = cut
        self.sight.look_back()
        self.now = 0.0

    def _subscribers(self, channel: str) -> int:
        self.asked += 1
        return int(channel in self.back)

    def silence_at(self, now: float, *back: str) -> float:
        self.now, self.back = now, back
        return self.sight.silence()

    def why(self) -> Why | None:
        """What speaks against standing for election; the lease has been free from the beginning."""
        return may_stand(
            Seen(
                now=self.now,
                held=False,
                free_since=0.0,
                ttl=15.0,
                remembers=True,
                lacks=True,
                led_last=True,
                led_until=inf,
                away_at=-inf,
                has_others=True,
                retreats_until=-inf,
                ask_others_listen=lambda: pytest.fail("it isn't a newcomer"),
                ask_last_listens=lambda: pytest.fail("it led last itself"),
                ask_silence=self.sight.silence,
            )
        ).why


def test_while_its_subscription_stood_nobody_can_have_led_and_nobody_is_asked() -> None:
    leader = Cut(stood=True)
    assert leader.silence_at(0.0) == inf
    assert leader.asked == 0


def test_a_subscription_that_stood_says_nothing_where_no_answer_came_for_long() -> None:
    """The lease may have been lost with all data at once, and been another's, and have been lost again."""
    assert Cut(stood=True, cut=0.85).silence_at(0.85) == inf
    assert Cut(stood=True, cut=0.95).silence_at(0.95) == -inf


def test_who_saw_its_lease_lost_and_gets_no_answer_then_does_not_know_who_led_since() -> None:
    leader = Cut(stood=True)
    for now in (0.4, 0.8, 1.2):
        leader.now = now
        leader.sight.look_back()
    assert leader.silence_at(1.2) == inf
    leader.now = 2.2
    leader.sight.look_back()
    assert leader.silence_at(2.2, "two") == -inf
    assert leader.silence_at(2.3, "two", "three") == 0.0
    assert leader.silence_at(2.3 + SILENCE, "two", "three") == inf
    leader.shadow.another_leads()
    leader.now = 9.0
    leader.sight.look_back()
    assert leader.silence_at(9.0) == inf, "that is no question once another was seen to lead"


@pytest.mark.parametrize(("after", "counts"), [(14.0, True), (16.0, False)])
def test_others_that_were_there_when_all_was_lost_count_for_a_while_though_nothing_is_seen_of_them(
    after: float, counts: bool
) -> None:
    """They may be cut off, come back, be elected, and die with the data, all before they have said their names again."""
    leader = Cut(stood=True)
    leader.sight.begins(AT)
    leader.now = after
    leader.sight.held(AT, leader.sight.before(), Look(None, 0, 0.0, 1, {}, {}, ["one"]))
    leader.now += 2.0
    leader.sight.look_back()
    assert leader.silence_at(leader.now) == (-inf if counts else inf)


def test_others_of_an_earlier_time_do_not_count_where_another_led_since() -> None:
    leader = Cut(stood=True)
    leader.shadow.another_leads()
    leader.sight.begins(AT)
    leader.sight.held(AT, leader.sight.before(), Look(None, 0, 0.0, 1, {}, {}, ["one"]))
    leader.now = 2.0
    leader.sight.look_back()
    assert leader.silence_at(2.0) == inf


def test_the_silence_begins_when_all_are_back_and_again_when_one_was_away() -> None:
    leader = Cut()
    assert leader.silence_at(0.0) == leader.silence_at(0.3, "two") == -inf
    assert leader.silence_at(0.4, "two", "three") == 0.0
    assert isclose(leader.silence_at(0.7, "two", "three"), 0.3)
    assert leader.silence_at(0.8, "three") == -inf
    assert leader.silence_at(0.9, "two", "three") == 0.0
    assert isclose(leader.silence_at(0.9 + SILENCE - 0.01, "two", "three"), SILENCE - 0.01)


def test_while_it_does_not_know_the_names_of_all_it_can_not_tell_that_all_are_back() -> None:
    leader = Cut(unknown=1)
    assert [leader.silence_at(now, "two", "three") for now in (0.0, 1.0, 2.0)] == [-inf] * 3


def test_what_their_silence_has_said_holds_and_is_not_asked_again() -> None:
    leader = Cut()
    assert leader.silence_at(0.0, "two", "three") == 0.0
    assert leader.silence_at(SILENCE, "two", "three") == inf
    asked = leader.asked
    assert leader.silence_at(1.0) == inf
    assert leader.asked == asked


_looks = st.lists(
    st.tuples(st.integers(0, 350), st.sampled_from([(), ("two",), ("two", "three")])), max_size=12
)


@settings(max_examples=300, deadline=None)
@given(_looks)
def test_whoever_comes_and_goes_it_stands_in_the_end_and_not_before_they_had_their_time(
    looks: list[tuple[int, tuple[str, ...]]],
) -> None:
    leader = Cut()
    all_back_since = None
    # What isn't drawn: looks as seldom as may be, and all are there and say nothing.
    for ms, back in [*looks, *[(1000 * LOOK, ("two", "three"))] * 12]:
        leader.now, leader.back = leader.now + ms / 1000, back
        if len(back) < 2:
            all_back_since = None
        elif all_back_since is None:
            all_back_since = leader.now
        if leader.why() is None:
            break
    silent = all_back_since is not None and leader.now - all_back_since >= SILENCE
    assert silent or (all_back_since is None and leader.now >= ALL_BACK)
    assert leader.now <= ALL_BACK + LOOK + SILENCE + LOOK
