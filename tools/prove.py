"""Run the large proofs, chunk by chunk, going on where an earlier run stopped, and write docs/proofs.{json,md}.

Each chunk is one command, which is printed, with a seed derived from the run's: the command alone runs it again.
What is done is kept as long as the code that it proves has not changed; then the proof begins anew.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RESULTS, PAGE = ROOT / "docs" / "proofs.json", ROOT / "docs" / "proofs.md"
LEDGER = ("src/tito_core/ledger", "src/tito_core/store")
CHAT = ("src/tito_core/chat", "tests/chat/prove/zoo.py", "tests/support/zoo.py", "tests/support/zoo_templates.json")
PARSING = ("src/tito_core/parsing", "tests/parsing/families.py")
INTERRUPT = ("src/tito_core/interrupt.py", "src/strands_tito/__main__.py", "tests/support/interrupted.py")
ORACLE = ("tests/support/oracle.py", "tests/support/forests.py", "tests/support/equal.py")


@dataclass(frozen=True)
class Proof:
    """Something that is run many times.

    Attributes:
        what: What is proven, as a sentence.
        unit: What is counted.
        count: How many of them.
        chunk: How many at a time.
        paths: The code that it is about.
        command: The command for a chunk, from its size and seed.
        counted: Finds in the output how many were run.
    """

    what: str
    unit: str
    count: int
    chunk: int
    paths: tuple[str, ...]
    command: Callable[[int, int], str]
    counted: str


PYTEST = "python -m pytest -q --timeout 0 -p no:cacheprovider"
PROOFS = {
    "forests": Proof(
        "Random forests, two ledgers in one file, equal an independent oracle of plain lists and dicts: every column, "
        "mask, segment, branch, history and record, after failed commits, restarts and round trips.",
        "forests",
        100_000,
        2_500,
        (*LEDGER, *ORACLE, "tests/ledger/test_forest.py"),
        lambda count, seed: (
            f"TITO_EXAMPLES={count} {PYTEST} tests/ledger/test_forest.py --hypothesis-seed={seed} "
            "--hypothesis-show-statistics"
        ),
        r"(\d+) passing",
    ),
    "crashes": Proof(
        "Writers are killed with SIGKILL at random moments: every turn committed before the last fsync is read back, "
        "in order and unchanged; nothing torn is read; the file takes more turns.",
        "kills",
        200,
        20,
        (*LEDGER, "tests/support/crash_writer.py", "tests/store/test_store_crash.py"),
        lambda count, seed: f"TITO_KILLS={count} TITO_SEED={seed} {PYTEST} -s tests/store/test_store_crash.py",
        r"(\d+) kills",
    ),
    **{
        f"forced-{engine}-{model}": Proof(
            f"Tool calls that a grammar forces on a real {title} with {model}: each is one sound call of the forced "
            "tool, its arguments are valid by the tool's schema, and all its tokens are marked CONSTRAINED.",
            "calls",
            500,
            500,
            ("src/tito_core/parsing", "src/tito_core/turn/inputs.py", "tests/support/forced_calls.py"),
            lambda count, seed, engine=engine, model=model: (
                f"python tests/parsing/prove/forced_engines.py {engine} --model {model} --calls {count} --seed {seed}"
            ),
            r"(\d+) right",
        )
        for engine, title in (("vllm", "vLLM"), ("sglang", "SGLang"))
        for model in ("smollm2", "qwen3-tiny")
    },
    "faults": Proof(
        "Rollouts through a proxy that breaks a third of all requests (a reset or an orderly close at each class of "
        "bytes of request and answer, late answers, slow drips, 429 with Retry-After, storms of 503, halved bodies, "
        "silence), on both wires, some cancelled meanwhile: every turn is what the server says it saw and said, every "
        "error has a type, no try beyond the policy's, and no task, connection or running request is left.",
        "rollouts on each wire",
        2_000,
        500,
        (
            "src/tito_core/backend",
            "src/tito_sglang",
            "src/tito_vllm",
            "tests/support/proxy.py",
            "tests/model/test_fault_proxy.py",
        ),
        lambda count, seed: f"TITO_ROLLOUTS={count} TITO_SEED={seed} {PYTEST} -s tests/model/test_fault_proxy.py",
        r"(\d+) rollouts",
    ),
    "collect": Proof(
        "`tito collect` is killed with SIGKILL at ten random moments, on each wire: in the end every rollout is there "
        "once, those that were finished before a kill unchanged, and each turn is what the server said under its "
        "request id, which no other turn has.",
        "rollouts on each wire",
        2_000,
        2_000,
        (
            "src/strands_tito/collect",
            "src/tito_core/store",
            "tests/support/collect_command.py",
            "tests/support/collect_forks.py",
            "tests/collect/test_kills.py",
        ),
        lambda count, seed: (
            f"TITO_ROLLOUTS={count} TITO_KILLS=10 TITO_SEED={seed} {PYTEST} -s tests/collect/test_kills.py"
        ),
        r"(\d+) rollouts of",
    ),
    "interrupts": Proof(
        "`tito conformance` gets Ctrl-C at random moments, on each wire, a quarter of them with a server that breaks a "
        "law: it ends within seconds with the documented exit status, says what is known, prints no traceback and "
        "nothing else that nobody asked for, and leaves no request running.",
        "interrupts on each wire",
        100,
        20,
        (
            *INTERRUPT,
            "src/strands_tito/conformance",
            "tests/conformance/defects",
            "tests/conformance/test_interrupts.py",
        ),
        lambda count, seed: (
            f"TITO_INTERRUPTS={count} TITO_SEED={seed} {PYTEST} -s tests/conformance/test_interrupts.py"
        ),
        r"(\d+) interrupts",
    ),
    "collect-interrupts": Proof(
        "`tito collect` gets Ctrl-C or SIGTERM at random moments, on each wire, again and again: each time it ends so, "
        "too, and in the end every rollout is there once, those that were finished unchanged.",
        "interrupts on each wire",
        30,
        30,
        (
            *INTERRUPT,
            "src/strands_tito/collect",
            "tests/support/collect_command.py",
            "tests/collect/test_interrupts.py",
        ),
        lambda count, seed: f"TITO_INTERRUPTS={count} TITO_SEED={seed} {PYTEST} -s tests/collect/test_interrupts.py",
        r"(\d+) interrupts",
    ),
    "ids": Proof(
        "Each format, its tags as tokens and as text, reads any ids without an exception: random ones, characters cut "
        "in the middle, only control tokens, and pieces of sound turns. Whole, token by token and in random chunks "
        "they are the same turn; spans are in order and inside it.",
        "cases of each format and vocabulary",
        20_000,
        2_500,
        (*PARSING, "tests/parsing/test_arbitrary_ids.py"),
        lambda count, seed: f"TITO_CASES={count} TITO_SEED={seed} {PYTEST} -s tests/parsing/test_arbitrary_ids.py",
        r"(\d+) cases",
    ),
    "mutated-calls": Proof(
        "Calls of every format with one thing changed (a character, a tag or a piece lost, doubled, swapped or moved; "
        "a cut, other quotes): none ends as plain text without a status, none that is malformed runs, and one that "
        "runs says what its own text says, strict and lenient.",
        "calls of each format",
        20_000,
        2_500,
        (*PARSING, "tests/parsing/test_mutated.py"),
        lambda count, seed: f"TITO_MUTATED={count} TITO_SEED={seed} {PYTEST} -s tests/parsing/test_mutated.py",
        r"(\d+) mutated calls",
    ),
    "round-trips": Proof(
        "Calls that a real chat template renders, encoded, parse as the calls that they were: random schemas and "
        "arguments, strings that spell the format's tags among them, over each template of the zoo that shows any.",
        "turns of each template",
        2_000,
        250,
        (*PARSING, "tests/parsing/prove/templates.py", "tests/parsing/prove/generated.py"),
        lambda count, seed: f"python tests/parsing/prove/templates.py --turns {count} --seed {seed}",
        r"(\d+) turns of each",
    ),
    "conversations": Proof(
        "Every certified tool template, random conversations with tools, parallel calls, unicode, reasoning and 30% of "
        "the turns cut off: each prompt begins with the one before and its completion, and each delta is token for "
        "token what transformers renders of the whole conversation in that place.",
        "conversations",
        10_000,
        1_250,
        (*CHAT, "tests/support/rollouts.py", "tests/support/extending.py"),
        lambda count, seed: f"python tests/chat/prove/zoo.py --conversations {count} --seed {seed}",
        r"(\d+) conversations",
    ),
    "templates": Proof(
        "Templates that we did not choose (llama.cpp's, vLLM's, several hundred of the model hub's, TRL's), with real "
        "tokenizers where packages ship them: random conversations under each that is certified are what transformers "
        "renders, by a referee that shares no code with the deltas. `TITO_NEWEST=1` takes the newest versions.",
        "conversations of each template",
        200,
        25,
        (
            *CHAT,
            "tests/support/corpora.json",
            "tests/support/corpora.py",
            "tests/support/corpus_tokenizers.py",
            "tests/support/gguf_tokenizer.py",
            "tests/support/plain_referee.py",
            "tests/support/plain_template.py",
            "tests/support/random_chats.py",
            "tests/support/stand_in.py",
            "tools/templates.py",
        ),
        lambda count, seed: f"python tools/templates.py --all --conversations {count} --seed {seed}",
        r"(\d+) conversations each",
    ),
    "attacks": Proof(
        "Every place for content, names and schema keys too, is filled from a grammar over each tokenizer's control "
        "strings (whole, cut, nested, doubled, in other cases, widths and normal forms): no control id comes from it.",
        "attacks",
        10_000,
        1_250,
        (*CHAT, "tests/support/attacks.py"),
        lambda count, seed: f"python tests/chat/prove/zoo.py --attacks {count} --seed {seed}",
        r"(\d+) attacks",
    ),
    "plain-strings": Proof(
        "Content that spells no control token gives exactly the ids that the tokenizer gives the whole rendering: "
        "Qwen3, Llama 3, gpt-oss, Gemma 3 and DeepSeek-V3.",
        "strings of each tokenizer",
        5_000,
        2_500,
        CHAT,
        lambda count, seed: f"python tests/chat/prove/zoo.py --strings {count} --seed {seed}",
        r"(\d+) strings",
    ),
    **{
        f"fuzz-{name}": Proof(
            f"{what} Nothing hangs, takes unbounded memory or raises what is not documented.",
            "cases",
            count,
            chunk,
            ("src", "tests/fuzz"),
            lambda count, seed, name=name: f"python tools/fuzz.py --class {name} --cases {count} --seed {seed}",
            rf"(\d+) cases of {name}",
        )
        for name, what, count, chunk in (
            (
                "files",
                "Hostile rollout files, ledgers as JSON and indices of folders: each is refused with a documented "
                "error, or what is loaded is what a reader of our own finds in the bytes, keeps the laws and comes "
                "back equal.",
                100_000,
                25_000,
            ),
            (
                "answers",
                "Hostile answers on each wire, whole and streamed: a turn holds exactly what the conformance suite's "
                "own reader finds in the answer, or is refused, and the ledger is as before.",
                10_000,
                2_500,
            ),
            (
                "messages",
                "Hostile messages, tool specifications and results: a turn that keeps the laws, with no control token "
                "out of content, or an error of the package's own, and the ledger is as before.",
                10_000,
                2_500,
            ),
        )
    },
    "properties": Proof(
        "Every property test of the suite, with a raised budget for each.",
        "examples a property",
        20_000,
        20_000,
        ("src", "tests"),
        lambda count, seed: f"TITO_EXAMPLES={count} {PYTEST} -n 2 --hypothesis-seed={seed}",
        "",
    ),
}


def main() -> int:
    """Run what was asked for; give 0 when every proof holds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("proofs", nargs="*", help=f"of {', '.join(PROOFS)} (default: all)")
    parser.add_argument("--seed", type=int, default=20261121, help="what every chunk's seed is derived from")
    parser.add_argument("--count", type=int, help="how many, instead of the proof's own number")
    parser.add_argument("--anew", action="store_true", help="forget what was done")
    wanted = parser.parse_args()
    if unknown := set(wanted.proofs) - set(PROOFS):
        parser.error(f"there is no proof {', '.join(sorted(unknown))}; there are {', '.join(PROOFS)}")
    results = known()
    holds = [
        run(name, wanted.seed, wanted.count or PROOFS[name].count, results, anew=wanted.anew)
        for name in wanted.proofs or PROOFS
    ]
    return 0 if all(holds) else 1


