"""Run real harnesses through the gateway before scripted engines, and write the table of docs/gateway.md.

    python tools/harnesses.py [--write] [NAME...]

Each harness is installed from npm in the release that is named here, in the user's cache, and mends a file by two tool
calls that a scripted policy makes, on the wire of each engine. It fails where the file is not mended, or where the
rollout is not one path. What a harness does is data of its release, in the table; no code of ours knows its name.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from platformdirs import user_cache_path

from strands_tito import Policy
from strands_tito.gateway import Gateway
from tito_conformance.testing import Completion, ScriptedRequest, ScriptedServer, scripted_engine
from tito_core.ledger.laws import check_ledger
from tito_engines.models import load_tokenizer, qwen3_instruct

PAGE = Path(__file__).parents[1] / "docs" / "gateway.md"
BEGIN, END = "<!-- harnesses -->\n", "<!-- end -->\n"
CONTEXT = 200_000
SECONDS = 180
WRONG, RIGHT = "hello wrold\n", "hello world\n"
PROMPT = "Fix the typo in a.txt"


@dataclass(frozen=True)
class Harness:
    """A harness.

    Attributes:
        package: Its npm package.
        release: The release that is run.
        wire: The wire that it speaks.
        command: Returns its command, without the program, and its environment, of the gateway's address and a home.
        calls: The calls that mend the file, of the file's path.
    """

    package: str
    release: str
    wire: str
    program: str
    command: Callable[[str, Path], tuple[Sequence[str], Mapping[str, str]]]
    calls: Callable[[str], Sequence[tuple[str, dict[str, Any]]]]


def claude_code(url: str, home: Path) -> tuple[Sequence[str], Mapping[str, str]]:
    """Return Claude Code's command and environment."""
    variables = {"ANTHROPIC_BASE_URL": url, "ANTHROPIC_API_KEY": "EMPTY:rollout", "DISABLE_TELEMETRY": "1"}
    variables["CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC"] = "1"
    return ["-p", PROMPT, "--allowedTools", "Read,Edit"], variables


def codex(url: str, home: Path) -> tuple[Sequence[str], Mapping[str, str]]:
    """Return Codex' command and environment."""
    (home / ".codex").mkdir()
    provider = f'name = "tito"\nbase_url = "{url}/v1"\nenv_key = "TITO_KEY"\nwire_api = "responses"\n'
    text = f'model = "policy"\nmodel_provider = "tito"\n[model_providers.tito]\n{provider}'
    (home / ".codex" / "config.toml").write_text(text)
    options = ["exec", "--skip-git-repo-check", "--sandbox", "danger-full-access"]
    return [*options, PROMPT], {"TITO_KEY": "EMPTY:rollout"}


HARNESSES = {
    "claude-code": Harness(
        "@anthropic-ai/claude-code",
        "2.1.197",
        "messages",
        "claude",
        claude_code,
        lambda path: [
            ("Read", {"file_path": path}),
            ("Edit", {"file_path": path, "old_string": "wrold", "new_string": "world"}),
        ],
    ),
    "codex": Harness(
        "@openai/codex",
        "0.171.0",
        "responses",
        "codex",
        codex,
        lambda path: [("exec_command", {"cmd": "cat a.txt"}), ("exec_command", {"cmd": "sed -i s/wrold/world/ a.txt"})],
    ),
}


def installed(harness: Harness) -> Path:
    """Install a harness in the user's cache, and return its program."""
    folder = user_cache_path("tito") / "harnesses" / f"{harness.program}-{harness.release}"
    program = folder / "node_modules" / ".bin" / harness.program
    if not program.exists():
        folder.mkdir(parents=True, exist_ok=True)
        command = ["npm", "install", "--no-fund", "--no-audit", "--silent", f"{harness.package}@{harness.release}"]
        subprocess.run(command, cwd=folder, check=True)
    return program


