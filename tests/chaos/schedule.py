"""What the beats send: entries over the product of policies, and what a new version of the code changes."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

from celery_leaderbeat.schedules import crontab

__all__ = ["CHANGING", "EXPIRES", "Entry", "entries", "schedule_json"]

#: Seconds after which a message of an entry with an overlap policy isn't run any more.
EXPIRES = 20.0


@dataclass(frozen=True)
class Entry:
    """One entry, as the checker knows it.

    Attributes:
        every: its period in seconds, or crontab: its fields.
        task: `early` (acknowledged before it runs), `late` (after), `flaky` (asks for a retry once), `plain` (no
            FencedTask).
        seconds: how long its body takes.
        policy: as in the entry's options; what isn't there has the default.
    """

    name: str
    task: str
    seconds: float
    every: float | None = None
    crontab: Mapping[str, str] | None = field(default=None, hash=False)
    policy: Mapping[str, Any] = field(default_factory=dict, hash=False)

    @property
    def prefer(self) -> str:
        """`missed` or `duplicate`."""
        return str(self.policy.get("prefer", "missed"))

    @property
    def catch_up(self) -> str:
        """`latest`, `all` or `none`."""
        return str(self.policy.get("catch_up", "latest"))

    @property
    def lookback(self) -> int:
        """The most slots of a backlog that are sent."""
        return int(self.policy.get("lookback", 100 if self.catch_up == "all" else 1))

    @property
    def on_crash(self) -> str:
        """`auto`, `rerun` or `skip`."""
        return str(self.policy.get("on_crash", "auto"))

    @property
    def overlap(self) -> str:
        """`allow`, `skip` or `queue`."""
        return str(self.policy.get("overlap", "allow"))

    @property
    def fenced(self) -> bool:
        """Whether its task is a FencedTask."""
        return self.task != "plain"

    @property
    def acks_late(self) -> bool:
        """Whether its messages are acknowledged after they have run."""
        return self.task == "late"

    @property
    def schedule(self) -> Any:
        """The schedule, as Celery has it; crontabs are in UTC."""
        if self.every is not None:
            return timedelta(seconds=self.every)
        return crontab(**dict(self.crontab or {}), tz="UTC")

    @property
    def options(self) -> dict[str, Any]:
        """Other options. Where a slot waits for an earlier one, that ends with the expiry of a message that got lost."""
        return {} if self.overlap == "allow" else {"expires": EXPIRES}

    def spec(self) -> dict[str, Any]:
        """The entry as the project under test reads it from `LB_SCHEDULE`."""
        when = {"every": self.every} if self.every is not None else {"crontab": dict(self.crontab or {})}
        return {
            "task": f"chaos.{self.task}",
            "kwargs": {"seconds": self.seconds},
            "policy": dict(self.policy),
            "options": self.options,
            **when,
        }


#: Entries that a new version of the code changes.
CHANGING = ("changing", "coming-and-going")

#: About five slots a second in all: enough for thousands in half an hour, and a load that two busy cores bear.
_PERIODS = (4.0, 5.0, 8.0, 12.0, 6.0, 15.0, 10.0, 20.0, 9.0, 7.0, 14.0)
_BODIES = (0.02, 0.05, 0.1, 0.4, 0.05, 0.8, 0.02)
_CRASHES = (("auto", "early"), ("auto", "late"), ("rerun", "late"), ("rerun", "early"), ("skip", "early"))


def entries(version: int) -> dict[str, Entry]:
    """The entries of a version of the code, by name."""
    found = [*_product(), *_special(), *_changing(version)]
    return {entry.name: entry for entry in found}


def schedule_json(version: int) -> dict[str, Any]:
    """The same as the project under test reads it."""
    return {name: entry.spec() for name, entry in entries(version).items()}


def _product() -> list[Entry]:
    """Every pair of prefer and catch_up; the other parts of the policy go round, so that most pairs of those occur."""
    periods, bodies = itertools.cycle(_PERIODS), itertools.cycle(_BODIES)
    crashes, overlaps = itertools.cycle(_CRASHES), itertools.cycle(("allow", "queue", "allow", "skip"))
    found = []
    for _ in range(4):
        for prefer, catch_up in itertools.product(("missed", "duplicate"), ("latest", "all", "none")):
            (on_crash, task), overlap = next(crashes), next(overlaps)
            policy = {"prefer": prefer, "catch_up": catch_up, "on_crash": on_crash, "overlap": overlap}
            name = f"{len(found):02}-{prefer}-{catch_up}-{on_crash}-{overlap}"
            if on_crash == "rerun":
                policy["max_attempts"] = 20
            found.append(Entry(name, task, next(bodies), next(periods), policy=policy))
    return found


def _special() -> list[Entry]:
    every_minute = {"minute": "*"}
    return [
        Entry("each-second", "early", 0.01, 1.0, policy={"prefer": "duplicate", "catch_up": "all"}),
        Entry("flaky", "flaky", 0.05, 8.0, policy={"prefer": "duplicate", "catch_up": "all"}),
        Entry("flaky-missed", "flaky", 0.05, 11.0, policy={"prefer": "missed", "catch_up": "all"}),
        Entry("plain-missed", "plain", 0.02, 4.0, policy={"prefer": "missed", "catch_up": "all"}),
        Entry("plain-duplicate", "plain", 0.02, 5.0, policy={"prefer": "duplicate", "catch_up": "all"}),
        Entry("deadline", "early", 0.02, 5.0, policy={"catch_up": "all", "deadline": 4.0}),
        Entry("jitter", "early", 0.02, 6.0, policy={"prefer": "duplicate", "catch_up": "all", "jitter": 3.0}),
        Entry("minutely", "early", 0.05, crontab=every_minute, policy={"prefer": "duplicate"}),
        Entry("minutely-missed", "late", 0.05, crontab=every_minute, policy={"catch_up": "all"}),
    ]


def _changing(version: int) -> list[Entry]:
    policy = {"prefer": "duplicate", "catch_up": "all"}
    changing = Entry("changing", "early", 0.02, 6.0 if version % 2 else 8.0, policy=policy)
    if version % 2:
        return [changing]
    return [changing, Entry("coming-and-going", "early", 0.02, 6.0, policy=policy)]
