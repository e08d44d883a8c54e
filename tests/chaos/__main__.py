"""`python -m tests.chaos`: one run, its seed, faults, slots and verdict, and a drawing of it."""

from __future__ import annotations

import argparse
import pickle
import secrets
import shutil
import sys
import tempfile
import time
from pathlib import Path

from tests.chaos.checker import check
from tests.chaos.fleet import Setup
from tests.chaos.plan import KINDS, kinds_for, make_plan
from tests.chaos.report import report
from tests.chaos.run import run


def main() -> int:
    """Run, report, and draw; 1 where something was violated."""
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    parser.add_argument("--minutes", type=float, default=2.0, help="how long faults happen (2)")
    parser.add_argument("--seed", type=int, help="the plan's seed; one is chosen and printed")
    parser.add_argument("--beats", type=int, default=3)
    parser.add_argument("--workers", type=int, default=3)
    parser.add_argument("--topology", choices=("standalone", "sentinel"), default="standalone")
    parser.add_argument("--broker", choices=("redis", "rabbitmq"), default="redis")
    parser.add_argument("--server", choices=("valkey", "redis", "redis62"), default="valkey")
    parser.add_argument("--faults", help=f"kinds of faults, with commas between: {', '.join(KINDS)}")
    parser.add_argument("--svg", type=Path, help="draw the run into this file")
    parser.add_argument(
        "--keep",
        type=Path,
        help="keep journals, logs and the history in this directory (where something is wrong, they are kept anyhow)",
    )
    parser.add_argument("--plan", action="store_true", help="print the plan of the seed and do nothing")
    parser.add_argument("--judge", type=Path, help="judge a history that was kept, and do nothing else")
    options = parser.parse_args()
    seed = secrets.randbelow(1_000_000) if options.seed is None else options.seed
    setup = Setup(options.beats, options.workers, options.topology, options.broker, kind=options.server)
    if options.keep and options.keep.exists() and any(options.keep.iterdir()):
        parser.error(f"--keep {options.keep}: there is something in it already")
    kinds = tuple(options.faults.split(",")) if options.faults else kinds_for(options.topology)
    unknown = set(kinds) - KINDS.keys()
    if unknown:
        parser.error(f"no such faults: {', '.join(sorted(unknown))}")
    if options.plan:
        for fault in make_plan(
            seed,
            options.minutes * 60,
            beats=setup.beat_names,
            workers=setup.worker_names,
            kinds=kinds,
            links=setup.links,
        ):
            print(fault)
        return 0
    if options.judge:
        history = pickle.loads(options.judge.read_bytes())
        verdict = check(history)
    else:
        print(f"seed {seed}: {options.minutes:g} min of {', '.join(kinds)}", flush=True)
        began = time.monotonic()
        with tempfile.TemporaryDirectory(prefix="chaos-") as scratch:
            directory = options.keep or Path(scratch)
            directory.mkdir(parents=True, exist_ok=True)
            outcome = run(
                setup,
                directory,
                seed=seed,
                seconds=options.minutes * 60,
                kinds=kinds,
                say=lambda line: print(line, flush=True),
            )
            history, verdict = outcome.history, outcome.verdict
            (directory / "history.pickle").write_bytes(pickle.dumps(history))
            if not options.keep and not verdict.sound:
                # Another run of the same seed has other timings, and may find nothing.
                kept = Path(tempfile.mkdtemp(prefix=f"chaos-{seed}-")) / "run"
                shutil.copytree(directory, kept)
                print(f"journals, logs and the history are kept in {kept}")
        print(f"took {time.monotonic() - began:.0f} s")
    print(report(history, verdict))
    if options.svg:
        from tests.chaos.draw import draw

        options.svg.write_text(draw(history, verdict))
    return 0 if verdict.sound else 1


if __name__ == "__main__":
    sys.exit(main())
