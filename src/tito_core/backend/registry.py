"""Backends by name, through the entry-point group `tito.backends`: a third party's is found exactly as ours are."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib.metadata import entry_points
from typing import Any

from tito_core.backend.errors import UnknownBackendError
from tito_core.backend.protocol import Backend
from tito_core.backend.replicas import replicas_of
from tito_core.backend.retries import Retries

ENTRY_POINT_GROUP = "tito.backends"


def installed_backends() -> list[str]:
    """List the names of the installed backends."""
    return sorted({point.name for point in entry_points(group=ENTRY_POINT_GROUP)})


def create_backend(name: str, base_url: str | Sequence[str], **options: Any) -> Backend:
    """Build the backend called `name`; of several addresses one that spreads its requests over them.

    Args:
        name: "vllm", "sglang", or what another package installs.
        base_url: Address of the server, such as "http://localhost:8000" or "unix:///run/vllm.sock", or a list of them.
        **options: Passed to the backend: `model`, `api_key`, `timeout_s`, `connect_timeout_s`,
            `max_connections`, `max_attempts`.

    Raises:
        UnknownBackendError: No such backend; the message lists those installed.
        ValueError: A list of addresses is empty, or has one twice.
    """
    for point in entry_points(group=ENTRY_POINT_GROUP):
        if point.name == name:
            factory: Callable[..., Backend] = point.load()
            return factory(base_url, **options) if isinstance(base_url, str) else _several(factory, base_url, options)
    raise UnknownBackendError(f"There is no backend {name!r}. Installed backends: {', '.join(installed_backends())}.")


def _several(factory: Callable[..., Backend], addresses: Sequence[str], options: dict[str, Any]) -> Backend:
    """One backend an address, of which none tries again by itself: what fails on one is tried on another."""
    if not addresses:
        raise ValueError("base_url is an empty list: give at least one address, like 'http://localhost:8000'.")
    if twice := [address for address in addresses if list(addresses).count(address) > 1]:
        raise ValueError(f"base_url has {twice[0]!r} twice: each server is listed once.")
    policy = {key: options[key] for key in ("max_attempts", "sleep") if key in options}
    members = [factory(address, **{**options, "max_attempts": 1}) for address in addresses]
    return replicas_of(members, addresses, Retries(**policy))
