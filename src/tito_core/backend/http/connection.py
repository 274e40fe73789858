"""How to reach a server: its address, keys, headers, timeouts and limits, all checked."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from ipaddress import IPv4Address
from urllib.parse import quote, urlsplit

from tito_core.backend.errors import AuthenticationError, EngineConnectionError, keep_secret
from tito_core.backend.retries import PATIENCE_S, TIMEOUT_S
from tito_core.backend.values import InvalidValueError, at_least, positive_seconds, seconds_or_zero, short_repr

CONNECT_TIMEOUT_S = 5.0
"""Default of `connect_timeout_s`: the longest wait for a connection, in seconds."""
API_KEY_VARIABLE = "TITO_API_KEY"
_LABEL = re.compile(r"[A-Za-z0-9_-]{1,63}")
_HEADER = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]+")
_UNIX = "unix://"
_IN_PATHS = "/%:@!$&'()*+,;=~"
"""Characters of a path that are sent as they are."""
LONGEST_SOCKET = 103 if sys.platform == "darwin" else 107
"""Longest path of a Unix socket, in bytes (`sun_path` of the system, without its end)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Connection:
    """How to reach one server. `Connection.to` checks what users give.

    Attributes:
        address: Where it listens.
        api_key: Sent as a bearer token, or None. Never shown.
        admin_api_key: Sent instead with aborts, pauses and new weights. Never shown.
        headers: Sent with every request, such as {"X-API-Key": "..."} for a gateway. Values are never shown.
        timeout_s: Longest wait for a whole response, in seconds.
        connect_timeout_s: Longest wait for a connection, in seconds.
        max_connections: Maximum number of connections per event loop; further requests wait. 0 for no limit.
        patience_s: How long a request waits for a server that is away or busy, in seconds; see `Retries`.
    """

    address: Address
    api_key: str | None = field(default=None, repr=False)
    admin_api_key: str | None = field(default=None, repr=False)
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    timeout_s: float = TIMEOUT_S
    connect_timeout_s: float = CONNECT_TIMEOUT_S
    max_connections: int = 0
    patience_s: float = PATIENCE_S

    @classmethod
    def to(
        cls,
        base_url: str,
        *,
        backend: str,
        api_key: str | None = None,
        admin_api_key: str | None = None,
        headers: Mapping[str, str] | None = None,
        timeout_s: float = TIMEOUT_S,
        connect_timeout_s: float = CONNECT_TIMEOUT_S,
        max_connections: int = 0,
        patience_s: float = PATIENCE_S,
    ) -> Connection:
        """Check a user's options; `backend` is the name for errors.

        `api_key` is that of the environment variable TITO_API_KEY when None, and `admin_api_key` is `api_key` then.

        Raises:
            EngineConnectionError: The address has another form than those of `Address.of`.
            AuthenticationError: A key cannot be sent.
            InvalidValueError: Another value is not allowed.
        """
        address, key = Address.of(base_url, backend=backend), checked_key(api_key, backend=backend)
        longest = positive_seconds("timeout_s", timeout_s)
        return cls(
            address=address,
            api_key=key,
            admin_api_key=checked_key(admin_api_key, backend=backend) if admin_api_key else key,
            headers=checked_headers(headers, backend=backend),
            timeout_s=longest,
            connect_timeout_s=min(positive_seconds("connect_timeout_s", connect_timeout_s), longest),
            max_connections=at_least("max_connections", max_connections, 0),
            patience_s=seconds_or_zero("patience_s", patience_s),
        )


@dataclass(frozen=True, slots=True)
class Address:
    """Where a server listens.

    Attributes:
        shown: The address for errors, without a slash at its end.
        root: http(s) address that paths of requests are appended to.
        socket: Path of a Unix socket, or None for a host and port.
    """

    shown: str
    root: str
    socket: str | None = None

    @classmethod
    def of(cls, base_url: str, *, backend: str) -> Address:
        """Check an address: "http://host:8000", "https://host/prefix", or "unix:///run/server.sock".

        Raises:
            EngineConnectionError: The address has another form.
        """
        given = base_url.strip() if isinstance(base_url, str) else base_url
        if isinstance(given, str) and given.startswith(_UNIX):
            path = given.removeprefix(_UNIX)
            if not path.startswith("/") or path.endswith("/") or "\0" in path:
                raise EngineConnectionError(
                    f"{base_url!r} is not a Unix socket: give its absolute path, like 'unix:///run/server.sock'.",
                    backend=backend,
                )
            if (length := len(os.fsencode(path))) > LONGEST_SOCKET:
                error = EngineConnectionError(
                    f"The path of the Unix socket {path!r} is too long: it has {length} bytes, and the system allows "
                    f"{LONGEST_SOCKET}. Move the socket, or make a symbolic link to its folder with a shorter path.",
                    backend=backend,
                )
                error.reason = "address"
                raise error
            return cls(given, "http://localhost", path)
        root = server_address(base_url, backend=backend)
        return cls(root, root)


