"""Whether a replica that doesn't lead may stand for election now; if not, why, and for how much longer. Pure.

Three questions, each with a table. The first rule that applies and isn't over decides; where there is none, it may.

- `may_announce`, by `ANNOUNCES`: may it say that it stands, so that older releases leave a free lease to it?
- `may_look`, by `LOOKS`: may it look at the lease, to take it?
- `may_stand`, by `STANDS`: may it take the lease that it has looked at?

That somebody leads comes first: once the lease is free, a loss of data keeps nobody from it for longer than a few seconds,
and having stepped down for no longer than a TTL. So it is with a newer release, too, for which the script looks that gives
the lease (`elect.lua`): when nobody has taken it for a TTL, it isn't left to any other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from math import inf
from typing import Generic, TypeVar

__all__ = [
    "ALL_BACK",
    "ANNOUNCES",
    "COMING_BACK",
    "COURTESY",
    "LOOKS",
    "MODESTY",
    "PATIENCE",
    "SILENCE",
    "STANDS",
    "SUBSCRIBE_FIRST",
    "Itself",
    "Rule",
    "Seen",
    "Verdict",
    "Why",
    "may_announce",
    "may_look",
    "may_stand",
]

# All in seconds.

#: So long a standby waits for its own subscription: it is usually there within milliseconds.
SUBSCRIBE_FIRST = 0.5
#: So long a lease that was lost with other data is left to whoever knows more and isn't seen to live. Who gets no answer from
#: Redis tries again within 0.3 s.
COURTESY = 0.3
#: So long it is left to who led last and is seen to live. It takes part in the election once it is woken, but may be in the
#: middle of a request, or kept from the processor, just then.
PATIENCE = 1.5
#: So long a replica that remembers nothing leaves an empty ledger to others: longer than those wait themselves, once it has
#: woken them, though they look but every 0.3 s.
MODESTY = 2.0
#: So long after Redis was away, others may not have come back yet: a request that hangs takes up to 2 s, and then they try
#: again within 0.3 s.
COMING_BACK = 3.0
#: So long who led last waits for others, one of which may have led since, to come back: within 0.3 s, if they live and
#: no request of theirs hangs.
ALL_BACK = 1.2
#: So long they have, once all are back, to take the lease; who has led meanwhile doesn't wait, but may be looking just now.
SILENCE = 0.5


class Why(Enum):
    """What speaks against it."""

    HANGS = "its tick loop hangs"
    DEAF = "it isn't subscribed yet, and wouldn't hear of a release"
    HELD = "another leads"
    NEWCOMER = "the ledger is empty, and others may know what it held"
    LAST_LIVES = "data was lost, and the replica that led last lives: it knows best what was decided"
    LAST_UNSEEN = "data was lost, and the replica that led last may be about to come back"
    FROZEN = "data was lost, and another may have led since this replica's lease lapsed"
    NOT_ALL_BACK = "data was lost, and one that isn't back may have led since this replica"
    SILENCE = "data was lost, and one that is back may have led since this replica, and take the lease"
    RETREATS = "it has stepped down, and others are there"
    REFUSED = "Redis has refused to elect it"


@dataclass(frozen=True)
class Verdict:
    """Whether it may, and why not.

    Attributes:
        why: what speaks against it; None if it may.
        left: for how many seconds at most that lasts, as far as can be told; infinite if only an event ends it.
    """

    why: Why | None
    left: float = 0.0

    @property
    def may(self) -> bool:
        """Whether nothing speaks against it."""
        return self.why is None


@dataclass(frozen=True)
class Itself:
    """What a replica knows of itself. Instants are monotonic, in seconds.

    Attributes:
        now: when it asks.
        hangs: its tick loop hangs.
        listens: its subscription is there.
        waits_since: since when it has waited for an election.
        retreats_until: when it stands for election again, after it has stepped down.
        refused_until: for how long others needn't count on it, since Redis has refused to elect it.
    """

    now: float
    hangs: bool
    listens: bool
    waits_since: float
    retreats_until: float
    refused_until: float


@dataclass(frozen=True)
class Seen:
    """What a replica knows once it has looked at the lease. Instants are monotonic, in seconds.

    What costs a round trip is asked for when a rule needs it, and once.

    Attributes:
        now: when it asks.
        held: somebody holds the lease, and isn't known to be gone.
        free_since: when it was first seen to be free; None if it isn't.
        ttl: of a lease, in seconds.
        remembers: whether this replica remembers any entry.
        lacks: the ledger holds less than it remembers.
        led_last: it led itself under the highest epoch that it has seen.
        led_until: until when it could trust that.
        away_at: when Redis gave no answer last.
        has_others: others have said lately that they live.
        retreats_until: when it stands for election again, after it has stepped down.
        ask_others_listen: asks whether others are subscribed to wake-ups.
        ask_last_listens: asks whether the replica that led last is subscribed.
        ask_silence: asks whether the others are back; see `silence`.
    """

    now: float
    held: bool
    free_since: float | None
    ttl: float
    remembers: bool
    lacks: bool
    led_last: bool
    led_until: float
    away_at: float
    has_others: bool
    retreats_until: float
    ask_others_listen: Callable[[], bool]
    ask_last_listens: Callable[[], bool]
    ask_silence: Callable[[], float]

    @property
    def free_for(self) -> float:
        """For how many seconds the lease has been seen to be free; minus infinity if it isn't."""
        return -inf if self.free_since is None else self.now - self.free_since

    @property
    def nobody_takes_it(self) -> bool:
        """Whether it has been free for a TTL, left to others: then it is left to none of them any more."""
        return self.free_for >= self.ttl

    @property
    def is_newcomer(self) -> bool:
        """The lease is free, the ledger empty, and this replica has never seen another."""
        return self.free_since is not None and not self.remembers

    @property
    def another_led_last(self) -> bool:
        """The lease is free, the ledger lacks something, and another led last."""
        return self._lacks and not self.led_last

    @property
    def was_frozen(self) -> bool:
        """The same, but this replica led last, and its trust in that has ended: anybody may have led since."""
        return self._lacks and self.led_last and self.now >= self.led_until

    @property
    def led_until_now(self) -> bool:
        """The same, and its trust stands: only fast failover can have replaced it."""
        return self._lacks and self.led_last and self.now < self.led_until

    @property
    def _lacks(self) -> bool:
        return self.free_since is not None and self.remembers and self.lacks

    @property
    def others_may_know(self) -> bool:
        """Others are there, or may not have come back yet after Redis was away."""
        return self.ask_others_listen() or self.now - self.away_at < COMING_BACK

    @property
    def last_listens(self) -> bool:
        """The replica that led last is seen to live."""
        return self.ask_last_listens()

    @cached_property
    def silence(self) -> float:
        """For how many seconds all others have been back without taking the lease; negative while one isn't back.

        Infinite where no other can have led since this replica did.
        """
        return self.ask_silence()


