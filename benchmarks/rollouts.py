"""Random rollouts for the benchmarks, with a given number of turns and tokens, half of them sampled."""

from __future__ import annotations

import uuid
from typing import Any

import numpy as np

from tito_core.backend import SamplingParams
from tito_core.ledger import (
    CallRecord,
    Columns,
    Draft,
    EngineRecord,
    Finish,
    Ledger,
    Provenance,
    Sampling,
    Semantics,
    Server,
    VersionSpan,
)
from tito_core.ledger.history import extended

SCAFFOLD = 8
"""Template tokens around the content of each delta."""


VOCABULARY = 151_669
"""Size of Qwen3's vocabulary."""


def draft(rng: np.random.Generator, parent: int | None, path_length: int, tokens: int, fingerprint: bytes) -> Draft:
    """Return a turn with a number of tokens, half of them sampled, and all the records of a real one."""
    output = tokens // 2
    prompt = tokens - output
    provenance = np.full(prompt, Provenance.PROMPT, np.uint8)
    provenance[:SCAFFOLD] = provenance[-SCAFFOLD:] = Provenance.SCAFFOLD
    ids = rng.integers(0, VOCABULARY, tokens, np.int32)
    sampling = SamplingParams(temperature=1.0).model_dump(mode="json")
    called = rng.random() < 0.75
    return Draft(
        parent=parent,
        columns=Columns.pack(ids[:prompt], provenance, ids[prompt:], -rng.exponential(1, output).astype(np.float32)),
        constrained=False,
        prompt_length=path_length + prompt,
        finish=Finish.STOP,
        stop=int(ids[-1]),
        fingerprint=fingerprint,
        max_new_tokens=sampling.pop("max_new_tokens"),
        sampling=Sampling(sampling),
        calls=(CallRecord("calculator", "ok", output // 2, output - 1),) if called else (),
        engine=EngineRecord(
            server=Server(
                "vllm",
                "Qwen/Qwen3-4B",
                Semantics(processed=False, temperature=1.0, adjusted=False, source="vllm 0.32.0, measured"),
            ),
            request_id=uuid.UUID(bytes=rng.bytes(16)).hex,
            latency_s=float(rng.random()),
            cached_tokens=path_length,
            versions=(VersionSpan(0, output, "step-" + "17"),),
        ),
    )


def rollout(seed: int, tokens: int, turns: int, *, messages: bool = False) -> Ledger:
    """Return a finished rollout; with `messages`, a live one that keeps its history by reference."""
    rng = np.random.default_rng(seed)
    ledger = Ledger(str(uuid.UUID(bytes=rng.bytes(16))))
    history: list[Any] = [{"system": "Be exact.", "tools": [], "template": "t"}]
    for turn in range(turns):
        size = tokens * (turn + 1) // turns - tokens * turn // turns
        parent = turn - 1 if turn else None
        if not messages:
            ledger.commit(draft(rng, parent, ledger.path_length(parent), size, rng.bytes(16)))
            continue
        history.append(prompt_message(rng, turn, size))
        match, answer = ledger.match(history), answer_message(rng, turn, size)
        fingerprint = extended(match.digest, answer)
        ledger.commit(draft(rng, parent, ledger.path_length(parent), size, fingerprint), match, answer)
        history.append(answer)
    return ledger


def prompt_message(rng: np.random.Generator, turn: int, tokens: int) -> dict[str, Any]:
    """Return the message of a turn's prompt, four characters per token: a question or, every other turn, a result."""
    shown = {"text": rng.bytes(tokens).hex()}
    if turn % 2 == 0:
        return {"role": "user", "content": [shown]}
    result = {"toolUseId": f"call_1a2b3c4d_{turn}", "status": "success", "content": [shown]}
    return {"role": "user", "content": [{"toolResult": result}]}


def answer_message(rng: np.random.Generator, turn: int, tokens: int) -> dict[str, Any]:
    """Return the message of a turn's answer: text, every other turn with a call that has a number in it."""
    content: list[dict[str, Any]] = [{"text": rng.bytes(tokens).hex()}]
    if turn % 2 == 0:
        use = {"toolUseId": f"call_1a2b3c4d_{turn + 1}", "name": "calculator", "input": {"a": turn, "b": "x" * 8}}
        content.append({"toolUse": use})
    return {"role": "assistant", "content": content}
