"""The events: what each script that decides leaves in the capped stream, and that nothing else does."""

from __future__ import annotations

import pytest

from celery_leaderbeat.records import ALL
from celery_leaderbeat.tick import slot_to_us
from tests.protocol.ground import ENTRY, Ground, slot


def _us(number: int) -> str:
    return str(slot_to_us(slot(number)))


def _last(ground: Ground, name: str, **fields: object) -> None:
    """The latest event."""
    event = ground.events()[-1]
    assert event == {"event": name, **{key: str(value) for key, value in fields.items()}}


# Elections


def test_the_first_election_finds_a_free_lease(ground: Ground) -> None:
    term = ground.elect("one")
    _last(ground, "elected", epoch=term.epoch, holder="one", why="free")


def test_an_election_says_that_the_lease_had_expired(ground: Ground) -> None:
    ground.elect()
    term = ground.next_term("two")
    _last(ground, "elected", epoch=term.epoch, holder="two", why="expired")


def test_an_election_says_that_the_leader_had_released_the_lease(ground: Ground) -> None:
    old = ground.elect()
    ground.release(old)
    _last(ground, "released", epoch=old.epoch, reason="stops")
    term = ground.elect("two")
    _last(ground, "elected", epoch=term.epoch, holder="two", why="released")


def test_an_election_says_that_the_lease_was_released_for_a_newer_release(ground: Ground) -> None:
    ground.release(ground.elect(), newer=True)
    term = ground.elect("two")
    _last(ground, "elected", epoch=term.epoch, holder="two", why="released for a newer release")
    ground.release(term)
    term = ground.elect("three")
    _last(ground, "elected", epoch=term.epoch, holder="three", why="released")


def test_a_release_of_an_earlier_term_is_no_reason_for_a_later_election(ground: Ground) -> None:
    ground.release(ground.elect())
    ground.elect("two")
    assert ground.next_term("three").epoch
    assert [event["why"] for event in ground.events("elected")] == ["free", "released", "expired"]


def test_an_election_says_that_the_leader_was_deposed(ground: Ground) -> None:
    gone = ground.elect()
    term = ground.elect("two", takes_over=gone.value)
    _last(ground, "elected", epoch=term.epoch, holder="two", why="deposed")


def test_a_takeover_of_a_lease_that_has_lapsed_meanwhile_found_it_expired(ground: Ground) -> None:
    gone = ground.elect()
    ground.lapse()
    ground.elect("two", takes_over=gone.value)
    assert ground.events()[-1]["why"] == "expired"


def test_a_candidate_that_is_not_elected_and_a_release_that_comes_late_tell_nothing(ground: Ground) -> None:
    old = ground.elect()
    ground.stand("two")
    ground.stand("two", app="other")
    ground.next_term()
    ground.release(old)
    ground.renew(old)
    assert ground.told() == ["elected", "elected"]


# The leader


def test_definitions_tell_what_changed(ground: Ground) -> None:
    term = ground.elect()
    for now, entries in ((1, {ENTRY: "f"}), (2, {ENTRY: "f"}), (3, {ENTRY: "g"}), (4, {}), (5, {})):
        ground.ledger.register(term, entries, slot(now))
    ground.ledger.register(term, {}, slot(5 + 8 * 1440))
    ground.ledger.register(term, {ENTRY: "g"}, slot(20_000))
    ground.ledger.register(term, {ENTRY: "g"}, slot(6))
    told = [(event["entry"], event["kind"], event["schedule"]) for event in ground.events("defined")]
    assert told == [
        (ENTRY, "new", "f"),
        (ENTRY, "changed", "g"),
        (ENTRY, "removed", ""),
        (ENTRY, "forgotten", ""),
        (ENTRY, "new", "g"),
        (ENTRY, "reset", "g"),
    ]


def test_a_claim_and_its_message_are_told_once(ground: Ground) -> None:
    term = ground.elect()
    for _ in range(2):
        ground.ask(term, 1, attempt=2)
    fields = {"entry": ENTRY, "key": ground.key(1), "epoch": term.epoch, "attempt": 2}
    _last(ground, "claimed", **fields, request="")
    for _ in range(2):
        ground.confirm(term.epoch, 1)
    _last(ground, "sent", **fields)
    assert ground.told() == ["elected", "claimed", "sent"]


def test_a_claim_of_what_was_asked_for_names_the_request(ground: Ground) -> None:
    ground.claim(ground.elect(), 1, request="q")
    assert ground.events()[-1]["request"] == "q"


