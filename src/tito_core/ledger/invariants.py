"""The laws of one turn, as functions; `forest_invariants` has those of a whole ledger.

Each function raises `LawViolationError` with the law, the turn, the offset, and the expected and found values.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from tito_core.ledger.columns import CANDIDATES, Column, Logprobs
from tito_core.ledger.errors import LawViolationError
from tito_core.ledger.image import Image
from tito_core.ledger.provenance import Provenance
from tito_core.ledger.turn import Draft, MediaSpan, ResponseSpan, Turn, VersionSpan

if TYPE_CHECKING:
    from tito_core.ledger.ledger import Ledger

SENTINEL_LOGPROB = -9999.0
"""What vLLM reports for a masked token (`--logprobs-mode processed_logprobs`). It is not a measurement."""
ROUNDING = 1e-4
"""Largest logprob that is accepted, in nats: float32 rounding can put the logprob of a certain token above 0."""
MAX_COUNT = 2**63 - 1
"""Largest count that a file may hold: signed 64 bits."""


def check_draft(draft: Draft, *, path_length: int, turn: int) -> None:
    """Check laws 1, 2, 3, 4, 9 and 10 on one turn, before it is committed.

    Args:
        draft: The turn's content.
        path_length: Number of tokens before its delta.
        turn: Its index, for the error.
    """
    check_values(draft, turn=turn)
    check_facts(draft, path_length=path_length, turn=turn)


def check_values(draft: Draft, *, turn: int) -> None:
    """Check laws 2, 3 and 4 on the columns of one turn: ids, the delta's provenance, logprobs."""
    columns = draft.columns
    ids = columns.ids
    if len(ids) and ids.min() < 0:
        first = int(np.argmax(ids < 0))
        name, offset = ("delta", first) if first < columns.prompt else ("output", first - columns.prompt)
        raise LawViolationError(2, f"turn {turn}: {name} id {int(ids[first])} at offset {offset} is negative.")
    provenance = columns.prompt_provenance
    if len(provenance) and provenance.max() > Provenance.INSERTED:
        offset = int(np.argmax(provenance > Provenance.INSERTED))
        found = int(provenance[offset])
        raise LawViolationError(
            3, f"turn {turn}: delta token {offset} has provenance {found}, which only output tokens may have."
        )
    check_logprobs(columns.logprobs, turn=turn)


def check_facts(draft: Draft, *, path_length: int, turn: int) -> None:
    """Check laws 2, 4, 9 and 10 on a turn's other fields: prompt length, versions, calls, optional columns, media."""
    expected = path_length + draft.columns.prompt
    if draft.prompt_length != expected:
        raise LawViolationError(
            4,
            f"turn {turn}: the engine reported a prompt of {draft.prompt_length} tokens, "
            f"the ledger holds {expected} ({path_length} of the path and {draft.columns.prompt} of the delta).",
        )
    output, engine = draft.columns.output, draft.engine
    check_counts(draft, turn=turn)
    check_versions(engine.versions, output, turn=turn)
    if engine.responses:
        check_responses(engine.responses, output, turn=turn)
    for call in draft.calls:
        if not 0 <= call.start <= call.stop <= output:
            raise LawViolationError(
                9, f"turn {turn}: a call spans output tokens {call.start}:{call.stop}, but the output has {output}."
            )
    if draft.extras:
        for name, column in draft.extras.items():
            check_column(name, column, middle=expected, output=output, turn=turn)
        if {"top_ids", "top_logprobs"} <= draft.extras.keys():
            check_top(draft.extras["top_ids"], draft.extras["top_logprobs"], turn=turn)
    if draft.media:
        check_media(draft.media, start=path_length, stop=expected, turn=turn)
        check_placeholders(draft, path_length=path_length, turn=turn)


