"""The plan of one entry: what is decided when, over time, with jitter, pauses and what is given back."""

from __future__ import annotations

import copy
import itertools
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import datetime, timedelta, timezone
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from celery_leaderbeat.pauses import Pause, Pauses
from celery_leaderbeat.plan import Plan, Returned
from celery_leaderbeat.policy import (
    PROMPT,
    REASON_CATCH_UP_NONE,
    REASON_LOOKBACK,
    Decision,
    Miss,
    Policy,
    Send,
    Skip,
    deadline_reason,
    send_time,
)

# On a busy machine, 120 s are a few seconds of computing. Hypothesis takes the watchdog for a case that fails, and
# finds that it doesn't fail again.
pytestmark = pytest.mark.timeout(600)

T0 = datetime(2026, 10, 2, 3, tzinfo=timezone.utc)
SECOND = timedelta(seconds=1)
MS = timedelta(milliseconds=1)
LATEST = Policy()
ALL = Policy(catch_up="all", lookback=100)


class Listed:
    """A schedule with these slots and no others; once they are used up, it never comes due again."""

    def __init__(self, slots: list[datetime]) -> None:
        self.slots = slots

    def __repr__(self) -> str:
        return f"Listed({', '.join(str((slot - T0).total_seconds()) for slot in self.slots)})"

    def slots_after(self, after: datetime) -> Iterator[datetime]:
        return iter(self.slots[bisect_right(self.slots, after) :])


def started(policy: Policy, schedule: Any = 1, last: datetime = T0) -> Plan:
    plan = Plan("job", SimpleNamespace(options={}), schedule, "f", policy)
    plan.start(last)
    return plan


def after(seconds: float) -> datetime:
    return T0 + seconds * SECOND


def at(policy: Policy, slot: datetime, following: datetime | None) -> datetime:
    return send_time("job", slot, following, policy.jitter)


# What would be born expired


def test_a_backlog_that_would_be_born_expired_is_one_range() -> None:
    plan = Plan("job", SimpleNamespace(options={"expires": T0}), 1, "f", Policy(catch_up="all", lookback=20))
    plan.start(T0)
    assert plan.decide(after(30), after(30)) == [
        Miss(after(1), after(10), 10, REASON_LOOKBACK),
        Miss(after(11), after(30), 20, f"born expired: expires is {T0}"),
    ]


# What is given back


def test_what_was_given_back_is_kept_in_order_of_time() -> None:
    plan = started(ALL, last=after(9))
    for number in (3, 5, 1, 4):
        plan.give_back(after(number))
    assert list(plan.returned) == [after(number) for number in (1, 3, 4, 5)]
    assert plan.when == after(1)
    assert plan.decide(after(9), T0) == [Send(after(number)) for number in (1, 3, 4, 5)]


def test_of_one_slot_the_later_attempt_counts_and_then_the_request() -> None:
    plan = started(LATEST)
    plan.give_back(T0)
    assert plan.returned[T0] == Returned()
    plan.give_back(T0, 2)
    plan.give_back(T0, 1, "request")
    assert plan.returned[T0] == Returned(2, "")
    plan.give_back(T0, 2, "request")
    plan.give_back(T0, 2)
    assert plan.returned[T0] == Returned(2, "request")


@pytest.mark.parametrize("overlap", ["skip", "queue"])
@pytest.mark.parametrize("owed", [{}, {"attempt": 2}, {"request": "asked"}])
def test_what_may_have_been_sent_goes_first_where_slots_must_not_overlap(
    overlap: Any, owed: dict[str, Any]
) -> None:
    plan = started(Policy(overlap=overlap), last=after(100))
    plan.give_back(after(99), **owed)
    plan.give_back(after(100), maybe_sent=True)
    assert plan.decide(after(100), T0) == [Send(after(100))]
    plan.advance(after(100))
    assert [decision.slot for decision in plan.decide(after(100), T0) if isinstance(decision, Send)] == [
        after(99)
    ]


