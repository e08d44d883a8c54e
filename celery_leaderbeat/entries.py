"""Entries of the schedule, loaded one by one: a bad one is named and left out, the others run."""

from __future__ import annotations

import difflib
import logging
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any

from celery.schedules import BaseSchedule, crontab

from celery_leaderbeat.errors import EntryError, PolicyError, ScheduleError, sentence
from celery_leaderbeat.plan import POLICY_OPTION, Plan
from celery_leaderbeat.policy import Policy
from celery_leaderbeat.policy_options import build_policy
from celery_leaderbeat.task import FencedTask
from celery_leaderbeat.timeline import fingerprint

__all__ = ["check_entry", "load_plans"]

logger = logging.getLogger(__name__)

#: Keys of a policy that need a FencedTask, or go with one that does.
_FENCED_ONLY = ("on_crash", "max_attempts", "overlap")
_ACCEPTED = ("task", "schedule", "args", "kwargs", "options", "relative")


def check_entry(name: Any, raw: Any, build: Callable[..., Any]) -> Any:
    """Build Celery's entry from one item of `beat_schedule`.

    Raises:
        EntryError: names the entry, the key, what is wrong and what to write instead.
    """
    if not isinstance(name, str) or not name:
        raise EntryError(f"Entry {name!r}: the name of an entry must be a string that isn't empty.")
    try:
        name.encode()
    except UnicodeEncodeError as exc:
        raise EntryError(
            f"Entry {name!r}: its name can't be written as UTF-8 ({exc.reason}); rename it."
        ) from exc
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
    entries: Mapping[str, Any],
    defaults: Mapping[str, Any],
    cron_deadline: float | None,
    tasks: Mapping[str, Any],
) -> dict[str, Plan]:
    """Plans for all entries that can be planned; one ERROR for each that can't.

    Parameters:
        tasks: the tasks that this process knows, by name.
        defaults: the policy of entries that set none of their own.
        cron_deadline: `beat_cron_starting_deadline`, the default deadline of crontabs, in seconds.
    """
    plans = {}
    for name, entry in entries.items():
        try:
            plans[name] = _plan(name, entry, defaults, cron_deadline, tasks)
        except EntryError as exc:
            logger.error(
                "%s The other entries run.",
                sentence(exc),
                extra={"action": "entry_refused", "entry": name},
            )
        except Exception as exc:
            logger.exception(
                "Entry %r can't be planned: %r. The other entries run.",
                name,
                exc,
                extra={"action": "entry_refused", "entry": name},
            )
    return plans


def _plan(
    name: str,
    entry: Any,
    defaults: Mapping[str, Any],
    cron_deadline: float | None,
    tasks: Mapping[str, Any],
) -> Plan:
    schedule = entry.schedule
    own = (entry.options or {}).get(POLICY_OPTION)
    if own is not None and not isinstance(own, Mapping):
        raise PolicyError(f"Entry {name!r} has the {POLICY_OPTION!r} option {own!r}: it must be a dict.")
    if entry.task.startswith("celery."):
        # Celery's own tasks are no FencedTasks; a default that needs one isn't meant for them.
        defaults = {key: value for key, value in defaults.items() if key not in _FENCED_ONLY}
    policy = build_policy(name, own, defaults, cron_deadline if isinstance(schedule, crontab) else None)
    task = tasks.get(entry.task)
    _check_task(name, entry.task, task, policy, own or {})
    if not isinstance(schedule, BaseSchedule) and not hasattr(schedule, "remaining_estimate"):
        raise ScheduleError(f"Entry {name!r} has the schedule {schedule!r}, which has no remaining_estimate.")
    try:
        expires = getattr(task, "expires", None)
        return Plan(name, entry, schedule, fingerprint(schedule), policy, task_expires=expires)
    except ScheduleError as exc:
        raise ScheduleError(f"Entry {name!r}: {exc}") from exc


def _check_task(name: str, task_name: str, task: Any, policy: Policy, own: Mapping[str, Any]) -> None:
    """Refuse a policy that needs to know when a slot is done, for a task that never says so.

    A task that this process hasn't imported is taken on trust.
    """
    if task is None:
        return
    if isinstance(task, FencedTask):
        if policy.on_crash == "rerun" and not task.acks_late:
            logger.warning(
                "Entry %r has on_crash 'rerun', and its task %s acknowledges early: a slot is lost if its worker is "
                "killed after taking the message and before starting the body. Set acks_late = True.",
                name,
                task_name,
                extra={"action": "rerun_without_acks_late", "entry": name},
            )
        if policy.overlap != "allow" and policy.on_crash == "auto" and task.acks_late:
            logger.warning(
                "Entry %r has overlap %r and on_crash 'auto', and its task %s acknowledges late: a run that died, and "
                "that the broker delivers again, may overlap a later slot. Set on_crash to 'rerun' or 'skip'.",
                name,
                policy.overlap,
                task_name,
                extra={"action": "overlap_with_redelivery", "entry": name},
            )
        return
    for key, value, harmless in (
        ("on_crash", policy.on_crash, ("auto", "skip")),
        ("overlap", policy.overlap, ("allow",)),
    ):
        if value not in harmless:
            origin = "" if key in own else " (from leaderbeat_policy)"
            raise PolicyError(
                f"Entry {name!r} has {key} {value!r}{origin}, and its task {task_name} isn't a FencedTask: its slots would "
                f"never be marked as done. Give the task base=FencedTask, or set {key} to {harmless[0]!r}."
            )
