"""Run the code of README and guides against scripted engines."""

from __future__ import annotations

import ast
import asyncio
import inspect
import re
import sys
import textwrap
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from starlette.testclient import TestClient
from strands import Agent
from strands.tools.mcp import MCPClient

from integration.test_formats_real import CASES, ENGINES
from parsing.families import CALL_FAMILIES
from strands_tito import Policy
from strands_tito.collect import Entry
from strands_tito.collect.cli import collect as collect_command
from strands_tito.export import MissingPackageError
from support import vision
from support.byte_level import byte_level
from support.scripted import Says, call, engine_of, policy_of, tokenizer
from tito_conformance.testing import ScriptedServer
from tito_core import store
from tito_core.backend import OptionalOutputs
from tito_core.chat.template import ChatTemplate, TemplateError
from tito_core.ledger import Reason
from tito_core.parsing import CallFormat, known_tool_parsers, registry
from tito_core.parsing import registry as detection
from tito_core.parsing.turn import TurnParser
from tito_core.termination import Termination
from tito_sglang import wire as sglang_wire
from tito_vllm import wire as vllm_wire

ROOT = Path(__file__).parent.parent
ANSWERS = (call("multiply", '{"a": 25, "b": 17}'), "It is 425.")

MIGRATED = [("sglang", 0, "strands_sglang", "tito_sglang"), ("vllm", 2, "strands_vllm", "tito_vllm")]


def snippets(page: str, language: str = "python", of: str = "") -> list[str]:
    """Return the code blocks of a page, or of its section `of`."""
    text = (ROOT / page).read_text(encoding="utf-8")
    if of:
        text = re.split(r"^## ", text.split(f"\n## {of}\n")[1], flags=re.MULTILINE)[0]
    return re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)


