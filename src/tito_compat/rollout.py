"""A trajectory as Python lists, in the form that users of other providers know."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np
from pydantic import BaseModel, Field

from tito_core.backend.images import data_url
from tito_core.ledger.trajectory import Trajectory


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

    `model.rollout` is a copy of what the ledger holds. One made by hand, `Rollout()`, grows by `add_prompt` and
    `add_response`.

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
        logprobs = trajectory.logprobs
        if "prompt_logprobs" in trajectory.column_names:
            logprobs = np.where(np.isnan(logprobs), trajectory.column("prompt_logprobs", np.nan), logprobs)
        experts = (turn.draft.extras.get("routed_experts") for turn in trajectory.path)
        rows = (column.values.astype("<i4").tobytes() for column in experts if column is not None)
        return cls(
            token_ids=trajectory.token_ids.tolist(),
            loss_mask=trajectory.loss_mask.tolist(),
            logprobs=[None if value != value else value for value in logprobs.tolist()],
            routed_experts=[base64.b64encode(each).decode("ascii") for each in rows],
            image_data=list(map(data_url, trajectory.images)),
            segment_info=[
                (segment.is_output, segment.stop - segment.start)
                for segment in trajectory.segments
                if segment.stop > segment.start
            ],
        )

    def add_prompt(self, token_ids: Sequence[int], logprobs: Sequence[float | None] | None = None) -> None:
        """Append tokens that were not sampled.

        Raises:
            ValueError: `logprobs` has another length than `token_ids`.
        """
        self._add(token_ids, logprobs, is_output=False)

    def add_response(self, token_ids: Sequence[int], logprobs: Sequence[float | None] | None = None) -> None:
        """Append sampled tokens.

        Raises:
            ValueError: `logprobs` has another length than `token_ids`.
        """
        self._add(token_ids, logprobs, is_output=True)

    @property
    def initial_prompt_length(self) -> int:
        """Number of tokens of the first prompt."""
        return self.segment_info[0][1] if self.segment_info else 0

    @property
    def segments(self) -> list[list[Token]]:
        """The tokens by segment: the first prompt, the first answer, the next delta, and so on."""
        tokens = map(Token, self.token_ids, self.logprobs, map(bool, self.loss_mask))
        return [list(islice(tokens, length)) for _, length in self.segment_info]

    def __len__(self) -> int:
        return len(self.token_ids)

    def __repr__(self) -> str:
        trained, segments = sum(self.loss_mask), len(self.segment_info)
        return f"{type(self).__name__}(tokens={len(self)}, output_tokens={trained}, segments={segments})"

    def _add(self, token_ids: Sequence[int], logprobs: Sequence[float | None] | None, *, is_output: bool) -> None:
        if logprobs is not None and len(logprobs) != len(token_ids):
            raise ValueError(
                f"logprobs length ({len(logprobs)}) must match token_ids length ({len(token_ids)}): pass one per id."
            )
        if token_ids:
            self.token_ids.extend(token_ids)
            self.loss_mask.extend([int(is_output)] * len(token_ids))
            self.logprobs.extend([None] * len(token_ids) if logprobs is None else logprobs)
            self.segment_info.append((is_output, len(token_ids)))


class TokenManager(Rollout):
    """A rollout that is made by hand from whole prompts, as a recorder has them."""

    def add_prompt(self, token_ids: Sequence[int], logprobs: Sequence[float | None] | None = None) -> None:
        """Append tokens that were not sampled. A prompt that starts with all tokens held so far adds only the rest.

        Raises:
            ValueError: `logprobs` has another length than `token_ids`.
        """
        start = len(self) if list(token_ids[: len(self)]) == self.token_ids else 0
        super().add_prompt(token_ids[start:], None if logprobs is None else logprobs[start:])
