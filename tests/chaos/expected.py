"""Which slots had to run, computed from the schedule and the code that was deployed, not from what happened. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime, timezone

from celery_leaderbeat.tick import tick_key
from celery_leaderbeat.timeline import slots_between
from tests.chaos.history import History
from tests.chaos.schedule import Entry

__all__ = ["Called", "called_for"]

#: After a deploy a leader of the new version has registered its schedule within this time of its election, in seconds.
_REGISTERED = 6.0


@dataclass(frozen=True)
class Called:
    """A slot that an entry called for.

    Attributes:
        must: False where two versions of the code changed places, and it depends on the moment which one counted.
    """

    key: str
    entry: Entry
    slot: float
    must: bool = True


def called_for(history: History) -> dict[str, Called]:
    """The slots of the time in which a run is judged, by tick key."""
    latest = max(history.versions)
    found: dict[str, Called] = {}
    names = {name for version in history.versions.values() for name in version}
    for name in sorted(names):
        had = [version.get(name) for version in history.versions.values()]
        if all(entry == had[0] for entry in had) and had[0] is not None:
            found |= _slots(had[0], history.began, history.ended)
            continue
        # Between deploys one version counts; around them, either. An entry that comes back goes on where it was
        # (register.lua), so what it called for while it was away may be sent then.
        spans = list(_spans(history, latest))
        has = [
            (version, since, until) for version, since, until in spans if name in history.versions[version]
        ]
        for version, since, until in has:
            found |= _slots(history.versions[version][name], since, until)
        for entry in {entry for entry in had if entry is not None}:
            for key, called in _slots(entry, history.began, history.ended, must=False).items():
                if not any(since < called.slot <= until for _, since, until in has):
                    found.setdefault(key, called)
    return found


def _slots(entry: Entry, since: float, until: float, must: bool = True) -> dict[str, Called]:
    if until <= since:
        return {}
    return {
        tick_key(entry.name, slot): Called(tick_key(entry.name, slot), entry, slot.timestamp(), must)
        for slot in slots_between(entry.schedule, _instant(since), _instant(until))
    }


def _spans(history: History, latest: int) -> Iterator[tuple[int, float, float]]:
    """The times in which only one version of the code was there: version, since, until."""
    deploys = [each for each in history.struck if each.fault.kind == "rolling deploy"]
    begins = [
        history.began,
        *(_led_after(history, each.ended, number + 1) for number, each in enumerate(deploys)),
    ]
    ends = [*(each.begun for each in deploys), history.ended]
    for version, (since, until) in enumerate(zip(begins, ends, strict=True)):
        if version <= latest:
            yield version, since, until


def _led_after(history: History, t: float, version: int) -> float:
    """When a leader of a version had surely registered its schedule, after its deploy was over at `t`."""
    pids = {life.pid for life in history.lives if life.version == version}
    since = [max(term.since, t) for term in history.terms if term.pid in pids and term.until > t]
    return min(since, default=history.ended) + _REGISTERED


def _instant(t: float) -> datetime:
    return datetime.fromtimestamp(t, timezone.utc)
