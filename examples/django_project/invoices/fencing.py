"""Writes that a superseded leader's work can't make.

A task that was told to stop may not hear it: it can be frozen, or cut off, between any check and its next
write. Only the database can tell then. So each guarded row carries the fence of its latest write (`self.tick.fence`:
the epoch and the attempt as one number), and a write under a lower one finds no row to change. The attempt belongs to
it because a run that died is sent again by the leader that still leads, under the same epoch.

The comparison is part of the UPDATE. A check in Python before the write would leave a moment in which the newer
leader's write can fall; the row lock of one statement leaves none, on SQLite as on PostgreSQL and MySQL.

Guard a row that belongs to the slot, as an invoice does. A row that all slots share would also turn away an older
leader's rightful message that has waited in the queue, once a newer leader's message has written the row.
"""

from __future__ import annotations

from typing import Any

from django.db import models, transaction

__all__ = ["StaleWrite", "fenced_update"]


class StaleWrite(Exception):
    """Raised by `fenced_update` for a row that already carries a higher fence.

    Attributes:
        row: the row, as text.
        row_fence: the fence that the row carries.
        fence: the lower fence of the write that was refused.
    """

    def __init__(self, row: str, row_fence: int, fence: int) -> None:
        super().__init__(row, row_fence, fence)
        self.row = row
        self.row_fence = row_fence
        self.fence = fence

    def __str__(self) -> str:
        return (
            f"{self.row} carries the fence {self.row_fence}; the write under {self.fence} comes from a "
            f"superseded leader or run and was refused."
        )


def fenced_update(queryset: models.QuerySet[Any], fence: int, **values: Any) -> int:
    """Set `values` and `fence` on the rows of `queryset`, unless a higher fence stands on one of them.

    All rows or none: the refusal of one undoes the others. Writing again under the same fence is let
    through, for a retry has to be able to finish.

    Parameters:
        queryset: rows of a model with an integer field `fence`.
        fence: `self.tick.fence` in a FencedTask.
        values: what to set, as for `QuerySet.update`.

    Returns:
        How many rows were changed; 0 means that `queryset` is empty.

    Raises:
        StaleWrite: a row carries a higher fence than `fence`.
    """
    # Under MySQL's default isolation a plain SELECT shows a snapshot that may be older than what the UPDATE
    # met; a locking one shows the rows as they are. It also goes where writes go, if reads are routed elsewhere.
    rows = queryset.select_for_update()
    with transaction.atomic(using=rows.db):
        changed = rows.filter(fence__lte=fence).update(**{**values, "fence": fence})
        newer = rows.filter(fence__gt=fence).order_by("pk").first()
        if newer is not None:
            raise StaleWrite(str(newer), newer.fence, fence)
    return changed
