"""Run real harnesses through gateways before scripted engines, for the tables of docs/gateway.md and docs/gateways.md.

    python tools/harnesses.py [--write] [HARNESS ...]
    python tools/harnesses.py --python python3.12 --environments DIR --gateway NAME [--gateway NAME ...] [HARNESS ...]
    python tools/pages.py

Each harness is installed in the release that is named here, in the user's cache, and mends a file by tool calls that a
scripted policy makes. The first form runs them through our gateway, in process, and reads its ledgers; it fails where
the file is not mended, or a branch is not one that the release makes. The second form runs them through any gateway
that has an adapter, and writes a report to evidence/harnesses; each is compared with the engine's log. What a harness
does is data of its release, in the tables; no code of ours knows its name.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from platformdirs import user_cache_path

from strands_tito import Policy
from strands_tito.gateway import Gateway
from strands_tito.inspect.show import drifted_turns
from tito_conformance.gateway.adapter import ADAPTERS, ChildGateway, GatewayError
from tito_conformance.gateway.audit import Row, check_extends, check_trained, trained_once
from tito_conformance.gateway.child import facts_in
from tito_conformance.gateway.engine import END, Answers, Call, Engine
from tito_conformance.gateway.run import MODEL
from tito_conformance.gateway.session import Failed
from tito_conformance.testing import Completion, ScriptedRequest, ScriptedServer
from tito_core.ledger.laws import check_ledger
from tito_engines.models import qwen3_instruct

ROOT = Path(__file__).parents[1]
PAGE, REPORTS = ROOT / "docs" / "gateway.md", ROOT / "evidence" / "harnesses"
BEGIN, END_OF_TABLE = "<!-- harnesses -->\n", "<!-- end -->\n"
CONTEXT = 200_000
SECONDS = 180
WRONG, RIGHT = "hello wrold\n", "hello world\n"
PROMPT, DONE = "Fix the typo in a.txt", "The file a.txt is mended: it says world now."
Said = tuple[str, Mapping[str, Any]]
"""Name and arguments of a call."""


def said(text: str, *calls: Said) -> str:
    """Return an answer's text: words, then calls in Hermes' form, spaced as the template does."""
    made = [json.dumps({"name": name, "arguments": given}) for name, given in calls]
    return "\n".join([*filter(None, [text]), *(f"<tool_call>\n{call}\n</tool_call>" for call in made)])


@dataclass(frozen=True)
class Harness:
    """A harness.

    Attributes:
        release: The release that is run.
        wire: The wire that it speaks.
        program: Its program, below the folder that it is installed in.
        install: Arguments of pip, or else of npm, that install it.
        command: Returns its arguments and environment, of a session's address without `/v1`, its key and a home.
        policies: Returns what policies answer, a list for each rollout, of the file's path.
        branches: Branches that the release makes in these rollouts, by reason.
    """

    release: str
    wire: str
    program: str
    install: str
    command: Callable[[str, str, Path], tuple[Sequence[str], Mapping[str, str]]]
    policies: Callable[[str], Sequence[Sequence[str]]]
    branches: Mapping[str, int] = field(default_factory=dict)


def claude_code(url: str, key: str, home: Path) -> tuple[Sequence[str], Mapping[str, str]]:
    """Return Claude Code's arguments and environment."""
    variables = {"ANTHROPIC_BASE_URL": url, "ANTHROPIC_API_KEY": key, "DISABLE_TELEMETRY": "1"}
    variables["CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC"] = "1"
    return ["-p", PROMPT, "--model", MODEL, "--allowedTools", "Read,Edit"], variables


def codex(url: str, key: str, home: Path) -> tuple[Sequence[str], Mapping[str, str]]:
    """Return Codex' arguments and environment."""
    (home / ".codex").mkdir()
    provider = f'name = "tito"\nbase_url = "{url}/v1"\nenv_key = "TITO_KEY"\nwire_api = "responses"\n'
    text = f'model = "{MODEL}"\nmodel_provider = "tito"\n[model_providers.tito]\n{provider}'
    (home / ".codex" / "config.toml").write_text(text)
    return ["exec", "--skip-git-repo-check", "--sandbox", "danger-full-access", PROMPT], {"TITO_KEY": key}


def mini_swe_agent(url: str, key: str, home: Path) -> tuple[Sequence[str], Mapping[str, str]]:
    """Return mini-swe-agent's arguments and environment."""
    model = {"model_name": f"openai/{MODEL}", "model_kwargs.api_base": f"{url}/v1", "model_kwargs.api_key": key}
    given = {**model, "cost_tracking": "ignore_errors"}
    options = [word for name, value in given.items() for word in ("-c", f"model.{name}={value}")]
    command = ["-c", "mini.yaml", *options, "-t", PROMPT, "-y", "--exit-immediately", "-o", str(home / "out.json")]
    return command, {"MSWEA_CONFIGURED": "true", "LITELLM_LOCAL_MODEL_COST_MAP": "True"}  # no look-up of prices


