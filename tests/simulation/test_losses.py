"""Stories in which Redis loses data, again and again: nothing is sent twice, and epochs rise."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime, timezone
from typing import Any

import pytest
from celery.schedules import maybe_schedule

from celery_leaderbeat.recall import LOST
from celery_leaderbeat.tick import slot_to_us, tick_key
from celery_leaderbeat.timeline import slots_between
from tests.simulation.faults import (
    GoesBackAsItStops,
    GoesBackOnce,
    Losses,
    LostAsATermBegins,
    LostAsItStops,
    Replaced,
)
from tests.simulation.world import Work, World
from tests.support.faketime_server import FrozenServer

#: More with `LEADERBEAT_LOSSES=30`.
_SEEDS = range(1, 1 + int(os.environ.get("LEADERBEAT_LOSSES", "1")))


def _schedule(rng: random.Random) -> dict[str, object]:
    return {
        f"entry {number}": {
            "task": "plain.early",
            "schedule": rng.choice((1.0, 2.5, 7.0, 30.0)),
            "options": {"leaderbeat": {"catch_up": rng.choice(("all", "latest")), "prefer": "missed"}},
        }
        for number in range(12)
    }


def _world(server: FrozenServer, seed: int, make_faults: Callable[..., Any]) -> World:
    return World(
        server,
        seed,
        _schedule(random.Random(seed)),
        beats=3,
        workers=1,
        work=lambda stamp, task: Work((0.1,)),
        make_faults=make_faults,
        restart_after=lambda world: world.rng.uniform(0.5, 20.0),
    )


@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", _SEEDS)
def test_nothing_is_sent_twice_and_epochs_rise_however_often_data_is_lost(
    frozen_server: FrozenServer, tell: Callable[[str], None], seed: int
) -> None:
    world = _world(frozen_server, seed, Losses)
    with world.living():
        world.start()
        world.run(10.0)
        world.faults.begin()
        world.run(400.0)
        sent = world.journal.sent
        twice = [
            f"{key} was sent {sum(map(len, attempts.values()))} times"
            for key, attempts in sent.items()
            if sum(map(len, attempts.values())) > 1
        ]
        broken = [*twice, *world.journal.violations, *world.journal.troubles]
        assert not broken, world.tell(broken)
        assert isinstance(world.faults, Losses)
        assert world.faults.lost > 2
        tell(f"seed {seed}: data was lost {world.faults.lost} times; {world.journal}")


@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", _SEEDS)
def test_a_leader_that_was_replaced_while_it_was_cut_off_sends_nothing_again_when_all_is_lost(
    frozen_server: FrozenServer, tell: Callable[[str], None], seed: int
) -> None:
    """Nor where all die that know what was sent meanwhile."""
    world = _world(frozen_server, seed, Replaced)
    with world.living():
        world.start()
        world.run(10.0)
        world.faults.begin()
        world.run(300.0)
        sent = {key: sum(map(len, attempts.values())) for key, attempts in world.journal.sent.items()}
        twice = [f"{key} was sent {count} times" for key, count in sent.items() if count > 1]
        assert not twice, world.tell(twice)
        assert isinstance(world.faults, Replaced)
        assert world.faults.lost > 2
        assert len(sent) > 500
        tell(f"seed {seed}: all was lost {world.faults.lost} times; {world.journal}")


@contextmanager
def _both_ways(server: FrozenServer, seed: int, make_faults: Callable[..., Any]) -> Iterator[World]:
    """A world that has found its feet, with entries that prefer a missed slot and ones that prefer a duplicate."""
    schedule: dict[str, Any] = {
        f"{prefer} {period:g}": {
            "task": "plain.early",
            "schedule": period,
            "options": {"leaderbeat": {"catch_up": "all", "prefer": prefer}},
        }
        for prefer in ("missed", "duplicate")
        for period in (1.0, 1.5, 4.0)
    }
    world = World(
        server,
        seed,
        schedule,
        beats=3,
        workers=1,
        work=lambda *_: Work((0.1,)),
        make_faults=make_faults,
    )
    with world.living():
        world.start()
        world.run(10.0)
        yield world


def _sent_or_said(world: World, seconds: float) -> list[str]:
    """Let faults happen for so long; the slots that were neither sent nor said to be missed, and what was sent twice."""
    since = datetime.fromtimestamp(world.hub.now / 1e6, timezone.utc)
    world.faults.begin()
    world.run(seconds)
    world.faults.end()
    until = datetime.fromtimestamp(world.hub.now / 1e6, timezone.utc)
    world.run(60.0)
    broken = list(world.journal.troubles)
    for name, entry in world.schedule.items():
        for slot in slots_between(maybe_schedule(entry["schedule"], app=world.app), since, until):
            key, at = tick_key(name, slot), slot_to_us(slot)
            copies = sum(map(len, world.journal.sent.get(key, {}).values()))
            said = [told.reason for told in world.journal.left_out[name] if told.first <= at <= told.last]
            if not copies and not said:
                broken.append(f"{key} was neither sent nor said to be missed")
            if copies > 1 and name.startswith("missed"):
                broken.append(f"{key} was sent {copies} times")
    return broken


@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", [seed + 1 for seed in _SEEDS])
def test_what_a_frozen_leader_had_claimed_is_sent_or_said_to_be_missed_when_all_is_lost_as_the_next_begins(
    frozen_server: FrozenServer, tell: Callable[[str], None], seed: int
) -> None:
    with _both_ways(frozen_server, seed, LostAsATermBegins) as world:
        broken = _sent_or_said(world, 600.0)
        assert not broken, world.tell(broken)
        assert isinstance(world.faults, LostAsATermBegins)
        assert world.faults.lost > 5
        tell(f"seed {seed}: all was lost {world.faults.lost} times as a term began; {world.journal}")


@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", _SEEDS)
@pytest.mark.parametrize("faults", [LostAsItStops, GoesBackAsItStops], ids=["all", "the latest moments"])
def test_what_a_leader_knows_that_is_told_to_stop_as_data_are_lost_isn_t_lost_with_it(
    frozen_server: FrozenServer, tell: Callable[[str], None], faults: type[LostAsItStops], seed: int
) -> None:
    with _both_ways(frozen_server, seed, faults) as world:
        broken = _sent_or_said(world, 900.0)
        broken += [
            f"{name}: {told.reason}"
            for name, all_told in world.journal.left_out.items()
            for told in all_told
            if told.reason == LOST
        ]
        assert not broken, world.tell(broken)
        assert isinstance(world.faults, LostAsItStops)
        assert world.faults.lost > 10
        tell(f"seed {seed}: data was lost {world.faults.lost} times as its leader stopped; {world.journal}")


def test_a_claim_that_comes_back_after_its_message_was_sent_sends_no_second_one(
    frozen_server: FrozenServer,
) -> None:
    entry = {"task": "plain.early", "schedule": 5.0, "options": {"leaderbeat": {"catch_up": "all"}}}
    world = World(frozen_server, 1, {"job": entry}, beats=2, workers=1, make_faults=GoesBackOnce)
    with world.living():
        world.start()
        world.run(60.0)
        assert isinstance(world.faults, GoesBackOnce)
        assert world.faults.went_back
        sent = {key: sum(map(len, attempts.values())) for key, attempts in world.journal.sent.items()}
        assert len(sent) >= 10
        assert set(sent.values()) == {1}, sent
        assert not [*world.journal.violations, *world.journal.troubles]
        states = {key: record.state for key, record in world.ledger().slots(list(sent)).items() if record}
        assert set(states.values()) <= {"sent"}, states
