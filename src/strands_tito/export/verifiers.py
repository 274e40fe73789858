"""verifiers: a rollout as a `Trace`, a graph of message nodes, from which prime-rl trains.

A node's tokens follow those of its parent. verifiers calls a path from a root to a leaf a branch; here it is a
trajectory.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, cast, get_args

import numpy as np
import numpy.typing as npt

from strands_tito.export.kept import kept_sets
from strands_tito.export.sample import SampleImage, images_of, sample_number, sample_of, total_of
from strands_tito.export.trainer import (
    Decode,
    check_semantics,
    checked_turn,
    import_optional,
    processed,
    refuse_ledger_images,
    refuse_stray_placeholders,
)
from strands_tito.inspect.score import TEACHER, scores_of
from tito_core.backend.images import data_url, media_ids_of
from tito_core.ledger.ledger import Ledger
from tito_core.ledger.turn import Finish, Image, Turn
from tito_core.termination import Termination

if TYPE_CHECKING:
    from verifiers.v1 import WireTrace

STOP = MappingProxyType(
    {
        Termination.COMPLETED: "agent_completed",
        Termination.TRUNCATED: "max_output_tokens",
        Termination.CONTEXT: "max_total_tokens",
        Termination.LIMIT: "max_turns",
        Termination.TOOL_ERROR: "tool_error",
        Termination.TEMPLATE: "template_error",
        Termination.ENGINE_ERROR: "provider_error",
        Termination.ABORTED: "aborted",
        Termination.CANCELLED: "cancelled",
    }
)
"""The trace's `stop_condition` for each termination. verifiers counts "max_..." as truncated."""


PerTurn = Sequence[npt.ArrayLike]
"""For each turn a number, or a number for each of its tokens."""


def trace_of(
    rollout: Ledger,
    *,
    temperature: float,
    decode: Decode,
    task: Mapping[str, Any] | None = None,
    logprobs: Literal["checked", "as-recorded"] = "checked",
    train_constrained: bool = False,
    processor: Any = None,
    replays: bool = False,
    teacher: str = TEACHER,
    advantages: PerTurn | None = None,
    loss_weights: Mapping[str, PerTurn] | None = None,
) -> WireTrace:
    """Return a rollout as a trace: for each turn, its delta as a user node and its answer as an assistant node.

    Branches share the nodes of the turns that their paths share; prime-rl trains such a node in the first branch only.
    The trace of a rollout that ended from outside, or has no turns, is not `ok` and not trained. Its one reward is that
    of the rollout plus those of its turns and calls.

    Args:
        rollout: The rollout.
        temperature: The trainer's logit temperature.
        decode: Returns the text of token ids. It becomes the messages' content, markup included.
        task: More fields of the task; its `id` is the ledger's `task_id`.
        logprobs: See `LogprobPolicy`. "omit" is not accepted, because verifiers reads missing logprobs as 0.
        train_constrained: Whether to train tokens that were sampled under a grammar.
        processor: The model's processor of transformers, with which the number of tokens of each image is checked.
            verifiers before 0.4 needs it for images: its nodes hold the processor's tensors, which prime-rl trains.
        replays: Whether the trainer computes its logprobs over the nodes' `sampling_mask` (`kept_tokens` before 0.4).
            Otherwise a truncated rollout is refused.
        teacher: The column of `Teacher` that becomes `reference_logprobs`, if all turns have it.
        advantages: For each turn a number, or one for each of its sampled tokens, for `advantages` of the nodes. An
            algorithm of prime-rl that computes its own overwrites them.
        loss_weights: By name ("rl", "ce" or "ref_kl" for prime-rl), for each turn a number for its sampled tokens, or
            one for each token that it adds, of its delta too, for `loss_weights` of the nodes.

    Kept sets are those of a turn's answer, if `replays`. Images are data URLs in the content of their
    user node, and tokens are expanded, as verifiers records a rollout; from 0.4 on the trainer makes the tensors.

    Raises:
        MissingPackageError: verifiers is not installed.
        ImagesNotSupportedError: The rollout has images, verifiers is older than 0.4, and there is no processor.
        ImageGridError: The processor makes another number of tokens of an image than the engine did.
        SampledPlaceholderError: The policy sampled the placeholder of images.
        LogprobMismatchError: A trained turn's logprobs are not the quantity that the trainer computes.
        ValueError: The engine reported experts for some of a turn's tokens only, `logprobs` is out of range, or
            advantages or weights do not fit the turns.
    """
    if logprobs not in ("checked", "as-recorded"):
        raise ValueError(f"logprobs must be 'checked' or 'as-recorded' for verifiers, not {logprobs!r}.")
    vf = import_optional("verifiers.v1", "verifiers")
    nodes: list[dict[str, Any]] = []
    tensors = bool(rollout.images) and _has_field(vf, "multi_modal_data")
    if tensors and processor is None:
        refuse_ledger_images(rollout, "verifiers before 0.4, which expects tensors, without a processor")
    sets, media = "sampling_mask" if _has_field(vf, "sampling_mask") else "kept_tokens", media_ids_of(rollout)
    scores = _scores(rollout, teacher, temperature if logprobs == "checked" else None)
    for trajectory in rollout.trajectories:
        refuse_stray_placeholders(trajectory.token_ids, images_of(trajectory), media, "verifiers", rollout.uuid)
    for turn in rollout:
        trained = train_constrained or not turn.draft.constrained
        nodes += _nodes(turn, decode, trained, rollout.images)
        if trained and logprobs == "checked":
            options: Any = {"trainer": "verifiers", "rollout": rollout.uuid, "replays": replays}
            nodes[-1]["logprobs"] = checked_turn(turn.draft, temperature=temperature, **options).tolist()
        kept = kept_sets([(turn.draft, 0)], turn.draft.columns.output)
        if trained and replays and kept is not None and len(kept.ids):
            nodes[-1][sets] = {"ids": _array(kept.ids), "counts": _array(kept.counts)}
        if trained and scores:
            nodes[-1]["reference_logprobs"] = scores[turn.index]
        _weigh(nodes[-2:], turn, advantages if trained else None, loss_weights or {}, len(rollout))
        _attach_experts(nodes, turn)
        if turn.draft.media and processor is not None:
            found = _image_items(turn, rollout.images, processor)
            if tensors:
                nodes[-2]["multi_modal_data"] = found
    last = sample_of(rollout, branches="last") if len(rollout) else None
    reward = None if last is None else total_of(rollout)
    trace = {
        "id": rollout.uuid,
        "task": {"type": "Task", "data": {"id": rollout.header.task_id, **(task or {})}},
        "agent": {"config": {}},
        "nodes": nodes,
        "calls": [_call(turn) for turn in rollout],
        "rewards": {} if reward is None else {"reward": {"score": reward}},
        "info": {"tito": _info(rollout, last.termination if last is not None else None)},
        **_token_types(rollout),
        "is_completed": True,
        "ok": last is not None and not last.ended_outside,
        "stop_condition": None if last is None else STOP[last.termination],
    }
    return cast("WireTrace", vf.WireTrace.model_validate(trace))


