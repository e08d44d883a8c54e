"""`FencedTask`: the worker's side, which refuses what a superseded leader sent.

The guard sits in `__call__`, around the body and inside everything that users override. Before the body it
asks the ledger to begin the slot that the message is stamped for; after it, it tells how the run ended. While
the body runs, one thread per process renews the run leases, so that the ledger can tell a long run from a
dead worker.
"""

from __future__ import annotations

import logging
import os
from contextvars import ContextVar
from dataclasses import replace
from datetime import datetime
from typing import Any

from celery import Task
from celery.exceptions import Ignore, Reject
from celery.signals import celeryd_after_setup
from celery.utils.nodenames import gethostname

from celery_leaderbeat.backoff import backoff
from celery_leaderbeat.errors import LeaderbeatError, StaleTick, StampError, StoreError, sentence
from celery_leaderbeat.put_off import put_off, transport_of
from celery_leaderbeat.records import Verdict
from celery_leaderbeat.runs import Runs, new_run
from celery_leaderbeat.settings import Settings
from celery_leaderbeat.signals import run_refused
from celery_leaderbeat.tick import ASKED_HEADER, PUT_OFF_HEADER, RUN_HEADER, Stamp

__all__ = ["FencedTask", "Tick"]

logger = logging.getLogger(__name__)

_FENCING = ("slot", "current", "observed")
_ON_STALE = ("ignore", "reject")
_WHEN_UNVERIFIABLE = ("retry", "run", "refuse")

#: So many questions without an answer are remembered.
_ASKED_AT_MOST = 8
#: Headers that belong to one copy of a message, and not to a retry of its run.
_OF_A_COPY = (ASKED_HEADER, PUT_OFF_HEADER)
#: Bounds of the wait before a message that couldn't be verified comes back, in seconds.
_RETRY_AFTER = (1.0, 60.0)

#: An epoch has room for so many attempts in a fence.
_ATTEMPTS = 1_000_000

_current: ContextVar[Tick | None] = ContextVar("leaderbeat_tick", default=None)
#: The request whose body runs.
_request: ContextVar[Any] = ContextVar("leaderbeat_request", default=None)


