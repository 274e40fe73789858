"""Re-score trajectories with the engine and compare the scores with the recorded logprobs."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from strands_tito.inspect.mismatch import Mismatches, mismatch_of
from tito_core.backend.errors import ContextLengthError
from tito_core.backend.generate import connected, score
from tito_core.backend.images import PromptImages, collapsed, media_ids_of, stray_placeholders
from tito_core.backend.protocol import Backend
from tito_core.backend.registry import create_backend
from tito_core.ledger.columns import Logprobs
from tito_core.ledger.ledger import Ledger
from tito_core.ledger.trajectory import Trajectory
from tito_core.ledger.turn import Adapter, Draft, Turn


@dataclass(frozen=True, slots=True, eq=False)
class Rescored:
    """Differences between recorded logprobs and the engine's teacher-forced scores.

    Attributes:
        differences: |recorded - re-scored| in nats for each compared token, float32, shape (n,).
        not_comparable: Sampled tokens left out because their logprobs have other semantics than scores (law 11), or
            because other weights sampled them, or because the server cannot score their path: it is too long, the
            ledger holds no file of one of its images, or the policy sampled an image's placeholder.
        prompt_differences: The same for recorded `prompt_logprobs`, which are raw on every engine.
        by_turn: For each compared turn its index, the compared tokens' positions in its output, and recorded minus
            re-scored, float32, both of shape (n,).
    """

    differences: Logprobs
    not_comparable: int
    prompt_differences: Logprobs = field(default_factory=lambda: np.zeros(0, np.float32))
    by_turn: tuple[tuple[int, npt.NDArray[np.intp], Logprobs], ...] = ()

    def quantile(self, q: float) -> float:
        """Return a quantile of the differences in nats; NaN if nothing was compared."""
        return float(np.quantile(self.differences, q)) if len(self.differences) else float("nan")

    def mismatch(self) -> Mismatches:
        """Return the mismatch of the server and the recorded logprobs: its scores stand in for a trainer's."""
        turns = [np.full(len(signed), turn) for turn, _, signed in self.by_turn]
        signed = _joined([signed for *_, signed in self.by_turn])
        positions = [positions for _, positions, _ in self.by_turn]
        whole, places = (np.concatenate([np.zeros(0, np.intp), *each]) for each in (turns, positions))
        return mismatch_of(signed, np.zeros(len(signed)), turns=whole, positions=places)


async def connect_for_scoring(backend: str, base_url: str) -> Backend:
    """Connect to a server for scoring only, which needs no tokenizer."""
    engine = create_backend(backend, base_url)
    await connected(engine)
    return engine


async def rescore(ledger: Ledger, backend: Backend, *, version: str | None = None) -> Rescored:
    """Re-score every trajectory of a ledger; compare each sampled token once if its semantics allow it.

    Args:
        ledger: The ledger.
        backend: The engine.
        version: The server's current weight version, if weights changed since sampling: then only tokens of this
            version are compared, and no prompt tokens, because their version is not recorded. None compares all.
    """
    differences: list[Logprobs] = []
    media_ids = media_ids_of(ledger)
    prompt_differences: list[Logprobs] = []
    by_turn: list[tuple[int, npt.NDArray[np.intp], Logprobs]] = []
    not_comparable = 0
    for trajectory in ledger.trajectories:
        by_adapter = {
            adapter: await _scores(trajectory, backend, version, media_ids, adapter)
            for adapter in dict.fromkeys(turn.draft.adapter for turn in _own(trajectory))
        }
        for segment in trajectory.segments:
            if not segment.is_output or segment.turn in trajectory.context_turns:
                continue
            draft = ledger[segment.turn].draft
            scores = by_adapter[draft.adapter]
            compared = np.zeros(len(draft.output_ids), bool)
            if scores is not None and draft.engine.semantics.comparable_with_scoring():
                compared = _sampled_by(version, draft)
                signed = (draft.logprobs - scores[segment.start : segment.stop])[compared]
                differences.append(np.abs(signed))
                by_turn.append((segment.turn, np.flatnonzero(compared), signed))
            not_comparable += int(np.count_nonzero(~compared))
            column = draft.extras.get("prompt_logprobs")
            if scores is not None and column is not None and version is None:
                values = column.values.astype(np.float32)
                found = np.abs(scores[column.start : column.start + column.rows] - values)
                prompt_differences.append(found[~np.isnan(values)])  # placeholders of images have no logprob
    return Rescored(_joined(differences), not_comparable, _joined(prompt_differences), tuple(by_turn))


