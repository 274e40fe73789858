"""Runs the checks on one gateway, and reports."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

import aiohttp

from tito_conformance.gateway.adapter import Facts, Gateway, GatewayError
from tito_conformance.gateway.checks import CHECKS, Play, Verdict, judge
from tito_conformance.gateway.dialects import DIALECTS
from tito_conformance.gateway.engine import Engine
from tito_conformance.testing import ScriptedServer

MODEL = "scripted"
PASSED, FAILED = "passed", "failed"


@dataclass(frozen=True, slots=True)
class Report:
    """What one run found."""

    facts: Facts
    wire: str
    seed: int
    verdicts: Sequence[Verdict]
    speaks: str = "chat"

    @property
    def sound(self) -> bool:
        """Whether no check failed."""
        return all(verdict.result != FAILED for verdict in self.verdicts)

    def write(self, folder: Path) -> Path:
        """Write the report as `NAME.json` to a folder, and return the file."""
        facts = {name: value for name, value in asdict(self.facts).items() if name != "variants"}
        named = f"{self.facts.name}-{self.facts.variant or 'default'}-{self.wire}".replace("/", "_").replace(":", "_")
        if self.speaks != "chat":
            named += f"-{self.speaks}"
        about = {
            "date": datetime.now(UTC).date().isoformat(),
            "seed": self.seed,
            "wire": self.wire,
            "speaks": self.speaks,
        }
        checks = [{**asdict(verdict), "about": CHECKS[verdict.name].about} for verdict in self.verdicts]
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{named}.json"
        path.write_text(json.dumps({"gateway": facts, **about, "checks": checks}, indent=1) + "\n", encoding="utf-8")
        return path


async def run(
    gateway: Gateway,
    tokenizer: str,
    *,
    wire: str = "",
    speaks: str = "chat",
    seed: int = 0,
    port: int = 0,
    checks: Sequence[str] = (),
    show: Callable[[Verdict], None] = lambda verdict: None,
) -> Report:
    """Start the scripted engine and the gateway, and run the checks, each in sessions of its own.

    Args:
        gateway: The gateway.
        tokenizer: Folder of a tokenizer with a ChatML template and Hermes' tool calls, such as Qwen3's.
        wire: The engine to play, "vllm" or "sglang"; the adapter's first by default.
        speaks: What the harness speaks, of `DIALECTS`.
        seed: Seed of samples and logprobs.
        port: The engine's port, for a gateway that runs already; any free one by default.
        checks: Names of the checks to run; all by default.
        show: Called with each verdict.

    Raises:
        GatewayError: The gateway cannot be started, or does not serve such an engine.
    """
    try:
        await gateway.open()
        if (chosen := wire or gateway.facts.wires[0]) not in gateway.facts.wires:
            raise GatewayError(f"{gateway.facts.name} serves {' and '.join(gateway.facts.wires)}, not {chosen!r}.")
        if speaks not in gateway.facts.speaks:
            raise GatewayError(f"{gateway.facts.name} speaks {' and '.join(gateway.facts.speaks)}, not {speaks!r}.")
        engine = Engine(chosen, tokenizer, seed, gateway.facts.release)
        async with ScriptedServer(engine.scripted, port=port) as server, aiohttp.ClientSession() as http:
            await gateway.start(server.base_url, chosen, tokenizer, MODEL)
            play = Play(engine, gateway, http, MODEL, random.Random(seed), DIALECTS[speaks])
            verdicts = []
            for name in checks or CHECKS:
                verdicts.append(await judge(play, name))
                show(verdicts[-1])
    finally:
        await gateway.stop()
    return Report(gateway.facts, chosen, seed, verdicts, speaks)
