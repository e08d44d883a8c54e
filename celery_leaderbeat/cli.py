"""`celery -A proj leaderbeat`: who leads, what became of each slot, and orders to whoever leads.

Orders are written to Redis; the leader carries them out within about a second. What can't be done is said
with a message and an exit code: 2 where the command line is wrong, 1 where the order can't be given now.
"""

from __future__ import annotations

import json
import shlex
from datetime import datetime, timedelta
from itertools import islice
from typing import Any

import click

from celery_leaderbeat import _cli_text as text
from celery_leaderbeat._cli_project import Project
from celery_leaderbeat._cli_status import status_json, status_lines
from celery_leaderbeat.errors import LeaderbeatError, sentence
from celery_leaderbeat.orders import MOST, whoami
from celery_leaderbeat.pauses import Pauses
from celery_leaderbeat.records import ALL
from celery_leaderbeat.tick import slot_text
from celery_leaderbeat.timeline import slots_between

__all__ = ["leaderbeat"]

#: How far an audit reaches back unless it is told otherwise.
_A_DAY = timedelta(days=1)


class _Group(click.Group):
    """A group whose commands say the package's errors as messages."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except LeaderbeatError as exc:
            raise click.ClickException(sentence(exc)) from exc


def _time(ctx: click.Context, param: click.Parameter, value: str | None) -> datetime | None:
    """An option's time; without an offset it is read in the app's time zone."""
    try:
        return None if value is None else text.read_instant(value, ctx.obj.app.timezone)
    except ValueError as exc:
        raise click.BadParameter(f"{exc}.", ctx, param) from None


def _duration(ctx: click.Context, param: click.Parameter, value: str | None) -> timedelta | None:
    try:
        return None if value is None else text.read_duration(value)
    except ValueError as exc:
        raise click.BadParameter(f"{exc}.", ctx, param) from None


_by = click.option("--by", default=whoami, metavar="WHO", help="Who asks; by default user@host.")
_every = click.option("--all", "every", is_flag=True, help="All entries.")
_as_json = click.option("--json", "as_json", is_flag=True, help="As JSON.")


@click.group(cls=_Group)
def leaderbeat() -> None:
    """Look at the leader and at each slot, and give orders to whoever leads.

    TIME is ISO 8601, as in 2026-10-02T03:00Z; without an offset it is read in the app's time zone.
    """


@leaderbeat.command()
@_as_json
@click.pass_context
def status(ctx: click.Context, as_json: bool) -> None:
    """Show the ledger, who leads, the replicas seen lately, pauses, open requests, entries, and the totals."""
    found = Project(ctx.obj.app).status()
    if as_json:
        click.echo(json.dumps(status_json(found), indent=2))
        return
    for line in status_lines(found):
        click.echo(line)


@leaderbeat.command()
@click.argument("entry", required=False)
@_every
@click.option("--until", metavar="TIME", callback=_time, help="When the pause ends by itself.")
@click.option(
    "--for",
    "duration",
    metavar="LENGTH",
    callback=_duration,
    help="How long the pause lasts, as in 2h or 1d12h.",
)
@click.option(
    "--note", default="", help="Why; 200 characters at most. The reason of the skipped slots quotes it."
)
@_by
@click.pass_context
def pause(
    ctx: click.Context,
    entry: str | None,
    every: bool,
    until: datetime | None,
    duration: timedelta | None,
    note: str,
    by: str,
) -> None:
    """Send nothing of ENTRY, or of all entries, from now on. Slots that come due meanwhile are skipped."""
    if until is not None and duration is not None:
        raise click.UsageError("--until and --for say the same: give one of them.")
    project = Project(ctx.obj.app, by)
    name = project.whose(entry, every)
    now = project.ledger.store.now()
    if until is not None and until <= now:
        raise click.UsageError(
            f"--until is {slot_text(until)}, which has passed (it is {slot_text(now)}): the end of a pause must be "
            "later than now."
        )
    if duration is not None:
        try:
            until = now + duration
        except OverflowError:
            raise click.UsageError(
                "--for reaches beyond the year 9999: leave it out for a pause without end."
            ) from None
    before = Pauses(project.orders.look()[0].get(name, ())).in_force(now)
    since = project.orders.pause(name, until, note)
    end = "until it is resumed" if until is None else f"until {slot_text(until)}"
    click.echo(f"Paused {text.whose(name)} from {slot_text(since)} {end}.")
    if before is not None:
        click.echo(f"This replaces the pause {text.pause_text(before)}.", err=True)


@leaderbeat.command()
@click.argument("entry", required=False)
@_every
@click.option(
    "--catch-up", is_flag=True, help="Send of the skipped slots what the entry's catch_up would send."
)
@_by
@click.pass_context
def resume(ctx: click.Context, entry: str | None, every: bool, catch_up: bool, by: str) -> None:
    """End the pause of ENTRY, or the pause of all entries.

    Skipped slots stay skipped unless --catch-up is given.
    """
    project = Project(ctx.obj.app, by)
    name = project.whose(entry, every)
    resumed = project.orders.resume(name, catch_up)
    pauses, _ = project.orders.look()
    now = project.ledger.store.now()
    others = [
        f"{text.whose(other)} {'are' if other == ALL else 'is'} paused {text.pause_text(found)} "
        f"(resume {'--all' if other == ALL else shlex.quote(other)})"
        for other in sorted(pauses)
        if other != name and ALL in (name, other)
        if (found := Pauses(pauses[other]).in_force(now)) is not None
    ]
    if not resumed:
        hint = f" But {'; '.join(others)}." if others else ""
        raise click.ClickException(f"There is no pause of {text.whose(name)} to end.{hint}")
    click.echo(f"Resumed {text.whose(name)}{', catching up' if catch_up else ''}.")
    for other in others:
        click.echo(f"Still, {other}.", err=True)


@leaderbeat.command()
@click.argument("entry")
@_by
@click.pass_context
def run(ctx: click.Context, entry: str, by: str) -> None:
    """Run ENTRY now, for a slot of its own, also while it is paused. Prints the slot's tick key."""
    project = Project(ctx.obj.app, by)
    click.echo(project.orders.run_now(project.check(entry, sendable=True)))
    project.say_if_nobody_leads()


