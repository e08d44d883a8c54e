"""How two schedules differ, in few words however many entries there are."""

from __future__ import annotations

from celery_leaderbeat.schedule_diff import ScheduleDiff, schedule_fingerprint


def test_entries_that_were_added_removed_and_changed_are_told_apart() -> None:
    found = ScheduleDiff.between({"a": "1", "b": "1", "c": "1"}, {"b": "1", "c": "2", "d": "1"})
    assert found == ScheduleDiff(added=("d",), removed=("a",), changed=("c",))
    assert str(found) == (
        "it has 'd', which this one has not; it has not 'a'; it has another schedule for 'c'"
    )


def test_what_this_replica_has_and_refused_isnt_called_absent() -> None:
    found = ScheduleDiff.between({"a": "1"}, {"a": "1", "b": "1", "c": "1"}, {"b", "other"})
    assert (found.added, found.refused) == (("c",), ("b",))
    assert str(found) == (
        "it has 'c', which this one has not; it has 'b', which this one has refused (see its ERROR above)"
    )


def test_the_same_schedules_have_no_difference_and_one_fingerprint() -> None:
    one, other = {"a": "1", "b": "2"}, {"b": "2", "a": "1"}
    assert str(ScheduleDiff.between(one, other)) == "no difference"
    assert schedule_fingerprint(one) == schedule_fingerprint(other)
    assert schedule_fingerprint(one) != schedule_fingerprint({"a": "2", "b": "1"})


def test_thousands_of_entries_with_long_names_are_cut_short() -> None:
    own = {f"{'x' * 300} {n}": "1" for n in range(5_000)}
    text = str(ScheduleDiff.between(own, dict.fromkeys(own, "2")))
    assert len(text) < 1_000
    assert text.endswith(" and 4,990 more")