def test_what_is_owed_is_sent_first_whatever_the_policy() -> None:
    for policy in (LATEST, Policy(catch_up="none"), Policy(deadline=1)):
        plan = started(policy, last=after(100))
        plan.give_back(after(7), 2)
        plan.give_back(after(3), 1, "asked")
        plan.give_back(after(4), 3, "asked")
        assert plan.decide(after(101), T0) == [
            Send(after(3), 1, "asked"),
            Send(after(4), 3, "asked"),
            Send(after(7), 2),
            Send(after(101)),
        ]


def test_what_is_owed_moves_nothing_on() -> None:
    plan = started(ALL)
    plan.give_back(after(2.5), 1, "asked")
    plan.advance(after(2.5))
    assert plan.last == T0
    assert plan.decide(after(3), T0) == [Send(after(1)), Send(after(2)), Send(after(3))]


def test_what_is_owed_is_never_sent_early() -> None:
    plan = started(LATEST, schedule=60)
    plan.give_back(after(5), 1, "asked")
    assert plan.when == after(5)
    assert plan.decide(after(4), T0) == []
    assert plan.when == after(5)
    assert plan.decide(after(5), T0) == [Send(after(5), 1, "asked")]


def test_a_slot_that_was_asked_for_before_its_turn_is_sent_once() -> None:
    plan = started(ALL)
    plan.give_back(after(1), 1, "asked")
    plan.give_back(after(2), 1, "asked")
    now = after(3)
    assert plan.decide(now, T0) == [
        Send(after(1), 1, "asked"),
        Send(after(2), 1, "asked"),
        Send(after(3)),
    ]
    plan.advance(after(2))
    assert (plan.last, plan.next) == (T0, after(1))
    plan.advance(after(1))
    assert (plan.last, plan.next) == (after(2), after(3))
    assert plan.decide(now, T0) == [Send(after(3))]


def test_a_doomed_slot_is_missed_also_where_it_is_owed() -> None:
    plan = started(LATEST, last=after(9))
    plan.give_back(after(5), 2)
    plan.give_back(after(6), 1, "asked")
    plan.doom(after(5), "no such queue")
    missed = Miss(after(5), after(5), 1, "no such queue", (after(5),))
    assert plan.decide(after(9), T0) == [missed, Send(after(6), 1, "asked")]
    plan.advance(after(5))
    assert plan.decide(after(9), T0) == [Send(after(6), 1, "asked")]


def test_what_is_owed_moves_nothing_on_when_it_is_decided_twice() -> None:
    plan = started(ALL)
    plan.give_back(after(2), 1, "asked")
    for _ in range(2):
        plan.advance(after(2))
    assert (plan.last, plan.next) == (T0, after(1))


def test_a_slot_stays_doomed_while_others_are_decided() -> None:
    plan = started(ALL, last=after(2))
    plan.give_back(after(1))
    plan.doom(after(1), "one")
    plan.doom(after(4), "four")
    plan.advance(after(3))
    assert plan.decide(after(4), T0) == [
        Miss(after(1), after(1), 1, "one", (after(1),)),
        Miss(after(4), after(4), 1, "four"),
    ]


def test_a_slot_that_was_given_back_gives_way_to_newer_ones_within_the_lookback() -> None:
    for overlap in ("allow", "skip"):
        plan = started(Policy(overlap=overlap), last=after(5))
        plan.give_back(after(5))
        assert plan.decide(after(6), T0) == [
            Miss(after(5), after(5), 1, REASON_LOOKBACK, (after(5),)),
            Send(after(6)),
        ]


def test_a_slot_before_a_long_backlog_that_isnt_caught_up_is_sent() -> None:
    plan = started(Policy(catch_up="none"))
    plan.give_back(T0)
    assert plan.decide(after(1000), led_since=after(2000)) == [
        Send(T0),
        Miss(after(1), after(1000), 1000, REASON_CATCH_UP_NONE),
    ]


# Pauses


