"""The stories find out when a guard is missing from a script; so they would, if it were missing from the package."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest

from celery_leaderbeat import store as store_module
from tests.simulation.strikes import tell_story
from tests.support.faketime_server import FrozenServer

#: No story has so many points.
_POINTS = 120


@dataclass(frozen=True)
class Guard:
    """A guard, how it is removed, what then goes wrong, and in whose company."""

    script: str
    name: str
    text: str
    instead: str
    blow: str
    wrong: str
    policy: Mapping[str, str] = field(default_factory=dict)
    company: Mapping[str, Any] = field(default_factory=dict)


GUARDS = [
    Guard(
        "begin",
        "ended",
        "return refuse('the slot is ' .. state)",
        "",
        "killed",
        "it is done by several runs",
    ),
    Guard(
        "begin",
        "attempt",
        "elseif attempt < (tonumber(record[3]) or 1) then",
        "elseif false then",
        "killed",
        "is begun as attempt 1, and attempt 2 is claimed",
        {"on_crash": "rerun"},
        # The first message is back, and the second one there, before anybody is.
        {"workers": 1, "restart_after": lambda world: 60.0, "redelivered_after": (5.0,)},
    ),
    Guard(
        "claim",
        "lease check",
        "if held ~= ARGV[1] then",
        "if false then",
        "frozen",
        "was claimed by who doesn't lead",
        {},
        {"beats": 1},
    ),
    Guard(
        "finish",
        "the run that holds the slot",
        "if record[2] ~= ARGV[1] or record[1] == 'abandoned' then",
        "if not record[2] then",
        "frozen",
        "it is done by several runs",
        {"on_crash": "rerun"},
    ),
]


@pytest.mark.parametrize("guard", GUARDS, ids=lambda guard: f"{guard.script}: {guard.name}")
def test_a_story_tells_when_a_guard_is_missing(
    frozen_server: FrozenServer, monkeypatch: pytest.MonkeyPatch, guard: Guard
) -> None:
    source = store_module._source
    text = source(guard.script)
    assert text.count(guard.text) == 1
    removed = text.replace(guard.text, guard.instead)
    monkeypatch.setattr(
        store_module, "_source", lambda name: removed if name == guard.script else source(name)
    )
    mix = {"prefer": "missed", "on_crash": "auto", "overlap": "allow", "catch_up": "latest", **guard.policy}
    with pytest.raises(AssertionError, match=guard.wrong):
        _tell_stories(frozen_server, mix, guard)


def _tell_stories(server: FrozenServer, mix: Mapping[str, Any], guard: Guard) -> None:
    for number in range(1, _POINTS):
        tell_story(server, "fenced.late", mix, {number: guard.blow}, **guard.company)