async def run(harness: Harness, program: Path, kind: str) -> dict[str, Any]:
    """Run a harness once on the wire of an engine, and return its row of the table."""
    tokenizer = load_tokenizer(str(qwen3_instruct.tokenizer(print)))
    work, home = Path(tempfile.mkdtemp()), Path(tempfile.mkdtemp())
    (work / "a.txt").write_text(WRONG)
    calls = [json.dumps({"name": name, "arguments": given}) for name, given in harness.calls(str(work / "a.txt"))]
    answers = [*(f"<tool_call>\n{call}\n</tool_call>" for call in calls), "It is fixed."]

    def script(request: ScriptedRequest) -> Completion:
        if request.scoring or "<tools>" not in tokenizer.decode(request.prompt_ids):
            return Completion(tokenizer.encode("Fine.<|im_end|>"))
        return Completion(tokenizer.encode((answers.pop(0) if answers else "Done.") + "<|im_end|>"))

    engine = scripted_engine(
        kind,
        script,
        vocab_size=len(tokenizer),
        eos_ids=[tokenizer.eos_token_id],
        max_model_len=CONTEXT,
        decode=lambda ids: str(tokenizer.decode(ids)),
        encode=lambda text, special: tokenizer.encode(text, add_special_tokens=special),
    )
    with ScriptedServer(engine) as server:
        policy = await Policy.connect_async(backend=kind, base_url=server.base_url, tokenizer=tokenizer)
        async with policy, Gateway(policy) as gateway:
            options, variables = harness.command(gateway.url, home)
            process = await asyncio.create_subprocess_exec(
                program,
                *options,
                cwd=work,
                env={**os.environ, "HOME": str(home), **variables},
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.STDOUT,
            )
            printed, _ = await asyncio.wait_for(process.communicate(), SECONDS)
            ledger = await gateway.end("rollout", reward=float((work / "a.txt").read_text() == RIGHT))
    check_ledger(ledger)
    notes = [each.value for each in ledger.annotations if each.name == "gateway"]
    used = sum((Counter(note["normalised"]) for note in notes), Counter[str]())
    if ledger.annotation("reward") != 1.0 or len(ledger.trajectories) != 1:
        raise SystemExit(f"{program.name} on {kind}: {ledger.annotations}\n{ledger.tree()}\n{printed.decode()[-3000:]}")
    shutil.rmtree(work)
    shutil.rmtree(home)
    return {
        "turns": len(ledger),
        "rows": len(ledger.trajectories),
        "tokens": f"{len(ledger.trajectories[0]):,}",
        "normalisers": ", ".join(f"{name} {count}" for name, count in sorted(used.items())) or "-",
        "without effect": ", ".join(f"`{key}`" for note in notes for key in note["ignored"]) or "-",
    }


def main() -> None:
    """Run the harnesses, print their rows, and write them with --write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"one of {', '.join(HARNESSES)}; default: all")
    parser.add_argument("--write", action="store_true", help="write the table of docs/gateway.md")
    arguments = parser.parse_args()
    lines = ["| harness, release | wire | turns | rows | tokens | normalisers | keys without effect |"]
    lines.append("| --- | --- | --- | --- | --- | --- | --- |")
    for name in arguments.names or HARNESSES:
        harness = HARNESSES[name]
        program = installed(harness)
        rows = [asyncio.run(run(harness, program, kind)) for kind in ("vllm", "sglang")]
        shown = [{key: value for key, value in row.items() if key != "tokens"} for row in rows]
        if shown[0] != shown[1]:
            sys.exit(f"{name} differs by engine: {rows}")
        cells = [f"{name} {harness.release}", harness.wire, *map(str, rows[0].values())]
        lines.append(f"| {' | '.join(cells)} |")
        print(lines[-1])
    if arguments.write:
        before, _, rest = PAGE.read_text("utf-8").partition(BEGIN)
        PAGE.write_text(before + BEGIN + "\n".join(lines) + "\n" + END + rest.partition(END)[2], "utf-8")


if __name__ == "__main__":
    main()
