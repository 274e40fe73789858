"""`tito view` from a shell."""

from __future__ import annotations

import webbrowser
from pathlib import Path

import pytest

from strands_tito.cli import main
from strands_tito.viewer.site import Server
from support.shown import REAL, data_of, written
from support.typed import tito

VLLM, SGLANG = REAL / "vllm.tito", REAL / "sglang.tito"


def output_of(*arguments: object, status: int = 0) -> str:
    result = tito("view", *arguments, terminal_width=200)
    assert result.exit_code == status, result.output
    return " ".join(result.output.split())


def test_a_rollout_is_written_to_one_file(tmp_path: Path) -> None:
    out = tmp_path / "out.html"
    assert str(out) in output_of(VLLM, "--rollout", 3, "--html", out)
    data = data_of(out.read_bytes())
    assert (data["view"], data["served"], len(data["turns"])) == ("rollout", False, 2)
    assert data["text"] is False, "without a tokenizer ids are shown"


def test_a_tokenizer_gives_the_tokens_their_text(folder: str, tmp_path: Path) -> None:
    output_of(VLLM, "--rollout", 1, "--html", tmp_path / "out.html", "--tokenizer", folder)
    assert "<|im_start|>" in data_of((tmp_path / "out.html").read_bytes())["pieces"].values()


def test_two_rollouts_of_two_files_are_compared(tmp_path: Path) -> None:
    output_of(VLLM, SGLANG, "--rollout", 1, "--rollout", 4, "--html", tmp_path / "out.html")
    data = data_of((tmp_path / "out.html").read_bytes())
    assert data["view"] == "compare"
    assert [side["number"] for side in data["sides"]] == [1, 4]


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["--html", "out.html"], "--rollout"),
        (["--rollout", "4"], "3 rollouts"),
        (["--rollout", "1", "--rollout", "2", "--rollout", "3"], "3 times"),
        (["--rollout", "0"], "--rollout"),
        (["--base-url", "http://localhost:1"], "--backend"),
        (["--rollout", "1", "--html", "no/such/folder/out.html"], "--html"),
        (["--pictures", "no/such/folder"], "--pictures"),
    ],
)
def test_bad_options_are_refused(arguments: list[str], word: str) -> None:
    assert word in output_of(VLLM, *arguments, status=2)


def test_a_file_without_rollouts_is_refused(tmp_path: Path) -> None:
    assert "no rollout" in output_of(written(tmp_path), status=2)
    output_of(tmp_path / "gone", status=2)


def test_a_file_without_ledgers_is_an_error_without_a_traceback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "text").write_text("none")
    for path in (tmp_path / "text", tmp_path):
        monkeypatch.setattr("sys.argv", ["tito", "view", str(path)])
        with pytest.raises(SystemExit) as exit_info:
            main()
        assert exit_info.value.code == 1
        assert capsys.readouterr().err.startswith("SchemaError: ")


@pytest.mark.parametrize(
    ("arguments", "end"),
    [([], ""), (["--rollout", "2"], "rollout/2"), (["--rollout", "3", "--rollout", "1"], "compare/3/1")],
)
def test_pages_are_served_until_ctrl_c(arguments: list[str], end: str, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[str] = []
    monkeypatch.setattr(webbrowser, "open", opened.append)

    def serve(self: Server) -> None:
        assert opened == [self.url + end]
        raise KeyboardInterrupt

    monkeypatch.setattr(Server, "serve_forever", serve)
    assert opened == []
    shown = output_of(VLLM, *arguments, status=130)
    assert opened[0] in shown


def test_a_port_in_use_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    import socket

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        assert "--port" in output_of(VLLM, "--no-browser", "--port", taken.getsockname()[1], status=2)


@pytest.mark.parametrize("before", ["link", "empty", "page"])
def test_a_page_or_an_empty_file_is_overwritten_and_a_link_stays(before: str, tmp_path: Path) -> None:
    page, out = tmp_path / "page.html", tmp_path / ("link.html" if before == "link" else "page.html")
    if before == "link":
        out.symlink_to(page)
    else:
        page.write_bytes(b"" if before == "empty" else b"<!doctype html><p>")
    output_of(VLLM, "--rollout", 1, "--html", out)
    assert out.is_symlink() is (before == "link")
    assert data_of(page.read_bytes())["view"] == "rollout"


def test_a_file_of_rollouts_is_not_overwritten(tmp_path: Path) -> None:
    copy = tmp_path / "a.tito"
    copy.write_bytes(VLLM.read_bytes())
    output_of(copy, "--rollout", 1, "--html", copy, status=2)
    assert copy.read_bytes() == VLLM.read_bytes()
