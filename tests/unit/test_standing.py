"""Whether a replica stands for election, for each rule that speaks against it, and for all of them together."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import inf, isfinite
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from celery_leaderbeat.standing import (
    ALL_BACK,
    ANNOUNCES,
    COMING_BACK,
    COURTESY,
    LOOKS,
    MODESTY,
    PATIENCE,
    SILENCE,
    STANDS,
    SUBSCRIBE_FIRST,
    Itself,
    Seen,
    Verdict,
    Why,
    may_announce,
    may_look,
    may_stand,
)

NOW, TTL = 1000.0, 15.0
#: Less than any wait, and more than what floats lose.
MOMENT = 0.001
#: Longest between two looks at a lease that is free, in seconds: the wait, and what the answers take.
LOOK = 0.35


def itself(**known: Any) -> Itself:
    """A replica that may do anything, but for what is `known`."""
    return replace(
        Itself(
            now=NOW,
            hangs=False,
            listens=True,
            waits_since=NOW - 100.0,
            retreats_until=-inf,
            refused_until=-inf,
        ),
        **known,
    )


def unasked() -> Any:
    raise AssertionError("no rule needs to know that")


def seen(free_for: float | None = 0.0, **known: Any) -> Seen:
    """A standby that has seen that the lease is free, with others around, and nothing lost, but for what is `known`."""
    return replace(
        Seen(
            now=NOW,
            held=False,
            free_since=None if free_for is None else NOW - free_for,
            ttl=TTL,
            remembers=True,
            lacks=False,
            led_last=False,
            led_until=-inf,
            away_at=-inf,
            has_others=True,
            retreats_until=-inf,
            ask_others_listen=unasked,
            ask_last_listens=unasked,
            ask_silence=unasked,
        ),
        **known,
    )


def answer(value: Any) -> Callable[[], Any]:
    return lambda: value


def why(facts: Seen) -> Why | None:
    return may_stand(facts).why


# One by one.


def test_a_replica_whose_tick_loop_hangs_neither_looks_nor_says_that_it_stands() -> None:
    hangs = itself(hangs=True, listens=False, waits_since=NOW, retreats_until=NOW + 5.0)
    assert may_look(hangs) == may_announce(hangs) == Verdict(Why.HANGS, inf)


def test_a_replica_waits_half_a_second_for_its_own_subscription() -> None:
    assert may_look(itself(listens=False, waits_since=NOW)) == Verdict(Why.DEAF, SUBSCRIBE_FIRST)
    just = itself(listens=False, waits_since=NOW - SUBSCRIBE_FIRST + MOMENT)
    assert may_look(just).why is may_announce(just).why is Why.DEAF
    assert may_announce(itself(listens=False, waits_since=NOW - SUBSCRIBE_FIRST)).may
    assert may_look(itself(listens=False, waits_since=NOW - SUBSCRIBE_FIRST)).may
    assert may_look(itself(listens=True, waits_since=NOW)).may


def test_a_replica_that_has_stepped_down_says_so_and_looks_all_the_same() -> None:
    retreats = itself(retreats_until=NOW + 5.0, refused_until=NOW + 9.0)
    assert may_announce(retreats) == Verdict(Why.RETREATS, 5.0)
    assert may_look(retreats).may
    assert may_announce(itself(retreats_until=NOW)).may


def test_a_replica_that_redis_refuses_to_elect_says_so_and_looks_all_the_same() -> None:
    refused = itself(refused_until=NOW + 9.0)
    assert may_announce(refused) == Verdict(Why.REFUSED, 9.0)
    assert may_look(refused).may
    assert may_announce(itself(refused_until=NOW)).may


def test_a_free_lease_is_taken_at_once_and_nobody_asked() -> None:
    assert may_stand(seen()) == Verdict(None)
    assert may_stand(seen(led_last=True, led_until=NOW + 9.0, away_at=NOW)).may


def test_a_lease_whose_holder_is_gone_is_taken_at_once_whatever_is_lost() -> None:
    assert may_stand(seen(free_for=None, lacks=True)).may
    assert may_stand(seen(free_for=None, remembers=False, away_at=NOW)).may


def test_a_lease_that_is_held_is_left_to_its_holder() -> None:
    facts = seen(free_for=None, held=True, retreats_until=NOW + 5.0)
    assert may_stand(facts) == Verdict(Why.HELD, inf)


@pytest.mark.parametrize(
    "others",
    [{"ask_others_listen": answer(True)}, {"ask_others_listen": answer(False), "away_at": NOW - 2.9}],
)
def test_a_replica_that_remembers_nothing_leaves_an_empty_ledger_to_others_for_a_while(
    others: dict[str, Any],
) -> None:
    assert may_stand(seen(remembers=False, **others)) == Verdict(Why.NEWCOMER, MODESTY)
    # It holds nothing that this replica remembers: it can't be behind it, whatever was noted before.
    assert why(seen(remembers=False, lacks=True, free_for=MODESTY - MOMENT, **others)) is Why.NEWCOMER
    assert may_stand(seen(remembers=False, lacks=True, free_for=MODESTY + MOMENT, **others)).may


def test_a_replica_that_remembers_nothing_and_is_alone_waits_for_nobody() -> None:
    assert may_stand(seen(remembers=False, ask_others_listen=answer(False), away_at=NOW - COMING_BACK)).may


def test_who_led_last_and_lives_is_left_a_lost_lease_for_longest() -> None:
    lives: dict[str, Any] = {"lacks": True, "ask_last_listens": answer(True)}
    assert may_stand(seen(**lives)) == Verdict(Why.LAST_LIVES, PATIENCE)
    assert why(seen(free_for=PATIENCE - MOMENT, **lives)) is Why.LAST_LIVES
    assert may_stand(seen(free_for=PATIENCE + MOMENT, **lives)).may


def test_who_led_last_and_is_not_seen_to_live_is_left_a_lost_lease_for_a_moment() -> None:
    unseen: dict[str, Any] = {"lacks": True, "ask_last_listens": answer(False)}
    assert may_stand(seen(**unseen)) == Verdict(Why.LAST_UNSEEN, COURTESY)
    assert why(seen(free_for=COURTESY - MOMENT, **unseen)) is Why.LAST_UNSEEN
    assert may_stand(seen(free_for=COURTESY + MOMENT, **unseen)).may


def test_who_led_last_and_was_frozen_leaves_a_lost_lease_to_others_for_a_moment() -> None:
    frozen: dict[str, Any] = {"lacks": True, "led_last": True, "led_until": NOW}
    assert may_stand(seen(**frozen)) == Verdict(Why.FROZEN, COURTESY)
    assert why(seen(free_for=COURTESY - MOMENT, **frozen)) is Why.FROZEN
    assert may_stand(seen(free_for=COURTESY + MOMENT, **frozen)).may


def cut_off(silence: float) -> dict[str, Any]:
    return {
        "lacks": True,
        "led_last": True,
        "led_until": NOW + MOMENT,
        "ask_silence": answer(silence),
    }


def test_who_led_last_and_was_cut_off_waits_for_all_others_to_be_back() -> None:
    assert may_stand(seen(**cut_off(-inf))) == Verdict(Why.NOT_ALL_BACK, ALL_BACK)
    assert why(seen(free_for=ALL_BACK - MOMENT, **cut_off(-inf))) is Why.NOT_ALL_BACK
    assert may_stand(seen(free_for=ALL_BACK + MOMENT, **cut_off(-inf))).may


@pytest.mark.parametrize("free_for", [0.0, ALL_BACK + 1.0, 2 * TTL])
def test_once_they_are_back_it_waits_for_their_silence(free_for: float) -> None:
    assert may_stand(seen(free_for, **cut_off(0.0))) == Verdict(Why.SILENCE, SILENCE)
    assert why(seen(free_for, **cut_off(SILENCE - MOMENT))) is Why.SILENCE
    assert may_stand(seen(free_for, **cut_off(SILENCE))).may


def test_who_led_last_and_can_not_have_been_replaced_stands_at_once() -> None:
    assert may_stand(seen(**cut_off(inf))).may


def test_a_replica_that_has_stepped_down_leaves_the_lease_to_others_if_any_are_there() -> None:
    assert may_stand(seen(retreats_until=NOW + 5.0)) == Verdict(Why.RETREATS, 5.0)
    assert may_stand(seen(retreats_until=NOW + 5.0, has_others=False)).may
    assert may_stand(seen(retreats_until=NOW)).may


def test_it_stands_early_if_nobody_has_taken_a_free_lease_for_a_ttl() -> None:
    assert may_stand(seen(TTL - 4.0, retreats_until=NOW + 60.0)) == Verdict(Why.RETREATS, 4.0)
    assert not seen(TTL - 4.0).nobody_takes_it
    assert may_stand(seen(TTL, retreats_until=NOW + 60.0)).may
    assert seen(TTL).nobody_takes_it


def test_a_lease_whose_holder_is_gone_is_not_one_that_nobody_takes() -> None:
    assert may_stand(seen(None, retreats_until=NOW + 60.0)) == Verdict(Why.RETREATS, 60.0)
    assert not seen(None).nobody_takes_it


@pytest.mark.parametrize(
    ("known", "reason"),
    [
        ({"remembers": False, "ask_others_listen": answer(True)}, Why.NEWCOMER),
        ({"lacks": True, "ask_last_listens": answer(True)}, Why.LAST_LIVES),
        ({"lacks": True, "ask_last_listens": answer(False)}, Why.LAST_UNSEEN),
        ({"lacks": True, "led_last": True}, Why.FROZEN),
        (cut_off(-inf), Why.NOT_ALL_BACK),
        (cut_off(0.1), Why.SILENCE),
    ],
    ids=lambda value: value.name if isinstance(value, Why) else "",
)
def test_a_loss_of_data_comes_before_a_retreat_which_then_goes_on(known: dict[str, Any], reason: Why) -> None:
    facts = seen(retreats_until=NOW + 60.0, **known)
    assert why(facts) is reason
    later = {**known, "ask_silence": answer(inf)}
    assert why(seen(free_for=2.5, retreats_until=NOW + 60.0, **later)) is Why.RETREATS


def test_each_reason_is_some_rules() -> None:
    assert {rule.why for rule in (*LOOKS, *ANNOUNCES, *STANDS)} == set(Why)


# All together.

_judged = settings(max_examples=300, deadline=None)

#: Seconds, on both sides of every bound.
_around = st.one_of(
    st.sampled_from([0.0, COURTESY, SILENCE, ALL_BACK, PATIENCE, MODESTY, COMING_BACK, TTL]),
    st.floats(0.0, 2 * TTL, width=32),
)
_ago = st.one_of(st.just(inf), _around)
_ahead = st.one_of(st.just(-inf), _around, _around.map(lambda seconds: -seconds))
_silence = st.one_of(st.sampled_from([-inf, inf]), _around)
_itself = st.fixed_dictionaries(
    {
        "hangs": st.booleans(),
        "listens": st.booleans(),
        "waits_since": _around.map(lambda seconds: NOW - seconds),
        "retreats_until": _ahead.map(lambda seconds: NOW + seconds),
        "refused_until": _ahead.map(lambda seconds: NOW + seconds),
    }
)
#: What is known, but for the lease, and the answers.
_rest = {
    "ttl": st.sampled_from([1.0, 3.0, TTL]),
    "remembers": st.booleans(),
    "lacks": st.booleans(),
    "led_last": st.booleans(),
    "led_until": _ahead.map(lambda seconds: NOW + seconds),
    "away_at": _ago.map(lambda seconds: NOW - seconds),
    "has_others": st.booleans(),
    "retreats_until": _ahead.map(lambda seconds: NOW + seconds),
}
_answers = st.tuples(st.booleans(), st.booleans(), _silence)
_seen = st.fixed_dictionaries({"free_for": st.one_of(st.none(), _around), **_rest})
_free = st.fixed_dictionaries({"free_for": _around, **_rest})


class Asked:
    """Answers, and notes what was asked."""

    def __init__(self, others_listen: bool, last_listens: bool, silence: float) -> None:
        self.questions: list[str] = []
        self._answers = {
            "ask_others_listen": others_listen,
            "ask_last_listens": last_listens,
            "ask_silence": silence,
        }

    def _ask(self, question: str) -> Any:
        self.questions.append(question)
        return self._answers[question]

    def questions_of(self) -> dict[str, Any]:
        return {name: lambda name=name: self._ask(name) for name in self._answers}


def facts_of(known: dict[str, Any], answers: tuple[bool, bool, float], **more: Any) -> Seen:
    return seen(**{**known, **Asked(*answers).questions_of(), **more})


@_judged
@given(_seen, _answers)
def test_it_never_stands_where_another_leads(known: dict[str, Any], answers: tuple[Any, ...]) -> None:
    asked = Asked(*answers)
    facts = seen(**{**known, "free_for": None, "held": True, **asked.questions_of()})
    assert why(facts) is Why.HELD
    assert asked.questions == []


@_judged
@given(_seen, _answers)
def test_it_never_stands_while_it_has_stepped_down_a_short_while_ago(
    known: dict[str, Any], answers: tuple[Any, ...]
) -> None:
    facts = facts_of(known, answers)
    if facts.has_others and facts.now < facts.retreats_until and not facts.nobody_takes_it:
        assert not may_stand(facts).may


@_judged
@given(_itself)
def test_it_says_that_it_stands_only_where_it_looks_and_neither_retreats_nor_is_refused(
    known: dict[str, Any],
) -> None:
    facts = itself(**known)
    ready = facts.retreats_until <= NOW and facts.refused_until <= NOW
    assert may_announce(facts).may == (may_look(facts).may and ready)


@_judged
@given(_itself)
def test_it_looks_half_a_second_later_at_the_latest_unless_it_hangs(known: dict[str, Any]) -> None:
    facts = itself(**known)
    assert (
        may_look(replace(facts, now=max(NOW, facts.waits_since + SUBSCRIBE_FIRST + MOMENT))).may
        != facts.hangs
    )


@_judged
@given(_free, _answers)
def test_a_free_lease_is_left_to_nobody_for_longer_than_a_few_seconds_and_a_ttl(
    known: dict[str, Any], answers: tuple[Any, ...]
) -> None:
    facts = facts_of(known, answers)
    verdict = may_stand(facts)
    assert verdict.left <= max(MODESTY, facts.ttl)
    if verdict.why is Why.SILENCE:
        # It ends as soon as one of them is away again; `test_sight` follows it from the beginning.
        assert verdict.left <= SILENCE
    elif facts.free_for >= max(MODESTY, facts.ttl):
        assert verdict.may


@_judged
@given(_seen, _answers)
def test_it_says_for_how_long(known: dict[str, Any], answers: tuple[bool, bool, float]) -> None:
    facts = facts_of(known, answers)
    verdict = may_stand(facts)
    if verdict.may or not isfinite(verdict.left):
        return
    trust_ends_in = facts.led_until - NOW
    if 0 < trust_ends_in <= verdict.left + MOMENT and verdict.why in {Why.NOT_ALL_BACK, Why.SILENCE}:
        # Then it is another case.
        return

    def after(seconds: float) -> Why | None:
        # Redis doesn't come back later by that, and who is silent remains so.
        since = {"away_at": facts.away_at + seconds, "free_since": facts.free_since}
        later = (*answers[:2], answers[2] + seconds)
        return why(facts_of(known, later, now=NOW + seconds, **since))

    assert after(max(verdict.left - MOMENT, 0.0)) is verdict.why
    assert after(verdict.left + MOMENT) is not verdict.why


@_judged
@given(_seen, _answers)
def test_only_a_loss_of_data_asks_the_server_and_then_one_question_once(
    known: dict[str, Any], answers: tuple[Any, ...]
) -> None:
    asked = Asked(*answers)
    facts = seen(**{**known, **asked.questions_of()})
    may_stand(facts)
    if facts.free_since is None or (facts.remembers and not facts.lacks):
        expected = []
    elif not facts.remembers:
        expected = ["ask_others_listen"]
    elif not facts.led_last:
        expected = ["ask_last_listens"]
    else:
        expected = [] if facts.now >= facts.led_until else ["ask_silence"]
    assert asked.questions == expected


@_judged
@given(_free, _answers)
def test_whoever_remembers_something_never_waits_longer_than_one_that_remembers_nothing(
    known: dict[str, Any], answers: tuple[bool, bool, float]
) -> None:
    """But for a short silence that begins late."""
    more = {"retreats_until": -inf}
    newcomer = may_stand(facts_of({**known, "remembers": False}, (True, *answers[1:]), **more))
    other = may_stand(facts_of({**known, "remembers": True}, answers, **more))
    assert other.may or other.why is Why.SILENCE or other.left < newcomer.left


_waits = st.lists(st.integers(0, 350), max_size=10)


def stands_at(facts: Callable[..., Seen], first: float, waits: list[int]) -> float:
    """When a replica stands that first sees a free lease at `first`, and looks again after so many ms, or seldom."""
    now = first
    for wait in [*waits, *[1000 * LOOK] * 100]:
        if may_stand(facts(now=now, free_since=first)).may:
            return now
        now += wait / 1000
    raise AssertionError("it never stands")


@_judged
@example(100, [], [], "another led", True)
@example(100, [], [], "cut off", True)
@given(
    st.integers(0, 100), _waits, _waits, st.sampled_from(["another led", "frozen", "cut off"]), st.booleans()
)
def test_whoever_remembers_something_and_is_woken_stands_before_one_that_does_not_remember(
    later: int, waits: list[int], others: list[int], case: str, lives: bool
) -> None:
    """The one that doesn't remember has woken it; after that each looks every 0.3 s, or earlier."""

    def remembers(**more: Any) -> Seen:
        return seen(
            lacks=True,
            led_last=case != "another led",
            led_until=inf if case == "cut off" else -inf,
            ask_last_listens=answer(lives),
            ask_silence=answer(-inf),
            **more,
        )

    def newcomer(**more: Any) -> Seen:
        return seen(remembers=False, ask_others_listen=answer(True), **more)

    assert stands_at(remembers, NOW + later / 1000, waits) < stands_at(newcomer, NOW, others)
