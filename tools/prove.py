"""Run the large proofs in chunks, resume earlier runs, and write evidence/proofs.{json,md}.

Each chunk is one command with a seed derived from the run's seed. The command is printed; run it alone to repeat the
chunk. Finished chunks count as long as the code of the proof has not changed.
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
RESULTS, PAGE = ROOT / "evidence" / "proofs.json", ROOT / "evidence" / "proofs.md"
LEDGER = ("src/tito_core/ledger", "src/tito_core/store")
CHAT = ("src/tito_core/chat", "tests/chat/prove/zoo.py", "tests/support/zoo.py", "tests/support/zoo_templates.json")
PARSING = ("src/tito_core/parsing", "tests/parsing/families.py")
INTERRUPT = ("src/tito_core/interrupt.py", "src/strands_tito/__main__.py", "tests/support/interrupted.py")
ORACLE = ("tests/support/oracle.py", "tests/support/forests.py", "tests/support/equal.py")


@dataclass(frozen=True)
class Proof:
    """A property that is checked many times.

    Attributes:
        what: Description of the property, in sentences.
        unit: The unit of `count`.
        count: Number of cases.
        chunk: Number of cases in a chunk.
        paths: The code that the proof is about.
        command: Returns the command of a chunk, given its size and seed.
        counted: Regular expression that finds the number of cases in the output.
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
        "Random ledgers with many branches, two in one file, equal a second implementation of plain lists and dicts: "
        "every column, mask, segment, branch, history and record, also after failed commits, restarts and round trips.",
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
        "Processes that write a file are killed with SIGKILL at random moments: every turn committed before the last "
        "fsync is read back, in order and unchanged; no incomplete record is read; the file can be appended to.",
        "kills",
        200,
        20,
        (*LEDGER, "tests/support/crash_writer.py", "tests/store/test_store_crash.py"),
        lambda count, seed: f"TITO_KILLS={count} TITO_SEED={seed} {PYTEST} -s tests/store/test_store_crash.py",
        r"(\d+) kills",
    ),
    **{
        f"forced-{engine}-{model}": Proof(
            f"Tool calls that a grammar forces on a real {title} with {model}: each is one valid call of the forced "
            "tool, its arguments match the tool's schema, and all its tokens are marked CONSTRAINED.",
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
        "Rollouts through a proxy that breaks a third of all requests, some of them cancelled. It resets or closes the "
        "connection in any part of request or answer, sends answers late, slowly, in half or not at all, "
        "and answers 429 with Retry-After or a series of 503. Every turn equals what the server reports, every error "
        "is a [`BackendError`](errors.md#backenderror), there are no more attempts than allowed, and no task, "
        "connection or running request is left.",
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
    "toxics": Proof(
        "Rollouts of equal prompts, as in a group, through a proxy that spoils half of the answers: it gives an "
        "earlier request's answer, swaps, loses and doubles the events of a stream, continues one stream by another, "
        "and cuts bodies. Every committed turn holds the tokens and logprobs that were sampled for its own request. "
        "Streamed and not; vLLM's two endpoints count as two wires.",
        "turns on each wire and in each mode",
        5_000,
        1_250,
        (
            "src/tito_core/backend",
            "src/tito_sglang",
            "src/tito_vllm",
            "tests/model/test_toxic_proxy.py",
        ),
        lambda count, seed: f"TITO_TURNS={count} TITO_SEED={seed} {PYTEST} -s tests/model/test_toxic_proxy.py",
        r"(\d+) turns",
    ),
    "collect": Proof(
        "`tito collect` is killed with SIGKILL at ten random moments, on each wire: in the end the folder has every "
        "rollout once, rollouts finished before a kill are unchanged, and each turn equals the server's answer to its "
        "request id, which is unique.",
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
        "law: it ends within seconds with the documented exit status, prints the results so far and no traceback, and "
        "leaves no request running.",
        "interrupts on each wire",
        100,
        20,
        (
            *INTERRUPT,
            "src/tito_conformance",
            "tests/conformance/defects",
            "tests/conformance/test_interrupts.py",
        ),
        lambda count, seed: (
            f"TITO_INTERRUPTS={count} TITO_SEED={seed} {PYTEST} -s -m suite tests/conformance/test_interrupts.py"
        ),
        r"(\d+) interrupts",
    ),
    "collect-interrupts": Proof(
        "`tito collect` gets Ctrl-C or SIGTERM at random moments, repeatedly, on each wire: each time it ends within "
        "seconds without a traceback, and in the end the folder has every rollout once, finished ones unchanged.",
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
        "Each format, with tags as tokens and as text, parses any ids without an exception: random ids, cut "
        "characters, only control tokens, and pieces of valid turns. Parsing the whole, token by token and in random "
        "chunks gives the same turn; spans are in order and inside the turn.",
        "cases of each format and vocabulary",
        20_000,
        2_500,
        (*PARSING, "tests/parsing/test_arbitrary_ids.py"),
        lambda count, seed: f"TITO_CASES={count} TITO_SEED={seed} {PYTEST} -s tests/parsing/test_arbitrary_ids.py",
        r"(\d+) cases",
    ),
    "mutated-calls": Proof(
        "Calls of every format with one change (a character, tag or piece lost, doubled, swapped or moved; a cut; "
        "other quotes): none becomes plain text without a status, no malformed call is executed, and an executed call "
        "equals its text, strict and lenient.",
        "calls of each format",
        20_000,
        2_500,
        (*PARSING, "tests/parsing/test_mutated.py"),
        lambda count, seed: f"TITO_MUTATED={count} TITO_SEED={seed} {PYTEST} -s tests/parsing/test_mutated.py",
        r"(\d+) mutated calls",
    ),
    "round-trips": Proof(
        "Calls that a real chat template renders are parsed back as the same calls: random schemas and arguments, "
        "including strings that spell the format's tags, over each of [our test templates]"
        "(templates.md#templates-of-the-zoo) that renders calls. Two templates of LFM2.5 do not escape strings: these "
        "get none with a quote or backslash.",
        "turns of each template",
        2_000,
        250,
        (*PARSING, "tests/parsing/prove/templates.py", "tests/parsing/prove/generated.py"),
        lambda count, seed: f"python tests/parsing/prove/templates.py --turns {count} --seed {seed}",
        r"(\d+) turns of each",
    ),
    "conversations": Proof(
        "Random conversations under each of [our test templates](templates.md#templates-of-the-zoo) that is certified "
        "with tools. They have parallel calls, Unicode, reasoning, and 30% truncated turns. Each prompt starts with "
        "the previous prompt and completion, and each delta equals, token for token, transformers' rendering of the "
        "whole conversation.",
        "conversations",
        10_000,
        1_250,
        (*CHAT, "tests/support/rollouts.py", "tests/support/extending.py"),
        lambda count, seed: f"python tests/chat/prove/zoo.py --conversations {count} --seed {seed}",
        r"(\d+) conversations",
    ),
    "templates": Proof(
        "Templates that we did not choose (of llama.cpp, vLLM, TRL and several hundred models of the hub), with real "
        "tokenizers if a package has them: random conversations under each certified template equal transformers' "
        "rendering, compared by code that shares nothing with ours. `TITO_NEWEST=1` takes the newest versions.",
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
        "Every place for content, including names and schema keys, is filled from a grammar over each tokenizer's "
        "control strings (whole, cut, nested, doubled, in other cases, widths and normal forms): none becomes a "
        "control id.",
        "attacks",
        10_000,
        1_250,
        (*CHAT, "tests/support/attacks.py"),
        lambda count, seed: f"python tests/chat/prove/zoo.py --attacks {count} --seed {seed}",
        r"(\d+) attacks",
    ),
    "plain-strings": Proof(
        "Content without control tokens has exactly the ids that the tokenizer gives for the whole rendering: "
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
            f"{what} No case hangs, takes unbounded memory or raises an undocumented error.",
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
                "error, or the loaded ledger equals what an independent reader finds in the bytes, keeps the laws and "
                "survives a round trip.",
                100_000,
                25_000,
            ),
            (
                "answers",
                "Hostile answers on each wire, whole and streamed: a turn holds exactly what the conformance suite's "
                "own reader finds in the answer, or it is refused and the ledger is unchanged.",
                10_000,
                2_500,
            ),
            (
                "messages",
                "Hostile messages, tool specifications and results: the turn keeps the laws and has no control token "
                "from content, or an error of the package is raised and the ledger is unchanged.",
                10_000,
                2_500,
            ),
        )
    },
    "placeholders": Proof(
        "Texts that spell image placeholders, whole, partial or disguised, four in a message with at most "
        "three pictures, on a scripted server of each engine: only the pictures become images.",
        "messages",
        2_500,
        1_250,
        (
            "src/tito_core/chat",
            "src/tito_core/turn",
            "src/tito_core/backend",
            "src/tito_vllm",
            "src/tito_sglang",
            "tests/testing/test_image_injection.py",
            "tests/support/picture_attacks.py",
        ),
        lambda count, seed: (
            f"TITO_EXAMPLES={count} {PYTEST} tests/testing/test_image_injection.py --hypothesis-seed={seed} "
            "--hypothesis-show-statistics"
        ),
        r"(\d+) passing",
    ),
    "properties": Proof(
        "Every property test of the suite, with a larger number of examples.",
        "examples a property",
        20_000,
        20_000,
        ("src", "tests"),
        lambda count, seed: (
            f"TITO_EXAMPLES={count} {PYTEST} -n 2 --hypothesis-seed={seed} "
            "-m 'not engine and not trainers and not browser'"
        ),
        "",
    ),
}


