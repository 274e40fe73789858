"""Every command of README and of a page runs, or has valid options."""

from __future__ import annotations

import importlib.util
import re
import shlex
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from pydoc import locate

import pytest
from strands import Agent

from strands_tito import TITOModel
from strands_tito.collect.folder import RolloutFolder
from strands_tito.collect.rollout import Rollout, RolloutResult, Task
from support import typed
from support.pages import PAGES, ROOT, TEXT, blocks
from support.scripted import Says, call, engine_of, tokenizer
from tito_conformance.testing import ScriptedServer
from tito_core import store
from tito_core.termination import Termination

ANSWERS = (call("multiply", '{"a": 25, "b": 17}'), "It is 425.")


def commands(page: Path) -> Iterator[list[str]]:
    """Yield each command of a page's shell blocks, as words, with the variables in front of it left out."""
    for block in blocks(page, "bash"):
        for line in block.replace("\\\n", " ").splitlines():
            words = shlex.split(line, comments=True)
            while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
                words.pop(0)
            if words:
                yield words


COMMANDS = [(page, words) for page in PAGES for words in commands(page)]
RUN = ("inspect", "verify", "export", "template", "--version")
"""Commands that run here as they are. Others run elsewhere: tests/collect, tests/engines, tests/conformance."""


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory, folder: str) -> Path:
    """Make the files that the pages' commands name, in a folder."""
    place = tmp_path_factory.mktemp("files")
    with ScriptedServer(engine_of("vllm", Says(*ANSWERS))) as server:
        model = TITOModel(backend="vllm", base_url=server.base_url, tokenizer=folder)
        Agent(model=model, callback_handler=None)("What is it?")
    for name in ("rollouts.tito", "runs/vllm.tito", "runs/sglang.tito"):
        (place / name).parent.mkdir(exist_ok=True)
        store.append(place / name, [model.ledger])
    task = Task("sum-1", {}, f"{1:016x}")
    with RolloutFolder(place / "rollouts/step-17", {}) as collected:
        rollout = Rollout("303d1ab2-0000-4000-8000-000000000000", task, 0)
        collected.append(RolloutResult(rollout, model.ledger, Termination.COMPLETED))
    (place / "tasks.jsonl").write_text('{"id": "sum-1", "question": "What is 25 * 17?"}\n')
    (place / "my_template.jinja").write_text(tokenizer().chat_template)
    return place


@pytest.mark.parametrize(
    "words",
    [pytest.param(words, id=f"{page.stem}: {' '.join(words)}") for page, words in COMMANDS if words[0] == "tito"],
)
def test_every_tito_command_runs_or_has_valid_options(
    words: list[str], made: Path, folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(made)
    arguments = [word.replace("Qwen/Qwen3-4B", folder) for word in words[1:]]
    arguments = [
        "1" if before == "--rollout" else word for before, word in zip(["", *arguments], arguments, strict=False)
    ]
    if (arguments[0] in RUN or "--html" in arguments) and "--base-url" not in arguments:
        result = typed.tito(*arguments)
        assert result.exit_code == 0, result.output
        return
    command = typed.command()
    context = command.make_context("tito", arguments)
    while hasattr(command, "commands"):
        name, command, rest = command.resolve_command(context, [*context._protected_args, *context.args])
        context = command.make_context(name, list(rest), parent=context)
    assert not context.args


MAKE = (ROOT / "Makefile").read_text(encoding="utf-8")
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]


def of_make(words: list[str]) -> bool:
    targets = {*re.findall(r"^([a-z-]+):", MAKE, re.MULTILINE)}
    named = {word for word in words[1:] if "=" not in word}
    variables = {word.partition("=")[0] for word in words if "=" in word}
    return named <= targets and all(f"$({name})" in MAKE for name in variables)


def of_python(words: list[str]) -> bool:
    if words[1:3] == ["-m", "pytest"]:
        return all((ROOT / word.partition("::")[0]).is_file() for word in words if word.startswith("tests/"))
    return words[1:3] == ["-m", "sglang.launch_server"] or (ROOT / words[1]).is_file()


def of_pip(words: list[str]) -> bool:
    extras = [extra for word in words for extra in re.findall(r"\[([\w,]+)\]", word)]
    return words[1] == "install" and all(extra in EXTRAS for each in extras for extra in each.split(","))


CHECKS: dict[str, Callable[[list[str]], bool]] = {
    "make": of_make,
    "python": of_python,
    "pip": of_pip,
    "pytest": lambda words: importlib.util.find_spec(words[words.index("--pyargs") + 1]) is not None,
    "vllm": lambda words: words[1] == "serve",
    "cd": lambda words: len(words) == 2,
    "git": lambda words: words[1] == "clone",
    "--custom-generate-function-path": lambda words: words[1].startswith("strands_tito."),
    "--custom-reward-post-process-path": lambda words: locate(words[1]) is not None,
    "--custom-config-path": lambda words: words[1].endswith(".yaml"),
}
"""What is checked of commands other than `tito`. Servers and trainers are other projects' programs."""


@pytest.mark.parametrize(("page", "words"), [pair for pair in COMMANDS if pair[1][0] != "tito"], ids=str)
def test_every_other_command_names_what_exists(page: Path, words: list[str]) -> None:
    assert words[0] in CHECKS, words
    assert CHECKS[words[0]](words), words


def test_what_the_text_calls_a_command_exists() -> None:
    """Such as `make trainers` or `python benchmarks/turn_cost.py` in a sentence."""
    ours = {*typed.command().commands}
    named = re.compile(r"`((?:[A-Z_]+=\S+ )*(?:make|python|tito) [^`]+)`")
    for command in (each for page in PAGES for each in named.findall(TEXT[page])):
        words = [word for word in shlex.split(command) if not re.fullmatch(r"[A-Z_]+=.*", word)]
        if words[0] == "make":
            assert of_make(words), command
        elif words[0] == "python" and not words[1].startswith("-"):
            assert (ROOT / words[1]).is_file(), command
        elif words[0] == "tito" and not words[1].startswith("-"):
            assert words[1] in ours or words[1].isupper(), command
