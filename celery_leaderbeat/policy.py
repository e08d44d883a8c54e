"""Which slots of an entry are sent, which are skipped or missed, and why.

`catch_up` and `lookback` say how much of a backlog is sent; `deadline` says how old a slot may get; `jitter`
says how late a slot is sent on purpose. The other parts of a policy are carried along for the ledger.

A slot is overdue when nobody led as it came due, or when a newer slot of its entry is due as well because
the leader fell behind. The rules, in this order:

1. A slot that was to be sent during a pause is skipped. While a pause is in force, what was to be sent before it is
   held: nothing is decided about it, nor about fresh slots after it.
2. A slot older than the deadline is missed.
3. `catch_up = "none"`: a slot that came due before this leader's term is missed, and of those that came due
   within the term only the newest counts. Slots that an earlier leader decided to send and gave back are
   exempt: they had been caught up already.
4. Of the slots that are left the newest `lookback` are sent, oldest first; the others are missed.

So the newest slot that came due in the term is always sent, unless it is paused or older than the deadline.
A slot's time is, in all rules, the time at which it was to be sent: its own, and with jitter so much later.
"""

from __future__ import annotations

import hashlib
import itertools
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import NamedTuple

from celery_leaderbeat.pauses import Pauses
from celery_leaderbeat.tick import tick_key

__all__ = [
    "PROMPT",
    "REASON_CATCH_UP_NONE",
    "REASON_DEADLINE",
    "REASON_LOOKBACK",
    "Decision",
    "Due",
    "Miss",
    "Policy",
    "Send",
    "Skip",
    "Unsent",
    "deadline_reason",
    "decide",
    "send_time",
]

#: A slot that came due at most this long (seconds) before the leader's term isn't overdue: an orderly
#: handover takes a fraction of a second and is no outage.
PROMPT = 1.0

REASON_CATCH_UP_NONE = "catch_up is none"
REASON_LOOKBACK = "older than lookback reaches"
#: The beginning of `deadline_reason`, which goes on with the deadline.
REASON_DEADLINE = "older than the deadline"

#: The longest delay of a slot that no other follows.
_LONGEST_DELAY = timedelta(days=366)
_MICROSECOND = timedelta(microseconds=1)


@dataclass(frozen=True)
class Policy:
    """What is done with the slots of an entry that can't be sent on time, or whose run comes to grief.

    Attributes:
        prefer: `"missed"` or `"duplicate"`: what a leader's death between claim and confirm costs.
        catch_up: `"latest"`, `"all"` or `"none"`: which overdue slots are sent.
        lookback: the most slots that are sent of a backlog; 1 where catch_up is `"none"`.
        deadline: seconds after which a slot is missed, or None.
        on_crash: `"auto"`, `"skip"` or `"rerun"`: what a worker's death in mid-run means.
        max_attempts: how often a slot is run at most, where on_crash is `"rerun"`.
        overlap: `"allow"`, `"skip"` or `"queue"`: what a slot does while an earlier one is unfinished.
        jitter: seconds by which a slot is sent late at most.
    """

    prefer: str = "missed"
    catch_up: str = "latest"
    lookback: int = 1
    deadline: float | None = None
    on_crash: str = "auto"
    max_attempts: int = 3
    overlap: str = "allow"
    jitter: float = 0.0


@dataclass(frozen=True)
class Send:
    """This slot is to be sent.

    Attributes:
        slot: its nominal time.
        attempt: which attempt at the slot this is; 1 at first.
        request: the id of the request that asked for it, else empty.
    """

    slot: datetime
    attempt: int = 1
    request: str = ""


@dataclass(frozen=True)
class Unsent:
    """A range of neighbouring slots that are not sent, for one reason.

    Slots between `first` and `last` that had been decided before, such as requested ones, are no part of it.

    Attributes:
        first: the oldest slot of the range.
        last: the newest slot of the range.
        count: how many slots the range has.
        reason: a short sentence.
        returned: those of them that have a record in the ledger, because they had been given back.
    """

    first: datetime
    last: datetime
    count: int
    reason: str
    returned: tuple[datetime, ...] = ()


class Miss(Unsent):
    """Slots that will never be sent."""


class Skip(Unsent):
    """Slots that are not sent on purpose."""


Decision = Send | Miss | Skip


class Due(NamedTuple):
    """A slot that is due, or a run of neighbouring ones that share its verdict.

    Attributes:
        slot: the slot; of a run, the newest.
        at: when it was to be sent.
        returned: an earlier leader had decided to send it and gave it back.
        first: of a run, the oldest slot.
        number: how many slots it has.
    """

    slot: datetime
    at: datetime
    returned: bool = False
    first: datetime | None = None
    number: int = 1


def deadline_reason(deadline: float) -> str:
    """The reason for a slot older than `deadline` seconds."""
    return f"{REASON_DEADLINE} of {deadline:.15g} s"


