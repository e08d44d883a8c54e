"""Which slots are sent, which are missed, and why; and how a policy is read."""

from __future__ import annotations

import itertools
import math
import tracemalloc
from collections.abc import Iterable, Iterator, Sequence
from datetime import datetime, timedelta, timezone
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from celery_leaderbeat import policy as policies
from celery_leaderbeat.errors import PolicyError
from celery_leaderbeat.pauses import Pause, Pauses
from celery_leaderbeat.policy import (
    PROMPT,
    REASON_CATCH_UP_NONE,
    REASON_DEADLINE,
    REASON_LOOKBACK,
    Decision,
    Due,
    Miss,
    Policy,
    Send,
    Skip,
    deadline_reason,
    send_time,
)
from celery_leaderbeat.policy_options import build_policy, validate_defaults

UTC = timezone.utc
NOON = datetime(2026, 10, 2, 12, tzinfo=UTC)
TWO = datetime(2026, 10, 2, 14, tzinfo=UTC)
SECOND = timedelta(seconds=1)
MINUTE = timedelta(minutes=1)
MILLISECOND = timedelta(milliseconds=1)
MICROSECOND = timedelta(microseconds=1)


def minutes(first: datetime, count: int) -> list[datetime]:
    return [first + number * MINUTE for number in range(count)]


def decide(
    policy: Policy, due: Iterable[datetime], returned: Sequence[datetime] = (), **situation: Any
) -> list[Decision]:
    """Decide about slots that are to be sent at their own time."""
    came_back = (Due(slot, slot, returned=True) for slot in returned)
    return policies.decide(policy, itertools.chain(came_back, (Due(slot, slot) for slot in due)), **situation)


LATEST = Policy()
ALL = Policy(catch_up="all", lookback=100)
NONE = Policy(catch_up="none")


# What is decided


def test_a_slot_that_comes_due_while_leading_is_sent_under_every_policy() -> None:
    for policy in (LATEST, ALL, NONE):
        assert decide(policy, [TWO], led_since=NOON, now=TWO) == [Send(TWO)]


def test_nothing_due_is_nothing_to_do() -> None:
    assert decide(LATEST, [], led_since=NOON, now=TWO) == []


def test_after_an_outage_over_the_slot_it_is_sent_once_for_its_own_time() -> None:
    back = TWO + MINUTE
    assert decide(LATEST, [TWO], led_since=back, now=back) == [Send(TWO)]


class TestThreeDaysOfMinutes:
    """All replicas were down for three days; an entry is due every minute."""

    missed = minutes(NOON, 3 * 24 * 60)
    back = missed[-1] + timedelta(seconds=30)

    def test_one_is_sent_by_default_and_the_others_are_one_range(self) -> None:
        assert decide(LATEST, self.missed, led_since=self.back, now=self.back) == [
            Miss(self.missed[0], self.missed[-2], 4319, REASON_LOOKBACK),
            Send(self.missed[-1]),
        ]

    def test_all_with_a_lookback_of_three_sends_three_oldest_first(self) -> None:
        policy = Policy(catch_up="all", lookback=3)
        assert decide(policy, self.missed, led_since=self.back, now=self.back) == [
            Miss(self.missed[0], self.missed[-4], 4317, REASON_LOOKBACK),
            *map(Send, self.missed[-3:]),
        ]

    def test_none_sends_none_and_counts_all(self) -> None:
        assert decide(NONE, self.missed, led_since=self.back, now=self.back) == [
            Miss(self.missed[0], self.missed[-1], 4320, REASON_CATCH_UP_NONE)
        ]

    def test_none_sends_the_first_slot_that_comes_due_again(self) -> None:
        due = [*self.missed, self.missed[-1] + MINUTE]
        assert decide(NONE, due, led_since=self.back, now=due[-1]) == [
            Miss(self.missed[0], self.missed[-1], 4320, REASON_CATCH_UP_NONE),
            Send(due[-1]),
        ]

    def test_a_deadline_of_two_minutes_leaves_two(self) -> None:
        policy = Policy(catch_up="all", lookback=100, deadline=120)
        assert decide(policy, self.missed, led_since=self.back, now=self.back) == [
            Miss(self.missed[0], self.missed[-3], 4318, deadline_reason(120)),
            *map(Send, self.missed[-2:]),
        ]


