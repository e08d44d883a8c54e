"""All that was seen of a run, as values that the checker and the drawing read. Pure.

All times are Unix seconds by the machine's monotonic clock.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from tests.chaos.fleet import Exit, Life
from tests.chaos.nemesis import Struck
from tests.chaos.schedule import Entry
from tests.chaos.tap import Arrival

__all__ = ["Body", "Effect", "End", "History", "Loss", "Report", "Term"]


@dataclass(frozen=True)
class Body:
    """A body that began (`start`) or came to its end (`end`) on a worker."""

    t: float
    event: str
    worker: str
    pid: int
    key: str
    entry: str
    epoch: int
    attempt: int
    retries: int
    id: str = ""
    redelivered: bool = False

    @property
    def fence(self) -> tuple[int, int]:
        """What orders the runs of a slot."""
        return (self.epoch, self.attempt)


@dataclass(frozen=True)
class Effect:
    """A guarded write."""

    t: float
    key: str
    fence: int
    accepted: bool
    run: str
    pid: int


@dataclass(frozen=True)
class Term:
    """A term of a leader, as it said itself; `until` is when it said that it was over, or died."""

    beat: str
    pid: int
    epoch: int
    since: float
    until: float


@dataclass(frozen=True)
class Report:
    """What a beat said of slots that aren't sent: `missed` or `skipped`, from `first` to `last`."""

    t: float
    beat: str
    what: str
    entry: str
    first: float
    last: float
    count: int
    reason: str


@dataclass(frozen=True)
class End:
    """What the ledger's audit says of a slot."""

    end: str
    reason: str
    state: str
    attempt: int
    asked_at: float


@dataclass(frozen=True)
class Loss:
    """That Redis lost what it knew of the slots."""

    t: float
    how: str


@dataclass
class History:
    """A run.

    Attributes:
        seed: of its plan.
        began: from when on slots are judged; ended: until when. The faults happened in between.
        versions: version of the code -> its entries by name.
        ends: tick key -> what the audit says.
        exits: processes that ended though nobody had stopped them.
        expired: tick key -> when a worker discarded a message of it because it had expired.
        refused: tick key -> for which reasons workers refused messages of it.
        trouble: what makes the run worthless: the harness failed.
    """

    seed: int
    began: float
    ended: float
    settled: float
    versions: Mapping[int, Mapping[str, Entry]]
    broker: str = "redis"
    struck: Sequence[Struck] = ()
    lives: Sequence[Life] = ()
    terms: Sequence[Term] = ()
    arrivals: Sequence[Arrival] = ()
    bodies: Sequence[Body] = ()
    effects: Sequence[Effect] = ()
    reports: Sequence[Report] = ()
    ends: Mapping[str, End] = field(default_factory=dict)
    losses: Sequence[Loss] = ()
    exits: Sequence[Exit] = ()
    expired: Mapping[str, float] = field(default_factory=dict)
    refused: Mapping[str, Sequence[str]] = field(default_factory=dict)
    trouble: Sequence[str] = ()
