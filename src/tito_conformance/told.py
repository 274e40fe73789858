"""A ledger as plain lists, which is how the oracle reads it."""

from __future__ import annotations

from collections.abc import Iterable

from tito_conformance.oracle import Trained
from tito_conformance.telling import Told
from tito_core.backend import Wanted
from tito_core.ledger import Ledger, Turn


def turns(ledger: Ledger, wanted: Wanted) -> list[Told]:
    """Give every turn, in commit order, with the names of the columns that were wanted."""
    names = ["top_ids", "top_logprobs"] if wanted.top_logprobs else []
    names += [name for name in ("prompt_logprobs", "routed_experts", "sampling_mask") if getattr(wanted, name)]
    return [_told(turn, names) for turn in ledger]


def trajectories(ledger: Ledger) -> Iterable[Trained]:
    """Give every trajectory, as a trainer gets it."""
    for path in ledger.iter_trajectories():
        yield Trained(
            path.token_ids.tolist(),
            path.loss_mask.tolist(),
            path.logprobs.tolist(),
            [turn.index for turn in path.path],
        )


def _told(turn: Turn, wanted: list[str]) -> Told:
    draft = turn.draft
    return Told(
        index=turn.index,
        parent=turn.parent,
        prompt=draft.prompt_ids.tolist(),
        provenance=draft.prompt_provenance.tolist(),
        output=draft.output_ids.tolist(),
        logprobs=draft.logprobs.tolist(),
        finish=str(draft.finish),
        stop=draft.stop,
        request=draft.engine.request_id,
        cached_tokens=draft.engine.cached_tokens,
        versions=[(span.start, span.stop, span.version) for span in draft.engine.versions],
        constrained=draft.constrained,
        max_new_tokens=draft.max_new_tokens,
        wanted=wanted,
        columns={name: (column.start, column.values.tolist()) for name, column in draft.extras.items()},
    )
