"""Resume what the engine aborts: its tokens become the end of the next request's prompt, and the parts are joined.

The parts stay what their responses reported (law 4); nothing between them is filled in.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any

import numpy as np
import numpy.typing as npt

from tito_core.backend.errors import GenerationAbortedError, ProtocolViolationError
from tito_core.backend.generate import connected, generate
from tito_core.backend.images import PromptImages
from tito_core.backend.protocol import NO_COLUMNS, Backend, OnAbort, OnChunk, TokenRequest, TokenResponse
from tito_core.backend.sampling import SamplingParams
from tito_core.ledger.columns import CANDIDATES, Column
from tito_core.ledger.turn import Finish, ResponseSpan, VersionSpan

MAX_RESUMES = 16
"""How often one answer is resumed at most."""
_FIRST_WAIT_S, _LONGEST_WAIT_S = 0.1, 5.0
"""Waits after aborts without a token: a server that aborts everything would be asked again without a pause."""


async def generate_resuming(
    backend: Backend,
    request: TokenRequest,
    on_abort: OnAbort = "resume",
    on_chunk: OnChunk | None = None,
) -> TokenResponse:
    """Generate. An aborted generation is resumed: its tokens become the end of the next request's prompt.

    A trainer aborts running generations before it changes weights. Both engines then answer with the tokens sampled so
    far; SGLang also aborts requests in its queue, which have no tokens.

    A generation with a grammar or a stop string cannot be resumed, because engines restart both with each request. With
    images, one that sampled a placeholder cannot either, because the server would replace the placeholder by an image.
    Such a generation is sampled again from its beginning, unless part of it was passed to `on_chunk`.

    An answer that was aborted at `max_new_tokens` or at the end of the context finishes with `LENGTH`, and one that
    was aborted in the step that sampled a requested stop id with `STOP` (see `validated`): both are whole.

    Raises:
        GenerationAbortedError: It was aborted, and `on_abort` wants an error, allows no more tries, or wants to
            commit an answer without tokens.
        BackendError: See `Backend.generate`.
    """
    parts: list[TokenResponse] = []
    current, idle = request, 0
    for resumes in range(MAX_RESUMES + 1):
        part = await generate(backend, current, on_chunk)
        if part.finish != Finish.ABORT and not parts:  # the usual case
            return part
        _expect_same_rows(backend, parts, part)
        parts.append(part)
        if part.finish != Finish.ABORT:
            return joined(parts)
        if _sampled(parts) >= request.sampling.max_new_tokens or await _fills_context(backend, part):
            return joined([*parts[:-1], replace(part, finish=Finish.LENGTH, message=None)])
        if on_abort == "commit" and _sampled(parts):
            return joined(parts)
        if on_abort != "resume":
            break
        if not resumable(request.sampling) or _sampled_placeholder(request, parts):
            if on_chunk is not None and len(part.output_ids):
                break
            parts.clear()
        idle = 0 if len(part.output_ids) else idle + 1
        if resumes < MAX_RESUMES:
            await asyncio.sleep(min(_FIRST_WAIT_S * 2 ** (idle - 1), _LONGEST_WAIT_S) if idle else 0)
        current = continuing(request, parts, resumes + 1)
    raise _aborted(backend, request, part, on_abort, resumes)


async def _fills_context(backend: Backend, part: TokenResponse) -> bool:
    """Return whether a response's prompt and output leave no room for another token in the context, if it is known."""
    limit = (await connected(backend)).max_model_len
    return limit is not None and part.prompt_length + len(part.output_ids) >= limit


def resumable(sampling: SamplingParams) -> bool:
    """Return whether a completion can be resumed: no grammar, stop string or stop pattern may span the cut."""
    return sampling.grammar is None and not sampling.stop and not sampling.stop_patterns


def _sampled_placeholder(request: TokenRequest, parts: Sequence[TokenResponse]) -> bool:
    """Return whether a generation with images sampled a placeholder of media."""
    images = request.images
    if images is None:
        return False
    media = [images.placeholder, *images.media_ids]
    return any(bool(np.isin(part.output_ids, media).any()) for part in parts)


def continuing(request: TokenRequest, parts: Sequence[TokenResponse], number: int) -> TokenRequest:
    """Return the request for the tokens that are missing after `parts`.

    Args:
        request: The original request.
        parts: The responses so far.
        number: Number of this request, from 1. It goes into the id and the seed: the same seed would draw the same
            random numbers again.
    """
    before = [part.output_ids for part in parts if len(part.output_ids)]
    sampling, sampled = request.sampling, _sampled(parts)
    remaining = {
        "max_new_tokens": sampling.max_new_tokens - sampled,
        "min_new_tokens": max(0, sampling.min_new_tokens - sampled),
        "seed": None if sampling.seed is None else (sampling.seed + number + 2**63) % 2**64 - 2**63,
    }
    id_text = request.id_text
    for ids in before:
        id_text = None if id_text is None else id_text.then(ids)
    input_ids = np.concatenate([request.input_ids, *before])
    input_ids.flags.writeable = False
    return replace(
        request,
        input_ids=input_ids,
        sampling=sampling.model_copy(update=remaining),
        request_id=f"{request.request_id}-part{number}",
        id_text=id_text,
        images=_known_images(request, parts),
        optional_outputs=request.optional_outputs.model_copy(update={"prompt_logprobs": False})
        if before
        else request.optional_outputs,
    )