_K = TypeVar("_K", Itself, Seen)


@dataclass(frozen=True)
class Rule(Generic[_K]):
    """A line of a table.

    Attributes:
        why: what speaks against it.
        applies: whether it does, by what is known.
        left: for how many seconds more; over at zero.
    """

    why: Why
    applies: Callable[[_K], bool]
    left: Callable[[_K], float]


def _until_it_ends(_: Itself | Seen) -> float:
    return inf


def _free_for(seconds: float) -> Callable[[Seen], float]:
    return lambda k: seconds - k.free_for


LOOKS: Sequence[Rule[Itself]] = (
    Rule(Why.HANGS, lambda k: k.hangs, _until_it_ends),
    Rule(Why.DEAF, lambda k: not k.listens, lambda k: SUBSCRIBE_FIRST - (k.now - k.waits_since)),
)

ANNOUNCES: Sequence[Rule[Itself]] = (
    *LOOKS,
    Rule(Why.RETREATS, lambda _: True, lambda k: k.retreats_until - k.now),
    Rule(Why.REFUSED, lambda _: True, lambda k: k.refused_until - k.now),
)

STANDS: Sequence[Rule[Seen]] = (
    Rule(Why.HELD, lambda k: k.held, _until_it_ends),
    # Redis has lost data: who knows more of it comes first.
    Rule(Why.NEWCOMER, lambda k: k.is_newcomer and k.others_may_know, _free_for(MODESTY)),
    Rule(Why.LAST_LIVES, lambda k: k.another_led_last and k.last_listens, _free_for(PATIENCE)),
    Rule(Why.LAST_UNSEEN, lambda k: k.another_led_last, _free_for(COURTESY)),
    Rule(Why.FROZEN, lambda k: k.was_frozen, _free_for(COURTESY)),
    Rule(Why.NOT_ALL_BACK, lambda k: k.led_until_now and k.silence < 0, _free_for(ALL_BACK)),
    Rule(Why.SILENCE, lambda k: k.led_until_now and k.silence >= 0, lambda k: SILENCE - k.silence),
    # It couldn't do a leader's work a short while ago, whoever else may.
    Rule(Why.RETREATS, lambda k: k.has_others, lambda k: min(k.retreats_until - k.now, k.ttl - k.free_for)),
)


def may_announce(itself: Itself) -> Verdict:
    """Whether a replica may say that it stands for election."""
    return _judge(ANNOUNCES, itself)


def may_look(itself: Itself) -> Verdict:
    """Whether a replica may look at the lease, to take it."""
    return _judge(LOOKS, itself)


def may_stand(seen: Seen) -> Verdict:
    """Whether a replica may take the lease.

    Raises:
        StoreError: the server doesn't say what a rule asks for.
    """
    return _judge(STANDS, seen)


def _judge(rules: Sequence[Rule[_K]], known: _K) -> Verdict:
    for rule in rules:
        if rule.applies(known):
            left = rule.left(known)
            if left > 0:
                return Verdict(rule.why, left)
    return Verdict(None)
