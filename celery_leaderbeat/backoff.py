"""How long to wait before the next try."""

from __future__ import annotations

import random

__all__ = ["backoff"]


def backoff(failures: int, shortest: float, longest: float) -> float:
    """Seconds to wait after so many failures in a row: at random, up to a bound that doubles with each.

    The randomness keeps replicas that failed together from trying together ("full jitter"; M. Brooker,
    "Exponential Backoff and Jitter", 2015).
    """
    bound = min(longest, shortest * 2.0 ** min(failures, 60))
    return random.uniform(shortest, max(bound, shortest))
