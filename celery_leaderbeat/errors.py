"""What can go wrong, as one small tree.

Every message names the thing, its value, the rule it breaks and what to do. Errors of the Redis driver
are translated into `StoreError` where they cross into this package (`store.py`), so that nothing above
the store has to know the driver.
"""

from __future__ import annotations

from celery.exceptions import ImproperlyConfigured

#: What ends a sentence.
_ENDS = (".", "?", "!")

__all__ = [
    "EntryError",
    "LeaderbeatError",
    "PolicyError",
    "ScheduleError",
    "SettingsError",
    "StaleTick",
    "StampError",
    "StoreError",
    "StoreUnavailable",
    "sentence",
]


class LeaderbeatError(Exception):
    """The root of all errors of this package."""


class SettingsError(LeaderbeatError, ImproperlyConfigured):  # type: ignore[misc]  # Celery has no types
    """A setting, or a mix of settings, that can't work. Raised when beat or a worker starts."""


class EntryError(LeaderbeatError):
    """One entry of `beat_schedule` that can't be used. The other entries run."""


class PolicyError(EntryError):
    """A `leaderbeat` policy with an unknown key or an impossible value."""


class ScheduleError(EntryError):
    """A schedule that has no slots, or whose slots can't be computed."""


class StampError(LeaderbeatError):
    """A message that carries some of our headers, but not a stamp that can be read."""


class StaleTick(LeaderbeatError):
    """Raised by `self.tick.check()` in a run that no longer holds its slot."""


class StoreError(LeaderbeatError):
    """Redis answered with an error: a wrong type under a key, a missing permission, a full memory."""


class StoreUnavailable(StoreError):
    """Redis gave no answer: unreachable, timed out, loading, or no longer a primary."""


def sentence(exc: object) -> str:
    """What an error says, with a mark at its end, so that another sentence can follow in a log."""
    text = str(exc).rstrip()
    return text if text.endswith(_ENDS) else f"{text}."
