"""Rollouts through Agent Lightning: its server stores the events, its manager makes triplets, its adapter a batch."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import io
import socket
import threading
import time
from collections import Counter
from importlib.metadata import version
from typing import Any

import numpy as np
import pytest
import torch
import uvicorn
from agentlightning.client import AgentLightningAsyncClient
from agentlightning.schemas import EventCreate, ModelRequestData, RolloutState
from agentlightning.server.app import create_app
from agentlightning.verl.agl_rollout_manager import AglRolloutManager, CompletedRollout
from agentlightning.verl.rollout_adapter import RolloutAdapter
from hypothesis import given, settings

from strands_tito.export import LogprobMismatchError, samples_of
from strands_tito.export.agent_lightning import STATE, events_of, post_events, state_of
from strands_tito.export.sample import total_of
from support.rollout_forests import HOT, chain, rollouts
from tito_core.ledger import Ledger

KEY = "key"
PROXY = {
    "model_name": "m",
    "include_log_probs": True,
    "include_routed_experts": True,
    "train": {"temperature": 1.0},
    "val": {"temperature": 1.0},
}
OPTIONS: dict[str, Any] = {"temperature": 1.0, "logprobs": "as-recorded"}
seen = Counter[str]()


def serve() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    config = uvicorn.Config(create_app({"key": KEY, "default_proxy": PROXY}), port=port, log_level="error")
    server = uvicorn.Server(config)
    threading.Thread(target=server.run, daemon=True).start()
    while not server.started:
        time.sleep(0.05)
    return f"http://127.0.0.1:{port}"


URL = serve()
MANAGER = AglRolloutManager(agl_base_url=URL, agl_key=KEY, model="m", step=1)


def completed(ledger: Ledger) -> CompletedRollout:
    """Return a rollout as Agent Lightning's trainer sees it, once its agent has sent our events."""
    (enqueued,) = MANAGER._create_rollouts({"question": ["What?"]}, is_train=True)

    async def send() -> None:
        async with AgentLightningAsyncClient(key=KEY, base_url=URL) as client:
            await post_events(client, enqueued.rollout_id, "0", events_of(ledger, **OPTIONS))
            for state in ("running", state_of(ledger)):
                patch = {"status": {"state": state, "last_attempt_id": "0"}}
                (await client.patch(f"/api/rollouts/{enqueued.rollout_id}", json=patch)).raise_for_status()

    asyncio.run(send())
    rollout = MANAGER._get_rollout(enqueued.rollout_id)
    assert rollout.status.state == state_of(ledger)
    found = MANAGER._build_completed_rollout(enqueued, rollout)
    MANAGER._delete_rollout(enqueued.rollout_id)
    return found


def expected_turns(ledger: Ledger) -> list[tuple[tuple[int, ...], tuple[int, ...], tuple[float, ...]]]:
    """List prompt, answer and logprobs of what is trained; of answers to one prompt Agent Lightning keeps the last."""
    kept: dict[tuple[int, ...], tuple[Any, ...]] = {}
    order: dict[int, None] = {}
    for leaf in ledger.leaves():
        order.update(dict.fromkeys(turn.index for turn in ledger.path(leaf)))
    for index in order:
        draft = ledger[index].draft
        if not draft.constrained:
            prompt = tuple(ledger.path_ids(index).tolist()[: -len(draft.output_ids)])
            kept[prompt] = (prompt, tuple(draft.output_ids.tolist()), tuple(draft.logprobs.tolist()))
    return list(kept.values())


@settings(max_examples=25, deadline=None, database=None)
@given(rollouts())
def events_become_triplets_and_a_batch(ledger: Ledger) -> None:
    for event in events_of(ledger, **OPTIONS):
        assert isinstance(event, EventCreate)
        if event.event_type == "model_request":
            ModelRequestData.model_validate(event.data)
    found = completed(ledger)
    samples = samples_of(ledger)
    expected = [] if samples[0].ended_outside else expected_turns(ledger)
    assert found.triplets is not None
    given_back = [
        (tuple(each.prompt["token_ids"]), tuple(each.response["token_ids"]), tuple(each.response["log_probs"]))
        for each in found.triplets
    ]
    assert sorted(given_back) == sorted(expected)
    assert found.final_reward == total_of(ledger)
    if not expected:
        seen["without"] += 1
        return
    for level in ("transition", "trajectory"):
        batch_holds_each_token_once(level, found, expected)


def batch_holds_each_token_once(level: str, found: CompletedRollout, expected: list[Any]) -> None:
    adapter = RolloutAdapter(
        max_prompt_length=96,
        max_response_length=96,
        device=torch.device("cpu"),
        pad_token_id=0,
        trace_aggregator_level=level,
    )
    with contextlib.redirect_stdout(io.StringIO()):  # it warns of wandb, row by row
        data, metrics = adapter.get_train_data_batch([found])
    batch = data.batch
    attention = batch["attention_mask"][:, 96:]
    mask = batch["response_mask"] if level == "trajectory" else attention
    rows = len(mask)
    assert rows <= len(expected)
    seen[level] += rows
    trained: Counter[tuple[int, float]] = Counter()
    for row in range(rows):
        kept = mask[row].bool()
        ids = batch["responses"][row][kept].tolist()
        trained.update(zip(ids, batch["rollout_log_probs"][row][kept].tolist(), strict=True))
    pairs = [pair for _, ids, logprobs in expected for pair in zip(ids, logprobs, strict=True)]
    expected = Counter(pairs)
    assert trained == expected
    if batch.get("routed_experts") is not None:
        seen["experts"] += 1
        for row in range(rows):
            size = int(batch["attention_mask"][row, :96].sum())
            places = batch["routed_experts"][row, 96 - size : 96, 0, 0].tolist()
            assert places == list(range(size))
    assert metrics["training/n_truncated_sample"] == 0


def other_logprobs_are_refused_or_left_out() -> None:
    with pytest.raises(LogprobMismatchError, match="Agent Lightning compares"):
        events_of(chain((3, 2), semantics=HOT), temperature=1.0)
    (event,) = events_of(chain((3, 2), semantics=HOT), temperature=1.0, logprobs="omit")
    assert event.data["response"]["choices"][0]["logprobs"] is None
    assert events_of(Ledger(), temperature=1.0) == []
    assert state_of(Ledger()) == "failed"
    assert set(STATE.values()) == {RolloutState.SUCCEEDED.value, RolloutState.FAILED.value}


def experts_are_the_proxys_bytes() -> None:
    from support.drafts import make_draft
    from tito_core.ledger import Column

    ledger = Ledger()
    rows = np.arange(12).reshape(3, 2, 2)
    ledger.commit(make_draft(None, 0, [100] * 2, [200] * 2, extras={"routed_experts": Column.of(0, rows)}))
    (event,) = events_of(ledger, temperature=1.0)
    routes = np.load(io.BytesIO(base64.b64decode(event.data["routed_experts"])), allow_pickle=False)
    assert routes.dtype == np.uint8
    assert routes.tolist() == rows.tolist()
    ledger.commit(make_draft(0, 4, [100] * 2, [200] * 2))
    with pytest.raises(ValueError, match="routed experts of every token"):
        events_of(ledger, temperature=1.0)


if __name__ == "__main__":
    events_become_triplets_and_a_batch()
    other_logprobs_are_refused_or_left_out()
    experts_are_the_proxys_bytes()
    assert min(seen["transition"], seen["trajectory"]) > 0
    assert seen["experts"] > 0 or version("agentlightning") == "1.0.0"  # which knows no experts yet
    print(f"agentlightning: ok, {version('agentlightning')}, {dict(seen)}")