def at_server(code: str, url: str, folder: str) -> str:
    """Replace the server's address and the tokenizer's name by those of the test."""
    code = code.replace('model_id="Qwen/Qwen3-4B"', f'model_id="scripted", tokenizer="{folder}"')
    code = code.replace('tokenizer="smollm2"', f'tokenizer="{folder}"')
    return re.sub(r"http://localhost:\d+", url, code).replace("Qwen/Qwen3-4B", folder)


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
def test_the_readmes_example_and_columns_run_on_both_backends(
    kind: str, folder: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (example,) = snippets("README.md")
    assert len([line for line in example.splitlines() if line.strip()]) <= 11
    answers = (call("calculator", '{"expression": "25 * 17"}'), "It is 425.")
    with ScriptedServer(engine_of(kind, Says(*answers))) as server:
        names: dict[str, Any] = {}
        code = at_server(example, server.base_url, folder).replace('"vllm"', f'"{kind}"')
        exec(compile(code, "README.md", "exec"), names)
    assert len(names["model"].trajectory.segments) == 4
    assert repr(names["model"].trajectory) in capsys.readouterr().out
    assert len(store.read("rollouts.tito")) == 1
    names["model"].policy.store.close()


@pytest.mark.parametrize(("kind", "options"), [("vllm", vllm_wire.OPTIONS), ("sglang", sglang_wire.OPTIONS)])
def test_each_backends_page_runs_and_has_every_option_of_the_errors(
    kind: str, options: dict[str, str], folder: str
) -> None:
    page = "docs/servers.md"
    (code,) = snippets(page, of={"vllm": "vLLM", "sglang": "SGLang"}[kind])
    with ScriptedServer(engine_of(kind, Says("Yes."))) as server:
        names: dict[str, Any] = {}
        exec(compile(at_server(code, server.base_url, folder), page, "exec"), names)
    assert names["model"].policy.info.backend == kind
    text = (ROOT / page).read_text(encoding="utf-8")
    for word in " ".join(options.values()).split():
        assert f"`{word}" in text or f" {word}`" in text or word in ("priority", "processed_logprobs"), word


def test_the_ledger_page_draws_what_its_example_prints(folder: str, capsys: pytest.CaptureFixture[str]) -> None:
    answers = (*ANSWERS, "It is 24.", "With pleasure.", "It is 64.")
    with ScriptedServer(engine_of("vllm", Says(*answers))) as server:
        exec(at_server(snippets("docs/ledger.md")[0], server.base_url, folder), {})
    printed = re.sub(r"^ledger \S+:", "ledger:", capsys.readouterr().out)
    assert printed == re.sub(r"^ledger \S+:", "ledger:", snippets("docs/ledger.md", "text")[0])


def test_the_page_on_tool_calls_runs(
    folder: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry, "_FACTORIES", dict(registry._FACTORIES))  # its parsers are gone afterwards
    monkeypatch.setattr(detection, "_TABLE", dict(detection._TABLE))
    answers = (call("multiply", '{"a": 25}}'), *ANSWERS, *ANSWERS, call("Product", '{"value": 425}'))
    names: dict[str, Any] = {}
    with ScriptedServer(engine_of("vllm", Says(*answers))) as server:
        for snippet in snippets("docs/tools.md"):
            exec(compile(at_server(snippet, server.base_url, folder), "docs/tools.md", "exec"), names)
    printed = capsys.readouterr().out
    assert printed.startswith("hermes - The chat template has '<tool_call>'")
    assert "1 of 2 calls are well-formed\nunknown tool: 0 ok, 1 malformed (The call is not valid JSON)" in printed


@pytest.mark.parametrize(("kind", "first", "theirs", "ours"), MIGRATED)
def test_the_page_on_migrating_runs_with_only_the_import_changed(
    kind: str, first: int, theirs: str, ours: str, folder: str, capsys: pytest.CaptureFixture[str]
) -> None:
    before, after = snippets("docs/migrating.md")[first : first + 2]
    assert before.replace(theirs, ours) == after != before
    with ScriptedServer(engine_of(kind, Says(*ANSWERS))) as server:
        exec(compile(at_server(after, server.base_url, folder), "docs/migrating.md", "exec"), {})
    printed = capsys.readouterr().out
    assert re.search(r"\d+ \d+( \[.*\])?\n\Z", printed)
    assert printed.count("(True, ") == (2 if kind == "sglang" else 0)


def test_the_page_on_migrating_registers_our_package_under_the_others_name(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("strands_sglang", "strands_sglang.tool_parsers"):
        monkeypatch.setitem(sys.modules, name, None)
    names: dict[str, Any] = {}
    exec(snippets("docs/migrating.md")[4], names)
    assert names["SGLangModel"].__module__ == "tito_compat.sglang"
    assert sys.modules["strands_sglang.tool_parsers"] is sys.modules["tito_sglang.tool_parsers"]


def test_every_parser_is_on_the_page_on_tool_calls() -> None:
    table = (ROOT / "docs/tools.md").read_text(encoding="utf-8").split("## Formats")[1].split("The default")[0]
    named = {name for name in known_tool_parsers() if "test" not in name}
    assert set(re.findall(r"`([\w-]+)`", table)) == named


def test_the_formats_that_real_servers_run_are_marked_so() -> None:
    """In a row of the page on tool calls, the last cell is "run", "read", or says which one is run."""
    page = (ROOT / "docs/tools.md").read_text(encoding="utf-8")
    table, marked = page.split("## Formats")[1].split("The default")[0], set()
    for parsers, *_, server in re.findall(r"^\| (`[^|]+) \| ([^|]*)\| ([^|]*)\| ([^|]+) \|$", table, re.MULTILINE):
        named = re.findall(r"`([\w-]+)`", server) if "`" in server else re.findall(r"`([\w-]+)`", parsers)
        marked |= set(named) if "run" in server else set()
    assert {name for _, name in CASES} | {"gpt_oss"} == marked
    assert len(CASES) == len(ENGINES) * (len(marked) - 1), "each on each engine"


OF_DOCSTRING = '<call name=look>{"at": "</call>"}</call>'


@pytest.mark.parametrize(
    ("tokens", "completion", "statuses"),
    [
        ((), OF_DOCSTRING, ["ok"]),
        (("</call>",), OF_DOCSTRING, ["malformed", "malformed"]),  # the second is the stray tag
        ((), '<call name=look>{"at": x}</call><call name=look>{}</call>', ["malformed", "ok"]),
        ((), '<call name=look>{"at": "x"}<call name=look>{}</call>', ["malformed", "malformed"]),
        ((), "<call name=look</call> Then?", ["malformed"]),
    ],
)
def test_the_format_of_callformats_docstring_is_on_the_page_on_tool_calls_and_sound(
    tokens: tuple[str, ...], completion: str, statuses: list[str]
) -> None:
    guide = inspect.getdoc(CallFormat) or ""
    shown = textwrap.dedent(guide[guide.index("    OPEN, CLOSE") : guide.index("Other examples")]).strip()
    page = (ROOT / "docs/tools.md").read_text(encoding="utf-8")
    assert shown in page
    tokenizer = byte_level(tokens)
    names: dict[str, Any] = {}
    imports = "\n".join(re.findall(r"^from tito_core.*", page, re.MULTILINE)[:2])
    exec(f"{imports}\n{shown.partition('register_format')[0]}", names)
    session = TurnParser(tokenizer, names["NamedCalls"]()).start()
    session.feed(tokenizer.encode(completion, add_special_tokens=False))
    assert [call.status for call in session.finish(truncated=False).calls] == statuses


def test_every_format_that_cannot_be_forced_is_listed() -> None:
    unforced = {name for name, family in CALL_FAMILIES.items() if not family.forced}
    text = (ROOT / "docs/tools.md").read_text(encoding="utf-8")
    listed = text.split("Engines have no grammar for")[1].split(": a forced call")[0]
    assert set(re.findall(r"`(\w+)`", listed)) == unforced


def test_every_reason_is_on_the_ledger_page() -> None:
    page = (ROOT / "docs/ledger.md").read_text(encoding="utf-8").split("## Trajectories")[0]
    assert [line.split("`")[1] for line in page.splitlines() if re.match(r"\| `[a-z ]+` \|", line)] == [*Reason]


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
def test_the_page_on_streaming_shows_text_as_it_comes(
    kind: str, folder: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (code,) = snippets("docs/settings.md", of="Stream text")
    with ScriptedServer(engine_of(kind, Says("It is 425, as you know."), latency=0.2)) as server:
        code = at_server(code, server.base_url, folder).replace('"vllm"', f'"{kind}"').replace('end=""', 'end="|"')
        exec("import asyncio\nasync def main():\n" + textwrap.indent(code, "    ") + "\nasyncio.run(main())", {})
    shown = capsys.readouterr().out
    assert shown.replace("|", "") == "It is 425, as you know."
    assert shown.count("|") > 2


def test_the_hooks_page_runs_and_its_limit_is_reached(folder: str, capsys: pytest.CaptureFixture[str]) -> None:
    with ScriptedServer(engine_of("vllm", Says(ANSWERS[0]))) as server:
        names: dict[str, Any] = {}
        exec(at_server(snippets("docs/settings.md", of="Limit an agent's loop")[0], server.base_url, folder), names)
    sampled = len(names["model"].ledger[0].draft.output_ids)
    assert names["model"].ledger.annotation("termination") == "limit"
    assert capsys.readouterr().out.endswith(f"1 {sampled}\n")


def test_the_recipes_for_strands_run(
    folder: str, capfd: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    # Strands gives a server of MCP 30 s to start, which the imports of one take on a machine that others use.
    monkeypatch.setitem(MCPClient.__init__.__kwdefaults__, "startup_timeout", 3600)
    Path("server.py").write_text(MULTIPLYING, encoding="utf-8")
    handoff = call("handoff_to_agent", '{"agent_name": "writer", "message": "Write it."}')
    answers = (*ANSWERS * 3, handoff, "Handed over.", "It is 425.", *ANSWERS, "Yes.")
    with ScriptedServer(engine_of("vllm", Says(*answers), max_model_len=8192)) as server:
        names: dict[str, Any] = {}
        for code in snippets("docs/strands.md"):
            exec(compile(at_server(code, server.base_url, folder), "docs/strands.md", "exec"), names)
            if "app" in names:
                answer = TestClient(names.pop("app")).post("/answer", json={"question": "What is 25 * 17?"}).json()
                assert answer["answer"] == "It is 425.\n"
                assert answer["rollout"] in names["policy"].store
        names["policy"].store.close()
    printed = capfd.readouterr().out
    assert "('planner', 'writer')" in printed
    assert printed.endswith("True\n")
    assert len(store.read("rollouts.tito")) == 5


MULTIPLYING = """
from mcp.server.mcpserver import MCPServer

server = MCPServer("calculator")

@server.tool()
def multiply(a: int, b: int) -> int:
    return a * b

server.run("stdio")
"""


def test_the_templates_page_runs() -> None:
    names: dict[str, Any] = {"policy": policy_of("vllm", "qwen3-tiny")}
    for code in snippets("docs/templates.md"):
        exec(compile(code, "docs/templates.md", "exec"), names)
    assert names["model"]._settings.thinking == "as-template"


def test_the_templates_page_shows_a_certificate_and_a_refusal_as_they_are() -> None:
    shown, refused = snippets("docs/templates.md", "text")
    lines = list(policy_of("vllm", "qwen3-tiny").template.certificate.lines())
    for line, expected in zip(shown.splitlines(), lines, strict=True):
        assert line == expected or expected.startswith(line.removesuffix("..."))
    source = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    prompt = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    with pytest.raises(TemplateError) as caught:
        ChatTemplate.certify(byte_level(template=source + prompt + "{{ messages|length }}"))
    assert " ".join(refused.split()) == " ".join(f"TemplateError: {caught.value}".split())


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
def test_the_page_on_columns_runs(kind: str, folder: str, capsys: pytest.CaptureFixture[str]) -> None:
    (code,) = snippets("docs/recorded.md", of="Record top-k, experts and more")
    with ScriptedServer(engine_of(kind, Says("It is 425."))) as server:
        exec(at_server(code.replace('"vllm"', f'"{kind}"'), server.base_url, folder), {})
    printed = capsys.readouterr().out
    assert printed.endswith("('top_ids', 'top_logprobs', 'prompt_logprobs')\nTrue\nTrue\n")


def test_the_page_on_columns_has_every_optional_output() -> None:
    page = (ROOT / "docs/recorded.md").read_text(encoding="utf-8") + (ROOT / "docs/servers.md").read_text("utf-8")
    assert all(page.count(f"`{name}") >= 2 for name in OptionalOutputs.model_fields)


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
def test_the_page_on_weights_changes_them(kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    (code,) = snippets("docs/scaling.md", of="Change weights, abort, pause")
    with ScriptedServer(engine_of(kind, Says("Yes."))) as server:
        code = re.sub(r"http://localhost:\d+", server.base_url, code).replace('"sglang"', f'"{kind}"')
        exec("import asyncio\nasync def main():\n" + textwrap.indent(code, "    ") + "\nasyncio.run(main())", {})
    assert capsys.readouterr().out == "step-17\n"


def test_the_page_on_testing_runs() -> None:
    end = int(tokenizer().eos_token_id)
    names: dict[str, Any] = {"vocab_size": len(tokenizer()), "eos": end, "tokenizer": tokenizer()}
    for code in snippets("docs/testing.md"):
        exec(compile(code, "<docs/testing.md>", "exec"), names)
    assert callable(names["test_my_agent_keeps_a_sound_ledger"])


def test_every_strategy_is_on_the_page_on_testing() -> None:
    from tito_conformance.testing import strategies

    page = (ROOT / "docs/testing.md").read_text(encoding="utf-8")
    public = [
        name
        for name, found in vars(strategies).items()
        if getattr(found, "__module__", None) == strategies.__name__ and not name.startswith("_")
    ]
    assert len(public) >= 9
    assert [name for name in public if f"`{name}(" not in page] == ["sampling"]


def test_the_page_on_scaling_runs(folder: str, capsys: pytest.CaptureFixture[str]) -> None:
    with ScriptedServer(engine_of("vllm", Says("Yes."))) as server:
        exec(at_server(snippets("docs/scaling.md")[0], server.base_url, folder), {})
        turns = sum("x-session-id" in request.headers for request in server.engine.requests)
    assert capsys.readouterr().out.endswith("8 rollouts\n")
    assert turns == 8


def test_the_page_on_workers_loads_weights_on_all() -> None:
    (code,) = snippets("docs/scaling.md", of="Administer the workers")
    with (
        ScriptedServer(engine_of("sglang", Says("Yes."))) as one,
        ScriptedServer(engine_of("sglang", Says("Yes."))) as two,
    ):
        code = code.replace("http://localhost:30000", one.base_url).replace("http://localhost:30001", two.base_url)
        policy = Policy.connect(backend="sglang", base_url=one.base_url, tokenizer=tokenizer())
        exec(
            "import asyncio\nasync def main():\n" + textwrap.indent(code, "    ") + "\nasyncio.run(main())",
            {"policy": policy},
        )
        assert [server.engine.state.weight_version for server in (one, two)] == ["step-17", "step-17"]


def test_the_page_on_collecting_runs(
    folder: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    with ScriptedServer(engine_of("vllm", Says("It is 34, or 17, or 0."))) as server:
        for code in snippets("docs/collect.md"):
            exec(compile(at_server(code, server.base_url, folder), "docs/collect.md", "exec"), names)
    first, *ledgers = capsys.readouterr().out.splitlines()
    assert first == "8 finished, 0 failed"
    rewards = {"sum-0": 1.0, "sum-1": 1.0, "sum-2": 1.0, "sum-3": 0.0}
    assert sorted(ledgers) == [f"{task} {n} {reward} completed" for task, reward in rewards.items() for n in (0, 1)]
    assert names["make"].__name__ == "make"


def test_the_page_on_collecting_has_every_termination_option_and_field() -> None:
    page = (ROOT / "docs/collect.md").read_text(encoding="utf-8")
    assert re.findall(r"^\| `(\w+)` \| .* \| (?:finished|failed) \|$", page, re.MULTILINE) == [*Termination]
    table = page.split("| field | |")[1].split("\n\n")[0]
    assert set(re.findall(r"`(\w+)`", table)) == set(Entry.__struct_fields__)
    parameters = inspect.signature(collect_command).parameters
    options = {f"--{name.replace('_', '-')}" for name in parameters}
    shown = [word for code in snippets("docs/collect.md", "bash") for word in code.split() if word.startswith("--")]
    assert {*shown, *re.findall(r"`(--[a-z-]+)", page)} - {"--help", "--working-dir"} <= options


def test_each_section_on_trainers_runs_by_itself(
    folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With a file of one rollout, whose reward is 0.5. A trainer's function runs up to the import of its package."""
    monkeypatch.chdir(tmp_path)
    page, yes = (ROOT / "docs/trainers.md").read_text("utf-8"), "It is 425."
    packages = {"Agent Lightning": "agentlightning", "Tinker": "tinker", "SkyRL": "skyrl"}
    packages["verifiers and prime-rl"] = "verifiers"
    agents = "An agent for slime, verl and TRL"
    rows = {"row.label": SimpleNamespace(label="425")}
    rows['row["reward_model"]["ground_truth"]'] = {"reward_model": {"ground_truth": "425"}}
    ran = []
    with ScriptedServer(engine_of("vllm", Says(yes, yes, *ANSWERS, yes, yes))) as server:
        policy = Policy.connect(backend="vllm", base_url=server.base_url, tokenizer=folder)
        recorded = policy.model(ledger=policy.ledger(group_id="prompt-17"))
        Agent(model=recorded, callback_handler=None)("What is 25 * 17?")
        recorded.ledger.annotate("reward", 0.5)
        store.append("rollouts.tito", [recorded.ledger])
        for section in re.findall(r"^## (.*)$", page, re.MULTILINE):
            names: dict[str, Any] = {}
            missing = packages.get(section)
            for number, snippet in enumerate(snippets("docs/trainers.md", of=section)):
                code = compile(at_server(snippet, server.base_url, folder), section, "exec")
                if missing and find_spec(missing) is None and (number == 0 or f"import {missing}" in snippet):
                    with pytest.raises((MissingPackageError, ModuleNotFoundError), match=missing):
                        exec(code, names)
                else:
                    exec(code, names)
            for answer, row in rows.items() if section == agents else ():
                assert f"`{answer}`" in page
                exec(at_server(snippet, server.base_url, folder).replace("row.label", answer), names)
                scored = policy.model()
                names["make_agent"](scored, row)("What is 25 * 17?")
                assert scored.ledger.annotation("reward") == 1.0
            ran += [section] if names else []
    assert capsys.readouterr().out == "True\ncompleted\nsolver 1.0 0.6 1.6\n1\n"
    assert ran == ["In Python", "Rewards", agents, "TRL", *packages]


def test_the_page_on_training_runs_and_its_examples_exist(folder: str, capsys: pytest.CaptureFixture[str]) -> None:
    (code,) = snippets("docs/training.md")
    with ScriptedServer(engine_of("vllm", Says(*ANSWERS))) as server:
        exec(at_server(code, server.base_url, folder), {})
    assert capsys.readouterr().out.endswith("{'default'}\n")
    page = (ROOT / "docs/training.md").read_text(encoding="utf-8")
    for path in re.findall(r"\| `(examples/\w+\.py)` \|", page):
        assert len((ROOT / path).read_text(encoding="utf-8").splitlines()) < 80, path


def test_the_page_on_images_runs() -> None:
    code, ban = snippets("docs/images.md")
    line = 'TITOModel(backend="vllm", base_url="http://localhost:8000", tokenizer="Qwen/Qwen3-VL-4B-Instruct")'
    assert line in code
    shown, photo = vision.png(8, 8, 1), vision.png(12, 4, 2)
    engine = vision.VisionEngine([call("screenshot", "{}") + "<|im_end|>", "A screen.<|im_end|>"])
    names: dict[str, Any] = {"policy": asyncio.run(vision.policy_of(engine)), "photo": photo, "take_png": lambda: shown}
    ready = compile(
        code.replace(line, "TITOModel.of(policy)"),
        "docs/images.md",
        "exec",
        flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT,
    )
    asyncio.run(eval(ready, names))
    assert [image.data for image in names["t"].images] == [photo, shown]
    exec(compile(ban, "docs/images.md", "exec"), names)
    bias = names["model"].get_config()["sampling"]["extra"]["logit_bias"]
    pads = names["policy"].tokenizer.convert_tokens_to_ids([vision.PAD_TEXT, vision.VIDEO_TEXT])
    assert bias == {str(token): -100 for token in pads}


def test_the_guide_shows_the_third_backend_and_it_is_short() -> None:
    code = (ROOT / "tests" / "conformance" / "toy" / "toy_backend.py").read_text()
    assert len(code.splitlines()) < 120
    assert f"```python\n{code}```" in (ROOT / "docs/backends.md").read_text()
