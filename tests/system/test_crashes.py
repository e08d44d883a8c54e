"""A leader that dies or freezes at every step between claim, publish and confirm.

The fault is injected by a plugin that wraps one call of the package, passes everything through, and sends the
process a signal the third time it is reached.
"""

from __future__ import annotations

import re
import signal
from collections import Counter, defaultdict
from datetime import datetime, timedelta

import psutil
import pytest

from celery_leaderbeat.tick import parse_tick_key, tick_key
from tests.support.containers import BeatNode, LeaderbeatSetup
from tests.support.scene import keys_of, leader
from tests.support.waits import wait_for

#: Step -> (class, method, whether the signal comes after the call).
STEPS = {
    "before the claim": ("celery_leaderbeat.ledger:Ledger.claim", False),
    "after the claim": ("celery_leaderbeat.ledger:Ledger.claim", True),
    "before the publish": ("celery_leaderbeat.publisher:Publisher._publish", False),
    "during the publish": ("kombu.transport.virtual.base:Channel.basic_publish", False),
    "after the publish": ("celery_leaderbeat.publisher:Publisher._send", True),
    "before the confirm": ("celery_leaderbeat.ledger:Ledger.confirm", False),
    "after the confirm": ("celery_leaderbeat.ledger:Ledger.confirm", True),
}

PLUGIN = """
import importlib, os, signal
module, _, path = {target!r}.partition(":")
owner, name = path.split(".")
owner = getattr(importlib.import_module(module), owner)
original, calls = getattr(owner, name), []

def wrapped(*args, **kwargs):
    calls.append(1)
    if not {after} and len(calls) == {nth}:
        os.kill(os.getpid(), signal.{signum})
    result = original(*args, **kwargs)
    if {after} and len(calls) == {nth}:
        os.kill(os.getpid(), signal.{signum})
    return result

setattr(owner, name, wrapped)
"""

SCHEDULE = {
    prefer: {
        "task": "project.fenced",
        "every": 1.0,
        "policy": {"catch_up": "all", "prefer": prefer},
    }
    for prefer in ("missed", "duplicate")
}


def fault(stage: LeaderbeatSetup, step: str, signum: signal.Signals, nth: int) -> dict[str, str]:
    """The environment of a beat that signals itself at the nth call of a step."""
    target, after = STEPS[step]
    if step == "during the publish" and stage.rabbit is not None:
        target = "amqp.channel:Channel._basic_publish"
    path = stage.directory / "fault.py"
    path.write_text(PLUGIN.format(target=target, after=after, signum=signum.name, nth=nth))
    return {"LB_PLUGIN": str(path)}


def slots_by_entry(keys: list[str]) -> dict[str, list[datetime]]:
    found: dict[str, list[datetime]] = defaultdict(list)
    for key in keys:
        entry, slot = parse_tick_key(key)
        found[entry].append(slot)
    return {entry: sorted(slots) for entry, slots in found.items()}


def expected_keys(keys: list[str]) -> dict[str, list[str]]:
    """Entry -> the tick keys of all its slots from the first to the last that appears."""
    expected = {}
    for entry, slots in slots_by_entry(keys).items():
        count = int((slots[-1] - slots[0]) / timedelta(seconds=1)) + 1
        expected[entry] = [tick_key(entry, slots[0] + timedelta(seconds=i)) for i in range(count)]
    return expected


def wait_until_stopped(beat: BeatNode) -> None:
    wait_for(lambda: psutil.Process(beat.pid).status() == psutil.STATUS_STOPPED, 15, "the leader has frozen")


def keys_of_unfinished(stage: LeaderbeatSetup) -> list[str]:
    """Tick keys that a leader still has to look after."""
    return stage.redis.zrange(stage.key("unfinished"), 0, -1)


at_each_end = pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "frozen"])


@pytest.mark.schedule(SCHEDULE)
@pytest.mark.beats(0)
@pytest.mark.matrix("valkey")
@pytest.mark.conf(leaderbeat_lease_ttl=3, leaderbeat_publish_timeout=0.7)
@at_each_end
@pytest.mark.parametrize("step", STEPS)
def test_a_leader_that_fails_at_any_step_doubles_nothing_and_loses_nothing_unsaid(
    celery_setup: LeaderbeatSetup, step: str, signum: signal.Signals
) -> None:
    fail_at(celery_setup, step, signum)


@pytest.mark.schedule(SCHEDULE)
@pytest.mark.beats(0)
@pytest.mark.matrix("redis+rabbitmq")
@pytest.mark.conf(leaderbeat_lease_ttl=3, leaderbeat_publish_timeout=0.7)
@at_each_end
@pytest.mark.parametrize("step", ["during the publish", "after the publish"])
def test_a_leader_that_fails_at_a_publish_to_rabbitmq_doubles_nothing_and_loses_nothing_unsaid(
    celery_setup: LeaderbeatSetup, step: str, signum: signal.Signals
) -> None:
    fail_at(celery_setup, step, signum)


