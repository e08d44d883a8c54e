"""How the drill is shown: a live picture on a terminal, lines of text elsewhere."""

from __future__ import annotations

from collections import deque
from types import TracebackType
from typing import Protocol

from rich.console import Console, Group, RenderableType
from rich.layout import Layout
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from fire_drill.stage import LEASE_TTL, Process, Stage
from fire_drill.watch import Cell, Watch

__all__ = ["LiveView", "PlainView", "View"]

COLOURS = ("cyan", "green", "yellow", "magenta", "bright_blue", "bright_green")
#: Signs of faults that end a leadership.
HITS = "TKS"
LABEL = 17


class View(Protocol):
    """Where the drill tells its story."""

    def __enter__(self) -> View: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    def attach(self, stage: Stage, watch: Watch) -> None:
        """From now on there is something to look at."""

    def act(self, title: str, story: str) -> None:
        """A new act begins."""

    def say(self, text: str, style: str = "") -> None:
        """Something happened."""

    def mark(self, sign: str) -> None:
        """Put a sign for a fault on the time axis."""


class PlainView:
    """A line of text for each event."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._watch: Watch | None = None

    def __enter__(self) -> PlainView:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    def attach(self, stage: Stage, watch: Watch) -> None:
        self._watch = watch

    def act(self, title: str, story: str) -> None:
        self._print(f"== {title}: {story}")

    def say(self, text: str, style: str = "") -> None:
        self._print(text)

    def mark(self, sign: str) -> None: ...

    def _print(self, text: str) -> None:
        elapsed = self._watch.elapsed if self._watch else 0.0
        self._console.print(f"{elapsed:6.1f}  {text}", markup=False, highlight=False, soft_wrap=True)


class LiveView:
    """The replicas, the lease, the slots as they come, and what has happened."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._stage: Stage | None = None
        self._watch: Watch | None = None
        self._title, self._story = "", ""
        self._events: deque[tuple[float, str, str]] = deque(maxlen=200)
        self._marks: list[tuple[float, str]] = []
        self._live = Live(
            console=console,
            screen=True,
            refresh_per_second=6,
            get_renderable=self._draw,
            redirect_stderr=False,
        )

    def __enter__(self) -> LiveView:
        self._live.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._live.__exit__(kind, error, trace)

    def attach(self, stage: Stage, watch: Watch) -> None:
        self._stage, self._watch = stage, watch

    def act(self, title: str, story: str) -> None:
        self._title, self._story = title, story
        self.say(f"{title}: {story}", "bold")

    def say(self, text: str, style: str = "") -> None:
        self._events.append((self._watch.elapsed if self._watch else 0.0, text, style))

    def mark(self, sign: str) -> None:
        if self._watch:
            self._marks.append((self._watch.clock.now(), sign))

    def _draw(self) -> RenderableType:
        layout = Layout()
        replicas = len(self._stage.replicas) if self._stage else 0
        entries = len(self._watch.cells) if self._watch else 0
        layout.split_column(
            Layout(self._head(), name="act", size=3),
            Layout(self._fleet(), name="fleet", size=max(replicas, 3) + 3),
            Layout(self._strip(), name="slots", size=entries + 4),
            Layout(self._log(self._console.height - max(replicas, 3) - entries - 12), name="log"),
        )
        return layout

    def _head(self) -> Panel:
        title = Text(self._title or "Fire drill", style="bold")
        if self._story:
            title.append(f"  {self._story}", style="not bold")
        elapsed = f"{self._watch.elapsed:.0f} s" if self._watch else ""
        title.no_wrap, title.overflow = True, "ellipsis"
        return Panel(title, title="celery_leaderbeat fire drill", subtitle=elapsed, border_style="bold")

    def _colour(self, epoch: int) -> str:
        epochs = [term.epoch for term in self._watch.terms] if self._watch else []
        return COLOURS[epochs.index(epoch) % len(COLOURS)] if epoch in epochs else "white"

    def _fleet(self) -> Panel:
        table = Table(box=None, expand=True, pad_edge=False)
        for name in ("replica", "pid", "what it does (lease)", "led under epoch", "slots sent"):
            table.add_column(name, justify="right" if name in {"pid", "slots sent"} else "left", no_wrap=True)
        watch = self._watch
        if watch is None or self._stage is None:
            return Panel(table, title="replicas")
        leading = watch.terms[-1] if watch.terms and watch.lease_left else None
        for replica in list(self._stage.replicas):
            leads = leading is not None and leading.pid == replica.pid
            state, style = describe(replica, leads)
            terms = [term for term in watch.terms if term.pid == replica.pid]
            epochs = Text(" ").join(Text(str(term.epoch), style=self._colour(term.epoch)) for term in terms)
            sent = sum(
                cell.epoch in {term.epoch for term in terms} and cell.state != "returned"
                for cells in watch.cells.values()
                for cell in cells
            )
            if leads and leading is not None:
                style = f"bold {self._colour(leading.epoch)}"
                state += "  " + lease_bar(watch.lease_left)
            table.add_row(replica.name, str(replica.pid), Text(state, style=style), epochs, str(sent or ""))
        return Panel(table, title="replicas")

    def _strip(self) -> Panel:
        watch = self._watch
        if watch is None or not watch.terms:
            return Panel("", title="slots")
        now = watch.clock.now()
        width = max(self._console.width - LABEL - 4, 20)
        first = max(int(watch.terms[0].since), int(now) - width + 1)
        rows = [self._axis(first, width), self._leaders(first, int(now))]
        refused = {key for key, _, _ in watch.refusals}
        for name, cells in watch.cells.items():
            row = [Text(" ")] * width
            for cell in list(cells):
                column = int(cell.slot.timestamp()) - first
                if 0 <= column < width:
                    row[column] = self._cell(cell, cell.key in refused)
            rows.append(Text.assemble(f"{name:<{LABEL}}", *row))
        legend = Text.assemble(
            ("■", "bold"), " done (colour: epoch)  ",
            ("□", "bold"), " sent  ",
            ("·", "bold"), " due  ",
            ("✗", "bold red"), " missed  ",
            ("■", "bold red"), " a copy was refused",
            style="dim",
        )  # fmt: skip
        return Panel(Group(*rows), title="slots, one column a second", subtitle=legend)

    def _axis(self, first: int, width: int) -> Text:
        row = [" "] * width
        for moment, sign in self._marks:
            column = int(moment) - first
            if 0 <= column < width:
                row[column] = sign
        return Text.assemble(f"{'fault':<{LABEL}}", ("".join(row), "bold red"))

    def _leaders(self, first: int, now: int) -> Text:
        terms = list(self._watch.terms) if self._watch else []
        hits = [moment for moment, sign in self._marks if sign in HITS]
        row = Text(f"{'leader':<{LABEL}}")
        for second in range(first, now + 1):
            middle = second + 0.5
            term = next((term for term in reversed(terms) if term.since <= middle), None)
            if term is None or any(term.since < hit <= middle for hit in hits):
                row.append("┄", style="red")
            else:
                row.append("━", style=self._colour(term.epoch))
        return row

    def _cell(self, cell: Cell, refused: bool) -> Text:
        if cell.state == "missed":
            return Text("✗", style="bold red")
        if refused:
            return Text("■", style="bold red")
        if cell.state in {"done", "running", "retrying"}:
            return Text("■", style=self._colour(cell.epoch))
        if cell.state in {"sent", "claimed"}:
            return Text("□", style=self._colour(cell.epoch))
        return Text("·", style="dim")

    def _log(self, room: int) -> Panel:
        events = list(self._events)
        lines = [
            Text.assemble((f"{elapsed:6.1f}  ", "dim"), (text, style), no_wrap=True, overflow="ellipsis")
            for elapsed, text, style in events[-max(room, 1) :]
        ]
        return Panel(Group(*lines), title="what happened")


def describe(replica: Process, leads: bool) -> tuple[str, str]:
    """What a replica does, in a word or two, and a style."""
    code = replica.exit_code
    if code is None and replica.frozen:
        return "frozen (SIGSTOP)", "red"
    if code is None and leads:
        return "leads", "bold"
    if code is None:
        return ("stands by", "") if "Standing by" in replica.log() else ("starts", "dim")
    if replica.killed_by is not None and code < 0:
        return f"killed ({replica.killed_by.name})", "red"
    return f"left ({replica.killed_by.name if replica.killed_by else code})", "dim"


def lease_bar(left: float) -> str:
    """The lease's remaining time as a bar and a number."""
    filled = round(10 * min(left / LEASE_TTL, 1.0))
    return f"{'█' * filled}{'░' * (10 - filled)} {left:.1f} s left"