def test_an_orderly_handover_is_no_outage() -> None:
    at_the_edge = TWO + timedelta(seconds=PROMPT)
    assert decide(NONE, [TWO], led_since=at_the_edge, now=at_the_edge) == [Send(TWO)]
    later = at_the_edge + timedelta(microseconds=1)
    assert decide(NONE, [TWO], led_since=later, now=later) == [Miss(TWO, TWO, 1, REASON_CATCH_UP_NONE)]


def test_a_leader_that_fell_behind_sends_only_the_newest_where_nothing_is_caught_up() -> None:
    due = minutes(TWO, 5)
    assert decide(NONE, due, led_since=NOON, now=due[-1]) == [
        Miss(due[0], due[3], 4, REASON_CATCH_UP_NONE),
        Send(due[4]),
    ]


def test_a_slot_of_exactly_the_deadline_is_sent_and_one_microsecond_older_is_missed() -> None:
    policy = Policy(deadline=60)
    assert decide(policy, [TWO], led_since=NOON, now=TWO + MINUTE) == [Send(TWO)]
    late = TWO + MINUTE + timedelta(microseconds=1)
    assert decide(policy, [TWO], led_since=NOON, now=late) == [
        Miss(TWO, TWO, 1, "older than the deadline of 60 s")
    ]


def test_the_deadline_holds_for_the_newest_and_for_returned_slots_too() -> None:
    policy = Policy(deadline=1)
    old = minutes(TWO, 2)
    decisions = decide(policy, [old[1]], led_since=NOON, now=old[1] + MINUTE, returned=[old[0]])
    assert decisions == [Miss(old[0], old[1], 2, deadline_reason(1), returned=(old[0],))]


def test_a_deadline_longer_than_the_calendar_is_no_error() -> None:
    assert decide(Policy(deadline=1e300), [TWO], led_since=NOON, now=TWO) == [Send(TWO)]


def test_a_returned_slot_is_sent_although_nothing_is_caught_up() -> None:
    later = TWO + timedelta(minutes=10)
    assert decide(NONE, [], led_since=later, now=later, returned=[TWO]) == [Send(TWO)]


def test_a_returned_slot_gives_way_to_a_newer_one_within_the_lookback() -> None:
    due = minutes(TWO, 2)
    for policy in (LATEST, NONE):
        assert decide(policy, due[1:], led_since=due[0], now=due[1], returned=due[:1]) == [
            Miss(due[0], due[0], 1, REASON_LOOKBACK, returned=(due[0],)),
            Send(due[1]),
        ]
    assert decide(ALL, due[1:], led_since=due[0], now=due[1], returned=due[:1]) == [
        Send(due[0]),
        Send(due[1]),
    ]


def test_overdue_slots_between_a_returned_one_and_a_sent_one_keep_their_place() -> None:
    slots = minutes(TWO, 4)
    decisions = decide(NONE, slots[1:3], led_since=slots[3], now=slots[3], returned=slots[:1])
    assert decisions == [Send(slots[0]), Miss(slots[1], slots[2], 2, REASON_CATCH_UP_NONE)]
    decisions = decide(NONE, slots[1:], led_since=slots[3], now=slots[3], returned=slots[:1])
    assert decisions == [
        Miss(slots[0], slots[0], 1, REASON_LOOKBACK, returned=(slots[0],)),
        Miss(slots[1], slots[2], 2, REASON_CATCH_UP_NONE),
        Send(slots[3]),
    ]


