"""Agent Lightning 1.x: a rollout as events, from which its server makes `Triplet`s and its trainer trajectories."""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np

from strands_tito.export.sample import NO_EXPERT, routed_experts_of, sample_number, sample_of, total_of
from strands_tito.export.trainer import LogprobPolicy, TrainedTurn, import_optional, trained_turns
from tito_core.ledger.ledger import Ledger
from tito_core.ledger.trajectory import assemble
from tito_core.termination import Termination

if TYPE_CHECKING:
    from agentlightning.schemas import EventCreate

STATE = MappingProxyType(
    {
        Termination.COMPLETED: "succeeded",
        Termination.TRUNCATED: "succeeded",
        Termination.CONTEXT: "succeeded",
        Termination.LIMIT: "succeeded",
        Termination.TOOL_ERROR: "succeeded",
        Termination.TEMPLATE: "failed",
        Termination.ENGINE_ERROR: "failed",
        Termination.ABORTED: "failed",
        Termination.CANCELLED: "failed",
    }
)
"""Agent Lightning's `RolloutState` for each termination."""


def events_of(
    rollout: Ledger,
    *,
    temperature: float,
    logprobs: LogprobPolicy = "checked",
    train_constrained: bool = False,
) -> list[EventCreate]:
    """Return a "model_request" event for each trained turn, path by path, and the "reward" event last.

    A trainer at level "trajectory" merges each request that extends the one before. Each path thus becomes one row,
    and each token is trained once. A rollout that ended from outside (engine error, abort, cancellation) has no
    request events, because its reward does not measure the policy. Its trainer reads one reward a rollout: that of the
    rollout plus those of its turns and calls.

    Args:
        rollout: The rollout.
        temperature: The trainer's logit temperature.
        logprobs: See `LogprobPolicy`; with "omit" the trainer computes its own.
        train_constrained: Whether to train tokens that were sampled under a grammar.

    Raises:
        MissingPackageError: agentlightning 1.x is not installed.
        LogprobMismatchError: A turn's logprobs are not the quantity that the trainer computes.
    """
    schemas = import_optional("agentlightning.schemas", "agentlightning")
    if not len(rollout):
        return []
    last = sample_of(rollout, branches="last")
    events: list[EventCreate] = []
    if not last.ended_outside:
        turns = trained_turns(
            rollout,
            trainer="Agent Lightning",
            temperature=temperature,
            logprobs=logprobs,
            train_constrained=train_constrained,
        )
        events = [_event(schemas, rollout, turn, logprobs != "omit") for turn in turns]
    if (total := total_of(rollout)) is not None:
        reward = schemas.RewardData(value=total, source="agent").model_dump(exclude_none=True)
        events.append(schemas.EventCreate(event_type="reward", data=reward))
    return events


def state_of(rollout: Ledger) -> str:
    """Return the final state of Agent Lightning's rollout; "failed" for a rollout without turns."""
    return STATE[sample_of(rollout, branches="last").termination] if len(rollout) else "failed"


def _event(schemas: Any, rollout: Ledger, trained: TrainedTurn, with_logprobs: bool) -> EventCreate:
    draft = trained.turn.draft
    versions = {span.version for span in draft.versions}
    version = versions.pop() if len(versions) == 1 else None
    number = int(version) if version is not None and version.isdigit() else None
    scores = [{"logprob": value} for value in draft.logprobs.tolist()]
    data = schemas.ModelRequestData(
        model=draft.engine.server.model,
        model_version=number,
        request={},
        response={
            "id": draft.engine.request_id,
            "prompt_token_ids": trained.prompt_ids.tolist(),
            "choices": [
                {
                    "index": 0,
                    "token_ids": draft.output_ids.tolist(),
                    "finish_reason": draft.finish.value,
                    "logprobs": {"content": scores} if with_logprobs else None,
                }
            ],
        },
        latency_ms=draft.engine.latency_s * 1000,
        http_status=200,
        usage={"prompt_tokens": len(trained.prompt_ids), "completion_tokens": len(draft.output_ids)},
        finish_reason=draft.finish.value,
    ).model_dump()
    data["server"] = {"model": draft.engine.server.model, "version": number}
    header = rollout.header
    data["tito"] = {"rollout_id": header.uuid, "group_id": header.group_id, "task_id": header.task_id}
    data["tito"] |= {"sample": sample_number(rollout), "agent": draft.agent}
    experts = _experts(rollout, trained)
    if experts is not None:
        data["routed_experts"] = experts
    event: EventCreate = schemas.EventCreate(event_type="model_request", data=data)
    return event


def _experts(rollout: Ledger, trained: TrainedTurn) -> str | None:
    """Return the routed experts of a turn's prompt and answer, as Agent Lightning's proxy records them.

    Returns:
        A base64-encoded .npy file of uint8, shape (path length - 1, layers, experts); None if the engine reported no
        experts. The last token has no row.

    Raises:
        ValueError: Some tokens have no experts, or an expert's number does not fit in a byte.
    """
    path = assemble(rollout.path(trained.turn.index), context=set(), train_constrained=False)
    experts = routed_experts_of(path)
    if experts is None:
        return None
    rows = experts[:-1]
    missing, highest = int((rows == NO_EXPERT).any(axis=(1, 2)).sum()), int(rows.max(initial=NO_EXPERT))
    if missing or highest > 255:
        raise ValueError(
            f"Agent Lightning takes routed experts of every token, numbered 0 to 255. Turn {trained.turn.index} of "
            f"rollout {rollout.uuid} has them for {len(rows) - missing} of {len(rows)} tokens, the highest number "
            f"is {highest}. Request them in every turn with optional_outputs={{'routed_experts': True}}."
        )
    buffer = io.BytesIO()
    np.save(buffer, rows.astype(np.uint8), allow_pickle=False)
    return base64.b64encode(buffer.getvalue()).decode("ascii")


async def post_events(client: Any, rollout_id: str, attempt_id: str, events: Sequence[EventCreate]) -> None:
    """Send events to Agent Lightning's server, in order.

    Args:
        client: An `AgentLightningAsyncClient`, or another `httpx.AsyncClient` with the server's address.
        rollout_id: Agent Lightning's id of the rollout.
        attempt_id: Agent Lightning's id of the attempt.
        events: The events that `events_of` returned.

    Raises:
        httpx.HTTPStatusError: The server refused an event.
    """
    for event in events:
        path = f"/api/rollouts/{rollout_id}/attempt/{attempt_id}/events"
        (await client.post(path, json=event.model_dump(mode="json"))).raise_for_status()
