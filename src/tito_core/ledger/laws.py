"""The laws as functions: of a whole ledger, of one turn before its commit, and of the two vocabularies.

Each raises `LawViolationError` with the law, the turn, the offset, and the expected and found values.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from tito_core.ledger.columns import CANDIDATES, ROUNDING, SENTINEL_LOGPROB, Column, check_logprobs
from tito_core.ledger.errors import LawViolationError
from tito_core.ledger.provenance import Provenance, is_output
from tito_core.ledger.trajectory import Trajectory, assemble
from tito_core.ledger.turn import Draft, Image, MediaSpan, ResponseSpan, Turn, VersionSpan

if TYPE_CHECKING:
    from tito_core.ledger.ledger import Ledger

MAX_COUNT = 2**63 - 1
"""Largest count that a file may hold: signed 64 bits."""
PIECE = 16
"""Number of a path's turns that are assembled and checked at once."""


def check_ledger(ledger: Ledger) -> None:
    """Check every law that can be checked on a ledger alone: 1 to 4 and 8 to 10.

    Raises:
        LawViolationError: The ledger breaks a law.
    """
    turns = list(ledger)
    extended: set[int | None] = set()
    for turn in turns:
        check_prefix(ledger, turn)
        check_facts(turn.draft, path_length=turn.path_length - turn.own_length, turn=turn.index)
        check_branch(turn, first=turn.parent not in extended)
        if turn.draft.media:
            check_stored(turn.draft.media, ledger.images, turn=turn.index)
        extended.add(turn.parent)
    check_media_ids(ledger)
    trained: Counter[int] = Counter()
    for path, context in _tails(ledger):
        for start in range(0, len(path), PIECE):  # larger arrays would need new memory pages
            piece = assemble(path[start : start + PIECE], context=context, train_constrained=False)
            if not _is_sound(piece):  # checks all turns at once; the loop below finds the wrong one
                for turn in piece.path:
                    check_values(turn.draft, turn=turn.index)
                check_alignment(piece)
            count_trained(piece, trained)
    check_trained_once(turns, trained)
    for note in ledger.annotations:
        if note.turn is not None and not 0 <= note.turn < len(turns):
            raise LawViolationError(
                8, f"annotation {note.name!r} refers to turn {note.turn}, but the ledger has {len(turns)} turns."
            )
        calls = () if note.turn is None else turns[note.turn].draft.calls
        if note.call is not None and not 0 <= note.call < len(calls):
            raise LawViolationError(
                8, f"annotation {note.name!r} refers to call {note.call} of turn {note.turn}, which has {len(calls)}."
            )


def _tails(ledger: Ledger) -> Iterator[tuple[list[Turn], set[int]]]:
    """Yield each path's last turns, and the indices of turns that earlier paths have.

    A tail goes back over at most `PIECE` turns that earlier paths have. Whole paths would take quadratic time where
    many leaves share a long trunk (law 12).
    """
    seen: set[int] = set()
    for leaf in ledger.leaves():
        tail: list[Turn] = []
        index: int | None = leaf
        shared = 0
        while index is not None and shared < PIECE:
            shared += index in seen
            tail.append(ledger[index])
            index = ledger[index].parent
        yield tail[::-1], seen
        seen.update([turn.index for turn in tail])


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
    if branch is None:
        raise LawViolationError(8, f"turn {turn.index} is not {place}, but it has no branch record.")
    if first:
        raise LawViolationError(8, f"turn {turn.index} is {place}, but it has a branch record ({branch}).")
    if branch.turn is not None and not 0 <= branch.turn < turn.index:
        raise LawViolationError(8, f"turn {turn.index} branches from turn {branch.turn}, which is not an earlier turn.")


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


