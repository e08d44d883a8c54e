"""What goes wrong in one of the many short stories: each has its own selection of faults, and its own rates.

A story in which everything fails a little finds less than one in which few things fail a lot: what one fault would
need to be seen, another one covers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING

from tests.simulation.faults import Mischief, Publish

if TYPE_CHECKING:
    from tests.simulation.virtual import Process
    from tests.simulation.world import World

__all__ = ["DISASTERS", "KINDS", "Trouble"]

#: Faults that strike a process at a point of its way: kind -> the chance at each, at the rate of 1.
_STRIKES = {
    "beat killed at a point": 1 / 60,
    "beat frozen at a point": 1 / 40,
    "worker killed at a point": 1 / 20,
    "worker frozen at a point": 1 / 30,
}
#: Faults on the way to Redis and to the broker: kind -> the chance of each request or message, at the rate of 1.
_WAYS = {
    "slow request": 1 / 30,
    "slow answer": 1 / 30,
    "request unreachable": 1 / 60,
    "request comes late": 1 / 60,
    "answer lost": 1 / 30,
    "publish slow": 1 / 8,
    "publish unreachable": 1 / 8,
    "publish unknown": 1 / 8,
    "publish unknown, arrived": 1 / 8,
    "publish unknown, arrives late": 1 / 8,
}
#: Faults that come on their own time: kind -> seconds between two of them on average, at the rate of 1.
DISASTERS = {
    "somebody killed": 30.0,
    "somebody frozen": 30.0,
    "replica told to stop": 30.0,
    "cut off from Redis": 30.0,
    "Redis away": 50.0,
    "broker away": 50.0,
    "delivered again": 15.0,
    "order given": 20.0,
    "Redis emptied": 40.0,
}
#: Where Redis is emptied at a point of a process's way: the chance at each, at the rate of 1.
_EMPTIED_AT_A_POINT = 1 / 60
#: All kinds of faults.
KINDS = (*_STRIKES, *_WAYS, *DISASTERS, "Redis emptied at a point")

#: A story without these loses nothing that Redis knows.
_EMPTIED = ("Redis emptied", "Redis emptied at a point")
#: Faults beside which a leader is well all the time: it lives, isn't held up, and reaches Redis.
_HARMLESS = (
    "worker killed at a point",
    "worker frozen at a point",
    "publish unreachable",
    "delivered again",
)
_RATES = (0.5, 1.0, 3.0, 6.0)
#: Seconds after which a leader knows that nobody listens there.
_AT_ONCE = 0.001
_CHANCES = {**_STRIKES, **_WAYS, "Redis emptied at a point": _EMPTIED_AT_A_POINT}


class Trouble(Mischief):
    """A selection of faults, drawn from the world's seed; `happened` counts them.

    Parameters:
        leaders_are_well: Redis is emptied, and nothing else troubles the replicas that lead.
    """

    def __init__(self, world: World, leaders_are_well: bool = False) -> None:
        super().__init__(world)
        rng = self._rng
        if leaders_are_well:
            chosen = rng.sample(_HARMLESS, rng.choice((0, 1, 2, 3)))
            chosen += rng.choice((_EMPTIED, _EMPTIED[:1], _EMPTIED[1:]))
        else:
            few = rng.choice((2, 3, 4, 5, 8))
            chosen = rng.sample([kind for kind in KINDS if kind not in _EMPTIED], few)
            if rng.random() < 0.1:
                chosen += rng.choice((_EMPTIED[:1], _EMPTIED[1:]))
        self._leaders_are_well = leaders_are_well
        self.rates = {kind: rng.choice(_RATES) for kind in chosen}
        self.happened: Counter[str] = Counter()
        self._disasters: dict[str, Callable[[], None]] = {
            "somebody killed": self._somebody_dies,
            "somebody frozen": self._somebody_freezes,
            "replica told to stop": self._somebody_stops,
            "cut off from Redis": self._somebody_is_cut_off,
            "Redis away": self._redis_leaves,
            "broker away": self._broker_leaves,
            "delivered again": self._something_is_delivered_again,
            "order given": self._somebody_gives_an_order,
            "Redis emptied": self._redis_is_emptied,
        }

    def _strikes(self, kind: str) -> bool:
        """Whether a fault of this kind happens now."""
        rate = self.rates.get(kind)
        if rate is None or not self.active:
            return False
        if self._rng.random() < rate * _CHANCES[kind]:
            self.happened[kind] += 1
            return True
        return False

    def latency(self) -> float:
        return self._rng.choice((0.0004, 0.003, 0.05)) if self._rng.random() < 0.2 else 0.0

    def request_takes(self, timeout: float) -> float:
        return self._rng.uniform(0.2, 0.98) * timeout if self._strikes("slow request") else 0.0

    def answer_takes(self, timeout: float) -> float:
        return self._rng.uniform(0.2, 0.98) * timeout if self._strikes("slow answer") else 0.0

    def unreachable(self, timeout: float) -> float | None:
        process = self._hub.process
        if not self.active or process is None:
            return None
        if self._hub.now < max(self._cut_until.get(process.name, 0), self._cut_until.get("all", 0)):
            return self._rng.choice((0.001, timeout))
        return timeout if self._strikes("request unreachable") else None

    def comes_late(self) -> bool:
        return self._strikes("request comes late")

    def answer_is_lost(self) -> bool:
        return self._strikes("answer lost")

    def publish(self) -> Publish:
        for outcome in ("unreachable", "unknown", "unknown, arrived", "unknown, arrives late"):
            if self._strikes(f"publish {outcome}"):
                return outcome  # type: ignore[return-value]
        return ""

    def unreachable_takes(self, patience: float) -> float:
        # A leader that waits for its broker finds out too late that Redis is empty: another one leads.
        return _AT_ONCE if self._leaders_are_well else super().unreachable_takes(patience)

    def publish_takes(self, patience: float) -> float:
        return self._rng.uniform(0.1, 0.98) * patience if self._strikes("publish slow") else 0.0

    def point(self, process: Process, what: str) -> None:
        if self._strikes(f"{process.kind} killed at a point"):
            self._world.note(f"is killed {what}")
            self._world.kill(process)
        elif self._strikes(f"{process.kind} frozen at a point"):
            seconds = self._rng.choice((0.5, 9.0, 14.0, 20.0, 35.0))
            self._world.note(f"is frozen for {seconds:g} s {what}")
            self._hub.freeze(process, seconds)
        if self._strikes("Redis emptied at a point"):
            self._redis_is_emptied()

    def begin(self) -> None:
        for kind, disaster in self._disasters.items():
            if kind in self.rates:
                self._next(self._counted(kind, disaster), DISASTERS[kind] / self.rates[kind])

    def _counted(self, kind: str, disaster: Callable[[], None]) -> Callable[[], None]:
        def strike() -> None:
            self.happened[kind] += 1
            disaster()

        return strike

    def _somebody_stops(self) -> None:
        frozen = [
            replica
            for replica in self._world.replicas
            if replica.process.alive and replica.process.frozen_until > self._hub.now
        ]
        # Whoever tells a replica to stop as a rule has a reason.
        if frozen and self._rng.random() < 0.5:
            self._rng.choice(frozen).stop()
        else:
            super()._somebody_stops()

    def _something_is_delivered_again(self) -> None:
        self._world.broker.deliver_again()

    def _redis_is_emptied(self) -> None:
        self._world.empty_redis()