def test_a_pause_holds_back_what_is_run_again_and_lets_through_what_was_asked_for() -> None:
    plan = started(LATEST, schedule=60)
    plan.give_back(after(0), 2)
    plan.give_back(after(1), 2, "asked")
    pauses = Pauses([Pause(T0)])
    now = after(5)
    assert plan.decide(now, T0, pauses) == [Send(after(1), 2, "asked")]
    plan.advance(after(1))
    assert plan.decide(now, T0, pauses) == []
    assert plan.when == now + SECOND
    assert plan.decide(now + SECOND, T0) == [Send(T0, 2)]


def test_a_pause_over_nothing_due_leaves_the_plan_as_it_is() -> None:
    plan = started(LATEST, schedule=60)
    assert plan.decide(after(5), T0, Pauses([Pause(T0)])) == []
    assert plan.when == after(60)


def test_what_came_due_in_a_pause_is_skipped_for_good() -> None:
    plan = started(ALL)
    over = Pauses([Pause(T0, after(3), "moving house")])
    assert plan.decide(after(4), T0, over) == [
        Skip(after(1), after(2), 2, "paused: moving house"),
        Send(after(3)),
        Send(after(4)),
    ]


def test_a_long_backlog_is_counted_without_a_walk_over_it() -> None:
    millions = timedelta(days=365)
    now = T0 + millions
    count = int(millions.total_seconds())
    assert started(LATEST).decide(now, now) == [
        Miss(after(1), now - SECOND, count - 1, REASON_LOOKBACK),
        Send(now),
    ]
    paused = started(LATEST).decide(now, now, Pauses([Pause(after(1), now + SECOND, "x")]))
    assert paused == [Skip(after(1), now, count, "paused: x")]
    jittered = started(Policy(jitter=0.5)).decide(now, now)
    assert sum(item.count for item in jittered if isinstance(item, Miss)) == count - 2
    assert jittered[-1] == Send(now - SECOND)


# One at a time


@pytest.mark.parametrize("overlap", ["skip", "queue"])
def test_slots_that_mustnt_overlap_are_sent_one_at_a_time(overlap: str) -> None:
    plan = started(Policy(catch_up="all", lookback=2, overlap=overlap))
    plan.give_back(T0, 2)
    assert plan.decide(after(4), T0) == [Send(T0, 2)]
    plan.advance(T0)
    assert plan.decide(after(4), T0) == [Miss(after(1), after(2), 2, REASON_LOOKBACK), Send(after(3))]
    plan.advance(after(2))
    plan.advance(after(3))
    assert plan.decide(after(4), T0) == [Send(after(4))]


@pytest.mark.parametrize("overlap", ["skip", "queue"])
def test_a_slot_that_has_to_wait_lets_fresh_ones_be_decided(overlap: str) -> None:
    plan = started(Policy(overlap=overlap), last=after(5))
    plan.give_back(after(2), 2)
    now = after(6)
    assert plan.decide(now, T0) == [Send(after(2), 2)]
    plan.wait(after(2), now)
    assert plan.when == after(6)
    assert plan.decide(now, T0) == [Send(after(6))]
    plan.advance(after(6))
    assert plan.when == now + 0.5 * SECOND
    assert plan.decide(now, T0) == []
    assert plan.decide(now + 0.5 * SECOND, T0) == [Send(after(2), 2)]


def test_fresh_slots_that_come_due_while_one_waits_are_decided_in_their_own_time() -> None:
    """Were they left until the next look, a period shorter than the wait would make missed ones of them."""
    plan = started(Policy(overlap="queue"), last=after(5), schedule=0.1)
    plan.give_back(after(5))
    plan.wait(after(5), after(5))
    for tenths in range(1, 5):
        slot = after(5) + tenths * 0.1 * SECOND
        assert plan.when == slot
        assert plan.decide(slot, T0) == [Send(slot)]
        plan.advance(slot)
    assert plan.decide(after(5) + 0.5 * SECOND, T0)[0] == Send(after(5))


