"""What exporters share: checks that a sample is what a trainer computes with, and the two shapes that trainers take.

A trainer takes one prompt and one response for each sample (`prompt_response_of`), or the turns one by one
(`trained_turns`). Logprobs must be the quantity that it computes (law 11), images must be in their places, and its
package is imported when a function needs it.
"""

from __future__ import annotations

import io
import logging
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, get_args

import numpy as np
import numpy.typing as npt

from strands_tito.export.kept import EXACT, KeptSets, has_sets, kept_sets
from strands_tito.export.sample import (
    NO_EXPERT,
    SampleImage,
    TrainingSample,
    by_agent,
    credits_of,
    expect_one_of,
    exported_turns,
    has_turn,
    left_out,
)
from tito_core.backend.images import stray_placeholders
from tito_core.ledger.columns import Logprobs, TokenIds
from tito_core.ledger.errors import TITOError, how_to_install
from tito_core.ledger.ledger import Ledger
from tito_core.ledger.turn import Draft, Semantics, Turn

if TYPE_CHECKING:
    from PIL.Image import Image as Picture

logger = logging.getLogger(__name__)

Decode = Callable[[Sequence[int]], str]
"""Returns the text of token ids, special tokens included."""


class MissingPackageError(TITOError, ImportError):
    """A trainer's package is not installed."""


def import_optional(module: str, extra: str | None = None) -> ModuleType:
    """Import a module of an optional package.

    Args:
        module: Its dotted name.
        extra: Our extra that installs the package; None if no extra does.

    Raises:
        MissingPackageError: The package is not installed. Import errors inside the package are not caught.
    """
    package = module.partition(".")[0]
    try:
        import_module(package)
    except ModuleNotFoundError as error:
        if error.name != package:
            raise
        how = how_to_install(extra) if extra else f"install {package} as its documentation says"
        raise MissingPackageError(f"This exporter needs {package}, which is not installed: {how}.") from None
    return import_module(module)


LogprobPolicy = Literal["checked", "as-recorded", "omit"]
"""What to do with recorded logprobs: "checked" raises unless they are what the trainer computes, of the distribution
that was sampled; "as-recorded" passes them on unchecked, "omit" leaves them out: the trainer computes its own."""


class LogprobMismatchError(TITOError, ValueError):
    """Recorded logprobs are not the quantity that the trainer compares them with."""


def logprobs_for(
    sample: TrainingSample,
    *,
    temperature: float,
    trainer: str,
    policy: LogprobPolicy = "checked",
    replays: bool = False,
) -> Logprobs | None:
    """Return the logprobs of the trained tokens, and 0.0 on all others, which no loss reads.

    For a trainer that replays kept sets, "checked" ones are normalised over them, as those that it computes.

    Args:
        sample: The sample.
        temperature: The trainer's logit temperature: it trains on log_softmax(logits / temperature).
        trainer: The trainer's name, for errors.
        policy: See `LogprobPolicy`.
        replays: Whether the trainer gets the kept sets, and computes its logprobs over them.

    Returns:
        float32, shape (n,), or None for "omit".

    Raises:
        LogprobMismatchError: With "checked": a trained token's logprob is not log_softmax(logits / temperature) over
            the whole vocabulary, or its semantics are unknown. Or it was sampled under a truncation that the trainer
            cannot replay; see `sampled_logprobs`.
        ValueError: `policy` is not a `LogprobPolicy`.
    """
    expect_one_of("logprobs", policy, get_args(LogprobPolicy))
    if policy == "omit":
        return None
    trained, values = sample.loss_mask.astype(np.bool_), sample.logprobs
    if policy == "checked":
        rollout = sample.identity.rollout_id
        for semantics in sample.semantics:
            over_kept = replays and has_sets(sample.kept)
            check_semantics(semantics, temperature=temperature, trainer=trainer, rollout=rollout, over_kept=over_kept)
        values = sampled_logprobs(values, sample.kept, trained, trainer=trainer, rollout=rollout, replays=replays)
    return np.where(trained, values, np.float32(0)).astype(np.float32)


