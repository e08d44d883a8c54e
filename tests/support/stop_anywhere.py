"""A beat that is told to stop at one place after another: `python -m tests.support.stop_anywhere <what, as JSON>`.

url      the ledger's URL; database 1 of the same server is the broker
part     `[k, n]`: of all places, every n-th from the k-th on
fine     the places are the package's instructions, rather than lines
phase    `start`: places are looked for from the first tick on; `sending`: once slots have been sent, and the place is
         passed a few times before it counts

how      `close`: the handler of `celery beat` closes the scheduler and exits, as on SIGTERM; `exit`: it only exits, as
         that of a beat inside a worker does

A place is a line of the package, of its driver, or of the logging that the main thread comes to until it has sent
some more slots. There the handler runs. On the way out, the scheduler is closed (once more). Each place is a process
of its own, under a key prefix of its own, and gives a line of JSON.
"""

from __future__ import annotations

import faulthandler
import json
import logging
import os
import sys
import time
import traceback
from datetime import timedelta
from types import FrameType
from typing import Any

import redis
from celery import Celery
from celery.schedules import schedule

from celery_leaderbeat import Scheduler

#: Files whose lines are places.
_TRACED = (
    "/celery_leaderbeat/",
    "/redis/",
    "/logging/__init__.py",
    "/celery/beat.py",
    "/contextlib.py",
    "/threading.py",
)
#: Seconds after which a life hangs.
_HANGS = 30.0
#: Entries that are due together, and the seconds after which a life is over in any case.
_ENTRIES, _LONGEST = 3, 20.0

#: File, line, and the instruction in it (-1 for the line's beginning).
_Place = tuple[str, int, int]


class _Complaints(logging.Handler):
    """What is logged as an error."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(self.format(record))


class _Life:
    """One beat from its first tick on until it stops."""

    def __init__(self, url: str, number: int, fine: bool, how: str) -> None:
        self._how = how
        self._fine = fine
        self.prefix = f"life{number}"
        self.queue = f"queue{number}"
        self.app = Celery(self.prefix, broker=f"{url.rpartition('/')[0]}/1", set_as_current=False)
        self.app.conf.update(
            leaderbeat_redis_url=url,
            leaderbeat_key_prefix=self.prefix,
            task_default_queue=self.queue,
            beat_schedule={
                f"entry{n}": {"task": "somewhere.task", "schedule": schedule(timedelta(seconds=0.2))}
                for n in range(_ENTRIES)
            },
        )
        self.scheduler = Scheduler(self.app)
        self.places: set[_Place] = set()
        self.took = -1.0

    def run(self, stop_at: _Place | None, phase: str, passes: int) -> bool:
        """Live until the main thread comes to that place, or without one until slots were sent; whether it stopped."""
        self._stop_at, self._passes = stop_at, passes
        began = time.monotonic()
        traced = phase == "start"
        try:
            while time.monotonic() - began < _LONGEST:
                if traced:
                    sys.settrace(self._called)
                pause = self.scheduler.tick()
                sys.settrace(None)
                traced = traced or self._sent(1)
                if self._sent(3 if stop_at is None else 6):
                    return False
                time.sleep(min(pause, 0.01))
            return False
        except SystemExit:
            return True
        finally:
            sys.settrace(None)
            began = time.monotonic()
            self.scheduler.close()
            self.took = max(self.took, time.monotonic() - began)

    def _sent(self, slots: int) -> bool:
        with self.scheduler.app.connection_for_read() as connection:
            return bool(connection.default_channel.client.llen(self.queue) >= slots * _ENTRIES)

    def _called(self, frame: FrameType, event: str, arg: Any) -> Any:
        if self._fine:
            if _TRACED[0] not in frame.f_code.co_filename:
                return None
            frame.f_trace_opcodes = True
            return self._line
        return self._line if any(part in frame.f_code.co_filename for part in _TRACED) else None

    def _line(self, frame: FrameType, event: str, arg: Any) -> Any:
        if event == ("opcode" if self._fine else "line"):
            place = (frame.f_code.co_filename, frame.f_lineno or 0, frame.f_lasti if self._fine else -1)
            self.places.add(place)
            if place == self._stop_at and self._passes:
                self._passes -= 1
            elif place == self._stop_at:
                self._stop_at = None
                sys.settrace(None)
                began = time.monotonic()
                if self._how == "close":
                    self.scheduler.close()
                self.took = time.monotonic() - began
                raise SystemExit
        return self._line


def _left(prefix: str, queue: str, client: Any, broker: Any) -> dict[str, Any]:
    """What the life has left behind: its lease, and the slots with their states and the copies in the queue."""
    copies: dict[str, int] = {}
    for text in broker.lrange(queue, 0, -1):
        key = json.loads(text)["headers"]["leaderbeat_tick_key"]
        copies[key] = copies.get(key, 0) + 1
    start = f"{{{prefix}}}:slot:"
    states = {key[len(start) :]: client.hget(key, "state") for key in client.keys(f"{start}*")}
    wrong = {
        key: (states.get(key), copies.get(key, 0))
        for key in {*states, *copies}
        if (states.get(key), copies.get(key, 0)) not in (("sent", 1), ("returned", 0))
    }
    return {"lease": client.get(f"{{{prefix}}}:lease"), "slots": len(states), "wrong": wrong}


def _forked(live: Any) -> dict[str, Any]:
    """What a function says in a child process of its own, which is gone then; empty if it hung or failed."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            # A life that hangs shows where, and ends.
            faulthandler.dump_traceback_later(_HANGS, exit=True)
            os.write(writing, json.dumps(live()).encode())
            status = 0
        except BaseException:  # noqa: BLE001  # whatever it is, no child goes on as the parent
            traceback.print_exc()
        finally:
            os._exit(status)
    os.close(writing)
    with open(reading, "rb") as pipe:
        said = pipe.read()
    os.waitpid(child, 0)
    return dict(json.loads(said or b"{}"))


def main(what: dict[str, Any]) -> None:
    logging.basicConfig(level=logging.INFO, filename="stop_anywhere.log")
    complaints = _Complaints()
    logging.getLogger().addHandler(complaints)

    def live(number: int, stop_at: _Place | None) -> dict[str, Any]:
        life = _Life(what["url"], number, what["fine"], what["how"])
        stopped = life.run(stop_at, what["phase"], number % 8 if what["phase"] == "sending" else 0)
        places = [] if stop_at else sorted(life.places)
        return {"stopped": stopped, "took": life.took, "errors": complaints.lines[:3], "places": places}

    places: set[_Place] = set()
    for number in range(2):
        places |= {
            (str(file), line, at) for file, line, at in _forked(lambda n=number: live(n, None))["places"]
        }
    client: Any = redis.Redis.from_url(what["url"], decode_responses=True)
    broker: Any = redis.Redis.from_url(f"{what['url'].rpartition('/')[0]}/1", decode_responses=True)
    first, step = what["part"]
    for number, place in enumerate(sorted(places)[first::step], 10):
        said = _forked(lambda n=number, at=place: live(n, at))
        said = {"stopped": False, "took": -1.0, "errors": ["it hung, or failed"], **said}
        print(
            json.dumps({**said, "place": place, **_left(f"life{number}", f"queue{number}", client, broker)}),
            flush=True,
        )
        # The next child must not share these connections.
        client.connection_pool.disconnect()
        broker.connection_pool.disconnect()
    print(json.dumps({"places": len(places)}), flush=True)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
