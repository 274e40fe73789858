"""A build backend for `support.sdist`: pip wants metadata before it keeps an archive, and gets the archive's own.

It stands in for the archive's backend, so that nothing of an archive is run and nothing is installed for it.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any


def get_requires_for_build_wheel(config_settings: Any = None) -> list[str]:
    return []


def prepare_metadata_for_build_wheel(metadata_directory: str, config_settings: Any = None) -> str:
    place = Path(metadata_directory, "archive.dist-info")
    place.mkdir()
    shutil.copy("PKG-INFO", place / "METADATA")
    (place / "WHEEL").write_text("Wheel-Version: 1.0\nGenerator: none\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
    return place.name


def build_wheel(wheel_directory: str, config_settings: Any = None, metadata_directory: str | None = None) -> str:
    raise NotImplementedError("Only metadata is given here.")
