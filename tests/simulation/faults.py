"""What can go wrong, and how likely it is. `Faults` is a world without any; `Mischief` has all of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from datetime import datetime, timedelta, timezone
from typing import TYPE_CHECKING, Literal

from celery_leaderbeat.orders import Orders

if TYPE_CHECKING:
    from tests.simulation.virtual import Process
    from tests.simulation.world import World

__all__ = ["Faults", "Mischief"]

Publish = Literal["", "unreachable", "unknown", "unknown, arrived", "unknown, arrives late"]


class Faults:
    """A world in which all goes well.

    Attributes:
        counts_listeners: the server says how many listen for wake-ups; otherwise it says that nobody does.
    """

    counts_listeners = False

    def latency(self) -> float:
        """Seconds that one way to Redis takes."""
        return 0.0

    def request_takes(self, timeout: float) -> float:
        """Seconds that a request takes besides, less than `timeout`."""
        return 0.0

    def answer_takes(self, timeout: float) -> float:
        """Seconds that an answer takes besides, less than `timeout`."""
        return 0.0

    def unreachable(self, timeout: float) -> float | None:
        """None where Redis is in reach; else the seconds after which that is known."""
        return None

    def subscription(self, process: Process) -> int:
        """The number of the subscription of a process, which lives; 0 while the server doesn't show it."""
        return 1

    def comes_late(self) -> bool:
        """Whether a request arrives long after its caller gave up."""
        return False

    def answer_is_lost(self) -> bool:
        """Whether the answer to a request that was served doesn't arrive."""
        return False

    def publish(self) -> Publish:
        """What happens to a leader's message on its way to the broker."""
        return ""

    def unreachable_takes(self, patience: float) -> float:
        """Seconds until a leader knows that it doesn't reach the broker, less than `patience`."""
        return 0.001

    def publish_takes(self, patience: float) -> float:
        """Seconds that a message takes on its way to the broker, less than `patience`."""
        return 0.0

    def point(self, process: Process, what: str) -> None:
        """Kill or freeze the process at this point, or don't."""

    def begin(self) -> None:
        """From now on, things fail on their own."""

    def end(self) -> None:
        """From now on, nothing fails any more."""


#: Chances at each point: to be killed, to be frozen.
_AT_A_POINT: Mapping[str, tuple[float, float]] = {"beat": (1 / 400, 1 / 500), "worker": (1 / 250, 1 / 700)}


