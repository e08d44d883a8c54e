"""The runs of one worker process: their leases, renewed by one thread, and their ends."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import uuid
from collections.abc import Iterator
from datetime import datetime, timezone
from typing import Any

from celery.exceptions import Ignore, Reject, Retry
from celery.utils.nodenames import gethostname

from celery_leaderbeat.clock import Clock
from celery_leaderbeat.errors import StoreError, sentence
from celery_leaderbeat.ledger import Ledger

__all__ = ["Runs", "new_run"]

logger = logging.getLogger(__name__)

#: Wait before a renewal that failed is tried again, in seconds.
_TRY_AGAIN = 1.0
#: That the ledger is out of reach is said once in this many seconds.
_COMPLAIN_EVERY = 30.0

_APP_ATTRIBUTE = "_leaderbeat_runs"


def new_run() -> str:
    """The identity of a run: `host:pid:random`, new for each call of a body."""
    return f"{gethostname()}:{os.getpid()}:{uuid.uuid4().hex[:12]}"


class Runs:
    """The runs under way in this process.

    One thread renews their leases at a third of their length, started with the first run; under gevent it is
    a greenlet, which gets its turn as long as the bodies yield.

    Parameters:
        ledger: where the runs are recorded.
        lease: length of a run lease, in seconds.
    """

    def __init__(self, ledger: Ledger, lease: float) -> None:
        self.ledger = ledger
        self.lease = lease
        self._clock = Clock()
        self._held: dict[str, str] = {}
        self._complained: float | None = None
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    @classmethod
    def for_app(cls, app: Any) -> Runs:
        """The runs of this process; nothing is carried over a fork."""
        cached = getattr(app, _APP_ATTRIBUTE, None)
        if cached is None or cached[0] != os.getpid():
            ledger = Ledger.for_app(app)
            cached = (os.getpid(), cls(ledger, ledger.settings.run_lease))
            setattr(app, _APP_ATTRIBUTE, cached)
        runs: Runs = cached[1]
        return runs

    def out_of_reach(self, exc: StoreError) -> None:
        """The ledger can't be asked about a message."""
        now = self._clock.monotonic()
        if self._complained is None or now - self._complained >= _COMPLAIN_EVERY:
            self._complained = now
            logger.warning(
                "The ledger is out of reach, and messages of slots wait until it answers: %s",
                sentence(exc),
                extra={"action": "ledger_unavailable"},
            )

    def answers(self) -> None:
        """The ledger has answered."""
        if self._complained is not None:
            self._complained = None
            logger.info("The ledger answers again.", extra={"action": "ledger_available"})

    @contextlib.contextmanager
    def under_way(self, key: str, run: str, requeues: bool) -> Iterator[None]:
        """Keep the lease of `run`, which holds the slot `key`, while the body runs, and record how it ends.

        `requeues`: a message that the body rejects back into the queue comes again. One that is acknowledged
        already doesn't, whatever the body wants.
        """
        with self._lock:
            self._held[key] = run
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(target=self._renew, name="leaderbeat-runs", daemon=True)
                self._thread.start()
        state, reason, retry_in = "done", "", 0.0
        try:
            yield
        except Retry as exc:
            state, reason, retry_in = "retrying", str(exc), self._until(exc.when)
            raise
        except Ignore:
            raise
        except Reject as exc:
            state, reason = "requeued" if exc.requeue and requeues else "failed", repr(exc)
            raise
        except Exception as exc:
            state, reason = "failed", repr(exc)
            raise
        except BaseException:
            # The worker is going down, and the run with it. The lease ends by itself, and then the redelivery
            # of its message runs.
            state = ""
            raise
        finally:
            self._forget(key, run)
            if state:
                self._finish(key, run, state, reason, retry_in)

    def _until(self, when: Any) -> float:
        """Seconds until a retry that is due `when`: a number of seconds, a time, or None."""
        if isinstance(when, datetime):
            # Celery reads naive times as UTC.
            aware = when if when.tzinfo is not None else when.replace(tzinfo=timezone.utc)
            when = aware.timestamp() - self._clock.wall()
        return max(float(when), 0.0) if isinstance(when, (int, float)) else 0.0

    def _forget(self, key: str, run: str) -> None:
        with self._lock:
            if self._held.get(key) == run:
                del self._held[key]

    def _renew(self) -> None:
        wait = self.lease / 3
        while True:
            self._clock.sleep(wait)
            with self._lock:
                runs = dict(self._held)
                if not runs:
                    self._thread = None
                    return
            try:
                held = self.ledger.renew_runs(runs, self.lease)
            except Exception as exc:
                # Whatever it is: without this thread, the runs would look dead.
                wait = min(_TRY_AGAIN, self.lease / 3)
                logger.warning(
                    "Couldn't renew the leases of %d runs: %s. Trying again.",
                    len(runs),
                    exc,
                    exc_info=not isinstance(exc, StoreError),
                    extra={"action": "run_renewal_failed"},
                )
                continue
            wait = self.lease / 3
            for key, still in held.items():
                if not still and self._held.get(key) == runs[key]:
                    self._forget(key, runs[key])
                    logger.warning(
                        "The run %s no longer holds the slot %s.",
                        runs[key],
                        key,
                        extra={"action": "run_superseded", "tick_key": key},
                    )

    def _finish(self, key: str, run: str, state: str, reason: str, retry_in: float) -> None:
        """Record the end; where Redis doesn't take it, try for as long as the run lease lasts.

        A run whose end isn't recorded looks like one whose worker died, so the end is worth some patience.
        The effects have happened either way, so a failure to record them is no failure of the task.
        """
        deadline, wait = self._clock.monotonic() + self.lease, 0.1
        while True:
            try:
                held = self.ledger.finish(key, run, state, reason, retry_in)
            except StoreError as exc:
                if self._clock.monotonic() < deadline:
                    self._clock.sleep(wait)
                    wait = min(wait * 2, 2.0)
                    continue
                self._lost(key, state, exc)
            else:
                # A retry that was begun elsewhere before this line is the run's own continuation.
                if not held and state != "retrying":
                    logger.warning(
                        "The slot %s is %s by a run that no longer held it.",
                        key,
                        state,
                        extra={"action": "finish_superseded", "tick_key": key},
                    )
            return

    def _lost(self, key: str, state: str, exc: StoreError) -> None:
        logger.error(
            "The slot %s is %s, but the ledger couldn't be told: %s",
            key,
            state,
            exc,
            extra={"action": "finish_lost", "tick_key": key},
        )