def test_a_slot_that_is_given_back_is_told_with_the_reason(ground: Ground) -> None:
    term = ground.elect()
    ground.claim(term, 1)
    for _ in range(2):
        ground.give_back(term.epoch, 1, "no connection")
    _last(
        ground,
        "returned",
        entry=ENTRY,
        key=ground.key(1),
        epoch=term.epoch,
        attempt=1,
        reason="no connection",
    )
    assert ground.told() == ["elected", "claimed", "returned"]


def test_a_slot_that_waits_is_told_once(ground: Ground) -> None:
    term = ground.elect()
    ground.claim(term, 1, overlap="queue")
    for batch in ("a", "b"):
        assert ground.ask(term, 2, batch=batch, overlap="queue") == ["waiting"]
    (event,) = ground.events("returned")
    assert (event["key"], event["reason"]) == (ground.key(2), "it waits for an earlier slot of its entry")


def test_a_slot_that_overlaps_is_told_as_skipped(ground: Ground) -> None:
    term = ground.elect()
    ground.claim(term, 1, overlap="skip")
    for batch in ("a", "b"):
        ground.ask(term, 2, batch=batch, overlap="skip")
    (event,) = ground.events("skipped")
    assert event == {
        "event": "skipped",
        "entry": ENTRY,
        "epoch": str(term.epoch),
        "from": _us(2),
        "to": _us(2),
        "count": "1",
        "reason": f"overlap: {ground.key(1)} is unfinished",
    }


@pytest.mark.parametrize("answer", ["held", "decided", "paused", "sent"])
def test_what_is_not_claimed_is_told_by_nobody(ground: Ground, answer: str) -> None:
    term = ground.elect()
    ground.claim(term, 1, 3)
    ground.confirm(term.epoch, 3)
    if answer == "paused":
        ground.orders.pause(ENTRY)
    before = ground.told()
    number = {"held": 1, "decided": 2, "paused": 4, "sent": 3}[answer]
    assert ground.ask(term, number, batch="next") == [answer]
    assert ground.told() == before


@pytest.mark.parametrize("state", ["missed", "skipped"])
def test_slots_that_are_written_off_are_told_as_a_range(ground: Ground, state: str) -> None:
    term = ground.elect()
    for _ in range(2):
        ground.miss(term, 5, 4, reason="because", state=state)
    _last(
        ground,
        state,
        entry=ENTRY,
        epoch=term.epoch,
        **{"from": _us(2), "to": _us(5)},
        count=4,
        reason="because",
    )
    assert ground.told() == ["elected", state]


def test_a_slot_of_which_nobody_knows_whether_it_was_sent_is_told_as_missed(ground: Ground) -> None:
    term = ground.elect()
    ground.claim(term, 1, 2)
    for _ in range(2):
        ground.confirm(term.epoch, 1, "unconfirmed")
    later = ground.next_term()
    for _ in range(2):
        ground.doubt(later, 2)
    told = [
        (event["entry"], event["epoch"], event["from"], event["to"], event["count"], event["reason"])
        for event in ground.events("missed")
    ]
    epoch = str(term.epoch)
    assert told == [
        (ENTRY, epoch, _us(1), _us(1), "1", "unconfirmed: the outcome of the publish is unknown"),
        (
            ENTRY,
            epoch,
            _us(2),
            _us(2),
            "1",
            "unconfirmed: its leader was gone before it confirmed the slot",
        ),
    ]


# Workers


@pytest.mark.parametrize("end", ["done", "failed", "retrying", "requeued"])
def test_a_run_is_told_with_its_begin_and_its_end(ground: Ground, end: str) -> None:
    term = ground.elect()
    ground.claim(term, 1)
    ground.start(1, term.epoch, "r1")
    fields = {"entry": ENTRY, "key": ground.key(1), "epoch": term.epoch, "attempt": 1}
    _last(ground, "started", **fields, worker="host:1")
    ground.finish(1, "r1", end, "because")
    _last(ground, end, **fields, reason="because")
    ground.finish(1, "r1", end, "because")
    ground.finish(1, "r2", end)
    assert ground.told()[2:] == ["started", end]


def test_a_refusal_is_told_with_its_reason_and_a_put_off_is_not(ground: Ground) -> None:
    term = ground.elect()
    ground.claim(term, 1)
    ground.start(1, term.epoch, "r1")
    ground.begin(1, term.epoch, "r2", redelivered=True)
    assert ground.told()[-1] == "started"
    ground.begin(1, term.epoch, "r2")
    _last(
        ground,
        "refused",
        entry=ENTRY,
        key=ground.key(1),
        epoch=term.epoch,
        attempt=1,
        reason="the slot is running elsewhere",
    )


def test_a_renewed_run_lease_is_told_by_nobody(ground: Ground) -> None:
    term = ground.elect()
    ground.claim(term, 1)
    ground.start(1, term.epoch)
    before = ground.told()
    ground.renew_run(1)
    ground.crash(term, 1)
    assert ground.told() == before


