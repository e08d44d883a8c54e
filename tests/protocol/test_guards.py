"""Each guard of the scripts is needed: with one removed, a contract test fails, and the explorer finds a story.

The text of a guard has to be found exactly once, so that this list keeps up with the scripts.
"""

from __future__ import annotations

import functools
import inspect
import itertools
from collections.abc import Callable, Iterable, Iterator
from types import ModuleType
from typing import Any

import pytest

from celery_leaderbeat import store as store_module
from celery_leaderbeat.errors import LeaderbeatError
from celery_leaderbeat.ledger import NotLeading
from tests.protocol import (
    test_begin,
    test_claim,
    test_confirm,
    test_crash,
    test_election,
    test_events,
    test_finish,
    test_overlap,
    test_pause,
    test_recall,
    test_register,
    test_releases,
    test_requests,
    test_retreat,
    test_write_off,
)
from tests.protocol.conftest import EXPLORED_DB
from tests.protocol.explorer import explore
from tests.protocol.ground import Ground
from tests.protocol.guards import GUARDS, Guard
from tests.protocol.images import Images
from tests.protocol.world import Violation
from tests.support.servers import RedisServer

CONTRACTS = {
    "announce": (test_releases,),
    "begin": (test_begin, test_crash),
    "claim": (test_claim, test_overlap, test_pause, test_requests),
    "confirm": (test_confirm,),
    "crash": (test_crash,),
    "doubt": (test_write_off,),
    "elect": (test_election, test_events, test_releases),
    "finish": (test_finish, test_crash),
    "give_back": (test_confirm,),
    "pause": (test_pause,),
    "register": (test_register,),
    "release": (test_election,),
    "renew": (test_election,),
    "renew_run": (test_finish, test_crash),
    "recall_pauses": (test_pause,),
    "recall_slots": (test_recall,),
    "resume": (test_pause,),
    "retreat": (test_retreat,),
    "write_off": (test_write_off,),
}


def _named(guard: Guard) -> str:
    return f"{guard.script}: {guard.name}"


def _contract(module: ModuleType) -> Iterator[tuple[str, Callable[[Ground], None]]]:
    """The tests of a module that ask for a ground alone, as functions of it."""
    for name, function in inspect.getmembers(module, inspect.isfunction):
        if not name.startswith("test_") or function.__module__ != module.__name__:
            continue
        marks = getattr(function, "pytestmark", [])
        if any(mark.name == "xfail" for mark in marks):
            continue
        axes: list[list[dict[str, Any]]] = []
        for mark in marks:
            if mark.name == "parametrize":
                names, values = mark.args[0], mark.args[1]
                names = [names] if isinstance(names, str) else list(names)
                rows = [row if len(names) > 1 else (row,) for row in values]
                axes.append([dict(zip(names, row, strict=True)) for row in rows])
        for row in itertools.product(*axes):
            arguments = {key: value for part in row for key, value in part.items()}
            if inspect.signature(function).parameters.keys() == {"ground", *arguments}:
                yield name, functools.partial(function, **arguments)


def contract_that_fails(server: RedisServer, modules: Iterable[ModuleType]) -> str | None:
    """The first contract test that fails; those that look at a whole table last."""
    ground = Ground(server.url(), server.client())
    checks = itertools.chain.from_iterable(map(_contract, modules))
    try:
        for name, check in sorted(checks, key=lambda pair: "every_message" in pair[0]):
            server.client().flushdb()
            try:
                check(ground)
            except (AssertionError, LeaderbeatError, NotLeading, pytest.fail.Exception):
                return name
    finally:
        ground.close()
    return None


@pytest.fixture(scope="module")
def memory() -> dict[object, object]:
    return {}


@pytest.mark.parametrize("guard", GUARDS, ids=_named)
def test_without_this_guard_a_guarantee_breaks(
    guard: Guard,
    one_server: RedisServer,
    memory: dict[object, object],
    monkeypatch: pytest.MonkeyPatch,
    tell: Callable[[str, str], None],
) -> None:
    source = store_module._source
    text = source(guard.script)
    assert text.count(guard.text) == 1, (
        f"{guard.script}.lua has {guard.text!r} {text.count(guard.text)} times"
    )
    removed = text.replace(guard.text, guard.instead)
    monkeypatch.setattr(
        store_module, "_source", lambda name: removed if name == guard.script else source(name)
    )

    contract = contract_that_fails(one_server, CONTRACTS[guard.script])
    story: Violation | None = None
    if guard.rules is not None:
        images = Images(one_server.url(EXPLORED_DB), one_server.client(EXPLORED_DB), memory)
        try:
            explore(guard.rules, images)
        except Violation as found:
            story = found
        finally:
            images.close()

    seen = f"{story.guarantee} ({len(story.story) - 1} moves)" if story else "-"
    tell("guards", f"{_named(guard):45} | {contract or '-'} | {seen}")
    assert contract is not None
    assert guard.rules is None or story is not None
