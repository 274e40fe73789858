"""Every page: links, anchors, navigation, snippets and commands. Pages with examples of their own: `test_docs.py`."""

from __future__ import annotations

import ast
import asyncio
import importlib.util
import inspect
import json
import pickle
import re
import signal
import threading
import traceback
import unicodedata
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

import numpy as np
import pytest
from strands import Agent

import tito_engines as engines
from strands_tito import TITOModel, cli, errors
from support.pages import PAGES, ROOT, TEXT, blocks
from support.scripted import Says, call, engine_of
from tito_conformance.testing import ScriptedServer
from tito_core import store
from tito_core.backend.errors import BadRequestError, ServerError
from tito_core.ledger.errors import LawViolationError
from tito_engines.errors import StartFailed

ANSWERS = (call("multiply", '{"a": 25, "b": 17}'), "It is 425.")
CALCULATED = (call("calculator", '{"expression": "25 * 17"}'), "It is 425.")
ELSEWHERE = {
    "README.md", "docs/backends.md", "docs/collect.md", "docs/gateways.md", "docs/images.md", "docs/migrating.md",
    "docs/notebook.md", "docs/scaling.md", "docs/servers.md", "docs/settings.md", "docs/strands.md",
    "docs/templates.md", "docs/testing.md", "docs/tools.md", "docs/trainers.md", "docs/training.md",
}  # fmt: skip
"""Pages whose snippets another test runs. `test_no_page_is_forgotten` checks that the test names the page."""


# Snippets


def prepared(model: TITOModel) -> dict[str, Any]:
    """Return the names that snippets take for granted: a policy, and a model whose agent has run."""
    agent = Agent(model=model, callback_handler=None)
    modules = {"asyncio": asyncio, "np": np, "signal": signal, "threading": threading, "store": store}
    return {**modules, "Agent": Agent, "model": model, "policy": model.policy, "agent": agent}


