"""LoRA adapters that PEFT wrote, on a real vLLM: rollouts with several share a server and do not mix.

SGLang has played them on its scripted wire only (`tests/model/test_adapters.py`).
"""

from __future__ import annotations

import asyncio
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tools.matrix import environment

from strands_tito import Adapter
from strands_tito.errors import AdapterNotInEffectError, BadRequestError
from strands_tito.inspect.verify import rescore
from support.real import Served, serve
from support.reference import reference
from tito_core.backend import EngineAdmin
from tito_core.ledger import Ledger, check_ledger
from tito_core.store import from_json, to_json
from tito_engines import install, models
from tito_engines.spec import find

pytestmark = [pytest.mark.engine, pytest.mark.long, pytest.mark.timeout(600)]
SCRIPT = Path(__file__).parents[1] / "support" / "adapter_script.py"
WITHIN_NATS = 1e-4
LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
ARGUMENTS = ("--enable-lora", "--max-loras", "3", "--max-lora-rank", "8", "--lora-target-modules", *LINEAR)
"""Without the list vLLM 0.32 adapts the logits too, and on a CPU dies of a request for prompt logprobs."""
NAMES = (None, "one", "two")


@dataclass(frozen=True)
class Adapted:
    served: Served
    folder: Path
    model: Path

    @property
    def admin(self) -> EngineAdmin:
        backend: Any = self.served.policy.backend
        assert isinstance(backend, EngineAdmin)
        return backend

    def weights(self, name: str | None) -> Path:
        return self.model if name is None else self.folder / f"{name}-merged"


@pytest.fixture(scope="module", params=["vllm"])
def adapted(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Adapted]:
    folder = tmp_path_factory.mktemp("adapters")
    model = models.ensure("smollm2", install.ensure(find("vllm")).python)
    command: list[Any] = [environment("trl-1.16.0"), SCRIPT, model, folder]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    with serve(request.param, environment={"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"}, server_args=ARGUMENTS) as served:
        yield Adapted(served, folder, model)


async def rollout(served: Served, adapter: Adapter | str | None) -> Ledger:
    """Play two turns, the second of which finds the first one's prompt in the prefix cache."""
    model = served.policy.model(adapter=adapter, sampling={"max_new_tokens": 24})
    messages: list[Any] = []
    for question in ("Begin.", "Go on."):
        messages.append({"role": "user", "content": [{"text": question}]})
        text = ""
        async for event in model.stream(messages, system_prompt="You tell stories about the sea. " * 8):
            text += event.get("contentBlockDelta", {}).get("delta", {}).get("text", "")
        messages.append({"role": "assistant", "content": [{"text": text}]})
    return model.ledger


async def test_rollouts_with_adapters_have_the_logprobs_of_their_merged_weights(adapted: Adapted) -> None:
    for name in ("one", "two"):
        await adapted.admin.load_adapter(name, str(adapted.folder / name))
    ledgers = await asyncio.gather(*(rollout(adapted.served, name) for name in NAMES for _ in range(2)))
    for name, ledger in zip([each for each in NAMES for _ in range(2)], ledgers, strict=True):
        check_ledger(ledger)
        assert {turn.draft.adapter for turn in ledger} == {None if name is None else Adapter(name)}
        assert ledger[1].draft.engine.cached_tokens
        [trajectory] = ledger.trajectories
        assert {span.version for span in trajectory.versions} == {"default" if name is None else f"default+{name}"}
        assert [turn.draft.adapter for turn in from_json(to_json(ledger))] == [turn.draft.adapter for turn in ledger]
        apart = (await rescore(ledger, adapted.served.policy.backend)).differences
        assert len(apart)
        assert apart.max() < WITHIN_NATS
    for name in NAMES:
        paths = [ledger.trajectories[0] for ledger in ledgers if ledger[0].draft.adapter == (name and Adapter(name))]
        found = reference(str(adapted.weights(name)), [path.token_ids.tolist() for path in paths])
        for number, path in enumerate(paths):
            sampled = np.flatnonzero(path.loss_mask)
            expected = found[f"logprobs_{number}"][sampled - 1, path.token_ids[sampled]]
            assert np.abs(expected - path.logprobs[sampled]).max() < WITHIN_NATS, name


async def test_an_adapter_without_an_effect_is_refused_unless_it_is_fresh(adapted: Adapted) -> None:
    await adapted.admin.load_adapter("fresh", str(adapted.folder / "fresh"))
    await adapted.admin.load_adapter("fresh-2", str(adapted.folder / "fresh"))
    with pytest.raises(AdapterNotInEffectError, match="scores as the model alone does"):
        await rollout(adapted.served, "fresh")
    ledger = await rollout(adapted.served, Adapter("fresh-2", fresh=True))
    assert ledger[0].draft.adapter == Adapter("fresh-2", fresh=True)


async def test_an_unloaded_adapter_is_refused_and_its_name_is_not_used_again(adapted: Adapted) -> None:
    admin = adapted.admin
    await admin.load_adapter("gone", str(adapted.folder / "two"))
    await admin.unload_adapter("gone")
    with pytest.raises(BadRequestError, match="'gone' was used before"):
        await admin.load_adapter("gone", str(adapted.folder / "one"))
    with pytest.raises(BadRequestError, match="gone"):
        await rollout(adapted.served, "gone")
    with pytest.raises(BadRequestError):
        await admin.load_adapter("nowhere", str(adapted.folder / "nowhere"))
