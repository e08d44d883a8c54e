"""The run leases of one worker process, renewed by one thread while bodies run."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Iterator

from celery_leaderbeat.errors import StoreError
from celery_leaderbeat.ledger import Ledger

__all__ = ["RunLeases"]

logger = logging.getLogger(__name__)


class RunLeases:
    """Renews the leases of the runs of one ledger at a third of their length.

    The thread is started with the first run and ends when none is left for a while; under gevent it is a
    greenlet, which gets its turn as long as the bodies yield.

    Parameters:
        ledger: whose runs these are.
        lease: length of a run lease, in seconds.
    """

    def __init__(self, ledger: Ledger, lease: float) -> None:
        self._ledger = ledger
        self._lease = lease
        self._runs: dict[str, str] = {}
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None

    @contextlib.contextmanager
    def held(self, key: str, run: str) -> Iterator[None]:
        """Keep the lease of `run`, which holds the slot `key`, while the body runs."""
        with self._changed:
            self._runs[key] = run
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(target=self._renew, name="leaderbeat-runs", daemon=True)
                self._thread.start()
        try:
            yield
        finally:
            with self._changed:
                if self._runs.get(key) == run:
                    del self._runs[key]

    def _renew(self) -> None:
        while True:
            with self._changed:
                self._changed.wait(self._lease / 3)
                runs = dict(self._runs)
                if not runs:
                    self._thread = None
                    return
            try:
                held = self._ledger.renew_runs(runs, self._lease)
            except StoreError as exc:
                logger.warning(
                    "Couldn't renew the leases of %d runs: %s. Trying again.",
                    len(runs),
                    exc,
                    extra={"action": "run_renewal_failed"},
                )
                continue
            for key, still in held.items():
                if not still and self._runs.get(key) == runs[key]:
                    logger.warning(
                        "The run %s no longer holds the slot %s.",
                        runs[key],
                        key,
                        extra={"action": "run_superseded", "tick_key": key},
                    )
                    with self._changed:
                        if self._runs.get(key) == runs[key]:
                            del self._runs[key]
