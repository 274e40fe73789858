"""An HTTP server on 127.0.0.1 under a secret path, so that no other web page or user can read the rollouts."""

from __future__ import annotations

import re
import secrets
import sys
from collections.abc import Callable
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from socket import socket

from strands_tito.viewer.page import policy
from strands_tito.viewer.site import Site
from tito_core.backend.errors import BackendError
from tito_core.store import SchemaError

HOST = "127.0.0.1"
_NUMBER = r"([1-9]\d{0,8})"
_HTML, _JSON, _PLAIN = "text/html", "application/json", "text/plain"


def new_home() -> str:
    """Return a random path, too long to guess."""
    return f"/{secrets.token_urlsafe(18)}/"


class Server(ThreadingHTTPServer):
    """Serve a site.

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
