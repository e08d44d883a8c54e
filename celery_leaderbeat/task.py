"""`FencedTask`: the worker's side, which refuses what a superseded leader sent.

The guard sits in `__call__`, around the body and inside everything that users override. Before the body it asks
the ledger to begin the slot that the message is stamped for; after it, it tells how the run ended. While the
body runs, one thread per process renews the run leases, so that the ledger can tell a long run from a dead
worker.
"""

from __future__ import annotations

import contextlib
import logging
import os
import random
import uuid
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import replace
from datetime import datetime
from typing import Any

from celery import Task
from celery.exceptions import Ignore, Reject, Retry
from celery.utils.nodenames import gethostname

from celery_leaderbeat.clock import Clock
from celery_leaderbeat.errors import StaleTick, StampError, StoreError, StoreUnavailable
from celery_leaderbeat.ledger import Ledger, Verdict
from celery_leaderbeat.runs import RunLeases
from celery_leaderbeat.signals import run_refused
from celery_leaderbeat.tick import PUT_OFF_HEADER, RUN_HEADER, Stamp

__all__ = ["FencedTask", "Tick"]

logger = logging.getLogger(__name__)

FENCING = ("slot", "current", "observed")
ON_STALE = ("ignore", "reject")
WHEN_UNVERIFIABLE = ("retry", "run", "refuse")

#: How long a run lease lasts, in seconds; it is renewed at a third.
_RUN_LEASE = 30.0
#: Bounds of the wait before a message that couldn't be verified comes back, in seconds.
_RETRY_AFTER = (1.0, 60.0)

_current: ContextVar[Tick | None] = ContextVar("leaderbeat_tick", default=None)


class Tick:
    """The slot that a run is for, as `self.tick` inside the task.

    Attributes:
        key: the tick key.
        entry: name of the entry of the schedule.
        slot: the time that the run is *for*, an aware datetime in UTC.
        epoch: the fencing epoch under which the slot was sent.
        attempt: 1, and one more each time the leader sent the slot again after a crash.
    """

    def __init__(self, stamp: Stamp, run: str, ledger: Ledger | None) -> None:
        self.key = stamp.key
        self.entry = stamp.entry
        self.slot: datetime = stamp.slot
        self.epoch = stamp.epoch
        self.attempt = stamp.attempt
        self._run = run
        self._ledger = ledger

    def check(self) -> None:
        """Make sure that this run still holds its slot; for long bodies, before each step that counts.

        Raises:
            StaleTick: the run has been superseded; stop here.
            StoreUnavailable: Redis doesn't answer, so it can't be told.
        """
        if (
            self._ledger is not None
            and not self._ledger.renew_runs({self.key: self._run}, _RUN_LEASE)[self.key]
        ):
            raise StaleTick(
                f"The run {self._run} no longer holds the slot {self.key}: its lease was over and another run "
                f"took the slot, or the record was removed. Stop this run without further effects."
            )

    def __repr__(self) -> str:
        return f"<Tick {self.key} epoch={self.epoch} attempt={self.attempt}>"


