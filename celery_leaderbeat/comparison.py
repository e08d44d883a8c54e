"""The comparison of a standby's schedule with the leader's: said once for each schedule that differs."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping

from celery_leaderbeat.schedule_diff import ScheduleDiff, schedule_fingerprint
from celery_leaderbeat.settings import Settings
from celery_leaderbeat.term import Term

__all__ = ["Comparison"]

logger = logging.getLogger(__name__)

#: So often the leader's schedule is looked for; it writes its entries down shortly after its election.
_TRIES = 10


class Comparison:
    """Says how the leaders' schedules differ from this replica's.

    Parameters:
        settings: this replica's release, and the key prefix.
        fingerprints: of this replica's entries, by name.
        refused: entries of this replica that it can't plan, and has said so.
    """

    def __init__(
        self, settings: Settings, fingerprints: Mapping[str, str], refused: Collection[str] = ()
    ) -> None:
        self._settings = settings
        self._fingerprints = fingerprints
        self._refused = refused
        self._tries = 0
        self._told: set[str] = set()
        self.fingerprint = schedule_fingerprint(fingerprints)

    def wanted(self, term: Term) -> bool:
        """Whether there is something to say about the schedule of this leader."""
        ours = not term.app or term.app == self._settings.app_identity
        return ours and term.fingerprint not in ("", self.fingerprint) and term.fingerprint not in self._told

    def look(self, term: Term, leaders: Mapping[str, str]) -> None:
        """Find and say the differences, if these are the leader's entries.

        Parameters:
            term: of the leader.
            leaders: fingerprints of the entries that the ledger shows. The leader writes its entries down
                shortly after its election: where they aren't there yet, they are to be looked at again.
        """
        self._tries += 1
        known = schedule_fingerprint(leaders) == term.fingerprint
        if not known and self._tries < _TRIES:
            return
        self._tries = 0
        self._told.add(term.fingerprint)
        found = "its entries aren't known"
        if known:
            found = str(ScheduleDiff.between(self._fingerprints, leaders, self._refused))
        own = self._settings.release.text
        extra = {"action": "schedules_differ", "leader": term.holder, "epoch": term.epoch}
        if own != term.release:
            logger.info(
                "The schedule of the leader %s (release %s) isn't this replica's (release %s): %s.",
                term.holder,
                term.release or "not set",
                own or "not set",
                found,
                extra=extra,
            )
            return
        logger.warning(
            "The schedule of the leader %s isn't this replica's: %s. That is normal while a new version is rolled "
            "out; if it lasts, two applications of the same name share the key prefix %r: set "
            "leaderbeat_key_prefix for one of them.",
            term.holder,
            found,
            self._settings.key_prefix,
            extra=extra,
        )
