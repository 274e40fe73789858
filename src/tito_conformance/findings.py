"""What a run found, as plain data: for a person's report, for a file, and for pytest."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from typing import Any

import msgspec

from tito_conformance.laws import CHECKS, LAWS
from tito_conformance.suite import Outcome
from tito_conformance.target import Connected


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
    """Give a row for each check, in the order of the laws."""
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
    """Give everything that a run found, JSON-compatible."""
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
