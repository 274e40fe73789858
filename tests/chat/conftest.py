"""Certificates of these tests' templates are cached in a temporary folder, not in the user's."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tito_core.chat import certify


@pytest.fixture(autouse=True, scope="session")
def certificate_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.getbasetemp()
    if os.environ.get("PYTEST_XDIST_WORKER"):
        folder = folder.parent  # workers share certificates: certifying a template takes a third of a second
    folder /= "chat-certificates"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(certify, "default_folder", lambda: folder)
        yield folder
