"""Backends by name, through the entry-point group `tito.backends`, ours and third parties' alike."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping
from typing import Any, TypedDict

from tito_core.backend.errors import UnknownBackendError
from tito_core.backend.protocol import Backend
from tito_core.backend.sampling import refuse_unknown_option
from tito_core.backend.values import InvalidValueError, is_text, short_repr
from tito_core.entry_points import load, offered

ENTRY_POINT_GROUP = "tito.backends"


class BackendOptions(TypedDict, total=False):
    """The options that every backend takes.

    Pass options of one backend to `create_backend(name, url, ...)`, and its result as `backend`.

    Attributes:
        model: Name of the model on the server; its first one when None, the default. A LoRA adapter is a
            setting of rollouts.
        model_id: Another name of `model`. Both at once are an error.
        api_key: The server's key. Default: None.
        admin_api_key: The server's key for aborts, pauses and new weights, where it has one of its own, as SGLang with
            `--admin-api-key`. Default: None, `api_key`.
        headers: Further headers of every request, such as {"X-API-Key": "..."} for a gateway; values are hidden in
            errors. Default: None.
        timeout_s: Longest wait for a response, in seconds; 600 by default.
        connect_timeout_s: Longest wait for a connection, in seconds; 5 by default.
        max_connections: Maximum number of connections per event loop; further requests wait. Default: 0, no limit.
        patience_s: How long a request waits for a server that is away, restarting or busy, in seconds from its first
            failure, within the turn's timeout. Default: 60. An address at which no server has answered yet fails at
            once.
        data_parallel_size: Number of data-parallel ranks of the server. The turns of a rollout then go to one rank,
            whose prefix cache holds its history. Default: None, as many as an SGLang server reports; vLLM reports none.
    """

    model: str | None
    model_id: str | None
    api_key: str | None
    admin_api_key: str | None
    headers: Mapping[str, str] | None
    timeout_s: float
    connect_timeout_s: float
    max_connections: int
    patience_s: float
    data_parallel_size: int | None


_HIDDEN_OPTIONS = ("http_transport", "sleep", "clock")
"""Options for tests, which error messages do not suggest."""


def installed_backends() -> list[str]:
    """List the names of the installed backends."""
    return offered(ENTRY_POINT_GROUP)


def check_backend(backend: Any) -> None:
    """Check that a backend is a name, or an instance with a name and every coroutine function of `Backend`.

    Raises:
        InvalidValueError: It is neither; the message names what is missing.
    """
    if isinstance(backend, str):
        return
    methods = [name for name, method in vars(Backend).items() if inspect.iscoroutinefunction(method)]
    missing = [name for name in methods if not inspect.iscoroutinefunction(getattr(backend, name, None))]
    if isinstance(backend, type):
        wrong = f"the class {backend.__name__}: build an instance of it"
    elif missing == methods:
        wrong = "None" if backend is None else f"of type {type(backend).__name__}"
    elif missing:
        wrong = f"a {type(backend).__name__} without `async def` of {', '.join(missing)}"
    elif not is_text(getattr(backend, "name", None)):
        wrong = (
            f"a {type(backend).__name__} whose name is {short_repr(getattr(backend, 'name', None))}: make it a string"
        )
    else:
        return
    names = ", ".join(map(repr, installed_backends()))
    raise InvalidValueError(f"backend must be a name ({names}) or a backend object, not {wrong}.")


def create_backend(name: str, base_url: str, **options: Any) -> Backend:
    """Build the backend called `name`.

    Args:
        name: "vllm", "sglang", or what another package installs.
        base_url: Address of the server, such as "http://localhost:8000" or "unix:///run/vllm.sock", or that of a router
            before several servers.
        **options: Passed to the backend: see `BackendOptions`, and the backend's own documentation.

    Raises:
        UnknownBackendError: Unknown name; the message lists the installed backends.
        BrokenEntryPointError: The package that offers it cannot be imported.
        InvalidValueError: What the package offers makes no `Backend`.
        ValueError: An option is unknown or has a bad value.
    """
    options = one_model(options)
    if not isinstance(base_url, str):
        raise InvalidValueError(
            f"base_url must be the address of one server, or of a router before several, not {short_repr(base_url)}."
        )
    factory: Callable[..., Backend] | None = load(ENTRY_POINT_GROUP, name)
    if factory is None:
        raise UnknownBackendError(f"Unknown backend {short_repr(name)}. Installed: {', '.join(installed_backends())}.")
    _check_options(name, factory, options)
    backend = factory(base_url, **options)
    check_backend(backend)
    return backend


def one_model(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return options in which the model's name is called `model`, and not `model_id`.

    Raises:
        InvalidValueError: Both names are set.
    """
    merged = dict(options)
    other = merged.pop("model_id", None)
    if other is None:
        return merged
    if merged.get("model") is not None:
        raise InvalidValueError(
            f"model={short_repr(merged['model'])} and model_id={short_repr(other)} are two names of one setting, the "
            "model on the server: give one of them."
        )
    return {**merged, "model": other}


def _check_options(backend: str, factory: Callable[..., Backend], options: Mapping[str, Any]) -> None:
    """Check the names of a backend's options, and the types of those in `BackendOptions`.

    Raises:
        InvalidValueError: An option is unknown, or has a bad value.
    """
    known = _names(factory)
    if known is not None:
        refuse_unknown_option(f"{backend} backend option", options, known, allowed=_HIDDEN_OPTIONS)
    for name, value in options.items():
        kinds, allowed = _KINDS.get(name, (object, ""))
        if not isinstance(value, kinds) or (isinstance(value, bool) and kinds is not object):
            found = "a value of another type" if name in _SECRETS else short_repr(value)
            raise InvalidValueError(f"{name} must be {allowed}, not {found}.")


def option_names(backend: Any) -> Collection[str] | None:
    """Return the option names of an installed backend; None if it takes any name."""
    factory = load(ENTRY_POINT_GROUP, backend) if isinstance(backend, str) else None
    return BackendOptions.__annotations__.keys() if factory is None else _names(factory)


def _names(factory: Callable[..., Backend]) -> Collection[str] | None:
    taken = inspect.signature(factory).parameters
    if any(parameter.kind == inspect.Parameter.VAR_KEYWORD for parameter in taken.values()):
        return None
    return [name for name in taken if name not in ("base_url", *_HIDDEN_OPTIONS)]


_KINDS: Mapping[str, tuple[Any, str]] = {
    "model": (str | None, "a name on the server, or None for its first one"),
    "api_key": (str | None, "a string, or None"),
    "admin_api_key": (str | None, "a string, or None"),
    "headers": (Mapping | None, "a dictionary of names and values, or None"),
    "timeout_s": (int | float, "a number of seconds"),
    "connect_timeout_s": (int | float, "a number of seconds"),
    "max_connections": (int, "a whole number"),
    "patience_s": (int | float, "a number of seconds"),
}
"""Types of the options of `BackendOptions`."""
_SECRETS = ("api_key", "admin_api_key", "headers")
