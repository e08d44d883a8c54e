"""Signals that this package sends in the process where something happened.

Receivers get keyword arguments only, as with Celery's own signals. They run in the thread that found out, so
they should return quickly; an exception in a receiver is logged and changes nothing.
"""

from __future__ import annotations

from celery.utils.dispatch import Signal

__all__ = ["leader_elected", "leader_lost", "run_refused", "slots_missed"]

#: In beat, when this replica begins to lead: `epoch`, `holder`.
leader_elected = Signal(name="leader_elected", providing_args={"epoch", "holder"})

#: In beat, when this replica's term has ended: `epoch`, `holder`, `reason`.
leader_lost = Signal(name="leader_lost", providing_args={"epoch", "holder", "reason"})

#: In beat, once per entry and range of slots that will never be sent: `entry`, `first`, `last` (aware
#: datetimes, UTC), `count`, `reason`.
slots_missed = Signal(name="slots_missed", providing_args={"entry", "first", "last", "count", "reason"})

#: In a worker, when a message is refused: `task_id`, `stamp` (None for a message without one), `reason`.
run_refused = Signal(name="run_refused", providing_args={"task_id", "stamp", "reason"})
