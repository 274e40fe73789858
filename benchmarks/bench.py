"""Shared by the benchmarks: options, what they report, the canned server, an environment for each peer in the cache."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from tito_engines import models
from tito_engines.spec import cache_dir

HERE = Path(__file__).parent
PAGE = HERE.parent / "docs/benchmarks.md"
PEERS = {
    "strands_sglang": ("strands-sglang==0.6.2", "3.12"),
    "strands_sglang_0_4_3": ("strands-sglang==0.4.3", "3.11"),
    "strands_vllm": ("strands-vllm==0.0.6", "3.12"),
}
"""Each peer: the package to install, and its Python version."""
SAMPLED = 300
PROSE = (
    "The river rises early in spring, and whoever lives beside it learns to read its colour: grey for meltwater, brown "
    "for rain in the hills, green when nothing has happened for a week. "
)
CALL = '<tool_call>\n{"name": "look", "arguments": {"n": 17}}\n</tool_call>'


FULL, QUICK, SMALLEST = range(3)
"""Sizes of a benchmark; the smallest shows that it runs, and its figures mean nothing."""


def options(doc: str | None) -> argparse.ArgumentParser:
    """Return a parser of the options of all benchmarks: `json`, `write`, and `size`, which is one of the three."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--write", action="store_true", help="write the tables into docs/benchmarks.md too")
    for name, size, what in (("quick", QUICK, "fewer rounds"), ("smallest", SMALLEST, "only to see that it runs")):
        parser.add_argument(f"--{name}", dest="size", action="store_const", const=size, default=FULL, help=what)
    return parser


def report(arguments: argparse.Namespace, found: dict[str, Any], *parts: Table | str) -> None:
    """Print results, as JSON if asked for; with `--write` replace the script's part of docs/benchmarks.md too.

    Args:
        arguments: The parsed options.
        found: The results.
        *parts: The same for people: tables and sentences.
    """
    if arguments.json:
        print(json.dumps(found))
        return
    for part in parts:
        Console().print(part)
    if arguments.write:
        if arguments.size == SMALLEST:
            raise SystemExit("Nothing is written: the figures of the smallest size mean nothing.")
        command = Path(sys.argv[0]).stem
        before, begin, rest = PAGE.read_text(encoding="utf-8").partition(f"<!-- {command} -->\n")
        _, end, after = rest.partition("<!-- end -->\n")
        assert end, f"docs/benchmarks.md has no place for {command}."
        words = [f"benchmarks/{command}.py", *(word for word in sys.argv[1:] if word != "--write")]
        commit, changed = (
            subprocess.run(["git", *of], cwd=HERE, check=True, capture_output=True, text=True).stdout.strip()
            for of in (("log", "-1", "--format=%h"), ("status", "--porcelain", "--", "../src", "."))
        )
        load, cores = os.getloadavg()[1], len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else "?"
        made = (
            f"`python {' '.join(words)}` at commit `{commit}`{' with changes' if changed else ''},"
            f" {time.strftime('%Y-%m-%d', time.gmtime())}, {cores} cores, load average {load:.1f}."
        )
        texts = [part if isinstance(part, str) else markdown(part) for part in parts]
        PAGE.write_text("\n\n".join((f"{before}{begin}{made}", *texts)) + f"\n\n{end}{after}", encoding="utf-8")


def markdown(table: Table) -> str:
    """Return a table of rich as one of Markdown, after its title."""
    rows = [[str(column.header) for column in table.columns], ["---"] * len(table.columns)]
    rows += map(list, zip(*(map(str, column.cells) for column in table.columns), strict=True))
    title = f"{table.title}:\n\n" if table.title else ""
    return title + "\n".join(f"| {' | '.join(row)} |" for row in rows)


def answer() -> dict[str, Any]:
    """Return the canned answer: prose, a tool call and the end of the turn, 300 tokens in total."""
    tokenizer: Any = models.load_tokenizer("smollm2")
    call = tokenizer.encode(CALL, add_special_tokens=False)
    prose = tokenizer.encode(PROSE * 20, add_special_tokens=False)[: SAMPLED - len(call) - 1]
    ids = [*prose, *call, tokenizer.eos_token_id]
    return {
        "output_ids": ids,
        "logprobs": [-0.001 - (number * 7919 % 5003) / 1234.5678 for number in range(len(ids))],
        "text": tokenizer.decode(ids),
        "pieces": [tokenizer.decode([token]) for token in ids],
        "max_model_len": 2_000_000,
    }


