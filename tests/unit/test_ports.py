"""Tests that run at the same time start their servers on different ports."""

from __future__ import annotations

import itertools

import pytest

from tests.support.servers import free_port, ports_of


@pytest.mark.parametrize("workers", [1, 2, 6, 16])
def test_no_port_belongs_to_two_workers_or_is_that_of_a_cluster_s_bus(workers: int) -> None:
    ports = [set(ports_of(f"gw{number}", workers)) for number in range(workers)]
    buses = {port + 10_000 for port in set().union(*ports)}
    assert min(map(len, ports)) >= 600
    for some, others in itertools.combinations(ports, 2):
        assert not some & others
    assert not buses & set().union(*ports)
    assert max(buses) < 32_768, "the range for outgoing connections"


def test_a_worker_in_place_of_one_that_has_crashed_has_ports_too() -> None:
    assert ports_of("gw7", 6) == ports_of("gw1", 6)


def test_a_port_is_given_away_once_and_from_the_worker_s_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTEST_XDIST_WORKER", "gw2")
    monkeypatch.setenv("PYTEST_XDIST_WORKER_COUNT", "6")
    given = [free_port() for _ in range(20)]
    assert len(set(given)) == 20
    assert set(given) <= set(ports_of("gw2", 6))