def check_counts(draft: Draft, *, turn: int) -> None:
    """Check law 4 on counts and seconds: not negative, and counts fit in a file (law 12)."""
    engine = draft.engine
    for count in (draft.max_new_tokens or 0, draft.call_ids, engine.cached_tokens or 0):
        if not 0 <= count <= MAX_COUNT:
            raise LawViolationError(
                4,
                f"turn {turn}: max_new_tokens {draft.max_new_tokens}, call_ids {draft.call_ids} and cached_tokens "
                f"{engine.cached_tokens} must be from 0 to {MAX_COUNT}.",
            )
    if not engine.latency_s >= 0:  # so that NaN fails too
        raise LawViolationError(4, f"turn {turn}: the latency is {engine.latency_s} s, expected 0 or more.")


def check_logprobs(logprobs: Sequence[float] | Logprobs, *, turn: int | None = None) -> None:
    """Check law 4 on logprobs: finite, at most 0 (within float32 rounding), not a sentinel."""
    values = np.asarray(logprobs, np.float32)
    if not len(values) or (
        values.min() > SENTINEL_LOGPROB and values.max() <= ROUNDING
    ):  # a NaN makes both comparisons false
        return
    offset = int(np.argmax(~np.isfinite(values) | (values > ROUNDING) | (values <= SENTINEL_LOGPROB)))
    where = "the answer" if turn is None else f"turn {turn}"
    raise LawViolationError(
        4, f"{where}: logprob {float(values[offset])} at output offset {offset} is not a log-probability."
    )


def check_versions(versions: Sequence[VersionSpan], output_length: int, *, turn: int | None = None) -> None:
    """Check law 10: the version spans tile the output exactly."""
    if len(versions) == 1 and versions[0].start == 0 and versions[0].stop == output_length:
        return
    where = "the answer" if turn is None else f"turn {turn}"
    end = 0
    for span in versions:
        if span.start != end or span.stop < span.start:
            raise LawViolationError(
                10, f"{where}: weight-version span {span.start}:{span.stop} should start at output offset {end}."
            )
        end = span.stop
    if end != output_length:
        raise LawViolationError(
            10, f"{where}: weight-version spans end at {end}, the output has {output_length} tokens."
        )


def check_responses(responses: Sequence[ResponseSpan], output_length: int, *, turn: int) -> None:
    """Check law 4 on a resumed turn: its responses tile the output, so that each token comes from one response."""
    end = 0
    for span in responses:
        if span.start != end or span.stop <= span.start:
            raise LawViolationError(
                4, f"turn {turn}: response span {span.start}:{span.stop} should start at output offset {end}."
            )
        end = span.stop
    if end != output_length:
        raise LawViolationError(4, f"turn {turn}: response spans end at {end}, the output has {output_length} tokens.")


def check_column(name: str, column: Column, *, middle: int, output: int, turn: int) -> None:
    """Check law 2 on an optional column: its rows lie within the path; top-k columns have one row per output token.

    Args:
        name: The column's name.
        column: The column.
        middle: Offset of the first output token in the path.
        output: Number of output tokens.
        turn: Index of the turn, for the error.
    """
    rows = column.rows
    if name in CANDIDATES:
        if (column.start, rows) != (middle, output):
            raise LawViolationError(
                2,
                f"turn {turn}: column {name!r} has rows {column.start}:{column.start + rows}, "
                f"expected those of the output, {middle}:{middle + output}.",
            )
    elif column.start < 0 or column.start + rows > middle + output:
        raise LawViolationError(
            2,
            f"turn {turn}: column {name!r} has rows {column.start}:{column.start + rows}, "
            f"outside the {middle + output} tokens of its path.",
        )
    if name == "top_logprobs":  # NaN pads rows of tokens with fewer alternatives
        values = np.asarray(column.values.ravel(), np.float32)
        check_logprobs(np.where(np.isnan(values), np.float32(0), values), turn=turn)


