"""Seeded bugs: a guard taken out of a script, or out of the package's Python, one at a time."""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from celery_leaderbeat import store as store_module
from celery_leaderbeat.lease import Lease
from celery_leaderbeat.sender import Sender
from celery_leaderbeat.sweep import Sweep

__all__ = ["BUGS", "Bug"]


@dataclass(frozen=True)
class Bug:
    """A guard and how it is taken out.

    Attributes:
        name: what is missing.
        place: a script's name, or a function of the package.
        text: what stands there, exactly once.
        instead: what stands there without the guard.
        guard: the name under which `tests/protocol/guards.py` has the same guard, where it has it; of a function, a unit
            test that needs it.
    """

    name: str
    place: str | Callable[..., Any]
    text: str
    instead: str
    guard: str = ""

    def plant(self, patch: pytest.MonkeyPatch) -> None:
        """Take the guard out until the patch is undone."""
        if isinstance(self.place, str):
            self._plant_in_script(patch, self.place)
        else:
            self._plant_in_function(patch, self.place)

    def _without(self, source: str) -> str:
        assert source.count(self.text) == 1, (
            f"{self.name}: {self.text!r} is there {source.count(self.text)} times"
        )
        return source.replace(self.text, self.instead)

    def _plant_in_script(self, patch: pytest.MonkeyPatch, script: str) -> None:
        source = store_module._source
        without = self._without(source(script))
        patch.setattr(store_module, "_source", lambda name: without if name == script else source(name))

    def _plant_in_function(self, patch: pytest.MonkeyPatch, function: Callable[..., Any]) -> None:
        without = self._without(textwrap.dedent(inspect.getsource(function)))
        found: dict[str, Any] = {}
        code = compile(f"from __future__ import annotations\n{without}", f"<without {self.name}>", "exec")
        exec(code, function.__globals__, found)
        owner = {"Lease": Lease, "Sender": Sender, "Sweep": Sweep}[function.__qualname__.partition(".")[0]]
        patch.setattr(owner, function.__name__, found[function.__name__])


BUGS = (
    Bug(
        "the lease check in claim",
        "claim",
        "if held ~= ARGV[1] then",
        "if false then",
        "lease check",
    ),
    Bug(
        "the epoch's floor",
        "elect",
        "math.max(stored + 1, tonumber(ARGV[3]) + 1, tonumber(now[1]))",
        "stored + 1",
    ),
    Bug(
        "the compare in release",
        "release",
        "if held ~= ARGV[1] then",
        "if false then",
        "lease compare",
    ),
    Bug("the compare in renew", "renew", "if held ~= ARGV[1] then", "if false then", "lease compare"),
    Bug(
        "the trust window's begin and margin",
        Lease._trust,
        "sent + self._settings.lease_ttl - self._settings.margin",
        "self._monotonic() + self._settings.lease_ttl",
    ),
    Bug(
        "the trust before each publish",
        Sender._publish,
        "allowed=lambda: self._elector.trusts(batch.term)",
        "allowed=lambda: True",
    ),
    Bug(
        "begin's epoch check",
        "begin",
        "if epoch < (tonumber(record[2]) or 0) and state ~= 'returned'",
        "if false and state ~= 'returned'",
        "epoch",
    ),
    Bug(
        "begin's attempt check",
        "begin",
        "elseif attempt < (tonumber(record[3]) or 1) then",
        "elseif false then",
        "attempt",
    ),
    Bug(
        "begin's run lease of the other",
        "begin",
        "elseif left > 0 then",
        "elseif false then",
        "run lease of the other",
    ),
    Bug(
        "begin's refusal of what has ended",
        "begin",
        "return refuse('the slot is ' .. state)",
        "",
        "ended",
    ),
    Bug(
        "finish's run check",
        "finish",
        "if record[2] ~= ARGV[1] or record[1] == 'abandoned' then",
        "if not record[2] then",
        "run",
    ),
    Bug(
        "give-back's compare of epoch and batch",
        "give_back",
        "if not state or record[2] ~= ARGV[1] or record[5] ~= ARGV[2] then",
        "if not state then",
        "claim compare",
    ),
    Bug(
        "confirm's compare of epoch and batch",
        "confirm",
        "if not state or record[2] ~= ARGV[1] or record[4] ~= ARGV[2] then",
        "if not state then",
        "claim compare",
    ),
    Bug("doubt's grace", "doubt", "if now < ends then", "if false then", "grace"),
    Bug(
        "the sweep's respect for a newer leader's claims",
        Sweep.run,
        'elif found.state == "claimed" and found.epoch > self._term.epoch:',
        "elif False:",
        "test_a_leader_that_is_superseded_leaves_its_successors_claims_alone",
    ),
    Bug(
        "the last-decided compare in claim",
        "claim",
        "    if ahead then",
        "    ahead = true\n    if ahead then",
        "last decided",
    ),
    Bug(
        "crash's limit of attempts",
        "crash",
        "record[3] == 'rerun' and attempt < (tonumber(record[5]) or 1)",
        "record[3] == 'rerun'",
        "attempts",
    ),
    Bug("crash's run lease check", "crash", "elseif now < ends then", "elseif false then", "run lease"),
    Bug("renew_run's run check", "renew_run", " and record[2] == ARGV[i] then", " then", "run"),
    Bug(
        "claim's respect for a claim of the same epoch",
        "claim",
        "owner < epoch and record[4] == 'duplicate'",
        "record[4] == 'duplicate'",
        "older epoch",
    ),
)
