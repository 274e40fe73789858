"""The server: a secret path on 127.0.0.1, for requests with its own host name only."""

from __future__ import annotations

import http.client
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from strands_tito.viewer.data import Pictures, TokenTexts
from strands_tito.viewer.rollouts import Rollouts
from strands_tito.viewer.site import HOST, Server, Site
from support.shown import REAL, data_of, real


@contextmanager
def running(rollouts: Rollouts) -> Iterator[Server]:
    with rollouts, Server(lambda home: Site(rollouts, TokenTexts(), Pictures(), home=home)) as made:
        thread = threading.Thread(target=made.serve_forever, args=(0.01,))
        thread.start()
        yield made
        made.shutdown()
        thread.join()


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with running(real("vllm")) as made:
        yield made


def send(server: Server, path: str, method: str = "GET", **headers: str) -> tuple[int, dict[str, str], bytes]:
    connection = http.client.HTTPConnection(HOST, server.server_port, timeout=30)
    try:
        connection.request(method, path, headers={name.capitalize(): value for name, value in headers.items()})
        answer = connection.getresponse()
        return answer.status, {name.lower(): value for name, value in answer.getheaders()}, answer.read()
    finally:
        connection.close()


def test_it_listens_on_this_machine_only(server: Server) -> None:
    assert server.server_address[0] == "127.0.0.1"
    assert server.url == f"http://127.0.0.1:{server.server_port}{server.home}"
    assert len(server.home) >= 24


@pytest.mark.parametrize(
    ("path", "kind"),
    [("", "text/html"), ("rollout/2", "text/html"), ("compare/1/3", "text/html"), ("facts/0", "application/json")],
)
def test_every_page_has_the_security_headers(server: Server, path: str, kind: str) -> None:
    status, headers, body = send(server, server.home + path)
    assert status == 200
    assert headers["content-type"] == f"{kind}; charset=utf-8"
    assert headers["x-content-type-options"] == "nosniff"
    assert headers["cache-control"] == "no-store"
    assert "default-src 'none'" in headers["content-security-policy"]
    assert "frame-ancestors 'none'" in headers["content-security-policy"]
    assert body


def test_pages_link_to_one_another(server: Server) -> None:
    assert data_of(send(server, server.home)[2])["home"] == server.home
    page = data_of(send(server, server.home + "rollout/2")[2])
    assert (page["number"], page["rollouts"], page["served"], page["home"]) == (2, 3, True, server.home)


def test_rows_come_in_steps(server: Server) -> None:
    found: list[Any] = []
    while rows := msgspec.json.decode(send(server, f"{server.home}facts/{len(found)}")[2])["rows"]:
        found += rows
    assert len(found) == 3


@pytest.mark.parametrize("host", ["attack.invalid", "attack.invalid:80", "127.0.0.1", "localhost:1", ""])
def test_a_foreign_host_name_is_refused(server: Server, host: str) -> None:
    status, _, body = send(server, server.home, host=host)
    assert status == 403
    assert b"<script" not in body


def test_an_unknown_home_path_is_a_404(server: Server) -> None:
    other = "y" if server.home[-2] == "x" else "x"
    for path in ("/", "/rollout/1", server.home[:-2] + other + "/", f"/{'x' * 24}/", "/%C3%A9"):
        status, _, body = send(server, path)
        assert status == 404
        assert server.home.encode() not in body


@pytest.mark.parametrize(
    "path", ["rollout/0", "rollout/4", "rollout/1/", "rollout/01", "compare/1/9", "x", "../etc", "facts/-1"]
)
def test_an_unknown_page_is_a_404(server: Server, path: str) -> None:
    assert send(server, server.home + path)[0] == 404


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS"])
def test_other_methods_are_refused(server: Server, method: str) -> None:
    assert send(server, server.home, method=method)[0] == 501


def test_a_file_damaged_later_is_an_error_on_its_page(tmp_path: Path) -> None:
    path = tmp_path / "rollouts.tito"
    path.write_bytes((REAL / "vllm.tito").read_bytes())
    with running(Rollouts([path])) as made:
        path.write_bytes(b"\0" * path.stat().st_size)
        status, _, body = send(made, made.home + "rollout/1")
    assert status == 500
    assert b"SchemaError" in body
