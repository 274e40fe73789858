"""What becomes of a generation that the engine was told to abort; the same for every engine.

A trainer aborts what runs before it changes weights. Both engines then answer with the tokens that are there, SGLang
also from its queue, with none.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import accumulate

import numpy as np

from tito_core.backend.aborts import RESUMED, Aborts
from tito_core.backend.checked import generate
from tito_core.backend.errors import GenerationAbortedError
from tito_core.backend.protocol import NO_COLUMNS, Backend, OnChunk, TokenRequest, TokenResponse
from tito_core.backend.sampling import SamplingParams
from tito_core.ledger.columns import Column
from tito_core.ledger.turn import Finish, ResponseSpan, VersionSpan

_FIRST_WAIT_S, _LONGEST_WAIT_S = 0.1, 5.0
"""Waits after aborts that brought no token, which a server that aborts everything would answer at once."""


async def generate_whole(
    backend: Backend, request: TokenRequest, aborts: Aborts = RESUMED, on_chunk: OnChunk | None = None
) -> TokenResponse:
    """Generate; what the engine aborts goes on from its tokens, which are then the end of the next request's prompt.

    The tokens of a grammar, or before a stop string, cannot be gone on from: engines begin both anew with each request.
    Such a generation is sampled again from its beginning, unless part of it was given to `on_chunk`.

    Raises:
        GenerationAbortedError: It was aborted, and `aborts` asks for an error, allows no more tries, or asks for tokens
            that are not there.
        BackendError: See `Backend.generate`.
    """
    parts: list[TokenResponse] = []
    asked, idle = request, 0
    for resumes in range(aborts.max_resumes + 1):
        part = await generate(backend, asked, on_chunk)
        parts.append(part)
        if part.finish != Finish.ABORT:
            return joined(parts)
        if _sampled(parts) >= request.sampling.max_new_tokens:
            return joined([*parts[:-1], replace(part, finish=Finish.LENGTH, message=None)])
        if aborts.on_abort == "commit" and _sampled(parts):
            return joined(parts)
        if aborts.on_abort != "resume":
            break
        if not resumable(request.sampling):
            if on_chunk is not None and len(part.output_ids):
                break
            parts.clear()
        idle = 0 if len(part.output_ids) else idle + 1
        if resumes < aborts.max_resumes:
            await asyncio.sleep(min(_FIRST_WAIT_S * 2 ** (idle - 1), _LONGEST_WAIT_S) if idle else 0)
        asked = continuing(request, parts, resumes + 1)
    raise _aborted(backend, request, part, aborts)


def resumable(sampling: SamplingParams) -> bool:
    """Return whether a completion can be gone on with: no grammar and no stop string may reach over the cut."""
    return sampling.grammar is None and not sampling.stop


def continuing(request: TokenRequest, parts: Sequence[TokenResponse], number: int) -> TokenRequest:
    """Return the request for what is missing after `parts`.

    Args:
        request: The whole of it.
        parts: What there is.
        number: Number of this request, from 1, which its id and its seed carry: the same seed would draw the same
            random numbers once more.
    """
    before = [part.output_ids for part in parts if len(part.output_ids)]
    sampling, there = request.sampling, _sampled(parts)
    left = {
        "max_new_tokens": sampling.max_new_tokens - there,
        "min_new_tokens": max(0, sampling.min_new_tokens - there),
        "seed": None if sampling.seed is None else (sampling.seed + number + 2**63) % 2**64 - 2**63,
    }
    text = request.text
    for ids in before:
        text = None if text is None else text.then(ids)
    input_ids = np.concatenate([request.input_ids, *before])
    input_ids.flags.writeable = False
    return replace(
        request,
        input_ids=input_ids,
        sampling=sampling.model_copy(update=left),
        request_id=f"{request.request_id}-part{number}",
        text=text,
        optional_outputs=request.optional_outputs.model_copy(update={"prompt_logprobs": False})
        if before
        else request.optional_outputs,
    )


def joined(parts: Sequence[TokenResponse]) -> TokenResponse:
    """Put the responses of one completion together; each token and logprob stays as its response had it (law 4)."""
    if len(parts) == 1:
        return parts[0]
    said = [part for part in parts if len(part.output_ids)] or [parts[-1]]
    starts = list(accumulate((len(part.output_ids) for part in said), initial=0))
    spans = [(part, start, stop) for part, start, stop in zip(said, starts, starts[1:], strict=False)]
    several = len(said) > 1
    return replace(
        parts[-1],
        output_ids=np.concatenate([part.output_ids for part in said]),
        logprobs=np.concatenate([part.logprobs for part in said]),
        prompt_length=parts[0].prompt_length,
        cached_tokens=said[0].cached_tokens,
        latency_s=sum(part.latency_s for part in parts),
        versions=_versions(spans),
        columns=_columns(said),
        responses=tuple(ResponseSpan(a, b, part.request_id) for part, a, b in spans) if several else (),
    )


def _versions(spans: Sequence[tuple[TokenResponse, int, int]]) -> tuple[VersionSpan, ...]:
    """Move version spans to where their response begins; one version over a cut is one span (law 10)."""
    tiled: list[VersionSpan] = []
    for part, at, _ in spans:
        for start, stop, version in part.versions:
            if tiled and tiled[-1].version == version:
                tiled[-1] = tiled[-1]._replace(stop=at + stop)
            else:
                tiled.append(VersionSpan(at + start, at + stop, version))
    return tuple(tiled)


def _columns(parts: Sequence[TokenResponse]) -> Mapping[str, Column]:
    """Let each column go on with the rows of the next part that it has not: those of the token that was routed last."""
    columns = dict(parts[0].columns)
    for part in parts[1:]:
        for name, more in part.columns.items():
            if (before := columns.get(name)) is not None:
                rest = more.values[before.start + before.rows - more.start :]
                columns[name] = Column.of(before.start, np.concatenate([before.values, rest]))
    return columns or NO_COLUMNS


def _sampled(parts: Sequence[TokenResponse]) -> int:
    return sum(len(part.output_ids) for part in parts)


def _aborted(backend: Backend, request: TokenRequest, last: TokenResponse, aborts: Aborts) -> GenerationAbortedError:
    said = f" ({last.message})" if last.message else ""
    again = f"It was resumed {aborts.max_resumes} times, as max_resumes allows, and aborted each time."
    if aborts.on_abort == "discard":
        again = "on_abort='resume' would go on from them."
    elif aborts.on_abort == "commit":
        again = "There were none to commit."
    elif not resumable(request.sampling):
        again = (
            "An answer with a grammar or stop strings cannot be resumed, and not be sampled again once it was shown."
        )
    return GenerationAbortedError(
        f"{backend.name} aborted the generation{said}; its partial tokens were discarded and the ledger is as before. "
        f"{again} Run the turn again.",
        backend=backend.name,
        request_id=request.request_id,
    )
