"""Keeping passwords out of what drivers and servers say."""

from __future__ import annotations

import re
from collections.abc import Iterable

__all__ = ["without_secrets"]


def without_secrets(text: str, secrets: Iterable[object]) -> str:
    """`text` without the secrets in it. What isn't a string, or is empty, is no secret.

    A secret counts where it stands alone, as servers and drivers quote what they were sent: a password as
    short as a letter must not garble every word, which would give it away.
    """
    for secret in secrets:
        if isinstance(secret, str) and secret:
            text = re.sub(rf"(?<!\w){re.escape(secret)}(?!\w)", "***", text)
    return text
