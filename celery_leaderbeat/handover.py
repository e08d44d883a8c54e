"""To whom a leader hands over, and when again: a candidate of a newer release gets its chances. Pure.

A candidate that had the chance and didn't keep the lead (somebody older leads again) waits for its next one:
a lease TTL at first, then twice as long each time, five minutes at most. Else two replicas would pass the
lease to and fro for as long as one of them can't lead.
"""

from __future__ import annotations

__all__ = ["Handovers"]

#: Longest that a candidate waits for its next chance, in seconds.
_LONGEST = 300.0


class Handovers:
    """The hand-overs of one replica.

    Parameters:
        first: how long a candidate waits for its second chance, in seconds.
    """

    def __init__(self, first: float) -> None:
        self._first = first
        self._given: dict[str, tuple[int, float]] = {}

    def may(self, holder: str, now: float) -> bool:
        """Whether that candidate may have the lead at `now` (monotonic)."""
        _, again_from = self._given.get(holder, (0, now))
        return now >= again_from

    def give(self, holder: str, now: float) -> None:
        """It gets the lead now."""
        times, _ = self._given.pop(holder, (0, 0.0))
        # The longest forgotten ones go first; holders are new with each process.
        while len(self._given) >= 100:
            del self._given[next(iter(self._given))]
        self._given[holder] = (times + 1, now + min(self._first * 2.0**times, _LONGEST))