def test_a_slot_that_waits_in_the_queue_keeps_its_place() -> None:
    plan = started(Policy(overlap="queue"), last=after(5))
    plan.give_back(after(5))
    now = after(8)
    assert plan.decide(now, T0) == [Send(after(5))]
    plan.wait(after(5), now)
    assert plan.decide(now, T0) == [Miss(after(6), after(7), 2, REASON_LOOKBACK), Send(after(8))]
    plan.advance(after(8))
    assert plan.decide(now + 0.5 * SECOND, T0) == [Send(after(5))]


def test_a_slot_that_waits_in_the_queue_is_missed_past_its_deadline_and_held_in_a_pause() -> None:
    plan = started(Policy(overlap="queue", deadline=2), last=after(5))
    plan.give_back(after(5))
    assert plan.decide(after(8), T0)[0] == Miss(after(5), after(5), 1, deadline_reason(2), (after(5),))
    assert plan.decide(after(6), T0, Pauses([Pause(after(6))])) == [Skip(after(6), after(6), 1, "paused")]
    assert after(5) in plan.returned


# Jitter


def test_a_slot_with_jitter_is_looked_at_when_it_is_to_be_sent() -> None:
    policy = Policy(jitter=30.0)
    plan = started(policy, schedule=60)
    when = at(policy, after(60), after(120))
    assert after(60) < when < after(90)
    assert (plan.next, plan.when) == (after(60), when)
    assert plan.decide(when - timedelta(microseconds=1), T0) == []
    assert plan.decide(when, T0) == [Send(after(60))]
    plan.advance(after(60))
    assert plan.when == at(policy, after(120), after(180))


def test_the_age_of_a_slot_counts_from_when_it_was_to_be_sent() -> None:
    policy = Policy(jitter=30.0, deadline=5)
    when = at(policy, after(60), after(120))
    assert started(policy, 60).decide(when + 5 * SECOND, T0) == [Send(after(60))]
    assert started(policy, 60).decide(when + 6 * SECOND, T0) == [
        Miss(after(60), after(60), 1, deadline_reason(5))
    ]
    for overlap in ("allow", "queue"):
        back = started(Policy(jitter=30.0, deadline=5, overlap=overlap), 60, last=after(60))
        back.give_back(after(60))
        assert back.decide(when + 5 * SECOND, T0) == [Send(after(60))]
    none = Policy(jitter=30.0, catch_up="none")
    prompt = PROMPT * SECOND
    assert started(none, 60).decide(when + prompt, when + prompt) == [Send(after(60))]
    assert isinstance(started(none, 60).decide(when + 2 * prompt, when + 2 * prompt)[0], Miss)


def test_a_pause_covers_the_time_at_which_a_slot_was_to_be_sent() -> None:
    policy = Policy(jitter=30.0)
    when = at(policy, after(60), after(120))
    nominal = Pauses([Pause(after(60), when)])
    delayed = Pauses([Pause(when, when + SECOND)])
    assert started(policy, 60).decide(when + 2 * SECOND, T0, nominal) == [Send(after(60))]
    assert isinstance(started(policy, 60).decide(when + 2 * SECOND, T0, delayed)[0], Skip)


# A schedule that fails


class Failing(Listed):
    fails = False

    def slots_after(self, after: datetime) -> Iterator[datetime]:
        if self.fails:
            raise RuntimeError("no slots today")
        return super().slots_after(after)


@pytest.mark.parametrize("jitter", [0.0, 0.5])
def test_a_schedule_that_fails_later_is_asked_again_and_loses_no_slot(jitter: float) -> None:
    schedule = Failing([after(number) for number in range(1, 9)])
    plan = started(Policy(catch_up="all", lookback=100, jitter=jitter), schedule)
    schedule.fails = True
    plan.advance(after(1))
    assert "no slots today" in str(plan.failure)
    assert plan.next is None
    assert plan.when == after(61)
    schedule.fails = False
    assert plan.decide(after(61), T0) == [Send(after(number)) for number in range(2, 9)]


# Everything at once, against the rules written down a second time


