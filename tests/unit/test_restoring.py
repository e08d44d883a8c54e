"""When a leader notices that Redis has lost what it decided, and what becomes of slots under way; on a fake ledger."""

from __future__ import annotations

import logging
from datetime import datetime, timedelta, timezone
from types import SimpleNamespace
from typing import Any

import pytest

from celery_leaderbeat.clock import Clock, FleetClock
from celery_leaderbeat.keys import Keys
from celery_leaderbeat.ledger import NotLeading
from celery_leaderbeat.lost_claims import RECORDED_AGAIN
from celery_leaderbeat.pauses import Pause
from celery_leaderbeat.plan import Plan
from celery_leaderbeat.policy import Policy
from celery_leaderbeat.recall import LOST
from celery_leaderbeat.records import Claim
from celery_leaderbeat.reports import Reports
from celery_leaderbeat.restoring import Restorer
from celery_leaderbeat.shadow import Shadow
from celery_leaderbeat.store import Look
from celery_leaderbeat.term import Term
from celery_leaderbeat.tick import tick_key
from celery_leaderbeat.timeline import fingerprint

TERM = Term("mine", "me", 9)
MINUTE = timedelta(minutes=1)
NOW = datetime.now(timezone.utc).replace(second=0, microsecond=0)


class FakeLedger:
    """Keeps totals, the keys of the records that it still has, and what was written off."""

    def __init__(self) -> None:
        self.claimed, self.missed = 0, 0
        self.value = TERM.value
        self.kept: set[str] = set()
        self.written_off: list[str] = []
        self.recalled: list[tuple[str, int]] = []
        self.settings = SimpleNamespace(key_prefix="test", slot_retention=60.0)
        self.store = SimpleNamespace(look=self._look, keys=Keys("test"))

    def _look(self, channel: str) -> Look:
        counts = {"claimed": str(self.claimed), "missed": str(self.missed)}
        return Look(self.value, 1000, NOW.timestamp(), None, counts, {})

    def entries(self) -> dict[str, Any]:
        return {}

    def register(self, *args: Any) -> dict[str, Any]:
        return {"job": ("recalled", NOW)}

    def slots(self, keys: list[str]) -> dict[str, Any]:
        return {key: object() if key in self.kept else None for key in keys}

    def recall_slots(self, term: Term, slots: list[Claim], reason: str) -> int:
        assert (term, reason) == (TERM, RECORDED_AGAIN)
        self.recalled += [(slot.key, slot.attempt) for slot in slots]
        return len(slots)

    def write_off(self, term: Term, state: str, entry: str, *rest: Any) -> int:
        assert (term, state, rest[3]) == (TERM, "missed", LOST)
        self.written_off += rest[-1]
        return 1


def restorer(plan: Plan | None = None) -> tuple[Restorer, FakeLedger, Shadow]:
    ledger, shadow = FakeLedger(), Shadow()
    sight = SimpleNamespace(before=lambda: (1, 0), held=lambda *_: None)
    elector = SimpleNamespace(shadow=shadow, sight=sight, progress=lambda: None)
    plans = {"job": plan or job("missed")}
    made: Any = Restorer(FleetClock(Clock()), elector, plans, ledger, Reports(None))  # type: ignore[arg-type]
    return made, ledger, shadow


def job(prefer: Any) -> Plan:
    entry = SimpleNamespace(task="tasks.job")
    return Plan("job", entry, MINUTE, fingerprint(MINUTE), Policy(prefer=prefer))


def claim(ledger: FakeLedger, shadow: Shadow, *numbers: int) -> list[str]:
    keys = [tick_key("job", NOW + number * MINUTE) for number in numbers]
    for key in keys:
        shadow.claimed(key, 1)
        ledger.claimed += 1
        ledger.kept.add(key)
    return keys


def test_a_leader_notices_that_the_latest_of_its_claims_are_gone() -> None:
    """In a failover to a replica that lagged: what was decided before the last look may all be there."""
    leads, ledger, shadow = restorer()
    assert not leads.has_gone_back(TERM)
    claim(ledger, shadow, 1, 2)
    assert not leads.has_gone_back(TERM)
    claim(ledger, shadow, 3)
    ledger.claimed -= 1
    assert leads.has_gone_back(TERM)
    assert not leads.has_gone_back(TERM), "it is told once"


