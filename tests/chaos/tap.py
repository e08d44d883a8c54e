"""Reads from the bytes on their way to the broker which slots' messages they hold.

What counts as sent is what a proxy has handed to the broker's socket, not what a beat thinks that it sent.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

__all__ = ["Arrival", "Tap"]

# A header's value is JSON text in Redis; in AMQP a type and, for texts, a length come before it.
_STAMP = re.compile(
    rb'leaderbeat_tick_key(?:": "|S.{4})([^"]{1,120}?@[0-9T:.-]{19,26}Z)'
    rb'.{0,300}?leaderbeat_attempt(?:": ([0-9]+)|I(.{4})|[Ll](.{8})|b(.)|[si](.{2,4}))',
    re.DOTALL,
)
#: Of schedulers that stamp nothing: the entry's name, in a header that the entry has for this.
_NAME = re.compile(rb'chaos_entry(?:": "|S.{4})([a-z0-9-]+)(?=[^a-z0-9-])', re.DOTALL)
#: A stamp isn't longer than this.
_LONGEST = 1024


@dataclass(frozen=True)
class Arrival:
    """A message that was handed to the broker."""

    t: float
    beat: str
    key: str
    attempt: int


@dataclass
class Tap:
    """Listens on the links of all beats to the broker.

    Parameters:
        offset: what is added to the monotonic clock for Unix time.
        stamped: whether messages bear stamps; of others the key is the entry's name.
    """

    offset: float
    stamped: bool = True
    arrivals: list[Arrival] = field(default_factory=list)
    _tails: dict[tuple[str, int], bytes] = field(default_factory=dict)
    _waiting: dict[str, tuple[Callable[[], None], threading.Event, str]] = field(default_factory=dict)

    def at_next(self, beat: str, act: Callable[[], None], timeout: float, entries: str = "") -> None:
        """Do something at the moment at which a beat's next message has gone to the broker; after `timeout` anyway.

        The broker has it then, and the beat hasn't heard so. `entries`: how the entry's name begins.
        """
        done = threading.Event()
        self._waiting[beat] = (act, done, entries)
        if not done.wait(timeout) and self._waiting.pop(beat, None) is not None:
            act()

    def hear(self, beat: str, connection: int, data: bytes) -> None:
        """These bytes of a beat's connection have gone to the broker."""
        text = self._tails.get((beat, connection), b"") + data
        begin = 0
        for match in (_STAMP if self.stamped else _NAME).finditer(text):
            begin = match.end()
            self.arrivals.append(
                Arrival(
                    time.monotonic() + self.offset,
                    beat,
                    match[1].decode(),
                    _attempt(match) if self.stamped else 1,
                )
            )
        waiting = self._waiting.get(beat)
        if begin and waiting is not None:
            act, done, entries = waiting
            if self.arrivals[-1].key.startswith(entries) and self._waiting.pop(beat, None) is not None:
                act()
                done.set()
        self._tails[beat, connection] = text[max(begin, len(text) - _LONGEST) :]


def _attempt(match: re.Match[bytes]) -> int:
    if match[2] is not None:
        return int(match[2])
    return int.from_bytes(next(found for found in match.groups()[2:] if found is not None), "big")
