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
    """What the leader's schedule has more, has not, and has otherwise than one's own: sorted names.

    `refused` are those of its entries that are also in one's own configuration, but can't be planned here.
    """

    added: tuple[str, ...]
    removed: tuple[str, ...]
    changed: tuple[str, ...]
    refused: tuple[str, ...] = ()

    @classmethod
    def between(
        cls, own: Mapping[str, str], leaders: Mapping[str, str], refused: Collection[str] = ()
    ) -> ScheduleDiff:
        """From the fingerprints of the entries by name, and the names of the own entries that were refused."""
        both = own.keys() & leaders.keys()
        added = leaders.keys() - own.keys()
        return cls(
            added=tuple(sorted(added - set(refused))),
            refused=tuple(sorted(added & set(refused))),
            removed=tuple(sorted(own.keys() - leaders.keys())),
            changed=tuple(sorted(name for name in both if own[name] != leaders[name])),
        )

    def __str__(self) -> str:
        return "; ".join(self._parts()) or "no difference"

    def _parts(self) -> Iterator[str]:
        if self.added:
            yield f"it has {_listed(self.added)}, which this one has not"
        if self.refused:
            yield f"it has {_listed(self.refused)}, which this one has refused (see its ERROR above)"
        if self.removed:
            yield f"it has not {_listed(self.removed)}"
        if self.changed:
            yield f"it has another schedule for {_listed(self.changed)}"


def _listed(names: Collection[str]) -> str:
    shown = [repr(name if len(name) <= _LONGEST else f"{name[: _LONGEST - 1]}…") for name in names]
    more = len(shown) - _LISTED
    return ", ".join(shown[:_LISTED]) + (f" and {more:,} more" if more > 0 else "")