def sampled_logprobs(
    logprobs: Logprobs,
    kept: KeptSets | None,
    trained: npt.NDArray[np.bool_],
    *,
    trainer: str,
    rollout: str,
    replays: bool,
) -> Logprobs:
    """Return logprobs of the distribution that was sampled: over the kept set, where a trainer replays it.

    Args:
        logprobs: Those of whole distributions, shape (n,).
        kept: Their kept sets; None if nothing was truncated.
        trained: Which tokens are trained, shape (n,).
        trainer: The trainer's name, for the error.
        rollout: The rollout, for the error.
        replays: Whether the trainer computes its logprobs over kept sets.

    Raises:
        LogprobMismatchError: A trained token was sampled under a truncation, and the trainer does not replay it, or no
            kept set was recorded, or its probability is not known.
    """
    if kept is None:
        return logprobs
    low, high = kept.mass.T.astype(np.float64)
    cut = trained & (low < 1 - EXACT)
    ready = replays & (kept.counts > 0) & (high - low < EXACT * low)
    if (cut & ~ready).any():
        raise LogprobMismatchError(_refusal(low, high, cut & ~ready, trainer, rollout, replays))
    return np.where(cut, logprobs - np.log(np.where(cut, low, 1)), logprobs).astype(np.float32)


def _refusal(
    low: npt.NDArray[np.float64],
    high: npt.NDArray[np.float64],
    wrong: npt.NDArray[np.bool_],
    trainer: str,
    rollout: str,
    replays: bool,
) -> str:
    """Return why the logprobs of the tokens `wrong` are refused, and by how much their ratio would be off."""
    known, off = wrong & (low > 0), ""
    if known.any():
        least, most = -np.log(high[known]), -np.log(low[known])
        off = (
            f" By the recorded top logprobs the ratio is off by {least.mean():.3g} to {most.mean():.3g} nats a token, "
            f"at most by a factor of {np.exp(most.max()):.3g}."
        )
    if unknown := int((wrong & ~known).sum()):
        off += f" For {unknown} of them it is unknown by how much: no top logprobs of their distribution are recorded."
    lacks = "has no place for kept sets, or does not replay them"
    why = "finds no kept sets of known probability" if replays else lacks
    return (
        f"Law 11: {int(wrong.sum())} trained tokens of rollout {rollout} were sampled under top_k, top_p or min_p, "
        "with p(token) / p(kept set), or after a penalty, a bias or another temperature than the logprobs have, and "
        f"{trainer} {why}, so its ratio would be wrong.{off} Sample at the trainer's temperature with top_k=-1, "
        "top_p=1, min_p=0 and no penalties. Or, for a trainer that replays kept sets, sample with a finite top_k and "
        "optional_outputs={'sampling_mask': True, 'top_logprobs': top_k}, and tell the exporter. Or pass "
        "logprobs='omit' to let the trainer compute its own, or logprobs='as-recorded' to use them unchecked."
    )


def check_semantics(
    semantics: Semantics, *, temperature: float, trainer: str, rollout: str, over_kept: bool = False
) -> None:
    """Check that logprobs are log_softmax(logits / temperature) over the whole vocabulary.

    With `over_kept`, they may be of another distribution, for `sampled_logprobs` to judge by the kept sets.

    Raises:
        LogprobMismatchError: They are not, or their semantics are unknown.
    """
    if semantics.temperature == temperature and (over_kept or not semantics.adjusted):
        return
    kind = {None: "of unknown kind", False: "raw", True: "processed"}[semantics.processed]
    at = "an unknown temperature" if semantics.temperature is None else f"temperature {semantics.temperature}"
    change = ", changed by a grammar, a penalty, top-k or similar" if semantics.adjusted else ""
    raise LogprobMismatchError(
        f"Law 11: {trainer} compares recorded logprobs with log_softmax(logits / {temperature}), but those of rollout "
        f"{rollout} are {kind}, at {at}{change} (source: {semantics.source}). Sample and train at one temperature, on "
        "an engine that reports such logprobs. Or pass logprobs='omit' to let the trainer compute its own, or "
        "logprobs='as-recorded' to use them unchecked."
    )


