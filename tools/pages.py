"""Refresh what the pages paste: tables of commands and settings, the notebook as a page, and outputs of commands.

    python tools/pages.py                 # cli, settings, gateways and notebook: seconds
    python tools/pages.py demo demo_images tests      # run these make targets and paste their output: minutes
    python tools/pages.py screenshots     # take the pictures of docs/view.md: a minute, needs a Chromium
    python tools/pages.py --check         # exit with 1 if cli, settings or notebook is not current

A pasted block stands between `<!-- paste: NAME -->` and `<!-- end -->`.
"""

from __future__ import annotations

import argparse
import contextlib
import inspect
import io
import json
import os
import platform
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

ROOT = Path(__file__).parents[1]
NOTEBOOK, NOTEBOOK_PAGE = ROOT / "docs/notebook.ipynb", ROOT / "docs/notebook.md"
BLOCK = re.compile(r"(<!-- paste: {name} -->\n).*?(<!-- end -->)".replace("{name}", r"(?P<name>\w+)"), re.DOTALL)
CHEAP = ("cli", "settings", "notebook")
SCREENSHOTS = "screenshots"


def main() -> int:
    """Refresh the named blocks; with --check, compare the cheap ones."""
    parser = argparse.ArgumentParser(description=str(__doc__).split("\n", 1)[0])
    parser.add_argument(
        "names", nargs="*", help=f"{', '.join([*CHEAP, *OUTPUTS, SCREENSHOTS])}; default: {', '.join(CHEAP)}"
    )
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if a default is stale")
    arguments = parser.parse_args()
    if arguments.check:
        stale = [
            str(path.relative_to(ROOT)) for path, text in current_pages() if path.read_text(encoding="utf-8") != text
        ]
        print(f"Stale: {', '.join(stale)}. Run python tools/pages.py." if stale else "All pages are current.")
        return int(bool(stale))
    names = arguments.names or list(CHEAP)
    if unknown := set(names) - {*CHEAP, *OUTPUTS, SCREENSHOTS}:
        parser.error(f"unknown blocks: {', '.join(sorted(unknown))}")
    if "notebook" in names:
        NOTEBOOK.write_text(to_json(executed(notebook())), encoding="utf-8")
    for path, text in current_pages():
        path.write_text(text, encoding="utf-8")
    for name in OUTPUTS.keys() & names:
        paste(name, OUTPUTS[name]())
    if SCREENSHOTS in names:
        subprocess.run([sys.executable, ROOT / "tools/screenshots.py"], check=True)
    return 0


def current_pages() -> Iterator[tuple[Path, str]]:
    """Yield each page that is made from the code alone, with its current text."""
    page = ROOT / "docs/cli.md"
    yield page, with_block(page.read_text(encoding="utf-8"), "cli", command_tables())
    yield NOTEBOOK_PAGE, notebook_page(notebook())
    page, text = ROOT / "docs/settings.md", (ROOT / "docs/settings.md").read_text(encoding="utf-8")
    for name, table in settings_tables():
        text = with_block(text, name, table)
    yield page, text
    page, text = ROOT / "docs/gateways.md", (ROOT / "docs/gateways.md").read_text(encoding="utf-8")
    for name, made in gateway_tables():
        text = with_block(text, name, made)
    text = with_block(text, "harnesses", harness_table())
    yield page, text


def with_block(text: str, name: str, content: str) -> str:
    """Return a page's text with another content of a block."""
    return BLOCK.sub(lambda m: f"{m[1]}{content}\n{m[3]}" if m["name"] == name else m[0], text)


def paste(name: str, content: str) -> None:
    """Write a block into every page that has it."""
    for path in (ROOT / "README.md", *(ROOT / "docs").rglob("*.md")):
        text = path.read_text(encoding="utf-8")
        if f"<!-- paste: {name} -->" in text:
            path.write_text(with_block(text, name, content), encoding="utf-8")


def command_tables() -> str:
    """Return a section for each `tito` command: its help, arguments and options."""
    import typer

    from strands_tito import cli

    cli.add_commands()
    return "\n\n".join(_sections(typer.main.get_command(cli.app), "tito"))


