"""Local processes that look like containers.

`Process` is `subprocess.Popen` with the part of docker-py's container that pytest-celery uses, so that its
nodes and clusters work over local processes. Each process has a session and a process group of its own and
writes to a log file, from which its lines can be read with their times.

No process outlives the test run: `stop_all` runs at exit, and a guard process kills what is left when this
process dies without having been able to.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import re
import shlex
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any
from zoneinfo import ZoneInfo

from tests.support.waits import WaitTimeout

__all__ = ["REPO", "Line", "Process", "running", "stop_all"]

REPO = Path(__file__).resolve().parents[2]

#: Celery's `[2026-10-02 03:00:00,123: INFO/Beat] …`.
_STAMP = re.compile(r"^\[(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3}): (\w+)/([^\]]+)\] ?(.*)$", re.DOTALL)

#: Reads `+pgid` and `-pgid` lines; at the end of its input, kills the groups that are left.
_GUARD = """
import os, signal, sys
signal.signal(signal.SIGINT, signal.SIG_IGN)
groups = set()
for line in sys.stdin:
    (groups.add if line[0] == "+" else groups.discard)(int(line[1:]))
for group in groups:
    try:
        os.killpg(group, signal.SIGKILL)
    except OSError:
        pass
"""

#: These go to the whole group: a worker's children must stop with it. Any other goes to the process alone.
_TO_GROUP = {signal.SIGKILL, signal.SIGSTOP, signal.SIGCONT}


class _Guard:
    """Kills the registered process groups when this process is gone, however it went.

    Linux could do that by itself (PR_SET_PDEATHSIG), but it counts the death of the *thread* that started
    the child.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._owner = 0
        self._process: subprocess.Popen[str] | None = None

    def _say(self, line: str) -> None:
        with self._lock:
            if self._process is None or self._owner != os.getpid():
                self._owner = os.getpid()
                self._process = subprocess.Popen(
                    [sys.executable, "-S", "-E", "-c", _GUARD],
                    stdin=subprocess.PIPE,
                    text=True,
                    start_new_session=True,
                )
            assert self._process.stdin is not None
            with contextlib.suppress(BrokenPipeError):
                self._process.stdin.write(line)
                self._process.stdin.flush()

    def add(self, group: int) -> None:
        self._say(f"+{group}\n")

    def remove(self, group: int) -> None:
        self._say(f"-{group}\n")

    def close(self) -> None:
        with self._lock:
            process, self._process = self._process, None
        if process is not None and self._owner == os.getpid():
            assert process.stdin is not None
            process.stdin.close()
            process.wait()


_guard = _Guard()
_running: dict[str, Process] = {}


def running() -> list[Process]:
    """The processes that were started here and not yet stopped for good, in the order of their start."""
    return list(_running.values())


def stop_all() -> None:
    """Kill every process that was started here."""
    for process in running():
        process.stop()


@atexit.register
def _at_exit() -> None:
    stop_all()
    _guard.close()


@dataclass(frozen=True)
class Line:
    """A line of a log. Lines without a stamp of their own (tracebacks) have that of the line before them."""

    t: float | None  # seconds since the Unix epoch
    level: str
    process: str
    text: str

    def __str__(self) -> str:
        return self.text


