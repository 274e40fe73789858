"""`tito conformance --gateway`: judge a gateway with one command."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import typer
from rich.console import Console

from strands_tito.cli import print_error
from tito_conformance.gateway.adapter import GatewayError, find
from tito_conformance.gateway.checks import CHECKS, Verdict
from tito_conformance.gateway.dialects import DIALECTS
from tito_conformance.gateway.run import Report, run
from tito_engines.models import ensure_tokenizer, qwen3_instruct

STYLES = {"passed": "green", "failed": "red", "not applicable": "yellow"}


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """The scripted engine: its wire, port and seed, and its tokenizer's name or folder; "" or 0 for the default."""

    wire: str
    port: int
    tokenizer: str
    seed: int


def judge_gateway(
    named: str,
    console: Console,
    engine: EngineOptions,
    speaks: str,
    python: str,
    api_key: str,
    only: Sequence[str],
    report: Path | None,
) -> int:
    """Judge a gateway, print each verdict, and return the exit status: 0, 1 for a failure, 4 if it does not start.

    Raises:
        typer.BadParameter: An option cannot be used.
    """
    if unknown := [name for name in only if name not in CHECKS]:
        raise typer.BadParameter(f"Unknown check {unknown[0]!r}. Available: {', '.join(CHECKS)}.")
    if speaks not in DIALECTS:
        raise typer.BadParameter(f"Unknown wire {speaks!r}. Available: {', '.join(DIALECTS)}.")
    if named.startswith("http") and not (engine.port and engine.wire):
        raise typer.BadParameter(
            "A gateway that runs already needs --engine-port and --wire of the engine that it calls."
        )
    folder = ensure_tokenizer(engine.tokenizer) if engine.tokenizer else qwen3_instruct.tokenizer(console.print)

    def show(verdict: Verdict) -> None:
        console.print(f"[{STYLES[verdict.result]}]{verdict.result:14}[/] {verdict.name}", highlight=False)
        if verdict.detail:
            console.print(verdict.detail, highlight=False, markup=False, style="dim", soft_wrap=True)

    async def judged() -> Report:
        return await run(
            find(named, python, api_key),
            str(folder),
            wire=engine.wire,
            speaks=speaks,
            seed=engine.seed,
            port=engine.port,
            checks=only,
            show=show,
        )

    try:
        found = asyncio.run(judged())
    except (GatewayError, OSError) as error:  # such as a port that is taken
        print_error(error)
        return 4
    counts = {result: sum(each.result == result for each in found.verdicts) for result in STYLES}
    facts = found.facts
    about = " ".join(
        part
        for part in (facts.name, facts.version, facts.variant, f"speaks {speaks} on {found.wire}, seed {found.seed}:")
        if part
    )
    console.print(about, ", ".join(f"{count} {result}" for result, count in counts.items()), highlight=False)
    if report is not None:
        console.print(f"Written: {found.write(report)}", highlight=False)
    return 0 if found.sound else 1