def experts_of(sample: TrainingSample) -> npt.NDArray[np.generic] | None:
    """Return the routed experts of every token but the last, whose logits no loss reads.

    Returns:
        Integers, shape (n - 1, layers, experts), or None if the engine reported none.

    Raises:
        ValueError: Some tokens have none, so that a replay would route them freely.
    """
    if sample.routed_experts is None:
        return None
    rows = sample.routed_experts[:-1]
    missing = np.flatnonzero((rows == NO_EXPERT).any(axis=(1, 2)))
    if len(missing):
        raise ValueError(
            f"Routed experts are missing for {len(missing)} of {len(sample) - 1} tokens, first at index {missing[0]}, "
            f"in rollout {sample.identity.rollout_id}. Request them in every turn with "
            "optional_outputs={'routed_experts': True}."
        )
    return rows


@dataclass(frozen=True, slots=True, eq=False)
class PromptResponse:
    """One prompt and one response. `response_ids`, `mask` and `logprobs` have one length, at least 1.

    Attributes:
        prompt_ids: The prompt.
        response_ids: Sampled tokens and the tokens between them.
        mask: 1 on trained tokens of the response.
        logprobs: Logprobs of trained tokens, 0.0 on others; None with `logprobs="omit"`.
        experts: Routed experts, shape (tokens - 1, layers, experts), or None.
        truncated: Number of tokens cut from the end of the response.
        images: The images of prompt and response, in order.
        kept: The kept sets of the response, or None.
        credit: The rewards of turns and calls, one entry for each token of the response; None without any. Those of
            tokens that were cut are on the last token that is left.
    """

    prompt_ids: list[int]
    response_ids: list[int]
    mask: list[int]
    logprobs: list[float] | None
    experts: npt.NDArray[np.int16] | None
    truncated: int
    images: tuple[SampleImage, ...] = ()
    kept: KeptSets | None = None
    credit: list[float] | None = None

    def rewards(self, reward: float | None) -> list[float]:
        """Return a reward for each token of the response: its credit, and the rollout's reward on the last one."""
        found = list(self.credit or [0.0] * len(self.mask))
        found[-1] += reward or 0.0
        return found

    def masked(self) -> PromptResponse:
        """Return it without any trained token."""
        return replace(self, mask=[0] * len(self.mask))


