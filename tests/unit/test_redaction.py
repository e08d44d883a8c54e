"""Passwords don't get out."""

from __future__ import annotations

import pytest

from celery_leaderbeat.redaction import without_secrets


@pytest.mark.parametrize(
    ("text", "secrets", "shown"),
    [
        ("unknown command 'HELLO', with args '3' 'AUTH' 'app' 's3cret'", ["s3cret"], "'app' '***'"),
        ("redis://app:s3c.ret@host", ["s3c.ret"], "redis://app:***@host"),
        ("connecting to prompt", ["p"], "connecting to prompt"),
        ("AUTH p", ["p"], "AUTH ***"),
        ("nothing", [None, "", 5], "nothing"),
    ],
)
def test_a_secret_is_replaced_where_it_stands_alone(text: str, secrets: list[object], shown: str) -> None:
    assert shown in without_secrets(text, secrets)
