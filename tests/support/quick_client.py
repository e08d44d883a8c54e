"""A Redis client that does little besides talking to the server: one connection, no retries, no timeouts, no pool.

For stories that ask hundreds of thousands of questions: redis-py spends more time on each than the server does. The
commands, and how their answers are read, are redis-py's own.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import redis
from redis.client import Pipeline

__all__ = ["QuickClient"]


def _packed(args: Sequence[Any]) -> bytes:
    """A request as the protocol wants it."""
    words: list[Any] = [*str(args[0]).split(" "), *args[1:]]
    parts = [b"*%d\r\n" % len(words)]
    for word in words:
        data = word if isinstance(word, bytes) else str(word).encode()
        parts.append(b"$%d\r\n%b\r\n" % (len(data), data))
    return b"".join(parts)


class QuickClient(redis.Redis):
    """A client of the server that listens on a Unix socket; it decodes all answers."""

    def __init__(self, path: Path) -> None:
        super().__init__(unix_socket_path=str(path), decode_responses=True, protocol=2)
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.connect(str(path))
        self._answers = self._socket.makefile("rb")

    def execute_command(self, *args: Any, **options: Any) -> Any:
        self._socket.sendall(_packed(args))
        return self._understood(args, options, self._answer())

    def pipeline(self, transaction: bool = True, shard_hint: Any = None) -> _QuickPipeline:
        assert not transaction, "only for round trips"
        return _QuickPipeline(self)

    def ask(self, requests: Sequence[tuple[Sequence[Any], dict[str, Any]]]) -> list[Any]:
        """The answers to many requests in one round trip."""
        self._socket.sendall(b"".join(_packed(args) for args, _ in requests))
        answers = [self._answer() for _ in requests]
        return [
            self._understood(args, options, answer)
            for (args, options), answer in zip(requests, answers, strict=True)
        ]

    def close(self) -> None:
        self._answers.close()
        self._socket.close()
        super().close()

    def _understood(self, args: Sequence[Any], options: dict[str, Any], answer: Any) -> Any:
        if isinstance(answer, Exception):
            raise answer
        read = self.response_callbacks.get(args[0])
        if read is None:
            return answer
        options.pop("keys", None)
        return read(answer, **options)

    def _answer(self) -> Any:
        line = self._answers.readline()
        kind, rest = line[:1], line[1:-2]
        if kind == b"$":
            length = int(rest)
            return None if length < 0 else self._answers.read(length + 2)[:-2].decode()
        if kind == b":":
            return int(rest)
        if kind == b"*":
            return None if rest == b"-1" else [self._answer() for _ in range(int(rest))]
        if kind == b"+":
            return rest.decode()
        if kind == b"-":
            text = rest.decode()
            if text.startswith("NOSCRIPT"):
                return redis.exceptions.NoScriptError(text)
            return redis.exceptions.ResponseError(text)
        raise redis.exceptions.ConnectionError("the server is gone")


class _QuickPipeline(Pipeline):
    """Commands in one round trip."""

    def __init__(self, client: QuickClient) -> None:
        super().__init__(client.connection_pool, client.response_callbacks, False, None)
        self._client = client

    def execute(self, raise_on_error: bool = True) -> list[Any]:
        requests = [(args, options) for args, options in self.command_stack]
        self.reset()
        return self._client.ask(requests)