def _scores(rollout: Ledger, teacher: str, temperature: float | None) -> list[list[float]]:
    """Return the teacher's logprobs of each turn's answer, checked if there is a temperature; [] unless all are scored.

    A trainer reads 0 for a node without them, next to one that has some.
    """
    turns = list(rollout)
    scores = scores_of(rollout, turns).get(teacher)
    if scores is None:
        return []
    if temperature is not None:
        whose = f"{rollout.uuid} in column {teacher!r} (teacher='' leaves it out)"
        check_semantics(scores.semantics, temperature=temperature, trainer="verifiers", rollout=whose)
    stops = np.cumsum([turn.own_length for turn in turns])
    return [
        scores.logprobs[stop - turn.draft.columns.output : stop].tolist()
        for turn, stop in zip(turns, stops, strict=True)
    ]


def _weigh(
    nodes: Sequence[dict[str, Any]],
    turn: Turn,
    advantages: PerTurn | None,
    weights: Mapping[str, PerTurn],
    turns: int,
) -> None:
    """Set the advantages and the loss weights of a turn's two nodes; see `trace_of`."""
    output, split = turn.draft.columns.output, turn.draft.columns.prompt
    if advantages is not None:
        nodes[1]["advantages"] = _values("advantages", advantages, turn.index, turns, output).tolist()
    for name, values in weights.items():
        whole = _values(f"loss_weights[{name!r}]", values, turn.index, turns, split + output)
        if np.ndim(values[turn.index]) == 0:
            whole[:split] = 0
        for node, part in zip(nodes, (whole[:split], whole[split:]), strict=True):
            node.setdefault("loss_weights", {})[name] = part.tolist()


def _values(name: str, values: PerTurn, turn: int, turns: int, length: int) -> npt.NDArray[np.float64]:
    given = np.asarray(values[turn] if len(values) == turns else [], np.float64)
    if given.shape not in ((), (length,)) or not np.isfinite(given).all():
        raise ValueError(
            f"{name} has {len(values)} entries for {turns} turns, and of turn {turn} shape {given.shape}: give one for "
            f"each turn, a finite number or one for each of its {length} tokens."
        )
    return np.broadcast_to(given, length).copy()


def _has_field(vf: Any, name: str) -> bool:
    """Return whether nodes have a field; tensors of images, from which prime-rl trained, only up to verifiers 0.3."""
    (node,) = get_args(vf.WireTrace.model_fields["nodes"].annotation)
    return name in node.model_fields