def test_due_slots_are_read_once_and_only_the_lookback_is_remembered() -> None:
    count = 50_000

    def due() -> Iterator[datetime]:
        return (NOON + timedelta(seconds=number) for number in range(count))

    now = NOON + timedelta(seconds=count)
    for policy in (LATEST, Policy(catch_up="all", lookback=100), NONE):
        tracemalloc.start()
        try:
            decisions = decide(policy, due(), led_since=now, now=now)
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
        assert sum(item.count if isinstance(item, Miss) else 1 for item in decisions) == count
        assert peak < 500_000


# Pauses


def test_what_was_to_be_sent_in_a_pause_is_skipped_and_not_caught_up() -> None:
    due = minutes(TWO, 5)
    pauses = Pauses([Pause(due[1], due[3], "moving house", "ann")])
    assert decide(ALL, due, led_since=NOON, now=due[4], pauses=pauses) == [
        Send(due[0]),
        Skip(due[1], due[2], 2, "paused: moving house"),
        Send(due[3]),
        Send(due[4]),
    ]


def test_a_pause_in_force_holds_what_was_due_before_and_is_unsent() -> None:
    """Its end decides: a backlog isn't lost because somebody paused the entry while it was down."""
    due = minutes(TWO, 3)
    pauses = Pauses([Pause(due[2])])
    for policy in (LATEST, ALL, NONE, Policy(deadline=1)):
        assert decide(policy, due[1:], due[:1], led_since=NOON, now=due[2], pauses=pauses) == []
    over = Pauses([Pause(due[2], due[2] + SECOND)])
    assert decide(ALL, due[1:], due[:1], led_since=NOON, now=due[2] + SECOND, pauses=over) == [
        Send(due[0]),
        Send(due[1]),
        Skip(due[2], due[2], 1, "paused"),
    ]


def test_paused_slots_use_up_no_lookback_and_are_no_newest_slot() -> None:
    due = minutes(TWO, 3)
    over = Pauses([Pause(due[2], due[2] + SECOND)])
    now = due[2] + MINUTE
    skipped = Skip(due[2], due[2], 1, "paused")
    assert decide(LATEST, due, led_since=NOON, now=now, pauses=over) == [
        Miss(due[0], due[0], 1, REASON_LOOKBACK),
        Send(due[1]),
        skipped,
    ]
    assert decide(NONE, due, led_since=NOON, now=now, pauses=over) == [
        Miss(due[0], due[0], 1, REASON_CATCH_UP_NONE),
        Send(due[1]),
        skipped,
    ]


def test_neighbours_under_different_pauses_are_skipped_apart() -> None:
    due = minutes(TWO, 4)
    pauses = Pauses([Pause(due[0], due[2], "one")], [Pause(due[2], due[3], "two")])
    assert decide(LATEST, due, led_since=NOON, now=due[3], pauses=pauses) == [
        Skip(due[0], due[1], 2, "paused: one"),
        Skip(due[2], due[2], 1, "paused: two"),
        Send(due[3]),
    ]


def test_a_run_of_slots_is_one_range_under_every_verdict() -> None:
    due = minutes(TWO, 10)
    run = Due(due[8], due[8], first=due[0], number=9)
    newest = Due(due[9], due[9])

    def verdict(policy: Policy, led_since: datetime = NOON, **more: Any) -> Decision:
        return policies.decide(policy, [run, newest], led_since=led_since, now=due[9], **more)[0]

    assert verdict(LATEST) == Miss(due[0], due[8], 9, REASON_LOOKBACK)
    assert verdict(NONE) == Miss(due[0], due[8], 9, REASON_CATCH_UP_NONE)
    assert verdict(NONE, due[9]) == Miss(due[0], due[8], 9, REASON_CATCH_UP_NONE)
    assert verdict(Policy(deadline=1)) == Miss(due[0], due[8], 9, deadline_reason(1))
    paused = Pauses([Pause(NOON)])
    assert verdict(LATEST, pauses=paused) == Skip(due[0], due[9], 10, "paused")


# Jitter


def test_without_jitter_a_slot_is_sent_at_its_own_time() -> None:
    assert send_time("job", TWO, None, 0.0) == TWO


