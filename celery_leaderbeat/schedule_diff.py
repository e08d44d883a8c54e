"""How the schedules of two replicas differ. Pure."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

__all__ = ["ScheduleDiff", "schedule_fingerprint"]

#: Names that are listed of each kind, and the longest that one may be.
_LISTED, _LONGEST = 10, 60


def schedule_fingerprint(fingerprints: Mapping[str, str]) -> str:
    """One short text for a whole schedule, from the fingerprints of its entries by name."""
    digest = hashlib.sha256()
    for name in sorted(fingerprints):
        digest.update(f"{name}\0{fingerprints[name]}\0".encode())
    return digest.hexdigest()[:16]


@dataclass(frozen=True)
class ScheduleDiff:
    """What the leader's schedule has more, has not, and has otherwise than one's own: sorted names."""

    added: tuple[str, ...]
    removed: tuple[str, ...]
    changed: tuple[str, ...]

    @classmethod
    def between(cls, own: Mapping[str, str], leaders: Mapping[str, str]) -> ScheduleDiff:
        """From the fingerprints of the entries by name."""
        both = own.keys() & leaders.keys()
        return cls(
            added=tuple(sorted(leaders.keys() - own.keys())),
            removed=tuple(sorted(own.keys() - leaders.keys())),
            changed=tuple(sorted(name for name in both if own[name] != leaders[name])),
        )

    def __str__(self) -> str:
        return "; ".join(self._parts()) or "no difference"

    def _parts(self) -> Iterator[str]:
        if self.added:
            yield f"it has {_listed(self.added)}, which this one has not"
        if self.removed:
            yield f"it has not {_listed(self.removed)}"
        if self.changed:
            yield f"it has another schedule for {_listed(self.changed)}"


def _listed(names: Collection[str]) -> str:
    shown = [repr(name if len(name) <= _LONGEST else f"{name[: _LONGEST - 1]}…") for name in names]
    more = len(shown) - _LISTED
    return ", ".join(shown[:_LISTED]) + (f" and {more:,} more" if more > 0 else "")
