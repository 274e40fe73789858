"""A rollout turn by turn, each with its whole prompt, for trainers that put trajectories together by themselves."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from strands_tito.export.logprobs import LogprobPolicy, require
from tito_core.ledger.columns import TokenIds
from tito_core.ledger.ledger import Ledger
from tito_core.ledger.turn import Turn


class TrainedTurn(NamedTuple):
    """A turn and what it answered.

    Attributes:
        turn: The turn.
        prompt_ids: Its whole prompt, int32, shape (p,).
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
    """Yield each turn that is trained once, those of one path one after the other, so that each extends the one before.

    A turn under a grammar is left out unless it is to be trained; it is then part of the prompts that follow.

    Raises:
        LogprobMismatchError: With `logprobs="checked"`, a turn's logprobs are another quantity than the trainer's.
    """
    for path, earlier in rollout.iter_paths():
        for turn in path:
            if turn.index in earlier or (turn.draft.constrained and not train_constrained):
                continue
            if logprobs == "checked":
                semantics = turn.draft.engine.semantics
                require(semantics, temperature=temperature, trainer=trainer, rollout=rollout.uuid)
            whole = rollout.path_ids(turn.index)
            yield TrainedTurn(turn, whole[: len(whole) - turn.draft.columns.output])
