"""Run rollouts and tests in environments that a resolver made: the lowest versions of everything, and trainers' own.

    python tools/matrix.py                      every row; writes the table of docs/compatibility.md
    python tools/matrix.py lowest verl-0.9.1    these rows, two at a time
    python tools/matrix.py --whole lowest       every test of the core, of both clients and of exports, for an hour
    python tools/matrix.py --resolve NAME...    resolve rows again with uv: writes tests/export/locks/NAME.txt
    python tools/matrix.py --python NAME        make a row's environment; print the path of its Python
    python tools/matrix.py --check              whether each lower bound of pyproject.toml has a row that resolved it

A row's lock is what `uv pip compile` found. What runs is the lock, except that torch is a CPU build and packages that
only a GPU uses, or that are engines themselves, are left out; the table names both. Environments are kept in the user's
cache, and made again when their lock changes. TITO_TORCH_INDEX names an index with CPU builds of torch.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
import tomllib
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, replace
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any

from filelock import FileLock
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version
from platformdirs import user_cache_path

ROOT = Path(__file__).parent.parent
LOCKS = ROOT / "tests" / "export" / "locks"
PAGE = ROOT / "docs" / "compatibility.md"
CPU_TORCH = "2.13.0"
"""Version of the CPU build that runs in place of the resolved torch."""
TABLE_END = "<!-- tools/matrix.py writes the rows above -->"
NOT_ON_A_CPU = re.compile(
    r"nvidia-(?!ml-py)|cuda-|cu\d|triton|flashinfer|sgl-|sglang|vllm|xformers|flash-attn|flash-mla|deep-?gemm|tilelang|apache-tvm"
    r"|quack|torchao|torchaudio|torchvision|torchcodec|tokenspeed|mooncake|amd|fastsafetensors|humming|fa4|nixl|tpu"
)
UV = (sys.executable, "-m", "uv")
WHOLE = ("ledger", "parsing", "chat", "backend", "model", "vllm", "sglang", "export")
"""Folders of tests that need no engine, of the core and of exports."""
ALL_OF = ("vllm", "sglang", "export")
OF = {
    "chat": "certificate certify delta encoder ending environment gguf_tokenizer idioms image_content image_prompts"
    " inert_tokenizer message_format messages referee renderers rendering template tokenizer traced"
    " word_cache",
    "backend": "connect connections headers recordings retries sampling_params streaming tokenize transport",
    "model": "agent agent_errors forced histories histories_middleware images malformed"
    " model_parts sessions settings streaming",
    "parsing": "decoding detection grammar schema",
    "ledger": "columns",
    "store": "json store",
}
TESTS = (*(f"{folder}/test_{name}.py" for folder, names in OF.items() for name in names.split()), *ALL_OF)
"""Tests that the versions of other packages decide: templates and tokenizers, HTTP, Strands, values, files, exports."""
PYTEST = "import os, pytest, sys; status = pytest.main(sys.argv[1:]); sys.stdout.flush(); os._exit(status)"
"""Runs tests and ends without the interpreter's last steps, in which sentencepiece 0.2.1 (of SGLang 0.5.23) crashes."""
SHOWN = ("strands-agents", "transformers", "tokenizers", "jinja2", "aiohttp", "pydantic", "msgspec", "numpy", "torch")


@dataclass(frozen=True)
class Row:
    """One environment.

    Attributes:
        requirements: What is resolved together with our own requirements.
        extras: Our extras.
        python: Version of Python.
        lowest: Whether every requirement of ours is resolved to its lower bound, else to its newest version.
    """

    requirements: tuple[str, ...] = ()
    extras: tuple[str, ...] = ("dev",)
    python: str = "3.11"
    lowest: bool = False


