"""What people ask of an entry: pause it, resume it, run it now, send its slots again.

An order is written into Redis and carried out by whichever replica leads, within about a second; nothing here
needs to run in a beat. Whoever gives one says who they are, for the event that it leaves.
"""

from __future__ import annotations

import getpass
import logging
import uuid
from collections.abc import Mapping
from datetime import datetime

from celery.utils.nodenames import gethostname

from celery_leaderbeat.ledger import Ledger
from celery_leaderbeat.pauses import Pause, parse_pauses
from celery_leaderbeat.records import Request
from celery_leaderbeat.tick import slot_from_us, slot_to_us, tick_key

__all__ = ["MOST", "Orders", "whoami"]

logger = logging.getLogger(__name__)

#: The most slots that one request may ask for.
MOST = 10_000


class Orders:
    """The orders under one key prefix.

    Parameters:
        ledger: where they are kept.
        by: who gives them, by default the user and host of this process.
    """

    def __init__(self, ledger: Ledger, by: str = "") -> None:
        self._store = ledger.store
        self._keys = ledger.store.keys
        self._by = by or whoami()
        self._unreadable: set[str] = set()

    def pause(self, entry: str, until: datetime | None = None, note: str = "") -> datetime:
        """Pause an entry, or `ALL`, from now on; returns the begin.

        While the pause lasts, nothing of the entry is sent, apart from requests. Its slots are skipped, for
        good.

        Parameters:
            until: an aware datetime at which the pause ends by itself.
            note: why; the reason of the skipped slots quotes it.
        """
        end = "" if until is None else slot_to_us(until)
        return slot_from_us(
            int(self._store.run("pause", [self._keys.paused], [entry, end, note[:200], self._by]))
        )

    def resume(self, entry: str, catch_up: bool = False) -> bool:
        """End the pause of an entry, or of `ALL`; False if it isn't paused.

        `catch_up`: send those of the skipped slots that the entry's policy would have caught up after an
        outage.
        """
        request = uuid.uuid4().hex if catch_up else ""
        ended = self._store.run(
            "resume", [self._keys.paused, self._keys.requests], [entry, self._by, request]
        )
        return bool(ended)

    def run_now(self, entry: str) -> str:
        """Ask for a run of the entry, for a slot of its own at the server's time; returns its tick key."""
        now = slot_from_us(int(self._ask("run", entry, "", "", False)))
        return tick_key(entry, now)

    def backfill(self, entry: str, since: datetime, until: datetime, force: bool = False) -> None:
        """Ask for the entry's slots in (since, until]: those that aren't sent or done; with `force`, all.

        A slot whose record has expired (see `leaderbeat_slot_retention`) counts as not sent.

        Raises:
            ValueError: a naive datetime, or `until` isn't later than `since`.
        """
        first, last = slot_to_us(since), slot_to_us(until)
        if last <= first:
            raise ValueError(f"There is no time after {since} up to {until}: until must be later than since.")
        self._ask("backfill", entry, first, last, force)

    def _ask(self, kind: str, entry: str, since: int | str, until: int | str, force: bool) -> str:
        args: list[str | int | float] = [
            uuid.uuid4().hex,
            kind,
            entry,
            since,
            until,
            "1" if force else "0",
            self._by,
        ]
        return str(self._store.run("request", [self._keys.requests], args))

    def look(self) -> tuple[dict[str, list[Pause]], list[Request]]:
        """The pauses, by entry, and the requests that no leader has dealt with yet."""
        paused, requests = self._store.tables([self._keys.paused, self._keys.requests])
        return self._pauses(paused), self._requests(requests)

    def note_progress(self, request: Request, dealt_with: datetime) -> None:
        """All slots of the request up to this one are dealt with; a later leader goes on after it."""
        args: list[str | int | float] = [request.id, slot_to_us(dealt_with)]
        self._store.run("progress", [self._keys.requests], args)

    def forget_pauses(self, pauses: Mapping[str, list[Pause]], before: datetime) -> None:
        """Forget the pauses of entries that have had none since then."""
        for entry, spans in pauses.items():
            if all(pause.until is not None and pause.until < before for pause in spans):
                self._store.drop_field(self._keys.paused, entry)

    def done_with(self, request: Request) -> None:
        """No leader need look at this request any more."""
        self._store.drop_field(self._keys.requests, request.id)

    def _pauses(self, table: Mapping[str, str]) -> dict[str, list[Pause]]:
        found = {}
        for entry, text in table.items():
            try:
                found[entry] = parse_pauses(text)
            except ValueError as exc:
                if self._told(entry + text):
                    continue
                logger.error(
                    "The pauses of entry %r can't be read, and don't count: %r.",
                    entry,
                    exc,
                    extra={"action": "pause_unreadable", "entry": entry},
                )
        return found

    def _requests(self, table: Mapping[str, str]) -> list[Request]:
        found = []
        for name, text in table.items():
            try:
                found.append(Request.read(name, text))
            except (ValueError, TypeError, KeyError, OverflowError) as exc:
                if self._told(name + text):
                    continue
                logger.error(
                    "The request %s can't be read, and nothing is sent for it: %r. Take it out of the hash %s.",
                    name,
                    exc,
                    self._keys.requests,
                    extra={"action": "request_unreadable"},
                )
        return sorted(found, key=lambda request: (request.until, request.id))

    def _told(self, text: str) -> bool:
        """Whether it has been said already that this text can't be read."""
        known = text in self._unreadable
        self._unreadable.add(text)
        return known


def whoami() -> str:
    """`user@host` of this process."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):
        # A uid that no user has, as in many containers.
        user = "?"
    return f"{user}@{gethostname()}"
