"""Many short stories, in several processes: `python -m tests.simulation.simulate`, or `make simulate`.

Without `--seed`, tells the stories of the seeds 1 to `--seeds`, and what they were like in all. A broken guarantee
is told with its seed, and makes the exit status 1. With `--seed` the story of that seed alone is told, line by line.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import resource
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any

from tests.simulation.stories import Told, tell
from tests.simulation.trouble import KINDS
from tests.simulation.world import BEGAN
from tests.support.faketime_server import FrozenServer, require_frozen_server

__all__ = ["Total", "main"]

#: Stories that a process is given at once.
_AT_ONCE = 20
#: The server of this process.
_servers: list[FrozenServer] = []
#: Whether all stories of this process are such in which Redis is emptied; None where that is their own.
_emptied: list[bool | None] = []


@dataclass
class Total:
    """What many stories were like."""

    stories: int = 0
    broken: int = 0
    seconds: float = 0.0
    messages: int = 0
    runs: int = 0
    ends: Counter[str] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)

    def add(self, told: Told) -> None:
        self.stories += 1
        self.broken += bool(told.broken)
        self.seconds += told.seconds
        self.messages += told.messages
        self.runs += told.runs
        self.ends.update(told.ends)
        self.faults.update(told.faults)

    def lines(self) -> Iterator[str]:
        yield (
            f"{self.stories} stories, {self.seconds / 3600:.1f} h of virtual time: {sum(self.ends.values())} slots, "
            f"{self.messages} messages, {self.runs} runs, {sum(self.faults.values())} faults"
        )
        yield "slots:  " + ", ".join(f"{count} {end}" for end, count in self.ends.most_common())
        yield "faults: " + ", ".join(f"{self.faults[kind]} {kind}" for kind in KINDS)


def _start(directory: str, emptied: bool | None) -> None:
    place = Path(directory) / str(os.getpid())
    place.mkdir()
    server = require_frozen_server(place, BEGAN)
    _servers.append(server)
    _emptied.append(emptied)
    # Exit handlers aren't sure to run in a process of a pool.
    Finalize(server, server.stop, exitpriority=1)


def _told(seed: int) -> Told:
    try:
        return tell(_servers[0], seed, emptied=_emptied[0])
    except AssertionError as exc:
        return Told(seed, broken=[str(exc).partition("\n")[0]], about=str(exc))


def _alone(seed: int, directory: str, emptied: bool | None) -> int:
    _start(directory, emptied)
    try:
        told = tell(_servers[0], seed, keep=True, emptied=emptied)
    finally:
        _servers.pop().stop()
    assert told.journal is not None
    print(told.journal.tail(sys.maxsize))
    print(f"\n{sum(told.ends.values())} slots: {', '.join(f'{n} {end}' for end, n in told.ends.items())}")
    print(f"faults: {', '.join(f'{count} {kind}' for kind, count in told.faults.items()) or 'none'}")
    print(told.about or "No guarantee is broken.")
    return int(bool(told.broken))


def _all(seeds: range, jobs: int, directory: str, emptied: bool | None) -> int:
    began, total, said = time.monotonic(), Total(), 0.0
    method: Any = multiprocessing.get_context("spawn")
    with method.Pool(jobs, _start, (directory, emptied)) as pool:
        try:
            for told in pool.imap_unordered(_told, seeds, _AT_ONCE):
                total.add(told)
                if told.broken:
                    print(f"seed {told.seed}: {told.about}\n", flush=True)
                took = time.monotonic() - began
                if took - said > 30:
                    said = took
                    print(f"{total.stories} stories, {total.broken} broken, {took:.0f} s", flush=True)
        except BaseException:
            # Nobody waits for the others' stories; the guards of the processes stop their servers.
            pool.terminate()
            raise
        finally:
            # Each process stops its own server at its end; one that is terminated couldn't.
            pool.close()
            pool.join()
    took = time.monotonic() - began
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    for line in total.lines():
        print(line)
    print(
        f"{took:.0f} s in {jobs} processes, {total.stories / took:.0f} stories a second; "
        f"{children.ru_utime + children.ru_stime:.0f} s of computing"
    )
    print(f"{total.broken} stories with a broken guarantee")
    return int(total.broken > 0)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="simulate", description=__doc__)
    parser.add_argument("--seeds", type=int, default=10_000, help="how many stories (10000)")
    parser.add_argument("--first", type=int, default=1, help="the first seed (1)")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes (one for each core)")
    parser.add_argument("--seed", type=int, help="tell this seed's story alone, line by line")
    parser.add_argument(
        "--emptied",
        action="store_const",
        const=True,
        help="only stories in which Redis is emptied under leaders that are well",
    )
    options = parser.parse_args(argv)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    with tempfile.TemporaryDirectory() as directory:
        if options.seed is not None:
            return _alone(options.seed, directory, options.emptied)
        return _all(
            range(options.first, options.first + options.seeds), options.jobs, directory, options.emptied
        )


if __name__ == "__main__":
    sys.exit(main())
