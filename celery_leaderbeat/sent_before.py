"""What this process has sent lately: where Redis has gone back to a time before that, it isn't sent again."""

from __future__ import annotations

import logging

from celery_leaderbeat.message import Message, Outcome
from celery_leaderbeat.records import SlotRecord

__all__ = ["SentBefore"]

logger = logging.getLogger(__name__)

#: So many messages are remembered.
_MOST = 10_000


class SentBefore:
    """The outcomes of the latest messages that may have reached the broker.

    After a failover to a replica that lagged, a slot may be recorded as claimed or given back that was sent
    since.
    """

    def __init__(self, most: int = _MOST) -> None:
        self._most = most
        self._outcomes: dict[str, tuple[int, int, Outcome]] = {}

    def note(self, message: Message, outcome: Outcome) -> None:
        """The message has this outcome. One that is to be sent again isn't remembered."""
        if outcome.kind == "sent" or (outcome.kind == "unknown" and message.prefer != "duplicate"):
            self._outcomes[message.key] = (message.stamp.attempt, message.stamp.epoch, outcome)
            if len(self._outcomes) > self._most:
                del self._outcomes[next(iter(self._outcomes))]

    def known_end(self, record: SlotRecord) -> str:
        """What became of the message of this claim, as the ledger is told of it; empty if it isn't known."""
        attempt, epoch, outcome = self._outcomes.get(record.key, (0, 0, None))
        if outcome is None or (attempt, epoch) != (record.attempt, record.epoch):
            return ""
        _say_lost(record.key)
        return "sent" if outcome.kind == "sent" else "unconfirmed"

    def settles(self, message: Message) -> bool:
        """Whether the message has an outcome already, which is then set, and isn't to be published.

        What somebody has asked for is published all the same. So is, under a newer epoch, what prefers a
        duplicate: workers may have refused the older message, since another leader had claimed the slot meanwhile.
        What prefers to be missed is then in doubt.
        """
        attempt, epoch, outcome = self._outcomes.get(message.key, (0, 0, None))
        if outcome is None or attempt != message.stamp.attempt or message.request:
            return False
        if epoch != message.stamp.epoch:
            if message.prefer == "duplicate":
                return False
            outcome = Outcome("unknown", f"it was sent under epoch {epoch}, and Redis has lost that since")
        if not message.handling.take():
            return False
        message.settle(outcome)
        _say_lost(message.key)
        return True


def _say_lost(key: str) -> None:
    logger.warning(
        "Slot %s was sent before, and Redis has lost that: it isn't sent again. Another leader wouldn't know; "
        "leaderbeat_min_replicas, or a Redis that syncs each write to its disk, keeps such a loss from mattering.",
        key,
        extra={"action": "sent_before", "tick_key": key},
    )
