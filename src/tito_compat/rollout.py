"""A trajectory as Python lists, in the form that users of other providers know."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, Field

from tito_core.backend.images import data_url
from tito_core.ledger.trajectory import Trajectory, assemble
from tito_core.ledger.turn import Image, Turn

_EXPERT = np.dtype("<i4")


@dataclass(frozen=True, slots=True)
class Token:
    """One token.

    Attributes:
        token_id: The id.
        logprob: The engine's logprob, a natural logarithm, or None.
        loss_mask: Whether the token is trained.
    """

    token_id: int
    logprob: float | None = None
    loss_mask: bool = True


class Rollout(BaseModel):
    """One trajectory as lists of Python numbers. It can be validated by pydantic, written as JSON and pickled.

    `model.rollout` grows with each turn. A rollout made by hand, `Rollout()`, grows by `add_prompt` and `add_response`.

    Attributes:
        token_ids: Token ids, in order.
        loss_mask: 1 on each token that is trained, else 0; one per token.
        logprobs: One per token; None if the engine reported none. Prompt logprobs, if requested, are raw and at
            temperature 1 whatever the semantics of the sampled ones (law 11).
        routed_experts: For each turn with routed experts, its int32 rows of (layers, experts per token) in base64.
        image_data: The image of each place in the prompt that shows one, in order, as a `data:` URL.
        segment_info: (whether the engine sampled it, its length) for each run of tokens.
    """

    token_ids: list[int] = Field(default_factory=list)
    loss_mask: list[int] = Field(default_factory=list)
    logprobs: list[float | None] = Field(default_factory=list)
    routed_experts: list[str] = Field(default_factory=list)
    image_data: list[str] = Field(default_factory=list)
    segment_info: list[tuple[bool, int]] = Field(default_factory=list)

    @classmethod
    def of(cls, trajectory: Trajectory) -> Rollout:
        """Return a trajectory as lists."""
        rollout = cls()
        rollout._append(trajectory)
        return rollout

    def add_turn(self, turn: Turn, images: Mapping[bytes, Image] = MappingProxyType({})) -> None:
        """Append the next turn of a path that no other path shares; `images` are the ledger's, by digest."""
        self._append(assemble((turn,), context=frozenset(), train_constrained=False, images=images))

    def add_prompt(self, token_ids: Sequence[int], logprobs: Sequence[float | None] | None = None) -> None:
        """Append tokens that were not sampled.

        Raises:
            ValueError: `logprobs` has another length than `token_ids`.
        """
        _check_lengths(token_ids, logprobs)
        self._add(token_ids, logprobs, is_output=False)

    def add_response(self, token_ids: Sequence[int], logprobs: Sequence[float | None] | None = None) -> None:
        """Append sampled tokens.

        Raises:
            RuntimeError: There is no prompt yet.
            ValueError: `logprobs` has another length than `token_ids`.
        """
        if token_ids and not self.segment_info:
            raise RuntimeError("First segment must be a prompt: call add_prompt first.")
        _check_lengths(token_ids, logprobs)
        self._add(token_ids, logprobs, is_output=True)

    def add_routed_experts(self, routed_experts: str) -> None:
        """Append a turn's routed experts, int32 in base64."""
        self.routed_experts.append(routed_experts)

    def joined_routed_experts(self) -> str | None:
        """Return the routed experts of all turns as one base64 string; None if there are none."""
        if not self.routed_experts:
            return None
        return base64.b64encode(b"".join(map(base64.b64decode, self.routed_experts))).decode("ascii")

    def decode_routed_experts(self, num_layers: int, top_k: int) -> npt.NDArray[np.int32]:
        """Return the routed experts of all turns, int32, shape (rows, num_layers, top_k).

        Raises:
            ValueError: The number of values does not fit the shape.
        """
        rows = b"".join(map(base64.b64decode, self.routed_experts))
        return np.frombuffer(rows, _EXPERT).reshape(-1, num_layers, top_k)

    def reset(self) -> None:
        """Remove all tokens."""
        for name in type(self).model_fields:
            getattr(self, name).clear()

    @property
    def output_mask(self) -> list[int]:
        """The loss mask, by its older name."""
        return self.loss_mask

    @property
    def initial_prompt_length(self) -> int:
        """Number of tokens of the first prompt."""
        return self.segment_info[0][1] if self.segment_info else 0

    @property
    def tokens(self) -> list[Token]:
        """Each token with its logprob and mask."""
        columns = zip(self.token_ids, self.logprobs, self.loss_mask, strict=True)
        return [Token(token, logprob, bool(mask)) for token, logprob, mask in columns]

    @property
    def segments(self) -> list[list[Token]]:
        """The tokens by segment: the first prompt, the first answer, the next delta, and so on."""
        tokens, segments, start = self.tokens, [], 0
        for _, length in self.segment_info:
            segments.append(tokens[start : start + length])
            start += length
        return segments

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

    def _append(self, piece: Trajectory) -> None:
        logprobs = piece.logprobs
        if "prompt_logprobs" in piece.column_names:
            logprobs = logprobs.copy()
            _fill_prompt_logprobs(logprobs, piece.path)
        self.token_ids.extend(piece.token_ids.tolist())
        self.loss_mask.extend(piece.loss_mask.tolist())
        self.logprobs.extend(None if value != value else value for value in logprobs.tolist())
        for segment in piece.segments:
            if segment.stop > segment.start:
                self.segment_info.append((segment.is_output, segment.stop - segment.start))
        experts = (turn.draft.extras.get("routed_experts") for turn in piece.path)
        rows = (column.values.astype(_EXPERT).tobytes() for column in experts if column is not None)
        self.routed_experts.extend(base64.b64encode(turn_rows).decode("ascii") for turn_rows in rows)
        self.image_data.extend(map(data_url, piece.images))