class FencedTask(Task):  # type: ignore[misc]  # Celery has no types
    """A task base class that runs each slot once, and refuses messages of superseded leaders.

    A message without a stamp (a manual `.delay()`) runs, unless `require_stamp` is set.
    """

    abstract = True

    #: What is refused: `"slot"`: a slot that a newer epoch claimed, that runs elsewhere, or that has ended;
    #: `"current"`: also what is older than the epoch that leads now; `"observed"`: also what is older than the
    #: newest epoch that this task has seen.
    fencing = "slot"
    #: What happens to a refused message: `"ignore"` acknowledges it, `"reject"` sends it to the dead-letter
    #: exchange (for tasks with `acks_late`).
    on_stale = "ignore"
    #: Refuse messages that carry no stamp.
    require_stamp = False
    #: What happens while Redis is out of reach: `"retry"` runs the message later, `"run"` runs it unverified,
    #: `"refuse"` refuses it.
    when_unverifiable = "retry"

    @classmethod
    def on_bound(cls, app: Any) -> None:
        """Validate the class's options when Celery binds the task."""
        super().on_bound(app)
        for name, accepted in (
            ("fencing", FENCING),
            ("on_stale", ON_STALE),
            ("when_unverifiable", WHEN_UNVERIFIABLE),
        ):
            value = getattr(cls, name)
            if value not in accepted:
                raise ValueError(
                    f"Task {cls.name!r} has {name} = {value!r}; accepted are {', '.join(map(repr, accepted))}."
                )

    @property
    def tick(self) -> Tick | None:
        """The slot that this run is for; None for a message without a stamp."""
        return _current.get()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        request = self.request
        if request.called_directly:
            return super().__call__(*args, **kwargs)
        try:
            stamp = Stamp.from_headers(request.headers)
        except StampError as exc:
            self._refuse(None, str(exc))
        if stamp is None:
            if self.require_stamp:
                self._refuse(None, "it carries no stamp, and the task requires one")
            return self._body(None, args, kwargs)
        run = _new_run()
        ledger = self._begin(stamp, run)
        if ledger is None:
            return self._body(Tick(stamp, run, None), args, kwargs)
        # A retry of this run carries it, so that the ledger knows the retry as its continuation.
        request.headers = {**request.headers, RUN_HEADER: run}
        request.headers.pop(PUT_OFF_HEADER, None)
        with _leases(ledger).held(stamp.key, run), _finished(ledger, stamp, run):
            return self._body(Tick(stamp, run, ledger), args, kwargs)

    def _body(self, tick: Tick | None, args: Any, kwargs: Any) -> Any:
        token = _current.set(tick)
        try:
            return self.run(*args, **kwargs)
        finally:
            _current.reset(token)

    def _begin(self, stamp: Stamp, run: str) -> Ledger | None:
        """Begin the slot. The ledger, or None for a run that couldn't be verified and runs all the same.

        Raises:
            Ignore, Reject: the message is refused or put off.
        """
        request = self.request
        ledger = Ledger.for_app(self.app)
        redelivered = bool(self.acks_late) and bool(
            stamp.put_off or (request.delivery_info or {}).get("redelivered")
        )
        try:
            verdict = ledger.begin(
                stamp,
                run=run,
                mode=self.fencing,
                redelivered=redelivered,
                run_lease=_RUN_LEASE,
                worker=f"{request.hostname or gethostname()}:{os.getpid()}",
                task=self.name,
                task_id=request.id,
            )
        except StoreError as exc:
            verdict = self._unverifiable(stamp, exc)
            if verdict.kind == "run":
                return None
        if verdict.kind == "refuse":
            self._refuse(stamp, verdict.reason)
        if verdict.kind == "put_off":
            self._put_off(stamp, verdict)
        return ledger

    def _unverifiable(self, stamp: Stamp, exc: StoreError) -> Verdict:
        if self.when_unverifiable == "run":
            logger.warning(
                "Task %s[%s] runs unverified for the slot %s: %s",
                self.name,
                self.request.id,
                stamp.key,
                exc,
                extra={"action": "unverified", "tick_key": stamp.key},
            )
            return Verdict("run")
        if self.when_unverifiable == "refuse":
            return Verdict("refuse", reason=f"it can't be verified: {exc}")
        low, high = _RETRY_AFTER
        return Verdict("put_off", str(exc), random.uniform(low, min(high, low * 2.0 ** (stamp.put_off + 1))))

    def _refuse(self, stamp: Stamp | None, reason: str) -> None:
        request = self.request
        key = stamp.key if stamp is not None else "none"
        logger.warning(
            "Task %s[%s] refused: %s (slot %s, epoch %s, attempt %s).",
            self.name,
            request.id,
            reason,
            key,
            stamp.epoch if stamp is not None else "none",
            stamp.attempt if stamp is not None else "none",
            extra={"action": "refused", "tick_key": key, "reason": reason},
        )
        run_refused.send_robust(sender=self, task_id=request.id, stamp=stamp, reason=reason)
        if self.on_stale == "reject":
            raise Reject(reason, requeue=False)
        raise Ignore(reason)

    def _put_off(self, stamp: Stamp, verdict: Verdict) -> None:
        """Send the message again for later, and end this one. The task's own retries aren't used up.

        Where the broker doesn't take it either: an unacknowledged message goes back to the queue; one that is
        acknowledged already exists only here, so the worker keeps trying until it has got rid of it.
        """
        request = self.request
        logger.info(
            "Task %s[%s] put off for %.1f s: %s (slot %s).",
            self.name,
            request.id,
            verdict.seconds,
            verdict.reason or "the slot's run holds its lease",
            stamp.key,
            extra={"action": "put_off", "tick_key": stamp.key},
        )
        later = replace(stamp, put_off=stamp.put_off + 1)
        headers = {**request.headers, **later.headers()}
        clock, wait = Clock(), 0.1
        while True:
            try:
                self.signature_from_request(
                    request, countdown=verdict.seconds, retries=request.retries, headers=headers
                ).apply_async()
            except Exception as exc:
                if self.acks_late:
                    raise Reject(exc, requeue=True) from exc
                logger.warning(
                    "Task %s[%s] can't be put off (%r); trying again in %.1f s.",
                    self.name,
                    request.id,
                    exc,
                    wait,
                    extra={"action": "put_off_failed", "tick_key": stamp.key},
                )
                clock.sleep(wait)
                wait = min(wait * 2, 5.0)
            else:
                raise Ignore(f"put off for {verdict.seconds:.1f} s")


