"""Fast failover needs a server that shows the leader's subscription; where it doesn't, the leader says so."""

from __future__ import annotations

import pytest

from celery_leaderbeat.store import Store
from celery_leaderbeat.term import Term
from tests.protocol.replica import Fleet
from tests.support.waits import wait_for


@pytest.mark.parametrize("shown", [None, 0, 1])
def test_a_leader_whose_subscription_is_not_shown_says_what_that_costs(
    start: Fleet, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, shown: int | None
) -> None:
    caplog.set_level("INFO")
    monkeypatch.setattr(Store, "subscribers", lambda *_: shown)
    term: Term = wait_for(start("one").elector.term, what="one leads")
    assert term.watched == bool(shown)
    said = [
        record for record in caplog.records if "doesn't show this leader's subscription" in record.message
    ]
    assert [record.levelname for record in said] == ([] if shown else ["INFO"])
