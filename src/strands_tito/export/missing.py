"""Packages of trainers are imported when they are used; one that is not there is an error that says how to get it."""

from __future__ import annotations

from importlib import import_module
from types import ModuleType


class MissingPackageError(ImportError):
    """A trainer's package is not installed."""


def imported(module: str, extra: str | None = None) -> ModuleType:
    """Import a trainer's module.

    Args:
        module: Its dotted name.
        extra: Our extra that installs its package; None where none does.

    Raises:
        MissingPackageError: Its package is not installed. An import that fails inside the package is let through.
    """
    package = module.partition(".")[0]
    try:
        import_module(package)
    except ModuleNotFoundError as error:
        if error.name != package:
            raise
        how = f"pip install 'strands-tito[{extra}]'" if extra else f"install {package} as its own documentation says"
        raise MissingPackageError(f"This exporter builds types of {package}, which is not installed: {how}.") from None
    return import_module(module)
