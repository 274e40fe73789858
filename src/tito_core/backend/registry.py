"""Backends by name, through the entry-point group `tito.backends`: a third party's is found exactly as ours are."""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import entry_points
from typing import Any

from tito_core.backend.errors import UnknownBackendError
from tito_core.backend.protocol import Backend

ENTRY_POINT_GROUP = "tito.backends"


def installed_backends() -> list[str]:
    """List the names of the installed backends."""
    return sorted({point.name for point in entry_points(group=ENTRY_POINT_GROUP)})


def create_backend(name: str, base_url: str, **options: Any) -> Backend:
    """Build the backend called `name`.

    Args:
        name: "vllm", "sglang", or what another package installs.
        base_url: Address of the server, such as "http://localhost:8000".
        **options: Passed to the backend: `model`, `api_key`, `timeout_s`, `max_attempts`.

    Raises:
        UnknownBackendError: No such backend; the message lists those installed.
    """
    for point in entry_points(group=ENTRY_POINT_GROUP):
        if point.name == name:
            factory: Callable[..., Backend] = point.load()
            return factory(base_url, **options)
    raise UnknownBackendError(f"There is no backend {name!r}. Installed backends: {', '.join(installed_backends())}.")