class TokenManager(Rollout):
    """A rollout that is made by hand from whole prompts, as a recorder has them."""

    def add_prompt(self, token_ids: Sequence[int], logprobs: Sequence[float | None] | None = None) -> None:
        """Append tokens that were not sampled. A prompt that starts with all tokens held so far adds only the rest.

        Raises:
            ValueError: `logprobs` has another length than `token_ids`.
        """
        _check_lengths(token_ids, logprobs)
        length = len(self.token_ids)
        start = length if length and list(token_ids[:length]) == self.token_ids else 0
        super().add_prompt(token_ids[start:], None if logprobs is None else logprobs[start:])

    def add_response(self, token_ids: Sequence[int], logprobs: Sequence[float | None] | None = None) -> None:
        """Append sampled tokens; there may be no prompt.

        Raises:
            ValueError: `logprobs` has another length than `token_ids`.
        """
        _check_lengths(token_ids, logprobs)
        self._add(token_ids, logprobs, is_output=True)


def decode_routed_experts(routed_experts: str, seq_len: int, num_layers: int, top_k: int) -> npt.NDArray[np.int32]:
    """Return the routed experts of a sequence of `seq_len` tokens, int32, shape (seq_len - 1, num_layers, top_k).

    Raises:
        ValueError: The number of values does not fit the shape.
    """
    rows = np.frombuffer(base64.b64decode(routed_experts), _EXPERT)
    return rows.reshape(seq_len - 1, num_layers, top_k)


def _fill_prompt_logprobs(logprobs: npt.NDArray[np.float32], path: Sequence[Turn]) -> None:
    """Write each turn's prompt logprobs at its prompt tokens; `logprobs` starts at the first turn of the path."""
    root = path[0].path_length - path[0].own_length
    for turn in path:
        column = turn.draft.extras.get("prompt_logprobs")
        if column is not None and column.rows:
            logprobs[column.start - root : column.start - root + column.rows] = column.values


def _check_lengths(token_ids: Sequence[int], logprobs: Sequence[float | None] | None) -> None:
    if logprobs is not None and len(logprobs) != len(token_ids):
        raise ValueError(
            f"logprobs length ({len(logprobs)}) must match token_ids length ({len(token_ids)}): pass one per id."
        )
