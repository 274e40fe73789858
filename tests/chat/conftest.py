"""Certificates of these tests' templates stay out of the user's cache."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tito_core.chat import certificate


@pytest.fixture(autouse=True, scope="session")
def certificate_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("certificates")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(certificate, "default_folder", lambda: folder)
        yield folder
