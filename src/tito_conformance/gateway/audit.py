"""A gateway's exported rows against the engine's log."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tito_conformance.gateway.engine import END, Call
from tito_conformance.gateway.session import Failed


@dataclass(frozen=True, slots=True)
class Row:
    """One exported sequence for a trainer; its columns have one length.

    Attributes:
        ids: Token ids, prompts included.
        mask: 1 where the token is trained.
        logprobs: The policy's logprobs; what stands off the mask is not looked at. None where there is none.
    """

    ids: Sequence[int]
    mask: Sequence[int]
    logprobs: Sequence[float | None]

    @classmethod
    def of(cls, value: Mapping[str, Any]) -> Row:
        """Return the row of an adapter's JSON."""
        return cls(*([*value[name]] for name in ("ids", "mask", "logprobs")))

    def holds(self, call: Call) -> bool:
        """Return whether the row begins with the call's prompt and samples."""
        ids = call.ids
        return list(self.ids[: len(ids)]) == ids

    def trains(self, call: Call) -> int:
        """Return how many of the call's samples the row trains."""
        return sum(self.mask[len(call.prompt_ids) : len(call.ids)]) if self.holds(call) else 0


def check_rows(rows: Sequence[Row], calls: Sequence[Call]) -> None:
    """Check that rows train nothing but what the engine sampled, with its logprobs.

    Raises:
        Failed: The first difference, with its values.
    """
    for number, row in enumerate(rows):
        sizes = len(row.ids), len(row.mask), len(row.logprobs)
        if len({*sizes}) > 1:
            raise Failed(f"row {number} has {sizes[0]} ids, {sizes[1]} mask values and {sizes[2]} logprobs")
        held = [call for call in calls if row.holds(call)]
        for at, token in enumerate(row.ids):
            if not row.mask[at]:
                continue
            by = [call for call in held if len(call.prompt_ids) <= at < len(call.ids)]
            if not by:
                raise Failed(f"row {number} trains token {at} of {sizes[0]} (id {token}), which {_nearest(row, calls)}")
            reported = [call.logprobs[at - len(call.prompt_ids)] for call in by]
            if row.logprobs[at] not in reported:
                raise Failed(
                    f"row {number}, token {at}: logprob {row.logprobs[at]}, but the engine reported {reported[0]}"
                )


def check_trained(rows: Sequence[Row], calls: Sequence[Call], *, once: bool = False) -> None:
    """Check the rows, and that each call is trained whole: at least once, or exactly once.

    Raises:
        Failed: The first difference, with its values.
    """
    check_rows(rows, calls)
    for call in calls:
        counts = [count for row in rows if (count := row.trains(call))]
        size = len(call.output_ids)
        if not counts:
            raise Failed(f"{_named(call, calls)} is trained in none of {len(rows)} rows")
        if set(counts) != {size}:
            raise Failed(f"{_named(call, calls)}: {min(counts)} of its {size} sampled tokens are trained")
        if once and len(counts) > 1:
            raise Failed(f"{_named(call, calls)} is trained {len(counts)} times: in {len(counts)} of {len(rows)} rows")


def trained(rows: Sequence[Row], calls: Sequence[Call]) -> list[Call]:
    """Return the calls of which at least one token is trained."""
    return [call for call in calls if any(row.trains(call) for row in rows)]


def trained_once(rows: Sequence[Row], calls: Sequence[Call]) -> int:
    """Return how many sampled tokens are trained exactly once over all rows, with the engine's logprob."""
    count = 0
    for call in calls:
        held = [row for row in rows if row.holds(call) and len(row.ids) == len(row.mask) == len(row.logprobs)]
        for at, reported in enumerate(call.logprobs, len(call.prompt_ids)):
            count += [row.logprobs[at] for row in held if row.mask[at]] == [reported]
    return count


def check_extends(before: Call, after: Call, tokenizer: Any) -> None:
    """Check that a prompt begins with an earlier prompt and its samples, token for token, and closes them once.

    Raises:
        Failed: Where they differ.
    """
    kept, prompt = before.ids, after.prompt_ids
    if prompt[: len(kept)] == kept:
        _check_closed(kept, prompt[len(kept) :], tokenizer)
        return
    at = next((n for n, (a, b) in enumerate(zip(kept, prompt, strict=False)) if a != b), min(len(kept), len(prompt)))
    old, new = kept[at : at + 4], prompt[at : at + 4]
    raise Failed(
        f"the next prompt leaves the earlier prompt and samples at token {at} of {len(kept)} "
        f"({len(before.prompt_ids)} of them prompt): {tokenizer.decode(old)!r} {old} became "
        f"{tokenizer.decode(new)!r} {new}"
    )


def _check_closed(kept: Sequence[int], added: Sequence[int], tokenizer: Any) -> None:
    """Check that the turn that was sampled ends once: a sampled end is not written again, a missing one is."""
    start, end = (tokenizer.convert_tokens_to_ids(word) for word in ("<|im_start|>", END))
    until = added.index(start) if start in added else len(added)
    if (count := [kept[-1], *added[:until]].count(end)) != 1:
        shown = tokenizer.decode([kept[-1], *added[:until]])
        raise Failed(f"the sampled turn is closed {count} times before the next message: {shown!r}")


def _named(call: Call, calls: Sequence[Call]) -> str:
    return f"engine call {calls.index(call) + 1} of {len(calls)}"


def _nearest(row: Row, calls: Sequence[Call]) -> str:
    """Say how far the row follows the engine's calls."""
    if not calls:
        return "no engine call sampled: the engine answered none"
    shared = [
        next((n for n, (a, b) in enumerate(zip(row.ids, call.ids, strict=False)) if a != b), None) for call in calls
    ]
    best = max((n for n in shared if n is not None), default=None)
    if best is None:
        return f"no engine call sampled there; samples end at {max(len(call.ids) for call in calls)}"
    return f"no engine call sampled there; the row leaves the engine's ids at token {best}"
