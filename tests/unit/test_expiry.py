"""When a message expires: counted from its send, however late that is; what would be born expired isn't sent."""

from __future__ import annotations

from datetime import datetime, timedelta, timezone
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from celery_leaderbeat.expiry import born_expired, seconds_until, with_instants

UTC = timezone.utc
SLOT = datetime(2026, 10, 2, 3, tzinfo=UTC)
MICROSECOND = timedelta(microseconds=1)

#: Seconds between a slot and its send, up to three days.
late = st.integers(0, 3 * 86_400 * 10**6).map(lambda us: us * MICROSECOND)
seconds = st.integers(-(10**6), 10**6) | st.floats(-1e6, 1e6, allow_nan=False)
instants = st.integers(-4 * 86_400 * 10**6, 4 * 86_400 * 10**6).map(lambda us: SLOT + us * MICROSECOND)
zones = st.sampled_from([UTC, timezone(timedelta(hours=5, minutes=30)), timezone(timedelta(hours=-3))])


@settings(max_examples=1_000, deadline=None)
@given(seconds, late)
def test_seconds_count_from_the_send_and_not_from_the_slot(expires: float, after: timedelta) -> None:
    sent = SLOT + after
    expired = born_expired({"expires": expires}, sent)
    assert bool(expired) == (expires <= 0)
    if not expired:
        instant = with_instants({"expires": expires}, sent)["expires"]
        assert abs(instant - sent - timedelta(seconds=expires)) <= MICROSECOND
        assert instant >= sent
    else:
        assert expired == f"born expired: expires is {expires}"


@settings(max_examples=1_000, deadline=None)
@given(instants, zones, st.sampled_from(["aware", "naive", "text", "Z"]), late)
def test_an_instant_is_past_or_to_come_whatever_the_slot(
    expires: datetime, zone: timezone, form: str, after: timedelta
) -> None:
    given_as: Any = {
        "aware": expires.astimezone(zone),
        "naive": expires.replace(tzinfo=None),
        "text": expires.astimezone(zone).isoformat(),
        "Z": expires.replace(tzinfo=None).isoformat() + "Z",
    }[form]
    sent = SLOT + after
    assert seconds_until(given_as, sent) == (expires - sent).total_seconds()
    assert bool(born_expired({"expires": given_as}, sent)) == (expires <= sent)
    assert with_instants({"expires": given_as}, sent) == {"expires": given_as}, "it is Celery's to read"


def test_what_has_no_expiry_is_not_born_expired() -> None:
    for options in ({}, {"expires": None}, {"expires": "soon"}, {"countdown": -5}):
        assert born_expired(options, SLOT) == ""
