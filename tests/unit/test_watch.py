"""When a standby may take over a lease that stands."""

from __future__ import annotations

import json

from celery_leaderbeat.term import Term
from celery_leaderbeat.watch import Watch


def watch(**attributes: object) -> Watch:
    return Watch(Term.read(json.dumps({"holder": "one", "epoch": 5, "ttl": 3.0, **attributes})))


def test_a_holder_is_gone_when_two_looks_a_second_apart_miss_its_subscription() -> None:
    seen = watch(watched=True)
    assert [seen.gone(*look) for look in ((0, 10.0), (0, 10.9), (0, 11.0))] == [False, False, True]
    assert [seen.gone(*look) for look in ((1, 11.5), (0, 12.0), (None, 12.9), (0, 13.1))] == [False] * 4


def test_a_holder_that_nobody_has_seen_subscribed_is_waited_for() -> None:
    seen = watch(watched=False)
    assert not any(seen.gone(0, 10.0 + second) for second in range(10))


def test_a_lease_that_outlives_its_ttl_and_is_not_renewed_for_one_is_nobodys() -> None:
    seen = watch()
    looks = [(3_600_000, 10.0), (3_598_000, 12.0), (3_597_001, 12.999), (3_597_000, 13.0)]
    assert [seen.outlives(*look) for look in looks] == [False, False, False, True]


def test_a_lease_that_is_renewed_after_a_step_of_the_clock_is_its_holders() -> None:
    seen = watch()
    looks = [
        (3_600_000, 10.0),
        (3000, 11.0),
        (2000, 12.0),
        (1000, 14.0),
        (3_600_000, 14.5),
        (3_598_000, 16.5),
    ]
    assert not any(seen.outlives(*look) for look in looks)


def test_a_lease_that_does_not_say_its_ttl_is_waited_for() -> None:
    seen = Watch(Term.read("somebody"))
    assert not any(seen.outlives(3_600_000, 10.0 + second) for second in range(100))
