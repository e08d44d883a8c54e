"""A process that fires jobs outside Celery: `python -m tests.support.singleton_job <what, as JSON>`.

url      the ledger's URL
how      `run_once` or `run_to_completion`; a list fires each slot in all of these ways, under their names
slots    the numbers of the slots, a minute apart
options  more arguments of the function
hold     the job waits for the file `go<attempt>` before it ends
forked   so many children fire, instead of this process, which has fired a slot of its own before

Everything that happens is a line of JSON in the file `lines` of the working directory. It begins when the
file `start` is there.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

from celery import Celery

from celery_leaderbeat import StaleTick, Tick
from celery_leaderbeat.singleton import run_once, run_to_completion

FIRST = datetime(2026, 10, 2, 3, tzinfo=timezone.utc)


def note(event: str, **more: Any) -> None:
    """Add a line. One write to a file opened for appending: lines of different processes don't mix."""
    line = {"event": event, "pid": os.getpid(), "t": time.time(), **more}
    descriptor = os.open("lines", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        os.write(descriptor, (json.dumps(line) + "\n").encode())
    finally:
        os.close(descriptor)


def wait_for_file(name: str) -> None:
    deadline = time.monotonic() + 60
    while not Path(name).exists():
        if time.monotonic() > deadline:
            raise SystemExit(f"no file {name} within a minute")
        time.sleep(0.01)


def fire(what: dict[str, Any]) -> None:
    """Fire all slots in all ways."""

    def job(tick: Tick) -> str:
        note("effect", key=tick.key, attempt=tick.attempt)
        if what.get("hold"):
            wait_for_file(f"go{tick.attempt}")
            try:
                tick.check()
            except StaleTick:
                note("stale", key=tick.key, attempt=tick.attempt)
        return f"by {os.getpid()}"

    ways = [what["how"]] if isinstance(what["how"], str) else what["how"]
    for number in what["slots"]:
        for how in ways:
            function = {"run_once": run_once, "run_to_completion": run_to_completion}[how]
            outcome = function(how, FIRST + timedelta(minutes=number), job, **what.get("options", {}))
            note("outcome", how=how, number=number, **vars(outcome))


def main() -> None:
    what = json.loads(sys.argv[1])
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(message)s")
    app = Celery("jobs", broker="memory://")
    app.conf.leaderbeat_redis_url = what["url"]
    app.conf.leaderbeat_key_prefix = "singleton"
    note("ready")
    wait_for_file("start")
    if "forked" in what:
        run_once("parent", FIRST, lambda: None)
    for _ in range(what.get("forked", 0)):
        if os.fork() == 0:
            fire(what)
            os._exit(0)
    if "forked" not in what:
        fire(what)
    for _ in range(what.get("forked", 0)):
        os.wait()


if __name__ == "__main__":
    main()
