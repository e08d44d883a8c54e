"""Leadership, faults and slots over time, as SVG. Pure: text out of values.

A lane for each beat: who led when, under which epoch, and what befell it. Narrower lanes for the ledger and the
workers. Below, a row for each entry, with a tick for each of its slots, coloured by what became of it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from html import escape

from celery_leaderbeat.tick import parse_tick_key
from tests.chaos.checker import Verdict
from tests.chaos.history import History
from tests.chaos.nemesis import Struck
from tests.chaos.plan import processes_of

__all__ = ["draw"]

_FONT = "font-family='system-ui, sans-serif'"
_LEFT, _RIGHT, _TOP, _WIDTH = 190, 24, 64, 1400
_BEAT, _NARROW, _ROW, _GAP = 34, 16, 11, 14

_LEADS = ("#2f6fb5", "#3f8f5c", "#8a5aa8", "#b5772f", "#4f8f8f")
#: Kind -> colour, and how much of the lane's height it takes.
_FAULTS = {
    "kill": "#c62828",
    "pause": "#ef8e2c",
    "redis pause": "#ef8e2c",
    "freeze": "#8e63c7",
    "cut": "#5e3aa8",
    "one-way cut": "#b48be0",
    "delay": "#8fb7dd",
    "redis restart": "#c62828",
    "failover": "#c62828",
    "flush": "#111111",
    "clock step": "#00897b",
    "rolling deploy": "#9e9d24",
}
#: End -> colour and words, in the order of the legend.
_ENDS = {
    "done": ("#58a55c", "done"),
    "begun": ("#7b52ab", "begun, its worker was struck"),
    "sent": ("#2b7cd3", "sent, struck on its way"),
    "missed": ("#e8a317", "missed, with a reason"),
    "skipped": ("#a8a8a8", "skipped, with a reason"),
    "nothing": ("#d50000", "no trace"),
}
_BAD = "#d50000"


def draw(history: History, verdict: Verdict) -> str:
    """The drawing of a run."""
    return "\n".join(_Canvas(history, verdict).lines()) + "\n"


class _Canvas:
    def __init__(self, history: History, verdict: Verdict) -> None:
        self.history, self.verdict = history, verdict
        self.began, self.ended = history.began, history.ended
        beats = sorted({life.name for life in history.lives if life.name.startswith("beat")})
        workers = sorted({life.name for life in history.lives if life.name.startswith("worker")})
        self.lanes: dict[str, tuple[float, float]] = {}
        y: float = _TOP
        for name, height in (
            *((beat, _BEAT) for beat in beats),
            ("ledger", _NARROW),
            *((worker, _NARROW) for worker in workers),
        ):
            self.lanes[name] = (y, height)
            y += height + 4
        self.beats = beats
        self.rows_top = y + _GAP
        self.rows: dict[str, float] = {}
        for number, name in enumerate(sorted({parse_tick_key(key)[0] for key in verdict.end_of})):
            self.rows[name] = self.rows_top + number * _ROW
        self.bottom = self.rows_top + len(self.rows) * _ROW + 6
        self.height = self.bottom + 76

    def x(self, t: float) -> float:
        """Where a time is."""
        share = (t - self.began) / max(self.ended - self.began, 1e-9)
        return _LEFT + min(max(share, 0.0), 1.0) * _WIDTH

    def lines(self) -> Iterator[str]:
        width = _LEFT + _WIDTH + _RIGHT
        yield (
            f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {width} {self.height:.0f}' width='{width}'"
            f" height='{self.height:.0f}' {_FONT} font-size='11' fill='#333'>"
        )
        yield f"<rect width='{width}' height='{self.height:.0f}' fill='#fff'/>"
        yield from self._heading()
        yield from self._axis()
        for name, (y, height) in self.lanes.items():
            yield _text(_LEFT - 8, y + height / 2 + 4, name, anchor="end")
            yield _rect(_LEFT, y, _WIDTH, height, "#f1f1ee")
        yield from self._leadership()
        yield from self._faults()
        yield from self._slots()
        yield from self._legend()
        yield "</svg>"

    def _heading(self) -> Iterator[str]:
        verdict = self.verdict
        title = f"{len(self.history.struck)} faults, {verdict.slots} slots, seed {self.history.seed}"
        yield f"<text x='{_LEFT}' y='24' font-size='16' font-weight='600'>{title}</text>"
        found = ", ".join(f"{count} {kind}" for kind, count in verdict.counts.items() if kind != "harness")
        colour = "#2e7d32" if verdict.sound else _BAD
        yield f"<text x='{_LEFT}' y='42' fill='{colour}'>{escape(found)}</text>"

    def _axis(self) -> Iterator[str]:
        length = self.ended - self.began
        step = next((step for step in (5, 10, 15, 30, 60, 120, 300, 600) if length / step <= 16), 1800)
        for second in range(0, int(length) + 1, step):
            x = self.x(self.began + second)
            yield (
                f"<path d='M{x:.1f} {_TOP - 6}V{self.bottom:.0f}' stroke='#ddd' stroke-width='1' fill='none'/>"
            )
            yield _text(x, _TOP - 10, f"{second // 60}:{second % 60:02}", anchor="middle", fill="#888")

    def _leadership(self) -> Iterator[str]:
        for term in self.history.terms:
            if term.beat not in self.lanes or term.until < self.began:
                continue
            y, height = self.lanes[term.beat]
            colour = _LEADS[self.beats.index(term.beat) % len(_LEADS)]
            x, end = self.x(term.since), self.x(term.until)
            title = f"{term.beat} leads under epoch {term.epoch} for {term.until - term.since:.1f} s"
            yield _rect(x, y + 1, max(end - x, 1.0), height - 12, colour, title)
            if end - x > 40:
                # Epochs are Unix seconds at least: the last digits tell them apart.
                yield _text(x + 4, y + 15, f"…{term.epoch % 10_000:04}", fill="#fff", size=10)

    def _faults(self) -> Iterator[str]:
        for struck in sorted(self.history.struck, key=lambda each: each.fault.kind == "kill"):
            for name in processes_of(struck.fault.target, self.beats):
                if name in self.lanes:
                    yield self._fault(struck, *self.lanes[name])

    def _fault(self, struck: Struck, y: float, height: float) -> str:
        fault = struck.fault
        x = self.x(struck.begun)
        width = max(self.x(struck.ended) - x, 2.5)
        # Beats' lanes show who leads; faults go below that.
        top, tall = (y + height - 10, 8.0) if height == _BEAT else (y + 2, height - 4)
        colour = _FAULTS.get(fault.kind, "#444")
        return _rect(x, top, width, tall, colour, str(fault).strip())

    def _slots(self) -> Iterator[str]:
        for name, y in self.rows.items():
            yield _text(_LEFT - 8, y + 8.5, name, anchor="end", size=9, fill="#666")
        # One path for each colour keeps thousands of slots small.
        ticks: defaultdict[str, list[str]] = defaultdict(list)
        for key, end in sorted(self.verdict.end_of.items()):
            name, slot = parse_tick_key(key)
            ticks[end].append(f"M{self.x(slot.timestamp()):.1f} {self.rows[name] + 1:.0f}v8")
        for end, (colour, _) in _ENDS.items():
            if ticks[end]:
                yield f"<path d='{''.join(ticks[end])}' stroke='{colour}' stroke-width='1.6' fill='none'/>"
        for finding in self.verdict.findings:
            name, at, slot_text = finding.key.rpartition("@")
            if at and slot_text and name in self.rows:
                x, y = self.x(parse_tick_key(finding.key)[1].timestamp()), self.rows[name] + 5
                yield (
                    f"<circle cx='{x:.1f}' cy='{y:.1f}' r='6' fill='none' stroke='{_BAD}' stroke-width='2'>"
                    f"<title>{escape(str(finding))}</title></circle>"
                )

    def _legend(self) -> Iterator[str]:
        kinds = {struck.fault.kind for struck in self.history.struck}
        y = self.bottom + 24
        faults = [(_FAULTS[kind], kind) for kind in _FAULTS if kind in kinds]
        yield from _key(y, "faults", faults)
        counts = self.verdict.ends
        ends = [(colour, f"{counts[end]} {words}") for end, (colour, words) in _ENDS.items() if counts[end]]
        yield from _key(y + 24, "slots", ends)


def _key(y: float, heading: str, items: Iterable[tuple[str, str]]) -> Iterator[str]:
    yield _text(_LEFT - 8, y, heading, anchor="end", fill="#888")
    x: float = _LEFT
    for colour, words in items:
        yield _rect(x, y - 9, 10, 10, colour)
        yield _text(x + 15, y, words)
        x += 15 + 6.2 * len(words) + 22


def _rect(x: float, y: float, width: float, height: float, colour: str, title: str = "") -> str:
    shape = f"<rect x='{x:.1f}' y='{y:.1f}' width='{width:.1f}' height='{height:.1f}' fill='{colour}'"
    return f"{shape}><title>{escape(title)}</title></rect>" if title else f"{shape}/>"


def _text(
    x: float, y: float, words: str, *, anchor: str = "start", size: int = 11, fill: str = "#333"
) -> str:
    return (
        f"<text x='{x:.1f}' y='{y:.1f}' text-anchor='{anchor}' font-size='{size}' fill='{fill}'>"
        f"{escape(words)}</text>"
    )
