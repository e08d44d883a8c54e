"""A message that has left isn't sent again when Redis forgets that it was."""

from __future__ import annotations

from datetime import datetime, timezone
from typing import Any

import pytest

from celery_leaderbeat.message import Message, Outcome
from celery_leaderbeat.records import SlotRecord
from celery_leaderbeat.sent_before import SentBefore
from celery_leaderbeat.tick import Stamp, tick_key

SLOT = datetime(2026, 10, 2, 3, tzinfo=timezone.utc)


def message(entry: str = "job", attempt: int = 1, epoch: int = 7, **fields: Any) -> Message:
    stamp = Stamp(key=tick_key(entry, SLOT), entry=entry, slot=SLOT, epoch=epoch, attempt=attempt)
    values = {
        "task": "t",
        "task_id": "id",
        "prefer": "missed",
        "args": (),
        "kwargs": {},
        "options": {},
        **fields,
    }
    return Message(entry=entry, slot=SLOT, stamp=stamp, **values)


@pytest.mark.parametrize("kind", ["sent", "unknown"])
def test_what_may_have_left_is_settled_by_what_is_known_of_it(kind: Any) -> None:
    known = SentBefore()
    known.note(message(), Outcome(kind, "why"))
    again = message()
    assert known.settles(again)
    assert again.outcome == Outcome(kind, "why")
    assert again.handling.taken
    assert not known.settles(message(attempt=2)), "the next attempt is another message"
    assert not known.settles(message("other"))


@pytest.mark.parametrize("kind", ["unreachable", "unsent", "impossible"])
def test_what_has_not_left_is_sent_again(kind: Any) -> None:
    known = SentBefore()
    known.note(message(), Outcome(kind))
    assert not known.settles(message())


def test_a_duplicate_that_is_preferred_is_sent_again_and_so_is_what_was_asked_for() -> None:
    known = SentBefore()
    known.note(message(prefer="duplicate"), Outcome("unknown"))
    assert not known.settles(message(prefer="duplicate"))
    known.note(message(), Outcome("sent"))
    assert not known.settles(message(request="id"))


def test_under_a_newer_epoch_what_prefers_a_duplicate_is_sent_again_and_the_other_is_in_doubt() -> None:
    """Another leader may have claimed the slot in between, so that workers have refused the older message."""
    known = SentBefore()
    known.note(message(), Outcome("sent"))
    assert not known.settles(message(epoch=8, prefer="duplicate"))
    again = message(epoch=8)
    assert known.settles(again)
    assert again.outcome == Outcome("unknown", "it was sent under epoch 7, and Redis has lost that since")


def test_a_message_that_another_handles_is_left_to_it() -> None:
    known = SentBefore()
    known.note(message(), Outcome("sent"))
    handled = message()
    handled.handling.take()
    assert not known.settles(handled)


def test_the_latest_messages_are_remembered() -> None:
    known = SentBefore(most=2)
    for entry in ("one", "two", "three"):
        known.note(message(entry), Outcome("sent"))
    assert [known.settles(message(entry)) for entry in ("one", "two", "three")] == [False, True, True]


def test_of_a_claim_its_own_attempt_under_its_own_epoch_is_known_and_no_other() -> None:
    known = SentBefore()
    known.note(message(), Outcome("sent"))
    known.note(message("other"), Outcome("unknown"))

    def end(entry: str, attempt: int, epoch: int) -> str:
        fields = {"state": "claimed", "entry": entry, "attempt": str(attempt), "epoch": str(epoch)}
        return known.known_end(SlotRecord.read(tick_key(entry, SLOT), fields))

    assert end("job", 1, 7) == "sent"
    assert end("other", 1, 7) == "unconfirmed"
    assert not end("job", 2, 7)
    assert not end("job", 1, 8)
    assert not end("third", 1, 7)
