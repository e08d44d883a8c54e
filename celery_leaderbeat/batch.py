"""Messages that are claimed together, and what has to be said about them in the end."""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime

from celery_leaderbeat.debts import Debt
from celery_leaderbeat.expiry import seconds_until
from celery_leaderbeat.message import Message, Outcome
from celery_leaderbeat.plan import Plan
from celery_leaderbeat.records import Claim
from celery_leaderbeat.term import Term

__all__ = ["Batch", "record_lifetime"]

#: Records are kept for at least this many periods of their entry.
_PERIODS = 3
_LONGEST_RETENTION = 400 * 86_400.0
#: A slot that no worker has begun counts as unfinished for an hour at most, in seconds.
_UNSTARTED = 3600.0


@dataclass
class Batch:
    """Messages of one term, claimed in one script under one identity."""

    term: Term
    plans: Mapping[str, Plan]
    messages: list[Message]
    id: str = field(default_factory=lambda: uuid.uuid4().hex)

    def claims(self, retention: float, now: datetime, earlier: Mapping[str, Sequence[str]]) -> list[Claim]:
        """What to claim.

        Parameters:
            retention: seconds for which records are kept at least.
            now: the time of the claim.
            earlier: entry -> tick keys of its slots that may be unfinished.
        """
        claims = []
        for message in self.messages:
            plan = self.plans[message.entry]
            policy = plan.policy
            expires_in = seconds_until(message.options.get("expires"), now)
            claims.append(
                Claim(
                    key=message.key,
                    entry=message.entry,
                    slot=message.slot,
                    fingerprint=plan.fingerprint,
                    task=message.task,
                    task_id=message.task_id,
                    prefer=message.prefer,
                    ttl=record_lifetime(plan, message.slot, retention),
                    attempt=message.stamp.attempt,
                    on_crash=policy.on_crash,
                    max_attempts=policy.max_attempts,
                    overlap=policy.overlap,
                    paced=policy.overlap == "queue" and policy.catch_up == "all",
                    request=message.request,
                    force=message.force,
                    unstarted=_UNSTARTED if expires_in is None else min(expires_in, _UNSTARTED),
                    earlier=tuple(earlier.get(message.entry, ())),
                )
            )
        return claims

    def debt(self, message: Message) -> Debt:
        """What the ledger has to be told of a message whose outcome is known."""
        outcome = message.outcome
        if outcome is None:
            raise ValueError(f"The outcome of {message.key} isn't known yet.")
        if outcome.kind == "sent":
            return Debt(self.term.epoch, self.id, message.key, "sent")
        if outcome.kind == "unknown" and message.prefer != "duplicate":
            return Debt(self.term.epoch, self.id, message.key, "unconfirmed", outcome.reason)
        return Debt(self.term.epoch, self.id, message.key, "returned", outcome.reason)

    def abandon(self, reason: str) -> None:
        """Take what nobody handles yet: it stays unsent."""
        for message in self.messages:
            if message.handling.take():
                message.settle(Outcome("unsent", reason))

    @property
    def under_way(self) -> bool:
        """Whether a message is with the publisher and its outcome isn't known."""
        return any(
            message.outcome is None and message.handling.taken and not message.settled
            for message in self.messages
        )

    def give_up(self, reason: str) -> None:
        """Keep what is under way from leaving, where that is still possible."""
        for message in self.messages:
            if message.outcome is None and not message.settled and message.sending.take():
                message.settle(Outcome("unsent", reason))

    def unsettled_messages(self) -> Iterator[Message]:
        """The messages whose outcome is known, and of which the ledger hasn't been told yet."""
        for message in self.messages:
            if message.outcome is not None and not message.settled:
                yield message

    def unsettled(self) -> Iterator[Debt]:
        """What the ledger hasn't been told yet, as far as it is known."""
        return map(self.debt, self.unsettled_messages())

    def unsent(self) -> Iterator[Message]:
        """The messages that are known to be unsent, and of which nobody has been told."""
        for message in self.unsettled_messages():
            if self.debt(message).outcome == "returned":
                yield message


def record_lifetime(plan: Plan, slot: datetime, retention: float) -> float:
    """For how many seconds the record of a slot is kept, at least for `retention`."""
    return min(max(_PERIODS * plan.period_of(slot).total_seconds(), retention), _LONGEST_RETENTION)