async def _scores(
    trajectory: Trajectory, backend: Backend, version: str | None, media_ids: tuple[int, ...], adapter: Adapter | None
) -> Logprobs | None:
    """Return an adapter's scores of a path; None if no token can be compared or the server cannot score it."""
    own = [turn.draft for turn in _own(trajectory) if turn.draft.adapter == adapter]
    if not any(
        (draft.engine.semantics.comparable_with_scoring() and _sampled_by(version, draft).any())
        or (version is None and "prompt_logprobs" in draft.extras)
        for draft in own
    ):
        return None
    scores = await score_path(trajectory, backend, media_ids, adapter)
    return None if isinstance(scores, str) else scores


async def score_path(
    trajectory: Trajectory,
    backend: Backend,
    media_ids: Sequence[int],
    adapter: Adapter | None = None,
    of: Sequence[int] = (),
) -> Logprobs | str:
    """Score the ids of a path by a server, with their images.

    Args:
        trajectory: The path.
        backend: The server, of the policy or of another model with the same vocabulary.
        media_ids: Ids of the vocabulary's placeholders; see `media_ids_of`.
        adapter: The server's adapter that scores; None for the model alone.
        of: Ids to score in the place of each token; see `score`.

    Returns:
        float32, shape (n,), with k ids `of` (n, 1 + k); see `score`. Or a sentence that says why the server cannot
        score this path.

    Raises:
        BackendError: As `score`.
    """
    spans = [(span.offset, span.length) for span in trajectory.media]
    if len(trajectory.images) != len(spans):
        return f"the ledger holds the files of {len(trajectory.images)} of its {len(spans)} images."
    if spans and stray_placeholders(trajectory.token_ids, spans, media_ids):
        return "the policy sampled the placeholder of an image, so the server would put the images elsewhere."
    rows = (await connected(backend)).vocab_size
    if rows is not None and (largest := int(trajectory.token_ids.max())) >= rows:
        return f"it holds the id {largest}, and the server's vocabulary has {rows} ids."
    try:
        if not spans:
            return await score(backend, trajectory.token_ids, adapter=adapter, of=of)
        placeholder = int(trajectory.token_ids[spans[0][0]])
        images = PromptImages(trajectory.images, placeholder, tuple(length for _, length in spans))
        return await score(backend, collapsed(trajectory.token_ids, spans), images, adapter, of)
    except ContextLengthError as error:  # vLLM needs room for one more token than it scores
        return str(error)


def _own(trajectory: Trajectory) -> list[Turn]:
    """Return the turns of a path that no other trajectory trains."""
    return [turn for turn in trajectory.path if turn.index not in trajectory.context_turns]


def _sampled_by(version: str | None, draft: Draft) -> npt.NDArray[np.bool_]:
    """Return a mask of the turn's output tokens that a weight version sampled; all of them for None."""
    mask = np.full(len(draft.output_ids), version is None)
    for span in draft.engine.versions if version is not None else ():
        mask[span.start : span.stop] = span.version == version
    return mask


def _joined(parts: Sequence[Logprobs]) -> Logprobs:
    return np.concatenate(parts) if parts else np.zeros(0, np.float32)


def merge(parts: Sequence[Rescored]) -> Rescored:
    """Concatenate the comparisons of several ledgers."""
    return Rescored(
        _joined([part.differences for part in parts]),
        sum(part.not_comparable for part in parts),
        _joined([part.prompt_differences for part in parts]),
        tuple(each for part in parts for each in part.by_turn),
    )


def rescored_at(ledger: Ledger, backend: str, base_url: str) -> Rescored:
    """Connect to a server and return `rescore`.

    Args:
        ledger: The ledger.
        backend: Name of the server's backend.
        base_url: Address of a server with the weights that sampled the ledger.

    Raises:
        BackendError: Scoring failed.
        UnknownBackendError: Unknown backend.
    """

    async def connect_and_score() -> Rescored:
        engine = await connect_for_scoring(backend, base_url)
        try:
            return await rescore(ledger, engine)
        finally:
            await engine.aclose()

    return asyncio.run(connect_and_score())
