"""The faults of a run, from its seed. Pure.

Faults come at random moments, several at a time, but never two on one process, server or link: what is dead can't be
paused. A process may die while its link is cut. Their kinds come from a deck, so that a short run has each kind, too.
Where the leader's link becomes slow, it is often struck itself meanwhile: then it has something under way.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

__all__ = ["AS_IT_SENDS", "AS_IT_SENDS_PLAIN", "KINDS", "Fault", "kinds_for", "make_plan", "processes_of"]


@dataclass(frozen=True)
class Fault:
    """One fault. Times are in seconds, from the begin of the run.

    Attributes:
        at: when it begins.
        kind: one of `KINDS`.
        target: a process (`beat0`, `worker2`), one of its links (`beat0:ledger`), `ledger`, or `beats`. `leader`, in
            place of a process, is the beat that sends when the fault begins.
        seconds: how long it lasts; until the process starts again, where it dies.
        detail: what the kind needs to know: the direction of a one-way cut, the delay, the step of a clock.
    """

    at: float
    kind: str
    target: str
    seconds: float
    detail: str = ""

    def __str__(self) -> str:
        more = f" ({self.detail})" if self.detail else ""
        return f"{self.at:7.2f} s  {self.kind:<14} {self.target:<15} for {self.seconds:.2f} s{more}"


@dataclass(frozen=True)
class _Kind:
    """A kind of fault: what it strikes, for how long, and how many of the deck's cards it has."""

    strikes: str
    shortest: float
    longest: float
    cards: int = 1


#: The kinds. Leases are of 3 s here, of runs of 4 s: some faults outlast them and some don't.
KINDS = {
    "kill": _Kind("process", 0.2, 4.0, 4),
    "pause": _Kind("process", 0.3, 12.0, 4),
    "freeze": _Kind("link", 0.3, 7.0, 3),
    "cut": _Kind("link", 0.1, 7.0, 3),
    "one-way cut": _Kind("link", 0.3, 6.0, 3),
    "delay": _Kind("link", 2.0, 8.0, 3),
    "redis restart": _Kind("ledger", 0.1, 3.0, 1),
    "redis pause": _Kind("ledger", 0.3, 5.0, 1),
    "failover": _Kind("ledger", 1.0, 4.0, 2),
    "flush": _Kind("ledger", 0.0, 0.0, 1),
    "clock step": _Kind("beat", 3.0, 10.0, 2),
    "rolling deploy": _Kind("beats", 6.0, 6.0, 1),
}

#: Right after the broker was handed a message, and before the leader has heard that.
AS_IT_SENDS = "as it sends"
#: The same, with a message for a task that is no FencedTask.
AS_IT_SENDS_PLAIN = "as it sends for a plain task"

#: Mean and least time from one fault to the next, in seconds.
_MEAN_GAP, _LEAST_GAP = 3.4, 0.6
#: A process gets this long to find its feet before something else befalls it, in seconds.
_REST = 2.0
#: How often a leader is struck while its link is slow.
_BESIDES = 0.7
#: Delays and steps of clocks, in seconds.
_DELAYS = (0.02, 0.15, 0.4, 0.4, 0.9)
_STEPS = (-3600.0, -90.0, -5.0, -1.5, 1.5, 5.0, 90.0, 3600.0)


def processes_of(target: str, beats: Sequence[str]) -> tuple[str, ...]:
    """The processes, servers or links that a target is about."""
    return tuple(beats) if target == "beats" else (target,)


def make_plan(
    seed: int,
    seconds: float,
    *,
    beats: Sequence[str],
    workers: Sequence[str],
    kinds: Iterable[str],
    links: Sequence[str] = ("ledger", "broker"),
) -> tuple[Fault, ...]:
    """The faults of a run of so many seconds, in the order of their begin; the same for the same arguments.

    All of them are over at the end.
    """
    chance = random.Random(f"chaos {seed}")
    deck = _deck(chance, sorted(kinds))
    busy: dict[str, float] = {}
    faults: list[Fault] = []
    at = 1.0
    while True:
        at += _LEAST_GAP + chance.expovariate(1 / (_MEAN_GAP - _LEAST_GAP))
        name = next(deck)
        kind = KINDS[name]
        lasts = round(_duration(chance, kind), 2)
        target = _target(chance, kind.strikes, beats, workers, links)
        detail = _detail(chance, name, target)
        besides = chance.random() < _BESIDES, chance.choice(("kill", "pause")), chance.random()
        struck = processes_of(target, beats)
        # What is still busy with another fault is waited for, and so is its rest.
        begin = round(max([at, *(busy.get(process, 0.0) for process in struck)]), 2)
        if begin + lasts >= seconds:
            if at >= seconds:
                return tuple(sorted(faults, key=lambda fault: fault.at))
            continue
        for process in struck:
            busy[process] = begin + lasts + _REST
        faults.append(Fault(begin, name, target, lasts, detail))
        if name == "delay" and target.startswith("leader:") and besides[0]:
            then, also = round(begin + 0.2 + besides[2] * (lasts - 0.2), 2), KINDS[besides[1]]
            short = round(_duration(chance, also), 2)
            if then >= busy.get("leader", 0.0) and then + short < seconds:
                busy["leader"] = then + short + _REST
                faults.append(Fault(then, besides[1], "leader", short))


def _deck(chance: random.Random, kinds: Sequence[str]) -> Iterator[str]:
    while True:
        cards = [kind for kind in kinds for _ in range(KINDS[kind].cards)]
        chance.shuffle(cards)
        yield from cards


def _duration(chance: random.Random, kind: _Kind) -> float:
    # Short ones are more frequent, as in life.
    return kind.shortest + (kind.longest - kind.shortest) * chance.random() ** 1.6


def _target(
    chance: random.Random, strikes: str, beats: Sequence[str], workers: Sequence[str], links: Sequence[str]
) -> str:
    if strikes in ("ledger", "beats"):
        return strikes
    # Who leads counts as much as all others: most guarantees are about what becomes of its work.
    if strikes == "beat":
        return chance.choice((*beats, *(["leader"] * len(beats))))
    process = chance.choice((*beats, *workers, *(["leader"] * len((*beats, *workers)))))
    return process if strikes == "process" else f"{process}:{chance.choice(links)}"


def _detail(chance: random.Random, kind: str, target: str) -> str:
    if kind in ("kill", "pause") and target == "leader":
        return chance.choice(("", AS_IT_SENDS, AS_IT_SENDS_PLAIN, AS_IT_SENDS_PLAIN))
    if kind == "one-way cut":
        return chance.choice(("up", "down"))
    if kind == "delay":
        return f"{chance.choice(_DELAYS):g} s"
    if kind == "clock step":
        return f"{chance.choice(_STEPS):+g} s"
    return ""


def kinds_for(topology: str) -> tuple[str, ...]:
    """The kinds of faults that make sense over a topology (`standalone`, `sentinel`)."""
    left_out = {"sentinel": "redis restart", "standalone": "failover"}[topology]
    return tuple(kind for kind in KINDS if kind != left_out)
