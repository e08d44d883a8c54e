"""Signals that this package sends in the process where something happened.

Receivers get keyword arguments only, as with Celery's own signals. They run in the thread that found out, so
they should return quickly; an exception in a receiver is logged and changes nothing.
"""

from __future__ import annotations

from celery.utils.dispatch import Signal

__all__ = [
    "leader_elected",
    "leader_lost",
    "run_died",
    "run_refused",
    "slot_abandoned",
    "slots_missed",
    "slots_skipped",
]

#: In beat, when this replica begins to lead: `epoch`, `holder`.
leader_elected = Signal(name="leader_elected", providing_args={"epoch", "holder"})

#: In beat, when this replica's term has ended: `epoch`, `holder`, `reason`.
leader_lost = Signal(name="leader_lost", providing_args={"epoch", "holder", "reason"})

#: In beat, once per entry and range of slots that will never be sent: `entry`, `first`, `last` (aware
#: datetimes, UTC), `count`, `reason`. Not for entries that prefer a duplicate.
slots_missed = Signal(name="slots_missed", providing_args={"entry", "first", "last", "count", "reason"})

#: In beat, once per entry and range of slots that are not sent on purpose; arguments as `slots_missed`.
slots_skipped = Signal(name="slots_skipped", providing_args={"entry", "first", "last", "count", "reason"})

#: In beat, when the lease of a run is over, which means that its worker died: `key`, `entry`, `slot` (aware
#: datetime, UTC), `attempt`, `worker`, and `next`: `"rerun"`, `"abandoned"` or `"redelivery"`.
run_died = Signal(name="run_died", providing_args={"key", "entry", "slot", "attempt", "worker", "next"})

#: In beat, when a slot was begun and won't be run again: `key`, `entry`, `slot`, `attempt`, `reason`.
slot_abandoned = Signal(name="slot_abandoned", providing_args={"key", "entry", "slot", "attempt", "reason"})

#: In a worker, when a message is refused: `task_id`, `stamp` (None for a message without one), `reason`.
run_refused = Signal(name="run_refused", providing_args={"task_id", "stamp", "reason"})
