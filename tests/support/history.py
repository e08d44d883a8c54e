"""What system tests do with the history of slots: entries that are due at once, intervals of runs, signals."""

from __future__ import annotations

import contextlib
import itertools
import json
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from types import SimpleNamespace
from typing import Any

from celery_leaderbeat.audit import Audit
from celery_leaderbeat.ledger import Ledger
from celery_leaderbeat.tick import parse_tick_key, slot_to_us
from tests.support.scene import Scene, Worker

__all__ = [
    "NOTES_SIGNALS",
    "PERIOD",
    "Interval",
    "assert_gapless",
    "due_since",
    "events",
    "intervals",
    "most_at_once",
    "once",
    "plugin",
    "run_lease",
    "runner",
    "signals",
    "unexplained",
]

#: A period in which nothing comes due while a test runs, in seconds.
PERIOD = 10_000_000.0

#: For a beat: notes what its signals tell.
NOTES_SIGNALS = """
import json, os

from celery_leaderbeat import signals


def _note(name):
    def note(sender, signal=None, **told):
        line = {"signal": name, **{key: str(value) for key, value in told.items()}}
        with open(os.environ["LB_SIGNALS"], "a") as file:
            file.write(json.dumps(line) + "\\n")

    return note


for _name in ("slots_missed", "slots_skipped", "run_died", "slot_abandoned"):
    getattr(signals, _name).connect(_note(_name), weak=False)
"""


def run_lease(seconds: float) -> str:
    """For a worker: run leases of this length, in place of half a minute."""
    return f"app.conf.leaderbeat_run_lease = {seconds!r}\n"


def plugin(scene: Scene, *sources: str) -> dict[str, str | None]:
    """The environment that runs these sources in a process, and says where signals and refusals are noted."""
    path = scene.directory / f"plugin_{abs(hash(sources))}.py"
    path.write_text("\n".join(sources))
    return {
        "LB_PLUGIN": str(path),
        "LB_SIGNALS": str(scene.directory / "signals.jsonl"),
        "LB_REFUSED": str(scene.directory / "refused.jsonl"),
    }


def signals(scene: Scene, name: str, **wanted: str) -> list[SimpleNamespace]:
    """What a signal has told in the beats, as texts."""
    with contextlib.suppress(FileNotFoundError):
        lines = (scene.directory / "signals.jsonl").read_text().splitlines(keepends=True)
        found = [json.loads(line) for line in lines if line.endswith("\n")]
        return [
            SimpleNamespace(**told)
            for told in found
            if told["signal"] == name and all(told.get(key) == value for key, value in wanted.items())
        ]
    return []


def once(task: str, **fields: Any) -> dict[str, Any]:
    """An entry with one slot that `due_since` makes due, and no other while the test runs."""
    return {"task": f"project.{task}", "every": PERIOD, **fields}


def due_since(scene: Scene, ago: timedelta | None = None) -> datetime:
    """Let the ledger know the scene's entries as last decided `ago` (by default, one period each); returns then.

    So a leader finds at once what has come due since.
    """
    now = datetime.now(timezone.utc)
    for name, spec in scene.schedule.items():
        every = timedelta(seconds=spec["every"])
        entry = {
            "slot": str(slot_to_us(now - (ago or every))),
            "fingerprint": f"interval:{every // timedelta(microseconds=1)}us",
            "count": 0,
            "missed": 0,
        }
        scene.redis.hset(scene.key("entries"), name, json.dumps(entry))
    return now - (ago or timedelta(0))


def assert_gapless(keys: list[str], entry: str = "tick", period: float = 1.0) -> None:
    """Each slot of the entry once, with no slot missing in between."""
    slots = sorted(slot for name, slot in map(parse_tick_key, keys) if name == entry)
    assert len(slots) == len(set(slots)), f"sent twice: {sorted(s for s in set(slots) if slots.count(s) > 1)}"
    gaps = [(a, b) for a, b in itertools.pairwise(slots) if b - a != timedelta(seconds=period)]
    assert not gaps, f"slots are missing between {gaps}"


def events(ledger: Ledger, name: str, **wanted: str) -> list[dict[str, str]]:
    """The events of this name, oldest first, with their time as `t`."""
    found = [
        {**fields, "t": str(int(ident.partition("-")[0]) / 1000)}
        for ident, fields in ledger.events(most=20_000)
        if fields["event"] == name
    ]
    return [fields for fields in found if all(fields.get(key) == value for key, value in wanted.items())]


def unexplained(audit: Audit) -> list[str]:
    """The slots that nothing explains."""
    return [f"{slot.key}: {slot.reason}" for slot in audit.having("unexplained")]


def runner(workers: Iterable[Worker], run: SimpleNamespace) -> Worker:
    """The worker that a run is on: it, or its child, noted the run."""
    with contextlib.suppress(OSError), open(f"/proc/{run.pid}/stat") as file:
        parent = int(file.read().rpartition(")")[2].split()[1])
        return next(worker for worker in workers if worker.pid in (run.pid, parent))
    return next(worker for worker in workers if worker.pid == run.pid)


@dataclass(frozen=True)
class Interval:
    """The time that one run took; `end` is infinite where none was noted."""

    key: str
    attempt: int
    pid: int
    start: float
    end: float


def intervals(scene: Scene, entry: str = "") -> list[Interval]:
    """The runs of an entry, or of all, in the order of their begin."""
    lines = [
        line for line in scene.runs(None) if line.key and line.key.startswith(f"{entry}@" if entry else "")
    ]
    begun = [line for line in lines if line.event == "start"]
    found = []
    for line in begun:
        ends = [
            other.t
            for other in lines
            if other.event != "start"
            and (other.key, other.pid, other.attempt, other.retries)
            == (line.key, line.pid, line.attempt, line.retries)
        ]
        found.append(Interval(line.key, line.attempt, line.pid, line.t, min(ends, default=float("inf"))))
    return sorted(found, key=lambda interval: interval.start)


def most_at_once(runs: Iterable[Interval]) -> int:
    """How many of the runs were under way at the same time, at most."""
    runs = list(runs)
    return max((sum(other.start <= run.start < other.end for other in runs) for run in runs), default=0)
