"""The raw `leaderbeat_*` values in `app.conf`: found in every spelling, turned into their types, cited.

A setting may stand in a module, a Django settings object, a mapping, or in changes made to `app.conf`; in
upper or lower case; with the app's namespace (`CELERY_`) or without. Celery alone finds only some of these.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from datetime import timedelta
from types import ModuleType
from typing import Any

from celery_leaderbeat.errors import SettingsError
from celery_leaderbeat.redis_url import sanitize

__all__ = ["Source", "stray_settings"]

_ROOT = "leaderbeat_"
_FLAGS = {"true": True, "1": True, "false": False, "0": False}
_MISSING = object()


def _namespace(app: Any) -> str:
    prefix = app.conf.finalize().prefix
    return str(prefix) if prefix else ""


def _spellings(app: Any, name: str) -> list[str]:
    """Where setting `name` may stand, the most specific spelling first."""
    lower = _ROOT + name
    namespace = _namespace(app)
    if not namespace:
        return [lower, lower.upper(), f"CELERY_{lower.upper()}", f"celery_{lower}"]
    full = namespace + lower
    return list(dict.fromkeys([full.upper() if namespace.isupper() else full.lower(), lower, lower.upper()]))


def _lookup(mapping: Any, key: str) -> Any:
    # A configuration object may be anything with attributes behind Celery's adapter.
    try:
        return mapping[key]
    except (KeyError, AttributeError):
        return _MISSING


def _shown(value: object) -> str:
    """A value for a message: short, and without the password of a URL that was put into the wrong setting."""
    if isinstance(value, str) and ("://" in value or "@" in value):
        return sanitize(value)
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


#: Counts stay below this.
_MOST = 1_000_000_000
#: Longest duration that makes sense, in seconds.
_LONGEST = 100 * 366 * 86_400.0


class Source:
    """Reads settings of one app, and remembers where each came from.

    Attributes:
        origins: name -> the spelling under which it was found, or `"default"`.
    """

    def __init__(self, app: Any) -> None:
        self.app = app
        self.origins: dict[str, str] = {}

    def raw(self, name: str) -> Any:
        """The value as it was set, or None.

        Raises:
            SettingsError: one configuration holds it under two spellings, with different values.
        """
        for mapping in self.app.conf.finalize().maps:
            found = {key: _lookup(mapping, key) for key in _spellings(self.app, name)}
            found = {key: value for key, value in found.items() if value is not _MISSING}
            if not found:
                continue
            (key, value), *others = found.items()
            for other, other_value in others:
                if other_value != value:
                    raise SettingsError(f"{key} and {other} are one setting, set to two values; remove one")
            # As everywhere in Celery, None stands for "not set".
            self.origins[name] = "default" if value is None else key
            return value
        self.origins[name] = "default"
        return None

    def spelling(self, name: str) -> str:
        """The name of the setting for a message: as it was found, else the canonical one."""
        origin = self.origins.get(name, "default")
        return _ROOT + name if origin == "default" else origin

    def cite(self, name: str, value: float) -> str:
        """The setting and its value in seconds, for a message about the order of two."""
        default = ", its default" if self.origins.get(name, "default") == "default" else ""
        return f"{self.spelling(name)} ({value:g} s{default})"

    def refused(self, name: str, value: object, rule: str) -> SettingsError:
        """The error for a value that breaks a rule."""
        return SettingsError(f"{self.spelling(name)} is {_shown(value)}: {rule}.")

    def seconds(self, name: str, default: float) -> float:
        """A duration above 0: a number of seconds, also as text (from the environment), or a timedelta."""
        value = self.raw(name)
        if value is None:
            return default
        if isinstance(value, timedelta):
            value = value.total_seconds()
        if isinstance(value, str):
            usable = re.fullmatch(r"\s*([0-9]+\.?[0-9]*|\.[0-9]+)\s*", value) is not None
        else:
            usable = isinstance(value, (int, float)) and not isinstance(value, bool)
        # A century bounds it: nothing here lasts longer, and larger integers aren't floats.
        if not (usable and 0 < (float(value) if isinstance(value, str) else value) < _LONGEST):
            raise self.refused(name, value, "it must be a number of seconds above 0")
        return float(value)

    def flag(self, name: str, default: bool) -> bool:
        """True or False; also as text."""
        value = self.raw(name)
        if value is None:
            return default
        known = _FLAGS.get(str(value).strip().lower()) if isinstance(value, (bool, int, str)) else None
        if known is None:
            raise self.refused(name, value, "it must be True or False (or the text true, false, 1, 0)")
        return known

    def count(self, name: str, default: int) -> int:
        """A whole number, 0 or more; also as text."""
        value = self.raw(name)
        if value is None:
            return default
        if isinstance(value, str) and re.fullmatch(r"\s*[0-9]{1,9}\s*", value):
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < _MOST:
            raise self.refused(name, value, f"it must be a whole number from 0 to {_MOST - 1:_}")
        return value

    def choice(self, name: str, choices: Collection[str], default: str) -> str:
        """One of some words."""
        value = self.raw(name)
        if value is None:
            return default
        if not isinstance(value, str) or value not in choices:
            listed = " or ".join(repr(choice) for choice in choices)
            raise self.refused(name, value, f"it must be {listed}")
        return value

    def mapping(self, name: str) -> Mapping[str, Any]:
        """A mapping with texts as keys. Its values never get into a message: one may be a password."""
        value = self.raw(name)
        if value is None:
            return {}
        if not isinstance(value, Mapping):
            raise SettingsError(f"{self.spelling(name)} must be a mapping, not {type(value).__name__}.")
        for key in value:
            if not isinstance(key, str):
                raise SettingsError(f"{self.spelling(name)} has the key {_shown(key)}: keys must be texts.")
        return value


def _names(mapping: Any) -> Iterator[str]:
    # Celery's adapter for modules and objects lists with `dir()`, so methods and imports are among them.
    listing: Callable[[], Any] | None = getattr(mapping, "keys", None)
    return (key for key in (listing() if listing is not None else mapping) if isinstance(key, str))


def stray_settings(app: Any, known: Collection[str], later: Collection[str]) -> list[str]:
    """Messages about configured names that look like ours and aren't read, without duplicates.

    Parameters:
        known: the names that are read, without `leaderbeat_`.
        later: the names that other versions read.
    """
    messages: dict[str, None] = {}
    namespace = (_namespace(app) or "celery_").lower()
    for mapping in app.conf.finalize().maps:
        for key in _names(mapping):
            message = _about(app, key, key.lower().removeprefix(namespace), known, later)
            if message is None:
                continue
            value = _lookup(mapping, key)
            # A module's imports and a class's methods are among its names.
            if value is not _MISSING and not callable(value) and not isinstance(value, ModuleType):
                messages[message] = None
    return list(messages)


def _about(app: Any, key: str, name: str, known: Collection[str], later: Collection[str]) -> str | None:
    short = name.removeprefix(_ROOT)
    if name.startswith(_ROOT):
        if short in known or short in later:
            if key not in _spellings(app, short):
                return f"{key} isn't read in this spelling; write {_spellings(app, short)[0]}."
            return f"{key} isn't supported in this version and has no effect." if short in later else None
        # The common prefix would make every name look near.
        close = difflib.get_close_matches(short, known, n=1)
    else:
        close = [found.removeprefix(_ROOT) for found in _misspelled_root(name, known)]
        if not close:
            return None
    if close:
        return f"{key} isn't a setting of leaderbeat; did you mean {_spellings(app, close[0])[0]}?"
    return f"{key} isn't a setting of leaderbeat; known are {', '.join(sorted(_ROOT + n for n in known))}."


def _misspelled_root(name: str, known: Collection[str]) -> list[str]:
    # One wrong, missing or swapped letter in `leaderbeat` itself, or an underscore too many.
    head = name.replace("_", "")[: len(_ROOT) - 1]
    if difflib.SequenceMatcher(None, head, _ROOT[:-1], autojunk=False).ratio() < 0.9:
        return []
    return difflib.get_close_matches(name, [_ROOT + other for other in known], n=1, cutoff=0.8)
