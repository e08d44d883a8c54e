"""Virtual time: processes and threads that take turns, one at a time, on a clock that jumps from event to event.

A thread is a greenlet. It runs until it waits (for a time, a queue, a message); then the hub lets whoever is next
in time run. Nothing else switches, and all choices come from one seed, so a story repeats itself exactly.

A process is a set of threads that live, freeze and die together. `Killed` ends a thread where it stands; what it
would still do on its way out is refused, since a dead process does nothing.
"""

from __future__ import annotations

import heapq
import math
import queue
from collections import deque
from collections.abc import Callable
from typing import Any

import greenlet

__all__ = ["Hub", "Killed", "Process", "Queue", "Thread", "VirtualClock"]

#: So many events at one instant mean that somebody spins.
_SPINNING = 20_000


def _micros(seconds: float) -> int:
    """In µs, rounded up: who waits for a time that is still to come must not wait for nothing."""
    return max(math.ceil(round(seconds * 1e6, 3)), 1 if seconds > 0 else 0)


class Killed(BaseException):
    """The process of this thread was killed."""


class Process:
    """Threads that live, freeze and die together."""

    def __init__(self, name: str, kind: str) -> None:
        self.name = name
        self.kind = kind
        self.alive = True
        self.frozen_until = 0
        self.threads: list[Thread] = []
        #: What its threads would do if it weren't frozen.
        self.held: list[Callable[[], None]] = []

    def __repr__(self) -> str:
        return self.name


class Thread:
    """A thread of a process, with as much of `threading.Thread` as the package uses."""

    def __init__(self, hub: Hub, process: Process, target: Callable[[], Any]) -> None:
        self.process = process
        self.ended = False
        self.wanted: object | None = None
        self._hub = hub
        self._target = target
        self.greenlet: Any = None

    def start(self) -> None:
        """Let it run from now on."""
        self.greenlet = greenlet.greenlet(self._run, parent=self._hub.greenlet)
        self.process.threads.append(self)
        self.wanted = token = object()
        self._hub.at(self._hub.now, lambda: self._hub.resume(self, token))

    def is_alive(self) -> bool:
        return self.greenlet is not None and not self.ended and self.process.alive

    def _run(self) -> None:
        try:
            self._target()
        except Killed:
            pass
        except BaseException as exc:  # noqa: BLE001  # it is raised in the hub, where the test sees it
            self._hub.failure = exc
        finally:
            self.ended = True
            self.process.threads.remove(self)


