"""What Redis has to be told about claims and couldn't be, because it was away."""

from __future__ import annotations

import logging
from collections import deque
from dataclasses import dataclass
from typing import Literal

from celery_leaderbeat.errors import StoreError
from celery_leaderbeat.ledger import Ledger

__all__ = ["Debt", "Debts"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Debt:
    """One claim's end: given back, sent, or unconfirmed. Telling it twice does no harm."""

    epoch: int
    key: str
    outcome: Literal["returned", "sent", "unconfirmed"]
    reason: str = ""

    def tell(self, ledger: Ledger) -> None:
        """Tell the ledger.

        Raises:
            StoreError: it couldn't be told.
        """
        if self.outcome == "returned":
            ledger.give_back(self.epoch, [self.key], self.reason)
        else:
            ledger.confirm(self.epoch, {self.key: self.outcome})


class Debts:
    """Debts in the order in which they arose. Adding is safe from any thread."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._open: deque[Debt] = deque()

    def open(self) -> list[Debt]:
        """What is open now."""
        return list(self._open)

    def add(self, debt: Debt) -> None:
        """Note a debt, to be told later."""
        self._open.append(debt)

    def owe(self, debt: Debt) -> None:
        """Tell the ledger now, or as soon as it answers."""
        self.add(debt)
        try:
            self.settle()
        except StoreError as exc:
            logger.debug("To be told later: %s: %s", debt, exc)

    def settle(self) -> None:
        """Tell the ledger all that is open.

        Raises:
            StoreError: it still doesn't answer; the rest stays open.
        """
        while self._open:
            self._open[0].tell(self._ledger)
            self._open.popleft()