def prompt_response_of(
    sample: TrainingSample,
    *,
    trainer: str,
    temperature: float,
    logprobs: LogprobPolicy = "checked",
    max_prompt_length: int | None = None,
    max_response_length: int | None = None,
    takes_images: bool = False,
    replays: bool = False,
) -> PromptResponse:
    """Split a sample into prompt and response.

    If the rollout ended from outside, the mask is 0 everywhere: its reward does not measure the policy.

    Args:
        sample: The sample.
        trainer: The trainer's name, for errors.
        temperature: The trainer's logit temperature.
        logprobs: See `LogprobPolicy`.
        max_prompt_length: Longest prompt. The rest of a longer one moves to the start of the response, untrained; an
            image moves whole.
        max_response_length: Longest response. A longer one is cut at its end, with a warning, never inside an image.
        takes_images: Whether the trainer trains with the images.
        replays: Whether the trainer replays kept sets; see `logprobs_for`.

    Raises:
        ImagesNotSupportedError: The sample has images, and the trainer takes none, or the response begins with an image
            that is longer than a response may be.
        SampledPlaceholderError: The policy sampled the placeholder of images: they would be put in other places.
        LogprobMismatchError: The logprobs are not the quantity that the trainer computes.
        ValueError: The engine reported experts for some tokens only.
    """
    if not takes_images:
        refuse_images(sample.images, trainer, sample.identity.rollout_id)
    values = logprobs_for(sample, temperature=temperature, trainer=trainer, policy=logprobs, replays=replays)
    start = sample.prompt_length if max_prompt_length is None else min(sample.prompt_length, max_prompt_length)
    start = whole_images(sample.images, start)
    stop = len(sample) if max_response_length is None else min(len(sample), start + max_response_length)
    stop = whole_images(sample.images, stop)
    if stop <= start and sample.images:
        raise ImagesNotSupportedError(
            f"The response of rollout {sample.identity.rollout_id} would begin with an image that does not fit into "
            f"{max_response_length} tokens. Raise max_response_length or max_prompt_length."
        )
    images = tuple(each for each in sample.images if each.stop <= stop)
    if takes_images:
        refuse_stray_placeholders(
            sample.token_ids[:stop], images, sample.media_ids, trainer, sample.identity.rollout_id
        )
    truncated = len(sample) - stop
    if truncated:
        logger.warning(
            "rollout=<%s>, cut=<%d> | response cut: %s takes at most %d tokens, the rest is not trained",
            sample.identity.rollout_id, truncated, trainer, stop - start,
        )  # fmt: skip
    experts = experts_of(sample)
    mask = np.zeros(stop - start, np.int64) if sample.ended_outside else sample.loss_mask[start:stop]
    credit = None if sample.credit is None else sample.credit[start:stop].copy()
    if credit is not None and sample.credit is not None:
        credit[-1] += sample.credit[stop:].sum()
    return PromptResponse(
        sample.token_ids[:start].tolist(),
        sample.token_ids[start:stop].tolist(),
        mask.tolist(),
        None if values is None else values[start:stop].tolist(),
        None if experts is None else experts[:stop].astype(np.int16),
        truncated,
        images,
        None if sample.kept is None else sample.kept.part(start, stop),
        None if credit is None else credit.tolist(),
    )


def warn_left_out(rollouts: Iterable[Ledger], *, trainer: str, agent: str | None, max_paths: int | None = None) -> None:
    """Log how many sampled tokens and rewards rows leave out, of last paths, or with `max_paths` of so many.

    Rollouts without a turn of the agent are not counted, but see `warn_without_agent`, which is called too.
    """
    rollouts = list(rollouts)
    warn_without_agent(rollouts, trainer=trainer, agent=agent)
    rollouts = [rollout for rollout in rollouts if has_turn(rollout, agent)]
    chosen: Any = {"agent": agent, "last": max_paths is None, "max_paths": max_paths}
    turns = [exported_turns(rollout, **chosen) for rollout in rollouts]
    found = list(map(left_out, rollouts, turns))
    unread = sum(turn not in own for one, own in zip(rollouts, turns, strict=True) for turn, _ in credits_of(one))
    if left := sum(found, Counter[str]()):
        logger.warning(
            "rollouts=<%d>, branched=<%d>, left_out=<%d> | not trained: %s gets %s only. Tokens by agent: %s. "
            "Their %d rewards of turns and calls are not read.",
            len(rollouts), sum(map(bool, found)), left.total(), trainer,
            "last paths" if max_paths is None else f"{max_paths} paths of each", by_agent(left), unread,
        )  # fmt: skip


class UnreadRewardError(TITOError, ValueError):
    """A trainer would train tokens of one agent with the reward of another, and not read their own."""


