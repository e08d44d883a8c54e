"""Schedules for the stories: entries with every legal mix of policies."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Mapping
from typing import Any

from celery.schedules import crontab

__all__ = ["MIXES", "entry", "mix_name", "mixed_schedule"]

_PREFER = ("missed", "duplicate")
_ON_CRASH = ("auto", "skip", "rerun")
_OVERLAP = ("allow", "skip", "queue")
_CATCH_UP = ("latest", "all", "none")
_PERIODS = (20.0, 20.0, 30.0, 30.0, 45.0, 60.0, 60.0, 90.0, 120.0, 300.0, 600.0, 900.0)
_CRONTABS = (("*", "*"), ("*/2", "*"), ("*/5", "*"), ("3,17,42", "*"), ("*/15", "3"))

Mix = Mapping[str, Any]


def _legal() -> Iterator[Mix]:
    for prefer, on_crash, overlap, catch_up in itertools.product(_PREFER, _ON_CRASH, _OVERLAP, _CATCH_UP):
        yield {"prefer": prefer, "on_crash": on_crash, "overlap": overlap, "catch_up": catch_up}


#: Every legal mix for a FencedTask.
MIXES: tuple[Mix, ...] = tuple(_legal())


def mix_name(mix: Mix) -> str:
    """`missed-rerun-queue-latest`."""
    return "-".join(str(mix[key]) for key in ("prefer", "on_crash", "overlap", "catch_up"))


def entry(task: str, schedule: Any, policy: Mapping[str, Any]) -> dict[str, Any]:
    """One entry of a `beat_schedule`."""
    return {"task": task, "schedule": schedule, "options": {"leaderbeat": dict(policy)}}


def mixed_schedule(rng: random.Random, count: int) -> dict[str, dict[str, Any]]:
    """So many entries, their policies spread over all legal mixes."""
    mixes = rng.sample(MIXES, min(count, len(MIXES)))
    schedule = {}
    for number in range(count):
        mix = dict(mixes[number % len(mixes)])
        if rng.random() < 0.3:
            mix["jitter"] = rng.choice((1.0, 5.0, 60.0))
        if rng.random() < 0.1:
            mix["deadline"] = rng.choice((40.0, 120.0))
        if mix["on_crash"] == "rerun" and rng.random() < 0.3:
            mix["max_attempts"] = rng.choice((1, 2, 5))
        needs_fence = mix["on_crash"] == "rerun" or mix["overlap"] != "allow"
        # What a worker that acknowledges early takes with it to the grave counts as unfinished for an hour.
        early = 0.5 if mix["overlap"] != "allow" else 3
        task = rng.choices(
            ("fenced.late", "fenced.early", "plain.late"), (6, early, 0 if needs_fence else 4)
        )[0]
        if rng.random() < 0.2:
            minute, hour = rng.choice(_CRONTABS)
            schedule[f"cron-{number}"] = entry(task, crontab(minute=minute, hour=hour), mix)
        else:
            schedule[f"every-{number}"] = entry(task, rng.choice(_PERIODS), mix)
    return schedule