legal_policies = st.builds(
    lambda catch_up, lookback, **more: Policy(
        catch_up=catch_up, lookback=1 if catch_up == "none" else lookback, **more
    ),
    catch_up=st.sampled_from(["latest", "all", "none"]),
    lookback=st.integers(1, 5),
    prefer=st.sampled_from(["missed", "duplicate"]),
    deadline=st.none() | st.sampled_from([0.5, 4.0, 20.0]),
    on_crash=st.sampled_from(["auto", "skip", "rerun"]),
    overlap=st.sampled_from(["allow", "skip", "queue"]),
    jitter=st.sampled_from([0.0, 0.001, 0.7, 9.0, 1e6]),
)
pauses_of_some_kind = st.lists(
    st.builds(
        lambda since, length, note: Pause(
            T0 + since * MS, None if length is None else T0 + (since + length) * MS, note
        ),
        st.integers(-5_000, 40_000),
        st.none() | st.integers(0, 20_000),
        st.sampled_from(["", "a", "b"]),
    ),
    max_size=3,
)
#: Slots every so many milliseconds, or at odd distances.
schedules = st.sampled_from([250, 1_000, 1_700, 7_000]).map(lambda ms: ms * MS) | st.lists(
    st.integers(1, 6_000), max_size=25
).map(lambda steps: Listed([T0 + total * MS for total in itertools.accumulate(steps)]))
backs = st.tuples(
    st.integers(-20, 30),  # which slot, by its number from `last`, or a place between
    st.booleans(),
    st.sampled_from([(1, ""), (1, ""), (2, ""), (1, "r1"), (3, "r2")]),
)


@dataclass
class Case:
    """A plan on its way: `slots` are all that its schedule has, as far as they matter."""

    plan: Plan
    # Hundreds: Hypothesis warns of such a text instead of showing the case that fails.
    slots: list[datetime] = field(repr=False)
    now: datetime
    led_since: datetime
    pauses: list[Pause]
    doomed: set[datetime]
    waited: datetime | None

    def at(self, slot: datetime) -> datetime:
        following = self.slots[bisect_right(self.slots, slot) :]
        return at(self.plan.policy, slot, following[0] if following else None)


