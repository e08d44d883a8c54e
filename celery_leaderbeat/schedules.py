"""Schedules of our own: `crontab`, read in a zone of its own."""

from __future__ import annotations

from datetime import datetime, tzinfo
from functools import partial
from typing import Any

from celery import schedules

from celery_leaderbeat.zones import named_zone, zone_name

__all__ = ["crontab"]


class crontab(schedules.crontab):  # type: ignore[misc]  # noqa: N801  # no types; named as Celery's is
    """Celery's `crontab`, with its fields read in a zone of its own instead of the app's.

        "report": {
            "task": "proj.tasks.report",
            "schedule": crontab(minute=30, hour=6, day_of_week="mon-fri", tz="Europe/Berlin"),
        }

    Under this package's scheduler its slots are those of `timeline`, exact in every hour that a clock change
    repeats or skips. Under a plain beat it goes by Celery's arithmetic in that zone.

    Parameters:
        minute, hour, day_of_week, day_of_month, month_of_year: as Celery's.
        tz: a name of the IANA database, or a tzinfo.
        kwargs: as Celery's (`app`, `nowfun`).

    Raises:
        ScheduleError: no zone of this name is known, or `tz` is neither a name nor a tzinfo.
        ValueError, crontab_parser.ParseException: Celery refuses a field.
    """

    def __init__(
        self,
        minute: Any = "*",
        hour: Any = "*",
        day_of_week: Any = "*",
        day_of_month: Any = "*",
        month_of_year: Any = "*",
        *,
        tz: str | tzinfo,
        **kwargs: Any,
    ) -> None:
        self.tz = named_zone(tz, "crontab(tz=...)")
        super().__init__(minute, hour, day_of_week, day_of_month, month_of_year, **kwargs)

    @classmethod
    def from_string(cls, crontab: str, *, tz: str | tzinfo, **kwargs: Any) -> crontab:
        """From a line of five fields in cron's order: minute, hour, day of month, month, day of week.

        Raises:
            ValueError: there aren't five; otherwise as the class.
        """
        minute, hour, day_of_month, month_of_year, day_of_week = crontab.split()
        return cls(minute, hour, day_of_week, day_of_month, month_of_year, tz=tz, **kwargs)

    def now(self) -> datetime:
        """The time, in this crontab's zone."""
        return self._in_zone(super().now())

    def remaining_delta(
        self, last_run_at: datetime, tz: Any = None, ffwd: Any = schedules.ffwd
    ) -> tuple[datetime, Any, datetime]:
        """As Celery's. Versions before 5.7 take `last_run_at` as it comes, in whatever zone."""
        found: tuple[datetime, Any, datetime] = super().remaining_delta(
            self._in_zone(last_run_at), ffwd=ffwd, **({} if tz is None else {"tz": tz})
        )
        return found

    def to_local(self, dt: datetime) -> datetime:
        """The time in this crontab's zone; Celery's gives the system's where `enable_utc` is off."""
        return self._in_zone(dt)

    def _in_zone(self, moment: datetime) -> datetime:
        aware: datetime = self.maybe_make_aware(moment)
        return aware.astimezone(self.tz)

    def __repr__(self) -> str:
        return f"{super().__repr__()[:-1]} in {zone_name(self.tz)}>"

    def __eq__(self, other: object) -> bool:
        same = super().__eq__(other)
        return same if same is NotImplemented else bool(same and self.tz == getattr(other, "tz", None))

    __hash__ = None  # type: ignore[assignment]  # as Celery's: its field sets may be changed

    def __reduce__(self) -> tuple[Any, tuple[Any, ...], Any]:
        fields = (
            self._orig_minute,
            self._orig_hour,
            self._orig_day_of_week,
            self._orig_day_of_month,
            self._orig_month_of_year,
        )
        return partial(type(self), tz=self.tz), fields, self._orig_kwargs