def check_top(ids: Column, logprobs: Column, *, turn: int) -> None:
    """Check law 2 on top-k tokens: ids and logprobs have one shape, and are padded (-1, NaN) in the same places."""
    if ids.shape != logprobs.shape or np.any((ids.values == -1) != np.isnan(logprobs.values)):
        raise LawViolationError(
            2, f"turn {turn}: top_ids of shape {ids.shape} and top_logprobs of shape {logprobs.shape} do not match."
        )


def check_media(media: Sequence[MediaSpan], *, start: int, stop: int, turn: int) -> None:
    """Check law 2 on media: ordered spans within the delta that do not overlap, each with a SHA-256 digest."""
    end = start
    for span in media:
        if span.offset < end or span.length < 1 or span.offset + span.length > stop:
            raise LawViolationError(
                2,
                f"turn {turn}: media span {span.offset}:{span.offset + span.length} should lie within {end}:{stop}.",
            )
        if len(span.sha256) != 32:
            raise LawViolationError(2, f"turn {turn}: a media digest has {len(span.sha256)} bytes, SHA-256 has 32.")
        end = span.offset + span.length


def check_placeholders(draft: Draft, *, path_length: int, turn: int) -> None:
    """Check laws 2 and 3 on the tokens of images: one repeated id, and provenance `PROMPT`.

    Media of an unknown format are not checked.
    """
    ids, provenance = draft.columns.prompt_ids, draft.columns.prompt_provenance
    for span in draft.media:
        inside = slice(span.offset - path_length, span.offset - path_length + span.length)
        if span.format and np.any(ids[inside] != ids[inside.start]):
            raise LawViolationError(
                2,
                f"turn {turn}: the image at {span.offset} has the placeholders {ids[inside].tolist()[:8]}, not one id.",
            )
        if span.format and np.any(provenance[inside] != Provenance.PROMPT):
            raise LawViolationError(
                3, f"turn {turn}: a placeholder of the image at {span.offset} has a provenance other than PROMPT."
            )


def check_stored(media: Sequence[MediaSpan], images: Mapping[bytes, Image], *, turn: int) -> None:
    """Check law 4 on images: the ledger holds their bytes, with the span's format and size.

    Media of an unknown format are not checked.
    """
    for span in media:
        if not span.format:
            continue
        image = images.get(span.sha256)
        found = None if image is None else (image.format, image.width, image.height)
        if found != (span.format, span.width, span.height):
            raise LawViolationError(
                4,
                f"turn {turn}: the image at {span.offset}, digest {span.sha256.hex()[:12]}, is {span.format} of "
                f"{span.width} x {span.height} pixels, but the ledger stores {found or 'no image with that digest'}. "
                "Give it the images of its turns.",
            )


def check_prefix(ledger: Ledger, turn: Turn) -> None:
    """Check law 1: a turn's path is its parent's path plus its own tokens."""
    before = ledger.path_length(turn.parent)
    if turn.path_length != before + turn.own_length:
        raise LawViolationError(
            1,
            f"turn {turn.index}: its path has {turn.path_length} tokens, "
            f"expected {before} of its parent plus {turn.own_length} of its own.",
        )


def check_branch(turn: Turn, *, first: bool) -> None:
    """Check law 8: a turn has a branch record if, and only if, another turn already follows its parent.

    Args:
        turn: The turn.
        first: Whether it is the first root, or the first turn after its parent.
    """
    branch = turn.draft.branch
    if first and branch is None:
        return
    place = "the first root" if turn.parent is None else f"the first turn after turn {turn.parent}"
    if first and branch is not None:
        raise LawViolationError(8, f"turn {turn.index} is {place}, but it has a branch record ({branch}).")
    if not first and branch is None:
        raise LawViolationError(8, f"turn {turn.index} is not {place}, but it has no branch record.")
    if branch is not None and branch.turn is not None and not 0 <= branch.turn < turn.index:
        raise LawViolationError(8, f"turn {turn.index} branches from turn {branch.turn}, which is not an earlier turn.")