def check_media_ids(ledger: Ledger) -> None:
    """Check law 4 on placeholders that the certificate names: the media spans hold all of a prompt's, and nothing else.

    Turns without media are checked where content is inert; with `content_tokens="as-template"` a text may spell one.
    """
    known = np.unique(np.array(ledger.header.media_ids, np.int32))
    inert = (ledger.header.certificate or {}).get("content_tokens") == "inert"
    for turn in ledger if len(known) else ():
        ids, start = turn.draft.prompt_ids, turn.path_length - turn.own_length
        if not turn.draft.media and not inert:
            continue
        inside = np.zeros(len(ids), np.bool_)
        for span in turn.draft.media:
            inside[span.offset - start : span.offset - start + span.length] = True
        # np.isin would take the time of the whole list in each turn; a hostile file may list millions (law 12).
        is_placeholder = known[np.minimum(np.searchsorted(known, ids), len(known) - 1)] == ids
        if np.any(wrong := is_placeholder != inside):
            at = int(np.argmax(wrong))
            reason = "no media span holds it" if is_placeholder[at] else "a media span holds it"
            raise LawViolationError(
                4,
                f"turn {turn.index}: token {start + at} has id {ids[at]} and {reason}, but the media spans must hold "
                f"exactly the placeholders of the prompt, which have the ids {known[:8].tolist()}.",
            )


def check_alignment(trajectory: Trajectory) -> None:
    """Check law 2: all columns have one length, and exactly the output tokens have a finite logprob."""
    n = len(trajectory.token_ids)
    for name in ("loss_mask", "logprobs", "provenance"):
        found = len(getattr(trajectory, name))
        if found != n:
            raise LawViolationError(2, f"column {name} has {found} entries for {n} token ids.")
    wrong = np.isfinite(trajectory.logprobs) != is_output(trajectory.provenance)
    if wrong.any():
        i = int(np.argmax(wrong))
        raise LawViolationError(
            2, f"token {i} has provenance {int(trajectory.provenance[i])} and logprob {trajectory.logprobs[i]}."
        )
    held = sum(turn.own_length for turn in trajectory.path)
    if held != n:
        raise LawViolationError(2, f"the turns of the path hold {held} tokens, the columns {n}.")


def count_trained(trajectory: Trajectory, trained: Counter[int]) -> None:
    """Count each turn's tokens with loss mask 1 in `trained`, and check law 3: they are all output tokens."""
    if np.any(trajectory.loss_mask > is_output(trajectory.provenance)):
        raise LawViolationError(3, "a token that the engine did not report as output has loss mask 1.")
    at, mask = 0, trajectory.loss_mask
    for turn in trajectory.path:
        end = at + turn.own_length
        trained[turn.index] += int(np.count_nonzero(mask[at:end]))
        at = end


def check_trained_once(turns: Iterable[Turn], trained: Counter[int]) -> None:
    """Check law 3: each sampled token has loss mask 1 in exactly one trajectory."""
    for turn in turns:
        expected = 0 if turn.draft.constrained else turn.draft.columns.output
        if trained[turn.index] != expected:
            raise LawViolationError(
                3, f"turn {turn.index}: {trained[turn.index]} of its tokens are trained, expected {expected}."
            )


def _is_sound(trajectory: Trajectory) -> bool:
    """Return whether every turn passes `check_values`, and the columns pass `check_alignment`."""
    logprobs, n = trajectory.logprobs, len(trajectory.token_ids)
    if not len(trajectory.loss_mask) == len(logprobs) == n == sum([turn.own_length for turn in trajectory.path]):
        return False
    aligned = np.array_equal(np.isfinite(logprobs), is_output(trajectory.provenance))
    if not aligned or not n or int(trajectory.token_ids.min()) < 0:
        return aligned and not n
    # fmin and fmax skip NaN, which only prompt tokens have here
    return not (np.fmin.reduce(logprobs) <= SENTINEL_LOGPROB or np.fmax.reduce(logprobs) > ROUNDING)


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
    if len(ids) and np.minimum.reduce(ids) < 0:
        first = int(np.argmax(ids < 0))
        name, offset = ("delta", first) if first < columns.prompt else ("output", first - columns.prompt)
        raise LawViolationError(2, f"turn {turn}: {name} id {int(ids[first])} at offset {offset} is negative.")
    provenance = columns.prompt_provenance
    if len(provenance) and int(np.maximum.reduce(provenance)) > Provenance.INSERTED:
        offset = int(np.argmax(provenance > Provenance.INSERTED))
        found = int(provenance[offset])
        raise LawViolationError(
            3, f"turn {turn}: delta token {offset} has provenance {found}, which only output tokens may have."
        )
    check_logprobs(columns.logprobs, f"turn {turn}")


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


