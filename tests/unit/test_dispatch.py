"""What a dispatcher does while its replica stands by."""

from __future__ import annotations

import socket
import time
from types import SimpleNamespace
from typing import Any

from celery import Celery

from celery_leaderbeat.clock import Clock, FleetClock
from celery_leaderbeat.debts import Debt
from celery_leaderbeat.dispatch import Dispatcher
from celery_leaderbeat.settings import Settings


def test_what_is_owed_to_a_redis_that_hangs_does_not_hold_up_a_standby() -> None:
    with socket.create_server(("127.0.0.1", 0)) as mute:
        app = Celery("proj", broker="memory://", set_as_current=False)
        app.conf.leaderbeat_redis_url = f"redis://127.0.0.1:{mute.getsockname()[1]}/0"
        app.conf.leaderbeat_lease_ttl = 60
        app.conf.leaderbeat_publish_timeout = 10
        elector: Any = SimpleNamespace(shadow=None, step_down=None, progress=None)
        dispatcher = Dispatcher(app, Settings.from_app(app), FleetClock(Clock()), elector, {})
        debt = Debt(7, "batch", "bill@2026-10-02T03:00:00Z", "returned", "the test wants it")
        dispatcher._sender._debts.add(debt)
        began = time.monotonic()
        dispatcher.idle()
        assert time.monotonic() - began < 5, "a second, on a machine that isn't loaded"
        assert dispatcher._sender._debts.open() == [debt], "it is told when Redis answers again"