class Process:
    """A local process, with docker-py's names for what can be done to a container.

    Parameters:
        args: the command.
        name: for messages and for the log's file name.
        directory: the process's working directory; the log lies in it.
        env: added to this process's environment; a value of None takes a variable away.
    """

    def __init__(
        self,
        args: Sequence[str],
        *,
        name: str,
        directory: Path,
        env: Mapping[str, str | None] | None = None,
    ) -> None:
        self.args = list(args)
        self.name = name
        self.id = uuid.uuid4().hex
        self.directory = directory
        self.directory.mkdir(parents=True, exist_ok=True)
        self.log_path = directory / f"{name}.log"
        self.log_path.touch()
        merged = {
            **os.environ,
            "TZ": "UTC",
            "PYTHONUNBUFFERED": "1",
            "PYTHONFAULTHANDLER": "1",
            **(env or {}),
        }
        self.env = {key: value for key, value in merged.items() if value is not None}
        self.started_at = 0.0
        self._popen: subprocess.Popen[bytes] | None = None
        self._start_mark = 0
        self._reaped = True

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name} {self.status} pid={self.pid}>"

    # Life and death

    def start(self) -> None:
        """Start the process, without waiting until it is ready. It may be started again once it has ended."""
        if self._popen is not None:
            if self._popen.poll() is None:
                raise RuntimeError(f"{self.name} runs already")
            self._reap()
        self._start_mark = self.mark()
        self.started_at = time.time()
        with self.log_path.open("ab", buffering=0) as log:
            self._popen = subprocess.Popen(
                self.args,
                cwd=self.directory,
                env=self.env,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._reaped = False
        _running[self.id] = self
        _guard.add(self._popen.pid)

    @property
    def pid(self) -> int:
        """The id of the process, and of its group. 0 before the first start."""
        return self._popen.pid if self._popen else 0

    @property
    def status(self) -> str:
        """`created`, `running` (also when stopped by SIGSTOP) or `exited`."""
        if self._popen is None:
            return "created"
        return "running" if self._popen.poll() is None else "exited"

    @property
    def exit_code(self) -> int | None:
        """The exit status; the negative signal number if one ended it; None while it runs."""
        return self._popen.poll() if self._popen else None

    @property
    def attrs(self) -> dict[str, Any]:
        """What the readiness check of a container looks into."""
        return {
            "Config": {"Hostname": self.id[:12], "Env": [f"{k}={v}" for k, v in self.env.items()]},
            "HostConfig": {"PortBindings": {}},
            "NetworkSettings": {"Networks": {}, "Ports": {}},
            "State": {"Status": self.status, "Pid": self.pid, "ExitCode": self.exit_code},
        }

    def reload(self) -> None:
        """Nothing is cached."""

    def kill(self, signal: str | int | None = None) -> None:
        """Send a signal, SIGKILL by default. After SIGKILL, wait until the process is gone."""
        number = _signal_number(signal)
        if self._popen is None or self._popen.poll() is not None:
            return
        with contextlib.suppress(ProcessLookupError):
            if number in _TO_GROUP:
                os.killpg(self._popen.pid, number)
            else:
                os.kill(self._popen.pid, number)
        if number == _SIGKILL:
            self._popen.wait(10)
            self._reap()

    def terminate(self) -> None:
        """Send SIGTERM."""
        self.kill("SIGTERM")

    def freeze(self) -> None:
        """Send SIGSTOP and wait until the kernel has stopped the process."""
        self.kill("SIGSTOP")
        deadline = time.monotonic() + 2
        while self.status == "running" and self._state() not in "Tt" and time.monotonic() < deadline:
            time.sleep(0.001)

    def thaw(self) -> None:
        """Send SIGCONT."""
        self.kill("SIGCONT")

    def _state(self) -> str:
        try:
            return Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0]
        except (OSError, IndexError):
            return "T"

    def wait(self, timeout: float = 10.0) -> dict[str, Any]:
        """Wait until the process has ended; docker-py's answer. See `exit_code` for the number."""
        assert self._popen is not None, f"{self.name} was never started"
        try:
            self._popen.wait(timeout)
        except subprocess.TimeoutExpired:
            raise WaitTimeout(f"{self.name} hasn't ended within {timeout:g} s\n{self.tail()}") from None
        return {"StatusCode": self._popen.returncode, "Error": None}

    def restart(self, timeout: float = 10.0) -> None:
        """End the process (SIGTERM, SIGKILL after `timeout` seconds) and start it again."""
        if self.status == "running":
            self.terminate()
            self.thaw()
            try:
                self.wait(timeout)
            except WaitTimeout:
                self.kill()
        self.start()

    def stop(self) -> None:
        """Kill the process and all its children, for good."""
        if self._popen is not None and self._popen.poll() is None:
            self.kill()
        self._reap()
        _running.pop(self.id, None)

    def _reap(self) -> None:
        """End what the process has left behind in its group; once, since its number may be given to others."""
        if self._popen is None or self._reaped:
            return
        self._reaped = True
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._popen.pid, _SIGKILL)
        _guard.remove(self._popen.pid)

    def exec_run(self, cmd: str | Sequence[str], **_: Any) -> tuple[int, bytes]:
        """Run a command in the process's directory and environment."""
        done = subprocess.run(
            shlex.split(cmd) if isinstance(cmd, str) else list(cmd),
            cwd=self.directory,
            env=self.env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=60,
        )
        return done.returncode, done.stdout

    # The log

    def logs(self, since: int = 0) -> bytes:
        """The log, from the byte `since` (see `mark`)."""
        with self.log_path.open("rb") as log:
            log.seek(since)
            return log.read()

    def mark(self) -> int:
        """The end of the log as it is now, for `since`."""
        return self.log_path.stat().st_size

    @property
    def start_mark(self) -> int:
        """Where the log of the latest start begins."""
        return self._start_mark

    def text(self, since: int | None = None) -> str:
        """The log as text; by default since the latest start."""
        return self.logs(self._start_mark if since is None else since).decode("utf-8", "replace")

    def lines(self, since: int | None = None) -> list[Line]:
        """The log's lines with their times; by default since the latest start."""
        name = self.env.get("TZ", "UTC")
        zone = timezone.utc if name == "UTC" else ZoneInfo(name)
        last = Line(None, "", "", "")
        found = []
        for raw in self.text(since).splitlines():
            match = _STAMP.match(raw)
            if match:
                stamp, level, process, text = match.groups()
                moment = datetime.strptime(stamp, "%Y-%m-%d %H:%M:%S,%f").replace(tzinfo=zone)
                last = Line(moment.timestamp(), level, process, text)
                found.append(last)
            else:
                found.append(Line(last.t, last.level, last.process, raw))
        return found

    def find(self, pattern: str | re.Pattern[str], since: int | None = None) -> list[Line]:
        """The lines that hold the text or match the regular expression."""
        return [line for line in self.lines(since) if _matches(pattern, line.text)]

    def wait_for_log(
        self, pattern: str | re.Pattern[str], timeout: float = 10.0, since: int | None = None
    ) -> Line:
        """Wait for a line that holds the text or matches the expression, and return it.

        Looks from the byte `since` on, by default from the latest start. Fails at once when the process has
        ended without having said it.
        """
        deadline = time.monotonic() + timeout
        while True:
            exited = self.status == "exited"
            found = self.find(pattern, since)
            if found:
                return found[0]
            wanted = pattern if isinstance(pattern, str) else pattern.pattern
            if exited:
                raise WaitTimeout(
                    f"{self.name} ended with status {self.exit_code} without logging {wanted!r}\n{self.tail()}"
                )
            if time.monotonic() >= deadline:
                raise WaitTimeout(f"{self.name} didn't log {wanted!r} within {timeout:g} s\n{self.tail()}")
            time.sleep(0.02)

    def tail(self, lines: int = 40, since: int = 0) -> str:
        """The end of the log, for messages."""
        shown = self.text(since).splitlines()[-lines:]
        return "\n".join([f"--- the log of {self.name} (pid {self.pid}, {self.status}) ---", *shown])


_SIGKILL = signal.SIGKILL


def _signal_number(value: str | int | None) -> int:
    if value is None:
        return _SIGKILL
    if isinstance(value, int):
        return value
    name = value.upper()
    return int(signal.Signals[name if name.startswith("SIG") else f"SIG{name}"])


def _matches(pattern: str | re.Pattern[str], text: str) -> bool:
    return pattern in text if isinstance(pattern, str) else pattern.search(text) is not None
