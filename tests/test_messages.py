"""What a user gets wrong is named in one sentence, at the earliest place, with what to do."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from tito_core.backend.typed_values import InvalidValueError

from support.scripted import Says, engine_of, tokenizer
from tito_core import TITOModel
from tito_core.backend import BadRequestError, EngineConnectionError, UnknownBackendError
from tito_core.chat.tokenizer import TokenizerError
from tito_core.parsing import UnknownParserError
from tito_core.testing import ScriptedServer


def build(**changes: Any) -> TITOModel:
    settings = {"backend": "vllm", "base_url": "http://127.0.0.1:9", "tokenizer": tokenizer(), "max_attempts": 1}
    return TITOModel(**{**settings, **changes})


@pytest.mark.parametrize(
    ("changes", "kind", "words"),
    [
        ({}, EngineConnectionError, r"No connection to vllm at http://127.0.0.1:9.*Is the server running"),
        ({"base_url": "localhost:8000"}, EngineConnectionError, "give an address like 'http://localhost:8000'"),
        ({"base_url": "http://no.such.host.invalid"}, EngineConnectionError, "host and port"),
        ({"backend": "trtllm"}, UnknownBackendError, "no backend 'trtllm'. Installed backends: sglang, vllm"),
        ({"tokenizer": "/no/such/folder"}, TokenizerError, "no folder '/no/such/folder'.*check the path"),
        ({"parser": "hermez"}, UnknownParserError, "no tool parser 'hermez'. Known parsers: auto, deepseek_v3"),
        ({"sampling": {"temprature": 1}}, InvalidValueError, "did you mean 'temperature'"),
        ({"sampling": {"extra": {"n": 2}}}, InvalidValueError, "For n samples, make n rollouts"),
    ],
)
def test_bad_input_is_one_sentence(changes: dict[str, Any], kind: type[Exception], words: str) -> None:
    with pytest.raises(kind, match=words):
        build(**changes)


def test_a_tokenizer_that_nobody_has_is_said_soon_without_a_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    started = time.monotonic()
    with pytest.raises(TokenizerError, match="hub cannot be reached"):
        build(tokenizer="nobody/has-this")
    assert time.monotonic() - started < 10


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
def test_a_wrong_model_name_lists_those_served(kind: str) -> None:
    with (
        ScriptedServer(engine_of(kind, Says(""))) as server,
        pytest.raises(BadRequestError, match=r"does not serve 'nope'; it serves 'scripted'"),
    ):
        build(backend=kind, base_url=server.base_url, model_id="nope")


@pytest.mark.parametrize(("kind", "other"), [("vllm", "sglang"), ("sglang", "vllm")])
def test_the_wrong_kind_of_server_names_the_right_backend(kind: str, other: str) -> None:
    with (
        ScriptedServer(engine_of(kind, Says(""))) as server,
        pytest.raises(BadRequestError, match=f"use backend='{kind}'"),
    ):
        build(backend=other, base_url=server.base_url)


def test_an_unsupported_python_is_named_by_make(tmp_path: Path) -> None:
    python = tmp_path / "python3.9"
    python.write_text(
        f"#!{sys.executable}\n"
        "import sys\nsys.version_info = (3, 9, 18, 'final', 0)\nsys.executable = 'python3.9'\nexec(sys.argv[2])\n"
    )
    python.chmod(0o755)
    root = Path(__file__).parent.parent
    done = subprocess.run(
        ["make", "-B", "setup", f"PYTHON={python}", f"VENV={tmp_path / 'venv'}"],
        cwd=root,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode != 0
    assert "strands-tito needs Python 3.11 to 3.13, and python3.9 is 3.9" in done.stderr
