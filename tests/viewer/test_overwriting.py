"""`tito view --html` overwrites pages and no other file."""

from __future__ import annotations

from pathlib import Path

from typer.testing import CliRunner

from strands_tito.cli import app

REAL = sorted((Path(__file__).parent / "real").glob("*.tito"))[0]


def test_a_file_of_rollouts_is_not_overwritten(tmp_path: Path) -> None:
    rollouts = tmp_path / "a.tito"
    rollouts.write_bytes(REAL.read_bytes())
    result = CliRunner().invoke(app, ["view", str(rollouts), "--rollout", "1", "--html", str(rollouts)])
    assert result.exit_code == 2
    assert rollouts.read_bytes() == REAL.read_bytes()


def test_a_page_is_written_through_a_link(tmp_path: Path) -> None:
    page, link = tmp_path / "page.html", tmp_path / "link.html"
    link.symlink_to(page)
    result = CliRunner().invoke(app, ["view", str(REAL), "--rollout", "1", "--html", str(link)])
    assert result.exit_code == 0, result.output
    assert (link.is_symlink(), page.read_bytes()[:15]) == (True, b"<!doctype html>")


def test_an_older_page_or_an_empty_file_is_overwritten(tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    page.touch()
    for _ in range(2):
        result = CliRunner().invoke(app, ["view", str(REAL), "--rollout", "1", "--html", str(page)])
        assert result.exit_code == 0, result.output
        assert page.read_bytes().startswith(b"<!doctype html>")