@leaderbeat.command()
@click.argument("entry")
@click.option("--since", metavar="TIME", callback=_time, required=True, help="Slots after this time,")
@click.option(
    "--until", metavar="TIME", callback=_time, required=True, help="up to this one, itself included."
)
@click.option("--force", is_flag=True, help="Also slots that are sent, under way or done, as a new attempt.")
@_by
@click.pass_context
def backfill(ctx: click.Context, entry: str, since: datetime, until: datetime, force: bool, by: str) -> None:
    """Send the slots of ENTRY in a past time that weren't sent or done, also while it is paused."""
    project = Project(ctx.obj.app, by)
    name = project.check(entry, sendable=True)
    if until <= since:
        raise click.UsageError(
            f"--until ({slot_text(until)}) must be later than --since ({slot_text(since)})."
        )
    until = min(until, project.ledger.store.now())
    if until <= since:
        raise click.UsageError(
            f"--since is {slot_text(since)}, which is yet to come: only past slots can be sent."
        )
    span = f"after {slot_text(since)} up to {slot_text(until)}"
    timetable = project.timetable(name)
    count = None
    if timetable is not None:
        count = sum(1 for _ in islice(slots_between(timetable, since, until), MOST + 1))
        if not count:
            raise click.UsageError(f"The entry {name!r} has no slot {span}.")
        if count > MOST:
            raise click.UsageError(
                f"The entry {name!r} has more than {MOST:,} slots {span}: ask for {MOST:,} at most at once."
            )
    project.orders.backfill(name, since, until, force)
    which = "all of them" if force else "those that weren't sent or done"
    slots = "the slots" if count is None else "1 slot" if count == 1 else f"{count} slots"
    click.echo(f"Asked for {slots} of {text.whose(name)} {span}: {which} will be sent.")
    project.say_if_nobody_leads()


@leaderbeat.command()
@click.argument("entry")
@click.option(
    "--since", metavar="TIME", callback=_time, help="Slots after this time; by default, a day before the end,"
)
@click.option(
    "--until", metavar="TIME", callback=_time, help="up to this one, itself included; by default, now."
)
@click.option("--only", type=click.Choice(text.ENDS), help="Only the slots with this end.")
@_as_json
@click.pass_context
def audit(
    ctx: click.Context,
    entry: str,
    since: datetime | None,
    until: datetime | None,
    only: str | None,
    as_json: bool,
) -> None:
    """Show what became of each slot of ENTRY, and why."""
    project = Project(ctx.obj.app)
    name = project.check(entry)
    now = project.ledger.store.now()
    until = now if until is None else until
    since = min(until, now) - _A_DAY if since is None else since
    if min(until, now) <= since:
        raise click.UsageError(
            f"There is no past time after {slot_text(since)} up to {slot_text(until)}: --until must be later than "
            "--since, and --since earlier than now."
        )
    found = project.ledger.audit(name, since, until, project.timetable(name))
    if as_json:
        click.echo(json.dumps(text.audit_json(found, only), indent=2))
        return
    for line in text.audit_lines(found, only):
        click.echo(line)


@leaderbeat.command()
@click.option("--entry", help="Only what concerns this entry, or this job outside Celery.")
@_as_json
@click.pass_context
def events(ctx: click.Context, entry: str | None, as_json: bool) -> None:
    """Show what was decided, oldest first, as far back as events are kept. As JSON, one object on a line."""
    project = Project(ctx.obj.app)
    if entry is not None:
        project.check_events(entry)
    after = ""
    while page := project.ledger.events(after):
        after = page[-1][0]
        for event_id, fields in page:
            # Orders for all entries concern each of them.
            if entry is None or fields.get("entry") in (entry, ALL):
                line = (
                    json.dumps(text.event_json(event_id, fields))
                    if as_json
                    else text.event_line(event_id, fields)
                )
                click.echo(line)
