"""A scheduler for Celery of which any number may run: exactly one sends, and stale sends are refused."""

from celery_leaderbeat.errors import (
    EntryError,
    LeaderbeatError,
    PolicyError,
    ScheduleError,
    SettingsError,
    StaleTick,
    StoreError,
    StoreUnavailable,
)
from celery_leaderbeat.scheduler import Scheduler
from celery_leaderbeat.task import FencedTask, Tick

__all__ = [
    "EntryError",
    "FencedTask",
    "LeaderbeatError",
    "PolicyError",
    "ScheduleError",
    "Scheduler",
    "SettingsError",
    "StaleTick",
    "StoreError",
    "StoreUnavailable",
    "Tick",
]