@contextmanager
def canned_server(cores: set[int] | None = None) -> Iterator[int]:
    """Run the server in its own process, on `cores` if given; yields its port."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "answer.json")
        path.write_text(json.dumps(answer()))
        command = [sys.executable, str(HERE / "canned_server.py"), str(path)]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:
            assert server.stdin is not None
            assert server.stdout is not None
            try:
                if cores is not None:
                    os.sched_setaffinity(server.pid, cores)
                yield int(server.stdout.readline())
            finally:
                server.stdin.close()
                server.wait()


def tokenizer_folder() -> str:
    """Return the folder of the tokenizer, for peers and us."""
    return str(models.ensure_tokenizer("smollm2"))


class Client:
    """A client script in its own process and Python, which answers each line with a line."""

    def __init__(self, python: Path | str, script: str, *arguments: str, cores: set[int] | None = None) -> None:
        ours = str(python) == sys.executable
        environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH" or ours}
        environment |= {"TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
        self._script = script
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115  # closed with the process
        self._process = subprocess.Popen(
            [str(python), str(HERE / "clients" / script), *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            env=environment,
        )
        if cores is not None:
            os.sched_setaffinity(self._process.pid, cores)

    def ask(self, **request: Any) -> Any:
        """Send a request and return the answer."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            self._errors.seek(0)
            raise RuntimeError(f"{self._script} failed:\n{self._errors.read()[-3000:]}")
        return json.loads(line)

    def close(self) -> None:
        """End the client."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()
        self._errors.close()


def peer_python(name: str) -> Path | None:
    """Return the interpreter of a peer's environment, created if necessary; None if that fails.

    The reason is printed to standard error; the benchmark runs without this peer.
    """
    package, minor = PEERS[name]
    folder = cache_dir() / "peers" / package.replace("==", "-")
    python, ready = folder / "bin" / "python", folder / ".ready"
    if ready.exists():
        return python
    maker = interpreter(minor)
    if maker is None:
        print(f"{package} is skipped: no Python {minor} was found.", file=sys.stderr)
        return None
    print(f"Installing {package} into {folder} ...", file=sys.stderr)
    shutil.rmtree(folder, ignore_errors=True)
    folder.parent.mkdir(parents=True, exist_ok=True)
    try:
        subprocess.run([maker, "-m", "venv", str(folder)], check=True, capture_output=True, text=True)
        # strands-sglang 0.4.3 and strands-vllm accept any version of Strands; all get the version that we test with.
        install = [str(python), "-m", "pip", "install", "-q", package, f"strands-agents[openai]=={_strands()}"]
        subprocess.run(install, check=True, capture_output=True, text=True)
    except subprocess.CalledProcessError as error:
        print(f"{package} is skipped: {error.stderr[-500:]}", file=sys.stderr)
        return None
    ready.touch()
    return python


def interpreter(minor: str) -> str | None:
    """Return an interpreter of this minor version: the running one, on the PATH, of pyenv or of uv; else None."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    uv = Path(os.environ.get("UV_PYTHON_INSTALL_DIR", Path.home() / ".local/share/uv/python"))
    candidates = [
        sys.executable,
        shutil.which(f"python{minor}"),
        *sorted(map(str, pyenv.glob(f"versions/{minor}.*/bin/python{minor}"))),
        *sorted(map(str, uv.glob(f"cpython-{minor}.*/bin/python{minor}"))),
    ]
    ask = "import sys, venv, ensurepip; print('%d.%d' % sys.version_info[:2])"
    for path in filter(None, candidates):
        answer = subprocess.run([path, "-I", "-c", ask], capture_output=True, text=True, check=False)
        if answer.stdout.strip() == minor:
            return path
    return None


def _strands() -> str:
    from importlib.metadata import version

    return version("strands-agents")
