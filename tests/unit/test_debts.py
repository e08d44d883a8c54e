"""What the ledger couldn't be told is told later, and a ledger that is away isn't asked for each message anew."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from celery_leaderbeat.debts import Debt, Debts
from celery_leaderbeat.errors import StoreUnavailable


class _Ledger:
    def __init__(self) -> None:
        self.away = False
        self.asked = 0
        self.told: list[str] = []

    def _ask(self) -> None:
        self.asked += 1
        if self.away:
            raise StoreUnavailable("Redis gave no answer")

    def give_back(self, epoch: int, batch: str, keys: Sequence[str], reason: str) -> None:
        self._ask()
        self.told += keys

    def confirm(self, epoch: int, batch: str, outcomes: Mapping[str, str]) -> None:
        self._ask()
        self.told += outcomes


def _debt(key: str, outcome: Any = "returned") -> Debt:
    return Debt(7, "batch", key, outcome, "why")


def test_a_ledger_that_answers_is_told_at_once() -> None:
    ledger: Any = _Ledger()
    debts = Debts(ledger)
    for key in "abc":
        debts.owe(_debt(key))
    assert (ledger.told, debts.open()) == (["a", "b", "c"], [])


def test_one_that_does_not_is_asked_once_however_many_messages_there_are() -> None:
    ledger: Any = _Ledger()
    ledger.away = True
    debts = Debts(ledger)
    for key in "abcdef":
        debts.owe(_debt(key))
    assert (ledger.asked, len(debts.open())) == (1, 6)
    with pytest.raises(StoreUnavailable):
        debts.settle()
    debts.owe(_debt("g"))
    assert ledger.asked == 2


def test_once_it_answers_it_is_told_all_and_then_each_at_once() -> None:
    ledger: Any = _Ledger()
    ledger.away = True
    debts = Debts(ledger)
    debts.owe(_debt("a"))
    debts.owe(_debt("b", "sent"))
    ledger.away = False
    debts.settle()
    assert (sorted(ledger.told), debts.open()) == (["a", "b"], [])
    debts.owe(_debt("c"))
    assert ledger.told[-1] == "c"