@pytest.mark.parametrize(
    ("on_crash", "attempts", "then"),
    [("auto", 1, []), ("skip", 1, ["abandoned"]), ("rerun", 2, ["rerun"]), ("rerun", 1, ["abandoned"])],
)
def test_a_death_is_told_once_with_what_follows(
    ground: Ground, on_crash: str, attempts: int, then: list[str]
) -> None:
    term = ground.elect()
    ground.claim(term, 1, on_crash=on_crash, max_attempts=attempts)
    ground.start(1, term.epoch)
    ground.let_run_lease_end(1)
    before = len(ground.told())
    for _ in range(2):
        ground.crash(term, 1)
    died, *rest = ground.events()[before:]
    assert died == {
        "event": "died",
        "entry": ENTRY,
        "key": ground.key(1),
        "epoch": str(term.epoch),
        "attempt": "1",
        "reason": "its run on host:1 died",
    }
    assert [event["event"] for event in rest] == then
    if then == ["rerun"]:
        assert rest[0]["attempt"] == "2"
    elif then:
        assert rest[0]["reason"] == ground.record(1).reason


# People


@pytest.mark.parametrize("entry", [ENTRY, ALL])
def test_pause_and_resume_are_told_with_who_and_why(ground: Ground, entry: str) -> None:
    ground.orders.pause(entry, slot(5_000_000), "why")
    _last(ground, "paused", entry=entry, until=_us(5_000_000), by="ann", reason="why")
    ground.orders.resume(entry)
    ground.orders.resume(entry)
    _last(ground, "resumed", entry=entry, by="ann")
    assert ground.told() == ["paused", "resumed"]


def test_a_resume_that_catches_up_is_told_as_a_request_too(ground: Ground) -> None:
    ground.orders.pause(ENTRY)
    ground.orders.resume(ENTRY, catch_up=True)
    _last(ground, "requested", entry=ENTRY, kind="catch_up", by="ann")


def test_requests_are_told(ground: Ground) -> None:
    ground.orders.run_now(ENTRY)
    _last(ground, "requested", entry=ENTRY, kind="run", **{"from": "", "to": ""}, by="ann")
    ground.orders.backfill(ENTRY, slot(1), slot(2))
    _last(ground, "requested", entry=ENTRY, kind="backfill", **{"from": _us(1), "to": _us(2)}, by="ann")


# The stream


def _a_life(ground: Ground, first: int = 1, slots: int = 1) -> None:
    """Slots that come to their ends."""
    term = ground.elect(takes_over=ground.client.get(ground.keys.lease) or "")
    for number in range(first, first + slots):
        ground.claim(term, number, batch=f"batch {number}")
        ground.confirm(term.epoch, number)
        ground.start(number, term.epoch)
        ground.finish(number)


def test_no_events_are_kept_where_none_are_wanted(ground: Ground) -> None:
    quiet = Ground(ground.url, ground.client, events=0)
    _a_life(quiet)
    quiet.orders.pause(ENTRY)
    quiet.orders.resume(ENTRY, catch_up=True)
    quiet.orders.run_now(ENTRY)
    quiet.close()
    assert not ground.client.exists(ground.keys.events)
    assert ground.state(1) == "done"


def test_about_as_many_events_are_kept_as_are_wanted(ground: Ground) -> None:
    """The server drops whole nodes of its stream, of a hundred events each by default."""
    few = Ground(ground.url, ground.client, events=200)
    _a_life(few, slots=200)
    few.close()
    assert 200 <= ground.client.xlen(ground.keys.events) < 400
    assert ground.events()[-1]["event"] == "done"


def test_events_are_read_in_pages_oldest_first(ground: Ground) -> None:
    _a_life(ground, slots=3)
    pages, after = [], ""
    while page := ground.ledger.events(after, 4):
        pages.append([fields["event"] for _, fields in page])
        after = page[-1][0]
    assert [len(page) for page in pages] == [4, 4, 4, 1]
    assert [name for page in pages for name in page] == ground.told()


def test_the_id_of_an_event_is_its_time(ground: Ground) -> None:
    ground.elect()
    ((event, _),) = ground.ledger.events()
    assert abs(int(event.partition("-")[0]) - ground.now_ms()) < 5_000


def test_what_is_in_the_way_of_events_is_not_in_the_way_of_decisions(ground: Ground) -> None:
    ground.client.set(ground.keys.events, "not a stream")
    term = ground.elect()
    ground.claim(term, 1)
    assert ground.confirm(term.epoch, 1) == "sent"
    ground.start(1, term.epoch)
    assert ground.finish(1)
    assert (ground.state(1), ground.last_decided()) == ("done", 1)