def check_versions(versions: Sequence[VersionSpan], output_length: int, *, turn: int | None = None) -> None:
    """Check law 10: the version spans tile the output exactly; a span may be empty."""
    if len(versions) == 1 and versions[0].start == 0 and versions[0].stop == output_length:
        return
    _check_tiling(versions, output_length, 10, f"{_place(turn)}: weight-version span", shortest=0)


def check_responses(responses: Sequence[ResponseSpan], output_length: int, *, turn: int) -> None:
    """Check law 4 on a resumed turn: its responses tile the output, so that each token comes from one response."""
    _check_tiling(responses, output_length, 4, f"{_place(turn)}: response span", shortest=1)


def _check_tiling(
    spans: Sequence[VersionSpan | ResponseSpan], output_length: int, law: int, name: str, *, shortest: int
) -> None:
    end = 0
    for span in spans:
        if span.start != end or span.stop < end + shortest:
            raise LawViolationError(law, f"{name} {span.start}:{span.stop} should start at output offset {end}.")
        end = span.stop
    if end != output_length:
        raise LawViolationError(law, f"{name}s end at {end}, the output has {output_length} tokens.")


def _place(turn: int | None) -> str:
    return "the answer" if turn is None else f"turn {turn}"


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
        check_logprobs(np.where(np.isnan(values), np.float32(0), values), f"turn {turn}")


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


SHOWN_IDS = 8
"""Number of ids of each side that an error shows, from the first difference on."""
SHOWN_TEXT = 60
"""Number of characters of a text that an error shows."""


def check_same_ids(text: str, ids: Sequence[int], server_ids: Sequence[int], *, tokenizer: str, server: str) -> None:
    """Check law 15 on one text: both tokenizers encode it to the same ids.

    Args:
        text: The text.
        ids: The ids that the client's tokenizer gives.
        server_ids: The ids that the server's tokenizer gives.
        tokenizer: Name of the client's tokenizer, for the error.
        server: Name of the server and its model, for the error.

    Raises:
        LawViolationError: The ids differ.
    """
    ours, theirs = list(ids), list(server_ids)
    if ours == theirs:
        return
    pairs = zip(ours, theirs, strict=False)
    first = next((i for i, (one, other) in enumerate(pairs) if one != other), min(len(ours), len(theirs)))
    shown = repr(text if len(text) <= SHOWN_TEXT else f"{text[:SHOWN_TEXT]}...")
    raise LawViolationError(
        15,
        f"the tokenizer {tokenizer!r} is not the one that {server} uses: they encode {shown} differently. From token "
        f"{first} on, the tokenizer gives {_first_ids(ours[first:])} and the server {_first_ids(theirs[first:])}. "
        f"Use the tokenizer of the served model.",
    )


def check_vocab_size(largest_id: int, vocab_size: int, *, tokenizer: str, server: str) -> None:
    """Check law 15 on vocabulary sizes alone. A model may have more rows than its tokenizer has ids: they are padded.

    Args:
        largest_id: The largest id of the client's tokenizer.
        vocab_size: Number of embedding rows of the server's model.
        tokenizer: Name of the client's tokenizer, for the error.
        server: Name of the server and its model, for the error.

    Raises:
        LawViolationError: The model has no row for that id.
    """
    if largest_id >= vocab_size:
        raise LawViolationError(
            15,
            f"the tokenizer {tokenizer!r} is not the one that {server} uses: its ids go up to {largest_id}, but the "
            f"server's model has {vocab_size} rows, for ids up to {vocab_size - 1}. "
            "Use the tokenizer of the served model.",
        )


def _first_ids(ids: Sequence[int]) -> str:
    return f"[{', '.join(map(str, ids[:SHOWN_IDS]))}{', ...' if len(ids) > SHOWN_IDS else ''}]"
