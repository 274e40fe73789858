"""`tito template check`: certificates of a name, a folder or a file, and refused templates."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from strands_tito.cli import main
from support.byte_level import CHATML_TOOLS, byte_level
from support.typed import tito
from tito_core.chat.certify import Certificate
from tito_core.chat.template import ChatTemplate

REFUSED = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}{{ messages|length }}"
)


@pytest.fixture(scope="module", autouse=True)
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A certificate cache for this file, so that each template is certified once."""
    cache = tmp_path_factory.mktemp("certificates")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tito_core.chat.certify.default_folder", lambda: cache)
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    made = tmp_path_factory.mktemp("tokenizer")
    byte_level(template=CHATML_TOOLS).save_pretrained(made)
    return str(made)


def output_of(*arguments: Any, status: int = 0) -> str:
    result = tito("template", "check", *arguments)
    assert result.exit_code == status, result.output
    return str(result.output) if not status else " ".join(result.output.replace("│", " ").split())


def test_a_folder_prints_the_certificate(folder: str) -> None:
    certificate = ChatTemplate.certify(byte_level(template=CHATML_TOOLS))
    lines = output_of(folder).splitlines()
    facts = {line.split(maxsplit=1)[0]: line.split(maxsplit=1)[1] for line in lines}
    assert facts["template"] == f"sha256 {certificate.template}"
    assert facts["delta"] == "rendered after a question"
    assert facts["probes"] == "224 equal to the template's own rendering, 0 different"
    assert facts["rewrites"] == "calls: a call in the history is rebuilt from its parsed arguments"
    assert facts["thinking"] == (
        "'keep' keeps what was sampled; 'as-template' branches after each answer with reasoning"
    )
    assert facts["content"] == "inert: no control token comes from content"


def test_json_is_the_certificate(folder: str) -> None:
    found = Certificate.from_json(output_of(folder, "--json"))
    assert found.candidate == "after a question"
    assert len(json.loads(output_of(folder, "--json"))["passed"]) == 224


def test_a_small_model_is_found_by_its_name() -> None:
    shown = output_of("qwen3-tiny")
    assert "reasoning  stripped at the next question" in shown
    assert "'as-template' branches at each question after an answer with reasoning" in shown


def test_a_file_needs_a_tokenizer(folder: str, tmp_path: Path) -> None:
    dated = tmp_path / "dated.jinja"
    dated.write_text("{{ strftime_now('%d %b %Y') }}" + CHATML_TOOLS)
    assert "date: the prompt holds the day or time" in output_of(dated, "--tokenizer", folder)
    assert "--tokenizer" in output_of(dated, status=2)
    assert ".jinja" in output_of(folder, "--tokenizer", folder, status=2)
    missing = output_of(tmp_path / "none.jinja", "--tokenizer", folder, status=2)
    assert "none.jinja" in missing.replace(" ", "")  # a narrow terminal wraps the path


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
    found = Certificate.from_json(output_of(folder, "--json", *options))
    assert "('enable_thinking', False)" in found.arguments
    assert "('style', 'plain')" in found.arguments
    assert found.content_tokens == "as-template"
    assert "as-template: content may write tokens" in output_of(folder, *options)
    assert "KEY=JSON" in output_of(folder, "--argument", "enable_thinking", status=2)


@pytest.mark.parametrize("source", [REFUSED, "{% for", ""])
def test_a_refused_template_exits_with_1_and_the_reason(
    source: str, folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    refused = tmp_path / "refused.jinja"
    refused.write_text(source)
    monkeypatch.setattr("sys.argv", ["tito", "template", "check", str(refused), "--tokenizer", folder])
    with pytest.raises(SystemExit) as exit_info:
        main()
    assert exit_info.value.code == 1
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("TemplateError: ")
    if source == REFUSED:
        lines = printed.err.splitlines()
        assert lines[1].startswith("  template: ")
        assert lines[2].startswith("  delta:    ")


def test_an_unknown_name_is_an_error(tmp_path: Path) -> None:
    result = tito("template", "check", tmp_path / "nowhere")
    assert result.exit_code == 1
    assert "nowhere" in str(result.exception)


def test_another_packages_renderer_is_compared_probe_by_probe(folder: str, tmp_path: Path) -> None:
    same = output_of(folder, "--against", "renderers:qwen3", "--as-template")
    assert "Qwen3Renderer: 0 differences" in same
    assert "renderers:NAME" in output_of(folder, "--against", "transformers", status=2)
    refused = tito("template", "check", folder, "--against", "renderers")
    assert "renderers:NAME" in str(refused.exception)
    other = tmp_path / "other.jinja"
    other.write_text(CHATML_TOOLS.replace("role + '\n'", "role + '\n\n'"))
    assert other.read_text() != CHATML_TOOLS
    differs = output_of(other, "--tokenizer", folder, "--against", "renderers:qwen3", "--as-template", status=1)
    assert "Qwen3Renderer differs from the chat template at token" in differs
    assert "renderer: [" in differs


@pytest.mark.parametrize(
    ("form", "words"),
    [
        ({"function": {"name": "{name}", "arguments": "{content}"}}, "transformers reads the same call"),
        (
            {"function": {"name": "other", "arguments": "{content}"}},
            r"transformers reads \[\('other'.*hermes \[\('look'",
        ),
        ({"name": "{name}", "arguments": "{content}"}, "not compared: 'function'"),
    ],
)
def test_a_template_of_responses_is_a_referee_of_the_parser(tmp_path: Path, form: dict[str, Any], words: str) -> None:
    tokenizer = byte_level(template=CHATML_TOOLS)
    calls = {
        "open_pattern": r'<tool_call>\{"name": "(?P<name>[^"]+)", "arguments": ',
        "close": "}</tool_call>",
        "content": "json",
        "transform": {"type": "function", **form},
        "repeats": True,
    }
    fields = {"tool_calls": calls}
    anchor = "<|im_start|>assistant\n"
    tokenizer.response_template = {"defaults": {"role": "assistant"}, "start_anchor": anchor, "fields": fields}
    tokenizer.save_pretrained(tmp_path)
    assert re.search(words, output_of(tmp_path, "--parser", "hermes"))
