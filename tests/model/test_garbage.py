"""A turn makes no reference cycles, so that thousands of rollouts do not depend on garbage collections."""

from __future__ import annotations

import gc
from typing import Any

import pytest

from strands_tito.collect.run import GC_THRESHOLDS, tune_gc
from support.histories import add
from support.scripted import Says, call, model_of
from tito_core import TITOModel
from tito_core.chat import ChatTemplate

QWEN3 = "qwen3-tiny"
CALL = call("add", '{"a": 1, "b": 2}')
TURNS = 20
"""More than the cycles that other code of this process leaves, unless it is unlucky once."""


@pytest.mark.usefixtures("frozen_heap")
@pytest.mark.parametrize(
    ("kind", "name", "stream"),
    [("vllm", "smollm2", False), ("sglang", "smollm2", True), ("vllm", QWEN3, True), ("sglang", QWEN3, False)],
)
async def test_a_turn_leaves_no_reference_cycles(
    kind: str, name: str, stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ChatTemplate, "comparison", lambda *_, **__: None)  # transformers' rendering leaves cycles
    models = [model_of(kind, Says(f"Let me add them. {CALL}", name=name), name, stream=stream) for _ in range(3)]
    await _play(models[0])
    was_on = gc.isenabled()
    gc.disable()
    try:
        left = [await _garbage(model) for model in models[1:]]
    finally:
        if was_on:
            gc.enable()
    assert min(left) < TURNS, f"{left} objects: a cycle of each turn would be one object of each at least, every time"


async def _garbage(model: TITOModel) -> int:
    gc.collect()
    await _play(model)
    assert len(model.trajectories) == 1
    return gc.collect()


async def _play(model: TITOModel) -> None:
    messages: Any = [{"role": "user", "content": [{"text": "Go."}]}]
    for _ in range(TURNS):
        events: list[Any] = [event async for event in model.stream(messages, [add.tool_spec])]
        called = next(
            event["contentBlockStart"]["start"]["toolUse"]
            for event in events
            if "toolUse" in event.get("contentBlockStart", {}).get("start", {})
        )
        use = {**called, "input": {"a": 1, "b": 2}}
        result = {"toolUseId": use["toolUseId"], "status": "success", "content": [{"text": "3"}]}
        messages.append({"role": "assistant", "content": [{"text": "Let me add them."}, {"toolUse": use}]})
        messages.append({"role": "user", "content": [{"toolResult": result}]})


def test_tune_gc() -> None:
    before = gc.get_threshold()
    try:
        tune_gc()
        assert gc.get_threshold() == GC_THRESHOLDS
        assert all(ours >= usual for ours, usual in zip(GC_THRESHOLDS, before, strict=True))
        assert gc.get_freeze_count() > 0
        assert gc.isenabled()
    finally:
        gc.unfreeze()
        gc.set_threshold(*before)
