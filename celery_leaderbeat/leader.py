"""The leader: holds the lease that this replica was elected to, until its term ends.

It renews while the tick loop comes round, steps down when it is told to and another replica may do better, and
hands the lease over to a candidate of a newer release once the round that is under way has ended. The rules of
the trust are in `election`.
"""

from __future__ import annotations

from celery_leaderbeat.backoff import backoff
from celery_leaderbeat.clock import FleetClock
from celery_leaderbeat.desk import Desk
from celery_leaderbeat.errors import StoreError, sentence
from celery_leaderbeat.handover import Handovers
from celery_leaderbeat.lease import GONE, Lease
from celery_leaderbeat.listener import Listener
from celery_leaderbeat.membership import Candidate, Membership
from celery_leaderbeat.remarks import Remarks
from celery_leaderbeat.settings import Settings
from celery_leaderbeat.shadow import Shadow
from celery_leaderbeat.sight import Sight
from celery_leaderbeat.store import Store
from celery_leaderbeat.term import Term

__all__ = ["BACKOFF", "Leader", "TermEnded"]

#: Bounds of the wait between two tries while Redis doesn't answer, in seconds.
BACKOFF = (0.05, 0.3)
#: Wait before a tick loop that hangs is looked at again, in seconds.
_STALLED = 0.5
#: Wait for a round of the tick loop before the lease is handed over, in seconds, at a time.
_ROUND = 0.05
#: Longest that a replica which stepped down leaves the elections to others, in seconds.
_LONGEST_RETREAT = 300.0


class TermEnded(Exception):
    """Our term has ended without a release of ours; the message says why."""


class Leader:
    """The state of a replica that leads; its parts are the elector's.

    Attributes:
        handing_over: whether the lease is about to go to another replica: no new round may begin.
    """

    def __init__(
        self,
        *,
        settings: Settings,
        clock: FleetClock,
        desk: Desk,
        store: Store,
        listener: Listener,
        lease: Lease,
        members: Membership,
        remarks: Remarks,
        shadow: Shadow,
        sight: Sight,
    ) -> None:
        self.handing_over = False
        self._settings = settings
        self._clock = clock
        self._desk = desk
        self._store = store
        self._listener = listener
        self._lease = lease
        self._members = members
        self._remarks = remarks
        self._shadow = shadow
        self._sight = sight
        self._handovers = Handovers(settings.lease_ttl)
        self._stepping_down: tuple[Term, str] | None = None
        self._steps_down = 0

    def proven(self) -> None:
        """This replica can do a leader's work: the next time it steps down counts as the first."""
        self._steps_down = 0

    def step_down(self, term: Term, reason: str) -> None:
        """Have `hold` step down from `term`, for this reason. May be called in another thread."""
        self._stepping_down = (term, reason)
        self._desk.put("step down")

    def hold(self, term: Term) -> str:
        """Renew `term` until it is released, and return the reason; or until it ends otherwise.

        Raises:
            TermEnded: where the lease is lost, or could not be renewed in time.
        """
        self._members.announce(stands=False)
        self._sight.announced(self._members.others)
        due = self._clock.clock.monotonic() + self._settings.renew_interval
        failures = 0
        while True:
            order = self._desk.wait(due - self._clock.clock.monotonic())
            if self._desk.stopping:
                if self._lease.release(term, "its replica stops") == "gone":
                    raise TermEnded(GONE)
                return "its replica stops"
            now = self._clock.clock.monotonic()
            if now >= self._lease.until:
                raise TermEnded("its lease could not be renewed in time")
            left_for = self._obey(term)
            if left_for is not None:
                return left_for
            if order is None and now < due:
                continue
            if self._desk.stalled:
                self._remarks.complain(
                    "stalled",
                    "Not renewing the lease of epoch %d: the tick loop hasn't come round for %.1f s "
                    "(leaderbeat_stall_timeout is %.1f s).",
                    term.epoch,
                    self._desk.idle_for,
                    self._settings.stall_timeout,
                )
                due = now + min(_STALLED, self._lease.until - now)
                continue
            try:
                self._renew(term)
            except StoreError as exc:
                failures += 1
                self._remarks.complain(
                    "renew", "Couldn't renew the lease of epoch %d: %s", term.epoch, sentence(exc)
                )
                due = min(self._clock.clock.monotonic() + backoff(failures, *BACKOFF), self._lease.until)
            else:
                failures = 0
                due = self._clock.clock.monotonic() + self._settings.renew_interval
                newer = self._members.newer
                if newer is not None and self._handovers.may(newer.holder, self._clock.clock.monotonic()):
                    return self._hand_over(term, newer)

    def _renew(self, term: Term) -> None:
        at, before = self._clock.utcnow(), self._sight.before()
        reason = self._lease.renew(term)
        if reason is not None:
            if reason != GONE:
                self._shadow.another_leads()
            raise TermEnded(reason)
        self._sight.held(at, before)
        until = self._lease.trusted_until(term)
        if until is not None:
            self._shadow.renewed(until)
        self._show_life()

    def _show_life(self) -> None:
        # Who leads doesn't stand for election: nobody has to wait for it when it dies.
        self._members.announce(stands=False)
        self._sight.announced(self._members.others)
        self._listener.confirm_visible(self._store)

    def _obey(self, term: Term) -> str | None:
        """Do what a call of `step_down` has ordered, if there was one; the reason if the lease is released."""
        order, self._stepping_down = self._stepping_down, None
        if order is None or order[0] != term:
            return None
        reason = order[1]
        pause = min(self._settings.lease_ttl * 2.0**self._steps_down, _LONGEST_RETREAT)
        try:
            others_lead = self._members.retreat(pause)
        except StoreError as exc:
            self._remarks.complain(
                "retreat",
                "This replica is to step down (%s), and couldn't say so: %s Trying again with the next renewal.",
                reason,
                sentence(exc),
            )
            if self._stepping_down is None:
                self._stepping_down = order
            return None
        if not others_lead:
            self._remarks.complain(
                "alone", "This replica goes on leading, because no other could do better: %s.", reason
            )
            return None
        reason = f"it steps down for {pause:.0f} s: {reason}"
        if self._lease.release(term, reason) == "gone":
            # Nobody knows better what was decided: it leads once more, to put that back.
            raise TermEnded(GONE)
        self._steps_down += 1
        self._desk.candidate_from = self._clock.clock.monotonic() + pause
        return reason

    def _hand_over(self, term: Term, newer: Candidate) -> str:
        """Release the lease to a candidate of a newer release, once the round that is under way has ended."""
        self.handing_over = True
        longest = self._clock.clock.monotonic() + 2 * self._settings.publish_timeout + 0.5
        until = min(longest, self._lease.until - self._settings.margin)
        while self._desk.working and not self._desk.stopping and self._clock.clock.monotonic() < until:
            self._desk.wait(_ROUND)
        reason = f"released for a newer release ({newer.release}, of {newer.holder})"
        outcome = self._lease.release(term, reason, newer=True)
        if outcome == "gone":
            raise TermEnded(GONE)
        if outcome != "unheard":
            self._handovers.give(newer.holder, self._clock.clock.monotonic())
        return reason
