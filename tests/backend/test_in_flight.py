"""Aborts without an event loop: their requests, connections and timeouts."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import http.server
import socket
import socketserver
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from support.backends import engine_of, http_to, request_of
from tito_conformance.testing import InProcessTransport
from tito_core.backend.http import backend as in_flight
from tito_core.backend.http.backend import InFlightRequests
from tito_core.backend.http.client import BlockingPost, HttpRequest, HttpResponse, known_authorities
from tito_sglang.backend import SGLangBackend


class Server:
    """Writes down every POST, on a port of loopback or a Unix socket."""

    def __init__(self, path: Path | None = None, *, answers: bool = True) -> None:
        self.seen: list[tuple[str, bytes, dict[str, str]]] = []
        self.over = threading.Event()
        outer = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                outer.seen.append((self.path, body, {name.lower(): value for name, value in self.headers.items()}))
                if not answers:
                    outer.over.wait()
                self.send_response(200)
                self.end_headers()

            def log_message(self, *_: Any) -> None: ...

        class Tcp(http.server.ThreadingHTTPServer):
            def handle_error(self, *_: Any) -> None:
                """As below."""

        class Unix(socketserver.ThreadingUnixStreamServer):
            daemon_threads = True

            def handle_error(self, *_: Any) -> None:
                """Nobody is there any more to whom it could answer."""

            def get_request(self) -> tuple[socket.socket, Any]:
                return self.socket.accept()[0], ("unix", 0)

        if path is None:
            self.server: Any = Tcp(("127.0.0.1", 0), Handler)
        else:
            self.server = Unix(str(path), Handler)

    @contextmanager
    def running(self) -> Iterator[Server]:
        thread = threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield self
        finally:
            self.over.set()
            self.server.shutdown()
            self.server.server_close()
            thread.join()


def threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name == "tito-abort"}


@pytest.mark.parametrize("prefix", ["", "/behind/a/proxy"])
def test_a_blocking_post_sends_the_same_request(prefix: str) -> None:
    with Server().running() as server:
        port = server.server.server_address[1]
        backend = http_to("sglang", f"http://127.0.0.1:{port}{prefix}", api_key="secret")
        backend.blocking_post(HttpRequest("/abort_request", b'{"rid":"r"}', {"X-Own": "1"})).send(5.0)
        backend.blocking_post(HttpRequest("/empty")).send(5.0)
    (path, body, headers), (_, empty, _) = server.seen
    assert (path, body, empty) == (f"{prefix}/abort_request", b'{"rid":"r"}', b"")
    assert headers["authorization"] == "Bearer secret"
    assert (headers["content-type"], headers["x-own"]) == ("application/json", "1")


def test_a_blocking_post_over_a_unix_socket(tmp_path: Path) -> None:
    path = tmp_path / "engine.sock"
    with Server(path).running() as server:
        http_to("vllm", f"unix://{path}").blocking_post(HttpRequest("/abort", b"{}")).send(5.0)
    [(where, body, headers)] = server.seen
    assert (where, body, headers["host"]) == ("/abort", b"{}", "localhost")


def test_a_blocking_post_checks_certificates_as_the_pool_does() -> None:
    call = BlockingPost("https://h:8443/p", None, "/abort", b"", {}, known_authorities)
    connection = call._connection("h", 8443, True, 2.5)
    assert isinstance(connection, http.client.HTTPSConnection)
    assert (connection.host, connection.port, connection.timeout) == ("h", 8443, 2.5)
    assert connection._context is known_authorities()
    plain = call._connection("h", None, False, 2.5)
    assert not isinstance(plain, http.client.HTTPSConnection)
    assert (plain.host, plain.port, plain.timeout) == ("h", 80, 2.5)


@pytest.mark.parametrize(
    ("root", "expected"),
    [
        ("https://h:8443/p", ("h", 8443, True, 2.5)),
        ("https://h", ("h", None, True, 2.5)),
        ("http://h:80", ("h", 80, False, 2.5)),
    ],
)
def test_a_blocking_post_goes_to_its_address(
    root: str, expected: tuple[Any, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[Any, ...]] = []

    def connection(_: BlockingPost, *where: Any) -> Any:
        seen.append(where)
        raise ConnectionRefusedError

    monkeypatch.setattr(BlockingPost, "_connection", connection)
    with pytest.raises(ConnectionRefusedError):
        BlockingPost(root, None, "/abort", b"", {}, known_authorities).send(2.5)
    assert seen == [expected]
    assert http_to("sglang", root).blocking_post(HttpRequest("/abort")).tls is known_authorities


def test_a_quiet_post_waits_for_its_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    within: list[float] = []
    monkeypatch.setattr(BlockingPost, "send", lambda _, seconds: within.append(seconds))
    in_flight._post(BlockingPost("http://h", None, "/abort", b"", {}, known_authorities), 0.5)
    assert within == [0.5]


def test_a_silent_server_is_waited_for_until_the_timeout(tmp_path: Path) -> None:
    path = tmp_path / "engine.sock"
    for server in (Server(answers=False), Server(path, answers=False)):
        with server.running():
            root = (
                "http://localhost"
                if server.server.address_family == socket.AF_UNIX
                else (f"http://127.0.0.1:{server.server.server_address[1]}")
            )
            unix = str(path) if server.server.address_family == socket.AF_UNIX else None
            with pytest.raises(TimeoutError):  # it never answers
                BlockingPost(root, unix, "/abort", b"", {}, known_authorities).send(0.1)


def test_a_generation_lost_with_its_loop_is_aborted_in_a_thread() -> None:
    with Server().running() as server:
        root = f"http://127.0.0.1:{server.server.server_address[1]}"
        running = InFlightRequests(lambda name: BlockingPost(root, None, f"/abort/{name}", b"", {}, known_authorities))
        for name in "abc":
            running.add(name)
        running.discard("b")
        running.discard("never there")
        running.abort_without_loop("a")
        for thread in threads():
            thread.join()
        assert [path for path, _, _ in server.seen] == ["/abort/a"]
        running.abort_all(time.monotonic() + 5.0)
    assert [path for path, _, _ in server.seen] == ["/abort/a", "/abort/c"]


def test_without_threads_the_abort_is_blocking(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(self: threading.Thread) -> None:
        raise RuntimeError("can't create new thread at interpreter shutdown")

    with Server().running() as server:
        root = f"http://127.0.0.1:{server.server.server_address[1]}"
        running = InFlightRequests(lambda name: BlockingPost(root, None, f"/abort/{name}", b"", {}, known_authorities))
        with monkeypatch.context() as patched:
            patched.setattr(in_flight.threading.Thread, "start", start)
            made: list[Any] = []
            patched.setattr(in_flight, "_post", lambda call, within: made.append((call.path, within)))
            running.abort_without_loop("a")
    assert made == [("/abort/a", in_flight.ABORT_WITHIN_S)]


def test_aborts_at_exit_stop_at_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[tuple[str, float]] = []
    now = [10.0]

    def post(call: BlockingPost, within: float) -> None:
        made.append((call.path, within))
        now[0] += 2.0

    monkeypatch.setattr(in_flight, "_post", post)
    monkeypatch.setattr(in_flight.time, "monotonic", lambda: now[0])
    running = InFlightRequests(lambda name: BlockingPost("http://h", None, name, b"", {}, known_authorities))
    for name in "abcd":
        running.add(name)
    running.abort_all(14.5)
    assert [within for _, within in made] == [4.5, 2.5, 0.5]


def test_backends_share_the_time_at_exit(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[float] = []
    one = InFlightRequests(lambda name: BlockingPost("http://h", None, name, b"", {}, known_authorities))
    assert one in in_flight._instances
    monkeypatch.setattr(InFlightRequests, "abort_all", lambda self, until: given.append(until))
    monkeypatch.setattr(in_flight.time, "monotonic", lambda: 100.0)
    in_flight._at_exit()
    assert set(given) == {100.0 + in_flight.ABORT_WITHIN_S}


@pytest.mark.parametrize("ends", ["by aclose", "with its loop"])
def test_an_abort_that_is_under_way_when_its_connections_end_is_made(
    ends: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A generation has no answer. Its abort has one after a while, unless its connection is closed before."""
    answered: list[str] = []
    monkeypatch.setattr(BlockingPost, "send", lambda self, timeout_s: answered.append(self.path))

    class Transport(InProcessTransport):
        async def send(self, method: str, url: str, headers: Mapping[str, str], body: Any) -> HttpResponse:
            if connected.is_set() and url.endswith("/generate"):
                waiting.set()
                await asyncio.Event().wait()
            if url.endswith("/abort_request"):
                aborting.set()
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(closed.wait(), 0.05)
                    raise aiohttp.ServerDisconnectedError
                answered.append("/abort_request")
            return await super().send(method, url, headers, body)

        async def aclose(self) -> None:
            closed.set()

    async def lose() -> None:
        await backend.connect()
        connected.set()
        task = asyncio.ensure_future(backend.generate(request_of()))
        await waiting.wait()
        task.cancel()
        await aborting.wait()
        task.cancel()
        if ends == "by aclose":
            await backend.aclose()

    backend = SGLangBackend("http://scripted", http_transport=lambda: Transport(engine_of("sglang")))
    connected, waiting, aborting, closed = (asyncio.Event() for _ in range(4))
    asyncio.run(lose())
    for thread in threading.enumerate():
        if thread.name.startswith("tito-"):  # it aborts what the loop left
            thread.join()
    assert answered == ["/abort_request"]
    assert "could not be aborted" not in caplog.text


def test_a_failed_abort_is_silent() -> None:
    in_flight._post(BlockingPost("http://127.0.0.1:1", None, "/abort", b"", {}, known_authorities), 0.5)


FORKS = """
import os, sys
from tito_core.backend.http.backend import InFlightRequests
sent = []  # no request is made: `append` returns None
requests = InFlightRequests(sent.append)
requests.add("r")
if not os.fork():
    requests.abort_all(float("inf"))
    os._exit(len(sent))
assert os.waitstatus_to_exitcode(os.wait()[1]) == 0, "the child aborted it"
requests.abort_all(float("inf"))
assert sent == ["r"], "the parent did not"
os._exit(0)
"""


def test_a_forked_process_does_not_abort_its_parents_generations() -> None:
    subprocess.run([sys.executable, "-c", FORKS], check=True)  # from 3.12 on, a process with threads may not fork
