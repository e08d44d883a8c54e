"""Logs can be told apart by a stable name."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import celery_leaderbeat

PACKAGE = Path(celery_leaderbeat.__file__).parent
_LEVELS = {"debug", "info", "warning", "error", "exception", "critical", "log"}


def _log_calls() -> Iterator[tuple[str, ast.Call]]:
    for path in sorted(PACKAGE.glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                owner = node.func.value
                if isinstance(owner, ast.Name) and owner.id == "logger" and node.func.attr in _LEVELS:
                    yield f"{path.name}:{node.lineno}", node


def _says_action(call: ast.Call) -> bool:
    (extra,) = (word.value for word in call.keywords if word.arg == "extra")
    if isinstance(extra, ast.Dict):
        return any(isinstance(key, ast.Constant) and key.value == "action" for key in extra.keys)
    # A variable, or a call that makes it.
    return True


def test_every_log_line_says_its_action() -> None:
    calls = list(_log_calls())
    assert len(calls) > 50
    assert [
        place
        for place, call in calls
        if not any(word.arg == "extra" for word in call.keywords) or not _says_action(call)
    ] == []
