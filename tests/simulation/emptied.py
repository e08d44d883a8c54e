"""What must hold where Redis is emptied under a leader that is well: it lives, isn't held up, and reaches Redis.

Then nothing is lost but what Redis alone knew. The ledger can't be asked for what was before, so that this judges by the
effects: each slot that was called for was sent, once, and ran, or a leader has said that it won't be sent, and why.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from datetime import datetime, timedelta, timezone
from typing import Any

from celery.schedules import maybe_schedule

from celery_leaderbeat.tick import slot_to_us, tick_key
from celery_leaderbeat.timeline import slots_between
from tests.simulation.invariants import unfinished
from tests.simulation.journal import Body
from tests.simulation.workers import TASKS
from tests.simulation.world import World

__all__ = ["unexplained"]

#: Seconds after the first election within which all entries are known.
_BEGINNING = 2.0
#: Faults after which a run of which the ledger has lost the record may be repeated.
_DEADLY = ("worker killed at a point", "worker frozen at a point")
_REPEATING = (*_DEADLY, "delivered again")


def unexplained(world: World, until: datetime) -> Iterator[str]:
    """What is wrong with slots of all entries up to a time."""
    since = datetime.fromtimestamp(world.journal.first_elected_at / 1e6, timezone.utc)
    for name, entry in world.schedule.items():
        schedule = maybe_schedule(entry["schedule"], app=world.app)
        for slot in slots_between(schedule, since + timedelta(seconds=_BEGINNING), until):
            for wrong in _wrong(world, name, entry, slot):
                yield f"{tick_key(name, slot)} {wrong}"


def _wrong(world: World, name: str, entry: Mapping[str, Any], slot: datetime) -> Iterator[str]:
    journal, key, at = world.journal, tick_key(name, slot), slot_to_us(slot)
    copies = journal.sent.get(key, {})
    said = [told for told in journal.left_out[name] if told.first <= at <= told.last]
    lost = [told for told in said if told.reason.startswith("Redis has lost")]
    policy = entry["options"]["leaderbeat"]
    waits = policy["overlap"] != "allow" and bool(unfinished(world, name) - {key})
    if not copies and not said and not waits:
        yield "was neither sent nor said to be missed or skipped"
    if lost:
        yield f"is said to be {lost[0].end}, {lost[0].reason}; its leader was well"
    elif copies and said:
        yield f"was sent, and is said to be {said[0].end}, {said[0].reason}"
    yield from _sent_again(copies, policy)
    if copies and entry["task"].startswith("fenced"):
        begun = any(run.key == key for run in journal.runs.values())
        yield from _not_run(world, entry, begun, journal.bodies.get(key, []))


def _sent_again(copies: Mapping[int, Any], policy: Mapping[str, Any]) -> Iterator[str]:
    for attempt, sent in copies.items():
        if len(sent) > 1:
            yield f"was sent as attempt {attempt} {len(sent)} times: {sent}"
    if len(copies) > 1 and policy["on_crash"] != "rerun":
        yield f"was sent as {len(copies)} attempts"


def _not_run(world: World, entry: Mapping[str, Any], begun: bool, bodies: list[Body]) -> Iterator[str]:
    acks_late = TASKS[entry["task"]][1]
    # One that is frozen may be taken for dead.
    died = any(world.faults.happened[kind] for kind in _DEADLY)
    if not begun and (acks_late or not died):
        yield "was sent, and no worker has begun it"
    # A message that is acknowledged before it runs can't be rejected into its queue: that is a failure.
    ends = ("done", "failed") if acks_late else ("done", "failed", "requeued")
    ended = [body for body in bodies if body.end in ends]
    # What dies is left to the broker.
    comes_back = acks_late and entry["options"]["leaderbeat"]["on_crash"] == "auto"
    # Its message is acknowledged, and the ledger has forgotten it: nobody waits for it.
    goes_on = any(not body.end and body.by.alive for body in bodies)
    if begun and not ended and not goes_on and (comes_back or not died):
        yield f"was begun, and never came to its end: {bodies}"
    may_repeat = any(world.faults.happened[kind] for kind in _REPEATING)
    # One that runs for longer than the broker waits for it: the ledger, which would put the copy off, has forgotten it.
    may_repeat = may_repeat or any(body.key in world.broker.came_again for body in bodies)
    if len(ended) > 1 and not may_repeat:
        yield f"ended {len(ended)} times: {ended}"
