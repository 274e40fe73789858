"""The pages of rollouts (the table of all, one rollout, a comparison of two), and the local server that sends them."""

from __future__ import annotations

import base64
import hashlib
import re
import secrets
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import cache
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.resources import files
from socket import socket
from typing import Any

import msgspec
from jinja2 import Template

from strands_tito.inspect.verify import Rescored, rescored_at
from strands_tito.viewer.data import Data, Evidence, Pictures, TokenTexts, ledger_data
from strands_tito.viewer.rollouts import INDEXED, READ, Rollouts, read_rows
from tito_core.backend.errors import BackendError
from tito_core.ledger.ledger import Ledger
from tito_core.store import SchemaError

HOST = "127.0.0.1"
_SCRIPTS = ("elements.js", "columns.js", "scales.js", "path.js", "tokens.js", "detail.js", "ribbon.js", "tree.js")
_VIEWS = ("rollout.js", "compare.js", "charts.js", "collection.js", "main.js")
_ESCAPED = ((b"<", b"\\u003c"), (b">", b"\\u003e"), (b"&", b"\\u0026"))
"""In JSON these characters occur in strings only. Escaped, no string can end the script element around it."""
_STEP_S = 0.2
"""Longest time that one request for table rows reads ledgers, in seconds."""
_NUMBER = r"([1-9]\d{0,8})"
_HTML, _JSON, _PLAIN = "text/html", "application/json", "text/plain"


def page(view: str, data: Any, *, is_served: bool = False) -> bytes:
    """Return a page.

    Args:
        view: "rollout", "compare" or "collection".
        data: The view's data, which must encode to JSON.
        is_served: Whether the page may request more data from its own server.
    """
    payload = as_inert_json({"view": view, "served": is_served, **data}).decode()
    template, parts = _parts()
    return template.render(**parts, policy=policy(is_served), data=payload).encode()


def as_inert_json(value: Any) -> bytes:
    """Return JSON in which `<`, `>` and `&` are escaped."""
    encoded = msgspec.json.encode(value)
    for character, escaped in _ESCAPED:
        encoded = encoded.replace(character, escaped)
    return encoded


@cache
def policy(is_served: bool) -> str:
    """Return the content security policy: the page's own script and style by hash, and `data:` images."""
    _, parts = _parts()
    rules = [
        "default-src 'none'",
        f"script-src '{_hash(parts['script'])}'",
        f"style-src '{_hash(parts['style'])}'",
        "img-src data:",
        *(["connect-src 'self'"] if is_served else []),
        "base-uri 'none'",
        "form-action 'none'",
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
    ]
    return "; ".join(rules)


@cache
def _parts() -> tuple[Template, Mapping[str, str]]:
    """Return the page's template, and its style and script."""
    folder = files(__package__) / "static"
    style = (folder / "style.css").read_text("utf-8")
    script = "\n".join((folder / name).read_text("utf-8") for name in (*_SCRIPTS, *_VIEWS))
    return Template((folder / "page.html").read_text("utf-8"), keep_trailing_newline=True), {
        "style": style,
        "script": script,
    }