def test_what_others_have_added_is_no_loss() -> None:
    leads, ledger, shadow = restorer()
    for _ in range(3):
        claim(ledger, shadow, 1)
        ledger.claimed += 2
        ledger.missed += 5
        assert not leads.has_gone_back(TERM)


def test_a_leader_whose_lease_is_gone_says_so() -> None:
    leads, ledger, _ = restorer()
    ledger.value = "another's"
    with pytest.raises(NotLeading):
        leads.has_gone_back(TERM)


def test_a_claim_that_is_open_and_whose_record_is_lost_is_missed_aloud(
    caplog: pytest.LogCaptureFixture,
) -> None:
    leads, ledger, shadow = restorer()
    shadow.stands("job", NOW, fingerprint(MINUTE))
    sent, kept, lost = claim(ledger, shadow, -3, -2, -1)
    shadow.settled(sent)
    ledger.kept = {kept}
    with caplog.at_level(logging.WARNING):
        leads.register(TERM)
    assert ledger.written_off == [lost]
    assert any("is missed: " + LOST in record.getMessage() for record in caplog.records)
    assert shadow.open_claims.keys() == {kept}, "the sweep looks after that"
    leads.swept([])
    assert shadow.open_claims == {}


def job_that(prefer: Any, on_crash: Any) -> Plan:
    plan = job(prefer)
    plan.policy = Policy(prefer=prefer, on_crash=on_crash)
    return plan


def lose(plan: Plan, gap: timedelta = timedelta(0)) -> tuple[FakeLedger, dict[str, str]]:
    """All is lost but for what a leader remembers: one slot given back, one under way, and one that another claimed.

    Parameters:
        gap: for so long nobody has known who leads.
    """
    leads, ledger, shadow = restorer(plan)
    shadow.stands("job", NOW, plan.fingerprint)
    names = {"unsent": -3, "under way": -2, "another's": -1}
    keys = {name: tick_key("job", NOW + number * MINUTE) for name, number in names.items()}
    shadow.see_claimed([keys["another's"]], led=True)
    shadow.claimed(keys["under way"], 2)
    plan.give_back(NOW - 3 * MINUTE, 1)
    shadow.leads(datetime.now(timezone.utc) + MINUTE)
    if gap:
        shadow.ended(datetime.now(timezone.utc) - gap)
    leads.register(TERM)
    assert shadow.open_claims.keys() == {key for key, _ in ledger.recalled}, "the sweep looks after these"
    return ledger, {key: name for name, key in keys.items()}


@pytest.mark.parametrize(
    ("prefer", "on_crash", "gap", "sent"),
    [
        ("missed", "auto", 0, ["unsent"]),
        ("duplicate", "auto", 0, ["unsent", "another's", "under way"]),
        # A worker may have begun what another claimed, and have died.
        ("duplicate", "skip", 0, ["unsent", "under way"]),
        # Another may have led, have sent them, and have lost all in the gap.
        ("missed", "auto", 5, []),
        ("duplicate", "auto", 5, ["unsent", "another's", "under way"]),
    ],
)
def test_what_is_known_to_be_unsent_is_recorded_again_and_what_is_in_doubt_goes_as_its_entry_prefers(
    prefer: str, on_crash: str, gap: float, sent: list[str]
) -> None:
    ledger, names = lose(job_that(prefer, on_crash), timedelta(seconds=gap))
    assert [names[key] for key, _ in ledger.recalled] == sent
    attempts = {"unsent": 1, "another's": 1, "under way": 2}
    assert [attempt for _, attempt in ledger.recalled] == [attempts[name] for name in sent]
    assert {names[key] for key in ledger.written_off} == {*names.values()} - {*sent}


def test_what_a_replica_gave_back_before_another_led_is_no_business_of_its_any_more() -> None:
    """Whoever led since has sent it."""
    leads, ledger, shadow = restorer(plan := job("duplicate"))
    shadow.stands("job", NOW, plan.fingerprint)
    plan.give_back(NOW - MINUTE)
    shadow.leads(NOW)
    shadow.another_leads()
    leads.register(TERM)
    assert (ledger.recalled, ledger.written_off) == ([], [])


def test_what_waits_is_known_until_the_sweep_has_found_it_again() -> None:
    leads, ledger, shadow = restorer(plan := job("missed"))
    key = tick_key("job", NOW - MINUTE)
    plan.give_back(NOW - MINUTE)
    shadow.leads(NOW)
    ledger.kept.add(key)
    leads.register(TERM)
    assert shadow.open_claims.keys() == {key}


