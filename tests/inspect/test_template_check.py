"""`tito template check`: the certificate of a name, a folder or a file, and exit 1 with a difference."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from strands_tito.cli import app
from support.byte_level import CHATML_TOOLS, byte_level
from tito_core.chat.certificate import Certificate
from tito_core.chat.template import ChatTemplate

REFUSED = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}{{ messages|length }}"
)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("tito_core.chat.certificate.default_folder", lambda: tmp_path / "certificates")
    return tmp_path


@pytest.fixture
def folder(tmp_path: Path) -> str:
    byte_level(template=CHATML_TOOLS).save_pretrained(tmp_path / "tokenizer")
    return str(tmp_path / "tokenizer")


def said(*arguments: Any, status: int = 0) -> str:
    result = CliRunner().invoke(app, ["template", "check", *(str(argument) for argument in arguments)])
    assert result.exit_code == status, result.output
    return str(result.output) if not status else " ".join(result.output.replace("│", " ").split())


def test_a_folder_prints_the_certificate(folder: str) -> None:
    certificate = ChatTemplate.certify(byte_level(template=CHATML_TOOLS))
    lines = said(folder).splitlines()
    facts = {line.split(maxsplit=1)[0]: line.split(maxsplit=1)[1] for line in lines}
    assert facts["template"] == f"sha256 {certificate.template}"
    assert facts["delta"] == "rendered after a question"
    assert facts["probes"] == "224 equal to the template's own rendering, 0 different"
    assert facts["rewrites"] == "calls: a call in the history is written anew from its parsed arguments"
    assert facts["thinking"] == (
        "'keep' keeps what was sampled; 'as-template' branches after each answer with reasoning"
    )
    assert facts["content"] == "inert: no control token comes from content"


def test_json_is_the_certificate_itself(folder: str) -> None:
    found = Certificate.from_json(said(folder, "--json"))
    assert found.candidate == "after a question"
    assert len(json.loads(said(folder, "--json"))["passed"]) == 224


def test_a_model_of_ours_goes_by_its_name() -> None:
    shown = said("qwen3-tiny")
    assert "reasoning  stripped at the next question" in shown
    assert "'as-template' branches at each question after an answer with reasoning" in shown


def test_a_file_needs_a_tokenizer(folder: str, tmp_path: Path) -> None:
    dated = tmp_path / "dated.jinja"
    dated.write_text("{{ strftime_now('%d %b %Y') }}" + CHATML_TOOLS)
    assert "date: the prompt holds the day or time" in said(dated, "--tokenizer", folder)
    assert "give --tokenizer" in said(dated, status=2)
    assert "is for a .jinja file" in said(folder, "--tokenizer", folder, status=2)
    assert "There is no file" in said(tmp_path / "none.jinja", "--tokenizer", folder, status=2)


def test_arguments_parser_and_content_tokens_are_on_the_certificate(folder: str, tmp_path: Path) -> None:
    options = [
        "--argument",
        "enable_thinking=false",
        "--argument",
        "style=plain",
        "--parser",
        "hermes",
        "--as-template",
    ]
    found = Certificate.from_json(said(folder, "--json", *options))
    assert "('enable_thinking', False)" in found.arguments
    assert "('style', 'plain')" in found.arguments
    assert found.content_tokens == "as-template"
    assert "as-template: content may write tokens" in said(folder, "--as-template")
    assert "is not KEY=JSON" in said(folder, "--argument", "enable_thinking", status=2)


@pytest.mark.parametrize("source", [REFUSED, "{% for", ""])
def test_a_template_that_is_refused_gives_one_and_the_reason(source: str, folder: str, tmp_path: Path) -> None:
    refused = tmp_path / "refused.jinja"
    refused.write_text(source)
    command = "from strands_tito.cli import main; main()"
    ended = subprocess.run(
        [sys.executable, "-c", command, "template", "check", str(refused), "--tokenizer", folder],
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 1
    assert ended.stdout == ""
    assert ended.stderr.startswith("TemplateError: ")
    if source == REFUSED:
        lines = ended.stderr.splitlines()
        assert lines[1].startswith("  template: ")
        assert lines[2].startswith("  delta:    ")


def test_a_name_that_loads_nothing_says_so(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["template", "check", str(tmp_path / "nowhere")])
    assert result.exit_code == 1
    assert "There is no folder" in str(result.exception)


def test_another_packages_renderer_is_compared_probe_by_probe(folder: str, tmp_path: Path) -> None:
    same = said(folder, "--against", "renderers:qwen3", "--as-template")
    assert "Qwen3Renderer: 0 differences" in same
    assert "only renderers" in said(folder, "--against", "transformers", status=2)
    refused = CliRunner().invoke(app, ["template", "check", folder, "--against", "renderers"])
    assert "has none for the name" in str(refused.exception)
    other = tmp_path / "other.jinja"
    other.write_text(CHATML_TOOLS.replace("role + '\n'", "role + '\n\n'"))
    assert other.read_text() != CHATML_TOOLS
    differs = said(other, "--tokenizer", folder, "--against", "renderers:qwen3", "--as-template", status=1)
    assert "Qwen3Renderer differs from the chat template at token" in differs
    assert "renderer: [" in differs
