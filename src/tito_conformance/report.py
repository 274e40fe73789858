"""The report of a run: rows for pytest, a table in the terminal, and an HTML and a JSON file."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jinja2
import msgspec
from rich.console import Console
from rich.table import Table
from rich.text import Text

from tito_conformance.checks import CHECKS, LAWS, NOTHING
from tito_conformance.suite import Outcome
from tito_conformance.target import ConnectedServer


@dataclass(frozen=True, slots=True)
class Row:
    """One check in a report.

    Attributes:
        law: Number and name of its law.
        check: Its name.
        what: What is checked.
        verdict: "holds", "broken", "not applicable" or "not reached".
        passed: Cases that passed.
        left_out: Cases that could not be checked, by reason.
    """

    law: str
    check: str
    what: str
    verdict: str
    passed: int
    left_out: dict[str, int]


def rows(outcome: Outcome) -> list[Row]:
    """Return a row for each check, in the order of the laws."""
    table = []
    for check in sorted(CHECKS.values(), key=lambda each: each.law):
        passed = outcome.tally.passed[check.name]
        left_out = dict(outcome.tally.not_applicable.get(check.name, {}))
        if any(finding.check is check for finding in outcome.findings):
            verdict = "broken"
        elif passed:
            verdict = "holds"
        else:
            verdict = "not applicable" if left_out else "not reached"
        table.append(Row(f"{check.law} {LAWS[check.law]}", check.name, check.what, verdict, passed, left_out))
    return table


def _server(server: ConnectedServer) -> dict[str, Any]:
    info = server.policy.info
    names = ("backend", "version", "model", "max_model_len", "vocab_size", "weight_version", "processed_logprobs")
    return {
        **{name: getattr(info, name) for name in (*names, "truncated_logprobs", "raw_before_penalties")},
        "endpoints": list(info.endpoints),
        "capabilities": {**asdict(replace(info.capabilities, options={})), "options": dict(info.capabilities.options)},
    }


def as_dict(outcome: Outcome) -> dict[str, Any]:
    """Return the whole result of a run, JSON-compatible."""
    server, target = outcome.server, outcome.server.target
    apart = outcome.tally.apart_nats
    return {
        "sound": outcome.sound and not outcome.not_reached,
        "required": list(outcome.required),
        "required_not_reached": outcome.not_reached,
        "backend": target.backend,
        "server": _server(server),
        "versions": {name: version(name) for name in ("strands-tito", "strands-agents", "transformers", "hypothesis")},
        "certificate": json.loads(server.policy.template.certificate.to_json()),
        "parser": server.policy.detected.name,
        "profile": outcome.profile.name,
        "seed": target.seed,
        "tolerance_nats": server.tolerance_nats,
        "dtype": server.dtype,
        "scored_nats": outcome.tally.scored_nats,
        "weights": list(target.weights),
        "against": None if outcome.against is None else _server(outcome.against) | {"apart_nats": apart},
        "notes": outcome.tally.notes,
        "conversations": outcome.conversations,
        "turns": outcome.turns,
        "requests": outcome.requests,
        "seconds": round(outcome.seconds, 1),
        "interrupted": outcome.interrupted,
        "error": outcome.error,
        "sent": {name: dict(values.most_common()) for name, values in server.recorder.sent.items()},
        "failed_tries": failed_tries(outcome),
        "compared": comparisons(outcome),
        "broken": None if outcome.broken is None else str(outcome.broken),
        "findings": [
            {"finding": str(each), "where": asdict(each.where), "bodies": each.bodies} for each in outcome.findings
        ],
        "moves": json.loads(msgspec.json.encode(outcome.moves)),
        "checks": [asdict(row) for row in rows(outcome)],
    }


def comparisons(outcome: Outcome) -> dict[str, dict[str, dict[str, int]]]:
    """Return for each kind of answer and each column of it against what it was compared, and how often."""
    found: dict[str, dict[str, Counter[str]]] = {}
    for server in outcome.servers:
        for answer in server.recorder.answers.values():
            row = found.setdefault(answer.kind, {})
            for column, source in answer.columns.items():
                row.setdefault(column, Counter())[source] += 1
    return {kind: {name: dict(found[kind][name].most_common()) for name in found[kind]} for kind in sorted(found)}


COLUMNS = ("prompt", "ids", "logprobs", "end", "text", "versions", "cached", "top", "prompt scores", "experts", "kept")
"""Columns of an answer, in the order of the table."""


def failed_tries(outcome: Outcome) -> dict[str, int]:
    """Return what came in place of an answer, and how often; a client sends most of such requests again."""
    return dict(sum((each.recorder.log.failed for each in outcome.servers), Counter()))


COLOURS = {"holds": "green", "broken": "bold red", "not applicable": "yellow", "not reached": "dim", NOTHING: "yellow"}
MAX_NOTES = 5
"""Number of notes that the terminal shows."""


def print_report(outcome: Outcome, console: Console, replay: str) -> None:
    """Print the result as tables and a summary; `replay` is the command that plays a finding's conversation again."""
    say = partial(console.print, markup=False, highlight=False)
    for title, heads, lines in tables(outcome):
        shown = Table(*(head for head in heads if head != WHAT), title=title, show_lines=title == COMPARED)
        for line in lines:
            cells = [cell for head, cell in zip(heads, line, strict=True) if head != WHAT]
            shown.add_row(*(Text(text, COLOURS.get(mark, "")) for text, mark in cells))
        if lines:
            console.print(shown)
    info = outcome.server.policy.info
    say(
        f"{info.backend} {info.version or 'of unknown version'}, {info.model}: {outcome.conversations} conversations, "
        f"{outcome.turns} turns, {outcome.requests} requests in {outcome.seconds:.0f} s, seed "
        f"{outcome.server.target.seed}.",
    )
    if outcome.against is not None:
        other = outcome.against.policy.info
        say(
            f"Compared with {other.backend} {other.version or 'of unknown version'}, {other.model}: logprobs of equal "
            f"tokens differ by at most {outcome.tally.apart_nats:.2g} nats.",
        )
    for note in outcome.tally.notes[:MAX_NOTES]:
        say(note, style="yellow")
    if len(outcome.tally.notes) > MAX_NOTES:
        console.print(f"... and {len(outcome.tally.notes) - MAX_NOTES} more in the report's files.", style="yellow")
    if outcome.interrupted:
        console.print("Interrupted. Results so far:", style="yellow")
    if outcome.broken is not None:
        for finding in outcome.findings:
            say(str(finding), style="bold red")
        if outcome.moves:
            console.print("A conversation that breaks the law:", style="bold")
            for move in outcome.moves:
                say(f"  {move}")
            console.print(f"Play it again: {replay}", markup=False, highlight=False, soft_wrap=True)
    elif outcome.error is not None:
        say(outcome.error, style="bold red")
    elif outcome.interrupted:
        console.print("No law was broken so far.", style="bold yellow")
    every, missing = rows(outcome), outcome.not_reached
    made = [row for row in every if row.verdict in ("holds", "broken")]
    ran = f"{len(made)} of {len(every)} checks ran, in {sum(row.passed for row in made):,} cases."
    style = "bold green" if outcome.sound and not missing else "bold yellow"
    console.print(f"{headline(missing)}: {ran}" if outcome.sound else ran, style=style, highlight=False)
    if missing:
        remedy = " Use a larger profile, or pass --not-require NAME for what this server cannot offer."
        end = remedy if outcome.sound else ""  # a run that was cut short needs another
        console.print(f"Required, but not checked: {', '.join(missing)}.{end}", style=style, highlight=False)
    if outcome.sound and (names := did_not_apply(every)):
        say(f"Did not apply: {', '.join(names)}.", style="yellow")