def main() -> int:
    """Run the chosen proofs; return 0 if all hold."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("proofs", nargs="*", help=f"proofs to run, of {', '.join(PROOFS)}; default: all")
    parser.add_argument("--seed", type=int, default=20261121, help="seed from which the chunks' seeds are derived")
    parser.add_argument("--count", type=int, help="number of cases, instead of the proof's own")
    parser.add_argument("--restart", action="store_true", help="ignore finished chunks")
    arguments = parser.parse_args()
    if unknown := set(arguments.proofs) - set(PROOFS):
        parser.error(f"unknown proof {', '.join(sorted(unknown))}; available: {', '.join(PROOFS)}")
    results = known()
    holds = [
        run(name, arguments.seed, arguments.count or PROOFS[name].count, results, restart=arguments.restart)
        for name in arguments.proofs or PROOFS
    ]
    return 0 if all(holds) else 1


def run(name: str, seed: int, count: int, results: dict[str, Any], *, restart: bool) -> bool:
    """Run the unfinished chunks of a proof, and return whether all hold."""
    proof = PROOFS[name]
    chunk = min(proof.chunk, count)
    identity = {"seed": seed, "chunk": chunk, "commit": commit_of(proof.paths)}
    done = results.get(name) if count >= proof.count else None  # a smaller run is not recorded
    if restart or done is None or {key: done[key] for key in identity} != identity:
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
            print(f"{name} does not hold; run the command above to see why.", flush=True)
            return False
    print(f"{name} {ran_so_far:,} of {count:,}: holds", flush=True)
    return True


def left(chunks: list[dict[str, Any]], count: int) -> str:
    """Return the estimated time left."""
    ran, seconds = sum(chunk["ran"] for chunk in chunks), sum(chunk["seconds"] for chunk in chunks)
    return f", {(count - ran) * seconds / ran / 60:.0f} min left" if ran else ""


def run_chunk(proof: Proof, command: str, count: int) -> dict[str, Any]:
    """Run one command. It holds if it succeeds and ran all cases."""
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
    """Return the last commit that changed the code of a proof, plus " with changes" if some are uncommitted."""

    def git(*arguments: str) -> str:
        return subprocess.run(["git", *arguments], cwd=ROOT, check=True, text=True, capture_output=True).stdout.strip()

    changed = git("status", "--porcelain", "--", *paths)
    return git("log", "-1", "--format=%h", "--", *paths) + (" with changes" if changed else "")


def known() -> dict[str, Any]:
    """Return the results of earlier runs."""
    return json.loads(RESULTS.read_text()) if RESULTS.exists() else {}


def write(name: str, done: dict[str, Any]) -> None:
    """Write the results of a proof, together with those of the others, as JSON and as the page."""
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
        details += [f"\n## {name}\n", proof.what]
        details += [f"\nPython {done['python']}, Hypothesis {done['hypothesis']}. {_commands(len(chunks))}:\n"]
        details += ["```bash", chunks[0]["command"], "```"]
    missing = [name for name in PROOFS if name not in results]
    note = [f"\nWithout a recorded run so far: {', '.join(missing)}."] if missing else []
    PAGE.write_text("\n".join([INTRODUCTION, *rows, *note, *details]) + "\n")


def _commands(count: int) -> str:
    return f"The first of {count} commands" if count > 1 else "The command"


INTRODUCTION = """# Proofs

Each proof checks one property on many random cases. *Holds* means that no case failed. It does not cover cases that the
generator cannot draw, or code that changed after the commit in the table, which is the last one that changed what the
proof tests. A wire is an HTTP API of an engine. Servers are [scripted](testing.md) where no real one is named.

`make prove` runs the proofs, resumes an interrupted run, and writes this page. `evidence/proofs.json` has the command, size
and seconds of every part of a run; to repeat one, run its command with `.venv/bin` first in the path. The runs so far
had two cores of a cloud machine that was shared with other work.

| proof | ran | outcome | seed | commit | date | seconds |
| --- | --- | --- | --- | --- | --- | --- |"""


if __name__ == "__main__":
    sys.exit(main())