SLIME = (
    "accelerate blobfile datasets httpx[http2] mcp[cli] numba omegaconf openai openai-agents pillow pylatexenc pyyaml"
    " ray[default] safetensors tensorboard xxhash zstandard"
)
LIGHT = (
    "dev",
    "engines",
    "images",
    "docs",
    "renderers",
    "torch",
    "parquet",
    "datasets",
    "conformance",
    "mutants",
    "train",
)
TRAINERS = {
    "agentlightning": {"0.3.0": "3.11", "1.0.0": "3.12", "1.0.2": "3.12"},
    "ray": {"2.50.0": "3.11"},
    "skyrl": {"0.3.0": "3.11", "0.4.0": "3.12"},
    "tinker": {"0.30.0": "3.11", "0.38.0": "3.11"},
    "trl": {"1.0.0": "3.11", "1.16.0": "3.11"},
    "verifiers": {"0.3.1": "3.11", "0.4.0": "3.11"},
    "verl": {"0.8.0": "3.11", "0.9.1": "3.11"},
}
"""Versions of trainers, the lowest of each extra among them, and the Python that runs them."""
_SKYRL = ("datasets", "hydra-core", "jaxtyping", "loguru", "omegaconf", "ray", "skyrl-gym", "tensordict", "torchdata")
UNDECLARED = {
    "trl-1.16.0": ("peft",),
    "verl-0.8.0": ("cachetools", "fastapi", "pyarrow<22", "TransferQueue>=0.1.10"),
    "verl-0.9.1": ("cachetools", "fastapi", "TransferQueue>=0.1.10"),
    "agentlightning-1.0.0": ("tensordict", "verl", "cachetools", "fastapi"),
    "agentlightning-1.0.2": ("tensordict", "verl", "cachetools", "fastapi"),
    "skyrl-0.3.0": _SKYRL,
    "skyrl-0.4.0": (*_SKYRL, "orjson", "pybase64"),
}
"""What a trainer imports and does not declare, or only in an extra with what needs a GPU; verl 0.8 holds NumPy below 2,
and newer PyArrow fails on it."""
NEWEST = Row(extras=("dev", "harness", "renderers", "datasets", "torch"))
ROWS = {
    "bare": Row(extras=()),
    "lowest": Row(extras=LIGHT, lowest=True),
    "newest": NEWEST,
    **{f"newest-{python}": replace(NEWEST, python=python) for python in ("3.12", "3.13")},
    # Its requirements.txt at 624b824a, without tools for debugging and other services, and its image's transformers.
    "slime": Row((*SLIME.split(), "transformers==5.12.1")),
    "sglang-0.5.23": Row(("sglang==0.5.23",)),
    "vllm-0.32.0": Row(("vllm==0.32.0",)),
    **{
        (name := f"{package}-{version}"): Row(
            (f"{package}=={version}", *UNDECLARED.get(name, ())), ("dev", "parquet"), python
        )
        for package, versions in TRAINERS.items()
        for version, python in versions.items()
    },
}


def pins(name: str) -> dict[str, str]:
    """Return the versions of a row's lock by canonical name."""
    lines = (LOCKS / f"{name}.txt").read_text(encoding="utf-8").splitlines()
    found = (line.partition(" ")[0].partition("==") for line in lines if "==" in line and not line.startswith("#"))
    return {canonicalize_name(package.partition("[")[0]): version for package, _, version in found}


def left_out(name: str) -> list[str]:
    """Return the packages of a row's lock that are not installed."""
    return [package for package in pins(name) if NOT_ON_A_CPU.match(package)]


def run(*command: str, **options: Any) -> str:
    """Run a command; return its output.

    Raises:
        RuntimeError: It failed; has the end of its output.
    """
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, **options)
    if done.returncode:
        raise RuntimeError(
            f"{' '.join(command)[:200]} ended with {done.returncode}:\n{(done.stdout + done.stderr)[-4000:]}"
        )
    return str(done.stdout)


def resolve(name: str) -> None:
    """Write a row's lock."""
    row = ROWS[name]
    command = [*UV, "pip", "compile", "-q", "--no-header", "--no-annotate", "--python-version", row.python, "-"]
    command += ["--resolution", "lowest-direct"] if row.lowest else []
    ours = f"strands-tito[{','.join(row.extras)}] @ {ROOT.as_uri()}"
    if row.lowest:  # our requirements have to be the direct ones
        command[-1 if not row.lowest else command.index("-")] = "pyproject.toml"
        command += [argument for extra in row.extras for argument in ("--extra", extra)]
    found = run(*command, input="\n".join([ours, *row.requirements]))
    lines = [line for line in found.splitlines() if not line.startswith(("strands-tito", "-e", "file:"))]
    (LOCKS / f"{name}.txt").write_text("\n".join([f"# Python {row.python}", *lines, ""]), encoding="utf-8")


