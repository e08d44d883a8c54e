"""A TCP proxy with the faults of a network, to stand between a process and its server.

It runs in a thread of the test process and needs no privilege. "Up" is towards the server.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
import threading
from collections.abc import Callable, Coroutine
from typing import Any, Literal

from tests.support.servers import free_port

__all__ = ["Direction", "Proxy"]

Direction = Literal["up", "down", "both"]

#: Closes with a reset instead of a goodbye.
_RESET = struct.pack("ii", 1, 0)


class _Lane:
    """One direction of all connections."""

    def __init__(self) -> None:
        self.open = asyncio.Event()
        self.open.set()
        self.delay = 0.0


class Proxy:
    """Forwards a loopback port to `port` on `host`, until told otherwise.

    `delay` slows a direction down, `freeze` holds back what comes (a half-open link: connections stay, and
    new ones are accepted, but nothing arrives), `forget` swallows whatever comes over the connections there are
    while new ones work, `reset` breaks the connections there are, `cut` also refuses new ones. `resume` ends all
    of that but what was forgotten; what was held back is then delivered.
    """

    def __init__(self, port: int, host: str = "127.0.0.1") -> None:
        self.target = (host, port)
        self.port = free_port()
        self.accepted = 0  # connections, ever
        self.bytes_up = 0  # forwarded to the server, ever
        self.bytes_down = 0
        #: Called in the proxy's thread with what has been handed to the server, and a number for its connection.
        self.tap: Callable[[int, bytes], None] | None = None
        self._lanes: dict[str, _Lane] = {}
        self._server: asyncio.Server | None = None
        self._accepted: set[asyncio.BaseTransport] = set()
        self._forgotten: set[asyncio.StreamWriter] = set()
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name=f"proxy-{self.port}", daemon=True)

    def __enter__(self) -> Proxy:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self) -> Proxy:
        """Begin to accept connections."""
        self._thread.start()
        self._do(self._listen())
        return self

    def stop(self) -> None:
        """Break everything and end the thread."""
        if self._thread.is_alive():
            self._do(self._close_all())
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(5)
        if not self._loop.is_running() and not self._loop.is_closed():
            self._loop.close()

    def redis_url(self, db: int = 0) -> str:
        """The URL of a Redis behind this proxy."""
        return f"redis://127.0.0.1:{self.port}/{db}"

    def amqp_url(self, vhost: str = "") -> str:
        """The URL of a RabbitMQ behind this proxy."""
        return f"amqp://guest:guest@127.0.0.1:{self.port}/{vhost}"

    @property
    def connections(self) -> int:
        """How many connections there are."""
        return len(self._writers) // 2

    def delay(self, seconds: float, direction: Direction = "both") -> None:
        """Deliver what comes in a direction `seconds` later; the bandwidth stays."""

        def act() -> None:
            for lane in self._chosen(direction):
                lane.delay = seconds

        self._call(act)

    def freeze(self, direction: Direction = "both") -> None:
        """Hold back what comes in a direction. With `down`, requests arrive and answers don't."""

        def act() -> None:
            for lane in self._chosen(direction):
                lane.open.clear()

        self._call(act)

    def forget(self) -> None:
        """Let what comes over the connections there are vanish, as a router does that has dropped them from its
        table; nobody is told, and new ones are accepted."""

        def act() -> None:
            self._forgotten |= self._writers

        self._call(act)

    def reset(self) -> None:
        """Break the connections there are, as a restarted router does; new ones are accepted."""
        self._do(self._break())

    def cut(self) -> None:
        """Break the connections there are, and refuse new ones."""
        self._do(self._close_all())

    def resume(self) -> None:
        """End every fault."""

        def act() -> None:
            for lane in self._chosen("both"):
                lane.delay = 0.0
                lane.open.set()

        self._call(act)
        self._do(self._listen())

    # In the thread

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._lanes = {"up": _Lane(), "down": _Lane()}
        self._loop.run_forever()

    def _do(self, work: Coroutine[Any, Any, None]) -> None:
        asyncio.run_coroutine_threadsafe(work, self._loop).result(10)

    def _call(self, act: Callable[[], None]) -> None:
        async def work() -> None:
            act()

        self._do(work())

    def _chosen(self, direction: Direction) -> list[_Lane]:
        return [lane for name, lane in self._lanes.items() if direction in (name, "both")]

    async def _listen(self) -> None:
        if self._server is None:
            self._server = await self._loop.create_server(self._protocol, "127.0.0.1", self.port)

    def _protocol(self) -> asyncio.StreamReaderProtocol:
        return _Tracked(self._accepted, self._accept, self._loop)

    async def _close_all(self) -> None:
        server, self._server = self._server, None
        if server is not None:
            # Who is being accepted needs the server until it is a connection; without it, asyncio leaves the socket open.
            for listening in server.sockets:
                self._loop.remove_reader(listening.fileno())
            await asyncio.sleep(0.005)
            server.close()
        # A connection that was accepted just before has no task yet: it appears in a later round of the loop.
        for _ in range(200):
            await self._break()
            await asyncio.sleep(0.005)
            if not (self._accepted or self._writers or self._tasks):
                break

    async def _break(self) -> None:
        tasks = [task for task in self._tasks if task is not asyncio.current_task()]
        for writer in list(self._writers):
            _abort(writer)
        for transport in list(self._accepted):
            transport.abort()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        # An aborted transport closes its socket in the next round of the loop.
        await asyncio.sleep(0)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        self._writers.add(writer)
        self.accepted += 1
        pair = [writer]
        try:
            # A frozen link accepts (the kernel does), and reaches nobody.
            await self._lanes["up"].open.wait()
            far_reader, far_writer = await asyncio.open_connection(*self.target)
            pair.append(far_writer)
            self._writers.add(far_writer)
            pumps = [
                asyncio.create_task(self._pump(reader, far_writer, "up")),
                asyncio.create_task(self._pump(far_reader, writer, "down")),
            ]
            try:
                await asyncio.wait(pumps, return_when=asyncio.FIRST_EXCEPTION)
            finally:
                for pump in pumps:
                    pump.cancel()
                await asyncio.gather(*pumps, return_exceptions=True)
        except (OSError, asyncio.CancelledError):
            # The fault that was asked for, or a peer that has gone.
            pass
        finally:
            for each in pair:
                _abort(each)
                self._writers.discard(each)
                self._forgotten.discard(each)
            self._tasks.discard(task)

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, way: str) -> None:
        lane = self._lanes[way]
        # Empty bytes: the peer has said goodbye. None: the connection broke.
        queue: asyncio.Queue[tuple[float, bytes | None]] = asyncio.Queue(64)

        async def fill() -> None:
            while True:
                data: bytes | None
                try:
                    data = await reader.read(65536)
                except OSError:
                    data = None
                await queue.put((self._loop.time() + lane.delay, data))
                if not data:
                    return

        filling = asyncio.create_task(fill())
        try:
            while True:
                due, data = await queue.get()
                await asyncio.sleep(max(0.0, due - self._loop.time()))
                await lane.open.wait()
                if writer in self._forgotten:
                    if not data:
                        return
                    continue
                if data is None:
                    raise ConnectionResetError
                if not data:
                    with contextlib.suppress(OSError):
                        writer.write_eof()
                    return
                writer.write(data)
                if way == "up" and self.tap is not None:
                    self.tap(id(writer), data)
                await writer.drain()
                if way == "up":
                    self.bytes_up += len(data)
                else:
                    self.bytes_down += len(data)
        finally:
            filling.cancel()
            await asyncio.gather(filling, return_exceptions=True)


class _Tracked(asyncio.StreamReaderProtocol):
    """An accepted connection, known from its first moment to its last."""

    def __init__(
        self,
        known: set[asyncio.BaseTransport],
        accept: Callable[[asyncio.StreamReader, asyncio.StreamWriter], Coroutine[Any, Any, None]],
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        super().__init__(asyncio.StreamReader(loop=loop), accept, loop=loop)
        self._known = known
        self._own: asyncio.BaseTransport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._own = transport
        self._known.add(transport)
        super().connection_made(transport)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._own is not None:
            self._known.discard(self._own)
        super().connection_lost(exc)


def _abort(writer: asyncio.StreamWriter) -> None:
    sock = writer.get_extra_info("socket")
    with contextlib.suppress(OSError, AttributeError):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
    writer.transport.abort()