class Mischief(Faults):
    """Everything fails sometimes, until `active` is False."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._hub = world.hub
        self._rng = world.rng
        self._cut_until: dict[str, int] = {}
        self.active = True

    def latency(self) -> float:
        # Most answers take no time worth a turn of the others.
        if self._rng.random() < 0.6:
            return 0.0
        return self._rng.choice((0.0004, 0.001, 0.003, 0.01, 0.05))

    def unreachable(self, timeout: float) -> float | None:
        process = self._hub.process
        if not self.active or process is None:
            return None
        if self._hub.now < max(self._cut_until.get(process.name, 0), self._cut_until.get("all", 0)):
            return self._rng.choice((0.001, timeout))
        return timeout if self._rng.random() < 1 / 700 else None

    def comes_late(self) -> bool:
        return self.active and self._rng.random() < 1 / 1500

    def answer_is_lost(self) -> bool:
        return self.active and self._rng.random() < 1 / 400

    def publish(self) -> Publish:
        if not self.active:
            return ""
        chance = self._rng.random()
        if chance > 0.04:
            return ""
        return self._rng.choice(("unreachable", "unknown", "unknown, arrived", "unknown, arrives late"))

    def unreachable_takes(self, patience: float) -> float:
        return self._rng.choice((0.001, patience / 2))

    def point(self, process: Process, what: str) -> None:
        if not self.active:
            return
        killed, frozen = _AT_A_POINT[process.kind]
        chance = self._rng.random()
        if chance < killed:
            self._world.note(f"is killed {what}")
            self._world.kill(process)
        elif chance < killed + frozen:
            seconds = self._rng.choice((0.5, 4.0, 14.0, 20.0, 35.0, 70.0))
            self._world.note(f"is frozen for {seconds:g} s {what}")
            self._hub.freeze(process, seconds)

    def begin(self) -> None:
        """Let disasters happen from now on, on their own time."""
        self._next(self._broker_leaves, 240.0)
        self._next(self._redis_leaves, 400.0)
        self._next(self._somebody_is_cut_off, 90.0)
        self._next(self._somebody_stops, 150.0)
        self._next(self._somebody_dies, 120.0)
        self._next(self._somebody_freezes, 120.0)
        self._next(self._somebody_gives_an_order, 60.0)

    def end(self) -> None:
        self.active = False
        self._cut_until.clear()

    def _next(self, disaster: object, mean: float) -> None:
        def strike() -> None:
            if self.active:
                disaster()  # type: ignore[operator]
                self._next(disaster, mean)

        self._hub.after(self._rng.expovariate(1 / mean), strike)

    def _broker_leaves(self) -> None:
        seconds = self._rng.choice((1.0, 8.0, 30.0))
        self._world.note(f"the broker is away for {seconds:g} s")
        self._world.broker.leave(seconds)

    def _redis_leaves(self) -> None:
        self._cut("all", self._rng.choice((2.0, 10.0, 40.0)))

    def _somebody_is_cut_off(self) -> None:
        victim = self._victim()
        if victim is not None:
            self._cut(victim.name, self._rng.choice((3.0, 12.0, 45.0)))

    def _cut(self, who: str, seconds: float) -> None:
        self._world.note(f"Redis is out of reach for {who} for {seconds:g} s")
        self._cut_until[who] = self._hub.now + round(seconds * 1e6)

    def _somebody_stops(self) -> None:
        replicas = [replica for replica in self._world.replicas if replica.process.alive]
        if replicas:
            self._rng.choice(replicas).stop()

    def _somebody_dies(self) -> None:
        victim = self._victim()
        if victim is not None:
            self._world.note(f"{victim} is killed")
            self._world.kill(victim)

    def _somebody_freezes(self) -> None:
        victim = self._victim()
        if victim is not None:
            seconds = self._rng.choice((5.0, 18.0, 40.0, 100.0))
            self._world.note(f"{victim} is frozen for {seconds:g} s")
            self._hub.freeze(victim, seconds)

    def _somebody_gives_an_order(self) -> None:
        """Pause an entry for a while, run it now, or send again what wasn't done."""
        orders = Orders(self._world.ledger(), "somebody@somewhere")
        entry = self._rng.choice(list(self._world.schedule))
        now = datetime.fromtimestamp(self._hub.now / 1e6, timezone.utc)
        what = self._rng.choice(("pause", "resume", "run", "run", "backfill", "backfill"))
        self._world.note(f"somebody asks for {entry}: {what}")
        if what == "pause":
            orders.pause(entry, now + timedelta(seconds=self._rng.uniform(10, 200)), "a while")
        elif what == "resume":
            orders.resume(entry, catch_up=self._rng.random() < 0.5)
        elif what == "run":
            orders.run_now(entry)
        else:
            orders.backfill(entry, now - timedelta(seconds=self._rng.uniform(60, 900)), now)

    def _victim(self) -> Process | None:
        alive = [process for process in self._world.processes() if process.alive]
        return self._rng.choice(alive) if alive else None


#: Key -> its TTL in ms, and its value.
Copy = Mapping[bytes, tuple[int, bytes]]


def copy_data(world: World) -> Copy:
    """All that the world's server holds."""
    world.sync()
    client = world.server.client(decode=False)
    return {key: (client.pttl(key), client.dump(key)) for key in client.scan_iter()}


def go_back(world: World, copy: Copy) -> None:
    """Let the world's server hold this, and nothing else."""
    world.note(f"Redis has lost its data but for {len(copy)} keys")
    world.sync()
    client = world.server.client(decode=False)
    client.flushdb()
    for key, (ttl, value) in copy.items():
        client.restore(key, max(ttl, 0), value)
    world.journal.went_back((client.get(world.ledger().store.keys.lease) or b"").decode())


class Losses(Mischief):
    """Redis loses data: all of it, or what came since a moment ago, as in a failover to a replica that lagged."""

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self._copies: list[Copy] = []
        self.lost = 0

    def begin(self) -> None:
        """Let data be lost from now on, and somebody die or be cut off now and then."""
        self._next(self._is_copied, 5.0)
        self._next(self._data_is_lost, 60.0)
        self._next(self._somebody_is_cut_off, 90.0)
        self._next(self._redis_leaves, 200.0)
        self._next(self._somebody_dies, 240.0)
        self._next(self._somebody_freezes, 240.0)

    def point(self, process: Process, what: str) -> None:
        """Nobody dies at a point of its own."""

    def publish(self) -> Publish:
        return ""

    def _is_copied(self) -> None:
        self._copies = [*self._copies[-1:], copy_data(self._world)]

    def _data_is_lost(self) -> None:
        go_back(self._world, self._rng.choice([{}, *self._copies]))
        self.lost += 1