def check_last_row(rows: Sequence[TrainingSample], *, trainer: str, keep: str, refuse: bool) -> None:
    """Log the rewards of turns and calls that a trainer ignores, which gives all rows the advantage of the last one.

    Args:
        rows: The rows of one rollout, in the trainer's order.
        trainer: The trainer's name.
        keep: What the user can do.
        refuse: Whether to raise where the rewards are those of another agent than the last row's.

    Raises:
        UnreadRewardError: `refuse`, and they are: that agent would be trained towards what it was punished for.
    """
    unread = [row for row in rows[:-1] if row.credit is not None]
    if not unread or rows[0].ended_outside:
        return
    lost, every = (np.concatenate([row.credit for row in some if row.credit is not None]) for some in (unread, rows))
    last, whose = rows[-1].identity.agent, Counter(row.identity.agent or "no agent" for row in unread)
    what = (
        f"{trainer} gives all rows of a rollout the advantage of its last row, here of {last or 'no agent'}, and reads "
        f"no rewards of turns and calls on other rows: those of {len(unread)} rows ({by_agent(whose)}) are lost, "
        f"{np.abs(lost).sum():g} of {np.abs(every).sum():g} in absolute value. {keep}"
    )
    if refuse and any(row.loss_mask.any() and row.identity.agent != last for row in unread):
        raise UnreadRewardError(f"Rollout {rows[0].identity.rollout_id}: {what}")
    if any(row.total != rows[-1].total for row in unread):  # a reward of 0 is one too
        logger.warning("rollout=<%s> | %s", rows[0].identity.rollout_id, what)


def warn_without_agent(rollouts: Iterable[Ledger], *, trainer: str, agent: str | None) -> None:
    """Log the agents of rollouts if none of them has a turn of the trained one, whose name may be misspelt."""
    rollouts = [rollout for rollout in rollouts if len(rollout)]
    if agent is not None and rollouts and not any(has_turn(rollout, agent) for rollout in rollouts):
        names = dict.fromkeys(name for rollout in rollouts for name in rollout.agents)
        logger.warning(
            "rollouts=<%d>, agent=<%s>, agents=<%s> | not trained: %s gets nothing, since this agent made no turn. "
            "If another was meant, choose it by its name.",
            len(rollouts), agent, ", ".join(names) or "none named", trainer,
        )  # fmt: skip