def tables(outcome: Outcome) -> list[tuple[str, tuple[str, ...], list[list[tuple[str, str]]]]]:
    """Return all tables: title, heads, and lines of cells, each a text and what it marks: a verdict, or nothing."""
    checks = []
    for row in rows(outcome):
        left = "; ".join(f"{count}: {reason}" for reason, count in row.left_out.items())
        cells = (row.law, row.check, row.verdict, f"{row.passed:,}", row.what, left)
        checks.append([(text, row.verdict if text == row.verdict else "") for text in cells])
    found = comparisons(outcome)
    names = [name for name in COLUMNS if any(name in row for row in found.values())]
    compared = [[(kind, ""), *(_sources(row.get(name, {})) for name in names)] for kind, row in found.items()]
    values = [[(name, ""), (value, "")] for name, value in measured(outcome).items()]
    failed = [[(what, ""), (f"{count:,}", "")] for what, count in failed_tries(outcome).items()]
    return [
        ("Conformance", ("law", "check", "", "cases", WHAT, "not checked, and reason"), checks),
        (COMPARED, ("answers", *names), compared),
        ("Logprobs of this server", ("what was measured", "value"), values),
        ("Tries that got no answer", ("what came instead", "how often"), failed),
    ]


COMPARED = "Against what each column of the answers was compared, and how often"
WHAT = "what is checked"
"""A column that only the page has room for."""


def _sources(counts: dict[str, int]) -> tuple[str, str]:
    return "\n".join(f"{source} {count:,}" for source, count in counts.items()), NOTHING if NOTHING in counts else ""