def mending(look: Said, wrong: Said, mend: Said, end: Sequence[str]) -> list[list[str]]:
    """Return four policies: calls alone, words beside them, a call that fails first, and two calls in one answer."""
    looks, mends = said("", look), said("", mend)
    return [
        [looks, mends, *end],
        [said("I look at the file.", look), said("The word is misspelt, so I mend it.", mend), *end],
        [said("", wrong), looks, mends, *end],
        [said("Twice.", look, look), mends, *end],
    ]


def command_policies(name: str, key: str, end: Sequence[str]) -> list[list[str]]:
    """Return the policies of a harness with a tool that runs commands."""
    cat, wrong, mend = ((name, {key: text}) for text in ("cat a.txt", "cat b.txt", "sed -i s/wrold/world/ a.txt"))
    return mending(cat, wrong, mend, end)


FINISH = said("", ("bash", {"command": "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"}))
BASH = command_policies("bash", "command", [FINISH])
HARNESSES = {
    "claude-code": Harness(
        "2.1.197",
        "messages",
        "node_modules/.bin/claude",
        "@anthropic-ai/claude-code@2.1.197",
        claude_code,
        lambda path: mending(
            ("Read", {"file_path": path}),
            ("Read", {"file_path": f"{path}.none"}),
            ("Edit", {"file_path": path, "old_string": "wrold", "new_string": "world"}),
            [DONE],
        ),
    ),
    "codex": Harness(
        "0.171.0",
        "responses",
        "node_modules/.bin/codex",
        "@openai/codex@0.171.0",
        codex,
        lambda path: command_policies("exec_command", "cmd", [DONE]),
    ),
    "mini-swe-agent": Harness(
        "2.4.6",
        "chat",
        "bin/mini",
        "mini-swe-agent==2.4.6",
        mini_swe_agent,
        # the last one answers without a command, which this release leaves out of its next request
        lambda path: [*BASH, [BASH[0][0], "I think that I know the typo already.", *BASH[0][1:]]],
        {"rewind": 1},
    ),
}


class Mending(Answers):
    """The script of one rollout after another: an answer for each new prompt with tools, in ids that drift.

    As in the kit, these are ids that encoding their text does not give: a real policy samples such ids now and then,
    this one in each turn, except where `canonical` is set.
    """

    answers: Sequence[str] = ()
    canonical = False
    seen: dict[Sequence[int], int]

    def begin(self, answers: Sequence[str]) -> None:
        """Begin a rollout."""
        self.answers, self.seen = answers, {}

    def kind(self, request: ScriptedRequest) -> str:
        """Return "text": no word of a prompt is a mark."""
        return "text"

    def __call__(self, request: ScriptedRequest) -> Completion:
        """Return the next answer; the same one to a prompt that is sent again."""
        if request.scoring or "<tools>" not in self.text(request) or not self.answers:
            return self.sampled(request, self._encode("Fine." + END))
        at = self.seen.setdefault(request.prompt_ids, len(self.seen))
        rng = random.Random(f"{self._seed}/{request.number}")
        answer = self.answers[at] if at < len(self.answers) else DONE
        ids = self._encode(answer + END) if self.canonical else self.drifted(answer, rng, request.max_new_tokens)
        return self.sampled(request, ids)


def installed(harness: Harness, python: str) -> Path:
    """Install a harness in the user's cache, and return its program."""
    folder = user_cache_path("tito") / "harnesses" / f"{Path(harness.program).name}-{harness.release}"
    program = folder / harness.program
    if program.exists():
        return program
    folder.mkdir(parents=True, exist_ok=True)
    if "==" in harness.install:
        subprocess.run([python, "-m", "venv", folder], check=True)
        command = [str(folder / "bin" / "python"), "-m", "pip", "install", "-q", harness.install]
    else:
        command = ["npm", "install", "--no-fund", "--no-audit", "--silent", harness.install]
    subprocess.run(command, cwd=folder, check=True)
    return program


