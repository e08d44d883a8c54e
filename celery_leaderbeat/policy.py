"""Which slots of an entry are sent, which are missed, and why.

A policy has two parts that matter here. `catch_up` and `lookback` say how much of a backlog is sent;
`deadline` says how old a slot may get. `prefer` is carried along for the claim.

A slot is overdue when nobody led as it came due, or when a newer slot of its entry is due as well because
the leader fell behind. The rules, in this order:

1. A slot older than the deadline is missed.
2. `catch_up = "none"`: a slot that came due before this leader's term is missed, and of those that came due
   within the term only the newest counts. Slots that an earlier leader decided to send and gave back are
   exempt: they had been caught up already.
3. Of the slots that are left the newest `lookback` are sent, oldest first; the others are missed.

So the newest slot that came due in the term is always sent, unless it is older than the deadline.
"""

from __future__ import annotations

import difflib
import itertools
import math
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from celery_leaderbeat.errors import PolicyError

__all__ = [
    "PROMPT",
    "REASON_CATCH_UP_NONE",
    "REASON_DEADLINE",
    "REASON_LOOKBACK",
    "Miss",
    "Policy",
    "Send",
    "build_policy",
    "deadline_reason",
    "decide",
    "reason_to_skip",
    "validate_defaults",
]

#: A slot that came due at most this long (seconds) before the leader's term isn't overdue: an orderly
#: handover takes a fraction of a second and is no outage.
PROMPT = 1.0

REASON_CATCH_UP_NONE = "catch_up is none"
REASON_LOOKBACK = "older than lookback reaches"
#: The beginning of `deadline_reason`, which goes on with the deadline.
REASON_DEADLINE = "older than the deadline"

_CHOICES: dict[str, tuple[str, ...]] = {
    "prefer": ("missed", "duplicate"),
    "catch_up": ("latest", "all", "none"),
}
_KEYS = ("prefer", "catch_up", "lookback", "deadline")
_LOOKBACK = {"latest": 1, "all": 100, "none": 1}
_DEFAULTS = "leaderbeat_policy"


@dataclass(frozen=True)
class Policy:
    """What is done with the slots of an entry that can't be sent on time.

    Attributes:
        prefer: `"missed"` or `"duplicate"`: what a leader's death between claim and confirm costs.
        catch_up: `"latest"`, `"all"` or `"none"`: which overdue slots are sent.
        lookback: the most slots that are sent of a backlog.
        deadline: seconds after which a slot is missed, or None.
    """

    prefer: str = "missed"
    catch_up: str = "latest"
    lookback: int = 1
    deadline: float | None = None


@dataclass(frozen=True)
class Send:
    """This slot is to be sent."""

    slot: datetime


@dataclass(frozen=True)
class Miss:
    """A range of neighbouring slots that will never be sent, for one reason.

    Attributes:
        first: the oldest slot of the range.
        last: the newest slot of the range.
        count: how many slots the range has.
        reason: a short sentence.
        returned: those of them that an earlier leader had decided to send and gave back.
    """

    first: datetime
    last: datetime
    count: int
    reason: str
    returned: tuple[datetime, ...] = ()


def deadline_reason(deadline: float) -> str:
    """The reason for a slot older than `deadline` seconds."""
    return f"{REASON_DEADLINE} of {deadline:.15g} s"


