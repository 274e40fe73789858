"""A rollout turn by turn, each with its whole prompt, for trainers that assemble trajectories themselves."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from strands_tito.export.images import refuse_ledger_images
from strands_tito.export.logprobs import LogprobPolicy, check_semantics
from tito_core.ledger.columns import TokenIds
from tito_core.ledger.ledger import Ledger
from tito_core.ledger.turn import Turn


class TrainedTurn(NamedTuple):
    """A turn and its prompt.

    Attributes:
        turn: The turn.
        prompt_ids: The whole prompt of the turn, int32, shape (p,).
    """

    turn: Turn
    prompt_ids: TokenIds


def trained_turns(
    rollout: Ledger,
    *,
    trainer: str,
    temperature: float,
    logprobs: LogprobPolicy = "checked",
    train_constrained: bool = False,
) -> Iterator[TrainedTurn]:
    """Yield each trained turn once, path by path, so that each turn extends the one before it on its path.

    Without `train_constrained`, turns under a grammar are skipped; their tokens are part of later prompts only.

    Raises:
        ImagesNotSupportedError: The rollout has images.
        LogprobMismatchError: With `logprobs="checked"`: a turn's logprobs are not the quantity that the trainer
            computes.
    """
    refuse_ledger_images(rollout, trainer)
    for path, earlier in rollout.iter_paths():
        for turn in path:
            if turn.index in earlier or (turn.draft.constrained and not train_constrained):
                continue
            if logprobs == "checked":
                semantics = turn.draft.engine.semantics
                check_semantics(semantics, temperature=temperature, trainer=trainer, rollout=rollout.uuid)
            whole = rollout.path_ids(turn.index)
            yield TrainedTurn(turn, whole[: len(whole) - turn.draft.columns.output])
