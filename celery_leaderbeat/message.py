"""A slot's message: what is published, built from the entry, and what became of it."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Literal

from celery.beat import BeatLazyFunc

from celery_leaderbeat.plan import POLICY_OPTION, Plan
from celery_leaderbeat.tick import Stamp, task_id, tick_key

__all__ = ["Message", "Outcome", "build_message"]

#: Options of an entry that this package sets itself: a publish is tried once, and the slot names the task.
_OURS = (POLICY_OPTION, "producer", "retry", "retry_policy", "task_id")


@dataclass(frozen=True)
class Outcome:
    """What became of a message, and why; the kinds are those of `publisher`."""

    kind: Literal["sent", "unreachable", "blocked", "unsent", "unknown", "impossible"]
    reason: str = ""


class _Right:
    """A right that only the first who asks for it gets; without a lock, since a signal handler may ask."""

    def __init__(self) -> None:
        self._token: deque[None] = deque([None])

    def take(self) -> bool:
        """Take it; True for the first, False for all others."""
        try:
            self._token.pop()
        except IndexError:
            return False
        return True

    @property
    def taken(self) -> bool:
        """Whether somebody has it."""
        return not self._token


@dataclass
class Message:
    """One slot's message, ready to be published.

    Attributes:
        handling: the right to decide about the message: to publish it, or to give its slot back.
        sending: the right to let its bytes leave. Whoever gave up on the publishing thread takes it, and then
            knows that the message stays unsent; or can't, and then the outcome is unknown.
        request: the id of the request that asked for the slot, empty if it is simply due.
        force: send it, whatever became of it before.
        held: its slot couldn't be claimed now, and nothing is decided about it.
        settled: the ledger has been told, or will be.
    """

    entry: str
    slot: datetime
    stamp: Stamp
    task: str
    task_id: str
    prefer: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    options: dict[str, Any]
    request: str = ""
    force: bool = False
    held: bool = False
    settled: bool = False
    handling: _Right = field(default_factory=_Right)
    sending: _Right = field(default_factory=_Right)
    _outcomes: dict[str, Outcome] = field(default_factory=dict)

    @property
    def outcome(self) -> Outcome | None:
        """What became of it, None until that is known."""
        return self._outcomes.get("first")

    def settle(self, outcome: Outcome) -> bool:
        """Say what became of it. The first to say so is believed; whether that is this outcome.

        The publishing thread and who gave up on it may both have something to say, at the same moment.
        """
        # One step of the interpreter, without a lock, since a signal handler may settle, too.
        return self._outcomes.setdefault("first", outcome) is outcome

    @property
    def key(self) -> str:
        """The tick key of the slot."""
        return self.stamp.key


def build_message(
    plan: Plan,
    slot: datetime,
    epoch: int,
    prefix: str,
    attempt: int = 1,
    request: str = "",
    force: bool = False,
) -> Message:
    """The message for a slot under an epoch. The entry's own dicts are copied, not touched.

    Raises whatever the entry's lazy arguments raise.
    """
    key = tick_key(plan.name, slot)
    stamp = Stamp(key=key, entry=plan.name, slot=slot, epoch=epoch, attempt=attempt)
    entry = plan.entry
    options = _plain_copy(plan.options)
    for name in _OURS:
        options.pop(name, None)
    options["headers"] = {**(options.get("headers") or {}), "celery_beat_task": True, **stamp.headers()}
    return Message(
        entry=plan.name,
        slot=slot,
        stamp=stamp,
        task=entry.task,
        task_id=task_id(prefix, key, attempt),
        prefer=plan.policy.prefer,
        args=tuple(_evaluated(value) for value in entry.args or ()),
        kwargs={name: _evaluated(value) for name, value in (entry.kwargs or {}).items()},
        options=options,
        request=request,
        force=force,
    )


def _evaluated(value: Any) -> Any:
    return value() if isinstance(value, BeatLazyFunc) else value


def _plain_copy(value: Any) -> Any:
    """A copy of dicts, lists and tuples all the way down; what they hold is shared.

    An entry's options may hold queues and exchanges, which are not to be copied, and dicts that Celery writes
    to, which are.
    """
    if isinstance(value, Mapping):
        return {key: _plain_copy(item) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_plain_copy(item) for item in value)
    return copy.copy(value) if isinstance(value, set) else value
