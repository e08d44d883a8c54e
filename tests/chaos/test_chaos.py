"""Two minutes of everything that can go wrong, over real processes. `make chaos` runs it for longer.

`LEADERBEAT_CHAOS_SEED` and `LEADERBEAT_CHAOS_MINUTES` choose another run.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.chaos.draw import draw
from tests.chaos.fleet import Setup
from tests.chaos.plan import kinds_for
from tests.chaos.report import report
from tests.chaos.run import run
from tests.support.faketime import faketime_library
from tests.support.servers import require

SEED = int(os.environ.get("LEADERBEAT_CHAOS_SEED", "20261130"))
MINUTES = float(os.environ.get("LEADERBEAT_CHAOS_MINUTES", "2"))


@pytest.mark.timeout(240 + 60 * MINUTES)
def test_two_minutes_of_chaos_lose_double_and_leave_nothing_unexplained(
    tmp_path: Path, tell: Callable[[str, str], None]
) -> None:
    require("valkey")
    faketime_library()
    kinds = kinds_for("standalone")
    # Fewer workers than `make chaos` has: other tests run beside this one.
    outcome = run(Setup(beats=3, workers=2), tmp_path, seed=SEED, seconds=60 * MINUTES, kinds=kinds)
    text = report(outcome.history, outcome.verdict)
    (tmp_path / "chaos.svg").write_text(draw(outcome.history, outcome.verdict))
    print(text)
    tell("chaos", f"seed {SEED}, {MINUTES:g} min: {text.splitlines()[1]}; {text.splitlines()[-1]}")
    assert outcome.verdict.findings == []
    assert {struck.fault.kind for struck in outcome.history.struck} == set(kinds), (
        "each kind of fault happened"
    )
    assert outcome.verdict.slots >= 250 * MINUTES
    assert len(outcome.history.terms) >= 3, "the lead has changed hands"
