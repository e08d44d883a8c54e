"""When a message expires, by its options. Pure: the time is passed in."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from datetime import datetime, timedelta, timezone
from typing import Any

__all__ = ["born_expired", "seconds_until", "with_instants"]


def born_expired(options: Mapping[str, Any], now: datetime) -> str:
    """Why a message with these options, sent at `now`, would have expired before anybody could run it; else empty."""
    expires = options.get("expires")
    left = seconds_until(expires, now)
    return "" if left is None or left > 0 else f"born expired: expires is {expires}"


def seconds_until(expires: Any, now: datetime) -> float | None:
    """Seconds from `now` until a message with this `expires` option expires; None if it doesn't.

    Numbers are seconds from the send, naive times are in UTC, as Celery reads them; what Celery would refuse
    is left to it.
    """
    if isinstance(expires, timedelta):
        return expires.total_seconds()
    if isinstance(expires, (int, float)):
        return None if isinstance(expires, bool) else float(expires)
    if isinstance(expires, str):
        try:
            expires = datetime.fromisoformat(expires.replace("Z", "+00:00"))
        except ValueError:
            return None
    if not isinstance(expires, datetime):
        return None
    if expires.tzinfo is None:
        expires = expires.replace(tzinfo=timezone.utc)
    return float((expires - now).total_seconds())


def with_instants(options: dict[str, Any], now: datetime) -> dict[str, Any]:
    """The options with `expires` and `countdown` as instants, where they are seconds from the send.

    Celery would count them from this host's wall clock. Where that is behind the workers', the message would
    expire before it arrived. What can't be counted is left to Celery, which refuses it.

    Parameters:
        options: of a message.
        now: the fleet's time.
    """
    counted = dict(options)
    for given, instant in (("expires", "expires"), ("countdown", "eta")):
        seconds = counted.get(given)
        if isinstance(seconds, bool) or not isinstance(seconds, (int, float)) or not seconds:
            continue
        with contextlib.suppress(OverflowError, ValueError):
            counted[instant] = now + timedelta(seconds=seconds)
            if instant != given:
                del counted[given]
    return counted
