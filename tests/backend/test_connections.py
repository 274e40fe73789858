"""Failed connections on real sockets are typed, and retried if nothing reached the server."""

from __future__ import annotations

import contextlib
import functools
import socket
import ssl
from pathlib import Path

import pytest

from support.backends import TRIES, Waits, http_to
from support.raw_server import Ends, RawServer, full_backlog
from support.tls import CERTIFICATE_NAME, server_context
from tito_core.backend import BackendError, BadRequestError, EngineConnectionError, EngineTimeoutError
from tito_core.backend.http.client import ConnectionPool, HttpRequest, known_authorities

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 10\r\n\r\n"


async def failing(url: str, **options: float) -> tuple[BackendError, int]:
    """Send a request that fails; its error, and how often it was tried again."""
    waits = Waits()
    http = http_to("vllm", url, **{"patience_s": TRIES[3], **options}, sleep=waits, clock=waits.clock)
    try:
        with pytest.raises(BackendError) as caught:
            await http.send(HttpRequest("/v1/models"), method="GET")
    finally:
        await http.aclose()
    assert url in str(caught.value)
    return caught.value, len(waits.seconds)


def fails_as(error: BackendError, reason: str, *, sent: bool = False) -> None:
    assert isinstance(error, EngineConnectionError)
    assert (error.reason, error.sent) == (reason, sent)


NOWHERE: list[tuple[str, str, str]] = [
    ("http://127.0.0.1:{port}", "refused", "host and port"),
    ("http://localhost:{port}", "refused", "host and port"),
    ("unix://{folder}/none.sock", "refused", "none.sock"),
    ("http://224.0.0.1:9", "unreachable", "network"),  # multicast: Linux connects to none
    ("http://no-such-host.invalid:8000", "unknown-host", "unknown host"),
]


@pytest.mark.parametrize(("url", "reason", "words"), NOWHERE)
async def test_an_address_where_nothing_listens(url: str, reason: str, words: str, tmp_path: Path) -> None:
    with socket.socket() as held:  # bound, but not listening
        held.bind(("127.0.0.1", 0))
        error, retries = await failing(url.format(port=held.getsockname()[1], folder=tmp_path))
    fails_as(error, reason)
    assert words in str(error)
    assert retries == 0


async def test_a_connection_that_never_opens() -> None:
    with full_backlog() as url:
        error, retries = await failing(url, connect_timeout_s=0.3)
    fails_as(error, "never-opened")
    assert "within 0.3 s" in str(error)
    assert "connect_timeout_s" in str(error)
    assert retries == 0


async def test_a_server_that_went_away_is_waited_for() -> None:
    """A request that never reached the server is safe to send again; an address that never answered may be wrong."""
    with contextlib.ExitStack() as running:
        server = running.enter_context(RawServer(HEAD + b'{"a": [1]}'))
        waits = Waits()

        async def sleep(seconds: float) -> None:
            await waits(seconds)
            if waits.clock() > 50:
                running.enter_context(RawServer(HEAD + b'{"a": [2]}', port=server.port))

        http = http_to("vllm", server.url, sleep=sleep, clock=waits.clock)
        get = functools.partial(http.send, HttpRequest("/v1/models"), method="GET")
        assert await get() == b'{"a": [1]}'
        running.close()
        assert await get() == b'{"a": [2]}'
        assert 50 < waits.clock() < 60
        running.close()
        waits.seconds.clear()
        http.retries.patience_s = 40.0
        with pytest.raises(EngineConnectionError) as caught:
            await get()
        assert (caught.value.reason, caught.value.reached) == ("refused", True)
        assert waits.clock() == pytest.approx(40)
        await http.aclose()


ANSWERS = {
    "nothing": b"",
    "half a status line": b"HTTP/1.1 2",
    "half the headers": HEAD[:30],
    "half the body": HEAD + b"[1",
}


@pytest.mark.parametrize("answer", ANSWERS)
@pytest.mark.parametrize(("ends", "reason"), [("reset", "reset"), ("close", "closed")])
async def test_a_connection_that_breaks_in_mid_answer(answer: str, ends: Ends, reason: str) -> None:
    with RawServer(ANSWERS[answer], ends=ends) as server:
        error, retries = await failing(server.url)
    fails_as(error, reason, sent=True)
    assert f"was {reason} before" in str(error)
    assert "log" in str(error)
    assert retries == 2
    assert len([head for head in server.heads if head.startswith(b"GET")]) == 3


@pytest.mark.parametrize("answer", ANSWERS)
async def test_a_late_answer_is_not_a_failed_connection(answer: str) -> None:
    with RawServer(ANSWERS[answer], ends="hold") as server:
        error, retries = await failing(server.url, timeout_s=0.3)
    assert isinstance(error, EngineTimeoutError)
    assert not isinstance(error, EngineConnectionError)
    assert "within 0.3 s" in str(error)
    assert "timeout_s" in str(error)
    assert retries == 0
    assert len(server.heads) == 1


async def test_a_pool_with_its_own_certificate_authority(tmp_path: Path) -> None:
    answer = HEAD.replace(b"10", b"2") + b"{}"
    with RawServer(answer, tls=server_context(tmp_path)) as server:
        trusted = ssl.create_default_context(cafile=tmp_path / "server.pem")
        http = http_to("vllm", server.url, http_transport=lambda: ConnectionPool(tls=trusted))
        assert (await http.send_once(HttpRequest("/v1/models"), method="GET")) == b"{}"
        await http.aclose()