def server_address(base_url: str, *, backend: str) -> str:
    """Check a server's address; return it without a slash at its end.

    Raises:
        EngineConnectionError: Not an http(s) address of scheme, host, optional port and optional path prefix.
    """
    if not isinstance(base_url, str):
        raise _invalid_address(f"{short_repr(base_url)} is not a server address", backend)
    given = base_url.strip()
    if not given.isprintable():
        raise _invalid_address(
            f"{base_url!r} is not a server address (it contains a character that is not printable)", backend
        )
    try:
        url = urlsplit(given)
        host, port = url.hostname or "", url.port
        host.encode("idna").decode("idna")  # an international name may be invalid
    except ValueError as error:
        why = f"{str(error)[:1].lower()}{str(error)[1:]}"
        raise _invalid_address(f"{base_url!r} is not a server address ({why})", backend) from None
    if "@" in url.netloc:  # not shown, as it is a secret
        raise _invalid_address("The server address contains a user name or password; pass the key as api_key", backend)
    if url.query or url.fragment:  # not shown either
        raise _invalid_address("The server address contains a query or a fragment; pass a key as api_key", backend)
    if url.scheme not in ("http", "https") or not host:
        raise _invalid_address(f"{base_url!r} is not a server address", backend)
    if problem := _host_problem(host):
        raise _invalid_address(f"{base_url!r} is not a server address ({problem})", backend)
    if port == 0:
        raise _invalid_address(f"{base_url!r} has no port between 1 and 65535", backend)
    where = f"[{host}]" if ":" in host else host
    if port not in (None, 443 if url.scheme == "https" else 80):
        where = f"{where}:{port}"
    address = f"{url.scheme}://{where}{quote(url.path, safe=_IN_PATHS)}".rstrip("/")
    if address.endswith("/v1"):
        raise _invalid_address(f"{base_url!r} ends in /v1, which is not the server's root", backend)
    return address


def _host_problem(host: str) -> str | None:
    """Return why a host name, as text, is invalid, or None."""
    if host.replace(".", "").isdigit():  # "127.1" is valid for the C library, but not for aiohttp
        try:
            IPv4Address(host)
        except ValueError:
            return f"{host} is not an IPv4 address of four numbers, like 127.0.0.1"
    elif ":" not in host and not all(map(_LABEL.fullmatch, _ascii(host).removesuffix(".").split("."))):
        return "each part of a host name must have 1 to 63 letters, digits, hyphens or underscores"
    return None


def _ascii(host: str) -> str:
    return host.encode("idna").decode("ascii")


def _invalid_address(problem: str, backend: str) -> EngineConnectionError:
    error = EngineConnectionError(f"{problem}: give an address like 'http://localhost:8000'.", backend=backend)
    error.reason = "address"
    return error


OWN_HEADERS = frozenset(
    (
        *("accept-encoding", "authorization", "connection", "content-encoding", "content-length", "content-type"),
        *("host", "transfer-encoding", "x-request-id", "x-session-id", "x-smg-routing-key"),
    )
)
"""Headers that the client sets itself, in lower case."""


def checked_headers(given: Mapping[str, str] | None, *, backend: str) -> dict[str, str]:
    """Return the headers that a gateway wants, such as {"X-API-Key": "..."}. Errors hide their values.

    Raises:
        InvalidValueError: A name is not that of a header or is one of `OWN_HEADERS`, or a value cannot be sent.
    """
    for name, value in (given or {}).items():
        if not isinstance(name, str) or not _HEADER.fullmatch(name) or name.lower() in OWN_HEADERS:
            raise InvalidValueError(
                f"headers must not contain {short_repr(name)}: the {backend} client sets it itself, or it is not a "
                "header's name. Pass a bearer token as api_key."
            )
        if not (isinstance(value, str) and value.isascii() and value.isprintable()):
            raise InvalidValueError(f"The value of {name!r} in headers must be a string of printable ASCII.")
        keep_secret(value)
    return dict(given or {})


def checked_key(given: str | None, *, backend: str) -> str | None:
    """Return the API key: the argument, else the environment variable TITO_API_KEY, else None. Errors hide it.

    Raises:
        AuthenticationError: It contains characters that are not allowed in an HTTP header.
    """
    key = (given if given is not None else os.environ.get(API_KEY_VARIABLE, "")).strip()
    if not (key.isascii() and key.isprintable()):
        raise AuthenticationError(
            "The API key contains characters that are not allowed in an HTTP header: check api_key or TITO_API_KEY.",
            backend=backend,
        )
    if key:
        keep_secret(key)
    return key or None
