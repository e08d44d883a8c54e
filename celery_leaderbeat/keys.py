"""The names of all that is kept in Redis. Pure."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Keys"]


@dataclass(frozen=True)
class Keys:
    """The names of the keys and channels; all share the hash tag `{prefix}`."""

    prefix: str

    def _key(self, name: str) -> str:
        return f"{{{self.prefix}}}:{name}"

    @property
    def lease(self) -> str:
        """String: who leads (JSON); it expires with the term."""
        return self._key("lease")

    @property
    def epoch(self) -> str:
        """String: the latest epoch."""
        return self._key("epoch")

    @property
    def app(self) -> str:
        """String: the identity of the application that this prefix belongs to."""
        return self._key("app")

    @property
    def entries(self) -> str:
        """Hash: entry -> how far it is decided, and its numbers (JSON)."""
        return self._key("entries")

    @property
    def unfinished(self) -> str:
        """Sorted set: tick keys that a leader has to look after, by time in Unix ms."""
        return self._key("unfinished")

    @property
    def counts(self) -> str:
        """Hash: totals of what was decided."""
        return self._key("counts")

    @property
    def observed(self) -> str:
        """Hash: task -> newest epoch that this task has seen."""
        return self._key("observed")

    @property
    def replicas(self) -> str:
        """Sorted set: holder -> when it was seen last, in Unix seconds."""
        return self._key("replicas")

    @property
    def releases(self) -> str:
        """Hash: holder -> its release, and whether it stands for election (JSON)."""
        return self._key("releases")

    @property
    def events(self) -> str:
        """Stream: what was decided, capped."""
        return self._key("events")

    @property
    def definitions(self) -> str:
        """Hash: entry -> the fingerprints of its schedules, and from when until when each held (JSON)."""
        return self._key("definitions")

    @property
    def paused(self) -> str:
        """Hash: entry, or '' for all -> its pauses (JSON)."""
        return self._key("paused")

    @property
    def requests(self) -> str:
        """Hash: id -> request (JSON)."""
        return self._key("requests")

    @property
    def retreats(self) -> str:
        """Sorted set: holders that have stepped down, and until when (Unix ms) they are in retreat."""
        return self._key("retreats")

    @property
    def released(self) -> str:
        """String: the epoch whose leader released the lease last."""
        return self._key("released")

    @property
    def wake(self) -> str:
        """Channel: a lease was released or is gone, or a replica of a release stands for election."""
        return self._key("wake")

    def alive(self, holder: str) -> str:
        """Channel to which only that replica subscribes: its subscription ends with its process."""
        return self._key(f"alive:{holder}")

    def slot(self, tick_key: str) -> str:
        """Hash: the record of a slot."""
        return self._key(f"slot:{tick_key}")

    def unsent(self, entry: str) -> str:
        """The ranges of an entry's slots that were missed or skipped."""
        return self._key(f"unsent:{entry}")
