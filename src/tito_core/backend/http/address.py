"""Where a server is and by which key it lets us in, checked where the user writes them."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from ipaddress import IPv4Address

from yarl import URL

from tito_core.backend.errors import AuthenticationError, EngineConnectionError
from tito_core.backend.typed_values import shown

API_KEY_VARIABLE = "TITO_API_KEY"
_LABEL = re.compile(r"[A-Za-z0-9_-]{1,63}")
_UNIX = "unix://"


@dataclass(frozen=True, slots=True)
class Address:
    """Where a server listens.

    Attributes:
        shown: What the user wrote, without a slash at its end.
        root: What requests' paths are put after, an http(s) address.
        socket: Path of a Unix socket, or None for a host and port.
    """

    shown: str
    root: str
    socket: str | None = None

    @classmethod
    def of(cls, base_url: str, *, backend: str) -> Address:
        """Check an address: "http://host:8000", "https://host/prefix", or "unix:///run/server.sock".

        Raises:
            EngineConnectionError: It is none of these.
        """
        given = base_url.strip() if isinstance(base_url, str) else base_url
        if isinstance(given, str) and given.startswith(_UNIX):
            path = given.removeprefix(_UNIX)
            if not path.startswith("/") or path.endswith("/") or "\0" in path:
                raise EngineConnectionError(
                    f"{base_url!r} names no Unix socket: give its whole path, like 'unix:///run/server.sock'.",
                    backend=backend,
                )
            return cls(given, "http://localhost", path)
        root = server_address(base_url, backend=backend)
        return cls(root, root)


def server_address(base_url: str, *, backend: str) -> str:
    """Check a server's address and give it without a slash at its end.

    Raises:
        EngineConnectionError: No http(s) address, or one that holds more than scheme, host, port and a path prefix.
    """
    if not isinstance(base_url, str):
        raise _no_address(f"{shown(base_url)} is no server address", backend)
    given = base_url.strip()
    if not given.isprintable():
        raise _no_address(f"{base_url!r} is no server address (it holds a character that cannot be printed)", backend)
    try:
        url = URL(given)  # as aiohttp will read it
        host = url.host  # which decodes an international name, and may find that it is none
    except (ValueError, UnicodeError) as error:
        raise _no_address(f"{base_url!r} is no server address ({error})", backend) from None
    if "@" in url.raw_authority:  # not shown: it is a secret
        raise _no_address("The server address holds a user name or password; give the key as api_key", backend)
    if url.scheme not in ("http", "https") or not host or not url.raw_host:
        raise _no_address(f"{base_url!r} is no server address", backend)
    if problem := _host_problem(url.raw_host):
        raise _no_address(f"{base_url!r} is no server address ({problem})", backend)
    if url.port == 0:
        raise _no_address(f"{base_url!r} has no port between 1 and 65535", backend)
    if url.query_string or url.fragment:
        raise _no_address(f"{base_url!r} holds a query or a fragment", backend)
    address = str(url).rstrip("/")
    if address.endswith("/v1"):
        raise _no_address(f"{base_url!r} ends in /v1, which is not the server's root", backend)
    return address


def _host_problem(host: str) -> str | None:
    """Return why no connection to a host can be made, or None."""
    if host.replace(".", "").isdigit():  # the C library reads "127.1", and what sends our requests does not
        try:
            IPv4Address(host)
        except ValueError:
            return f"{host} is not an IPv4 address of four numbers, like 127.0.0.1"
    elif ":" not in host and not all(map(_LABEL.fullmatch, host.removesuffix(".").split("."))):
        return "each part of a host's name has 1 to 63 letters, digits and hyphens"
    return None


def _no_address(problem: str, backend: str) -> EngineConnectionError:
    error = EngineConnectionError(f"{problem}: give an address like 'http://localhost:8000'.", backend=backend)
    error.reason = "address"
    return error


def api_key(given: str | None, *, backend: str) -> str | None:
    """Return the key: the argument, else the environment variable TITO_API_KEY, else None. Never shown.

    Raises:
        AuthenticationError: It holds what no HTTP header can.
    """
    key = (given if given is not None else os.environ.get(API_KEY_VARIABLE, "")).strip()
    if not (key.isascii() and key.isprintable()):
        raise AuthenticationError(
            "The API key holds characters that no HTTP header can: check api_key or TITO_API_KEY.", backend=backend
        )
    return key or None