def gateway_tables() -> Iterator[tuple[str, str]]:
    """Yield a block's name and its text: what each gateway passes, from the reports in `evidence/gateways`."""
    from tito_conformance.gateway.adapter import ADAPTERS
    from tito_conformance.gateway.checks import CHECKS

    yield "adapter", f"```python\n{(ADAPTERS / 'rllm_model_gateway.py').read_text(encoding='utf-8')}```"
    reports = [
        json.loads(path.read_text(encoding="utf-8")) for path in sorted((ROOT / "evidence/gateways").glob("*.json"))
    ]
    cells = {"passed": "yes", "failed": "**no**", "not applicable": "-"}
    found = [{each["name"]: each for each in report["checks"]} for report in reports]
    heads = [f"{_one_line(_gateway(report)).replace(' ', '<br>')}" for report in reports]
    rows = [f"| {' | '.join(['check', *heads])} |", f"| --- |{' --- |' * len(reports)}"]
    for name in CHECKS:
        results = [cells[each[name]["result"]] if name in each else "" for each in found]
        rows.append(f"| {' | '.join([f'`{name}`', *results])} |")
    counts = [sum(each["result"] == "passed" for each in checks.values()) for checks in found]
    rows.append(f"| {' | '.join(['passed', *map(str, counts)])} |")
    yield "gateways", "\n".join(rows)
    yield "checks", "\n".join(f"- `{name}`: {each.about}" for name, each in CHECKS.items())
    yield "findings", "\n\n".join(map(_findings, reports))


def _gateway(report: Mapping[str, Any]) -> str:
    facts = report["gateway"]
    speaks = "" if report.get("speaks", "chat") == "chat" else report["speaks"]
    return " ".join(filter(None, (facts["name"], facts["version"], facts["variant"], report["wire"], speaks)))


def _findings(report: Mapping[str, Any]) -> str:
    facts = report["gateway"]
    setup = [f"{report['date']}, seed {report['seed']}", *(f"`pip install {each}`" for each in facts["pip"])]
    lines = [f"#### {_gateway(report)}", "", f"{'; '.join([*setup, facts['note']] if facts['note'] else setup)}.", ""]
    for each in report["checks"]:
        if each["result"] != "passed":
            detail = " ".join(each["detail"].split()).replace("`", "'").replace("<", "&lt;")
            lines.append(f"- `{each['name']}`, {each['result']}: {detail}")
    return "\n".join(lines)


def harness_table() -> str:
    """Return what real harnesses kept through each gateway, from the reports in `evidence/harnesses`."""
    reports = [
        json.loads(path.read_text(encoding="utf-8")) for path in sorted((ROOT / "evidence/harnesses").glob("*.json"))
    ]
    rows: dict[tuple[str, ...], list[str]] = {}
    for report in reports:
        facts, runs = report["gateway"], [run for run in report["rollouts"] if not run["canonical"]]
        canonical = [run for run in report["rollouts"] if run["canonical"]]
        every = {name: sum(run[name] for run in runs) for name in ("turns", "rows", "later", "kept")}
        cells = (
            f"{report['harness']} {report['release']}",
            " ".join(filter(None, (facts["name"], facts["version"], facts["variant"]))),
            f"{sum(run['mended'] for run in runs)} of {len(runs)}",
            *(str(every[name]) for name in ("turns", "rows")),
            f"{sum(run['rows'] == 1 for run in runs)} of {len(runs)}",
            _once(runs),
            f"{every['kept']} of {every['later']}",
            ", ".join(f"{run['rows']} of {run['turns']} turns, {_once([run])} once" for run in canonical),
        )
        rows.setdefault(cells, []).append(report["wire"])
    heads = ["harness", "gateway", "file mended", "turns", "rows", "of one row", "trained once", "kept", "canonical"]
    lines = [f"| {' | '.join([*heads, 'engine'])} |", f"|{' --- |' * (len(heads) + 1)}"]
    return "\n".join([*lines, *(f"| {' | '.join([*cells, ', '.join(wires)])} |" for cells, wires in rows.items())])


def _once(runs: Sequence[Mapping[str, Any]]) -> str:
    return f"{sum(run['once'] for run in runs) / max(1, sum(run['sampled'] for run in runs)):.0%}"


def settings_tables() -> Iterator[tuple[str, str]]:
    """Yield a block's name and its table for each declaration of settings: names, types, and the docstring's words."""
    from tito_core import OptionalOutputs, SamplingParams
    from tito_core.backend.registry import BackendOptions
    from tito_core.policy import PolicyOptions
    from tito_core.settings import RolloutOptions

    for options in (RolloutOptions, SamplingParams, OptionalOutputs, PolicyOptions, BackendOptions):
        text = (inspect.getdoc(options) or "").partition("Attributes:\n")[2]
        words = dict(re.findall(r"^    (\w+): (.*(?:\n {8}.*)*)", text, re.MULTILINE))
        defaults = {name: field.get_default(call_default_factory=True) for name, field in _fields(options).items()}
        rows = ["| option | type | |", "| --- | --- | --- |"]
        inherited = BackendOptions.__annotations__ if options is PolicyOptions else ()  # they have a table of their own
        for name in (each for each in options.__annotations__ if each not in inherited):
            default = f" Default: {defaults[name]!r}." if defaults.get(name, {}) not in ({}, ()) else ""
            shown = _type(get_type_hints(options)[name]).replace("|", "\\|")
            rows.append(f"| `{name}` | `{shown}` | {_one_line(words.get(name, '') + default)} |")
        yield options.__name__, "\n".join(rows)


