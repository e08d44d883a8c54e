"""Whether the broker has said something is seen on any connection, and what it says is told without passwords."""

from __future__ import annotations

import fcntl
import resource
import socket
import socketserver
import ssl
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from celery import Celery

from celery_leaderbeat.clock import Clock
from celery_leaderbeat.link import Link, _has_said_something
from tests.support.certificates import make_certificates
from tests.support.waits import wait_for

#: Above what `select` can look at.
_HIGH = 1500


@pytest.fixture
def many_files() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard <= _HIGH:
        pytest.skip(f"a process may open {hard} files at most here")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 2 * _HIGH if hard < 0 else hard), hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.usefixtures("many_files")
def test_a_process_with_many_files_open_hears_the_broker() -> None:
    low, peer = socket.socketpair()
    with low, peer, socket.socket(fileno=fcntl.fcntl(low, fcntl.F_DUPFD, _HIGH)) as sock:
        assert sock.fileno() >= _HIGH
        assert not _has_said_something(sock)
        peer.send(b"blocked")
        assert _has_said_something(sock)
        sock.recv(100)
        assert not _has_said_something(sock)
        peer.close()
        assert _has_said_something(sock), "a goodbye"


def test_what_tls_has_taken_in_already_is_heard(tmp_path: Path) -> None:
    files = make_certificates(tmp_path)
    theirs = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    theirs.load_cert_chain(files.server, files.server_key)
    ours = ssl.create_default_context(cafile=str(files.ca))
    ours.check_hostname = False
    near, far = socket.socketpair()
    near.settimeout(10)
    far.settimeout(10)

    def speak() -> None:
        with theirs.wrap_socket(far, server_side=True) as peer:
            peer.sendall(b"two frames")
            peer.recv(1)

    speaker = threading.Thread(target=speak)
    speaker.start()
    with ours.wrap_socket(near) as sock:
        wait_for(lambda: _has_said_something(sock), 10, "the first frame")
        # The tickets of TLS 1.3 come first.
        assert sock.recv(3) == b"two"
        assert _has_said_something(sock), "the second frame is in the same record"
        assert sock.recv(100) == b" frames"
        assert not _has_said_something(sock)
        sock.sendall(b".")
        speaker.join(10)


@pytest.fixture
def quoting_peer() -> Iterator[int]:
    """The port of a server that quotes every command that it gets, as Redis 5 does with those it doesn't know."""

    class Quote(socketserver.StreamRequestHandler):
        def handle(self) -> None:
            while data := self.request.recv(4096):
                words = [word for word in data.decode().split("\r\n") if word and word[0] not in "*$"]
                self.request.sendall(f"-ERR unknown command, with args: {words}\r\n".encode())

    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Quote) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield server.server_address[1]
        server.shutdown()
        thread.join()


def test_what_a_sentinel_or_a_broker_quotes_is_told_without_passwords(quoting_peer: int) -> None:
    address = f"127.0.0.1:{quoting_peer}/0"
    options = {"master_name": "m", "sentinel_kwargs": {"username": "app", "password": "hunter2-s"}}
    for url, transport, secret in (
        (f"sentinel://:hunter2-d@{address}", options, "hunter2-s"),
        (f"redis://:hunter2-d@{address}", {}, "hunter2-d"),
    ):
        app = Celery("unit", broker=url, set_as_current=False)
        app.conf.broker_transport_options = transport
        link = Link(app, 2.0, Clock())
        with pytest.raises(Exception, match=secret) as raised:
            link.ready()
        assert "'***'" in link.said(raised.value)
        assert "hunter2" not in link.said(raised.value)
        link.drop()
        app.close()