def build_policy(
    entry: str,
    own: Mapping[str, Any] | None,
    defaults: Mapping[str, Any],
    cron_deadline: float | None = None,
) -> Policy:
    """The policy of an entry.

    Parameters:
        entry: the entry's name, for messages.
        own: what the entry says, `options["leaderbeat"]`.
        defaults: the `leaderbeat_policy` setting.
        cron_deadline: `beat_cron_starting_deadline` in seconds where the entry is a crontab; the deadline
            where neither `own` nor `defaults` has one.

    A default `lookback` belongs to the default `catch_up`: an entry with another `catch_up` has its own.

    Raises:
        PolicyError: an unknown key, an impossible value or an impossible mix; names the entry or setting, the
            key, the value and what is accepted.
    """
    validate_defaults(defaults)
    where = f"entry {entry!r}: options['leaderbeat']"
    mine = {} if own is None else _checked(where, own)
    merged = {**defaults, **mine}
    catch_up = merged.get("catch_up", "latest")
    if "lookback" in mine:
        _check_mix(where, catch_up, mine["lookback"])
    elif catch_up != defaults.get("catch_up", "latest"):
        merged.pop("lookback", None)
    if "deadline" not in merged and cron_deadline is not None:
        _check_deadline(f"entry {entry!r}: beat_cron_starting_deadline", cron_deadline)
        merged["deadline"] = cron_deadline
    return Policy(
        prefer=merged.get("prefer", "missed"),
        catch_up=catch_up,
        lookback=merged.get("lookback", _LOOKBACK[catch_up]),
        deadline=merged.get("deadline"),
    )


def validate_defaults(defaults: Mapping[str, Any]) -> None:
    """Check the `leaderbeat_policy` setting.

    Raises:
        PolicyError: as `build_policy`.
    """
    checked = _checked(_DEFAULTS, defaults)
    if "lookback" in checked:
        _check_mix(_DEFAULTS, checked.get("catch_up", "latest"), checked["lookback"])


def reason_to_skip(policy: Policy, newest: datetime, led_since: datetime, now: datetime) -> str:
    """Why slots up to `newest` are missed where `lookback` newer ones are due."""
    if policy.deadline is not None and (now - newest).total_seconds() > policy.deadline:
        return deadline_reason(policy.deadline)
    if policy.catch_up == "none" and newest < led_since - timedelta(seconds=PROMPT):
        return REASON_CATCH_UP_NONE
    return REASON_LOOKBACK


def decide(
    policy: Policy,
    due: Iterable[datetime],
    *,
    led_since: datetime,
    now: datetime,
    returned: Sequence[datetime] = (),
) -> list[Send | Miss]:
    """What is done with the due slots of one entry, ordered by time; each slot is in exactly one decision.

    Reads `due` once, in constant time per slot, and remembers only what may still be sent.

    Parameters:
        policy: the entry's policy.
        due: the slots after the last decided one up to `now`, ascending, aware.
        led_since: the begin of this leader's term.
        now: the time by which slots are due.
        returned: slots decided to be sent before, and known to be unsent; older than all in `due`.
    """
    verdicts = _Verdicts(policy.lookback)
    for slot, came_back, reason in _judged(policy, due, led_since, now, returned):
        if reason is None:
            verdicts.may_send(slot, came_back)
        else:
            verdicts.missed(_Range.of(slot, came_back, reason))
    return verdicts.decisions()


def _judged(
    policy: Policy,
    due: Iterable[datetime],
    led_since: datetime,
    now: datetime,
    returned: Sequence[datetime],
) -> Iterator[tuple[datetime, bool, str | None]]:
    """Each slot, whether it came back, and the reason by which it is missed whatever the lookback."""
    too_old = None if policy.deadline is None else deadline_reason(policy.deadline)
    none = policy.catch_up == "none"
    prompt_since = led_since - timedelta(seconds=PROMPT)
    marked = itertools.chain(((slot, True) for slot in sorted(returned)), ((slot, False) for slot in due))
    for (slot, came_back), is_newest in _with_last(marked):
        if policy.deadline is not None and (now - slot).total_seconds() > policy.deadline:
            yield slot, came_back, too_old
        elif none and not came_back and (slot < prompt_since or not is_newest):
            yield slot, came_back, REASON_CATCH_UP_NONE
        else:
            yield slot, came_back, None


def _with_last(items: Iterable[tuple[datetime, bool]]) -> Iterator[tuple[tuple[datetime, bool], bool]]:
    iterator = iter(items)
    held = next(iterator, None)
    while held is not None:
        following = next(iterator, None)
        yield held, following is None
        held = following


