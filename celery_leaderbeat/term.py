"""A term: one leadership of one replica, as the lease's value says it. Pure."""

from __future__ import annotations

import json
from dataclasses import dataclass

__all__ = ["Term"]


@dataclass(frozen=True)
class Term:
    """One leadership: the lease's value, and what it says."""

    value: str
    holder: str
    epoch: int
    host: str = ""
    pid: int = 0
    since: float = 0.0
    watched: bool = False
    app: str = ""
    fingerprint: str = ""
    release: str = ""
    ttl: float = 0.0

    @classmethod
    def read(cls, value: str) -> Term:
        """Read a lease value. One that we didn't write counts as a holder of that name, with epoch 0."""
        try:
            found = json.loads(value)
            return cls(
                value=value,
                holder=str(found["holder"]),
                epoch=int(found["epoch"]),
                host=str(found.get("host", "")),
                pid=int(found.get("pid", 0)),
                since=float(found.get("since", 0.0)),
                watched=bool(found.get("watched", False)),
                app=str(found.get("app", "")),
                fingerprint=str(found.get("fingerprint", "")),
                release=str(found.get("release", "")),
                ttl=float(found.get("ttl", 0.0)),
            )
        except (ValueError, TypeError, KeyError):
            return cls(value=value, holder=value, epoch=0)