def _known_images(request: TokenRequest, parts: Sequence[TokenResponse]) -> PromptImages | None:
    """Return the images of the next request: a partial response shows how long the new ones are."""
    first, images = next((part for part in parts if len(part.output_ids)), None), request.images
    if images is None or first is None:
        return images
    return replace(images, lengths=(*images.lengths, *(length for _, length in first.media)), echo_text=None)


def joined(parts: Sequence[TokenResponse]) -> TokenResponse:
    """Join the responses of one completion; each token and logprob stays as its response reported it (law 4)."""
    if len(parts) == 1:
        return parts[0]
    nonempty = [part for part in parts if len(part.output_ids)] or [parts[-1]]
    starts = list(accumulate((len(part.output_ids) for part in nonempty), initial=0))
    spans = [(part, start, stop) for part, start, stop in zip(nonempty, starts, starts[1:], strict=False)]
    several = len(nonempty) > 1
    return replace(
        parts[-1],
        output_ids=np.concatenate([part.output_ids for part in nonempty]),
        logprobs=np.concatenate([part.logprobs for part in nonempty]),
        prompt_length=(nonempty[0] if nonempty[0].media else parts[0]).prompt_length,
        media=nonempty[0].media,
        cached_tokens=nonempty[0].cached_tokens,
        latency_s=sum(part.latency_s for part in parts),
        versions=_versions(spans),
        columns=_columns(nonempty),
        unordered=any(part.unordered for part in nonempty),
        echoed_from=nonempty[0].echoed_from,
        responses=tuple(ResponseSpan(a, b, part.request_id) for part, a, b in spans) if several else (),
    )


def _versions(spans: Sequence[tuple[TokenResponse, int, int]]) -> tuple[VersionSpan, ...]:
    """Shift version spans to the start of their response; one version on both sides of a cut is one span (law 10)."""
    tiled: list[VersionSpan] = []
    for part, at, _ in spans:
        for start, stop, version in part.versions:
            if tiled and tiled[-1].version == version:
                tiled[-1] = tiled[-1]._replace(stop=at + stop)
            else:
                tiled.append(VersionSpan(at + start, at + stop, version))
    return tuple(tiled)


def _columns(parts: Sequence[TokenResponse]) -> Mapping[str, Column]:
    """Append to each column the rows of the next part that it lacks; parts overlap in the last routed token.

    Where rows between them are blank (see `RawResponse.recomputed`), those before are too: a column has no gap.
    """
    columns = dict(parts[0].columns)
    for part in parts[1:]:
        for name, more in part.columns.items():
            if (before := columns.get(name)) is not None:
                known = before.start + before.rows - more.start
                values = more.values if known < 0 else _stacked(before.values, more.values[known:])
                columns[name] = Column.of(more.start if known < 0 else before.start, values)
    return columns or NO_COLUMNS


def _expect_same_rows(backend: Backend, parts: Sequence[TokenResponse], part: TokenResponse) -> None:
    """Check that a part's columns continue those before it: only rows of candidates have widths of their own."""
    for name, column in part.columns.items():
        shapes = {each.columns[name].shape[1:] for each in parts if name in each.columns and each.columns[name].rows}
        if name not in CANDIDATES and column.rows and not shapes <= {column.shape[1:]}:
            raise ProtocolViolationError(
                f"Law 2: {backend.name} reported {name} of shape {column.shape} for the rest of an aborted answer, "
                f"but rows of {', '.join(map(str, shapes))} for its beginning. The answer was discarded.",
                backend=backend.name,
                request_id=part.request_id,
            )


def _stacked(first: npt.NDArray[Any], second: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Append rows. Short ones are padded as `Column` says: each part is as wide as its own longest row."""
    if first.ndim == 2 and first.shape[1] != second.shape[1]:
        width = max(first.shape[1], second.shape[1])
        filler, dtype = (np.nan, np.float64) if first.dtype.kind == "f" else (-1, np.int64)
        first, second = (
            np.pad(each.astype(dtype), ((0, 0), (0, width - each.shape[1])), constant_values=filler)
            for each in (first, second)
        )
    return np.concatenate([first, second])


def _sampled(parts: Sequence[TokenResponse]) -> int:
    return sum(len(part.output_ids) for part in parts)


def _aborted(
    backend: Backend, request: TokenRequest, last: TokenResponse, on_abort: OnAbort, resumes: int
) -> GenerationAbortedError:
    message = f" ({last.message})" if last.message else ""
    reason = f"It was resumed {MAX_RESUMES} times, the most that is tried, and aborted each time."
    if on_abort == "discard":
        reason = "Use on_abort='resume' to continue from them."
    elif on_abort == "commit":
        reason = "There were no tokens to commit."
    elif resumes < MAX_RESUMES:
        reason = (
            "An answer with a grammar, stop strings or a sampled placeholder of images cannot be resumed, and cannot "
            "be sampled again once a part of it was streamed."
        )
    return GenerationAbortedError(
        f"{backend.name} aborted the generation{message}; its partial tokens were discarded and the ledger is "
        f"unchanged. {reason} Run the turn again.",
        backend=backend.name,
        request_id=request.request_id,
    )