def environment(name: str) -> Path:
    """Return the Python of a row's environment; make the environment if necessary.

    Raises:
        RuntimeError: A package cannot be installed.
    """
    lock = (LOCKS / f"{name}.txt").read_text(encoding="utf-8")
    folder = user_cache_path("tito") / "matrix" / f"{name}-{_hash(str(ROOT))}"
    python = folder / "bin" / "python"
    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{folder}.lock"):
        install = [*UV, "pip", "install", "-q", "--no-deps", "--python", str(python)]
        if _differs(folder / ".packages", packages := _hash(lock, NOT_ON_A_CPU.pattern, CPU_TORCH)):
            shutil.rmtree(folder, ignore_errors=True)
            version = lock.split()[2]
            run(*UV, "venv", "-q", "--python", interpreter(version), str(folder))
            without = {*left_out(name), "torch"}
            kept = [f"{package}=={number}" for package, number in pins(name).items() if package not in without]
            run(*install, *kept)
            if "torch" in pins(name) and (wheel := cpu_torch(version)):
                run(*install, str(wheel))
            elif "torch" in pins(name):  # the build for CUDA, with all its packages: gigabytes, but it runs on a CPU
                run(*(one for one in install if one != "--no-deps"), f"torch=={CPU_TORCH}")
            (folder / ".packages").write_text(packages)
        # Entry points are those of the time of installation.
        if _differs(folder / ".ours", ours := _hash((ROOT / "pyproject.toml").read_text(encoding="utf-8"))):
            run(*install, "-e", str(ROOT))
            (folder / ".ours").write_text(ours)
    return python


def _hash(*texts: str) -> str:
    return hashlib.sha256("\n".join(texts).encode()).hexdigest()[:12]


def _differs(file: Path, text: str) -> bool:
    return not file.is_file() or file.read_text() != text


def interpreter(version: str) -> str:
    """Return the path of a Python of this version, or the version, for which uv looks and which it else downloads."""
    if version == f"{sys.version_info[0]}.{sys.version_info[1]}":
        return sys.executable
    folders = (Path.home() / ".pyenv" / "versions").glob(f"{version}.*/bin/python")
    return str(next(folders, version))


def cpu_torch(python: str) -> Path | None:
    """Return a wheel of the CPU build of torch, which pip finds (uv would take the build for CUDA), or None."""
    folder = user_cache_path("tito") / "matrix" / "wheels" / f"{python}-{CPU_TORCH}"
    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{folder}.lock"):  # rows run side by side
        if not folder.is_dir():
            index = os.environ.get("TITO_TORCH_INDEX")
            extra = ["--extra-index-url", index] if index else []
            only = ["--python-version", python, "--only-binary", ":all:", "--no-deps"]
            part = Path(f"{folder}.part")
            shutil.rmtree(part, ignore_errors=True)
            run(sys.executable, "-m", "pip", "download", "-q", *only, *extra, "-d", str(part), f"torch=={CPU_TORCH}")
            part.rename(folder)  # of an interrupted download, the folder would look like an index without a CPU build
    return next(folder.glob("torch-*+cpu*.whl"), None)


def tested_by(name: str) -> str:
    """Return the first row with tests that has this row's Python and its version of all that we need; or itself."""
    ours = pins("bare").keys()
    same = {(package, version) for package, version in pins(name).items() if package in ours}
    python = ROWS[name].python
    rows = (row for row in ROWS if row != "bare" and ROWS[row].python == python)
    return next(row for row in rows if row == name or same <= pins(row).items())


def play(name: str, *, whole: bool) -> str:
    """Run a row's rollouts and tests; return what passed.

    The tests are all of them, or those that other packages' versions decide: where another row has the same versions of
    what we need, only those of exports, which the row's own package decides.

    Raises:
        RuntimeError: Something failed; has the end of the output.
    """
    python = str(environment(name))
    one_core = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "RAYON_NUM_THREADS": "1"}
    variables = {**os.environ, **one_core, "TITO_PROFILE": "matrix"}
    extras = "without extras" if name == "bare" else "with extras"
    done = run(python, "-W", "ignore", "tests/support/first_rollout.py", extras, env=variables).splitlines()[-1]
    if name == "bare":
        return done
    twin = tested_by(name)
    chosen = WHOLE if whole else TESTS if twin == name else ("export",)
    output = run(python, "-c", PYTEST, "-q", "--timeout", "900", *(f"tests/{one}" for one in chosen), env=variables)
    passed = output.splitlines()[-1].strip("= ").partition(" in ")[0]
    return f"{done}, {passed}" + (f", other tests as `{twin}`" if chosen == ("export",) else "")