class Replaced(Mischief):
    """A replica is cut off, and its subscription with it; others that may replace it die as Redis loses all."""

    counts_listeners = True

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self._cuts: Counter[str] = Counter()
        self.lost = 0

    def begin(self) -> None:
        """Let that happen again and again from now on."""
        self._next(self._one_is_cut_off, 25.0)

    def point(self, process: Process, what: str) -> None:
        """Nobody dies at a point of its own."""

    def publish(self) -> Publish:
        return ""

    def unreachable(self, timeout: float) -> float | None:
        # Who is slow just then can't object, and nobody can tell that from silence.
        process = self._hub.process
        is_cut = process is not None and self._hub.now < self._cut_until.get(process.name, 0)
        return self._rng.choice((0.001, timeout)) if is_cut else None

    def subscription(self, process: Process) -> int:
        is_cut = self._hub.now < self._cut_until.get(process.name, 0)
        return 0 if is_cut else 1 + self._cuts[process.name]

    def _one_is_cut_off(self) -> None:
        living = [replica for replica in self._world.replicas if replica.process.alive]
        if len(living) < 2:
            return
        victim, seconds = self._rng.choice(living), self._rng.uniform(2.0, 9.0)
        self._cuts[victim.name] += 1
        self._cut(victim.name, seconds)
        self._hub.after(seconds - self._rng.uniform(0.0, 0.8), lambda: self._all_is_lost(victim.name))

    def _all_is_lost(self, victim: str) -> None:
        if not self.active:
            return
        for replica in self._world.replicas:
            if replica.name != victim and self._rng.random() < 0.8:
                self._world.note(f"{replica.name} dies")
                self._world.kill(replica.process)
        go_back(self._world, {})
        self.lost += 1


class LostAsATermBegins(Faults):
    """A leader is frozen over what it has claimed, and all data are lost right after another was elected.

    Attributes:
        lost: how often.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self._frozen_at: int | None = None
        self._active = False
        self.lost = 0

    def latency(self) -> float:
        return self._world.rng.choice((0.0, 0.002, 0.01))

    def begin(self) -> None:
        self._active = True

    def end(self) -> None:
        self._active = False

    def point(self, process: Process, what: str) -> None:
        world = self._world
        if not self._active:
            return
        if self._frozen_at is None:
            if what.startswith("before the publish") and world.rng.random() < 1 / 40:
                self._frozen_at = world.hub.now
                world.note(f"is frozen {what}")
                # For longer than its lease lasts.
                world.hub.freeze(process, world.rng.uniform(16.0, 30.0))
        elif world.journal.elected_at > self._frozen_at:
            self._frozen_at = None
            world.hub.after(world.rng.uniform(0.0, 0.15), self._all_is_lost)

    def _all_is_lost(self) -> None:
        go_back(self._world, {})
        self.lost += 1


class LostAsItStops(Faults):
    """Every half a minute the broker leaves, Redis is emptied soon after, and then its leader is told to stop.

    Attributes:
        lost: how often.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self._active = False
        self._leader: Process | None = None
        self._left: Copy = {}
        self.lost = 0

    def point(self, process: Process, what: str) -> None:
        if what.startswith("before the publish"):
            self._leader = process

    def latency(self) -> float:
        return self._world.rng.choice((0.0, 0.002, 0.01))

    def unreachable_takes(self, patience: float) -> float:
        return self._world.rng.choice((0.0, 0.05, 0.3))

    def begin(self) -> None:
        self._active = True
        self._next()

    def end(self) -> None:
        self._active = False

    def _next(self) -> None:
        self._world.hub.after(self._world.rng.uniform(20.0, 40.0), self._strike)

    def _strike(self) -> None:
        if not self._active:
            return
        world = self._world
        leader = next((each for each in world.replicas if each.process is self._leader), None)
        if leader is not None and leader.process.alive:
            self._spoil_publishes()
            at = world.rng.uniform(0.0, 1.5)
            self._lose_at(at)
            world.hub.after(at + world.rng.choice((0.0, 0.01, 0.3, 0.6)), leader.stop)
        self._next()

    def _spoil_publishes(self) -> None:
        self._world.broker.leave(self._world.rng.uniform(0.5, 4.0))

    def _lose_at(self, at: float) -> None:
        self._world.hub.after(at, self._is_lost)

    def _is_lost(self) -> None:
        go_back(self._world, self._left)
        self.lost += 1


class GoesBackAsItStops(LostAsItStops):
    """Redis loses no more than the latest moments (a replica that lagged has taken over), and then its leader is told to stop.

    The broker stays: of a slot that was given back, and sent since, only its leader would know.
    """

    def _spoil_publishes(self) -> None:
        pass

    def _lose_at(self, at: float) -> None:
        self._world.hub.after(max(at - self._world.rng.uniform(0.1, 1.0), 0.0), self._is_copied)
        super()._lose_at(at)

    def _is_copied(self) -> None:
        self._left = copy_data(self._world)


class GoesBackOnce(Faults):
    """Redis goes back, after a confirmation, to what it held before that: a replica that lagged has taken over."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._copy: Copy | None = None
        self.went_back = False

    def point(self, process: Process, what: str) -> None:
        if what == "before confirm" and self._copy is None:
            self._copy = copy_data(self._world)
        elif what == "after confirm" and self._copy is not None and not self.went_back:
            self.went_back = True
            go_back(self._world, self._copy)
