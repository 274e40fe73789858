"""Import a trainer's package when it is first needed."""

from __future__ import annotations

from importlib import import_module
from types import ModuleType

from tito_core.ledger.errors import how_to_install


class MissingPackageError(ImportError):
    """A trainer's package is not installed."""


def import_optional(module: str, extra: str | None = None) -> ModuleType:
    """Import a module of an optional package.

    Args:
        module: Its dotted name.
        extra: Our extra that installs the package; None if no extra does.

    Raises:
        MissingPackageError: The package is not installed. Import errors inside the package are not caught.
    """
    package = module.partition(".")[0]
    try:
        import_module(package)
    except ModuleNotFoundError as error:
        if error.name != package:
            raise
        how = how_to_install(extra) if extra else f"install {package} as its documentation says"
        raise MissingPackageError(f"This exporter needs {package}, which is not installed: {how}.") from None
    return import_module(module)
