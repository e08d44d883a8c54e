"""A leader is told to stop just as Redis loses its data: nobody knows as well what it had claimed and not sent."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from celery_leaderbeat.recall import LOST
from tests.support.history import assert_gapless
from tests.support.scene import Beat, Scene, keys_of, leader
from tests.support.waits import wait_for

SCHEDULE: dict[str, Any] = {
    prefer: {"task": "project.record", "every": 0.5, "policy": {"catch_up": "all", "prefer": prefer}}
    for prefer in ("missed", "duplicate")
}
SOON = 15.0

#: For a beat: empties Redis and stops itself, once it is told to by a file.
STRIKES = """
import contextlib, os, signal

import redis

from celery_leaderbeat.dispatch import Dispatcher
from celery_leaderbeat.scheduler import Scheduler
from celery_leaderbeat.sender import Sender

SWALLOWED = []


def strike():
    try:
        os.remove(os.environ["LB_STRIKE"])
    except FileNotFoundError:
        return
    redis.Redis.from_url(app.conf.leaderbeat_redis_url).flushdb()
    with contextlib.suppress(*SWALLOWED):
        os.kill(os.getpid(), signal.SIGTERM)
    if SWALLOWED:
        os.kill(os.getpid(), signal.SIGTERM)


def before(owner, name):
    original = getattr(owner, name)

    def call(self, *args, **kwargs):
        strike()
        return original(self, *args, **kwargs)

    setattr(owner, name, call)
"""
#: A batch is claimed, and nothing of it published yet; or nothing is under way.
IN_A_TICK = STRIKES + "before(Sender, '_publish')\n"
BETWEEN_TICKS = STRIKES + "before(Scheduler, 'tick')\n"
#: What ends the tick is swallowed by somebody's code the first time, so that it is told twice within the tick.
TOLD_TWICE = IN_A_TICK + "SWALLOWED.append(SystemExit)\n"
#: Told to stop once more, when it leads once more.
AGAIN = """
original = Dispatcher.restore


def restore(self, term, patience):
    if original(self, term, patience):
        os.kill(os.getpid(), signal.SIGTERM)
    return False


Dispatcher.restore = restore
"""


def fleet(scene: Scene, tmp_path: Path, code: str) -> tuple[Beat, Beat]:
    """A leader that runs the code, and a standby; slots have been sent."""
    plugin = tmp_path / "strikes.py"
    plugin.write_text(code)
    first = scene.start_beat(env={"LB_PLUGIN": str(plugin), "LB_STRIKE": str(tmp_path / "strike")})
    leader(scene)
    second = scene.start_beat()
    second.wait_for_log("Standing by", timeout=SOON)
    wait_for(lambda: len(keys_of(scene.beat_publishes())) >= 6, SOON, "slots are sent")
    return first, second


@pytest.mark.schedule(SCHEDULE)
@pytest.mark.matrix("valkey+rabbitmq")
@pytest.mark.parametrize(
    "code", [IN_A_TICK, BETWEEN_TICKS, TOLD_TWICE], ids=["in a tick", "between ticks", "told twice"]
)
def test_a_leader_that_stops_as_redis_loses_its_data_puts_back_what_it_knows_before_it_goes(
    scene: Scene, tmp_path: Path, code: str
) -> None:
    first, second = fleet(scene, tmp_path, code)
    (tmp_path / "strike").touch()
    assert first.wait(SOON)["StatusCode"] == 0
    assert first.find("it leads until it has put back what it remembers")
    assert first.find("Handed over: released the lease")
    leader(scene, SOON, other_than=first)
    before = len(keys_of(scene.beat_publishes()))
    wait_for(lambda: len(keys_of(scene.beat_publishes())) >= before + 8, SOON, "the other sends")
    for prefer in SCHEDULE:
        assert_gapless(
            [key for key in keys_of(scene.beat_publishes()) if key.startswith(f"{prefer}@")], period=0.5
        )
    assert not first.find(LOST)
    assert not second.find(LOST)


@pytest.mark.schedule(SCHEDULE)
@pytest.mark.matrix("valkey+rabbitmq")
@pytest.mark.parametrize("code", [IN_A_TICK, BETWEEN_TICKS], ids=["in a tick", "between ticks"])
def test_who_is_told_to_stop_once_more_meanwhile_goes_at_once_and_releases_the_lease(
    scene: Scene, tmp_path: Path, code: str
) -> None:
    first, second = fleet(scene, tmp_path, code + AGAIN)
    (tmp_path / "strike").touch()
    assert first.wait(SOON)["StatusCode"] == 0
    assert len(first.find("it leads until it has put back what it remembers")) == 1
    assert not first.find("isn't put back")
    assert first.find("Handed over: released the lease")
    # Far sooner than the lease would expire.
    second.wait_for_log("Elected", timeout=5)
