"""What a command of the command line works on: the app's schedule, the ledger, and who asks."""

from __future__ import annotations

import difflib
from typing import Any

import click
from celery.beat import ScheduleEntry

from celery_leaderbeat._cli_status import EntryStatus, Status
from celery_leaderbeat.definitions import schedule_of
from celery_leaderbeat.entries import check_entry
from celery_leaderbeat.errors import EntryError
from celery_leaderbeat.ledger import Ledger
from celery_leaderbeat.orders import Orders
from celery_leaderbeat.pauses import Pauses
from celery_leaderbeat.records import ALL
from celery_leaderbeat.task import FencedTask
from celery_leaderbeat.term import Term
from celery_leaderbeat.tick import slot_from_us

__all__ = ["Project"]

#: What Redis says instead of a TTL where there is no such key.
_NO_KEY = -2


class Project:
    """One app, as a command sees it.

    Parameters:
        app: the Celery application; its modules are imported, as beat does, so that the schedule is complete
            and the tasks are known.
        by: who gives orders; by default the user and host of this process.
    """

    def __init__(self, app: Any, by: str = "") -> None:
        app.loader.import_default_modules()
        app.finalize()
        self.app = app
        self.ledger = Ledger.for_app(app)
        self.orders = Orders(self.ledger, by)
        self.schedule: dict[str, Any] = {}
        for name, raw in app.conf.beat_schedule.items():
            try:
                self.schedule[name] = check_entry(
                    name, raw, lambda **fields: ScheduleEntry(**fields, app=app)
                )
            except EntryError:
                # Beat says so when it starts; here it is an entry that isn't there.
                continue

    def check(self, name: str, *, sendable: bool = False) -> str:
        """The entry's name if there is such an entry, for `sendable` one that a leader sends.

        Raises:
            UsageError: there is none; names the nearest.
        """
        kept = self.ledger.entries()
        known = (
            {*self.schedule, *kept} if sendable else {*self.schedule, *kept, *self.orders.look()[0]} - {ALL}
        )
        if name not in known:
            near = difflib.get_close_matches(name, known, n=3)
            hint = f" Did you mean {' or '.join(map(repr, near))}?" if near else _listing(known)
            raise click.UsageError(f"There is no entry {name!r} in the schedule or in the ledger.{hint}")
        if sendable and name not in self.schedule and kept[name].removed:
            raise click.UsageError(f"The entry {name!r} was removed from the schedule: no leader sends it.")
        return name

    def check_events(self, name: str) -> None:
        """Refuse a name that is no entry's, unless there are events of it: a job outside Celery is known by those alone.

        Raises:
            UsageError: as `check`.
        """
        try:
            self.check(name)
        except click.UsageError:
            after = ""
            while page := self.ledger.events(after):
                if any(fields.get("entry") == name for _, fields in page):
                    return
                after = page[-1][0]
            raise

    def whose(self, entry: str | None, every: bool) -> str:
        """The entry that a command names, or `ALL`."""
        if (entry is None) == (not every):
            raise click.UsageError("Name one entry, or say --all.")
        return ALL if entry is None else self.check(entry)

    def timetable(self, name: str) -> Any:
        """The schedule of an entry; None if it isn't known here."""
        if name in self.schedule:
            return self.schedule[name].schedule
        kept = self.ledger.entries(name).get(name)
        return None if kept is None else schedule_of(kept.fingerprint)

    def status(self) -> Status:
        """Who leads, who is there, what was ordered, and where each entry stands."""
        ledger = self.ledger
        pauses, requests = self.orders.look()
        look = ledger.store.look()
        at = slot_from_us(round(look.now * 1000) * 1000)
        in_force = {
            name: pause for name, spans in pauses.items() if (pause := Pauses(spans).in_force(at)) is not None
        }
        # Between the two answers the lease may have ended.
        leader = None if look.value is None or look.remaining == _NO_KEY else Term.read(look.value)
        releases = ledger.releases()
        return Status(
            at=at,
            url=ledger.settings.redis.display,
            key_prefix=ledger.settings.key_prefix,
            leader=leader,
            ttl_left=None if leader is None or look.remaining < 0 else look.remaining / 1000,
            replicas={holder: releases.get(holder, "") for holder in ledger.replicas()},
            pauses=in_force,
            requests=requests,
            entries={
                name: EntryStatus(record, self._undone(name), not in_force.keys().isdisjoint((name, ALL)))
                for name, record in ledger.entries().items()
            },
            totals=ledger.counts(),
        )

    def _undone(self, name: str) -> int | None:
        """How many of an entry's slots have no done marker; None where its task never leaves one."""
        entry = self.schedule.get(name)
        if entry is None or not isinstance(self.app.tasks.get(entry.task), FencedTask):
            return None
        return self.ledger.undone(name, entry.schedule)

    def say_if_nobody_leads(self) -> None:
        """Say on stderr that an order waits, where there is no leader to carry it out."""
        if self.ledger.leader() is None:
            click.echo("Nobody leads now: it is done once a replica leads.", err=True)


def _listing(known: set[str]) -> str:
    names = sorted(known)
    if not names:
        return " There are no entries at all."
    return f" The entries are {', '.join(map(repr, names[:10]))}{', …' if len(names) > 10 else ''}."
