"""Which slots are sent, which are missed, and why; and how a policy is read."""

from __future__ import annotations

import itertools
import tracemalloc
from collections.abc import Iterator
from datetime import datetime, timedelta, timezone
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from celery_leaderbeat.errors import PolicyError
from celery_leaderbeat.policy import (
    PROMPT,
    REASON_CATCH_UP_NONE,
    REASON_DEADLINE,
    REASON_LOOKBACK,
    Miss,
    Policy,
    Send,
    build_policy,
    deadline_reason,
    decide,
    validate_defaults,
)

UTC = timezone.utc
NOON = datetime(2026, 10, 2, 12, tzinfo=UTC)
TWO = datetime(2026, 10, 2, 14, tzinfo=UTC)
MINUTE = timedelta(minutes=1)


def minutes(first: datetime, count: int) -> list[datetime]:
    return [first + number * MINUTE for number in range(count)]


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
    count = 200_000

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


@st.composite
def situations(draw: st.DrawFn) -> dict[str, Any]:
    """Slots at odd distances, the first few of them returned, under any policy and any begin of the term."""
    steps = draw(st.lists(st.integers(1, 5_000), max_size=40))
    slots = [NOON + timedelta(milliseconds=total) for total in itertools.accumulate(steps)]
    came_back = draw(st.integers(0, min(len(slots), 6)))
    end = slots[-1] if slots else NOON
    catch_up = draw(st.sampled_from(["latest", "all", "none"]))
    return {
        "policy": Policy(
            catch_up=catch_up,
            lookback=1 if catch_up == "none" else draw(st.integers(1, 8)),
            deadline=draw(st.none() | st.floats(0.001, 100)),
        ),
        "returned": slots[:came_back],
        "due": slots[came_back:],
        "led_since": NOON + timedelta(milliseconds=draw(st.integers(-2_000, 210_000))),
        "now": end + timedelta(milliseconds=draw(st.integers(0, 5_000))),
    }


def decided(situation: dict[str, Any]) -> list[Send | Miss]:
    return decide(
        situation["policy"],
        iter(situation["due"]),
        led_since=situation["led_since"],
        now=situation["now"],
        returned=situation["returned"],
    )


def expand(situation: dict[str, Any], decisions: list[Send | Miss]) -> list[tuple[datetime, str | None]]:
    """Each slot with its reason, or None where it is sent, in the order of the decisions."""
    slots = [*situation["returned"], *situation["due"]]
    found: list[tuple[datetime, str | None]] = []
    for decision in decisions:
        if isinstance(decision, Send):
            found.append((decision.slot, None))
        else:
            members = [slot for slot in slots if decision.first <= slot <= decision.last]
            assert len(members) == decision.count
            assert decision.returned == tuple(slot for slot in members if slot in situation["returned"])
            found.extend((slot, decision.reason) for slot in members)
    return found


def expected(situation: dict[str, Any]) -> dict[datetime, str | None]:
    """The rules, written down a second time over whole lists."""
    policy, due, returned = situation["policy"], situation["due"], situation["returned"]
    verdicts: dict[datetime, str | None] = {}
    left = []
    for slot in [*returned, *due]:
        before_the_term = slot < situation["led_since"] - timedelta(seconds=PROMPT)
        if policy.deadline is not None and (situation["now"] - slot).total_seconds() > policy.deadline:
            verdicts[slot] = deadline_reason(policy.deadline)
        elif policy.catch_up == "none" and slot in due and (before_the_term or slot != due[-1]):
            verdicts[slot] = REASON_CATCH_UP_NONE
        else:
            left.append(slot)
    for slot in left:
        verdicts[slot] = None if slot in left[-policy.lookback :] else REASON_LOOKBACK
    return verdicts


@settings(max_examples=2_000, deadline=None)
@given(situations())
def test_every_slot_is_in_exactly_one_decision_in_order_of_time(situation: dict[str, Any]) -> None:
    slots = [slot for slot, _ in expand(situation, decided(situation))]
    assert slots == [*situation["returned"], *situation["due"]]


@settings(max_examples=2_000, deadline=None)
@given(situations())
def test_each_slot_has_the_verdict_that_the_rules_give(situation: dict[str, Any]) -> None:
    assert dict(expand(situation, decided(situation))) == expected(situation)


@settings(max_examples=1_000, deadline=None)
@given(situations())
def test_neighbouring_misses_of_one_reason_are_one_range(situation: dict[str, Any]) -> None:
    for before, after in itertools.pairwise(decided(situation)):
        if isinstance(before, Miss) and isinstance(after, Miss):
            assert before.reason != after.reason


@settings(max_examples=1_000, deadline=None)
@given(situations())
def test_never_more_than_lookback_is_sent_and_never_a_slot_past_its_deadline(
    situation: dict[str, Any],
) -> None:
    sent = [item.slot for item in decided(situation) if isinstance(item, Send)]
    policy = situation["policy"]
    assert len(sent) <= policy.lookback
    if policy.deadline is not None:
        assert all((situation["now"] - slot).total_seconds() <= policy.deadline for slot in sent)


@settings(max_examples=1_000, deadline=None)
@given(situations())
def test_the_newest_slot_of_the_term_is_sent_unless_past_its_deadline(situation: dict[str, Any]) -> None:
    due, policy = situation["due"], situation["policy"]
    if due and due[-1] >= situation["led_since"] - timedelta(seconds=PROMPT):
        late = (situation["now"] - due[-1]).total_seconds()
        if policy.deadline is None or late <= policy.deadline:
            assert decided(situation)[-1] == Send(due[-1])


@settings(max_examples=1_000, deadline=None)
@given(situations())
def test_latest_and_all_send_at_least_one_of_a_backlog(situation: dict[str, Any]) -> None:
    policy = situation["policy"]
    newest = [*situation["returned"], *situation["due"]][-1:]
    if policy.catch_up != "none" and policy.deadline is None and newest:
        assert decided(situation)[-1] == Send(newest[0])


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
        ["'catchup'", "'all'", "did you mean 'catch_up'", "prefer, catch_up, lookback, deadline"],
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
    ({"catch_up": "none", "lookback": 3}, ["lookback is 3", "catch_up is 'none'"]),
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
