"""The agenda of a term: which entry is due next. Pure: the time is passed in."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterable
from datetime import datetime

from celery_leaderbeat.plan import Plan

__all__ = ["Agenda"]


class Agenda:
    """Plans by the time of their next slot.

    Taking one and putting it back costs the logarithm of their number.
    """

    def __init__(self, plans: Iterable[Plan]) -> None:
        self._serial = itertools.count()
        self._heap: list[tuple[datetime, int, Plan]] = []
        self._current: dict[str, int] = {}
        for plan in plans:
            self.put(plan)

    def put(self, plan: Plan) -> None:
        """Put a plan in its place; where it stood before no longer counts."""
        when = plan.when
        serial = next(self._serial)
        self._current[plan.name] = serial
        if when is not None:
            heapq.heappush(self._heap, (when, serial, plan))

    def take(self, now: datetime, most: int) -> list[Plan]:
        """Take out the plans that are due at `now`, the longest due first, at most `most`."""
        taken: list[Plan] = []
        while self._heap and len(taken) < most:
            when, serial, plan = self._heap[0]
            if self._current.get(plan.name) != serial:
                heapq.heappop(self._heap)
            elif when > now:
                break
            else:
                heapq.heappop(self._heap)
                taken.append(plan)
        return taken

    def next_time(self) -> datetime | None:
        """When the next slot comes due; None if none ever does."""
        while self._heap and self._current.get(self._heap[0][2].name) != self._heap[0][1]:
            heapq.heappop(self._heap)
        return self._heap[0][0] if self._heap else None