def test_the_delay_of_a_slot_is_fixed_for_ever() -> None:
    assert send_time("job", TWO, TWO + MINUTE, 30.0) - TWO == timedelta(microseconds=6_019_052)
    assert send_time("other", TWO, TWO + MINUTE, 30.0) != send_time("job", TWO, TWO + MINUTE, 30.0)


def test_the_last_slot_of_all_is_late_by_no_more_than_the_jitter() -> None:
    assert TWO <= send_time("job", TWO, None, 30.0) < TWO + 30 * SECOND
    last = datetime(9997, 12, 31, tzinfo=UTC)
    assert send_time("job", last, None, 1e300) >= last


def test_delays_are_spread_over_the_whole_jitter() -> None:
    delays = [
        send_time("job", slot, slot + MINUTE, 60.0) - slot
        for slot in (NOON + n * MINUTE for n in range(1_000))
    ]
    tenths = [sum(1 for delay in delays if delay // (6 * SECOND) == tenth) for tenth in range(10)]
    assert min(tenths) > 60


@settings(max_examples=1_000, deadline=None)
@given(
    st.text(max_size=10),
    st.integers(1, 10**13),
    st.floats(0, 1e9) | st.floats(0, 1e-5),
)
def test_a_delay_is_below_the_jitter_and_ends_before_the_next_slot(
    entry: str, gap: int, jitter: float
) -> None:
    following = TWO + gap * MICROSECOND
    delay = send_time(entry, TWO, following, jitter) - TWO
    assert timedelta(0) <= delay < following - TWO
    assert delay <= jitter * SECOND
    assert delay == send_time(entry, TWO, following, jitter) - TWO


# The rules as a whole


some_pauses = st.lists(
    st.builds(
        lambda since, length, note: Pause(
            NOON + since * MILLISECOND,
            None if length is None else NOON + (since + length) * MILLISECOND,
            note=note,
        ),
        st.integers(-1_000, 100_000),
        st.none() | st.integers(0, 60_000),
        st.sampled_from(["", "note 0", "note 1", "note 2"]),
    ),
    max_size=3,
)
# Made once: making strategies takes longer than drawing from them.
parts_of_policies = st.fixed_dictionaries(
    {
        "prefer": st.sampled_from(["missed", "duplicate"]),
        "catch_up": st.sampled_from(["latest", "all", "none"]),
        "lookback": st.integers(1, 8),
        "deadline": st.none() | st.floats(0.001, 100),
        "on_crash": st.sampled_from(["auto", "skip", "rerun"]),
        "overlap": st.sampled_from(["allow", "skip", "queue"]),
        "jitter": st.sampled_from([0.0, 0.001, 2.0, 100.0]),
    }
)
steps_of_situations = st.lists(st.integers(1, 5_000), max_size=25)
numbers_of_returned = st.integers(0, 6)
begins_of_terms = st.integers(-2_000, 130_000)
delays_of_the_look = st.integers(0, 5_000)
pauses_or_none = st.none() | some_pauses


@st.composite
def situations(draw: st.DrawFn) -> dict[str, Any]:
    """Slots at odd distances, the first few of them returned, under any policy, pauses and begin of the term."""
    steps = draw(steps_of_situations)
    slots = [NOON + total * MILLISECOND for total in itertools.accumulate(steps)]
    came_back = min(draw(numbers_of_returned), len(slots))
    parts = draw(parts_of_policies)
    jitter = parts["jitter"]
    followings: list[datetime | None] = [*slots[1:], None]
    at = {slot: send_time("job", slot, nxt, jitter) for slot, nxt in zip(slots, followings, strict=False)}
    end = max(at.values(), default=NOON)
    return {
        "policy": Policy(**parts | ({"lookback": 1} if parts["catch_up"] == "none" else {})),
        "returned": slots[:came_back],
        "due": slots[came_back:],
        "at": at,
        "led_since": NOON + draw(begins_of_terms) * MILLISECOND,
        "now": end + draw(delays_of_the_look) * MILLISECOND,
        "pauses": draw(pauses_or_none),
    }


def decided(situation: dict[str, Any]) -> list[Decision]:
    return policies.decide(
        situation["policy"],
        (Due(slot, at, returned=slot in situation["returned"]) for slot, at in situation["at"].items()),
        led_since=situation["led_since"],
        now=situation["now"],
        pauses=None if situation["pauses"] is None else Pauses(situation["pauses"]),
    )


Verdict = tuple[str, str]
SENT = ("send", "")


def expand(situation: dict[str, Any], decisions: list[Decision]) -> list[tuple[datetime, Verdict]]:
    """Each slot with what it becomes and why, in the order of the decisions."""
    slots = [*situation["returned"], *situation["due"]]
    found: list[tuple[datetime, Verdict]] = []
    for decision in decisions:
        if isinstance(decision, Send):
            assert decision == Send(decision.slot)
            found.append((decision.slot, SENT))
        else:
            members = [s for s in slots if decision.first <= s <= decision.last and s not in held(situation)]
            assert len(members) == decision.count
            assert decision.returned == tuple(slot for slot in members if slot in situation["returned"])
            kind = "skip" if isinstance(decision, Skip) else "miss"
            found.extend((slot, (kind, decision.reason)) for slot in members)
    return found


def pause_at(situation: dict[str, Any], instant: datetime) -> Pause | None:
    pauses = sorted(situation["pauses"] or [], key=lambda pause: pause.since)
    covering = [p for p in pauses if p.since <= instant and (p.until is None or p.until > instant)]
    return covering[0] if covering else None


def held(situation: dict[str, Any]) -> set[datetime]:
    """The slots about which nothing is decided: from before a pause that is in force, and fresh ones after such."""
    endless = any(pause.until is None for pause in situation["pauses"] or ())
    if not endless and pause_at(situation, situation["now"]) is None:
        return set()
    before = {slot for slot, at in situation["at"].items() if pause_at(situation, at) is None}
    first = min((slot for slot in situation["due"] if slot in before), default=None)
    return before | {slot for slot in situation["due"] if first is not None and slot >= first}


def expected(situation: dict[str, Any]) -> dict[datetime, Verdict]:
    """The rules, written down a second time over whole lists."""
    policy, at, now = (situation[key] for key in ("policy", "at", "now"))
    undecided = held(situation)
    returned = [slot for slot in situation["returned"] if slot not in undecided]
    due = [slot for slot in situation["due"] if slot not in undecided]

    verdicts: dict[datetime, Verdict] = {}
    for slot in (*returned, *due):
        pause = pause_at(situation, at[slot])
        if pause is not None:
            verdicts[slot] = ("skip", f"paused: {pause.note}" if pause.note else "paused")
        elif policy.deadline is not None and (now - at[slot]).total_seconds() > policy.deadline:
            verdicts[slot] = ("miss", deadline_reason(policy.deadline))
    if policy.catch_up == "none":
        fresh = [slot for slot in due if slot not in verdicts]
        for slot in fresh:
            before_the_term = at[slot] < situation["led_since"] - timedelta(seconds=PROMPT)
            if before_the_term or slot != fresh[-1]:
                verdicts[slot] = ("miss", REASON_CATCH_UP_NONE)
    left = [slot for slot in (*returned, *due) if slot not in verdicts]
    for slot in left:
        verdicts[slot] = SENT if slot in left[-policy.lookback :] else ("miss", REASON_LOOKBACK)
    return verdicts


@settings(max_examples=1_000, deadline=None)
@given(situations())
def test_every_slot_is_in_exactly_one_decision_in_order_of_time(situation: dict[str, Any]) -> None:
    slots = [slot for slot, _ in expand(situation, decided(situation))]
    everything = [*situation["returned"], *situation["due"]]
    assert slots == [slot for slot in everything if slot not in held(situation)]


@settings(max_examples=1_500, deadline=None)
@given(situations())
def test_each_slot_has_the_verdict_that_the_rules_give(situation: dict[str, Any]) -> None:
    assert dict(expand(situation, decided(situation))) == expected(situation)


@settings(max_examples=1_000, deadline=None)
@given(situations())
def test_neighbouring_ranges_differ_in_what_they_say(situation: dict[str, Any]) -> None:
    for one, two in itertools.pairwise(decided(situation)):
        if not (isinstance(one, Send) or isinstance(two, Send)):
            assert (type(one), one.reason) != (type(two), two.reason)


@settings(max_examples=1_000, deadline=None)
@given(situations())
def test_never_more_than_lookback_is_sent_and_never_a_slot_past_its_deadline(
    situation: dict[str, Any],
) -> None:
    sent = [item.slot for item in decided(situation) if isinstance(item, Send)]
    policy = situation["policy"]
    assert len(sent) <= policy.lookback
    if policy.deadline is not None:
        assert all(
            (situation["now"] - situation["at"][slot]).total_seconds() <= policy.deadline for slot in sent
        )


@settings(max_examples=1_000, deadline=None)
@given(situations())
def test_the_newest_slot_of_the_term_is_sent_unless_paused_or_past_its_deadline(
    situation: dict[str, Any],
) -> None:
    due, policy = situation["due"], situation["policy"]
    if due and not situation["pauses"]:
        at = situation["at"][due[-1]]
        late = (situation["now"] - at).total_seconds()
        in_the_term = at >= situation["led_since"] - timedelta(seconds=PROMPT)
        if in_the_term and (policy.deadline is None or late <= policy.deadline):
            assert decided(situation)[-1] == Send(due[-1])


@settings(max_examples=1_000, deadline=None)
@given(situations())
def test_latest_and_all_send_at_least_one_of_a_backlog(situation: dict[str, Any]) -> None:
    policy = situation["policy"]
    newest = [*situation["returned"], *situation["due"]][-1:]
    if policy.catch_up != "none" and policy.deadline is None and newest and not situation["pauses"]:
        assert decided(situation)[-1] == Send(newest[0])


@settings(max_examples=1_000, deadline=None)
@given(situations())
def test_nothing_is_sent_while_paused(situation: dict[str, Any]) -> None:
    pauses = Pauses(situation["pauses"] or [])
    sent = [item.slot for item in decided(situation) if isinstance(item, Send)]
    assert not (sent and pauses.in_force(situation["now"]))
    assert not any(pauses.covers(situation["at"][slot]) for slot in sent)


# How a policy is read


def test_an_entry_without_a_policy_sends_the_latest_and_prefers_a_missed_slot() -> None:
    assert build_policy("job", None, {}) == Policy("missed", "latest", 1, None)
    assert build_policy("job", {}, {}) == Policy()


def test_lookback_defaults_by_catch_up() -> None:
    assert build_policy("job", {"catch_up": "all"}, {}).lookback == 100
    assert build_policy("job", {"catch_up": "latest"}, {}).lookback == 1
    assert build_policy("job", {"catch_up": "none"}, {}).lookback == 1


def test_the_entry_says_more_than_the_defaults() -> None:
    defaults = {"prefer": "duplicate", "catch_up": "all", "lookback": 7, "deadline": 60}
    assert build_policy("job", None, defaults) == Policy("duplicate", "all", 7, 60)
    assert build_policy("job", {"prefer": "missed", "lookback": 2}, defaults) == Policy(
        "missed", "all", 2, 60
    )
    assert build_policy("job", {"deadline": None}, defaults).deadline is None


def test_a_default_lookback_goes_with_the_default_catch_up_only() -> None:
    assert build_policy("job", {"catch_up": "none"}, {"catch_up": "all", "lookback": 7}) == NONE
    assert build_policy("job", {"catch_up": "latest"}, {"catch_up": "all", "lookback": 7}).lookback == 1
    assert build_policy("job", {"catch_up": "all"}, {"catch_up": "all", "lookback": 7}).lookback == 7
    assert build_policy("job", {"catch_up": "latest"}, {"lookback": 3}).lookback == 3


def test_default_attempts_go_with_the_default_on_crash_only() -> None:
    defaults = {"on_crash": "rerun", "max_attempts": 7}
    assert build_policy("job", None, defaults).max_attempts == 7
    assert build_policy("job", {"on_crash": "rerun"}, defaults).max_attempts == 7
    assert build_policy("job", {"max_attempts": 2}, defaults).max_attempts == 2
    for other in ("auto", "skip"):
        assert build_policy("job", {"on_crash": other}, defaults) == Policy(on_crash=other)
    assert build_policy("job", {"on_crash": "rerun"}, {}).max_attempts == 3
    with pytest.raises(PolicyError, match=r"'job'.*max_attempts is 2.*on_crash is 'skip'"):
        build_policy("job", {"max_attempts": 2}, {"on_crash": "skip"})


def test_jitter_is_a_number_of_seconds_or_nothing() -> None:
    assert build_policy("job", {"jitter": 30}, {}).jitter == 30
    assert build_policy("job", {"jitter": 0}, {"jitter": 9}) == Policy()
    assert build_policy("job", {"jitter": None}, {"jitter": 9}) == Policy()
    assert build_policy("job", None, {"jitter": 0.5}).jitter == 0.5


def test_overlap_and_on_crash_are_read() -> None:
    assert build_policy("job", {"overlap": "queue"}, {"on_crash": "skip"}) == Policy(
        on_crash="skip", overlap="queue"
    )


def test_the_starting_deadline_of_crontabs_counts_where_nobody_named_another() -> None:
    assert build_policy("job", None, {}, cron_deadline=30).deadline == 30
    assert build_policy("job", None, {"deadline": 60}, cron_deadline=30).deadline == 60
    assert build_policy("job", {"deadline": 5}, {"deadline": 60}, cron_deadline=30).deadline == 5
    assert build_policy("job", {"deadline": None}, {}, cron_deadline=30).deadline is None


def test_the_mappings_are_left_as_they_are() -> None:
    own, defaults = {"catch_up": "none"}, {"catch_up": "all", "lookback": 7}
    build_policy("job", own, defaults, cron_deadline=5)
    assert (own, defaults) == ({"catch_up": "none"}, {"catch_up": "all", "lookback": 7})


BAD = [
    (
        {"catchup": "all"},
        [
            "'catchup'",
            "'all'",
            "did you mean 'catch_up'",
            "prefer, catch_up, lookback, deadline, on_crash, max_attempts, overlap, jitter",
        ],
    ),
    ({7: 1}, ["unknown key 7"]),
    ({"catch_up": "lastest"}, ["catch_up is 'lastest'", "did you mean 'latest'", "'latest', 'all', 'none'"]),
    ({"catch_up": None}, ["catch_up is None", "'latest', 'all', 'none'"]),
    ({"catch_up": ["all"]}, ["catch_up is ['all']"]),
    ({"prefer": "duplicates"}, ["prefer is 'duplicates'", "did you mean 'duplicate'"]),
    ({"prefer": True}, ["prefer is True", "'missed', 'duplicate'"]),
    ({"lookback": 0}, ["lookback is 0", "1 or more"]),
    ({"lookback": True}, ["lookback is True"]),
    ({"lookback": 2.0}, ["lookback is 2.0"]),
    ({"lookback": None}, ["lookback is None"]),
    ({"lookback": "3"}, ["lookback is '3'"]),
    ({"deadline": 0}, ["deadline is 0", "above 0"]),
    ({"deadline": -1.5}, ["deadline is -1.5"]),
    ({"deadline": True}, ["deadline is True"]),
    ({"deadline": "60"}, ["deadline is '60'"]),
    ({"deadline": float("inf")}, ["deadline is inf"]),
    ({"deadline": float("nan")}, ["deadline is nan"]),
    ({"deadline": timedelta(seconds=1)}, ["deadline is datetime.timedelta", "seconds"]),
    ({"deadline": 10**400}, ["deadline is 1000"]),
    ({"catch_up": "none", "lookback": 3}, ["lookback is 3", "catch_up is 'none'"]),
    ({"oncrash": "skip"}, ["'oncrash'", "did you mean 'on_crash'"]),
    ({"on_crash": "re-run"}, ["on_crash is 're-run'", "did you mean 'rerun'", "'auto', 'skip', 'rerun'"]),
    ({"on_crash": None}, ["on_crash is None", "'auto', 'skip', 'rerun'"]),
    ({"on_crash": "rerun", "max_attempts": 0}, ["max_attempts is 0", "1 or more"]),
    ({"on_crash": "rerun", "max_attempts": True}, ["max_attempts is True", "number of attempts"]),
    ({"on_crash": "rerun", "max_attempts": None}, ["max_attempts is None"]),
    ({"max_attempts": 5}, ["max_attempts is 5", "on_crash is 'auto'", "accepted with on_crash 'rerun'"]),
    ({"on_crash": "skip", "max_attempts": 5}, ["max_attempts is 5", "on_crash is 'skip'"]),
    ({"overlap": "que"}, ["overlap is 'que'", "did you mean 'queue'", "'allow', 'skip', 'queue'"]),
    ({"overlap": False}, ["overlap is False", "'allow', 'skip', 'queue'"]),
    ({"jitter": -1}, ["jitter is -1", "0 or more"]),
    ({"jitter": False}, ["jitter is False"]),
    ({"jitter": "30"}, ["jitter is '30'", "seconds"]),
    ({"jitter": math.inf}, ["jitter is inf"]),
    ({"jitter": math.nan}, ["jitter is nan"]),
    ({"jitter": 10**400}, ["jitter is 1000"]),
    ({"jitter": timedelta(seconds=1)}, ["jitter is datetime.timedelta"]),
    ("latest", ["'latest'", "mapping"]),
]


@pytest.mark.parametrize(("policy", "parts"), BAD)
def test_a_bad_policy_of_an_entry_names_the_entry_the_key_the_value_and_what_is_accepted(
    policy: Any, parts: list[str]
) -> None:
    with pytest.raises(PolicyError) as raised:
        build_policy("nightly job", policy, {})
    for part in ["'nightly job'", *parts]:
        assert part in str(raised.value)


@pytest.mark.parametrize(("policy", "parts"), BAD)
def test_a_bad_default_names_the_setting(policy: Any, parts: list[str]) -> None:
    with pytest.raises(PolicyError) as raised:
        validate_defaults(policy)
    for part in ["leaderbeat_policy", *parts]:
        assert part in str(raised.value)
    with pytest.raises(PolicyError, match="leaderbeat_policy"):
        build_policy("nightly", None, policy)


def test_good_defaults_are_accepted() -> None:
    validate_defaults({})
    validate_defaults({"prefer": "duplicate", "catch_up": "all", "lookback": 3, "deadline": None})
    validate_defaults({"on_crash": "rerun", "max_attempts": 1, "overlap": "skip", "jitter": 2.5})


def test_a_lookback_beside_the_default_none_is_refused() -> None:
    with pytest.raises(PolicyError, match=r"'nightly'.*lookback is 3.*catch_up is 'none'"):
        build_policy("nightly", {"lookback": 3}, {"catch_up": "none"})


def test_a_bad_starting_deadline_names_its_setting() -> None:
    with pytest.raises(PolicyError, match=r"'nightly'.*beat_cron_starting_deadline is 0"):
        build_policy("nightly", None, {}, cron_deadline=0)


def test_the_reasons_are_stable_text() -> None:
    assert REASON_CATCH_UP_NONE == "catch_up is none"
    assert REASON_LOOKBACK == "older than lookback reaches"
    assert REASON_DEADLINE == "older than the deadline"
    assert deadline_reason(0.5) == "older than the deadline of 0.5 s"
    assert deadline_reason(3_600_000.0) == "older than the deadline of 3600000 s"
