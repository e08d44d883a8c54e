"""`celery -A proj leaderbeat`: a look at who leads and where each entry stands."""

from __future__ import annotations

from datetime import datetime, timezone
from typing import Any

import click

from celery_leaderbeat.errors import LeaderbeatError
from celery_leaderbeat.ledger import Ledger
from celery_leaderbeat.tick import slot_text

__all__ = ["leaderbeat"]


@click.group()
def leaderbeat() -> None:
    """Look at the leader, the replicas and the slots of celery_leaderbeat."""


@leaderbeat.command()
@click.pass_context
def status(ctx: Any) -> None:
    """Show who leads, the replicas seen lately, each entry's last decided slot, and the totals."""
    try:
        ledger = Ledger.for_app(ctx.obj.app)
        leader, replicas = ledger.leader(), ledger.replicas()
        entries, counts = ledger.entries(), ledger.counts()
    except LeaderbeatError as exc:
        raise click.ClickException(str(exc)) from exc
    if leader is None:
        click.echo("leader    none: the lease is free")
    else:
        since = datetime.fromtimestamp(leader.since, timezone.utc)
        click.echo(f"leader    {leader.holder}, epoch {leader.epoch}, since {since:%Y-%m-%d %H:%M:%S}Z")
    for holder in replicas:
        click.echo(f"replica   {holder}")
    for name, entry in sorted(entries.items()):
        gone = ", removed" if entry.removed else ""
        if entry.count or entry.missed:
            where = f"last decided {slot_text(entry.slot)}, {entry.count} claimed, {entry.missed} missed"
        else:
            where = f"no slot yet since {slot_text(entry.slot)}"
        click.echo(f"entry     {name}: {where}{gone}")
    sums = ", ".join(f"{name} {count}" for name, count in sorted(counts.items()))
    click.echo(f"totals    {sums or 'none'}")
    click.echo("          (started, done, failed, retrying and refused count FencedTasks only)")
