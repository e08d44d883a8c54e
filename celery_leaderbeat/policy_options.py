"""Reading a policy: what an entry and the settings say, checked, completed and merged.

Two keys belong to another one: `lookback` to `catch_up`, and `max_attempts` to `on_crash`. Beside a value
with which they mean nothing they are refused; and a default for one of them counts only for entries that
have the default of the other too.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Collection, Mapping
from typing import Any

from celery_leaderbeat.errors import PolicyError
from celery_leaderbeat.policy import Policy

__all__ = ["build_policy", "validate_defaults"]

_KEYS = ("prefer", "catch_up", "lookback", "deadline", "on_crash", "max_attempts", "overlap", "jitter")
_CHOICES: dict[str, tuple[str, ...]] = {
    "prefer": ("missed", "duplicate"),
    "catch_up": ("latest", "all", "none"),
    "on_crash": ("auto", "skip", "rerun"),
    "overlap": ("allow", "skip", "queue"),
}
#: What the whole numbers count.
_COUNTS = {"lookback": "slots", "max_attempts": "attempts"}
_LOOKBACK = {"latest": 1, "all": 100, "none": 1}
_DEFAULTS = "leaderbeat_policy"


def build_policy(
    entry: str,
    own: Mapping[str, Any] | None,
    defaults: Mapping[str, Any],
    cron_deadline: float | None = None,
) -> Policy:
    """The policy of an entry.

    Parameters:
        entry: the entry's name, for messages.
        own: what the entry says, `options["leaderbeat"]`.
        defaults: the `leaderbeat_policy` setting.
        cron_deadline: `beat_cron_starting_deadline` in seconds where the entry is a crontab; the deadline
            where neither `own` nor `defaults` has one.

    A default `lookback` belongs to the default `catch_up`: an entry with another `catch_up` has its own. In
    the same way a default `max_attempts` belongs to the default `on_crash`.

    Raises:
        PolicyError: an unknown key, an impossible value or an impossible mix; names the entry or setting, the
            key, the value and what is accepted.
    """
    validate_defaults(defaults)
    where = f"Entry {entry!r}: options['leaderbeat']"
    mine = {} if own is None else _checked(where, own)
    merged = {**_inherited(mine, defaults), **mine}
    _check_mixes(where, {key: merged[key] for key in merged if key in mine or key not in _COUNTS})
    if "deadline" not in merged and cron_deadline is not None:
        _check_deadline(f"Entry {entry!r}: beat_cron_starting_deadline", cron_deadline)
        merged["deadline"] = cron_deadline
    merged["jitter"] = merged.get("jitter") or 0.0
    merged.setdefault("lookback", _LOOKBACK[merged.get("catch_up", Policy.catch_up)])
    return Policy(**merged)


def validate_defaults(defaults: Mapping[str, Any], where: str = _DEFAULTS) -> None:
    """Check the `leaderbeat_policy` setting, which messages call `where`.

    Raises:
        PolicyError: as `build_policy`.
    """
    _check_mixes(where, _checked(where, defaults))


def _inherited(mine: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """The defaults that count for an entry: without those that belong to what it has changed."""
    inherited = dict(defaults)
    for key, whole in (("lookback", "catch_up"), ("max_attempts", "on_crash")):
        usual = defaults.get(whole, getattr(Policy, whole))
        if mine.get(whole, usual) != usual:
            inherited.pop(key, None)
    return inherited


def _checked(where: str, policy: Any) -> dict[str, Any]:
    if not isinstance(policy, Mapping):
        raise PolicyError(f"{where} is {policy!r}: expected a mapping with the keys {', '.join(_KEYS)}")
    for key, value in policy.items():
        if key not in _KEYS:
            raise PolicyError(
                f"{where} has the unknown key {key!r} (value {value!r}){_nearest(key, _KEYS)};"
                f" accepted are {', '.join(_KEYS)}"
            )
        if key in _CHOICES:
            _check_choice(where, key, value)
        elif key in _COUNTS:
            _check_count(where, key, value)
        elif key == "jitter":
            _check_jitter(f"{where}: jitter", value)
        else:
            _check_deadline(f"{where}: deadline", value)
    return dict(policy)


def _check_choice(where: str, key: str, value: Any) -> None:
    choices = _CHOICES[key]
    if not isinstance(value, str) or value not in choices:
        accepted = ", ".join(map(repr, choices))
        raise PolicyError(f"{where}: {key} is {value!r}{_nearest(value, choices)}; accepted are {accepted}")


def _check_count(where: str, key: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise PolicyError(f"{where}: {key} is {value!r}; accepted is a number of {_COUNTS[key]}, 1 or more")


def _check_deadline(what: str, value: Any) -> None:
    if value is not None and not (_is_finite(value) and value > 0):
        raise PolicyError(f"{what} is {value!r}; accepted is a number of seconds above 0, or None")


def _check_jitter(what: str, value: Any) -> None:
    if value is not None and not (_is_finite(value) and value >= 0):
        raise PolicyError(f"{what} is {value!r}; accepted is a number of seconds, 0 or more, or None")


def _is_finite(value: Any) -> bool:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:
        return False


def _check_mixes(where: str, policy: Mapping[str, Any]) -> None:
    if "lookback" in policy and policy.get("catch_up") == "none":
        raise PolicyError(
            f"{where}: lookback is {policy['lookback']!r}, but catch_up is 'none', which catches nothing up;"
            " lookback is accepted with catch_up 'latest' or 'all'"
        )
    on_crash = policy.get("on_crash", Policy.on_crash)
    if "max_attempts" in policy and on_crash != "rerun":
        raise PolicyError(
            f"{where}: max_attempts is {policy['max_attempts']!r}, but on_crash is {on_crash!r}, which runs"
            " nothing again; max_attempts is accepted with on_crash 'rerun'"
        )


def _nearest(value: Any, accepted: Collection[str]) -> str:
    found = difflib.get_close_matches(str(value), accepted, n=1, cutoff=0.4)
    return f", did you mean {found[0]!r}?" if found else ""
