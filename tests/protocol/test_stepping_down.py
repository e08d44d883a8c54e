"""A leader that is to leave the lead leaves it, although Redis doesn't answer at once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest

from celery_leaderbeat.errors import StoreUnavailable
from celery_leaderbeat.keys import Keys
from celery_leaderbeat.store import Store
from tests.protocol.replica import Fleet
from tests.support.servers import RedisServer
from tests.support.waits import wait_for


@pytest.fixture
def unanswered(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How many of the next requests of each script never reach Redis."""
    left: Counter[str] = Counter()
    run = Store.run

    def lossy(self: Store, script: str, keys: Sequence[str], args: Sequence[str | int | float] = ()) -> Any:
        if left[script] > 0:
            left[script] -= 1
            raise StoreUnavailable(f"Redis gave no answer to the script {script}")
        return run(self, script, keys, args)

    monkeypatch.setattr(Store, "run", lossy)
    return left


def test_a_step_down_whose_release_gets_no_answer_is_not_undone(
    start: Fleet, unanswered: Counter[str]
) -> None:
    one = start("one")
    term = wait_for(one.elector.term, what="one leads")
    two = start("two")
    wait_for(lambda: "two" in one.elector._members.others, what="one knows two")
    unanswered["release"] = 2
    one.elector.step_down(term, "the test wants it")
    assert wait_for(two.elector.term, what="two leads").epoch > term.epoch
    assert one.began == [term]


def test_a_step_down_is_told_as_a_hand_over_and_not_as_a_loss(
    start: Fleet, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    one = start("one")
    term = wait_for(one.elector.term, what="one leads")
    start("two")
    wait_for(lambda: "two" in one.elector._members.others, what="one knows two")
    one.elector.step_down(term, "the test wants it")
    wait_for(lambda: one.ended == [term], what="one no longer leads")
    assert [record.levelname for record in caplog.records if "the test wants it" in record.message] == [
        "INFO"
    ]
    assert "Handed over: released the lease" in caplog.text
    assert "No longer the leader" not in caplog.text


def test_a_step_down_that_gets_no_answer_is_tried_again(start: Fleet, unanswered: Counter[str]) -> None:
    one = start("one")
    term = wait_for(one.elector.term, what="one leads")
    two = start("two")
    wait_for(lambda: "two" in one.elector._members.others, what="one knows two")
    unanswered["retreat"] = 2
    one.elector.step_down(term, "the test wants it")
    assert wait_for(two.elector.term, what="two leads").epoch > term.epoch
    assert one.began == [term]


def test_a_hand_over_whose_release_gets_no_answer_is_not_undone(
    start: Fleet, unanswered: Counter[str]
) -> None:
    one = start("one")
    term = wait_for(one.elector.term, what="one leads")
    unanswered["release"] = 2
    two = start("two", "2")
    assert wait_for(two.elector.term, what="two leads").epoch > term.epoch
    assert one.began == [term]


@pytest.mark.parametrize("newer", [False, True], ids=["steps down", "hands over"])
def test_who_finds_all_data_lost_as_it_releases_the_lease_leads_once_more_to_put_them_back(
    start: Fleet,
    keys: Keys,
    one_server: RedisServer,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    newer: bool,
) -> None:
    run, lost = Store.run, list[str]()

    def lossy(self: Store, script: str, keys: Sequence[str], args: Sequence[str | int | float] = ()) -> Any:
        if script == "release" and not lost:
            lost.append(script)
            one_server.client().flushdb()
        return run(self, script, keys, args)

    one = start("one")
    term = wait_for(one.elector.term, what="one leads")
    monkeypatch.setattr(Store, "run", lossy)
    two = start("two", "2" if newer else "1")
    if not newer:
        wait_for(lambda: "two" in one.elector._members.others, what="one knows two")
        one.elector.step_down(term, "the test wants it")
    wait_for(lambda: len(one.began) == 2, 10, "one leads again")
    assert one.began[1].epoch > term.epoch
    assert f"No longer the leader under epoch {term.epoch}: the lease is gone" in caplog.text
    if newer:
        # It is handed over in the end.
        wait_for(two.elector.term, 10, "two leads")
    else:
        assert two.began == []