def fail_at(celery_setup: LeaderbeatSetup, step: str, signum: signal.Signals) -> None:
    """Let the leader fail at a step, and look at what became of every slot."""
    first = celery_setup.add_beat(env=fault(celery_setup, step, signum, nth=5))
    leader(celery_setup)
    for _ in range(2):
        celery_setup.add_beat()
    if signum is signal.SIGKILL:
        wait_for(lambda: first.status == "exited", 15, "the leader has killed itself")
    else:
        wait_until_stopped(first)
    second = leader(celery_setup, 8, other_than=first)
    sent = len(celery_setup.beat_publishes())
    wait_for(lambda: len(celery_setup.beat_publishes()) >= sent + 4, 10, "the next leader sends")
    if signum is signal.SIGSTOP:
        first.thaw()
        first.wait_for_log("Standing by", timeout=15, since=None)
    sent = len(celery_setup.beat_publishes())
    wait_for(lambda: len(celery_setup.beat_publishes()) >= sent + 4, 10, "the next leader goes on")
    unsettled = {"claimed", "returned"}
    wait_for(
        lambda: (
            not any(
                celery_setup.slot(key).get("state") in unsettled for key in keys_of_unfinished(celery_setup)
            )
        ),
        10,
        "what was given back or is in doubt is decided",
    )
    for beat in celery_setup.beats:
        if beat.status == "running":
            beat.terminate()
    second.wait(5)

    published = Counter(keys_of(celery_setup.beat_publishes()))
    expected = expected_keys(list(published))
    wait_for(
        lambda: set(published) <= set(keys_of(celery_setup.runs("end"))), 10, "what was published has run"
    )
    runs = Counter(keys_of(celery_setup.runs()))
    assert max(runs.values()) == 1, "a FencedTask runs a slot once"

    assert max(published[key] for key in expected["missed"]) == 1, "no second send, ever"
    missed = [key for key in expected["missed"] if key not in runs]
    states = {key: celery_setup.slot(key).get("state") for key in missed}
    assert set(states.values()) <= {"unconfirmed"}, "not run, and not reported missed"
    said = [line.text for beat in celery_setup.beats for line in beat.find("missed", since=0)]
    for key in missed:
        assert any(f"the slot {key.split('@')[1]} is missed" in text for text in said)
    assert len(missed) <= 1

    assert not [key for key in expected["duplicate"] if key not in runs], "never lost"
    assert max(published[key] for key in expected["duplicate"]) <= 2
    assert sum(published[key] - 1 for key in expected["duplicate"] if key in published) <= 1


ENTRIES = 1000
MANY = {
    f"{prefer}-{i:03d}": {
        "task": "project.fenced",
        "every": 20.0,
        "policy": {"prefer": prefer, "catch_up": "all"},
    }
    for i in range(ENTRIES // 2)
    for prefer in ("missed", "duplicate")
}


@pytest.mark.schedule(MANY)
@pytest.mark.beats(0)
@pytest.mark.workers(1, pool="threads", concurrency=8)
@pytest.mark.matrix("valkey", long=("redis+rabbitmq",))
@pytest.mark.conf(leaderbeat_lease_ttl=3, leaderbeat_publish_timeout=1, worker_prefetch_multiplier=8)
@pytest.mark.timeout(120)
def test_a_leader_frozen_within_a_thousand_sends_doubles_at_most_the_one_on_its_way(
    celery_setup: LeaderbeatSetup,
) -> None:
    first = celery_setup.add_beat(env=fault(celery_setup, "after the publish", signal.SIGSTOP, nth=250))
    leader(celery_setup)
    celery_setup.add_beat()
    wait_for(celery_setup.beat_publishes, 40, "the slots come due")
    wait_until_stopped(first)
    second = leader(celery_setup, 8, other_than=first)
    wait_for(
        lambda: len({r.key for r in celery_setup.beat_publishes()}) >= ENTRIES - 40, 40, "the rest is sent"
    )
    first.thaw()
    first.wait_for_log("Standing by", timeout=15, since=None)
    slot = min(parse_tick_key(key)[1] for key in keys_of(celery_setup.beat_publishes()))
    round_keys = [tick_key(name, slot) for name in MANY]

    def ended() -> bool:
        states = Counter(celery_setup.slot(key).get("state") for key in round_keys)
        return sum(states[state] for state in ("done", "unconfirmed", "missed")) == ENTRIES

    wait_for(
        ended,
        30,
        lambda: str(Counter(celery_setup.slot(key).get("state") for key in round_keys)),
        interval=0.2,
    )
    published = Counter(key for key in keys_of(celery_setup.beat_publishes()) if key in set(round_keys))
    runs = Counter(key for key in keys_of(celery_setup.runs()) if key in set(round_keys))
    assert max(runs.values()) == 1
    assert sum(count - 1 for count in published.values()) <= 1, "at most the one in flight"
    assert not [key for key in published if published[key] > 1 and key.startswith("missed")]
    lost = [key for key in round_keys if key not in runs]
    assert not [key for key in lost if key.startswith("duplicate")]
    said = "\n".join(line.text for beat in celery_setup.beats for line in beat.find("missed", since=0))
    for key in lost:
        assert re.search(rf"Entry '{re.escape(parse_tick_key(key)[0])}': the slot .* is missed", said)
    assert first.status == second.status == "running"