@pytest.mark.parametrize("variable", ["SSL_CERT_FILE", "SSL_CERT_DIR"])
async def test_a_companys_authority_is_that_of_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    """OpenSSL finds a certificate in a folder by the hash of its subject."""
    with RawServer(HEAD.replace(b"10", b"2") + b"{}", tls=server_context(tmp_path)) as server:
        folder = tmp_path / "authorities"
        folder.mkdir()
        (folder / CERTIFICATE_NAME).symlink_to(tmp_path / "server.pem")
        monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "server.pem" if variable == "SSL_CERT_FILE" else "/none"))
        monkeypatch.setenv("SSL_CERT_DIR", str(folder if variable == "SSL_CERT_DIR" else "/none"))
        http = http_to("vllm", server.url)
        assert (await http.send_once(HttpRequest("/v1/models"), method="GET")) == b"{}"
        await http.aclose()


def test_certifis_authorities_are_trusted_where_the_system_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", "/none")
    monkeypatch.setenv("SSL_CERT_DIR", "/none")
    assert not ssl.create_default_context().get_ca_certs()
    assert len(known_authorities().get_ca_certs()) > 50


@pytest.mark.parametrize(("bypassed", "named"), [("", True), ("127.0.0.1", False)])
async def test_a_failed_connection_says_that_the_environments_proxy_is_not_used(
    monkeypatch: pytest.MonkeyPatch, bypassed: str, named: bool
) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    monkeypatch.setenv("no_proxy", bypassed)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    error, _ = await failing(f"http://127.0.0.1:{port}")
    fails_as(error, "refused")
    assert ("HTTP_PROXY is not used" in str(error)) == named


async def test_an_unknown_certificate(tmp_path: Path) -> None:
    with RawServer(HEAD, tls=server_context(tmp_path)) as server:
        error, retries = await failing(server.url)
    fails_as(error, "tls")
    assert "certificate" in str(error)
    assert "authority" in str(error)
    assert (retries, server.heads) == (0, [])


async def test_a_handshake_that_the_server_refuses() -> None:
    no_certificate = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    with RawServer(HEAD, tls=no_certificate) as server:
        error, retries = await failing(server.url)
    assert isinstance(error, EngineConnectionError)
    assert error.reason in ("tls", "reset")  # as OpenSSL tells its client why, or not
    assert not error.sent
    assert server.heads == []
    assert retries == 0


@pytest.mark.parametrize("answer", [b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n", b""])
async def test_https_to_an_http_port_names_the_right_scheme(answer: bytes) -> None:
    """It answers the first bytes of a handshake as servers do: with a 400, or by hanging up."""
    with RawServer(answer, reads=None) as server:
        error, retries = await failing(server.url.replace("http:", "https:"))
    assert isinstance(error, EngineConnectionError)
    assert not error.sent
    assert repr(server.url) in str(error)
    assert "plain HTTP" in str(error)
    assert (error.reason, retries) == ("tls" if answer else "reset", 0)


async def test_http_to_an_https_port_names_the_right_scheme(tmp_path: Path) -> None:
    with RawServer(HEAD, tls=server_context(tmp_path)) as server:
        error, _ = await failing(server.url.replace("https:", "http:"))
    assert f"If the server speaks TLS, use the address {server.url!r}." in str(error)
    assert server.heads == []


@pytest.mark.parametrize(
    "page",
    [
        b"<html><center>The plain HTTP request was sent to HTTPS port</center></html>",
        b"Client sent an HTTP request to an HTTPS server.\n",
    ],
)
async def test_http_to_an_https_port_that_answers_with_an_error(page: bytes) -> None:
    head = f"HTTP/1.1 400 Bad Request\r\nContent-Length: {len(page)}\r\n\r\n".encode()
    with RawServer(head + page) as server:
        error, retries = await failing(server.url)
    fails_as(error, "tls")
    assert server.url.replace("http:", "https:") in str(error)
    assert retries == 0


@pytest.mark.parametrize(
    "url",
    [
        "http://127.1",
        "http://127.1:8000",
        "http://1.2.3:9",
        "http://2130706433:9",
        "http://a..b:9",
        f"http://{'a' * 64}.example:9",
        "http://xn--:9",
        "http://host name:9",
    ],
)
def test_an_impossible_address_is_refused_at_construction(url: str) -> None:
    with pytest.raises(EngineConnectionError, match="give an address like") as caught:
        http_to("vllm", url)
    assert caught.value.reason == "address"
    assert repr(url) in str(caught.value)


@pytest.mark.parametrize(
    "url", ["http://127.0.0.1:9", "http://[::1]:9", "http://a-b.example.:9", "http://bücher.example:9"]
)
def test_a_possible_address_is_accepted(url: str) -> None:
    http_to("vllm", url)


@pytest.mark.parametrize("value", ["a\nb", "a\rb", "a\0b", "a\x7fb", "\u2028", "ä"])
async def test_an_invalid_header_is_refused_unsent(value: str) -> None:
    with RawServer(HEAD) as server:
        http = http_to("vllm", server.url)
        with pytest.raises(BadRequestError, match="X-Session-ID") as caught:
            await http.send(HttpRequest("/x", b"{}", {"X-Session-ID": value}))
        await http.aclose()
    assert repr(value) in str(caught.value)
    assert not caught.value.sent
    assert server.heads == []
