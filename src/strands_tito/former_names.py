"""Former names: `strands_tito.testing`, `.conformance` and `.engines` became packages of their own."""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib import import_module
from types import ModuleType
from typing import Any


def former_name(name: str, package: str, modules: dict[str, str]) -> Callable[[str], Any]:
    """Let a module stand for a package. Nothing of the package is imported before its first use.

    Args:
        name: The module's name.
        package: The package's name.
        modules: The package's modules that users import, by their former names.

    Returns:
        The module's `__getattr__`.
    """
    for former, module in modules.items():
        stand_in = ModuleType(f"{name}.{former}", f"The former name of `{package}.{module}`.")
        stand_in.__dict__["__getattr__"] = lambda attribute, path=f"{package}.{module}": _of(path, attribute)
        sys.modules[stand_in.__name__] = stand_in

    def of(attribute: str) -> Any:
        if attribute in modules:
            return import_module(f"{package}.{modules[attribute]}")
        return _of(package, attribute)

    return of


def _of(path: str, attribute: str) -> Any:
    if attribute.startswith("__"):  # the import system looks for `__path__`
        raise AttributeError(attribute)
    return getattr(import_module(path), attribute)
