"""Releases: which of two is newer, and what has no order is refused."""

from __future__ import annotations

from datetime import date, datetime, timedelta, timezone
from itertools import combinations
from typing import Any

import pytest

from celery_leaderbeat.release import Release

#: Each newer than the ones before.
NUMBERS = [
    0,
    "0.0.1",
    "0.9",
    "v1",
    "1.0.1",
    "1.2",
    "1.9.9",
    "1.10",
    2,
    "2.0.0.1",
    "10",
    "2026.11.29",
    "2026.11.30",
]
NUMBERS += [20261130120000, 10**18 - 1]
TIMES = [
    date(2026, 1, 1),
    "2026-01-01T00:00:00.5Z",
    "2026-11-30T15:05+01:00",
    "2026-11-30 14:05:01",
    datetime(2026, 11, 30, 14, 5, 2),
    "2026-11-30T14:05:02.000001",
    datetime(2026, 11, 30, 20, tzinfo=timezone(timedelta(hours=2))),
    "2026-12-01",
]


@pytest.mark.parametrize("kind", [NUMBERS, TIMES])
def test_the_later_of_two_is_newer_and_the_earlier_one_is_not(kind: list[Any]) -> None:
    for older, newer in combinations(map(Release.read, kind), 2):
        assert newer.newer_than(older), (older, newer)
        assert not older.newer_than(newer), (older, newer)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (7, "7"),
        (7, " 007 "),
        ("1.0", "1"),
        ("v1.2", "1.2.0.0"),
        ("2026-11-30T14:05:00Z", "2026-11-30T15:05:00+0100"),
        (date(2026, 11, 30), "2026-11-30T00:00:00+00:00"),
    ],
)
def test_of_two_equal_ones_neither_is_newer(one: Any, other: Any) -> None:
    first, second = Release.read(one), Release.read(other)
    assert first.rank == second.rank
    assert not first.newer_than(second)


def test_a_number_and_a_time_have_no_order() -> None:
    number, time = Release.read(20261130), Release.read("2026-11-30")
    assert not number.newer_than(time)
    assert not time.newer_than(number)
    assert not number.has_order_with(time)
    assert not time.has_order_with(number)


@pytest.mark.parametrize("kind", [NUMBERS, TIMES])
def test_two_of_one_kind_have_an_order_and_so_have_any_and_none(kind: list[Any]) -> None:
    none = Release.read(None)
    for one, other in combinations(map(Release.read, kind), 2):
        assert one.has_order_with(other)
        assert one.has_order_with(one)
        assert one.has_order_with(none)
        assert none.has_order_with(one)
    assert none.has_order_with(none)


def test_any_release_is_newer_than_none() -> None:
    none = Release.read(None)
    assert (none.text, none.rank) == ("", "")
    for value in (0, "0.0", "0001-01-01"):
        assert Release.read(value).newer_than(none)
        assert not none.newer_than(Release.read(value))
    assert not none.newer_than(none)


@pytest.mark.parametrize(
    "value",
    [
        "",
        " ",
        "1.2.0rc1",
        "1.2-3-gdeadbee",
        "deadbeef",
        "main",
        "1..2",
        ".1",
        "1.",
        "-1",
        -1,
        "1e3",
        "١٢",
        True,
        1.1,
        7.0,
        [1],
        b"7",
        "9" * 19,
        ".".join("1" * 11),
        "2026-13-01",
        "2026-11-30T25:00",
        "2026-11-30T",
        "26-11-30",
    ],
)
def test_what_has_no_order_is_refused(value: Any) -> None:
    with pytest.raises(ValueError, match=r"order|time"):
        Release.read(value)


def test_the_rank_is_plain_letters_and_digits_of_a_bounded_length() -> None:
    for value in (*NUMBERS, *TIMES, ".".join(["9" * 18] * 10)):
        rank = Release.read(value).rank
        assert rank.isascii()
        assert rank.isalnum()
        assert len(rank) <= 201