def measured(outcome: Outcome) -> dict[str, str]:
    """Return what the server's settings do to logprobs, as this run measured it; no API reports it."""
    server, info, tally = outcome.server, outcome.server.policy.info, outcome.tally
    words = {None: "unknown", True: "yes", False: "no"}
    count = tally.passed["rescored"] + tally.passed["long"]
    return {
        "dtype of the logits": f"{server.dtype}: a tolerance of {server.tolerance_nats:g} nats",
        "at the temperature of the request": words[info.processed_logprobs],
        "over the tokens that a truncation leaves": words[info.truncated_logprobs],
        "largest difference from the server's own score": f"{tally.scored_nats:.2g} nats, of {count:,} tokens",
    }


def write_files(outcome: Outcome, folder: Path) -> list[Path]:
    """Write `conformance.json`, `conformance.html` and, after a failure, `conversation.json`; return the paths."""
    folder.mkdir(parents=True, exist_ok=True)
    result = as_dict(outcome)
    written = [folder / "conformance.json", folder / "conformance.html"]
    written[0].write_text(json.dumps(result, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
    table = rows(outcome)
    title = headline(outcome.not_reached) if outcome.sound else "Not conformant" if outcome.broken else "Not finished"
    page = _PAGE.render(result=result, left=did_not_apply(table), title=title, tables=tables(outcome))
    written[1].write_text(page, encoding="utf-8")
    if outcome.moves:
        written.append(folder / "conversation.json")
        written[-1].write_bytes(msgspec.json.format(msgspec.json.encode(outcome.moves), indent=1))
    return written


def headline(missing: Sequence[str]) -> str:
    """Return the headline of a run that broke no law, given the required checks that did not run."""
    return "No law is broken, but required checks did not run" if missing else "Every law that applies holds"


def did_not_apply(table: list[Row]) -> list[str]:
    """Return the checks that could not run on this server."""
    return [row.check for row in table if row.verdict == "not applicable"]


_PAGE = jinja2.Environment(autoescape=True).from_string(
    """<!doctype html>
<html lang="en"><meta charset="utf-8"><title>Conformance of {{ result.server.model }}</title>
<style>
body { font: 15px/1.5 system-ui, sans-serif; max-width: 72rem; margin: 2rem auto; padding: 0 1rem; color: #222 }
table { border-collapse: collapse; width: 100% } td, th { text-align: left; padding: .3rem .6rem; vertical-align: top }
tr { border-top: 1px solid #ddd } .holds { color: #17692b } .broken { color: #b00020; font-weight: bold }
.not-applicable, .not-reached, .nothing { color: #8a6d00 }
td { white-space: pre-line } pre { background: #f5f5f5; padding: 1rem; overflow: auto }
</style>
<h1>{{ title }}</h1>
{% if result.required_not_reached %}<p>Required, but not checked: {{ result.required_not_reached | join(", ") }}.</p>
{% endif %}<p>{{ result.backend }} {{ result.server.version or "of unknown version" }}, {{ result.server.model }}:
{{ result.conversations }} conversations, {{ result.turns }} turns, {{ result.requests }} requests in
{{ result.seconds }} s;
profile {{ result.profile }}, seed {{ result.seed }}, tolerance {{ result.tolerance_nats }} nats.
{% if result.against %}Compared with {{ result.against.backend }} {{ result.against.version or "of unknown version" }}:
logprobs of equal tokens differ by at most {{ result.against.apart_nats }} nats.{% endif %}
{% if result.interrupted %}Interrupted: these are the results so far.{% endif %}</p>
{% if left %}<p>Did not apply: {{ left | join(", ") }}.</p>{% endif %}
{% for note in result.notes %}<p>{{ note }}</p>{% endfor %}
{% for each in result.findings %}<pre class="broken">{{ each.finding }}</pre>{% endfor %}
{% if result.error %}<pre class="broken">{{ result.error }}</pre>{% endif %}
{% if result.moves %}<h2>A conversation that breaks the law</h2>
<pre>{{ result.moves | tojson(indent=1) }}</pre>{% endif %}
{% for title, heads, lines in tables %}{% if lines %}<h2>{{ title }}</h2>
<table><tr>{% for head in heads %}<th>{{ head }}{% endfor %}</tr>
{% for line in lines %}<tr>{% for text, mark in line %}<td class="{{ mark | replace(" ", "-") }}">{{ text }}
{%- endfor %}</tr>
{% endfor %}</table>{% endif %}{% endfor %}
<h2>Server and client</h2>
<pre>{{ {"server": result.server, "against": result.against,
"versions": result.versions, "parser": result.parser} | tojson(indent=1) }}</pre>
<h2>Certificate of the chat template</h2><pre>{{ result.certificate | tojson(indent=1) }}</pre>
</html>
"""
)
