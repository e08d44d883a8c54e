"""The verdict of a run as text. Pure."""

from __future__ import annotations

from collections import Counter

from tests.chaos.checker import Verdict
from tests.chaos.history import History

__all__ = ["report"]

#: So many violations of a kind are shown.
_SHOWN = 12


def report(history: History, verdict: Verdict) -> str:
    """What happened, what was allowed, what was violated."""
    faults = Counter(struck.fault.kind for struck in history.struck)
    sent = len({(arrival.key, arrival.attempt) for arrival in history.arrivals})
    lines = [
        f"seed     {history.seed}",
        f"faults   {faults.total()}: {_listed(faults)}",
        f"leaders  {len(history.terms)} terms",
        f"slots    {verdict.slots}: {_listed(verdict.ends)}",
        (
            f"sent     {sent} messages; {sum(body.event == 'start' for body in history.bodies)} bodies began,"
            f" {sum(effect.accepted for effect in history.effects)} effects counted,"
            f" {sum(not effect.accepted for effect in history.effects)} were refused by the fence"
        ),
    ]
    lines += [f"allowed  {count} {what}" for what, count in sorted(verdict.allowed.items())]
    for kind, count in verdict.counts.items():
        shown = [finding for finding in verdict.findings if finding.kind == kind][:_SHOWN]
        lines += [f"         {finding}" for finding in shown]
        if count > _SHOWN:
            lines.append(f"         and {count - _SHOWN} more of this kind")
    lines.append("verdict  " + ", ".join(f"{count} {kind}" for kind, count in verdict.counts.items()))
    return "\n".join(lines)


def _listed(counts: Counter[str]) -> str:
    return ", ".join(f"{count} {name}" for name, count in counts.most_common())
