"""The oracle of optional columns: top logprobs, prompt logprobs, routed experts and sampling masks."""

from __future__ import annotations

import ast
import base64
import math
import struct
from collections.abc import Iterator, Sequence

from strands_tito.conformance.oracle_turn import OracleTurn, Problem, float32
from strands_tito.conformance.wire_reading import WireGeneration

MASKED = -9999.0
"""A logprob at or below it is a sentinel: vLLM's of a masked token, and SGLang's, which is float32's lowest value."""

MASS_SLACK = 1e-3
"""How far probabilities may sum to more than 1, from float32 rounding."""


def compare_columns(
    turn: OracleTurn, answer: WireGeneration, prompt: Sequence[int], path_length: int
) -> Iterator[Problem]:
    """Compare a turn's optional columns with the wire.

    Args:
        turn: The turn.
        answer: Its generation.
        prompt: The path up to the end of the turn's prompt.
        path_length: Tokens of the path before the turn's delta.
    """
    for name in turn.optional_outputs:
        if name not in turn.columns and answer.output_ids:
            yield _CHECKS[name], f"{name} was requested, but the turn does not have it."
    if "top_ids" in turn.columns and "top_logprobs" in turn.columns:
        yield from _compare_top(turn, answer, len(prompt))
    if "prompt_logprobs" in turn.columns:
        yield from _compare_prompt(turn, answer, prompt, path_length)
    if "routed_experts" in turn.columns:
        yield from _compare_experts(turn, answer, len(prompt), path_length)
    if "sampling_mask" in turn.columns:
        yield from _compare_masks(turn, answer, len(prompt))


_CHECKS = {
    "top_ids": "top",
    "top_logprobs": "top",
    "prompt_logprobs": "scored",
    "routed_experts": "routed",
    "sampling_mask": "left",
}


def _compare_top(turn: OracleTurn, answer: WireGeneration, first: int) -> Iterator[Problem]:
    ids_start, ids = turn.columns["top_ids"]
    values_start, values = turn.columns["top_logprobs"]
    count = len(answer.output_ids)
    if (ids_start, values_start, len(ids)) != (first, first, count):
        yield "top", f"top_logprobs cover {len(ids)} tokens from {ids_start}, expected {count} from {first}."
        return
    for place, (row, logprobs) in enumerate(zip(ids, values, strict=True)):
        reported = (answer.top_logprobs or [])[place] if place < len(answer.top_logprobs or ()) else []
        real = {token: value for token, value in reported if value is not None and value > MASKED}
        best = sorted(real.items(), key=lambda pair: (-pair[1], pair[0]))[: len(row)]
        expected = [(token, float32(value)) for token, value in best]
        found = [pair for pair in zip(row, logprobs, strict=True) if pair[0] != -1]
        if found != expected:
            yield "top", f"output token {place} has the top logprobs {found}, the response has {expected}.", place
        mass = sum(math.exp(value) for value in real.values())
        if mass > 1 + MASS_SLACK:
            yield "top", f"the top tokens of output token {place} have a total probability of {mass:.4g}.", place
        sampled, own = answer.output_ids[place], answer.logprobs[place]
        least = min((value for _, value in best), default=math.inf)
        if sampled not in dict(best) and (own is None or own > least + 1e-4):
            yield (
                "top",
                f"output token {place} has logprob {own}, but is missing in its top logprobs {expected}.",
                place,
            )


def _compare_prompt(
    turn: OracleTurn, answer: WireGeneration, prompt: Sequence[int], path_length: int
) -> Iterator[Problem]:
    """Compare prompt logprobs. Inside an image there are none: what a server writes there has no meaning."""
    start, values = turn.columns["prompt_logprobs"]
    first, end = max(path_length, 1), len(prompt)
    if (start, len(values)) != (first, end - first):
        yield "scored", f"prompt logprobs cover tokens {start} to {start + len(values)}, expected {first} to {end}."
        return
    inside = {at for image in turn.images for at in range(image.offset, image.offset + image.length)}
    reported = answer.prompt_logprobs[len(answer.prompt_logprobs) - len(values) :] if values else []
    places = [place for place in range(len(values)) if first + place not in inside]
    if [reported[place][0] for place in places] != [prompt[first + place] for place in places]:
        yield "scored", "the response's prompt logprobs belong to other tokens than the sent prompt."
    if [float32(reported[place][1]) for place in places] != [values[place] for place in places]:
        yield "scored", "the ledger's prompt logprobs differ from the response's."
    if any(not math.isnan(values[place - first]) for place in inside if first <= place < end):
        yield "scored", "a token of an image has a prompt logprob."


def _compare_experts(
    turn: OracleTurn, answer: WireGeneration, prompt_length: int, path_length: int
) -> Iterator[Problem]:
    start, rows = turn.columns["routed_experts"]
    first = max(path_length - 1, 0)
    end = prompt_length + len(answer.output_ids) - 1
    if (start, start + len(rows)) != (first, end):
        yield "routed", f"experts cover tokens {start} to {start + len(rows)}, expected {first} to {end}."
        return
    reported = _integers(answer.routed_experts or "")
    own = [value for row in rows for layer in row for value in layer]
    if len(own) == 0 or reported[len(reported) - len(own) :] != own:
        yield "routed", "the ledger's experts differ from the response's."


def _compare_masks(turn: OracleTurn, answer: WireGeneration, first: int) -> Iterator[Problem]:
    start, rows = turn.columns["sampling_mask"]
    masks = [[token for token in row if token != -1] for row in rows]
    if start != first or masks != (answer.sampling_masks or []):
        yield "left", "the ledger's sampling mask differs from the response's."
    for place, (token, mask) in enumerate(zip(answer.output_ids, masks, strict=False)):
        if token not in mask:
            yield "left", f"output token {place} is not in its sampling mask of {len(mask)} tokens.", place
    top_k = int(answer.sampling.get("top_k") or 0)
    largest = max(map(len, masks), default=0)
    if 0 < top_k < largest:
        yield "left", f"a sampling mask has {largest} tokens, but top_k was {top_k}."


def _integers(text: str) -> list[int]:
    """Decode base64 of a `.npy` file of integers, or of bare int32."""
    raw = base64.b64decode(text)
    kind = "i"
    if raw.startswith(b"\x93NUMPY"):
        size, begin = (2, 10) if raw[6] == 1 else (4, 12)
        end = begin + int.from_bytes(raw[8 : 8 + size], "little")
        kind = _KINDS[ast.literal_eval(raw[begin:end].decode().strip())["descr"][-2:]]
        raw = raw[end:]
    return [number for (number,) in struct.iter_unpack(f"<{kind}", raw)]


_KINDS = {"u1": "B", "i1": "b", "u2": "H", "i2": "h", "u4": "I", "i4": "i", "u8": "Q", "i8": "q"}
