"""retreat: a leader leaves the lead only to one that could do better."""

from __future__ import annotations

from tests.protocol.ground import Ground


def _announce(ground: Ground, *holders: str) -> None:
    for holder in holders:
        ground.announce(holder)


def test_nobody_retreats_alone(ground: Ground) -> None:
    assert ground.retreat("one", 15) == 0
    _announce(ground, "one")
    assert ground.retreat("one", 15) == 0
    assert not ground.client.exists(ground.keys.retreats)


def test_nobody_retreats_before_one_that_has_not_been_seen_just_now(ground: Ground) -> None:
    _announce(ground, "one", "two")
    ground.unseen("two", 6.5)
    assert ground.retreat("one", 15) == 0
    assert "two" in ground.announce("one"), "it still counts as alive"
    _announce(ground, "two")
    assert ground.retreat("one", 15) == 1


def test_the_last_one_goes_on_until_the_retreat_of_another_is_over(ground: Ground) -> None:
    _announce(ground, "one", "two", "three")
    assert ground.retreat("one", 15) == 1
    assert ground.retreat("two", 15) == 1
    assert ground.retreat("three", 15) == 0
    ground.client.zincrby(ground.keys.retreats, -15_001, "two")
    assert ground.retreat("three", 15) == 1
    assert ground.retreat("two", 30) == 0
    assert sorted(ground.client.zrange(ground.keys.retreats, 0, -1)) == ["one", "three"]


def test_the_set_lives_as_long_as_its_longest_retreat(ground: Ground) -> None:
    _announce(ground, "one", "two", "three")
    assert ground.retreat("one", 300) == 1
    assert ground.retreat("two", 15) == 1
    assert 290_000 < ground.client.pttl(ground.keys.retreats) <= 300_000