@contextlib.contextmanager
def _finished(ledger: Ledger, stamp: Stamp, run: str) -> Iterator[None]:
    """Tell the ledger how the run ended."""
    state, reason = "done", ""
    try:
        yield
    except Retry as exc:
        state, reason = "retrying", str(exc)
        raise
    except Ignore:
        raise
    except Reject as exc:
        state, reason = "requeued" if exc.requeue else "failed", repr(exc)
        raise
    except Exception as exc:
        state, reason = "failed", repr(exc)
        raise
    except BaseException as exc:
        # The worker is going down, and the run with it. The lease ends by itself, and then the message's
        # redelivery runs.
        state, reason = "", repr(exc)
        raise
    finally:
        if state:
            _finish(ledger, stamp, run, state, reason)


def _finish(ledger: Ledger, stamp: Stamp, run: str, state: str, reason: str) -> None:
    """Record the end; where Redis doesn't answer, try for as long as the run lease lasts.

    A run whose end isn't recorded looks like one whose worker died, so the end is worth some patience. The
    effects have happened either way, so a failure to record them is no failure of the task.
    """
    clock = Clock()
    deadline, wait = clock.monotonic() + _RUN_LEASE, 0.1
    while True:
        try:
            held = ledger.finish(stamp.key, run, state, reason)
        except StoreUnavailable as exc:
            if clock.monotonic() < deadline:
                clock.sleep(wait)
                wait = min(wait * 2, 2.0)
                continue
            logger.error(
                "The slot %s is %s, but the ledger couldn't be told: %s",
                stamp.key,
                state,
                exc,
                extra={"action": "finish_lost", "tick_key": stamp.key},
            )
        except StoreError as exc:
            logger.error(
                "The slot %s is %s, but the ledger refused it: %s",
                stamp.key,
                state,
                exc,
                extra={"action": "finish_lost", "tick_key": stamp.key},
            )
        else:
            if not held:
                logger.warning(
                    "The slot %s is %s by a run that no longer held it.",
                    stamp.key,
                    state,
                    extra={"action": "finish_superseded", "tick_key": stamp.key},
                )
        return


def _new_run() -> str:
    return f"{gethostname()}:{os.getpid()}:{uuid.uuid4().hex[:12]}"


def _leases(ledger: Ledger) -> RunLeases:
    """The run leases that go with a process's ledger."""
    leases: RunLeases = ledger.__dict__.setdefault("_run_leases", RunLeases(ledger, _RUN_LEASE))
    return leases
