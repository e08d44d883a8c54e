"""Entries of the schedule, loaded one by one: a bad one is named and left out, the others run."""

from __future__ import annotations

import difflib
import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any

from celery.schedules import BaseSchedule, crontab

from celery_leaderbeat.errors import EntryError, PolicyError, ScheduleError
from celery_leaderbeat.policy import Miss, Policy, Send, build_policy, decide
from celery_leaderbeat.settings import Settings
from celery_leaderbeat.timeline import fingerprint, next_slot, slots_between

__all__ = ["ASK_AGAIN_AFTER", "POLICY_OPTION", "Plan", "check_entry", "load_plans"]

logger = logging.getLogger(__name__)

#: The key of an entry's `options` that holds its policy. Celery's own beat never looks at it.
POLICY_OPTION = "leaderbeat"

#: A schedule that failed is asked again after this time.
ASK_AGAIN_AFTER = timedelta(minutes=1)

_ACCEPTED = ("task", "schedule", "args", "kwargs", "options", "relative")


@dataclass
class Plan:
    """One entry with its schedule, its policy and where it stands while this replica leads.

    `last` is the slot that was decided last, `next` the one after it (None: there is none any more), and
    `returned` holds slots that were to be sent and are known to be unsent.
    """

    name: str
    entry: Any
    schedule: Any
    fingerprint: str
    policy: Policy
    last: datetime | None = None
    next: datetime | None = None
    returned: list[datetime] = field(default_factory=list)
    _postponed: datetime | None = None

    def start(self, last: datetime) -> None:
        """Go on after the slot `last`."""
        self.last = last
        self.next = next_slot(self.schedule, last)
        self.returned = []

    def advance(self, slot: datetime) -> None:
        """`slot` is decided."""
        if slot in self.returned:
            self.returned.remove(slot)
        if self.last is None or slot > self.last:
            self.last = slot
            try:
                self.next = next_slot(self.schedule, slot)
            except Exception:
                self.next = None
                self.postpone(slot + ASK_AGAIN_AFTER)
                logger.exception(
                    "Entry %r: its schedule %r failed. It is asked again in %d s; the other entries run.",
                    self.name,
                    self.schedule,
                    ASK_AGAIN_AFTER.total_seconds(),
                    extra={"action": "schedule_failed", "entry": self.name},
                )

    def postpone(self, until: datetime) -> None:
        """Look at this entry again at `until`; what is due stays due."""
        self._postponed = until

    def give_back(self, slot: datetime) -> None:
        """`slot` is to be sent again."""
        if slot not in self.returned:
            self.returned.append(slot)
            self.returned.sort()

    @property
    def when(self) -> datetime | None:
        """When this entry has to be looked at; None if never."""
        if self._postponed is not None:
            return self._postponed
        return self.returned[0] if self.returned else self.next

    def decide(self, now: datetime, led_since: datetime) -> list[Send | Miss]:
        """What becomes of the slots that are due at `now`, oldest first."""
        assert self.last is not None
        if self._postponed is not None:
            self._postponed = None
            self.next = next_slot(self.schedule, self.last)
        due: Iterable[datetime] = ()
        if self.next is not None and self.next <= now:
            due = slots_between(self.schedule, self.last, now)
        return decide(self.policy, due, led_since=led_since, now=now, returned=tuple(self.returned))


def check_entry(name: Any, raw: Any, build: Callable[..., Any]) -> Any:
    """Build Celery's entry from one item of `beat_schedule`.

    Raises:
        EntryError: names the entry, the key, what is wrong and what to write instead.
    """
    if not isinstance(name, str) or not name:
        raise EntryError(f"Entry {name!r}: the name of an entry must be a string that isn't empty.")
    if hasattr(raw, "schedule") and hasattr(raw, "task"):
        _check_fields(name, {"task": raw.task, "schedule": raw.schedule})
        return raw
    if not isinstance(raw, Mapping):
        raise EntryError(f"Entry {name!r} is {raw!r}: it must be a dict with the keys 'task' and 'schedule'.")
    unknown = [key for key in raw if key not in _ACCEPTED]
    if unknown:
        nearest = difflib.get_close_matches(str(unknown[0]), _ACCEPTED, 1)
        hint = f" Did you mean {nearest[0]!r}?" if nearest else ""
        raise EntryError(
            f"Entry {name!r} has the unknown key {unknown[0]!r}; the keys are {', '.join(_ACCEPTED)}.{hint}"
        )
    _check_fields(name, raw)
    try:
        return build(**dict(raw, name=name))
    except Exception as exc:
        raise EntryError(f"Entry {name!r} can't be used: {exc}.") from exc


def _check_fields(name: str, raw: Mapping[str, Any]) -> None:
    schedule = raw.get("schedule")
    timed = isinstance(schedule, (int, float, timedelta)) and not isinstance(schedule, bool)
    asked = hasattr(schedule, "is_due") or hasattr(schedule, "remaining_estimate")
    for key, right, form in (
        ("task", isinstance(raw.get("task"), str) and raw.get("task"), "the task's name, a string"),
        ("schedule", timed or asked, "seconds, a timedelta, or a schedule such as crontab(minute=0)"),
        ("args", isinstance(raw.get("args") or (), (list, tuple)), "a list or a tuple"),
        ("kwargs", isinstance(raw.get("kwargs") or {}, Mapping), "a dict"),
        ("options", isinstance(raw.get("options") or {}, Mapping), "a dict"),
    ):
        if not right:
            raise EntryError(f"Entry {name!r} has the {key!r} {raw.get(key)!r}: it must be {form}.")


def load_plans(
    entries: Mapping[str, Any], settings: Settings, cron_deadline: float | None
) -> dict[str, Plan]:
    """Plans for all entries that can be planned; one ERROR for each that can't."""
    plans = {}
    for name, entry in entries.items():
        try:
            plans[name] = _plan(name, entry, settings, cron_deadline)
        except EntryError as exc:
            logger.error("%s The other entries run.", exc, extra={"action": "entry_refused", "entry": name})
        except Exception as exc:
            logger.exception(
                "Entry %r can't be planned: %r. The other entries run.",
                name,
                exc,
                extra={"action": "entry_refused", "entry": name},
            )
    return plans


def _plan(name: str, entry: Any, settings: Settings, cron_deadline: float | None) -> Plan:
    schedule = entry.schedule
    own = (entry.options or {}).get(POLICY_OPTION)
    if own is not None and not isinstance(own, Mapping):
        raise PolicyError(f"Entry {name!r} has the {POLICY_OPTION!r} option {own!r}: it must be a dict.")
    policy = build_policy(
        name, own, settings.policy, cron_deadline if isinstance(schedule, crontab) else None
    )
    if not isinstance(schedule, BaseSchedule) and not hasattr(schedule, "remaining_estimate"):
        raise ScheduleError(f"Entry {name!r} has the schedule {schedule!r}, which has no remaining_estimate.")
    try:
        return Plan(name, entry, schedule, fingerprint(schedule), policy)
    except ScheduleError as exc:
        raise ScheduleError(f"Entry {name!r}: {exc}") from exc