class Hub:
    """The virtual clock and whose turn it is. Times are in µs since the Unix epoch.

    Attributes:
        now: the time.
        on_point: called with the process and a text at each point where a fault may strike.
    """

    def __init__(self, began: int) -> None:
        self.began = self.now = began
        self.greenlet = greenlet.getcurrent()
        self.failure: BaseException | None = None
        self.on_point: Callable[[Process, str], None] = lambda process, what: None
        self._heap: list[tuple[int, int, Callable[[], None]]] = []
        self._serial = 0
        self._current: Thread | None = None
        self._processes: list[Process] = []

    @property
    def process(self) -> Process | None:
        """Whose turn it is; None for the hub itself."""
        return None if self._current is None else self._current.process

    @property
    def thread(self) -> Thread:
        """The thread whose turn it is."""
        assert self._current is not None
        return self._current

    def at(self, when: int, action: Callable[[], None]) -> None:
        """Let the hub do something at a time."""
        self._serial += 1
        heapq.heappush(self._heap, (max(when, self.now), self._serial, action))

    def when(self, seconds: float) -> int:
        """The time in `seconds`."""
        return self.now + _micros(seconds)

    def after(self, seconds: float, action: Callable[[], None]) -> None:
        """Let the hub do something in `seconds`."""
        self.at(self.when(seconds), action)

    def sleep(self, seconds: float) -> None:
        """Wait for `seconds`, and for the process to be thawed."""
        self.wait(seconds)

    def pause(self, seconds: float) -> None:
        """Wait for `seconds`; none for 0."""
        if seconds:
            self.wait(seconds)
        elif not self.thread.process.alive:
            raise Killed

    def wait(self, seconds: float | None) -> None:
        """Wait for `seconds` or until `wake` is called for this thread."""
        thread = self.thread
        if not thread.process.alive:
            raise Killed
        thread.wanted = token = object()
        if seconds is not None:
            self.after(max(seconds, 0.0), lambda: self.resume(thread, token))
        self.greenlet.switch()
        if not thread.process.alive:
            raise Killed

    def wake(self, thread: Thread) -> None:
        """Let a thread that waits go on."""
        token = thread.wanted
        if token is not None:
            self.at(self.now, lambda: self.resume(thread, token))

    def point(self, what: str) -> None:
        """A point where the process may be killed or frozen."""
        process = self.process
        if process is None:
            return
        if process.alive:
            self.on_point(process, what)
        if not process.alive:
            raise Killed
        if process.frozen_until > self.now:
            self.sleep(0.0)

    def start(self, process: Process, *targets: Callable[[], Any]) -> None:
        """Start a process with these threads."""
        self._processes.append(process)
        for target in targets:
            Thread(self, process, target).start()

    def kill(self, process: Process) -> None:
        """Kill a process. Its other threads end here and now; its own ends at its next step."""
        process.alive = False
        for thread in list(process.threads):
            if thread is not self._current:
                self.at(self.now, lambda thread=thread: self._end(thread))

    def freeze(self, process: Process, seconds: float) -> None:
        """Stop a process for a while."""
        process.frozen_until = max(process.frozen_until, self.now + _micros(seconds))
        self.at(process.frozen_until, lambda: self._thaw(process))

    def thaw(self, process: Process) -> None:
        """Let a process that is frozen go on now."""
        process.frozen_until = min(process.frozen_until, self.now)
        self._thaw(process)

    def _thaw(self, process: Process) -> None:
        if process.frozen_until <= self.now:
            held, process.held = process.held, []
            for action in held:
                self.at(self.now, action)

    def run(self, until: int, enough: Callable[[], bool] | None = None) -> None:
        """Let time pass until `until`, or until there was enough."""
        same, last = 0, -1
        while self._heap and self._heap[0][0] <= until:
            self.now, _, action = heapq.heappop(self._heap)
            same = same + 1 if self.now == last else 0
            last = self.now
            assert same < _SPINNING, "Somebody spins: time stands still."
            action()
            if self.failure is not None:
                raise self.failure
            if enough is not None and enough():
                return
        self.now = until

    def end(self) -> None:
        """End all threads."""
        for process in self._processes:
            process.alive = False
            for thread in list(process.threads):
                self._end(thread)
        self._heap.clear()

    def resume(self, thread: Thread, token: object) -> None:
        """The hub's part of waiting."""
        if thread.wanted is not token or thread.ended:
            return
        if not thread.process.alive:
            self._end(thread)
        elif thread.process.frozen_until > self.now:
            thread.process.held.append(lambda: self.resume(thread, token))
        else:
            thread.wanted = None
            self._switch(thread, thread.greenlet.switch)

    def _end(self, thread: Thread) -> None:
        if thread.ended:
            return
        if thread.greenlet:
            self._switch(thread, lambda: thread.greenlet.throw(Killed))
        else:
            # It hasn't begun.
            thread.ended = True
            thread.process.threads.remove(thread)

    def _switch(self, thread: Thread, switch: Callable[[], Any]) -> None:
        self._current = thread
        try:
            switch()
        finally:
            self._current = None


class Queue:
    """A queue with as much of `queue.SimpleQueue` as the package uses."""

    def __init__(self, hub: Hub) -> None:
        self._hub = hub
        self._items: deque[Any] = deque()
        self._waiting: list[Thread] = []

    def put(self, item: Any) -> None:
        self._items.append(item)
        for thread in self._waiting:
            self._hub.wake(thread)

    def get(self, timeout: float | None = None) -> Any:
        deadline = None if timeout is None else self._hub.now + _micros(timeout)
        while not self._items:
            if deadline is not None and self._hub.now >= deadline:
                raise queue.Empty
            thread = self._hub.thread
            self._waiting.append(thread)
            try:
                self._hub.wait(None if deadline is None else (deadline - self._hub.now) / 1e6)
            finally:
                self._waiting.remove(thread)
        return self._items.popleft()

    def get_nowait(self) -> Any:
        if not self._items:
            raise queue.Empty
        return self._items.popleft()

    def empty(self) -> bool:
        return not self._items


class VirtualClock:
    """The clocks of a host: `monotonic` and `wall` run with the hub, the wall clock off by `skew` seconds."""

    def __init__(self, hub: Hub, skew: float = 0.0) -> None:
        self._hub = hub
        self.skew = skew

    def monotonic(self) -> float:
        return (self._hub.now - self._hub.began) / 1e6 + 1000.0

    def wall(self) -> float:
        return self._hub.now / 1e6 + self.skew

    def sleep(self, seconds: float) -> None:
        self._hub.sleep(seconds)
