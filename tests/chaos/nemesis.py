"""Does the faults of a plan, each in its time, and ends them."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from tests.chaos.fleet import Fleet
from tests.chaos.ledgers import Ledger
from tests.chaos.plan import AS_IT_SENDS, AS_IT_SENDS_PLAIN, Fault, processes_of

__all__ = ["Nemesis", "Struck"]

#: Seconds within which a leader sends its next message, as a rule.
_NEXT_MESSAGE = 5.0


@dataclass(frozen=True)
class Struck:
    """A fault that has happened: when it really began and ended, in Unix seconds, and what went wrong with it."""

    fault: Fault
    begun: float
    ended: float
    trouble: str = ""


class Nemesis:
    """Strikes a fleet.

    Parameters:
        fleet: the victim.
        lose: has Redis lose its data.
        say: called with a line for each fault.
    """

    def __init__(self, fleet: Fleet, lose: Callable[[], None], say: Callable[[str], None] = print) -> None:
        self._fleet = fleet
        self._lose = lose
        self._say = say
        self._lock = threading.Lock()
        #: Who is struck just now. A fault may last longer than its plan, and the leader be anybody.
        self._busy: set[str] = set()
        self._freed = threading.Condition()
        self._over = threading.Event()
        self.struck: list[Struck] = []

    def run(self, faults: Sequence[Fault], seconds: float) -> None:
        """Do the faults; returns after so many seconds, when the last has ended."""
        began = self._fleet.now()
        threads = []
        for fault in faults:
            self._wait(began + fault.at - self._fleet.now())
            self._say(str(fault))
            thread = threading.Thread(target=self._strike, args=(fault,), name=str(fault), daemon=True)
            thread.start()
            threads.append(thread)
        self._wait(began + seconds - self._fleet.now())
        for thread in threads:
            thread.join(90)
            if thread.is_alive():
                raise RuntimeError(f"the fault hasn't ended: {thread.name}")

    def _wait(self, seconds: float) -> None:
        if seconds > 0:
            self._over.wait(seconds)

    def _strike(self, planned: Fault) -> None:
        fault = self._claim(planned)
        begun, trouble = self._fleet.now(), ""
        try:
            _ACTS[fault.kind](self, fault)
        except Exception as exc:  # noqa: BLE001  # it makes the run worthless, and is reported as such
            trouble = repr(exc)
            self._say(f"{fault}: {trouble}")
        finally:
            with self._freed:
                self._busy.difference_update(self._victims(fault))
                self._freed.notify_all()
        with self._lock:
            self.struck.append(Struck(fault, begun, self._fleet.now(), trouble))

    def _claim(self, fault: Fault) -> Fault:
        """Wait until nothing else befalls the target; the fault, with the leader's name in place of `leader`."""
        with self._freed:
            while True:
                named = self._named(fault)
                if named is not None and not self._busy.intersection(self._victims(named)):
                    self._busy.update(self._victims(named))
                    return named
                self._freed.wait(0.5)

    def _named(self, fault: Fault) -> Fault | None:
        who, colon, link = fault.target.partition(":")
        if who != "leader":
            return fault
        # Whoever sent last, or, while that one is struck already, somebody else.
        last = self._fleet.tap.arrivals[-1].beat if self._fleet.tap.arrivals else ""
        beats = sorted(self._fleet.setup.beat_names, key=lambda beat: beat != last)
        targets = [f"{beat}{colon}{link}" for beat in beats]
        free = [target for target in targets if target not in self._busy]
        return replace(fault, target=free[0]) if free else None

    def _victims(self, fault: Fault) -> tuple[str, ...]:
        return processes_of(fault.target, self._fleet.setup.beat_names)

    # What each kind does

    def kill(self, fault: Fault) -> None:
        """SIGKILL, and a new process after a while."""
        self._now_or_as_it_sends(fault, lambda: self._fleet.kill(fault.target))
        self._wait(fault.seconds)
        self._fleet.revive(fault.target)

    def _now_or_as_it_sends(self, fault: Fault, act: Callable[[], None]) -> None:
        if fault.detail == AS_IT_SENDS:
            self._fleet.tap.at_next(fault.target, act, _NEXT_MESSAGE)
        elif fault.detail == AS_IT_SENDS_PLAIN:
            # No worker tells the ledger that such a message was sent after all.
            self._fleet.tap.at_next(fault.target, act, _NEXT_MESSAGE, "plain")
        else:
            act()

    def pause(self, fault: Fault) -> None:
        """SIGSTOP, and SIGCONT after a while."""
        self._now_or_as_it_sends(fault, lambda: self._fleet.signal(fault.target, signal.SIGSTOP))
        self._wait(fault.seconds)
        self._fleet.signal(fault.target, signal.SIGCONT)

    def freeze(self, fault: Fault) -> None:
        """A link stands, and nothing passes."""
        self._link(fault, self._fleet.links[fault.target].freeze)

    def cut(self, fault: Fault) -> None:
        """A link breaks, and can't be made again."""
        self._link(fault, self._fleet.links[fault.target].cut)

    def one_way_cut(self, fault: Fault) -> None:
        """A link stands, and nothing passes in one direction."""
        way = "up" if fault.detail == "up" else "down"
        self._link(fault, lambda: self._fleet.links[fault.target].freeze(way))

    def delay(self, fault: Fault) -> None:
        """What passes a link takes its time."""
        self._link(fault, lambda: self._fleet.links[fault.target].delay(float(fault.detail.split()[0])))

    def _link(self, fault: Fault, act: Callable[[], None]) -> None:
        act()
        self._wait(fault.seconds)
        self._fleet.links[fault.target].resume()

    def redis_pause(self, fault: Fault) -> None:
        """The ledger's server freezes."""
        self._ledger.pause(fault.seconds, self._wait)

    def redis_restart(self, fault: Fault) -> None:
        """The ledger's server dies; it comes back with its data, or a replica takes its place."""
        self._ledger.restart(fault.seconds, self._wait)

    def flush(self, fault: Fault) -> None:
        """The ledger's server loses all that we keep there."""
        self._lose()

    @property
    def _ledger(self) -> Ledger:
        assert self._fleet.ledger is not None
        return self._fleet.ledger

    def clock_step(self, fault: Fault) -> None:
        """A beat's wall clock steps, and back after a while."""
        self._fleet.step_clock(fault.target, float(fault.detail.split()[0]))
        self._wait(fault.seconds)
        self._fleet.step_clock(fault.target, 0)

    def rolling_deploy(self, fault: Fault) -> None:
        """All beats are replaced by those of a new version, one by one."""
        self._fleet.deploy()


_ACTS: dict[str, Callable[[Nemesis, Fault], None]] = {
    "kill": Nemesis.kill,
    "pause": Nemesis.pause,
    "freeze": Nemesis.freeze,
    "cut": Nemesis.cut,
    "one-way cut": Nemesis.one_way_cut,
    "delay": Nemesis.delay,
    "redis restart": Nemesis.redis_restart,
    "redis pause": Nemesis.redis_pause,
    "failover": Nemesis.redis_restart,
    "flush": Nemesis.flush,
    "clock step": Nemesis.clock_step,
    "rolling deploy": Nemesis.rolling_deploy,
}
