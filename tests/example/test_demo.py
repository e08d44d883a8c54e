"""The demo of the README, run as a reader runs it."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.servers import require

REPOSITORY = Path(__file__).resolve().parents[2]
DEMO = REPOSITORY / "examples" / "django_project" / "demo.py"


@pytest.fixture(scope="module")
def drill() -> tuple[int, str]:
    """Exit code and output of one run."""
    pytest.importorskip("rich")
    pytest.importorskip("django", minversion="5.1")
    require("valkey")
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith(("CELERY_", "DJANGO_"))
    }
    process = subprocess.Popen(
        [sys.executable, str(DEMO), "--plain"],
        cwd=REPOSITORY,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        output, _ = process.communicate(timeout=150)
    finally:
        if process.poll() is None:
            # It takes its processes down with it.
            process.send_signal(signal.SIGTERM)
            process.communicate(timeout=20)
    print(output)
    return process.returncode, output


def rows(output: str, table: str) -> dict[str, list[str]]:
    """The rows of one of the tables, by their first cell."""
    found = {}
    for line in output.partition(table)[2].splitlines()[1:]:
        if line.startswith("|"):
            first, *others = [cell.strip() for cell in line.strip("|").split("|")]
            found[first] = others
        elif found and line.strip():
            break
    return found


@pytest.mark.timeout(180)
def test_the_drill_finds_everything_as_expected(drill: tuple[int, str]) -> None:
    code, output = drill
    assert output.splitlines()[-1].startswith("All ")
    assert "OFF" not in output
    assert code == 0


@pytest.mark.timeout(180)
def test_each_slot_was_sent_and_executed_once(drill: tuple[int, str]) -> None:
    table = rows(drill[1], "Slots, by entry")
    table.pop("entry")
    assert set(table) >= {"charge-calls", "charge-storage", "charge-support", "charge-lines"}
    for entry in ("charge-calls", "charge-storage", "charge-support", "charge-lines"):
        expected, sent, executed, doubled, missed, refused, verdict = table[entry]
        assert int(expected) > 0
        assert (sent, executed, doubled, missed, verdict) == (expected, expected, "0", "0", "ok")
        assert refused == ("1 of 1" if entry == "charge-calls" else "0")
    assert int(table["charge-calls"][0]) > 40


@pytest.mark.timeout(180)
def test_every_fault_ends_as_the_readme_says(drill: tuple[int, str]) -> None:
    table = rows(drill[1], "What else was expected")
    for what in (
        "SIGTERM: until the next election",
        "SIGTERM: the process",
        "kill -9: until the next election",
        "SIGSTOP: from the lapse to the next election",
        "the thawed replica",
        "after the thaw, under its old epoch",
        "the stale message",
        "the stale write",
    ):
        assert table[what][-1] == "ok"
    handover = re.match(r"(\d+) ms", table["SIGTERM: until the next election"][1])
    assert handover is not None
    assert int(handover[1]) <= 150
