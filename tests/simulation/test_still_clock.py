"""The server's clock stands still, and shows the time that it was set to, to the microsecond: whichever way it is told."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.simulation.world import BEGAN
from tests.support.faketime_server import FrozenServer
from tests.support.still_clock import StillClock, compiled_clock, library_clock


@pytest.mark.parametrize("make_clock", [compiled_clock, library_clock])
def test_a_server_tells_the_time_that_its_clock_was_set_to(
    tmp_path: Path, make_clock: Callable[[Path], StillClock | None]
) -> None:
    clock = make_clock(tmp_path)
    if clock is None:
        pytest.skip("no C compiler")
    server = FrozenServer(tmp_path, BEGAN, clock)
    server.start()
    try:
        client = server.client()
        for later in (0, 1, 123_456, 999_999, 1_000_000, 86_400_000_007, -5):
            server.set_time(BEGAN + later)
            assert server.time() == server.time() == BEGAN + later
        server.set_time(BEGAN)
        client.set("key", "value", px=1500)
        for later, left in ((0, 1500), (1_000, 1499), (1_499_000, 1), (1_501_000, -2)):
            server.set_time(BEGAN + later)
            assert client.pttl("key") == left
    finally:
        server.stop()
