"""The oracle of optional columns: what an answer says beside its tokens, and what the ledger keeps of it."""

from __future__ import annotations

import ast
import base64
import math
import struct
from collections.abc import Iterator

from strands_tito.conformance.oracle_turn import OracleTurn, Problem, float32
from strands_tito.conformance.wire_reading import Heard

MASKED = -9999.0
"""At or below it a logprob is none: vLLM's of a masked token, and SGLang's, float32's lowest."""

MASS_SLACK = 1e-3
"""How far probabilities may sum to more than 1, by float32's rounding."""


def beside(turn: OracleTurn, said: Heard, path: int) -> Iterator[Problem]:
    """Compare a turn's optional columns with the wire.

    Args:
        turn: The turn.
        said: Its answer.
        path: Tokens before its delta.
    """
    for name in turn.optional_outputs:
        if name not in turn.columns and said.output:
            yield _CHECKS[name], f"{name} was wanted, and the turn has none."
    if "top_ids" in turn.columns and "top_logprobs" in turn.columns:
        yield from _top(turn, said)
    if "prompt_logprobs" in turn.columns:
        yield from _prompt(turn, said, path)
    if "routed_experts" in turn.columns:
        yield from _experts(turn, said, path)
    if "sampling_mask" in turn.columns:
        yield from _masks(turn, said)


_CHECKS = {
    "top_ids": "top",
    "top_logprobs": "top",
    "prompt_logprobs": "scored",
    "routed_experts": "routed",
    "sampling_mask": "left",
}


def _top(turn: OracleTurn, said: Heard) -> Iterator[Problem]:
    start, ids = turn.columns["top_ids"]
    at, values = turn.columns["top_logprobs"]
    if (start, at, len(ids)) != (len(said.prompt), len(said.prompt), len(said.output)):
        yield (
            "top",
            f"the likeliest of {len(ids)} tokens from {start} on, of {len(said.output)} after {len(said.prompt)}.",
        )
        return
    for place, (row, logprobs) in enumerate(zip(ids, values, strict=True)):
        heard = (said.top or [])[place] if place < len(said.top or ()) else []
        real = {token: value for token, value in heard if value is not None and value > MASKED}
        best = sorted(real.items(), key=lambda pair: (-pair[1], pair[0]))[: len(row)]
        expected = [(token, float32(value)) for token, value in best]
        found = [pair for pair in zip(row, logprobs, strict=True) if pair[0] != -1]
        if found != expected:
            yield "top", f"output token {place} has the likeliest {found}, the answer says {expected}."
        mass = sum(math.exp(value) for value in real.values())
        if mass > 1 + MASS_SLACK:
            yield "top", f"the likeliest tokens of output token {place} have a probability of {mass:.4g} together."
        chosen, own = said.output[place], said.logprobs[place]
        least = min((value for _, value in best), default=math.inf)
        if chosen not in dict(best) and (own is None or own > least + 1e-4):
            yield "top", f"output token {place} has logprob {own}, and is not among the likeliest {expected}."


def _prompt(turn: OracleTurn, said: Heard, path: int) -> Iterator[Problem]:
    start, values = turn.columns["prompt_logprobs"]
    first = max(path, 1)
    if (start, len(values)) != (first, len(said.prompt) - first):
        yield (
            "scored",
            f"prompt logprobs are of {start} to {start + len(values)}, of {first} to {len(said.prompt)} wanted.",
        )
        return
    heard = said.scored[len(said.scored) - len(values) :] if values else []
    if [token for token, _ in heard] != said.prompt[first:]:
        yield "scored", "the answer's prompt logprobs are of other tokens than were sent."
    if [float32(value) for _, value in heard] != values:
        yield "scored", "the ledger's prompt logprobs differ from the answer's."


def _experts(turn: OracleTurn, said: Heard, path: int) -> Iterator[Problem]:
    start, rows = turn.columns["routed_experts"]
    first = max(path - 1, 0)
    whole = len(said.prompt) + len(said.output) - 1
    if (start, start + len(rows)) != (first, whole):
        yield "routed", f"experts are of tokens {start} to {start + len(rows)}, expected {first} to {whole}."
        return
    numbers = _numbers(said.experts or "")
    own = [value for row in rows for layer in row for value in layer]
    if len(own) == 0 or numbers[len(numbers) - len(own) :] != own:
        yield "routed", "the ledger's experts differ from the answer's."


def _masks(turn: OracleTurn, said: Heard) -> Iterator[Problem]:
    start, rows = turn.columns["sampling_mask"]
    kept = [[token for token in row if token != -1] for row in rows]
    if start != len(said.prompt) or kept != (said.masks or []):
        yield "left", "the ledger's sampling mask differs from the answer's."
    for place, (token, row) in enumerate(zip(said.output, kept, strict=False)):
        if token not in row:
            yield "left", f"output token {place} is not among the {len(row)} that were left."
    limit = int(said.sampling.get("top_k") or 0)
    most = max(map(len, kept), default=0)
    if 0 < limit < most:
        yield "left", f"{most} tokens were left where top_k was {limit}."


def _numbers(text: str) -> list[int]:
    """Read base64: a `.npy` of whole numbers, or bare int32."""
    raw = base64.b64decode(text)
    kind = "i"
    if raw.startswith(b"\x93NUMPY"):
        size, begin = (2, 10) if raw[6] == 1 else (4, 12)
        end = begin + int.from_bytes(raw[8 : 8 + size], "little")
        kind = _KINDS[ast.literal_eval(raw[begin:end].decode().strip())["descr"][-2:]]
        raw = raw[end:]
    return [number for (number,) in struct.iter_unpack(f"<{kind}", raw)]


_KINDS = {"u1": "B", "i1": "b", "u2": "H", "i2": "h", "u4": "I", "i4": "i", "u8": "Q", "i8": "q"}