async def mended(
    harness: Harness, program: Path, engine: Engine, number: int, open_session: Callable[[], Any]
) -> tuple[bool, list[Call], str]:
    """Run a harness with a policy; return whether the file is right, the engine's calls and what was printed."""
    work, home = Path(tempfile.mkdtemp()), Path(tempfile.mkdtemp())
    (work / "a.txt").write_text(WRONG)
    assert isinstance(engine.answers, Mending)
    engine.answers.begin(harness.policies(str(work / "a.txt"))[number])
    session, before = await open_session(), len(engine.calls(PROMPT))  # a gateway may call the engine for itself
    options, variables = harness.command(session["base_url"].rstrip("/").removesuffix("/v1"), session["api_key"], home)
    process = await asyncio.create_subprocess_exec(
        program,
        *options,
        cwd=work,
        env={**os.environ, "HOME": str(home), **variables},
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    try:
        printed, _ = await asyncio.wait_for(process.communicate(), SECONDS)
    except TimeoutError:
        process.kill()
        printed = f"no end after {SECONDS} s".encode()
    right = (work / "a.txt").read_text() == RIGHT
    shutil.rmtree(work)
    shutil.rmtree(home)
    return right, engine.calls(PROMPT)[before:], printed.decode()


def engine_for(wire: str, release: str = "0.32.0") -> Engine:
    """Return the scripted engine."""
    return Engine(wire, str(qwen3_instruct.tokenizer(print)), 0, release, answers=Mending, context=CONTEXT)


# Our gateway, by its ledgers


async def run_ours(harness: Harness, program: Path, wire: str) -> dict[str, Any]:
    """Run all policies of a harness through our gateway on an engine's wire; return counts of its ledgers."""
    engine = engine_for(wire)
    counts: dict[str, Any] = {name: Counter[str]() for name in ("branches", "normalisers", "ignored", "all")}
    with ScriptedServer(engine.scripted) as server:
        policy = await Policy.connect_async(backend=wire, base_url=server.base_url, tokenizer=engine.tokenizer)
        async with policy, Gateway(policy) as gateway:
            for number in range(len(harness.policies(""))):
                name = f"rollout-{number}"

                async def opened(name: str = name) -> dict[str, str]:
                    return {"base_url": f"{gateway.url}/sessions/{name}/v1", "api_key": "EMPTY"}

                right, _, printed = await mended(harness, program, engine, number, opened)
                ledger = await gateway.end(name, reward=float(right))
                check_ledger(ledger)
                if not right:
                    raise SystemExit(
                        f"{program.name} {number} on {wire}: not mended\n{ledger.tree()}\n{printed[-3000:]}"
                    )
                notes = [each.value for each in ledger.annotations if each.name == "gateway"]
                counts["branches"].update(str(turn.draft.branch.reason) for turn in ledger if turn.draft.branch)
                for note in notes:
                    counts["normalisers"].update(note["normalised"])
                    counts["ignored"].update(note["ignored"])
                drifted = drifted_turns(ledger, engine.tokenizer)
                tokens = [len(turn.draft.output_ids) for turn in ledger]
                counts["all"].update(
                    rollouts=1,
                    one=len(ledger.trajectories) == 1,
                    turns=len(ledger),
                    drifted=len(drifted),
                    tokens=sum(tokens),
                    drifted_tokens=sum(tokens[index] for index in drifted),
                )
    if counts["branches"] != harness.branches:
        raise SystemExit(f"{program.name} on {wire} branched otherwise than noted: {counts['branches']}")
    return counts


def own_row(name: str, harness: Harness, found: Sequence[Mapping[str, Any]]) -> str:
    """Return a row of our table, of what was counted on each engine's wire."""
    whole = {key: sum((each[key] for each in found), Counter[str]()) for key in found[0]}
    every = whole["all"]
    cells = [
        f"{name} {harness.release}",
        harness.wire,
        f"{every['rollouts']}, {every['turns']} turns",
        f"{every['one']} of {every['rollouts']}",
        _counted(whole["branches"]),
        _counted(whole["normalisers"]),
        f"{every['drifted']} of {every['turns']} turns, {every['drifted_tokens']:,} of {every['tokens']:,} tokens",
        ", ".join(f"`{key}`" for key in sorted(whole["ignored"])) or "-",
    ]
    return f"| {' | '.join(cells)} |"


def _counted(found: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {count}" for name, count in sorted(found.items())) or "-"


def write_ours(rows: Sequence[str]) -> None:
    """Write our table to its page."""
    heads = ["harness, release", "wire", "rollouts", "of one row", "branches", "normalisers", "drift avoided"]
    lines = [f"| {' | '.join([*heads, 'keys without effect'])} |", "|" + " --- |" * (len(heads) + 1), *rows]
    before, _, rest = PAGE.read_text("utf-8").partition(BEGIN)
    after = rest.partition(END_OF_TABLE)[2]
    PAGE.write_text(before + BEGIN + "\n".join(lines) + "\n" + END_OF_TABLE + after, "utf-8")


# Any gateway, by the engine's log


def judged(rows: Sequence[Row], calls: Sequence[Call], tokenizer: Any) -> dict[str, Any]:
    """Return the counts of one rollout, and the first difference of its rows from the engine's log."""
    kept = sum(any(_extends(before, call, tokenizer) for before in calls[:at]) for at, call in enumerate(calls))
    try:
        check_trained(rows, calls, once=True)
        finding = ""
    except Failed as failed:
        finding = str(failed)
    sampled = sum(len(call.output_ids) for call in calls)
    found = {"turns": len(calls), "rows": len(rows), "sampled": sampled, "once": trained_once(rows, calls)}
    return {**found, "later": max(0, len(calls) - 1), "kept": kept, "finding": finding}


def _extends(before: Call, after: Call, tokenizer: Any) -> bool:
    try:
        check_extends(before, after, tokenizer)
    except Failed:
        return False
    return True


async def run_gateway(gateway: ChildGateway, wire: str, programs: Mapping[str, Path]) -> None:
    """Run harnesses through a gateway on an engine's wire, and write a report for each."""
    try:
        await gateway.open()
        facts = gateway.facts
        engine = engine_for(wire, facts.release)
        async with ScriptedServer(engine.scripted) as server:
            assert isinstance(engine.answers, Mending)
            await gateway.start(server.base_url, wire, str(qwen3_instruct.tokenizer(print)), MODEL)
            for name in (each for each in programs if facts.tools and HARNESSES[each].wire in facts.speaks):
                count, rollouts = len(HARNESSES[name].policies("")), []
                for number, canonical in [*((number, False) for number in range(count)), (0, True)]:
                    own = f"{name}-{number}-{canonical}"
                    engine.answers.canonical = canonical
                    args = HARNESSES[name], programs[name], engine, number, lambda own=own: gateway.session(own)
                    right, calls, printed = await mended(*args)
                    found = judged(await gateway.export(own), calls, engine.tokenizer)
                    one = {"canonical": canonical, "mended": right, **found}
                    rollouts.append(one if right else {**one, "printed": printed[-400:]})
                    print(name, facts.name, facts.variant, wire, rollouts[-1], flush=True)
                write_report(name, gateway, wire, rollouts)
    finally:
        await gateway.stop()


def write_report(name: str, gateway: ChildGateway, wire: str, rollouts: Sequence[Mapping[str, Any]]) -> None:
    """Write the report of a harness, a gateway and an engine's wire."""
    kept = {key: asdict(gateway.facts)[key] for key in ("name", "version", "variant", "token_in", "note")}
    about = {"harness": name, "release": HARNESSES[name].release, "gateway": kept, "wire": wire}
    dated = {**about, "date": datetime.now(UTC).date().isoformat(), "rollouts": rollouts}
    REPORTS.mkdir(parents=True, exist_ok=True)
    named = "-".join([name, gateway.facts.name, gateway.facts.variant or "default", wire])
    (REPORTS / f"{named}.json").write_text(json.dumps(dated, indent=1) + "\n", encoding="utf-8")


def main() -> None:
    """Run the harnesses; see above."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="HARNESS", help=f"of {', '.join(HARNESSES)}; default: all")
    parser.add_argument("--write", action="store_true", help="write the table of docs/gateway.md")
    parser.add_argument("--gateway", action="append", help="an adapter; repeatable")
    parser.add_argument("--wire", action="append", help="run only on this engine's wire; repeatable")
    parser.add_argument("--python", default=sys.executable, help="interpreter of new environments")
    parser.add_argument("--environments", type=Path, help="folder of the gateways' environments (tools/gateways.py)")
    arguments = parser.parse_args()
    names = arguments.names or [*HARNESSES]
    programs = {name: installed(HARNESSES[name], arguments.python) for name in names}
    for each in arguments.gateway or ():
        adapter = ADAPTERS / f"{each.replace('-', '_')}.py"
        facts = facts_in(str(adapter))
        python = arguments.environments / each / "bin/python" if facts["pip"] else Path(sys.executable)
        for variant in facts.get("variants") or [""]:
            for wire in (each for each in facts["wires"] if each in (arguments.wire or facts["wires"])):
                try:
                    asyncio.run(run_gateway(ChildGateway(adapter, str(python), variant), wire, programs))
                except GatewayError as error:
                    print(f"{each}: {error}", file=sys.stderr)
    if arguments.gateway:
        return
    rows = []
    for name in names:
        found = [asyncio.run(run_ours(HARNESSES[name], programs[name], wire)) for wire in ("vllm", "sglang")]
        rows.append(own_row(name, HARNESSES[name], found))
        print(rows[-1], flush=True)
    if arguments.write:
        write_ours(rows)


if __name__ == "__main__":
    main()