@dataclass
class _Range:
    """A `Miss` that still grows, or, without a reason, one slot that may still be sent."""

    first: datetime
    last: datetime
    count: int
    reason: str | None
    returned: list[datetime]

    @classmethod
    def of(cls, slot: datetime, came_back: bool, reason: str | None) -> _Range:
        return cls(slot, slot, 1, reason, [slot] if came_back else [])

    def decision(self) -> Send | Miss:
        if self.reason is None:
            return Send(self.first)
        return Miss(self.first, self.last, self.count, self.reason, tuple(self.returned))


class _Verdicts:
    """The decisions so far: those that are final, then a window of the newest slots that may be sent.

    The window begins with such a slot and holds at most `lookback` of them, and between them the ranges that
    are missed in any case. One more slot at its end makes the one at its beginning a missed one.
    """

    def __init__(self, lookback: int) -> None:
        self._lookback = lookback
        self._final: list[_Range] = []
        self._window: deque[_Range] = deque()
        self._candidates = 0

    def may_send(self, slot: datetime, came_back: bool) -> None:
        self._window.append(_Range.of(slot, came_back, None))
        self._candidates += 1
        if self._candidates > self._lookback:
            self._give_up_oldest()

    def missed(self, miss: _Range) -> None:
        _append(self._window if self._window else self._final, miss)

    def decisions(self) -> list[Send | Miss]:
        return [item.decision() for item in itertools.chain(self._final, self._window)]

    def _give_up_oldest(self) -> None:
        oldest = self._window.popleft()
        oldest.reason = REASON_LOOKBACK
        self._candidates -= 1
        _append(self._final, oldest)
        while self._window and self._window[0].reason is not None:
            _append(self._final, self._window.popleft())


def _append(ranges: list[_Range] | deque[_Range], item: _Range) -> None:
    """Add a missed range, as part of the one before it where the reason is the same."""
    if ranges and ranges[-1].reason == item.reason:
        before = ranges[-1]
        before.last = item.last
        before.count += item.count
        before.returned.extend(item.returned)
    else:
        ranges.append(item)


def _checked(where: str, policy: Any) -> dict[str, Any]:
    if not isinstance(policy, Mapping):
        raise PolicyError(f"{where} is {policy!r}: expected a mapping with the keys {', '.join(_KEYS)}")
    for key, value in policy.items():
        if key not in _KEYS:
            raise PolicyError(
                f"{where} has the unknown key {key!r} (value {value!r}){_nearest(key, _KEYS)};"
                f" accepted are {', '.join(_KEYS)}"
            )
        if key in _CHOICES:
            _check_choice(where, key, value)
        elif key == "lookback":
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise PolicyError(f"{where}: lookback is {value!r}; accepted is a number of slots, 1 or more")
        elif value is not None:
            _check_deadline(f"{where}: deadline", value)
    return dict(policy)


def _check_choice(where: str, key: str, value: Any) -> None:
    choices = _CHOICES[key]
    if not isinstance(value, str) or value not in choices:
        accepted = ", ".join(map(repr, choices))
        raise PolicyError(f"{where}: {key} is {value!r}{_nearest(value, choices)}; accepted are {accepted}")


def _check_deadline(what: str, value: Any) -> None:
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not number or not math.isfinite(value) or value <= 0:
        raise PolicyError(f"{what} is {value!r}; accepted is a number of seconds above 0, or None")


def _check_mix(where: str, catch_up: str, lookback: int) -> None:
    if catch_up == "none":
        raise PolicyError(
            f"{where}: lookback is {lookback!r}, but catch_up is 'none', which catches nothing up;"
            " lookback is accepted with catch_up 'latest' or 'all'"
        )


def _nearest(value: Any, accepted: Collection[str]) -> str:
    found = difflib.get_close_matches(str(value), accepted, n=1, cutoff=0.4)
    return f", did you mean {found[0]!r}?" if found else ""
