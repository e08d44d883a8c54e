"""The scheduler of `celery beat -S celery_leaderbeat.Scheduler`: Celery's, its tick gated by the lease.

Constructing it opens no connection and starts no thread, with `lazy=True` (the banner) or without; everything
is started by the first `tick()`, in the process that ticks, and started anew after a fork.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
from collections.abc import Collection, Mapping
from typing import Any, NoReturn

import click
from celery import beat

from celery_leaderbeat.clock import Clock, FleetClock
from celery_leaderbeat.clock_watch import OffsetWatch
from celery_leaderbeat.comparison import Comparison
from celery_leaderbeat.dispatch import Dispatcher
from celery_leaderbeat.election import Elector, new_holder
from celery_leaderbeat.entries import check_entry, load_plans
from celery_leaderbeat.errors import EntryError, LeaderbeatError, sentence
from celery_leaderbeat.plan import Plan
from celery_leaderbeat.settings import Settings
from celery_leaderbeat.signals import leader_elected, leader_lost
from celery_leaderbeat.term import Term

__all__ = ["Scheduler"]

logger = logging.getLogger(__name__)

#: A standby waits at most this long in one tick (seconds): `celery inspect ping` watches the ticks.
_STANDBY_TICK = 1.0
#: `close()` takes about 0.9 s at most: for messages on their way, for a look at the lease, and for its release.
_DISPATCHER_WITHIN, _LOOK_WITHIN, _ELECTOR_WITHIN = 0.4, 0.1, 0.4
#: A leader that stops as Redis loses its data tries for so long to put back what it knows, and waits so long between two
#: tries, in seconds; and so long for an answer even at the end of that.
_RESTORE_WITHIN, _RESTORE_AGAIN, _ONE_ANSWER = 2.0, 0.02, 0.5


class _Running:
    """What one process has started: the clock, the elector and the dispatcher."""

    def __init__(
        self, app: Any, settings: Settings, plans: Mapping[str, Plan], clock: Clock, refused: Collection[str]
    ) -> None:
        self.pid = os.getpid()
        fleet = FleetClock(clock, settings.clock)
        self.elector = Elector(
            settings,
            fleet,
            new_holder(),
            Comparison(settings, {name: plan.fingerprint for name, plan in plans.items()}, refused),
            lambda term, reason: _tell_of(app, term, reason),
        )
        self.dispatcher = Dispatcher(app, settings, fleet, self.elector, plans)
        self.offset = OffsetWatch(fleet)


def _tell_of(app: Any, term: Term, reason: str) -> None:
    if reason:
        leader_lost.send_robust(sender=app, epoch=term.epoch, holder=term.holder, reason=reason)
    else:
        leader_elected.send_robust(sender=app, epoch=term.epoch, holder=term.holder)


class Scheduler(beat.Scheduler):  # type: ignore[misc]  # Celery has no types
    """A drop-in for Celery's scheduler of which any number may run; exactly one of them sends.

    Takes the arguments of `celery.beat.Scheduler`; `schedule_filename` is accepted and ignored: beat writes
    no file.

    Raises:
        SettingsError, PolicyError: a `leaderbeat_*` setting, or a mix of them, can't work. With `lazy=True` only
            the banner says so: it is made before the logs are set up, where a detached beat would end without a word.
        SystemExit: the same, under Celery's command line, after a CRITICAL in the log.
    """

    def __init__(self, app: Any, *args: Any, clock: Clock | None = None, **kwargs: Any) -> None:
        lazy = bool(kwargs.get("lazy"))
        try:
            self._settings = Settings.from_app(app, warn=not lazy)
            self._info = self._settings.banner()
        except LeaderbeatError as exc:
            if not lazy:
                _refuse(exc)
            self._info = f"    . leaderbeat -> {sentence(exc)}"
        self._clock = clock or Clock()
        self._running: _Running | None = None
        self._closed = False
        self._close_depth = 0
        self._ticking = self._stays = False
        super().__init__(app, *args, **kwargs)

    def setup_schedule(self) -> None:
        """Load `beat_schedule`, with what was added by signals, and Celery's own default entries."""
        self.app.finalize()
        configured = self.app.conf.beat_schedule
        self.update_from_dict(configured)
        self.install_default_entries(configured)

    def update_from_dict(self, dict_: Mapping[str, Any]) -> None:
        """Add or replace entries; a bad one is named in one ERROR and left out."""
        for name, raw in dict_.items():
            try:
                self.schedule[name] = check_entry(name, raw, self._build_entry)
            except EntryError as exc:
                logger.error(
                    "%s The other entries run.",
                    sentence(exc),
                    extra={"action": "entry_refused", "entry": name},
                )

    def _build_entry(self, **fields: Any) -> Any:
        return self.Entry(**fields, app=self.app)

    @property
    def info(self) -> str:
        """Our part of beat's banner."""
        return self._info

    def tick(self, *args: Any, **kwargs: Any) -> float:
        """Send what is due if this replica leads, or wait (a second at most) until it does.

        Returns:
            Seconds until the next tick has something to do, at most one.
        """
        if self._stays:
            self.close()
        if self._closed:
            return _STANDBY_TICK
        self._ticking = True
        try:
            return self._tick()
        finally:
            self._ticking = False

    def _tick(self) -> float:
        running = self._running
        if running is None or running.pid != os.getpid():
            running = self._start()
        if not running.elector.alive:
            logger.error(
                "The elector has ended unexpectedly; starting anew.", extra={"action": "elector_ended"}
            )
            running.elector.stop(0.0)
            running = self._start()
        running.elector.progress()
        running.offset.look()
        term = running.elector.wait(_STANDBY_TICK)
        if term is None:
            running.dispatcher.idle()
            return 0.0
        try:
            with running.elector.round():
                return running.dispatcher.tick(term)
        except Exception as exc:
            logger.exception(
                "The tick failed; another replica leads on, if there is one.", extra={"action": "tick_failed"}
            )
            running.elector.step_down(term, f"its tick failed: {exc!r}")
            return _STANDBY_TICK

    def _start(self) -> _Running:
        deadline = self.app.conf.beat_cron_starting_deadline
        plans = load_plans(self.schedule, self._settings.policy, deadline, self.app.tasks)
        refused = {*self.app.conf.beat_schedule, *self.schedule} - plans.keys()
        # It is known before it starts: a signal handler that closes this scheduler must find it.
        running = self._running = _Running(self.app, self._settings, plans, self._clock, refused)
        running.elector.start()
        return running

    def close(self) -> None:
        """Give back what isn't sent, release the lease, and stop. Never raises; may be called again.

        Celery calls this from a signal handler, in the middle of whatever the main thread was doing, and once
        more on the way out. A second signal during the first call abandons that call, and the last one
        completes it.

        Where Redis has just lost its data, nobody knows as well as who led what was decided and what is unsent. Then
        this replica leads once more and puts that back before it stops: in the call after the one that interrupted
        a tick, whose work can't be gone on with before it is unwound.
        """
        if self._closed or self._close_depth:
            return
        self._close_depth += 1
        running = self._running
        try:
            if running is not None and running.pid == os.getpid():
                if not self._stays:
                    running.dispatcher.close(_DISPATCHER_WITHIN)
                    self._stays = running.elector.is_needed(_LOOK_WITHIN, running.dispatcher.decided_at_least)
                if self._stays and self._ticking:
                    return
                try:
                    # A call that was abandoned here has stopped the elector.
                    if self._stays and running.elector.alive:
                        _restore(running, self._clock)
                finally:
                    self._stop(running)
            self._closed = True
            _ignore_further_signals()
        except Exception:
            logger.exception(
                "Stopping met an error; what is left open, the next leader decides.",
                extra={"action": "close_failed"},
            )
            self._closed = True
            if running is not None:
                # Nothing else may hold up the release of the lease.
                running.elector.stop(_ELECTOR_WITHIN)
        finally:
            self._close_depth -= 1

    def _stop(self, running: _Running) -> None:
        if not running.elector.stop(_ELECTOR_WITHIN):
            logger.warning(
                "The lease could not be released in time; if this replica led, it expires within %.0f s.",
                self._settings.lease_ttl,
                extra={"action": "release_failed"},
            )


