"""The order in which xdist's workers take the tests."""

from __future__ import annotations

from itertools import accumulate

import pytest

from tests.support.order import shares_of, spread


def path_of(test: str) -> str:
    return test.partition("::")[0]


TESTS = [
    "tests/chaos/test_chaos.py::two_minutes",
    *(f"tests/example/test_demo.py::{n}" for n in range(3)),
    *(f"tests/protocol/test_begin.py::{n}" for n in range(200)),
    *(f"tests/protocol/test_interleavings.py::{n}" for n in range(20)),
    *(f"tests/simulation/test_hour.py::{n}" for n in range(2)),
    *(f"tests/simulation/test_seeds.py::{n}" for n in range(9)),
    *(f"tests/unit/test_plan.py::{n}" for n in range(101)),
]


@pytest.mark.parametrize("workers", [1, 2, 3, 6, 8])
def test_each_test_is_run_once_and_each_share_begins_with_long_ones(workers: int) -> None:
    ordered = spread(TESTS, workers, path_of)
    assert sorted(ordered) == sorted(TESTS)
    sizes = shares_of(len(TESTS), workers)
    assert sum(sizes) == len(TESTS)
    begins = [ordered[begin] for begin in (0, *accumulate(sizes[:-1]))]
    assert begins[0] == "tests/chaos/test_chaos.py::two_minutes"
    assert not [test for test in begins if "begin" in test or "plan" in test]


def test_tests_that_share_a_fixture_stay_together_and_short_ones_in_their_order() -> None:
    ordered = spread(TESTS, 6, path_of)
    for module in ("tests/example/test_demo.py", "tests/protocol/test_interleavings.py"):
        together = [test for test in TESTS if test.startswith(module)]
        begin = ordered.index(together[0])
        assert ordered[begin : begin + len(together)] == together
    short = [test for test in TESTS if "begin" in test or "plan" in test]
    assert [test for test in ordered if test in short] == short


def test_more_workers_than_tests_are_no_error() -> None:
    assert spread(["a", "b"], 6, path_of) == ["a", "b"]