def _image_items(turn: Turn, images: Mapping[bytes, Image], processor: Any) -> dict[str, Any]:
    """Return the tensors of a turn's images as verifiers before 0.4 records them: one item an image, and its hash."""
    spans = [SampleImage(span.offset, span.length, images[span.sha256]) for span in turn.draft.media]
    items = [{name: _array(value) for name, value in processed([one], processor).items()} for one in spans]
    return {"mm_items": {"image": items}, "mm_hashes": {"image": [one.image.sha256.hex() for one in spans]}}


def _array(value: Any) -> dict[str, Any]:
    """Return a tensor as verifiers writes one."""
    array = np.ascontiguousarray(value)
    return {"__nd__": True, "dtype": str(array.dtype), "shape": list(array.shape), "data": array.tobytes()}


def _token_types(rollout: Ledger) -> dict[str, Any]:
    """Return the map from the placeholder's id to verifiers' number of images, from which it marks their tokens."""
    for turn in rollout:
        for span in turn.draft.media:
            start = turn.path_length - turn.own_length
            return {"mm_token_type_id_map": {int(turn.draft.prompt_ids[span.offset - start]): 1}}
    return {}


def _content(turn: Turn, decode: Decode, images: Mapping[bytes, Image]) -> str | list[dict[str, Any]]:
    """Return the text of a delta; with images the text between them, and each image as a data URL."""
    ids, start = turn.draft.prompt_ids.tolist(), turn.path_length - turn.own_length
    if not turn.draft.media:
        return decode(ids)
    parts: list[dict[str, Any]] = []
    at = 0
    for span in turn.draft.media:
        parts.append({"type": "text", "text": decode(ids[at : span.offset - start])})
        parts.append({"type": "image_url", "image_url": {"url": data_url(images[span.sha256])}})
        at = span.offset - start + span.length
    return [*parts, {"type": "text", "text": decode(ids[at:])}]


def _nodes(turn: Turn, decode: Decode, trained: bool, images: Mapping[bytes, Image]) -> list[dict[str, Any]]:
    draft, first = turn.draft, 2 * turn.index
    prompt, output = draft.prompt_ids.tolist(), draft.output_ids.tolist()
    before = {
        "parent": None if turn.parent is None else 2 * turn.parent + 1,
        "message": {"role": "user", "content": _content(turn, decode, images)},
        "token_ids": prompt,
        "mask": [False] * len(prompt),
    }
    answer = {
        "parent": first,
        "message": {"role": "assistant", "content": decode(output)},
        "sampled": True,
        "token_ids": output,
        "mask": [trained] * len(output),
        "logprobs": draft.logprobs.tolist() if trained else [],
    }
    return [before, answer]


def _call(turn: Turn) -> dict[str, Any]:
    draft, cached = turn.draft, turn.draft.engine.cached_tokens
    return {
        "node": 2 * turn.index + 1,
        "model": draft.engine.server.model,
        "finish_reason": None if draft.finish is Finish.ABORT else draft.finish.value,
        "usage": {
            "prompt_tokens": draft.prompt_length - (cached or 0),
            "completion_tokens": len(draft.output_ids),
            "cached_input_tokens": cached,
        },
    }


def _info(rollout: Ledger, termination: Termination | None) -> dict[str, Any]:
    """Return what verifiers' own fields cannot hold: group, sample, termination, each answer's agent and versions."""
    return {
        "group": rollout.header.group_id,
        "sample": sample_number(rollout),
        "agents": [turn.draft.agent for turn in rollout],
        "termination": None if termination is None else termination.value,
        "versions": [[list(span) for span in turn.draft.versions] for turn in rollout],
    }


def _attach_experts(nodes: list[dict[str, Any]], turn: Turn) -> None:
    """Set the routed experts of a turn's two nodes, one row per token.

    An engine reports no row for the last token of an answer, so its row is a copy of the one before. The next turn
    reports that row and replaces the copy.

    Raises:
        ValueError: Some tokens have none.
    """
    column = turn.draft.extras.get("routed_experts")
    if column is None:
        return
    earlier, middle = turn.path_length - turn.own_length - column.start, turn.draft.columns.prompt
    rows = np.concatenate([column.values, column.values[-1:]])[: earlier + turn.own_length]
    if earlier < 0 or len(rows) < earlier + turn.own_length:
        raise ValueError(
            f"Turn {turn.index} ends at token {turn.path_length}, but routed experts are known for {column.rows} "
            f"tokens from token {column.start} only. Request them in every turn with "
            "optional_outputs={'routed_experts': True}."
        )
    rows = rows.astype(np.uint8 if rows.max(initial=0) < 256 else np.uint16)
    nodes[-2]["routed_experts"], nodes[-1]["routed_experts"] = rows[earlier:][:middle], rows[earlier:][middle:]
    parent = nodes[nodes[-2]["parent"]] if turn.parent is not None else {}
    if earlier and "routed_experts" in parent:
        parent["routed_experts"] = np.concatenate([parent["routed_experts"][:-1], rows[earlier - 1 : earlier]])
