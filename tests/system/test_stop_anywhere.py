"""`close()` from a signal handler: wherever it interrupts the tick, the beat stops in order.

By default a sample of all places is tried, about a hundred; with `LB_EVERY_PLACE=1` each of them (half an hour).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.process import REPO
from tests.support.servers import RedisServer

#: What `close()` may take, in seconds.
CLOSED_WITHIN = 1.0


@pytest.mark.parametrize(
    ("how", "fine", "part"),
    [("close", False, (7, 60)), ("exit", False, (27, 120)), ("close", True, (11, 400))],
    ids=["at a line, closes in the handler", "at a line, closes on the way out", "at an instruction"],
)
def test_a_beat_that_is_told_to_stop_anywhere_stops_at_once_and_leaves_each_slot_with_a_known_end(
    start_redis: Callable[..., RedisServer], tmp_path: Path, how: str, fine: bool, part: tuple[int, int]
) -> None:
    every = bool(os.environ.get("LB_EVERY_PLACE"))
    what = {
        "url": start_redis("valkey").url(),
        "how": how,
        "fine": fine,
        "part": (0, 1) if every else part,
    }
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.stop_anywhere", json.dumps(what)],
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join(filter(None, [str(REPO), os.environ.get("PYTHONPATH")])),
        },
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=3600 if every else 110,
    )
    assert done.returncode == 0, done.stderr
    *lives, summary = map(json.loads, done.stdout.splitlines())
    assert summary["places"] > 1000
    stopped = [life for life in lives if life["stopped"]]
    assert len(stopped) > 0.8 * len(lives), "nearly all places are come to again"
    assert sum(life["slots"] > 0 for life in stopped) > len(stopped) / 4, "many have claimed slots before"
    assert not [life for life in stopped if _wrong(life)]


def _wrong(life: dict[str, Any]) -> bool:
    return bool(life["lease"] or life["wrong"] or life["errors"] or life["took"] > CLOSED_WITHIN)


_LOCKED = """
import json, logging, sys, time
from celery import Celery
from celery_leaderbeat import Scheduler
from celery_leaderbeat.ledger import Ledger

logging.basicConfig(level=logging.INFO, filename="locked.log")
app = Celery("locked", broker=sys.argv[1], set_as_current=False)
app.conf.beat_schedule = {"tick": {"task": "somewhere.task", "schedule": 0.2}}
scheduler, ledger = Scheduler(app), Ledger.for_app(app)
deadline = time.monotonic() + 20
while not ledger.counts().get("sent") and time.monotonic() < deadline:
    time.sleep(min(scheduler.tick(), 0.01))
led = ledger.leader() is not None
(handler,) = logging.getLogger().handlers
# As where the signal interrupts a line of the log.
handler.acquire()
if sys.argv[2] == "before":
    elector = scheduler._running.elector
    elector.step_down(elector.term(), "it is told to, and says that no other replica is there")
    time.sleep(0.3)
began = time.monotonic()
scheduler.close()
print(json.dumps([led, ledger.leader() is None, time.monotonic() - began]))
"""


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_stop_that_interrupts_a_line_of_the_log_releases_the_lease(
    start_redis: Callable[..., RedisServer], tmp_path: Path, when: str
) -> None:
    """The elector's thread waits for the lock of the log handler, which the interrupted code holds.

    It does so from before the stop on, or when it has released the lease and says so.
    """
    done = subprocess.run(
        [sys.executable, "-c", _LOCKED, start_redis("valkey").url(), when],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    led, released, took = json.loads(done.stdout)
    assert led
    assert released
    assert took < CLOSED_WITHIN
    assert "could not be released in time" not in (tmp_path / "locked.log").read_text()
