"""What a run found: as plain data for a file and for pytest, a table in the terminal, and an HTML and a JSON file."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jinja2
import msgspec
from rich.console import Console
from rich.table import Table
from rich.text import Text

from strands_tito.conformance.laws import CHECKS, LAWS
from strands_tito.conformance.suite import Outcome
from strands_tito.conformance.target import Connected


@dataclass(frozen=True, slots=True)
class Row:
    """One check in a report.

    Attributes:
        law: Number and name of its law.
        check: Its name.
        what: What is checked.
        verdict: "holds", "broken", "not applicable" or "not reached".
        passed: Cases that held.
        left_out: Cases that could not be checked, by why.
    """

    law: str
    check: str
    what: str
    verdict: str
    passed: int
    left_out: dict[str, int]


def rows(outcome: Outcome) -> list[Row]:
    """Return a row for each check, in the order of the laws."""
    found = []
    for check in sorted(CHECKS.values(), key=lambda each: each.law):
        passed = outcome.tally.passed[check.name]
        left_out = dict(outcome.tally.not_applicable.get(check.name, {}))
        if outcome.broken is not None and outcome.broken.check is check:
            verdict = "broken"
        elif passed:
            verdict = "holds"
        else:
            verdict = "not applicable" if left_out else "not reached"
        found.append(Row(f"{check.law} {LAWS[check.law]}", check.name, check.what, verdict, passed, left_out))
    return found


def _server(connected: Connected) -> dict[str, Any]:
    info = connected.policy.info
    return {
        "backend": info.backend,
        "version": info.version,
        "model": info.model,
        "max_model_len": info.max_model_len,
        "vocab_size": info.vocab_size,
        "weight_version": info.weight_version,
        "endpoints": list(info.endpoints),
        "processed_logprobs": info.processed_logprobs,
        "truncated_logprobs": info.truncated_logprobs,
        "capabilities": {**asdict(replace(info.capabilities, options={})), "options": dict(info.capabilities.options)},
    }


def as_dict(outcome: Outcome) -> dict[str, Any]:
    """Return everything that a run found, JSON-compatible."""
    connected, target = outcome.connected, outcome.connected.target
    apart = outcome.tally.apart_nats
    return {
        "sound": outcome.sound,
        "backend": target.backend,
        "server": _server(connected),
        "versions": {name: version(name) for name in ("strands-tito", "strands-agents", "transformers", "hypothesis")},
        "certificate": json.loads(connected.policy.template.certificate.to_json()),
        "parser": connected.policy.detected.name,
        "profile": outcome.profile.name,
        "seed": target.seed,
        "tolerance_nats": target.tolerance_nats,
        "weights": target.weights,
        "against": None if outcome.against is None else _server(outcome.against) | {"apart_nats": apart},
        "notes": outcome.tally.notes,
        "conversations": outcome.conversations,
        "turns": outcome.turns,
        "seconds": round(outcome.seconds, 1),
        "interrupted": outcome.interrupted,
        "error": outcome.error,
        "broken": None if outcome.broken is None else str(outcome.broken),
        "moves": json.loads(msgspec.json.encode(outcome.moves)),
        "checks": [
            {
                "law": row.law,
                "check": row.check,
                "what": row.what,
                "verdict": row.verdict,
                "passed": row.passed,
                "left_out": row.left_out,
            }
            for row in rows(outcome)
        ],
    }


_COLOUR = {"holds": "green", "broken": "bold red", "not applicable": "yellow", "not reached": "dim"}


NOTES = 5
"""Near-ties that the terminal shows."""


def print_report(outcome: Outcome, console: Console, replay: str) -> None:
    """Print what a person wants to know first.

    Args:
        outcome: What the run found.
        console: Where to.
        replay: The command that plays the smallest conversation again.
    """
    table = Table("law", "check", "", "cases", "not checked, and why", title="Conformance")
    law = ""
    for row in rows(outcome):
        left = "; ".join(f"{count}: {why}" for why, count in row.left_out.items())
        verdict = f"[{_COLOUR[row.verdict]}]{row.verdict}[/]"
        table.add_row(row.law if row.law != law else "", row.check, verdict, f"{row.passed:,}", Text(left))
        law = row.law
    console.print(table)
    info = outcome.connected.policy.info
    console.print(
        f"{info.backend} {info.version or 'of unknown version'}, {info.model}: {outcome.conversations} conversations, "
        f"{outcome.turns} turns in {outcome.seconds:.0f} s, seed {outcome.connected.target.seed}.",
        markup=False,
        highlight=False,
    )
    if outcome.against is not None:
        other = outcome.against.policy.info
        console.print(
            f"Beside it {other.backend} {other.version or 'of unknown version'}, {other.model}: no logprob of an equal "
            f"token was further apart than {outcome.tally.apart_nats:.2g} nats.",
            markup=False,
            highlight=False,
        )
    for note in outcome.tally.notes[:NOTES]:
        console.print(note, style="yellow", markup=False, highlight=False)
    if len(outcome.tally.notes) > NOTES:
        console.print(f"... and {len(outcome.tally.notes) - NOTES} more, in the files.", style="yellow")
    if outcome.interrupted:
        console.print("Interrupted: this is what is known so far.", style="yellow")
    if outcome.broken is not None:
        console.print(str(outcome.broken), style="bold red", markup=False, highlight=False)
        if outcome.moves:
            console.print("The smallest conversation that shows it:", style="bold")
            for move in outcome.moves:
                console.print(f"  {move}", markup=False, highlight=False)
            console.print(f"Play it again: {replay}", markup=False, highlight=False, soft_wrap=True)
    elif outcome.error is not None:
        console.print(outcome.error, style="bold red", markup=False, highlight=False)
    elif outcome.interrupted:
        console.print("No law was broken by then.", style="bold yellow")
    else:
        console.print("Every law that applies holds.", style="bold green")
        if names := did_not_apply(rows(outcome)):
            console.print(f"Did not apply: {', '.join(names)}.", style="yellow", markup=False, highlight=False)


def write_files(outcome: Outcome, folder: Path) -> list[Path]:
    """Write `conformance.json`, `conformance.html` and what broke as `conversation.json`; return their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    found = as_dict(outcome)
    written = [folder / "conformance.json", folder / "conformance.html"]
    written[0].write_text(json.dumps(found, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
    table = rows(outcome)
    page = _PAGE.render(found=found, rows=table, left=did_not_apply(table))
    written[1].write_text(page, encoding="utf-8")
    if outcome.moves:
        written.append(folder / "conversation.json")
        written[-1].write_bytes(msgspec.json.format(msgspec.json.encode(outcome.moves), indent=1))
    return written


def did_not_apply(found: list[Row]) -> list[str]:
    """List the checks that could not be made of this server."""
    return [row.check for row in found if row.verdict == "not applicable"]


def verdicts(found: list[Row]) -> dict[str, str]:
    """Return each check's verdict by its name."""
    return {row.check: row.verdict for row in found}


_PAGE = jinja2.Environment(autoescape=True).from_string(
    """<!doctype html>
<html lang="en"><meta charset="utf-8"><title>Conformance of {{ found.server.model }}</title>
<style>
body { font: 15px/1.5 system-ui, sans-serif; max-width: 72rem; margin: 2rem auto; padding: 0 1rem; color: #222 }
table { border-collapse: collapse; width: 100% } td, th { text-align: left; padding: .3rem .6rem; vertical-align: top }
tr { border-top: 1px solid #ddd } .holds { color: #17692b } .broken { color: #b00020; font-weight: bold }
.not-applicable, .not-reached { color: #8a6d00 } pre { background: #f5f5f5; padding: 1rem; overflow: auto }
</style>
<h1>{% if found.sound %}Every law that applies holds{% else %}
{{- "Not conformant" if found.broken else "Not finished" }}{% endif %}</h1>
<p>{{ found.backend }} {{ found.server.version or "of unknown version" }}, {{ found.server.model }}:
{{ found.conversations }} conversations, {{ found.turns }} turns in {{ found.seconds }} s; profile {{ found.profile }},
seed {{ found.seed }}, tolerance {{ found.tolerance_nats }} nats.
{% if found.against %}Beside it {{ found.against.backend }} {{ found.against.version or "of unknown version" }}: no
logprob of an equal token was further apart than {{ found.against.apart_nats }} nats.{% endif %}
{% if found.interrupted %}Interrupted: this is what was known by then.{% endif %}</p>
{% if left %}<p>Did not apply: {{ left | join(", ") }}.</p>{% endif %}
{% for note in found.notes %}<p>{{ note }}</p>{% endfor %}
{% if found.broken or found.error %}<pre class="broken">{{ found.broken or found.error }}</pre>{% endif %}
{% if found.moves %}<h2>The smallest conversation that shows it</h2>
<pre>{{ found.moves | tojson(indent=1) }}</pre>{% endif %}
<table><tr><th>law<th>check<th><th>cases<th>what is checked<th>not checked, and why</tr>
{% for row in rows %}<tr><td>{{ row.law }}<td>{{ row.check }}<td class="{{ row.verdict | replace(' ', '-') }}">
{{ row.verdict }}<td>{{ row.passed }}<td>{{ row.what }}
<td>{% for why, count in row.left_out.items() %}{{ count }}: {{ why }} {% endfor %}</tr>
{% endfor %}</table>
<h2>Server and client</h2>
<pre>{{ {"server": found.server, "against": found.against,
"versions": found.versions, "parser": found.parser} | tojson(indent=1) }}</pre>
<h2>Certificate of the chat template</h2><pre>{{ found.certificate | tojson(indent=1) }}</pre>
</html>
"""
)
