"""What Redis has to be told about claims, and couldn't be because it was away."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from celery_leaderbeat.errors import StoreError
from celery_leaderbeat.ledger import Ledger

__all__ = ["Debt", "Debts", "tell"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Debt:
    """One claim's end: given back, sent, or unconfirmed. Telling it twice does no harm."""

    epoch: int
    batch: str
    key: str
    outcome: Literal["returned", "sent", "unconfirmed"]
    reason: str = ""


class Debts:
    """Debts in the order in which they arose. Adding is safe from any thread."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._open: deque[Debt] = deque()
        self._is_away = False

    def open(self) -> list[Debt]:
        """What is open now."""
        return list(self._open)

    def add(self, debt: Debt) -> None:
        """Note a debt, to be told later."""
        self._open.append(debt)

    def owe(self, debt: Debt) -> None:
        """Tell the ledger now, or as soon as it answers."""
        self.add(debt)
        self.try_to_settle()

    def try_to_settle(self) -> None:
        """Tell the ledger all that is open, if it answers; not asked again until `settle` has seen that it does."""
        if self._is_away:
            # Each of many messages would wait for it as long.
            return
        try:
            self.settle()
        except StoreError as exc:
            logger.debug("To be told later: %s: %s", self.open(), exc, extra={"action": "told_later"})

    def settle(self, ledger: Ledger | None = None) -> None:
        """Tell the ledger all that is open, over `ledger` if it is to be another connection.

        Raises:
            StoreError: it still doesn't answer; what it wasn't told stays open.
        """
        open_debts = self.open()
        if open_debts:
            # Until it has answered.
            self._is_away = True
            tell(ledger or self._ledger, open_debts)
            for debt in open_debts:
                self._open.remove(debt)
        self._is_away = False


def tell(ledger: Ledger, debts: Iterable[Debt]) -> None:
    """Tell the ledger, in as few requests as there are claims' batches and reasons.

    Raises:
        StoreError: not all could be told.
    """
    confirmed: dict[tuple[int, str], dict[str, str]] = {}
    returned: dict[tuple[int, str, str], list[str]] = {}
    for debt in debts:
        if debt.outcome == "returned":
            returned.setdefault((debt.epoch, debt.batch, debt.reason), []).append(debt.key)
        else:
            confirmed.setdefault((debt.epoch, debt.batch), {})[debt.key] = debt.outcome
    for (epoch, batch, reason), keys in returned.items():
        ledger.give_back(epoch, batch, keys, reason)
    for (epoch, batch), outcomes in confirmed.items():
        ledger.confirm(epoch, batch, outcomes)
