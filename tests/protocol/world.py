"""What the explorer's worlds are made of, and the exception that ends an exploration."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from tests.protocol.images import Image

__all__ = ["Hand", "Leader", "Message", "Past", "Rules", "Violation", "Worker", "World", "put", "require"]


class Message(NamedTuple):
    """A message in the queue: its stamp, and whether the broker may have delivered it before."""

    slot: int
    epoch: int
    attempt: int
    after: str
    redelivered: bool
    asked: tuple[str, ...] = ()  # the runs under which it asked before and never saw the answer


class Hand(NamedTuple):
    """What a leader has in hand of a slot."""

    stage: str  # asked (the answer was lost), claimed, published, unknown (the publish didn't come back)
    epoch: int
    batch: str
    attempt: int


class Leader(NamedTuple):
    """What a replica knows. `epoch` is the term that it believes to hold, 0 for none; a new life is a new holder."""

    life: int
    terms: int
    epoch: int
    hands: tuple[Hand | None, ...]


class Worker(NamedTuple):
    """A run: running, retry sent, or ended (the message isn't acknowledged yet). Frozen: longer than its lease.

    Cut off: the broker has delivered its message again, and hears no more of it from this worker.
    """

    message: Message
    run: str
    phase: str
    frozen: bool
    cut_off: bool = False


class Past(NamedTuple):
    """What the answers about one slot entitle everybody to believe."""

    owner: int = 0  # the epoch of the latest claim that was granted
    batch: str = ""
    claim: str = ""  # open, given back, said (sent or unknown), doubted, missed
    attempt: int = 1  # what was sent under a lower one is superseded
    holder: str = ""  # the latest run that was let in, unless it gave the slot up again
    holder_after: str = ""
    ended: bool = False
    done: int = 0
    abandoned: bool = False  # the holder died, and nobody runs the slot again
    copies: int = 0  # of the leader's message of this attempt, that were published
    arrived: int = 0  # the newest epoch of them that reached the queue
    refused: int = 0  # the newest epoch of a message that was refused while its epoch owned the slot
    unheld: bool = False  # a run was done that had lost the slot while it was frozen
    lost: bool = False  # a run died, or never was, and no copy of its message is left


class World(NamedTuple):
    image: Image
    leaders: tuple[Leader, ...]
    workers: tuple[Worker | None, ...]
    queue: tuple[Message, ...]
    away: tuple[tuple[Any, ...], ...]  # requests and messages that are still on their way
    lease: int  # the epoch that leads, 0 if none
    newest: int  # the newest epoch ever
    values: tuple[str, ...]  # of the latest leases, two at most
    seen: int  # the newest epoch with which the task has started a slot
    past: tuple[Past, ...]
    faults: int


class Violation(Exception):
    """A guarantee that doesn't hold, and the moves that lead there."""

    def __init__(self, guarantee: str, story: tuple[str, ...] = ()) -> None:
        super().__init__("\n  ".join((guarantee, *story)))
        self.guarantee = guarantee
        self.story = story


@dataclass(frozen=True)
class Rules:
    """What is explored."""

    prefer: str = "missed"
    slots: int = 1
    workers: int = 2
    mode: str = "slot"
    acks_late: bool = True
    misses: bool = False
    on_crash: str = "auto"
    max_attempts: int = 1
    terms: int = 2  # for each leader
    elections: int = 3  # in all
    faults: int = 2


def require(holds: bool, guarantee: str) -> None:
    """Raise a `Violation` unless the guarantee holds."""
    if not holds:
        raise Violation(guarantee)


def put(row: tuple[Any, ...], index: int, item: Any) -> tuple[Any, ...]:
    """The row with another item at that place."""
    return (*row[:index], item, *row[index + 1 :])
