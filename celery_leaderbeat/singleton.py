"""Jobs outside Celery that every replica fires: management commands, and jobs inside a service's processes.

A job has a name and a slot: the time that it is *for*, which all who fire it compute alike (03:00, not
"now"). The ledger gives the slot to one of them, with the tick keys, records, run leases, ends and events
that the slots of beat's entries have. No leader is needed, nor a broker.

`run_once` runs a slot at most once: if its process dies in mid-run, nobody runs it again. `run_to_completion`
runs it until a run has ended: who isn't first waits, and takes over where the lease of the run is over. The
first start of a slot settles which of the two holds for it, and how many attempts it has.

What isn't guaranteed: a process that freezes, or doesn't reach Redis, for longer than its lease goes on with
the body when it wakes up, perhaps beside the run that has taken over. `Tick.check()` raises `StaleTick` in
it, and its end isn't recorded. A slot's record is kept for a day after its end, or for
`leaderbeat_slot_retention` if that is longer; whoever fires the slot later than that runs it again.

A name that is also an entry of `beat_schedule` means the same slots: what beat has claimed or left behind
isn't run here, and what was started here isn't sent by beat.
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Generic, TypeVar, cast

from celery import current_app
from celery.utils.nodenames import gethostname

from celery_leaderbeat._singleton_args import as_job, checked_key, checked_seconds, refuse_no_count
from celery_leaderbeat.clock import Clock
from celery_leaderbeat.errors import SettingsError, StoreError, StoreUnavailable
from celery_leaderbeat.ledger import Ledger
from celery_leaderbeat.records import SlotRecord
from celery_leaderbeat.runs import Runs, new_run
from celery_leaderbeat.task import Tick
from celery_leaderbeat.tick import Stamp, slot_to_us

__all__ = ["Outcome", "look_up", "run_once", "run_to_completion"]

logger = logging.getLogger(__name__)

T = TypeVar("T")

#: How long a run lease lasts by default, in seconds.
_LEASE = 30.0

#: Bounds of a run lease, in seconds: below, ordinary pauses of a process would end it.
_LEASES = (1.0, 86_400.0)
#: Who waits for another's run looks this often, in seconds.
_LOOK_AGAIN = 0.5
#: How long a first question is asked again where Redis gives no answer, in seconds.
_PATIENCE = 1.0
#: Wait between two of them, in seconds.
_ASK_AGAIN = 0.1
#: How long a record is kept at least, in seconds: replicas may fire the same slot at very different times.
_KEPT = 86_400.0

_APP_ATTRIBUTE = "_leaderbeat_singletons"


@dataclass(frozen=True)
class Outcome(Generic[T]):
    """What a call found or did. Times are Unix seconds by the server's clock.

    Attributes:
        ran: whether this call ran the job.
        state: `done`, `failed`, `abandoned` (its process died, and it won't be run again), `running`
            (elsewhere), what beat made of it where an entry has the same name (`decided`: its record is
            gone), or `superseded`: this call ran the job, but its lease was over before the end, and the end
            isn't recorded.
        value: what the job returned, if this call ran it.
        attempt: which attempt that was; 0 where there is no record.
        worker: who ran it, as `host:pid`.
        reason: of a failure, or why it was abandoned.
        started_at: when that attempt began.
        finished_at: when it ended; None if it hasn't, or if the ledger couldn't be told or asked.
    """

    ran: bool
    state: str
    value: T | None = None
    attempt: int = 0
    worker: str = ""
    reason: str = ""
    started_at: float | None = None
    finished_at: float | None = None


def run_once(
    name: str,
    slot: datetime,
    fn: Callable[[], T] | Callable[[Tick], T],
    *,
    app: Any = None,
    lease: float = _LEASE,
) -> Outcome[T]:
    """Run `fn` for the slot, unless it was started before. It isn't run again if its process dies.

    Whoever asks first runs it, at most once; all others get the slot's state at once.

    Parameters:
        name: the job's name, which with the slot makes the tick key.
        slot: the time that the job is for, an aware datetime; the same from all who fire it.
        fn: called without arguments; with the `Tick` if it has one parameter without a default.
        app: the Celery app whose settings say where the ledger is; by default the current one.
        lease: how long the process may be frozen or cut off before it counts as dead, in seconds. The lease
            is renewed at a third while `fn` runs.

    Raises:
        Exception: what `fn` raised. The slot has failed then and isn't run again. Celery's own `Retry`,
            `Ignore` and `Reject` come as the cause of a RuntimeError.
        ValueError, TypeError: an argument can't be used.
        StoreUnavailable: Redis gives no answer; nothing was run here. If only its answers were lost, the slot
            may be down as started, and counts as a run that died.
        SettingsError: the app's settings can't work, or there is no app.
    """
    question = _Question(app, name, slot, lease, on_crash="skip", max_attempts=1)
    job = as_job(fn)
    answer = question.ask(_PATIENCE)
    if answer.verdict == "run":
        return question.run(job, answer)
    return _outcome(answer)


def run_to_completion(
    name: str,
    slot: datetime,
    fn: Callable[[], T] | Callable[[Tick], T],
    *,
    app: Any = None,
    lease: float = _LEASE,
    max_attempts: int = 3,
    wait: float | None = None,
) -> Outcome[T]:
    """Run `fn` for the slot, or wait until another's run has ended; take over if that one's process has died.

    An exception is an end, not a death: the slot has failed then and isn't run again. KeyboardInterrupt and
    SystemExit in `fn` are a death: the lease ends by itself, and another takes over.

    Parameters:
        name, slot, fn, app, lease: as for `run_once`.
        max_attempts: how often the slot is started before it is abandoned, with an ERROR.
        wait: longest time to wait for another's run, in seconds; None: as long as it takes. When it is over,
            the state is `running`.

    Raises:
        As `run_once`. While it waits, a call stays patient with Redis for the length of a lease.
    """
    refuse_no_count("max_attempts", max_attempts)
    longest = math.inf if wait is None else checked_seconds("wait", wait, 0.0, math.inf)
    question = _Question(app, name, slot, lease, on_crash="rerun", max_attempts=max_attempts)
    job = as_job(fn)
    answer = question.wait(question.ask(_PATIENCE), longest)
    if answer.verdict == "run":
        return question.run(job, answer)
    return _outcome(answer)


def look_up(name: str, slot: datetime, *, app: Any = None) -> SlotRecord | None:
    """The record of a slot: who ran it, when it started and ended; None if there is none (any more).

    Raises:
        ValueError, TypeError: an argument can't be used.
        StoreUnavailable: Redis gives no answer.
    """
    return Ledger.for_app(_app(app)).slot(checked_key(name, slot))


@dataclass(frozen=True)
class _Answer:
    """What the script `start` decided; `left` are the seconds until the lease of another's run is over."""

    verdict: str
    left: float
    record: SlotRecord | None


class _Question:
    """One call's question whether it may run its slot, and the run."""

    def __init__(
        self, app: Any, name: str, slot: datetime, lease: float, on_crash: str, max_attempts: int
    ) -> None:
        self.key, self.name, self.slot = checked_key(name, slot), name, slot
        self.run_id = new_run()
        self._on_crash, self._max_attempts = on_crash, max_attempts
        self._runs = _runs(_app(app), checked_seconds("lease", lease, *_LEASES))
        self._ledger = self._runs.ledger
        self._clock = Clock()

    def ask(self, patience: float) -> _Answer:
        """Ask; again, for `patience` seconds, where no answer came. The same run gets the same answer.

        An answer that took too long doesn't count: the lease that it gives runs from before it was given.
        """
        failures, deadline = 0, self._clock.monotonic() + patience
        while True:
            asked = self._clock.monotonic()
            try:
                answer = self._ask()
                if answer.verdict != "run" or self._clock.monotonic() - asked < self._runs.lease / 3:
                    return answer
                raise StoreUnavailable(
                    f"Redis took {self._clock.monotonic() - asked:.1f} s to answer, too long for a run lease "
                    f"of {self._runs.lease:g} s"
                )
            except StoreUnavailable:
                failures += 1
                if failures > 1 and self._clock.monotonic() >= deadline:
                    raise
            self._clock.sleep(_ASK_AGAIN)

    def _ask(self) -> _Answer:
        ledger, keys = self._ledger, self._ledger.store.keys
        lease = self._runs.lease
        kept = max(_KEPT, ledger.settings.slot_retention, 2 * lease)
        verdict, left, *fields = ledger.store.run(
            "start",
            [keys.slot(self.key), keys.entries, keys.counts],
            [
                self.run_id,
                self._on_crash,
                self._max_attempts,
                round(lease * 1000),
                round(kept * 1000),
                f"{gethostname()}:{os.getpid()}",
                self.key,
                self.name,
                slot_to_us(self.slot),
            ],
        )
        table = dict(zip(fields[::2], fields[1::2], strict=True))
        answer = _Answer(str(verdict), int(left) / 1000, SlotRecord.read(self.key, table) if table else None)
        self._log(answer)
        return answer

    def _log(self, answer: _Answer) -> None:
        record = answer.record
        if record is None:
            return
        if answer.verdict == "abandoned":
            logger.error(
                "The slot %s is abandoned: %s.",
                self.key,
                record.reason,
                extra={"action": "abandoned", "tick_key": self.key},
            )
        elif answer.verdict == "run" and record.attempt > 1:
            logger.warning(
                "The slot %s is run again, as attempt %d: the process that ran it has died or was cut off.",
                self.key,
                record.attempt,
                extra={"action": "taken_over", "tick_key": self.key},
            )

    def wait(self, answer: _Answer, longest: float) -> _Answer:
        """Wait while another run holds the slot, for `longest` seconds. The last answer."""
        deadline = self._clock.monotonic() + longest
        if answer.verdict == "wait" and answer.record is not None:
            logger.info(
                "The slot %s runs on %s; waiting for its end.",
                self.key,
                answer.record.worker,
                extra={"action": "waiting", "tick_key": self.key},
            )
        while answer.verdict == "wait" and (left := deadline - self._clock.monotonic()) > 0:
            self._clock.sleep(min(_LOOK_AGAIN, max(answer.left, 0.01), left))
            answer = self.ask(min(self._runs.lease, max(deadline - self._clock.monotonic(), 0.0)))
        return answer

    def run(self, job: Callable[[Tick], T], answer: _Answer) -> Outcome[T]:
        """Run the job under the lease that `answer` gave."""
        record = cast(SlotRecord, answer.record)
        tick = Tick(
            Stamp(key=self.key, entry=self.name, slot=record.slot, epoch=0, attempt=record.attempt),
            self.run_id,
            self._runs,
        )
        with self._runs.under_way(self.key, self.run_id, requeues=False):
            value = job(tick)
        state, finished_at = self._end()
        return Outcome(
            ran=True,
            state=state,
            value=value,
            attempt=record.attempt,
            worker=record.worker,
            started_at=record.started_at,
            finished_at=finished_at,
        )

    def _end(self) -> tuple[str, float | None]:
        """What the ledger says of this run, whose job has returned."""
        try:
            record = self._ledger.slot(self.key)
        except StoreError:
            # The job has had its effects: that the ledger can't be asked is no failure of it.
            return "done", None
        if record is None or record.run != self.run_id:
            return "superseded", None
        return "done", record.finished_at


def _outcome(answer: _Answer) -> Outcome[T]:
    """The outcome of a call that didn't run the job."""
    record = answer.record
    if record is None:
        return Outcome(ran=False, state="decided")
    return Outcome(
        ran=False,
        state=record.state,
        attempt=record.attempt,
        worker=record.worker,
        reason=record.reason,
        started_at=record.started_at,
        finished_at=record.finished_at,
    )


def _app(app: Any) -> Any:
    """The app to use.

    Celery keeps the current app per thread, and makes up an empty one in a thread without; under the prefix
    of that one, a slot would run a second time.
    """
    if app is not None:
        return app
    current = current_app._get_current_object()
    if current.main == "default" and not current.set_as_current:
        raise SettingsError(
            "There is no current Celery app here (Celery keeps it per thread): pass app=, or call "
            "app.set_default() where the app is made."
        )
    return current


def _runs(app: Any, lease: float) -> Runs:
    """The runs of this process with that lease; nothing is carried over a fork."""
    pid, runs = getattr(app, _APP_ATTRIBUTE, (0, None))
    if runs is None or pid != os.getpid():
        runs = {}
        setattr(app, _APP_ATTRIBUTE, (os.getpid(), runs))
    found: Runs = runs.setdefault(lease, Runs(Ledger.for_app(app), lease))
    return found
