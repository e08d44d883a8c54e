"""What the nemesis finds in other schedulers: the same plan of faults over RedBeat and over Celery's own beat.

    python benchmarks/chaos_controls.py --minutes 10 --seed 7

RedBeat with as many replicas as we have, and a lock that it gives up after five seconds without its leader; Celery's
beat with as many replicas, since nothing keeps anybody from starting them; and Celery's beat alone, which is how it
is meant to be run. All are started again when they end by themselves.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.chaos.fleet import Fleet, Setup
from tests.chaos.nemesis import Nemesis
from tests.chaos.plan import kinds_for, make_plan
from tests.chaos.schedule import CHANGING, entries
from tests.chaos.tally import Tally, tally
from tests.support.waits import wait_for

REDBEAT = "redbeat.RedBeatScheduler"
PLAIN = "celery.beat.PersistentScheduler"


def controls(broker: str) -> dict[str, Setup]:
    """What is compared, by name."""
    redbeat = {"redbeat_lock_timeout": 5}
    # Its leader extends the lock once in this interval; by default every five minutes.
    once_a_second = ("--max-interval", "1")
    return {
        "RedBeat, 3 replicas": Setup(
            scheduler=REDBEAT, broker=broker, conf=redbeat, stamped=False, beat_args=once_a_second
        ),
        "Celery beat, 3 replicas": Setup(scheduler=PLAIN, broker=broker, stamped=False),
        "Celery beat, 1 replica": Setup(beats=1, scheduler=PLAIN, broker=broker, stamped=False),
    }


def strike(setup: Setup, seed: int, seconds: float) -> tuple[Tally, int, int]:
    """Run the plan of `seed` over a control: what was counted, how many faults, how many exits."""
    plan = make_plan(
        seed,
        seconds,
        beats=setup.beat_names,
        workers=setup.worker_names,
        # Not the flush: RedBeat keeps its schedule in what would be flushed, and Celery's beat keeps nothing there.
        kinds=tuple(kind for kind in kinds_for(setup.topology) if kind != "flush"),
        links=setup.links,
    )
    judged = {name: entry for name, entry in entries(0).items() if name not in CHANGING}
    with tempfile.TemporaryDirectory(prefix="control-") as directory:
        fleet = Fleet(setup, Path(directory))
        try:
            fleet.start()
            wait_for(lambda: fleet.tap.arrivals, 30, "the first message is sent")
            time.sleep(3)
            began = fleet.now()
            nemesis = Nemesis(fleet, lose=lambda: None, say=lambda line: None)
            nemesis.run(plan, seconds)
            ended = fleet.now()
            for struck in nemesis.struck:
                if struck.trouble:
                    raise RuntimeError(f"{struck.fault}: {struck.trouble}")
        finally:
            fleet.stop()
        exits = sum(each.name in setup.beat_names for each in fleet.exits)
        return tally(judged, fleet.tap.arrivals, began, ended), len(nemesis.struck), exits


def main() -> None:
    """Run the controls one after the other, and print what was counted."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--broker", choices=("redis", "rabbitmq"), default="redis")
    parser.add_argument("--only", help="a part of a control's name")
    options = parser.parse_args()
    print(f"seed {options.seed}, {options.minutes:g} min over {options.broker}")
    for name, setup in controls(options.broker).items():
        if options.only and options.only not in name:
            continue
        found, faults, exits = strike(setup, options.seed, options.minutes * 60)
        print(
            f"{name:<24} {faults:3} faults, {found.slots} slots: {found.sends} sends, {found.lost} slots lost,"
            f" {found.doubled} sent twice; {exits} times a beat ended by itself",
            flush=True,
        )


if __name__ == "__main__":
    main()