def _restore(running: _Running, clock: Clock) -> None:
    """Lead once more, to put back what Redis has lost. No new try is begun after two seconds."""
    logger.warning(
        "Redis may have lost data as this replica stops: it leads until it has put back what it remembers.",
        extra={"action": "stays"},
    )
    elector, deadline = running.elector, clock.monotonic() + _RESTORE_WITHIN
    while elector.alive and elector.shadow.led_last and (left := deadline - clock.monotonic()) > 0:
        elector.progress()
        term = elector.wait(min(left, _STANDBY_TICK))
        if term is None:
            continue
        with elector.round():
            if running.dispatcher.restore(term, max(deadline - clock.monotonic(), _ONE_ANSWER)):
                return
        clock.sleep(_RESTORE_AGAIN)
    logger.warning(
        "Another replica leads by now, or Redis doesn't answer: what this replica remembers isn't put back.",
        extra={"action": "not_restored"},
    )


def _refuse(exc: LeaderbeatError) -> NoReturn:
    """Raise the error; a command says it in one line of the log, since Celery would log the traceback bit by bit."""
    if click.get_current_context(silent=True) is None:
        raise exc
    logger.critical("This beat can't start: %s", sentence(exc), extra={"action": "settings_refused"})
    raise SystemExit(1) from exc


def _ignore_further_signals() -> None:
    """Let the process end in peace: a second signal while the interpreter shuts down would spoil its status.

    Only where the handlers are those of `celery beat`, which has nothing left to do but to exit.
    """
    if threading.current_thread() is not threading.main_thread():
        return
    for number in (signal.SIGTERM, signal.SIGINT):
        if getattr(signal.getsignal(number), "__module__", "") == "celery.apps.beat":
            signal.signal(number, signal.SIG_IGN)