def run(name: str, seed: int, count: int, results: dict[str, Any], *, anew: bool) -> bool:
    """Run the chunks of a proof that are not done yet, and tell whether all hold."""
    proof = PROOFS[name]
    chunk = min(proof.chunk, count)
    identity = {"seed": seed, "chunk": chunk, "commit": commit_of(proof.paths)}
    done = results.get(name) if count >= proof.count else None  # a smaller run is no proof, and leaves no record
    if anew or done is None or {key: done[key] for key in identity} != identity:
        done = results[name] = {**identity, "python": platform.python_version(), "hypothesis": version("hypothesis")}
        done["chunks"] = []
    done["count"] = count
    chunks = done["chunks"] = [ran for ran in done["chunks"] if ran["holds"]]
    while (ran_so_far := sum(ran["ran"] for ran in chunks)) < count:
        number = len(chunks)
        command = proof.command(min(chunk, count - ran_so_far), seed_of(seed, name, number))
        print(f"{name} {ran_so_far:,} of {count:,}{left(chunks, count)}: {command}", flush=True)
        ran = run_chunk(proof, command, min(chunk, count - ran_so_far))
        chunks.append({"date": time.strftime("%Y-%m-%d", time.gmtime()), **ran})
        if count >= proof.count:
            write(name, done)
        if not ran["holds"]:
            print(f"{name} does not hold; the command above shows it.", flush=True)
            return False
    print(f"{name} {ran_so_far:,} of {count:,}: holds", flush=True)
    return True