def _hash(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"


class Site:
    """Makes pages on request, one at a time because tokenizers are not thread-safe.

    Args:
        rollouts: The rollouts to show.
        texts: Text of their tokens.
        pictures: Images of their prompts.
        rescoring: Backend and URL of a server that re-scores, or None.
        home: Path under which the first page is served; empty for pages in files.
    """

    def __init__(
        self,
        rollouts: Rollouts,
        texts: TokenTexts,
        pictures: Pictures,
        rescoring: tuple[str, str] | None = None,
        home: str = "",
    ) -> None:
        self._rollouts = rollouts
        self._texts = texts
        self._pictures = pictures
        self._rescoring = rescoring
        self._home = home
        self._lock = threading.Lock()

    def warm(self) -> None:
        """Start to load the first rollout's tokenizer in a thread, because loading takes seconds."""
        with suppress(IndexError, SchemaError):  # the rollout's page reports the error
            name = self._rollouts.load(1).header.tokenizer
            threading.Thread(target=self._load_tokenizer, args=(name,), daemon=True).start()

    def collection(self) -> bytes:
        """Return the page with the table of all rollouts."""
        self._rollouts.refresh()
        rows = self._rollouts.index_rows()
        data = {"title": self._rollouts.title, "home": self._home, "columns": INDEXED, "rows": rows}
        return self._page("collection", data)

    def rollout(self, number: int) -> bytes:
        """Return the page of one rollout.

        Raises:
            IndexError: Unknown number.
            SchemaError: Its ledger cannot be read.
        """
        with self._lock:
            data = self._data(number)
        return self._page("rollout", data | {"home": self._home, "rollouts": len(self._rollouts)})

    def comparison(self, left: int, right: int) -> bytes:
        """Return the page that compares two rollouts.

        Raises:
            IndexError: Unknown number.
            SchemaError: A ledger cannot be read.
        """
        with self._lock:
            sides = [self._data(number) for number in (left, right)]
        return self._page("compare", {"title": f"Rollouts {left} and {right}", "home": self._home, "sides": sides})

    def rows(self, start: int) -> bytes:
        """Return table rows as JSON from rollout `start` (counted from 0), as many as `_STEP_S` allows."""
        until = time.monotonic() + _STEP_S
        with self._lock:
            rows = read_rows(self._rollouts, start, self._texts, lambda: time.monotonic() > until)
        return as_inert_json({"columns": READ, "rows": rows})

    def _load_tokenizer(self, tokenizer: str | None) -> None:
        with self._lock:
            self._texts.named(tokenizer)

    def _page(self, view: str, data: Data) -> bytes:
        return page(view, data, is_served=bool(self._home))

    def _data(self, number: int) -> Data:
        ledger = self._rollouts.load(number)
        evidence = Evidence(
            self._texts.named(ledger.header.tokenizer), self._rescored(ledger), self._pictures.urls(ledger)
        )
        return ledger_data(ledger, evidence) | {"title": self._rollouts.name(number), "number": number}

    def _rescored(self, ledger: Ledger) -> Rescored | None:
        return rescored_at(ledger, *self._rescoring) if self._rescoring is not None else None


def new_home() -> str:
    """Return a random path, too long to guess."""
    return f"/{secrets.token_urlsafe(18)}/"


class Server(ThreadingHTTPServer):
    """Serve a site under a secret path, so that no other web page or user of the machine can read the rollouts.

    Args:
        make_site: Makes the site, given the path of its first page.
        port: Port on 127.0.0.1; 0 for a free one.

    Raises:
        OSError: The port is taken.
    """

    daemon_threads = True

    def __init__(self, make_site: Callable[[str], Site], port: int = 0) -> None:
        super().__init__((HOST, port), _Handler)
        self.home = new_home()
        self.site = make_site(self.home)

    def handle_error(self, request: socket | tuple[bytes, socket], client_address: object) -> None:
        """Ignore clients that disconnected; print any other error."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)

    @property
    def url(self) -> str:
        """Address of the first page."""
        return f"http://{HOST}:{self.server_port}{self.home}"


class _Handler(BaseHTTPRequestHandler):
    server: Server
    protocol_version = "HTTP/1.1"
    server_version = "tito"
    sys_version = ""
    timeout = 60

    def do_GET(self) -> None:
        """Send a page. A foreign `Host` is refused: it may be another site's name that resolves to this machine."""
        if self.headers.get("Host") not in (
            f"{HOST}:{self.server.server_port}",
            f"localhost:{self.server.server_port}",
        ):
            self._send(HTTPStatus.FORBIDDEN, _PLAIN, b"Wrong host. Open the address that `tito view` printed.\n")
            return
        path = self.path.partition("?")[0]
        if not secrets.compare_digest(path[: len(self.server.home)].encode(), self.server.home.encode()):
            self._send(HTTPStatus.NOT_FOUND, _PLAIN, b"Open the address that `tito view` printed.\n")
            return
        try:
            response = route(self.server.site, path[len(self.server.home) :])
        except IndexError as error:
            response = HTTPStatus.NOT_FOUND, _PLAIN, f"{error}\n".encode()
        except (SchemaError, BackendError, OSError) as error:
            response = HTTPStatus.INTERNAL_SERVER_ERROR, _PLAIN, f"{type(error).__name__}: {error}\n".encode()
        self._send(*response)

    def _send(self, status: HTTPStatus, kind: str, body: bytes) -> None:
        self.send_response(status)
        headers = {
            "Content-Type": f"{kind}; charset=utf-8",
            "Content-Length": str(len(body)),
            "Content-Security-Policy": f"{policy(True)}; frame-ancestors 'none'",
            "X-Content-Type-Options": "nosniff",
            "Referrer-Policy": "no-referrer",
            "Cross-Origin-Resource-Policy": "same-origin",
            "Cross-Origin-Opener-Policy": "same-origin",
            "Cache-Control": "no-store",
        }
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing, so that the terminal shows only the address."""


def route(site: Site, path: str) -> tuple[HTTPStatus, str, bytes]:
    """Return the status, content type and body for a path below the home path.

    Raises:
        IndexError: Unknown page or rollout.
    """
    if path == "":
        return HTTPStatus.OK, _HTML, site.collection()
    if found := re.fullmatch(f"rollout/{_NUMBER}", path):
        return HTTPStatus.OK, _HTML, site.rollout(int(found[1]))
    if found := re.fullmatch(f"compare/{_NUMBER}/{_NUMBER}", path):
        return HTTPStatus.OK, _HTML, site.comparison(int(found[1]), int(found[2]))
    if found := re.fullmatch(r"facts/(\d{1,9})", path):
        return HTTPStatus.OK, _JSON, site.rows(int(found[1]))
    raise IndexError("Unknown page.")