def send_time(entry: str, slot: datetime, following: datetime | None, jitter: float) -> datetime:
    """When a slot is to be sent: late by a part of `jitter` that depends on its tick key alone.

    The delay is less than `jitter` seconds and less than the time to the slot that follows, so that slots are
    sent in their order. It is the same on every replica.

    Parameters:
        entry: the entry's name.
        slot: the slot, aware.
        following: the entry's next slot, or None.
        jitter: the policy's, in seconds.
    """
    if not jitter:
        return slot
    longest = _LONGEST_DELAY if following is None else following - slot
    longest = min(longest, timedelta(seconds=min(jitter, longest.total_seconds())))
    part = int.from_bytes(hashlib.sha256(tick_key(entry, slot).encode()).digest()[:8], "big")
    return slot + (longest // _MICROSECOND * part >> 64) * _MICROSECOND


def decide(
    policy: Policy,
    due: Iterable[Due],
    *,
    led_since: datetime,
    now: datetime,
    pauses: Pauses | None = None,
) -> list[Decision]:
    """What is done with the due slots of one entry, ordered by time; each slot is in exactly one decision.

    Reads `due` once, in constant time per slot, and remembers only what may still be sent.

    Parameters:
        policy: the entry's policy.
        due: the slots that are due and undecided, and those that came back, ascending, aware. A run of
            several stands only where rules 1 and 2 say the same of all of it and of the `lookback` slots
            that follow.
        led_since: the begin of this leader's term.
        now: the time by which slots are due.
        pauses: the entry's pauses.
    """
    judge = _Judge(policy, led_since, now, pauses or Pauses())
    verdicts = _Verdicts(policy)
    for item in due:
        if judge.holds(item):
            if item.returned:
                continue
            break
        unsent = judge.unsent(item)
        if unsent is None:
            verdicts.may_send(_Range.of(item))
        else:
            verdicts.unsent(_Range.of(item, *unsent))
    return verdicts.decisions()


class _Judge:
    """The rules that look at one slot alone."""

    def __init__(self, policy: Policy, led_since: datetime, now: datetime, pauses: Pauses) -> None:
        self._now = now
        self._deadline = policy.deadline
        self._too_old = "" if policy.deadline is None else deadline_reason(policy.deadline)
        self._none = policy.catch_up == "none"
        self._prompt_since = led_since - timedelta(seconds=PROMPT)
        self._pauses = pauses
        self._paused = pauses.in_force(now) is not None

    def holds(self, item: Due) -> bool:
        """Whether nothing is to be decided about a slot now, as a pause is in force that it came before."""
        return self._paused and self._pauses.covers(item.at) is None

    def unsent(self, item: Due) -> tuple[type[Miss] | type[Skip], str] | None:
        """What a slot becomes whatever the lookback, and why; None where it may be sent."""
        pause = self._pauses.covers(item.at) if self._pauses else None
        if pause is not None:
            return Skip, pause.reason
        if self._deadline is not None and (self._now - item.at).total_seconds() > self._deadline:
            return Miss, self._too_old
        if self._none and not item.returned and item.at < self._prompt_since:
            return Miss, REASON_CATCH_UP_NONE
        return None


@dataclass
class _Range:
    """An `Unsent` that still grows, or, without a kind, what may still be sent."""

    first: datetime
    last: datetime
    count: int
    returned: list[datetime]
    kind: type[Miss] | type[Skip] | None = None
    reason: str = ""

    @classmethod
    def of(cls, item: Due, kind: type[Miss] | type[Skip] | None = None, reason: str = "") -> _Range:
        returned = [item.slot] if item.returned else []
        return cls(item.first or item.slot, item.slot, item.number, returned, kind, reason)

    def decision(self) -> Decision:
        if self.kind is None:
            return Send(self.last)
        return self.kind(self.first, self.last, self.count, self.reason, tuple(self.returned))


class _Verdicts:
    """The decisions so far: those that are final, then a window of the newest slots that may be sent.

    The window begins with such a slot and holds at most `lookback` of them, and between them the ranges that
    are unsent in any case. One more slot at its end makes the one at its beginning a missed one.
    """

    def __init__(self, policy: Policy) -> None:
        self._lookback = policy.lookback
        self._none = policy.catch_up == "none"
        self._final: list[_Range] = []
        self._window: deque[_Range] = deque()
        self._candidates = 0

    def may_send(self, candidate: _Range) -> None:
        self._window.append(candidate)
        self._candidates += 1
        if self._candidates > self._lookback:
            self._give_up_oldest()

    def unsent(self, item: _Range) -> None:
        _append(self._window if self._window else self._final, item)

    def decisions(self) -> list[Decision]:
        return [item.decision() for item in itertools.chain(self._final, self._window)]

    def _give_up_oldest(self) -> None:
        oldest = self._window.popleft()
        oldest.kind = Miss
        # Of slots that aren't caught up only the newest counts; those that came back are exempt from that.
        oldest.reason = REASON_CATCH_UP_NONE if self._none and not oldest.returned else REASON_LOOKBACK
        self._candidates -= 1
        _append(self._final, oldest)
        while self._window and self._window[0].kind is not None:
            _append(self._final, self._window.popleft())


def _append(ranges: list[_Range] | deque[_Range], item: _Range) -> None:
    """Add an unsent range, as part of the one before it where kind and reason are the same."""
    if ranges and (ranges[-1].kind, ranges[-1].reason) == (item.kind, item.reason):
        before = ranges[-1]
        before.last = item.last
        before.count += item.count
        before.returned.extend(item.returned)
    else:
        ranges.append(item)