def empty_response(end_id: int, *, logprobs: bool = True) -> PromptResponse:
    """Return a placeholder for a rollout without turns of the agent: an end token as prompt, an untrained one after."""
    return PromptResponse([end_id], [end_id], [0], [0.0] if logprobs else None, None, 0)


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
        ValueError: `logprobs` is not a `LogprobPolicy`.
    """
    expect_one_of("logprobs", logprobs, get_args(LogprobPolicy))
    refuse_ledger_images(rollout, trainer)
    for path, earlier in rollout.iter_paths():
        for turn in path:
            if turn.index in earlier or (turn.draft.constrained and not train_constrained):
                continue
            if logprobs == "checked":
                checked_turn(turn.draft, temperature=temperature, trainer=trainer, rollout=rollout.uuid)
            whole = rollout.path_ids(turn.index)
            yield TrainedTurn(turn, whole[: len(whole) - turn.draft.columns.output])


def checked_turn(draft: Draft, *, temperature: float, trainer: str, rollout: str, replays: bool = False) -> Logprobs:
    """Return the logprobs of a trained turn as `logprobs_for` does those of a sample, shape (output tokens,).

    Raises:
        LogprobMismatchError: As `logprobs_for` with "checked".
    """
    n = draft.columns.output
    kept = kept_sets([(draft, 0)], n)
    whose: Any = {"trainer": trainer, "rollout": rollout}
    over_kept = replays and has_sets(kept)
    check_semantics(draft.engine.semantics, temperature=temperature, over_kept=over_kept, **whose)
    return sampled_logprobs(draft.logprobs, kept, np.ones(n, np.bool_), replays=replays, **whose)


class ImagesNotSupportedError(TITOError, ValueError):
    """A rollout has images, and the trainer would train it without them, or with them in other places."""


class SampledPlaceholderError(ImagesNotSupportedError):
    """The policy of one rollout sampled the placeholder of images. Other rollouts of the batch are not concerned."""


class ImageGridError(TITOError, ValueError):
    """A processor makes another number of tokens of an image than the engine did."""


def refuse_images(images: Iterable[object], trainer: str, rollout_id: str) -> None:
    """Refuse a rollout with images, for a trainer whose input has no place for them.

    Raises:
        ImagesNotSupportedError: There are images.
    """
    count = sum(1 for _ in images)
    if count:
        raise ImagesNotSupportedError(
            f"Rollout {rollout_id} has {count} images, and {trainer} has no place for them: its tokens would be "
            "trained without them. From Python, call an exporter that takes images (verl.output_of, slime.fields_of "
            "with processor=..., verifiers.trace_of), write `tito export --to parquet`, or leave such rollouts out."
        )


def refuse_ledger_images(rollout: Ledger, trainer: str) -> None:
    """Refuse a rollout in which any turn has an image; see `refuse_images`."""
    refuse_images((span for turn in rollout for span in turn.draft.media), trainer, rollout.uuid)


def refuse_stray_placeholders(
    token_ids: TokenIds, images: Sequence[SampleImage], media_ids: Collection[int], trainer: str, rollout_id: str
) -> None:
    """Refuse tokens with more placeholders than those of their images, for a trainer that puts images in their places.

    Tokens without images too: trainers pack them with others, so that a neighbour's image would take the place.

    Args:
        token_ids: int32, shape (n,).
        images: The images.
        media_ids: Ids of the placeholders; see `TrainingSample.media_ids`.
        trainer: The trainer's name, for the error.
        rollout_id: The rollout, for the error.

    Raises:
        SampledPlaceholderError: The policy sampled a placeholder.
    """
    stray = stray_placeholders(token_ids, [(each.offset, each.length) for each in images], media_ids)
    if stray:
        raise SampledPlaceholderError(
            f"Rollout {rollout_id} has {len(images)} images, and its policy sampled {stray} more placeholders, of the "
            f"tokens {', '.join(map(str, media_ids))}: {trainer} would put images in other places than the engine did. "
            "Leave such rollouts out, or ban the tokens in sampling, as docs/images.md shows."
        )


def pictures_of(images: Sequence[SampleImage]) -> list[Picture]:
    """Return the images as Pillow's RGB pictures.

    Raises:
        MissingPackageError: Pillow is not installed.
    """
    pillow = import_optional("PIL.Image", "images")
    return [pillow.open(io.BytesIO(each.image.data)).convert("RGB") for each in images]


def processed(images: Sequence[SampleImage], processor: Any) -> dict[str, Any]:
    """Return what a processor makes of images: `pixel_values`, `image_grid_thw` and others, as PyTorch tensors.

    Args:
        images: At least one image.
        processor: The model's processor of transformers (`AutoProcessor`), or its image processor.

    Raises:
        MissingPackageError: Pillow is not installed.
        ImageGridError: The number of tokens differs from the engine's.
    """
    image_processor = getattr(processor, "image_processor", processor)
    tensors = dict(image_processor(images=pictures_of(images), return_tensors="pt"))
    grid = tensors.get("image_grid_thw")
    if grid is not None:
        check_grid(images, np.asarray(grid), int(image_processor.merge_size))
    return tensors


def check_grid(images: Sequence[SampleImage], grid: npt.NDArray[Any], merge: int) -> None:
    """Check that each image has as many placeholders as its grid has tokens: t * h * w / merge².

    Args:
        images: The images.
        grid: Integers, shape (images, 3): frames, rows and columns of patches.
        merge: Side of the square of patches that one token stands for.

    Raises:
        ImageGridError: A number differs: the trainer's processor is not that of the engine.
    """
    tokens = [int(row.prod()) // merge**2 for row in grid]
    lengths = [each.length for each in images]
    if tokens != lengths:
        raise ImageGridError(
            f"The processor makes {tokens} tokens of the images, the engine made {lengths}. Give the trainer the "
            "processor of the engine's model, with the same limits of pixels (preprocessor_config.json)."
        )


def whole_images(images: Sequence[SampleImage], stop: int) -> int:
    """Return the largest cut at or before `stop` that splits no image."""
    return next((each.offset for each in images if each.offset < stop < each.stop), stop)
