"""announce, and elect among releases: the lease goes to the newest release of which a replica lives and stands."""

from __future__ import annotations

import pytest

from celery_leaderbeat.term import Term
from tests.protocol.ground import Ground


def _newer(ground: Ground, holder: str, release: str = "", **options: object) -> tuple[str, str]:
    answer = ground.announce(holder, release, **options)  # type: ignore[arg-type]
    return answer[0], answer[1]


def test_who_announces_itself_is_seen_by_the_others_until_it_has_been_silent_for_long(ground: Ground) -> None:
    assert ground.announce("one") == ["", "", "one"]
    assert sorted(ground.announce("two", "7")[2:]) == ["one", "two"]
    ground.unseen("two", 14.0)
    assert sorted(ground.announce("one")[2:]) == ["one", "two"]
    ground.unseen("two", 2.0)
    assert ground.announce("one") == ["", "", "one"]
    assert ground.client.hgetall(ground.keys.releases) == {}


def test_a_candidate_of_the_newest_release_is_shown_to_older_ones_alone(ground: Ground) -> None:
    ground.announce("none")
    ground.announce("nine", "1.9")
    ground.announce("ten", "1.10")
    assert _newer(ground, "none") == ("ten", "1.10")
    assert _newer(ground, "nine", "1.9") == ("ten", "1.10")
    assert _newer(ground, "ten", "1.10") == ("", "")
    assert _newer(ground, "equal", "1.10.0") == ("", "")
    assert _newer(ground, "newest", "2") == ("", "")


@pytest.mark.parametrize("own", ["", "1"])
def test_who_does_not_stand_or_has_been_silent_is_no_candidate(ground: Ground, own: str) -> None:
    ground.announce("two", "2", stands=False)
    assert _newer(ground, "one", own) == ("", "")
    ground.announce("two", "2")
    assert _newer(ground, "one", own) == ("two", "2")
    ground.unseen("two", 3.1)
    assert _newer(ground, "one", own) == ("", "")


def test_a_number_and_a_time_do_not_yield_to_each_other(ground: Ground) -> None:
    ground.announce("time", "2026-11-30")
    assert _newer(ground, "number", "5") == ("", "")
    assert _newer(ground, "time", "2026-11-30") == ("", "")
    assert ground.stand("number", release="5")[0] == "elected"


def test_who_begins_to_stand_wakes_the_others_once(ground: Ground) -> None:
    with ground.client.pubsub(ignore_subscribe_messages=True) as heard:
        heard.subscribe(ground.keys.wake)
        heard.get_message(timeout=5)

        def wakes() -> int:
            count = 0
            while heard.get_message(timeout=0.05) is not None:
                count += 1
            return count

        ground.announce("two", "2", stands=False)
        assert wakes() == 0
        ground.announce("two", "2")
        ground.announce("two", "2")
        assert wakes() == 1
        ground.announce("none")
        assert wakes() == 0


def test_another_applications_replica_is_neither_noted_nor_a_candidate(ground: Ground) -> None:
    term = ground.elect("one", app="proj")
    before = ground.everything()
    assert ground.announce("two", "99", app="other") == ["foreign"]
    assert ground.everything() == before
    assert ground.client.get(ground.keys.lease) == term.value


def test_a_free_lease_is_left_to_a_newer_release_while_it_lives_and_stands(ground: Ground) -> None:
    ground.announce("new", "2")
    before = ground.everything()
    for release in ("", "1", "1.99"):
        assert ground.stand("old", release=release) == ["left", "new", "2"]
    assert ground.everything() == before
    assert ground.stand("other", release="2.0")[0] == "elected"
    ground.lapse()
    assert ground.stand("newest", release="3")[0] == "elected"
    ground.lapse()
    ground.announce("new", "2", stands=False)
    assert ground.stand("old", release="1")[0] == "elected"
    ground.lapse()
    ground.announce("new", "2")
    ground.unseen("new", 3.1)
    assert ground.stand("old", release="1")[0] == "elected"


def test_a_lease_whose_holder_is_gone_is_left_to_a_newer_release_too(ground: Ground) -> None:
    gone = ground.elect("gone", release="2")
    ground.announce("new", "2")
    assert ground.stand("old", release="1", takes_over=gone.value) == ["left", "new", "2"]
    assert ground.client.get(ground.keys.lease) == gone.value
    assert ground.stand("new", release="2", takes_over=gone.value)[0] == "elected"


def test_who_insists_is_elected_although_a_newer_release_stands(ground: Ground) -> None:
    ground.announce("new", "2")
    assert ground.stand("old", release="1", insists=True)[0] == "elected"


def test_a_lease_tells_its_release_and_so_does_the_event(ground: Ground) -> None:
    term = Term.read(ground.stand("new", release="1.10")[1])
    assert term.release == "1.10"
    assert ground.events("elected")[-1]["release"] == "1.10"
    ground.lapse()
    assert Term.read(ground.stand("none")[1]).release == ""
    assert "release" not in ground.events("elected")[-1]


@pytest.mark.parametrize("noted", ["", "x", "[]", "5", '{"stands": true}', '{"stands": true, "rank": 5}'])
def test_a_release_that_cannot_be_read_is_no_candidate(ground: Ground, noted: str) -> None:
    ground.announce("new", "2")
    ground.client.hset(ground.keys.releases, "new", noted)
    assert ground.stand("old", release="1")[0] == "elected"
