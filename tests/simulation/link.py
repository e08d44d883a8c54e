"""A process's way to Redis: the package's own `Store` over one real connection, with faults on the way."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from celery_leaderbeat.errors import StoreUnavailable
from celery_leaderbeat.store import Store

if TYPE_CHECKING:
    from tests.simulation.world import World

__all__ = ["sim_store"]

#: Scripts beside which a crash shows nothing that it doesn't show elsewhere.
_DULL = ("announce", "renew")


class _Client:
    """The shared client. What a script answers is shown to the store as soon as the server has said it."""

    def __init__(self, client: Any, store: Any) -> None:
        self._client = client
        self._store = store

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)

    def register_script(self, text: str) -> Any:
        script = self._client.register_script(text)

        def call(keys: Sequence[Any], args: Sequence[Any]) -> Any:
            answer = script(keys=keys, args=args)
            self._store.answered(answer)
            return answer

        return call


class _Way:
    """Translates what is raised on the way to the server; little else, since that seldom happens."""

    def __init__(self, translate: Callable[[str], AbstractContextManager[None]], what: str) -> None:
        self._translate = translate
        self._what = what

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, exc: BaseException | None, trace: object) -> None:
        if exc is not None:
            with self._translate(self._what):
                raise exc


def sim_store(world: World) -> type[Store]:
    """The `Store` of a world, in place of the package's. All of them share the world's connection."""
    hub, faults = world.hub, world.faults

    class SimStore(Store):
        def __init__(self, settings: Any, timeout: float = 5.0) -> None:
            super().__init__(settings, timeout)
            self._client = _Client(self._client, self)
            self._translate = self._translated
            self._translated = self._on_the_way  # type: ignore[assignment]
            self._timeout = timeout
            self._running: tuple[str, Sequence[Any], Sequence[Any]] | None = None

        def hurry(self, timeout: float) -> None:
            self._timeout = timeout

        def run(self, script: str, keys: Sequence[Any], args: Sequence[Any] = ()) -> Any:
            if hub.process is None:
                return self._execute(script, keys, args)
            self._go(script)
            if faults.comes_late():
                world.note(f"{script} will come late")
                delay = self._timeout + world.rng.uniform(0.0, 10.0)
                hub.after(delay, lambda: self._execute(script, keys, args))
                self._give_up(script)
            took = faults.request_takes(self._timeout)
            hub.pause(took)
            answer = self._execute(script, keys, args)
            self._come_back(script, self._timeout - took)
            return answer

        def answered(self, answer: Any) -> None:
            """The server has answered, whoever may hear it."""
            assert self._running is not None
            script, keys, args = self._running
            # What a run's end has left in the record; the answer alone doesn't say it.
            state = self._client.hget(keys[0], "state") if script == "finish" else None
            world.journal.answered(hub.process, script, keys, args, answer, state)
            world.answered(script, answer)

        def subscribers(self, channel: str) -> int | None:
            if hub.process is not None:
                self._go("")
            return world.subscribers(channel)

        def close(self) -> None:
            """The connection is the world's."""

        def _on_the_way(self, what: str) -> _Way:
            if hub.process is not None and self._running is None:
                self._go("")
            world.sync()
            return _Way(self._translate, what)

        def _execute(self, script: str, keys: Sequence[Any], args: Sequence[Any]) -> Any:
            self._running = (script, keys, args)
            try:
                return super().run(script, keys, args)
            finally:
                self._running = None

        def _go(self, script: str) -> None:
            hub.pause(faults.latency())
            if script and script not in _DULL:
                hub.point(f"before {script}")
            wait = faults.unreachable(self._timeout)
            if wait is not None:
                hub.pause(wait)
                raise StoreUnavailable(f"Redis gave no answer to {script or 'a question'}: unreachable")

        def _come_back(self, script: str, left: float) -> None:
            if script not in _DULL:
                hub.point(f"after {script}")
            if faults.answer_is_lost():
                world.note(f"the answer to {script} is lost")
                self._give_up(script)
            hub.pause(faults.latency() + faults.answer_takes(left))

        def _give_up(self, script: str) -> None:
            hub.pause(self._timeout)
            raise StoreUnavailable(f"Redis gave no answer to {script} within {self._timeout:g} s")

    return SimStore