def _fields(options: Any) -> dict[str, Any]:
    return getattr(options, "model_fields", {})  # a TypedDict has none, and its docstring says the defaults


def _type(hint: Any) -> str:
    if get_origin(hint) in (Union, UnionType):
        return " | ".join(map(_type, get_args(hint)))
    shown = hint.__name__ if isinstance(hint, type) and not get_args(hint) else re.sub(r"\w+\.(?=\w)", "", str(hint))
    return "None" if shown == "NoneType" else shown


def _sections(command: Any, name: str) -> Iterator[str]:
    if hasattr(command, "commands"):
        for each in sorted(command.commands):
            yield from _sections(command.commands[each], f"{name} {each}")
        return
    shown = [parameter for parameter in command.params if not getattr(parameter, "hidden", False)]
    usage = " ".join([name, *(_metavar(parameter) for parameter in shown if not _is_option(parameter)), "[OPTIONS]"])
    rows = [_row(parameter) for parameter in shown]
    lines = [f"## {name}", "", _one_line(command.help), "", "```text", usage, "```"]
    lines += ["", "| argument or option | default | |", "| --- | --- | --- |", *rows]
    yield "\n".join(lines)


def _is_option(parameter: Any) -> bool:
    return bool(parameter.param_type_name == "option")


def _metavar(parameter: Any) -> str:
    return str(parameter.metavar or parameter.name.upper())


def _row(parameter: Any) -> str:
    names = ", ".join(f"`{name}`" for name in (*parameter.opts, *parameter.secondary_opts))
    names = names if _is_option(parameter) else f"`{_metavar(parameter)}`"
    default = parameter.default
    if callable(default) or default in (None, "", 0, False) or default == []:
        default = "required" if parameter.required else ""
    return f"| {names} | {default} | {_one_line(getattr(parameter, 'help', None) or '')} |"


def _one_line(text: str) -> str:
    return " ".join(str(text).replace("\b", "").split()).replace("|", "\\|")


def notebook() -> dict[str, Any]:
    """Return the notebook."""
    loaded: dict[str, Any] = json.loads(NOTEBOOK.read_text(encoding="utf-8"))
    return loaded


def code_cells(book: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the code cells of a notebook."""
    return [cell for cell in book["cells"] if cell["cell_type"] == "code"]


def executed(book: dict[str, Any]) -> dict[str, Any]:
    """Run a notebook's cells in one namespace and store what they print."""
    names: dict[str, Any] = {}
    for number, cell in enumerate(code_cells(book), 1):
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            exec(compile("".join(cell["source"]), NOTEBOOK.name, "exec"), names)
        text = printed.getvalue().splitlines(keepends=True)
        cell["execution_count"] = number
        cell["outputs"] = [{"name": "stdout", "output_type": "stream", "text": text}] if text else []
    return book


def to_json(book: Mapping[str, Any]) -> str:
    """Return a notebook as its file's text."""
    return json.dumps(book, indent=1, ensure_ascii=False) + "\n"


def notebook_page(book: Mapping[str, Any]) -> str:
    """Return a notebook as a page."""
    parts = []
    for cell in book["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            parts.append(source)
            continue
        parts.append(f"```python\n{source}\n```")
        if printed := "".join(line for output in cell["outputs"] for line in output["text"]):
            parts.append(f"```text\n{printed.rstrip()}\n```")
    parts.insert(1, f"[Download the notebook]({NOTEBOOK.name}). Every output on this page is from a run of it.")
    return "\n\n".join(parts) + "\n"


def _output_of(command: str) -> str:
    done = subprocess.run(command, shell=True, capture_output=True, text=True, cwd=ROOT)
    if done.returncode:
        raise SystemExit(f"{done.stdout}{done.stderr}{command} failed with status {done.returncode}.")
    return done.stdout


def _demo(target: str = "demo") -> str:
    lines = _output_of(f"make {target}").splitlines()
    summary = next(number for number, line in enumerate(lines) if line.startswith("engine "))
    end = next(number for number, line in enumerate(lines) if line.startswith("Rollouts written"))
    return "```text\n" + "\n".join(line.rstrip() for line in [*lines[summary:end], _machine()]) + "\n```"


def _demo_images() -> str:
    began = time.perf_counter()
    block = _demo("demo-images")
    return f"{block}\n\n`make demo-images` took {time.perf_counter() - began:.0f} s, the engine's start included."


def _tests() -> str:
    return "```text\n" + _output_of("make test").splitlines()[-1] + f"\n{_machine()}\n```"


def _machine() -> str:
    commit = _output_of("git log -1 --format=%h").strip()
    return f"machine     {os.cpu_count()} cores, {platform.machine()}; commit {commit}"


OUTPUTS: Mapping[str, Callable[[], str]] = {"demo": _demo, "demo_images": _demo_images, "tests": _tests}

if __name__ == "__main__":
    raise SystemExit(main())
