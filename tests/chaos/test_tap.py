"""The tap reads stamps from what kombu's transports really write, however the bytes are cut into pieces."""

from __future__ import annotations

import json
import threading

import pytest
from amqp.serialization import dumps

from celery_leaderbeat.tick import Stamp, parse_tick_key
from tests.chaos.tap import Tap

KEYS = [f"00-missed-all@2026-11-30T05:53:{second:02}Z" for second in range(3)]


def headers(key: str, attempt: int) -> dict[str, object]:
    entry, slot = parse_tick_key(key)
    return {
        "lang": "py",
        "celery_beat_task": True,
        **Stamp(key, entry, slot, 1_796_017_912, attempt).headers(),
    }


def as_redis(key: str, attempt: int) -> bytes:
    message = {"body": "W10=", "headers": headers(key, attempt), "properties": {"delivery_tag": "x"}}
    return b"*3\r\n$5\r\nLPUSH\r\n$6\r\ncelery\r\n" + json.dumps(message).encode() + b"\r\n"


def as_amqp(key: str, attempt: int) -> bytes:
    return b"\x02\x00\x01\x00" + dumps("F", [headers(key, attempt)]) + b"[[], {}, {}]\xce"


@pytest.mark.parametrize("wire", [as_redis, as_amqp])
@pytest.mark.parametrize("piece", [1, 7, 100, 10_000])
def test_each_message_is_heard_once_with_its_attempt(wire: object, piece: int) -> None:
    tap = Tap(0.0)
    data = b"".join(wire(key, attempt) for attempt, key in enumerate(KEYS, 1))  # type: ignore[operator]
    for begin in range(0, len(data), piece):
        tap.hear("beat0", 1, data[begin : begin + piece])
    assert [(arrival.key, arrival.attempt) for arrival in tap.arrivals] == [
        (key, attempt) for attempt, key in enumerate(KEYS, 1)
    ]


def test_connections_do_not_mix() -> None:
    tap = Tap(0.0)
    data = as_redis(KEYS[0], 1)
    half = data.index(b"tick_key") + 4
    tap.hear("beat0", 1, data[:half])
    tap.hear("beat0", 2, data[half:])
    tap.hear("beat1", 1, data[half:])
    assert tap.arrivals == []
    tap.hear("beat0", 1, data[half:])
    assert len(tap.arrivals) == 1


def test_what_waits_for_a_message_happens_right_after_it_was_heard() -> None:
    tap, heard = Tap(0.0), []
    sending = threading.Timer(0.05, tap.hear, ("beat0", 1, as_redis(KEYS[0], 1)))
    sending.start()
    tap.at_next("beat0", lambda: heard.append(len(tap.arrivals)), timeout=10)
    assert heard == [1]
    sending.join()


def test_what_waits_for_a_message_that_does_not_come_happens_all_the_same() -> None:
    tap, heard = Tap(0.0), []
    tap.at_next("beat0", lambda: heard.append(len(tap.arrivals)), timeout=0.01)
    tap.hear("beat0", 1, as_redis(KEYS[0], 1))
    assert heard == [0]
