"""The checker finds each kind of violation in a story that was made up for it, and none in a sound one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from datetime import datetime, timezone
from typing import Any

import pytest

from celery_leaderbeat.recall import LOST
from celery_leaderbeat.tick import tick_key
from tests.chaos.checker import check
from tests.chaos.fleet import Exit, Life
from tests.chaos.history import End, Loss, Term
from tests.chaos.nemesis import Struck
from tests.chaos.plan import Fault
from tests.chaos.schedule import Entry
from tests.chaos.story import BEGAN, DUPLICATE, ENTRIES, EPOCH, LATE, MISSED, RERUN, SLOTS, Story, key
from tests.chaos.tap import Arrival


def test_a_sound_run_has_no_violation_and_every_slot_is_counted() -> None:
    verdict = Story().verdict()
    assert verdict.findings == []
    assert verdict.slots == len(ENTRIES) * len(SLOTS)
    assert verdict.ends == {"done": verdict.slots}
    assert verdict.sound


# Each violation. What happens to one slot, and what the checker must call it.


def no_trace(story: Story) -> tuple[str, Entry]:
    story.forget(DUPLICATE)
    return "lost", DUPLICATE


def no_trace_of_one_that_prefers_missed(story: Story) -> tuple[str, Entry]:
    story.forget(MISSED)
    return "unexplained", MISSED


def unconfirmed_though_it_prefers_a_duplicate(story: Story) -> tuple[str, Entry]:
    story.forget(DUPLICATE)
    story.said(DUPLICATE, "missed", "unconfirmed: its leader was gone")
    return "lost", DUPLICATE


def a_lookback_that_was_not_exceeded(story: Story) -> tuple[str, Entry]:
    story.forget(DUPLICATE)
    story.said(DUPLICATE, "missed", "older than lookback reaches")
    return "lost", DUPLICATE


def a_catch_up_that_is_not_none(story: Story) -> tuple[str, Entry]:
    story.forget(MISSED)
    story.said(MISSED, "missed", "catch_up is none")
    return "unexplained", MISSED


def a_deadline_that_it_does_not_have(story: Story) -> tuple[str, Entry]:
    story.forget(MISSED)
    story.said(MISSED, "missed", "older than the deadline of 3 s")
    return "unexplained", MISSED


def an_overlap_that_is_allowed(story: Story) -> tuple[str, Entry]:
    story.forget(MISSED)
    story.said(MISSED, "skipped", "overlap: m@… is unfinished")
    return "unexplained", MISSED


def a_lost_record_while_redis_kept_its_data(story: Story) -> tuple[str, Entry]:
    story.forget(MISSED)
    story.said(MISSED, "missed", "Redis has lost its record, and with it whether it was sent")
    return "unexplained", MISSED


def two_copies(story: Story) -> tuple[str, Entry]:
    story.sent(MISSED, after=4.0)
    return "second send", MISSED


def two_attempts_without_a_rerun(story: Story) -> tuple[str, Entry]:
    story.sent(MISSED, after=4.0, attempt=2)
    return "second send", MISSED


def a_body_that_began_twice(story: Story) -> tuple[str, Entry]:
    story.ran(DUPLICATE, after=5.0, worker="worker1", written=False)
    return "doubled", DUPLICATE


def a_redelivery_though_nothing_happened_to_its_worker(story: Story) -> tuple[str, Entry]:
    story.fault("kill", "worker1")
    story.ran(LATE, after=5.0, worker="worker1", written=False)
    return "doubled", LATE


def an_effect_that_counted_twice(story: Story) -> tuple[str, Entry]:
    story.fault("kill", "worker0")
    story.ran(DUPLICATE, after=5.0, worker="worker1", epoch=EPOCH + 3)
    return "doubled", DUPLICATE


def an_effect_that_was_rerun_though_nothing_happened_to_its_worker(story: Story) -> tuple[str, Entry]:
    story.sent(RERUN, after=4.9, attempt=2)
    story.ran(RERUN, after=5.0, worker="worker1", attempt=2)
    return "doubled", RERUN


def an_older_epoch_after_a_newer_one(story: Story) -> tuple[str, Entry]:
    story.ran(MISSED, after=5.0, epoch=EPOCH - 9, worker="worker1", written=False)
    return "stale", MISSED


def an_older_attempt_after_a_newer_one(story: Story) -> tuple[str, Entry]:
    story.forget_run(RERUN)
    story.fault("kill", "worker0")
    story.sent(RERUN, after=4.0, attempt=2)
    story.ran(RERUN, after=4.1, attempt=2)
    story.ran(RERUN, after=5.0, attempt=1, worker="worker1", written=False)
    return "stale", RERUN


def a_message_before_its_slot(story: Story) -> tuple[str, Entry]:
    story.forget(MISSED)
    story.sent(MISSED, after=-0.2)
    story.ran(MISSED)
    return "early", MISSED


def a_message_that_came_to_nothing(story: Story) -> tuple[str, Entry]:
    story.forget_run(LATE)
    story.fault("kill", "worker0")
    return "unexplained", LATE


def a_message_that_came_to_nothing_without_any_fault(story: Story) -> tuple[str, Entry]:
    story.forget_run(MISSED)
    return "unexplained", MISSED


def a_slot_that_the_audit_can_not_explain(story: Story) -> tuple[str, Entry]:
    story.ends[key(MISSED)] = End("unexplained", "its record isn't there", "", 1, BEGAN + 70)
    return "unexplained", MISSED


def a_slot_that_is_done_and_was_never_sent(story: Story) -> tuple[str, Entry]:
    story.forget(MISSED)
    story.ends[key(MISSED)] = End("done", "", "done", 1, BEGAN + 70)
    return "unexplained", MISSED


def a_slot_that_is_done_without_an_effect(story: Story) -> tuple[str, Entry]:
    story.effects = [effect for effect in story.effects if effect.key != key(MISSED)]
    return "unexplained", MISSED


STORIES: list[Callable[[Story], tuple[str, Entry]]] = [
    value for name, value in list(globals().items()) if getattr(value, "__annotations__", {}).get("story")
]


@pytest.mark.parametrize("tell", STORIES, ids=lambda tell: tell.__name__)
def test_each_violation_is_found_and_nothing_else_is(tell: Callable[[Story], tuple[str, Entry]]) -> None:
    story = Story()
    kind, entry = tell(story)
    assert set(story.violations()) == {(kind, key(entry))}


def test_two_leaders_under_one_epoch_are_found_and_one_that_goes_on_is_not() -> None:
    story = Story()
    story.terms.append(Term("beat0", 1, EPOCH, BEGAN + 10, BEGAN + 20))
    assert story.violations() == []
    story.terms.append(Term("beat1", 2, EPOCH, BEGAN + 20, BEGAN + 30))
    assert story.violations() == [("epoch", str(EPOCH))]


def test_a_slot_that_nobody_called_for_is_found() -> None:
    story = Story()
    odd = tick_key("m", datetime.fromtimestamp(SLOTS[2] + 1, timezone.utc))
    story.arrivals.append(Arrival(SLOTS[2] + 1, "beat0", odd, 1))
    assert story.violations() == [("unexplained", odd)]


def test_a_fault_that_the_harness_could_not_do_spoils_the_run() -> None:
    story = Story()
    story.fault("kill", "worker0")
    story.struck[0] = replace(story.struck[0], trouble="OSError()")
    assert [kind for kind, _ in story.violations()] == ["harness"]


def test_a_message_that_expired_before_its_time_is_found_and_one_in_time_is_not() -> None:
    story = Story()
    story.forget_run(LATE)
    history = story.history()
    soon = check(replace(history, expired={key(LATE): SLOTS[2] + 1.0}))
    assert [(finding.kind, finding.key) for finding in soon.findings] == [("unexplained", key(LATE))]
    assert check(replace(history, expired={key(LATE): SLOTS[2] + 20.5})).findings == []


def test_a_beat_that_ends_by_itself_is_found() -> None:
    history = replace(Story().history(), exits=[Exit(BEGAN + 5, "beat0", 1)])
    assert [finding.kind for finding in check(history).findings] == ["exit"]


# What a policy allows is counted, and is no violation.


def allowed(story: Story) -> dict[str, Any]:
    verdict = story.verdict()
    assert verdict.findings == []
    return dict(verdict.allowed)


def test_a_second_copy_is_allowed_to_an_entry_that_prefers_a_duplicate() -> None:
    story = Story()
    story.sent(DUPLICATE, after=4.0)
    assert allowed(story) == {"second copies of slots that prefer a duplicate": 1}


def test_an_unconfirmed_slot_is_allowed_to_an_entry_that_prefers_a_missed_one() -> None:
    story = Story()
    story.forget(MISSED)
    story.said(MISSED, "missed", "unconfirmed: its leader was gone")
    assert allowed(story) == {"missed: unconfirmed": 1}


def test_a_redelivery_is_allowed_to_a_task_that_acknowledges_late_whose_worker_died() -> None:
    story = Story()
    story.fault("kill", "worker0")
    story.ran(LATE, after=5.0, worker="worker1", written=False)
    assert allowed(story) == {"redeliveries of acks_late tasks whose worker was struck": 1}


def test_a_second_effect_is_allowed_to_a_rerun_whose_worker_was_struck_before_it_could_tell() -> None:
    story = Story()
    story.fault("kill", "worker0")
    story.sent(RERUN, after=4.9, attempt=2)
    story.ran(RERUN, after=5.0, worker="worker1", attempt=2)
    assert allowed(story) == {
        "slots run again (rerun) whose worker was struck between its effect and its word": 1
    }


def test_a_thawed_body_is_allowed_as_long_as_its_effect_is_refused() -> None:
    story = Story()
    story.forget_run(RERUN)
    story.fault("pause", "worker1")
    story.sent(RERUN, after=4.0, attempt=2)
    story.ran(RERUN, after=4.1, attempt=2)
    story.ran(RERUN, after=5.0, attempt=1, worker="worker1", written=False)
    assert allowed(story) == {"bodies of thawed workers that had been superseded, without effect": 1}


@pytest.mark.parametrize(
    ("written", "lost", "kinds"),
    [(False, True, []), (True, True, ["stale"]), (False, False, ["stale"])],
)
def test_a_superseded_message_whose_record_is_lost_may_begin_and_its_effect_never_counts(
    written: bool, lost: bool, kinds: list[str]
) -> None:
    story = Story()
    story.forget_run(RERUN)
    story.fault("kill", "worker0")
    story.sent(RERUN, after=4.0, attempt=2)
    story.ran(RERUN, after=4.1, attempt=2)
    if lost:
        story.losses.append(Loss(SLOTS[2] + 4.5, "flush"))
    story.ran(RERUN, after=5.0, attempt=1, worker="worker1", written=written)
    assert sorted({kind for kind, _ in story.violations()}) == kinds


def test_what_ran_contradicts_only_an_audit_that_was_asked_for_afterwards() -> None:
    for asked, kinds in ((1.0, []), (9.0, ["unexplained"])):
        story = Story()
        ran = next(body.t for body in story.bodies if body.key == key(MISSED))
        story.ends[key(MISSED)] = End("skipped", "its entry was removed", "", 1, ran - 5 + asked)
        assert [kind for kind, _ in story.violations()] == kinds


def test_a_thawed_body_whose_effect_counts_is_stale() -> None:
    story = Story()
    story.forget_run(RERUN)
    story.fault("pause", "worker1")
    story.sent(RERUN, after=4.0, attempt=2)
    story.ran(RERUN, after=4.1, attempt=2)
    story.ran(RERUN, after=5.0, attempt=1, worker="worker1", written=True)
    assert ("stale", key(RERUN)) in story.violations()


def test_a_message_that_its_worker_took_with_it_is_allowed_where_it_was_acknowledged_early() -> None:
    story = Story()
    story.forget_run(MISSED)
    story.fault("kill", "worker0")
    assert list(allowed(story).values()) == [1]


def test_a_retry_that_a_worker_took_with_it_is_allowed_and_one_that_nobody_took_is_not() -> None:
    for struck in (True, False):
        story = Story()
        story.effects = [effect for effect in story.effects if effect.key != key(MISSED)]
        story.ends[key(MISSED)] = End("retrying", "Retry in 0.3s", "retrying", 1, BEGAN + 70)
        if struck:
            story.fault("kill", "worker1")
        assert story.violations() == ([] if struck else [("unexplained", key(MISSED))])


@pytest.mark.parametrize("target", ["beat0", "beat0:broker", "beat1"])
def test_what_redis_lost_may_be_missed_only_where_the_leader_was_struck_as_well(target: str) -> None:
    story = Story()
    story.forget(DUPLICATE)
    story.said(DUPLICATE, "missed", LOST)
    story.losses.append(Loss(SLOTS[2] + 1, "flush"))
    story.fault("pause", target)
    assert story.violations() == ([("lost", key(DUPLICATE))] if target == "beat1" else [])


SKIP = replace(DUPLICATE, name="s", policy={**DUPLICATE.policy, "on_crash": "skip"})
SKIP_MISSED = replace(MISSED, name="sm", policy={**MISSED.policy, "on_crash": "skip"})


@pytest.mark.parametrize(
    ("entry", "before", "allowed"),
    [
        (DUPLICATE, 2.0, True),
        (DUPLICATE, 5.0, False),
        (MISSED, 5.0, True),
        (MISSED, 7.0, False),
        # Taken up again, it isn't sent yet; and it may have begun on a worker that died.
        (SKIP, 14.0, True),
        (SKIP, 16.0, False),
        # Of an entry that prefers a missed slot nothing is taken up that may have been sent.
        (SKIP_MISSED, 7.0, False),
    ],
)
def test_whoever_led_right_before_the_loss_counts_as_its_leader_for_as_long_as_its_claims_are_in_doubt(
    entry: Entry, before: float, allowed: bool
) -> None:
    story = Story({**ENTRIES, entry.name: entry})
    story.forget(entry)
    story.said(entry, "missed", LOST)
    lost = SLOTS[2] + 1
    story.losses.append(Loss(lost, "flush"))
    story.terms = [
        Term("beat0", 1, EPOCH, BEGAN - 5, lost - before),
        Term("beat1", 2, EPOCH + 1, lost - before, BEGAN + 90),
    ]
    story.struck.append(Struck(Fault(0.0, "pause", "beat0", 3.0), lost - before - 2, lost - before + 1))
    assert bool(story.violations()) != allowed


def test_what_prefers_to_be_missed_may_be_where_redis_lost_its_data_and_stayed_away() -> None:
    story = Story()
    for entry in (DUPLICATE, MISSED):
        story.forget(entry)
        story.said(entry, "missed", LOST)
    story.losses.append(Loss(SLOTS[2] - 1, "flush"))
    story.fault("redis restart", "ledger", lasts=2.0)
    assert story.violations() == [("lost", key(DUPLICATE))]


@pytest.mark.parametrize("paused", [True, False])
def test_a_worker_may_have_asked_before_a_loss_and_begun_after_its_pause(paused: bool) -> None:
    story = Story()
    story.losses.append(Loss(SLOTS[2] - 2, "flush"))
    story.struck.append(Struck(Fault(0.0, "pause", "worker1", 8.0), SLOTS[2] - 4, SLOTS[2] + 2.9))
    story.ran(MISSED, after=3.0, worker="worker1" if paused else "worker2", written=False)
    assert story.violations() == ([] if paused else [("doubled", key(MISSED))])


def test_a_lookback_that_was_exceeded_is_allowed() -> None:
    latest = replace(DUPLICATE, policy={"prefer": "duplicate", "catch_up": "latest"})
    story = Story({"d": latest})
    story.forget(latest)
    story.said(latest, "missed", "older than lookback reaches", after=10.5)
    assert allowed(story) == {"missed: older than lookback reaches": 1}


def test_a_slot_that_queues_behind_others_is_waited_for_only_while_those_are_sent() -> None:
    queue = replace(MISSED, policy={"catch_up": "all", "overlap": "queue"})
    story = Story({"m": queue})
    story.forget(queue, 5)
    story.ends[key(queue, 5)] = End("overdue", "no leader has decided about it yet", "", 1, BEGAN + 70)
    assert [kind for kind, _ in story.violations()] == ["unexplained"]
    story.forget(queue, 4)
    story.sent(queue, 4, after=25.0)
    story.ran(queue, 4, after=25.1)
    assert story.violations() == []


def test_an_entry_that_a_deploy_takes_away_needs_no_slots_while_it_is_away() -> None:
    story = Story()
    story.entries = ENTRIES
    deploy = Fault(20.0, "rolling deploy", "beats", 6.0)
    story.struck.append(Struck(deploy, BEGAN + 20, BEGAN + 24))
    for number in (3, 4, 5):
        story.forget(LATE, number)
    history = replace(
        story.history(),
        versions={0: ENTRIES, 1: {name: entry for name, entry in ENTRIES.items() if name != "l"}},
        lives=[Life(BEGAN - 6, "beat0", 1, 0), Life(BEGAN + 22, "beat0", 2, 1)],
        terms=[
            Term("beat0", 1, EPOCH, BEGAN - 5, BEGAN + 20),
            Term("beat0", 2, EPOCH + 1, BEGAN + 23, BEGAN + 90),
        ],
    )
    assert check(history).findings == []