def left(chunks: list[dict[str, Any]], count: int) -> str:
    """Say how long the rest will take at the pace so far."""
    ran, seconds = sum(chunk["ran"] for chunk in chunks), sum(chunk["seconds"] for chunk in chunks)
    return f", {(count - ran) * seconds / ran / 60:.0f} min left" if ran else ""


def run_chunk(proof: Proof, command: str, count: int) -> dict[str, Any]:
    """Run one command; it holds when it succeeds and ran all that it should."""
    variables, arguments = {}, shlex.split(command)
    while "=" in arguments[0]:
        name, _, value = arguments.pop(0).partition("=")
        variables[name] = value
    began = time.monotonic()
    ended = subprocess.run(
        [sys.executable, *arguments[1:]], cwd=ROOT, env={**os.environ, **variables}, text=True, capture_output=True
    )
    found = re.search(proof.counted, ended.stdout) if proof.counted else None
    ran = int(found[1]) if found else 0 if proof.counted else count
    holds = ended.returncode == 0 and ran >= count
    if not holds:
        print(ended.stdout[-6000:], ended.stderr[-2000:], sep="\n", flush=True)
    return {"command": command, "ran": ran, "seconds": round(time.monotonic() - began, 1), "holds": holds}


def seed_of(seed: int, name: str, number: int) -> int:
    """Derive the seed of one chunk."""
    return int.from_bytes(hashlib.sha256(f"{seed} {name} {number}".encode()).digest()[:4], "big")


