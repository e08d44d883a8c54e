"""A Redis client that does little besides talking to the server: one connection, no retries, no timeouts, no pool.

For stories that ask millions of questions: redis-py spends more time on each than the server does. The commands, and how
their answers are read, are redis-py's own.
"""

from __future__ import annotations

import hashlib
import socket
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import redis
from redis.client import Pipeline

__all__ = ["QuickClient"]

_Request = tuple[Sequence[Any], dict[str, Any]]

#: What one call takes from the socket: more than nearly all answers.
_AT_ONCE = 1 << 16


def _packed(args: Sequence[Any]) -> str:
    """A request as the protocol wants it."""
    words: Sequence[Any] = args
    if " " in args[0]:
        words = [*args[0].split(" "), *args[1:]]
    parts = [f"*{len(words)}"]
    for word in words:
        text = word if type(word) is str else word.decode() if type(word) is bytes else str(word)
        parts.append(f"${len(text) if text.isascii() else len(text.encode())}\r\n{text}")
    parts.append("")
    return "\r\n".join(parts)


def _parsed(lines: Sequence[str], at: int) -> tuple[Any, int]:
    """The answer that begins with the line `at`, and the line after it.

    Raises:
        IndexError: it isn't there as a whole.
    """
    line = lines[at]
    at += 1
    kind = line[0]
    if kind == "$":
        length = int(line[1:])
        if length < 0:
            return None, at
        text = lines[at]
        at += 1
        # A string may itself have ends of lines, and characters of several bytes.
        while len(text) != length and len(text.encode()) != length:
            text = f"{text}\r\n{lines[at]}"
            at += 1
        return text, at
    if kind == ":":
        return int(line[1:]), at
    if kind == "*":
        if line == "*-1":
            return None, at
        found = []
        for _ in range(int(line[1:])):
            item, at = _parsed(lines, at)
            found.append(item)
        return found, at
    if kind == "+":
        return line[1:], at
    error = redis.exceptions.ResponseError
    if line.startswith("-NOSCRIPT"):
        error = redis.exceptions.NoScriptError
    return error(line[1:]), at


@cache
def _sha(text: str) -> str:
    return hashlib.sha1(text.encode()).hexdigest()


class QuickClient(redis.Redis):
    """A client of the server that listens on a Unix socket; it decodes all answers."""

    def __init__(self, path: Path) -> None:
        super().__init__(unix_socket_path=str(path), decode_responses=True, protocol=2)
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.connect(str(path))
        self._readers: dict[str, Callable[..., Any]] = dict(self.response_callbacks)

    def execute_command(self, *args: Any, **options: Any) -> Any:
        (answer,) = self._exchange(_packed(args), 1)
        return self._understood(args, options, answer)

    def pipeline(self, transaction: bool = True, shard_hint: Any = None) -> _QuickPipeline:
        assert not transaction, "only for round trips"
        return _QuickPipeline(self)

    def register_script(self, script: str) -> _QuickScript:
        return _QuickScript(self, script)

    def ask(self, requests: Sequence[_Request]) -> list[Any]:
        """The answers to many requests in one round trip."""
        answers = self._exchange("".join([_packed(args) for args, _ in requests]), len(requests))
        return [
            self._understood(args, options, answer)
            for (args, options), answer in zip(requests, answers, strict=True)
        ]

    def close(self) -> None:
        self._socket.close()
        super().close()

    def _understood(self, args: Sequence[Any], options: dict[str, Any], answer: Any) -> Any:
        if isinstance(answer, Exception):
            raise answer
        read = self._readers.get(args[0])
        if read is None:
            return answer
        options.pop("keys", None)
        return read(answer, **options)

    def _exchange(self, request: str, count: int) -> list[Any]:
        self._socket.sendall(request.encode())
        data = b""
        while True:
            more = self._socket.recv(_AT_ONCE)
            if not more:
                raise redis.exceptions.ConnectionError("the server is gone")
            data += more
            if data.endswith(b"\r\n"):
                lines = data.decode().split("\r\n")
                del lines[-1]
                answers, at = [], 0
                try:
                    for _ in range(count):
                        answer, at = _parsed(lines, at)
                        answers.append(answer)
                except IndexError:
                    # There is more to come.
                    continue
                assert at == len(lines), f"more than was asked for: {lines[at:]}"
                return answers


class _QuickScript:
    """A script, with as much of redis-py's as the package uses."""

    def __init__(self, client: QuickClient, script: str) -> None:
        self._client = client
        self.script = script
        self.sha = _sha(script)

    def __call__(self, keys: Sequence[Any], args: Sequence[Any]) -> Any:
        try:
            return self._client.execute_command("EVALSHA", self.sha, len(keys), *keys, *args)
        except redis.exceptions.NoScriptError:
            self._client.script_load(self.script)
            return self._client.execute_command("EVALSHA", self.sha, len(keys), *keys, *args)


class _QuickPipeline(Pipeline):
    """Commands in one round trip."""

    def __init__(self, client: QuickClient) -> None:
        super().__init__(client.connection_pool, client.response_callbacks, False, None)
        self._client = client
        self._requests: list[_Request] = []

    def execute_command(self, *args: Any, **options: Any) -> Any:
        self._requests.append((args, options))
        return self

    def execute(self, raise_on_error: bool = True) -> list[Any]:
        requests, self._requests = self._requests, []
        return self._client.ask(requests) if requests else []