@pytest.fixture
def scripted_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let `engines.running` run a scripted server, after it has checked the arguments."""
    signature = inspect.signature(engines.running)

    @asynccontextmanager
    async def running(*arguments: Any, **options: Any) -> AsyncIterator[str]:
        bound = signature.bind(*arguments, **options)
        with ScriptedServer(engine_of(bound.arguments["name"], Says("Yes."))) as server:
            yield server.base_url

    monkeypatch.setattr(engines, "running", running)


@pytest.mark.parametrize(
    "page", [page for page in PAGES if blocks(page, "python") and page.as_posix() not in ELSEWHERE], ids=str
)
def test_the_snippets_of_a_page_run_in_their_order(
    page: Path, folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, scripted_engines: None
) -> None:
    monkeypatch.chdir(tmp_path)
    handler = signal.getsignal(signal.SIGINT)
    answers = CALCULATED if page.name == "quickstart.md" else ANSWERS
    try:
        with ScriptedServer(engine_of("vllm", Says(*answers))) as server:
            model = TITOModel(backend="vllm", base_url=server.base_url, tokenizer=folder)
            names = prepared(model)
            names["agent"]("What is it?")
            for snippet in blocks(page, "python"):
                code = re.sub(r"http://localhost:\d+", server.base_url, snippet).replace("Qwen/Qwen3-4B", folder)
                code = code.replace('tokenizer="smollm2"', f'tokenizer="{folder}"')
                run(compile(code, str(page), "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT), names)
            for policy in (names["policy"], names["model"].policy):
                if policy.store is not None:
                    policy.store.close()
    finally:
        signal.signal(signal.SIGINT, handler)


def run(code: CodeType, names: dict[str, Any]) -> None:
    """Execute a snippet; one with `await` in an event loop."""
    result = eval(code, names)
    if inspect.iscoroutine(result):
        asyncio.run(result)


def test_no_page_is_forgotten() -> None:
    tests = "".join(
        path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("test_*.py") if path != Path(__file__)
    ) + inspect.getsource(test_the_notebook_learns)
    with_code = {page.as_posix() for page in PAGES if blocks(page, "python")}
    assert with_code >= ELSEWHERE
    unnamed = [page for page in ELSEWHERE if not named_in(page, tests)]
    assert unnamed == []


def named_in(page: str, tests: str) -> bool:
    return page in tests or f'"{Path(page).name}"' in tests


def pages_tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location("pages_tool", ROOT / "tools/pages.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_notebook_learns() -> None:
    """docs/notebook.md is written from the notebook."""
    tool = pages_tool()
    book = tool.executed(tool.notebook())
    printed = "".join(line for cell in tool.code_cells(book) for output in cell["outputs"] for line in output["text"])
    assert "logprobs include the temperature: False" in printed
    assert "importance ratio is 1: True" in printed
    first, last = (float(found) for found in re.findall(r"five steps: ([\d.]+)", printed))
    assert first < 0.3 < 0.7 < last


def test_the_notebook_is_whole_and_its_page_and_the_command_line_are_current() -> None:
    tool = pages_tool()
    for path, text in tool.current_pages():
        assert path.read_text(encoding="utf-8") == text, f"run python tools/pages.py: {path.name}"
    book = tool.notebook()
    assert (book["nbformat"], book["nbformat_minor"]) == (4, 5)
    assert len({cell["id"] for cell in book["cells"]}) == len(book["cells"])
    assert all(cell["execution_count"] for cell in tool.code_cells(book))
    assert str(Path.home()) not in json.dumps(book)


# Links


def slug(heading: str) -> str:
    """Return the anchor that Python-Markdown gives a heading."""
    plain = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading)
    plain = unicodedata.normalize("NFKD", plain).encode("ascii", "ignore").decode()
    return re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", plain).strip().lower())


def anchors(page: Path) -> set[str]:
    text = re.sub(r"```.*?```", "", TEXT[page], flags=re.DOTALL)
    headings = [slug(heading) for heading in re.findall(r"^#+ (.*)$", text, re.MULTILINE)]
    return {*headings, *re.findall(r'<a id="([^"]+)">', text), *re.findall(r"^::: (\S+)", text, re.MULTILINE)}


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_every_link_and_anchor_of_a_page_leads_somewhere(page: Path) -> None:
    text = re.sub(r"```.*?```|`[^`\n]*`", "", TEXT[page], flags=re.DOTALL)
    for target in re.findall(r"\]\(((?!https?:)[^)\s]+)\)", text):
        path, _, anchor = target.partition("#")
        found = (ROOT / page).parent.joinpath(path).resolve() if path else ROOT / page
        assert found.exists(), target
        if anchor and found.suffix == ".md":
            assert anchor in anchors(found.relative_to(ROOT)), target


def test_every_page_is_in_the_navigation_once() -> None:
    navigation = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").partition("\nnav:")[2]
    listed = re.findall(r"(\S+\.md)$", navigation, re.MULTILINE)
    assert sorted(listed) == sorted(page.relative_to("docs").as_posix() for page in PAGES if page.parts[0] == "docs")


def test_no_page_loads_anything_from_the_network() -> None:
    for path in (ROOT / "docs").rglob("*.svg"):
        assert not re.search(r"(?:href|src)=.http|url\(.?http|<script", path.read_text(encoding="utf-8")), path.name
    pages = {page: text for page, text in TEXT.items() if page.parts[0] == "docs"}  # a package index shows the README
    assert not [page for page, text in pages.items() if re.search(r"!\[[^]]*\]\(https?:|```mermaid", text)]


ERRORS = {name: value for name, value in vars(errors).items() if isinstance(value, type)}


def test_every_error_has_an_anchor_that_the_commands_print(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert {name.lower() for name in ERRORS} <= anchors(Path("docs/errors.md"))
    monkeypatch.setattr("sys.argv", ["tito", "inspect", str(tmp_path / "none")])
    (tmp_path / "none").write_text("nothing")
    with pytest.raises(SystemExit):
        cli.main()
    assert "docs: errors.md#schemaerror" in capsys.readouterr().err


class ThirdPartyError(BadRequestError):
    """An error of another package's backend."""


@pytest.mark.parametrize(
    ("error", "anchor"),
    [
        (LawViolationError(3, "A turn breaks it."), "lawviolationerror"),
        (ServerError("It failed."), "servererror"),
        (ThirdPartyError("It refused."), "badrequesterror"),
        (StartFailed("It ended."), "startfailed"),
    ],
)
def test_a_traceback_ends_with_the_place_in_the_documentation(error: Exception, anchor: str) -> None:
    for each in (error, pickle.loads(pickle.dumps(error))):
        assert traceback.format_exception(each)[-1] == f"docs: errors.md#{anchor}\n"
    assert anchor in anchors(Path("docs/errors.md"))
    assert "errors.md" not in str(error)


INTERNAL = {
    "ActorLostError",
    "BodyTooLargeError",
    "FailedAnswerError",
    "HiddenError",
    "RefusedError",
    "StreamError",
    "UndecodableBodyError",
}
"""Errors that one module of ours raises and another catches."""


def test_every_error_has_one_import_path_and_one_base_class() -> None:
    assert all(issubclass(error, errors.TITOError) for error in ERRORS.values())
    packages = ("strands_tito", "tito_core", "tito_engines", "tito_sglang", "tito_vllm")
    sources = [path.read_text(encoding="utf-8") for one in packages for path in (ROOT / "src" / one).rglob("*.py")]
    defined = {name for source in sources for name in re.findall(r"^class ([A-Z]\w*Error)\b", source, re.MULTILINE)}
    assert defined - INTERNAL <= set(ERRORS)