def commit_of(paths: tuple[str, ...]) -> str:
    """Give the last commit that changed the code a proof is about, and say so when it has changed since."""

    def git(*arguments: str) -> str:
        return subprocess.run(["git", *arguments], cwd=ROOT, check=True, text=True, capture_output=True).stdout.strip()

    changed = git("status", "--porcelain", "--", *paths)
    return git("log", "-1", "--format=%h", "--", *paths) + (" with changes" if changed else "")


def known() -> dict[str, Any]:
    """Read what earlier runs found."""
    return json.loads(RESULTS.read_text()) if RESULTS.exists() else {}


def write(name: str, done: dict[str, Any]) -> None:
    """Write what was found of a proof, beside that of others, for the next run and for a reader."""
    results = {**known(), name: done}
    RESULTS.write_text(json.dumps(results, indent=1) + "\n")
    rows, details = [], []
    for name, proof in PROOFS.items():
        if name not in results:
            continue
        done = results[name]
        chunks = done["chunks"]
        ran, seconds = sum(chunk["ran"] for chunk in chunks), sum(chunk["seconds"] for chunk in chunks)
        if not all(chunk["holds"] for chunk in chunks):
            outcome = "**does not hold**"
        else:
            outcome = "holds" if ran >= done["count"] else f"holds so far, {ran:,} of {done['count']:,}"
        facts = (name, f"{ran:,} {proof.unit}", outcome, done["seed"], f"`{done['commit']}`", chunks[-1]["date"])
        rows.append(f"| {' | '.join(map(str, facts))} | {seconds:,.0f} |")
        details += [f"\n## {name}\n", proof.what, f"\nPython {done['python']}, Hypothesis {done['hypothesis']}. "]
        details[-1] += f"The first of {len(chunks)} commands, and the last:\n"
        details += ["```sh", *dict.fromkeys((chunks[0]["command"], chunks[-1]["command"])), "```"]
    PAGE.write_text("\n".join([INTRODUCTION, *rows, *details]) + "\n")


INTRODUCTION = """# Proofs

Properties that were run in large numbers. `make prove` runs them, goes on where it was stopped, and writes this page;
`docs/proofs.json` has every chunk's command, size and seconds. A chunk's command alone, with `.venv/bin` first in the
path, runs it again, seed and all. The commit is the last one that changed what the proof is about.

| proof | ran | outcome | seed | commit | date | seconds |
| --- | --- | --- | --- | --- | --- | --- |"""


if __name__ == "__main__":
    sys.exit(main())