def table_row(name: str, result: str) -> str:
    """Return a row's line of the page."""
    found, cells = pins(name), []
    python = (LOCKS / f"{name}.txt").read_text(encoding="utf-8").split()[2]
    for package in SHOWN:
        version = found.get(package, "")
        if package == "torch" and version:
            version += f", ran {CPU_TORCH}{' (CPU)' if cpu_torch(python) else ''}"
        cells.append(version)
    if result != "failed":
        result += f", at commit `{commit_of_code()}`"
    absent = sorted({re.sub(r"^(nvidia|cuda|flashinfer)-.*", r"\1-*", package) for package in left_out(name)})
    return f"| `{name}` | {python} | {' | '.join(cells)} | {', '.join(absent)} | {result} |"


@cache
def commit_of_code() -> str:
    """Return the last commit that changed what a row runs, with " with changes" if there are uncommitted changes."""
    paths = "src", "tests/export/locks"
    changed = run("git", "status", "--porcelain", "--", *paths).strip()
    return run("git", "log", "-1", "--format=%h", "--", *paths).strip() + (" with changes" if changed else "")


def write(results: dict[str, str]) -> None:
    """Replace the lines of these rows in the page's table; `tools/prove.py --check` looks for their commits."""
    text = PAGE.read_text(encoding="utf-8")
    for name, result in results.items():
        line = table_row(name, result)
        known = re.search(rf"^\| `{re.escape(name)}` \| 3.*$", text, re.MULTILINE)
        text = text.replace(known[0], line) if known else text.replace(TABLE_END, f"{line}\n{TABLE_END}")
    PAGE.write_text(text, encoding="utf-8")


def unresolved() -> list[str]:
    """Return the requirements of pyproject.toml without a row that resolved exactly their lower bound."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    locks = [pins(name) for name in ROWS]
    wrong = []
    for text in chain(project["dependencies"], *project["optional-dependencies"].values()):
        requirement = Requirement(text)
        lower = [Version(one.version) for one in requirement.specifier if one.operator in (">=", "==", "~=")]
        resolved = [Version(lock[name]) for lock in locks if (name := canonicalize_name(requirement.name)) in lock]
        if not lower or lower[0] not in resolved:
            wrong.append(f"{text}: resolved to {', '.join(sorted({str(one) for one in resolved})) or 'nothing'}")
    return wrong


OPTIONS = {"--check", "--python", "--resolve", "--whole", "--keep-page"}


def main(arguments: list[str]) -> int:
    """Do what the module's docstring says; return the exit status."""
    names = [one for one in arguments if not one.startswith("-")] or list(ROWS)
    options = {one for one in arguments if one.startswith("-")}
    if unknown := sorted(set(names) - set(ROWS) | options - OPTIONS):
        print(f"Unknown: {', '.join(unknown)}. Options: {', '.join(sorted(OPTIONS))}. Rows: {', '.join(ROWS)}.")
        return 2
    if "--check" in arguments:
        wrong = unresolved()
        print(
            *(f"No row of tools/matrix.py resolved the lower bound of {one}" for one in wrong),
            sep="\n",
            end="\n" * bool(wrong),
        )
        return bool(wrong)
    if "--resolve" in arguments:
        for name in names:
            resolve(name)
        return 0
    if "--python" in arguments:
        print(*map(environment, names), sep="\n")
        return 0
    results, failed = {}, 0
    with ThreadPoolExecutor(2) as pool:
        running = {pool.submit(play, name, whole="--whole" in arguments): name for name in names}
        for future in as_completed(running):
            name = running[future]
            try:
                results[name] = future.result()
                print(table_row(name, results[name]), flush=True)
            except RuntimeError as error:
                results[name] = "failed"
                failed += 1
                print(f"{name}: {error}", flush=True)
    if results and "--keep-page" not in arguments:
        write(results)
    return failed


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