def test_what_was_recorded_again_and_is_lost_again_before_the_sweep_is_recorded_once_more() -> None:
    leads, ledger, shadow = restorer(plan := job("missed"))
    shadow.stands("job", NOW, plan.fingerprint)
    plan.give_back(NOW - MINUTE)
    shadow.leads(datetime.now(timezone.utc) + MINUTE)
    key = tick_key("job", NOW - MINUTE)
    for times in (1, 2, 3):
        leads.register(TERM)
        assert ledger.recalled == [(key, 1)] * times
        # As a term begins; only the sweep finds again what waits.
        plan.start(NOW)
    leads.swept([])
    leads.register(TERM)
    assert len(ledger.recalled) == 3
    assert ledger.written_off == []


@pytest.mark.parametrize(("on_crash", "sent"), [("auto", True), ("skip", False)])
def test_what_another_may_have_sent_is_not_known_to_be_unsent_by_whoever_took_it_up(
    on_crash: str, sent: bool
) -> None:
    """A worker may have begun it, and have died: where `on_crash` is skip, that isn't made good by a second run."""
    leads, ledger, shadow = restorer(plan := job_that("duplicate", on_crash))
    shadow.stands("job", NOW, plan.fingerprint)
    plan.give_back(NOW - MINUTE, 2, maybe_sent=True)
    shadow.leads(datetime.now(timezone.utc) + MINUTE)
    leads.register(TERM)
    key = tick_key("job", NOW - MINUTE)
    assert ledger.recalled == ([(key, 2)] if sent else [])
    assert ledger.written_off == ([] if sent else [key])
    assert bool(plan.returned) == sent


def test_many_slots_in_doubt_are_missed_as_ranges_and_in_time(caplog: pytest.LogCaptureFixture) -> None:
    leads, ledger, shadow = restorer(plan := job("missed"))
    shadow.stands("job", NOW, plan.fingerprint)
    keys = [tick_key("job", NOW - number * MINUTE) for number in range(250)]
    shadow.see_claimed(keys, led=True)
    with caplog.at_level(logging.WARNING):
        leads.register(TERM)
    assert ledger.written_off == keys[::-1]
    said = [record for record in caplog.records if "missed: " + LOST in record.getMessage()]
    assert [record.__dict__["count"] for record in said] == [100, 100, 50]
    assert shadow.open_claims == {}


def test_another_leader_that_was_seen_in_a_tick_is_not_forgotten_with_the_lease() -> None:
    """Its lease may be gone with all data before the elector looks."""
    leads, ledger, shadow = restorer()
    shadow.held(NOW)
    shadow.leads(NOW + MINUTE)
    ledger.value = '{"holder": "other", "epoch": 10}'
    with pytest.raises(NotLeading):
        leads.has_gone_back(TERM)
    assert (shadow.led_last, shadow.known_until) == (False, NOW)


class Pausing(FakeLedger):
    """Keeps the pauses that were put back, by entry."""

    def __init__(self) -> None:
        super().__init__()
        self.put_back: dict[str, list[Pause]] = {}

    def recall_pauses(self, term: Term, pauses: dict[str, list[Pause]]) -> None:
        assert term == TERM
        self.put_back |= pauses


def test_pauses_that_are_over_are_put_back_and_nobody_is_told_to_lift_them(
    caplog: pytest.LogCaptureFixture,
) -> None:
    ledger, shadow = Pausing(), Shadow()
    elector = SimpleNamespace(shadow=shadow, sight=SimpleNamespace(), progress=lambda: None)
    leads = Restorer(FleetClock(Clock()), elector, {}, ledger, Reports(None))  # type: ignore[arg-type]
    over = {"over": [Pause(NOW - 9 * MINUTE, NOW - 5 * MINUTE)]}
    leads.pauses(TERM, over)
    assert ledger.put_back == {}
    leads.pauses(TERM, {})
    assert ledger.put_back == over
    assert not caplog.records
    held = {"held": [Pause(NOW - 2 * MINUTE)]}
    leads.pauses(TERM, over | held)
    leads.pauses(TERM, {})
    assert ledger.put_back == over | held
    (record,) = caplog.records
    assert record.getMessage().startswith("Redis has lost pauses of 'held'. This replica has put them back")
    assert record.count == 1  # type: ignore[attr-defined]