# Made once: making strategies takes longer than drawing from them.
some_backs = st.lists(backs, max_size=5)
lasts = st.integers(-3_000, 20_000)
delays_of_the_look = st.integers(0, 25_000)
begins_of_terms = st.integers(-5_000, 45_000)
doomed_of_those_near = st.lists(st.integers(0, 999), max_size=2)
waiting_of_those_near = st.none() | st.integers(0, 999)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    schedule = draw(schedules)
    if isinstance(schedule, Listed):
        slots = schedule.slots
    else:
        first = -(-(T0 - 30 * SECOND - datetime(1970, 1, 1, tzinfo=timezone.utc)) // schedule)
        begin = datetime(1970, 1, 1, tzinfo=timezone.utc) + first * schedule
        slots = [begin + number * schedule for number in range(int(120 * SECOND / schedule))]
    last = T0 + draw(lasts) * MS
    plan = started(draw(legal_policies), schedule, last)
    here = bisect_right(slots, last)
    for number, between, (attempt, request) in draw(some_backs):
        index = here + number
        if not 0 <= index < len(slots):
            continue
        slot = slots[index] + (MS / 2 if between else timedelta(0))
        if slot <= last or request:
            plan.give_back(slot, attempt, request)
    now = last + draw(delays_of_the_look) * MS
    near = [*plan.returned, *(slot for slot in slots if last < slot <= now)]
    doomed = {near[number % len(near)] for number in draw(doomed_of_those_near)} if near else set()
    for slot in doomed:
        plan.doom(slot, "doomed")
    waiting = draw(waiting_of_those_near) if near else None
    waited = None if waiting is None else near[waiting % len(near)]
    led_since = T0 + draw(begins_of_terms) * MS
    return Case(plan, slots, now, led_since, draw(pauses_of_some_kind), doomed, waited)


Verdict = tuple[datetime, str, Any]


def told(case: Case, decisions: list[Decision], fresh: list[datetime]) -> list[Verdict]:
    """Each slot with what it becomes, in the order of the decisions."""
    found: list[Verdict] = []
    for item in decisions:
        if isinstance(item, Send):
            found.append((item.slot, "send", (item.attempt, item.request)))
            continue
        members = sorted({*item.returned, *(s for s in fresh if item.first <= s <= item.last)})
        if item.count == 1:
            members = [item.first]
        assert len(members) == item.count
        assert (members[0], members[-1]) == (item.first, item.last)
        assert item.returned == tuple(slot for slot in members if slot in case.plan.returned)
        kind = "skip" if isinstance(item, Skip) else "miss"
        found += [(slot, kind, item.reason) for slot in members]
    return found


def fresh_slots(case: Case) -> list[datetime]:
    plan = case.plan
    assert plan.last is not None
    return [s for s in case.slots if s > plan.last and s not in plan.returned and case.at(s) <= case.now]


def by_the_rules(case: Case, expired: str = "") -> list[Verdict]:
    """What has to become of all slots, in its order; `expired`: why what would be sent is missed instead."""
    policy, now = case.plan.policy, case.now
    current = next((p for p in case.pauses if p.until is None or p.covers(now)), None)

    def alone(slot: datetime) -> tuple[str, str] | None:
        covering = sorted((p for p in case.pauses if p.covers(case.at(slot))), key=lambda p: p.since)
        if covering:
            return "skip", covering[0].reason
        if policy.deadline is not None and (now - case.at(slot)).total_seconds() > policy.deadline:
            return "miss", deadline_reason(policy.deadline)
        return None

    waits = case.waited in case.plan.returned
    back = {slot: item for slot, item in case.plan.returned.items() if slot <= now and not waits}
    owed = [
        (slot, "send", (item.attempt, item.request))
        for slot, item in back.items()
        if item.owed and (item.request or not current or slot in case.doomed)
    ]

    def held(slot: datetime) -> bool:
        return current is not None and not any(p.covers(case.at(slot)) for p in case.pauses)

    plain = [slot for slot, item in back.items() if not item.owed and not held(slot)]
    queued = plain if policy.overlap == "queue" else []
    fresh = list(itertools.takewhile(lambda slot: not held(slot), fresh_slots(case)))
    cut = policy.overlap != "queue" and len(fresh) < len(fresh_slots(case))
    first_held = fresh_slots(case)[len(fresh)] if cut else None
    ranked = [s for s in plain if s not in queued and (first_held is None or s < first_held)] + fresh
    eligible = [slot for slot in ranked if alone(slot) is None]
    newest_fresh = [slot for slot in eligible if slot not in plain][-1:]
    prompt_since = case.led_since - PROMPT * SECOND
    if policy.catch_up == "none":
        eligible = [s for s in eligible if s in plain or (s in newest_fresh and case.at(s) >= prompt_since)]

    def verdict(slot: datetime) -> Verdict:
        kind, why = alone(slot) or ("send", (1, ""))
        if kind == "send" and slot not in queued:
            if slot not in eligible:
                kind, why = "miss", REASON_CATCH_UP_NONE
            elif sum(1 for newer in eligible if newer > slot) >= policy.lookback:
                kind, why = "miss", REASON_LOOKBACK
        return slot, kind, why

    turns = [owed + [verdict(s) for s in queued], [verdict(s) for s in sorted(ranked)]]
    everything = [
        (slot, "miss", "doomed") if kind == "send" and slot in case.doomed else (slot, kind, why)
        for slot, kind, why in itertools.chain(*turns)
    ]
    if expired:
        everything = [
            (slot, "miss", expired) if kind == "send" else (slot, kind, why) for slot, kind, why in everything
        ]
    if policy.overlap != "allow":
        sends = [number for number, item in enumerate(everything) if item[1] == "send"]
        everything = everything[: sends[0] + 1] if sends else everything
    return everything


@settings(max_examples=1_500, deadline=None)
@given(cases(), st.sampled_from([0, -1.5, timedelta(0), T0 - 3600 * SECOND, "2026-10-01T03:00:00Z"]))
def test_what_is_decided_is_what_the_rules_say_and_what_would_be_born_expired_is_missed_instead(
    case: Case, expires: Any
) -> None:
    if case.waited is not None:
        case.plan.wait(case.waited, case.now)
    fresh = fresh_slots(case)
    stale = copy.deepcopy(case.plan)
    stale.entry = SimpleNamespace(options={"expires": expires})
    found = told(case, case.plan.decide(case.now, case.led_since, Pauses(case.pauses)), fresh)
    expected = by_the_rules(case)
    assert max(Counter(slot for slot, _, _ in found).values(), default=1) == 1
    assert found == expected
    if not found and case.plan.when is not None:
        assert case.plan.when > case.now
    missed = told(case, stale.decide(case.now, case.led_since, Pauses(case.pauses)), fresh)
    assert missed == by_the_rules(case, f"born expired: expires is {expires}")


# A run through time


@dataclass
class World:
    """A leader and its ledger, simulated: whatever is claimed, refused, paused, asked for, or handed over."""

    plan: Plan
    slots: list[datetime]
    now: datetime = T0
    led_since: datetime = T0
    pauses: list[Pause] = field(default_factory=list)
    sent: dict[datetime, int] = field(default_factory=dict)
    ends: Counter[tuple[datetime, int]] = field(default_factory=Counter)
    owing: dict[tuple[datetime, int], str] = field(default_factory=dict)
    handed_over: bool = False

    def turn(self, outcomes: list[int]) -> None:
        """Decide and carry out whatever there is to do now."""
        for _ in range(1_000):
            if self.plan.when is None or self.plan.when > self.now:
                return
            before = {slot: item.owed for slot, item in self.plan.returned.items()}
            decisions = self.plan.decide(self.now, self.led_since, Pauses(self.pauses))
            self.check_order(decisions, before)
            self.carry_out(decisions, outcomes)
        raise AssertionError("it spins")

    def check_order(self, decisions: list[Decision], owed: dict[datetime, bool]) -> None:
        sends = [item.slot for item in decisions if isinstance(item, Send)]
        if self.plan.policy.overlap != "allow":
            assert len(sends) <= 1
        for group in (
            [slot for slot in sends if owed.get(slot)],
            [slot for slot in sends if not owed.get(slot)],
        ):
            assert group == sorted(group)

    def carry_out(self, decisions: list[Decision], outcomes: list[int]) -> None:
        messages: list[Send] = []
        for item in decisions:
            if isinstance(item, Send):
                messages.append(item)
            elif messages:
                break
            else:
                self.write_off(item)
        for send in messages:
            outcome = outcomes.pop() if outcomes else 0
            self.publish(send, outcome)
            if outcome == 1:
                # The later ones wait with it, or they would pass it by.
                break

    def write_off(self, item: Miss | Skip) -> None:
        fresh = [
            slot
            for slot in self.slots[bisect_left(self.slots, item.first) : bisect_right(self.slots, item.last)]
            if not (self.plan.last and slot <= self.plan.last)
            and slot not in self.plan.returned
            and (slot, 1) not in self.ends
            and slot not in self.sent
        ]
        members = {*item.returned, *fresh}
        if not self.handed_over:
            assert len(members) == item.count
        for slot in members:
            back = self.plan.returned.get(slot, Returned())
            assert not back.owed
            self.ends[slot, 1] += 1
        for slot in dict.fromkeys((*item.returned, item.last)):
            self.plan.advance(slot)

    def publish(self, send: Send, outcome: int) -> None:
        paused = Pauses(self.pauses).in_force(self.now) is not None
        assert not paused or send.request
        known = self.plan.returned.get(send.slot)
        if known is None or not known.owed:
            following = self.slots[bisect_right(self.slots, send.slot) :]
            assert self.now >= at(self.plan.policy, send.slot, following[0] if following else None)
        assert self.now >= send.slot
        if (send.slot, send.attempt) in self.ends:
            # A new leader doesn't know what an earlier one sent before its turn; the ledger does.
            assert self.handed_over
            self.plan.advance(send.slot)
        elif outcome == 1:
            self.plan.wait(send.slot, self.now)
        elif outcome in (2, 3):
            self.plan.advance(send.slot)
            self.plan.give_back(send.slot, send.attempt, send.request)
            if outcome == 2:
                self.plan.wait(send.slot, self.now)
            else:
                self.plan.postpone(self.now + SECOND)
        else:
            self.plan.advance(send.slot)
            self.ends[send.slot, send.attempt] += 1
            self.owing.pop((send.slot, send.attempt), None)
            self.sent[send.slot] = send.attempt

    def owe(self, slot: datetime, attempt: int, request: str) -> None:
        self.owing[slot, attempt] = request
        self.plan.give_back(slot, attempt, request)

    def act(self, action: int, number: int) -> None:
        """Something happens: a pause, its end, a crash, a request, another leader."""
        if action == 1:
            self.pauses.append(Pause(self.now, None, f"pause {number}"))
        elif action == 2:
            self.pauses = [
                Pause(p.since, p.until if p.until is not None else self.now, p.note) for p in self.pauses
            ]
        elif action == 3 and self.sent:
            slot = sorted(self.sent)[number % len(self.sent)]
            if slot not in self.plan.returned:
                self.owe(slot, self.sent[slot] + 1, "")
        elif action == 4:
            slot = self.now - timedelta(microseconds=7)
            if (slot, 1) not in self.ends:
                self.owe(slot, 1, f"run {number}")
        elif action == 5:
            open_slots = [
                slot
                for slot in self.slots
                if slot <= self.now and (slot, 1) not in self.ends and slot not in self.plan.returned
            ]
            if open_slots:
                self.owe(open_slots[number % len(open_slots)], 1, f"backfill {number}")
        elif action == 6:
            self.hand_over()

    def hand_over(self) -> None:
        old = self.plan
        assert old.last is not None
        self.handed_over = True
        self.led_since = self.now
        self.plan = Plan(old.name, old.entry, old.schedule, old.fingerprint, old.policy)
        self.plan.start(old.last)
        for slot, back in old.returned.items():
            self.plan.give_back(slot, back.attempt, back.request)


steps = st.lists(
    st.tuples(
        st.integers(0, 9_000),
        st.sampled_from([0, 0, 0, 1, 2, 2, 3, 4, 5, 6]),
        st.integers(0, 99),
        st.lists(st.sampled_from([0, 0, 0, 1, 2, 3]), max_size=3),
    ),
    max_size=12,
)


@settings(max_examples=1_000, deadline=None)
@given(legal_policies, schedules, steps)
def test_over_time_each_slot_is_decided_once_and_never_early(
    policy: Policy, schedule: Any, path: list[tuple[int, int, int, list[int]]]
) -> None:
    end = T0 + sum(step[0] for step in path) * MS
    if isinstance(schedule, Listed):
        slots = schedule.slots
    else:
        count = int((end + 60 * SECOND - T0) / schedule) + 1
        first = -(-(T0 - datetime(1970, 1, 1, tzinfo=timezone.utc)) // schedule)
        begin = datetime(1970, 1, 1, tzinfo=timezone.utc) + first * schedule
        slots = [begin + number * schedule for number in range(count)]
    world = World(started(policy, schedule), [slot for slot in slots if slot > T0])
    for wait, action, number, outcomes in path:
        world.now += wait * MS
        world.act(action, number)
        world.turn(list(outcomes))
    world.act(2, 0)
    for _ in range(20):
        world.now += 1.1 * SECOND
        world.turn([])
    assert set(world.ends.values()) <= {1}
    assert not world.owing
    assert not world.plan.returned
    due = [
        slot
        for slot, following in itertools.zip_longest(world.slots, world.slots[1:])
        if at(policy, slot, following) <= world.now
    ]
    # What was asked for may have been sent before its delay was over.
    came_due = set(due)
    assert [slot for slot in world.slots if (slot, 1) in world.ends and slot in came_due] == due