class Tick:
    """The slot that a run is for, as `self.tick` inside the task.

    Attributes:
        key: the tick key.
        entry: name of the entry of the schedule.
        slot: the time that the run is *for*, an aware datetime in UTC.
        epoch: the fencing epoch under which the slot was sent.
        attempt: 1, and one more each time the leader sent the slot again after a crash.
    """

    def __init__(self, stamp: Stamp, run: str, runs: Runs | None) -> None:
        self.key = stamp.key
        self.entry = stamp.entry
        self.slot: datetime = stamp.slot
        self.epoch = stamp.epoch
        self.attempt = stamp.attempt
        self._run = run
        self._runs = runs

    @property
    def fence(self) -> int:
        """One number for epoch and attempt, for guarded writes: of two runs for a slot, the newer has more.

        It fits into a column of 64 bits.
        """
        return self.epoch * _ATTEMPTS + self.attempt

    def check(self) -> None:
        """Make sure that this run still holds its slot; for long bodies, before each step that counts.

        Raises:
            StaleTick: the run has been superseded; stop here.
            StoreUnavailable: Redis doesn't answer, so it can't be told.
        """
        runs = self._runs
        if runs is not None and not runs.ledger.renew_runs({self.key: self._run}, runs.lease)[self.key]:
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
            ("fencing", _FENCING),
            ("on_stale", _ON_STALE),
            ("when_unverifiable", _WHEN_UNVERIFIABLE),
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
        if request.called_directly or request is _request.get():
            # A body that calls its own task as a function goes on within its run.
            return super().__call__(*args, **kwargs)
        try:
            stamp = Stamp.from_headers(request.headers)
        except StampError as exc:
            self._refuse(None, str(exc))
        if stamp is None:
            if self.require_stamp:
                self._refuse(None, "it carries no stamp, and the task requires one")
            return self._body(None, args, kwargs)
        run = new_run()
        runs = self._begin(stamp, run)
        if runs is None:
            return self._body(Tick(stamp, run, None), args, kwargs)
        # A retry of this run carries it, so that the ledger knows the retry as its continuation.
        kept = {name: value for name, value in request.headers.items() if name not in _OF_A_COPY}
        request.headers = {**kept, RUN_HEADER: run}
        with runs.under_way(stamp.key, run, requeues=bool(self.acks_late)):
            return self._body(Tick(stamp, run, runs), args, kwargs)

    def _body(self, tick: Tick | None, args: Any, kwargs: Any) -> Any:
        token, request_token = _current.set(tick), _request.set(self.request)
        try:
            return self.run(*args, **kwargs)
        finally:
            _request.reset(request_token)
            _current.reset(token)

    def _begin(self, stamp: Stamp, run: str) -> Runs | None:
        """Begin the slot.

        The process's runs, or None for a run that couldn't be verified and runs all the same.

        Raises:
            Ignore, Reject: the message is refused or put off.
            StoreError: an eager call can't be verified, and there is no later.
        """
        request = self.request
        runs = Runs.for_app(self.app)
        try:
            verdict = runs.ledger.begin(
                stamp,
                run=run,
                mode=self.fencing,
                redelivered=self._maybe_redelivered(stamp),
                run_lease=runs.lease,
                worker=f"{request.hostname or gethostname()}:{os.getpid()}",
                task=self.name,
                task_id=request.id,
                asked=stamp.asked,
            )
        except StoreError as exc:
            if request.is_eager and self.when_unverifiable == "retry":
                raise
            verdict = self._unverifiable(stamp, exc)
            if verdict.kind == "put_off":
                runs.out_of_reach(exc)
            if verdict.kind == "run":
                return None
            stamp = replace(stamp, asked=(*stamp.asked, run)[-_ASKED_AT_MOST:])
        else:
            runs.answers()
        if verdict.kind == "refuse":
            self._refuse(stamp, verdict.reason)
        if verdict.kind == "put_off":
            if request.is_eager:
                self._refuse(stamp, "the slot is running elsewhere")
            put_off(self, stamp, verdict)
        if verdict.new:
            logger.warning(
                "The ledger has no record of the slot %s: it has expired (leaderbeat_slot_retention), or this "
                "worker has another leaderbeat_redis_url or leaderbeat_key_prefix than beat. The task runs.",
                stamp.key,
                extra={"action": "no_record", "tick_key": stamp.key},
            )
        return runs

    def _maybe_redelivered(self, stamp: Stamp) -> bool:
        """Whether a worker may have had this message before, without acknowledging it."""
        if not self.acks_late:
            return False
        if stamp.put_off or (self.request.delivery_info or {}).get("redelivered"):
            return True
        # Other transports don't say.
        return transport_of(self.app) not in ("amqp", "redis")

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
        return Verdict("put_off", str(exc), backoff(stamp.put_off + 1, *_RETRY_AFTER))

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


@celeryd_after_setup.connect  # type: ignore[untyped-decorator]  # Celery has no types
def _validate_settings(instance: Any, **_: Any) -> None:
    """Refuse settings that can't work when a worker has set up its logs, not when the first slot arrives."""
    app = instance.app
    app.finalize()
    fenced = [task for task in app.tasks.values() if isinstance(task, FencedTask)]
    if not fenced:
        return
    for task in fenced:
        if task.on_stale == "reject" and not task.acks_late:
            logger.warning(
                "Task %s has on_stale = 'reject', which needs acks_late: what is acknowledged before it runs can't "
                "be rejected, so refused messages are gone.",
                task.name,
                extra={"action": "reject_without_acks_late"},
            )
    try:
        Settings.from_app(app)
    except LeaderbeatError as exc:
        logger.critical("This worker can't start: %s", sentence(exc), extra={"action": "settings_refused"})
        raise SystemExit(1) from exc
