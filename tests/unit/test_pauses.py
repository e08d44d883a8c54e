"""When an entry is paused, and by which pause."""

from __future__ import annotations

import json
from datetime import datetime, timedelta, timezone
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from celery_leaderbeat.pauses import Pause, Pauses, parse_pauses
from celery_leaderbeat.tick import slot_to_us

T0 = datetime(2026, 10, 2, 3, tzinfo=timezone.utc)
SECOND = timedelta(seconds=1)
MICROSECOND = timedelta(microseconds=1)


def test_a_pause_holds_from_its_begin_up_to_its_end() -> None:
    pause = Pause(T0, T0 + SECOND)
    assert [pause.covers(T0 + n * MICROSECOND) for n in (-1, 0, 999_999, 1_000_000)] == [
        False,
        True,
        True,
        False,
    ]


def test_a_pause_without_an_end_lasts() -> None:
    assert Pause(T0).covers(T0 + timedelta(days=10_000))
    assert not Pause(T0).covers(T0 - MICROSECOND)


def test_a_pause_that_ends_before_it_begins_pauses_nothing() -> None:
    pause = Pause(T0, T0 - SECOND)
    assert not any(pause.covers(T0 + n * SECOND) for n in range(-2, 3))
    assert Pauses([pause]).touching(T0 - SECOND, T0 + SECOND) == []


def test_the_note_is_part_of_the_reason() -> None:
    assert Pause(T0, note="moving house").reason == "paused: moving house"
    assert Pause(T0).reason == "paused"


def test_an_entry_is_paused_by_its_own_pauses_and_by_those_for_all() -> None:
    own, for_all = Pause(T0, T0 + SECOND, "own"), Pause(T0 + 2 * SECOND, T0 + 9 * SECOND, "all")
    pauses = Pauses([own], [for_all])
    assert pauses.in_force(T0) == own
    assert pauses.in_force(T0 + SECOND) is None
    assert pauses.in_force(T0 + 3 * SECOND) == for_all
    assert list(pauses) == [own, for_all]
    assert list(Pauses(Pauses([for_all]), Pauses([own]))) == [own, for_all]


def test_a_pause_without_an_end_is_in_force_also_where_a_clock_was_set_back_before_its_begin() -> None:
    pause = Pause(T0, None)
    pauses = Pauses([pause])
    assert pauses.in_force(T0 - SECOND) == pauses.in_force(T0 + SECOND) == pause
    assert pauses.covers(T0 - SECOND) is None


def test_of_several_pauses_the_one_that_began_first_counts() -> None:
    early, late = Pause(T0, None, "early"), Pause(T0 + SECOND, None, "late")
    for pauses in (Pauses([late], [early]), Pauses([early], [late])):
        assert pauses.covers(T0 + 2 * SECOND) == early


def test_no_pauses_are_false() -> None:
    assert not Pauses()
    assert not Pauses.parse(None)
    assert not Pauses.parse("[]", "")
    assert Pauses([Pause(T0)])
    assert Pauses().covers(T0) is None


def test_pauses_are_read_from_two_fields() -> None:
    us = slot_to_us(T0)
    own = json.dumps([{"since": us, "until": str(us + 5), "note": "n", "by": "ann@host"}])
    for_all = json.dumps([{"since": str(us + 1)}, {"since": us - 1, "until": None, "note": None}])
    assert list(Pauses.parse(own, for_all)) == [
        Pause(T0 - MICROSECOND),
        Pause(T0, T0 + 5 * MICROSECOND, "n", "ann@host"),
        Pause(T0 + MICROSECOND),
    ]


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "{}",
        "7",
        '"x"',
        "[7]",
        "[[]]",
        "[null]",
        "[{}]",
        '[{"since": null}]',
        '[{"since": true}]',
        '[{"since": 1.5e15}]',
        '[{"since": "soon"}]',
        '[{"since": "1.5e15"}]',
        '[{"since": 1, "until": "never"}]',
        '[{"since": 1, "until": ""}]',
        '[{"since": 1, "note": 7}]',
        '[{"since": 1, "by": ["ann"]}]',
        '[{"since": 1e400}]',
        '[{"since": 99999999999999999999999}]',
    ],
)
def test_what_is_no_list_of_pauses_is_a_value_error(text: str) -> None:
    with pytest.raises(ValueError, match=r"\S"):
        parse_pauses(text)


def test_a_bad_pause_is_quoted() -> None:
    with pytest.raises(ValueError, match=r"'since': 'soon'.*microseconds"):
        parse_pauses('[{"since": "soon"}]')


instants = st.integers(-50, 50).map(lambda n: T0 + n * MICROSECOND)
spans: Any = st.builds(Pause, instants, st.none() | instants)


@settings(max_examples=1_000, deadline=None)
@given(st.lists(spans, max_size=4), st.lists(spans, max_size=3), instants, st.integers(0, 25))
def test_what_touches_a_span_is_what_covers_some_instant_of_it(
    own: list[Pause], for_all: list[Pause], first: datetime, length: int
) -> None:
    pauses = Pauses(own, for_all)
    span = [first + n * MICROSECOND for n in range(length + 1)]
    found = pauses.touching(span[0], span[-1])
    assert found == [pause for pause in pauses if any(pause.covers(instant) for instant in span)]
    for instant in span:
        assert (pauses.covers(instant) is not None) == any(pause.covers(instant) for pause in found)
