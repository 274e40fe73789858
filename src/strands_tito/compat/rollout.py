"""A trajectory as the lists that users of other providers know: it goes through pydantic, JSON and pickle."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, Field

from tito_core.ledger.trajectory import Trajectory, assemble
from tito_core.ledger.turn import Turn

_EXPERT = np.dtype("<i4")


@dataclass(frozen=True, slots=True)
class Token:
    """One token.

    Attributes:
        token_id: Its id.
        logprob: The engine's own, natural logarithm, or None.
        loss_mask: Whether it is trained.
    """

    token_id: int
    logprob: float | None = None
    loss_mask: bool = True


class Rollout(BaseModel):
    """One trajectory of a ledger, in lists of Python numbers; the ledger's own columns are arrays and smaller.

    `model.rollout` grows with its rollout. One that was made by hand, `Rollout()`, grows by `add_prompt` and
    `add_response`.

    Attributes:
        token_ids: Ids, in order.
        loss_mask: 1 on each token that is trained here, else 0; as long as `token_ids`.
        logprobs: Of each token; None where the engine gave none. As long as `token_ids`. Those of prompt tokens, where
            they were asked for, are raw and at temperature 1 whatever the sampled ones are (law 11).
        routed_experts: Of each turn that brought them, int32 rows of (layers, experts a token) in base64.
        image_data: Always empty: images are refused, not dropped.
        segment_info: For each run of tokens (whether the engine sampled it, its length).
    """

    token_ids: list[int] = Field(default_factory=list)
    loss_mask: list[int] = Field(default_factory=list)
    logprobs: list[float | None] = Field(default_factory=list)
    routed_experts: list[str] = Field(default_factory=list)
    image_data: list[str] = Field(default_factory=list)
    segment_info: list[tuple[bool, int]] = Field(default_factory=list)

    @classmethod
    def of(cls, trajectory: Trajectory) -> Rollout:
        """Copy a trajectory."""
        rollout = cls()
        rollout._take(trajectory)
        return rollout

    def add_turn(self, turn: Turn) -> None:
        """Go on with the next turn of a path that no other path shares."""
        self._take(assemble((turn,), context=frozenset(), train_constrained=False))

    def add_prompt(self, token_ids: Sequence[int], logprobs: Sequence[float | None] | None = None) -> None:
        """Add tokens that were not sampled. Of a prompt that begins with all the tokens held so far, the rest is new.

        Raises:
            ValueError: There are logprobs, but not one for each id.
        """
        held = len(self.token_ids)
        known = held if held and list(token_ids[:held]) == self.token_ids else 0
        _expect_as_many(token_ids, logprobs)
        self._add(token_ids[known:], None if logprobs is None else logprobs[known:], is_output=False)

    def add_response(self, token_ids: Sequence[int], logprobs: Sequence[float | None] | None = None) -> None:
        """Add sampled tokens.

        Raises:
            RuntimeError: There is no prompt yet.
            ValueError: There are logprobs, but not one for each id.
        """
        if token_ids and not self.segment_info:
            raise RuntimeError("First segment must be a prompt: an answer without one cannot be trained. Add it first.")
        _expect_as_many(token_ids, logprobs)
        self._add(token_ids, logprobs, is_output=True)

    def add_routed_experts(self, routed_experts: str) -> None:
        """Add a turn's experts, int32 in base64."""
        self.routed_experts.append(routed_experts)

    def decode_routed_experts(self, num_layers: int, top_k: int) -> npt.NDArray[np.int32]:
        """Give the experts of all turns, int32, shape (rows, num_layers, top_k).

        Raises:
            ValueError: They are not of that shape.
        """
        whole = b"".join(map(base64.b64decode, self.routed_experts))
        return np.frombuffer(whole, _EXPERT).reshape(-1, num_layers, top_k)

    def reset(self) -> None:
        """Empty it."""
        for held in (self.token_ids, self.loss_mask, self.logprobs, self.routed_experts, self.segment_info):
            held.clear()

    @property
    def output_mask(self) -> list[int]:
        """The loss mask, by its older name."""
        return self.loss_mask

    @property
    def initial_prompt_length(self) -> int:
        """Tokens of the first prompt."""
        return self.segment_info[0][1] if self.segment_info else 0

    @property
    def tokens(self) -> list[Token]:
        """Each token with its logprob and mask."""
        columns = zip(self.token_ids, self.logprobs, self.loss_mask, strict=True)
        return [Token(token, logprob, bool(mask)) for token, logprob, mask in columns]

    @property
    def segments(self) -> list[list[Token]]:
        """The tokens, segment by segment: the first prompt, the first answer, what was added, and so on."""
        tokens, found, at = self.tokens, [], 0
        for _, length in self.segment_info:
            found.append(tokens[at : at + length])
            at += length
        return found

    @property
    def initial_prompt(self) -> list[Token]:
        """The first prompt."""
        return self.tokens[: self.initial_prompt_length]

    def __len__(self) -> int:
        return len(self.token_ids)

    def __repr__(self) -> str:
        trained, segments = sum(self.loss_mask), len(self.segment_info)
        return f"{type(self).__name__}(tokens={len(self)}, output_tokens={trained}, segments={segments})"

    def __str__(self) -> str:
        return repr(self)

    def _add(self, token_ids: Sequence[int], logprobs: Sequence[float | None] | None, *, is_output: bool) -> None:
        if token_ids:
            self.token_ids.extend(token_ids)
            self.loss_mask.extend([int(is_output)] * len(token_ids))
            self.logprobs.extend([None] * len(token_ids) if logprobs is None else logprobs)
            self.segment_info.append((is_output, len(token_ids)))

    def _take(self, piece: Trajectory) -> None:
        logprobs = piece.logprobs
        if "prompt_logprobs" in piece.column_names:
            logprobs = logprobs.copy()
            _lay_prompt_logprobs(logprobs, piece.path)
        self.token_ids.extend(piece.token_ids.tolist())
        self.loss_mask.extend(piece.loss_mask.tolist())
        self.logprobs.extend(None if value != value else value for value in logprobs.tolist())
        for segment in piece.segments:
            if segment.stop > segment.start:
                self.segment_info.append((segment.is_output, segment.stop - segment.start))
        experts = (turn.draft.extras.get("routed_experts") for turn in piece.path)
        packed = (column.values.astype(_EXPERT).tobytes() for column in experts if column is not None)
        self.routed_experts.extend(base64.b64encode(rows).decode("ascii") for rows in packed)


def decode_routed_experts(routed_experts: str, seq_len: int, num_layers: int, top_k: int) -> npt.NDArray[np.int32]:
    """Give the experts of a sequence of `seq_len` tokens, int32, shape (seq_len - 1, num_layers, top_k).

    Raises:
        ValueError: They are not of that shape.
    """
    rows = np.frombuffer(base64.b64decode(routed_experts), _EXPERT)
    return rows.reshape(seq_len - 1, num_layers, top_k)


def _lay_prompt_logprobs(logprobs: npt.NDArray[np.float32], path: Sequence[Turn]) -> None:
    """Write each turn's prompt logprobs where its prompt tokens are; `logprobs` begins with the first turn."""
    root = path[0].path_length - path[0].own_length
    for turn in path:
        column = turn.draft.extras.get("prompt_logprobs")
        if column is not None and column.rows:
            logprobs[column.start - root : column.start - root + column.rows] = column.values


def _expect_as_many(token_ids: Sequence[int], logprobs: Sequence[float | None] | None) -> None:
    if logprobs is not None and len(logprobs) != len(token_ids):
        raise ValueError(
            f"logprobs length ({len(logprobs)}) must match token_ids length ({len(token_ids)}): give one for each id."
        )
