"""Waiting before the next try."""

from __future__ import annotations

import pytest

from celery_leaderbeat.backoff import backoff


@pytest.mark.parametrize("failures", [0, 1, 5, 1024, 10**9])
def test_the_wait_stays_within_its_bounds_however_often_it_failed(failures: int) -> None:
    for _ in range(100):
        assert 0.05 <= backoff(failures, 0.05, 1.0) <= 1.0


def test_the_bound_doubles() -> None:
    assert max(backoff(0, 0.1, 100.0) for _ in range(100)) == 0.1
    assert max(backoff(3, 0.1, 100.0) for _ in range(1000)) <= 0.8
