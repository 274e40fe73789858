"""Partial rollouts: change the weights during answers; the ledger records which weights sampled each token.

python examples/partial_rollouts.py --backend vllm
"""

from __future__ import annotations

import asyncio
import contextlib
from itertools import groupby

from strands import Agent
from strands.types.exceptions import MaxTokensReachedException

import at_engine
import tito_engines as engines
from strands_tito import Ledger, Policy
from strands_tito.inspect.verify import merge, rescore
from tito_core.backend import EngineAdmin
from tito_core.ledger import check_ledger
from tito_engines import install, models

TOPICS = ["the sea", "an old clock", "winter", "a lost letter"]


async def run_rollout(policy: Policy, topic: str) -> Ledger:
    """Tell a long story. An aborted turn resumes after its last token (`on_abort="resume"`, the default)."""
    model = policy.model(sampling={"temperature": 1.0, "max_new_tokens": 400, "ignore_eos": True})
    with contextlib.suppress(MaxTokensReachedException):  # expected: the story reaches max_new_tokens
        await Agent(model=model, callback_handler=None).invoke_async(f"Tell me a long story about {topic}.")
    return model.ledger


async def update_weights(policy: Policy, folder: str, version: str) -> None:
    """Do as a trainer does: abort running requests, load the weights under a new version, and resume."""
    admin = policy.backend
    assert isinstance(admin, EngineAdmin), f"{policy.info.backend} cannot change its server's weights"
    await admin.load_weights(folder, version, running="abort")


async def main(policy: Policy, folder: str = "", seconds: float = 3.0) -> list[Ledger]:
    """Change the weights under running agents. The new weights equal the old ones, so that re-scoring can check all."""
    python = install.ensure(engines.find(policy.info.backend)).python
    folder = folder or str(models.ensure("smollm2", python))
    rollouts = [asyncio.ensure_future(run_rollout(policy, topic)) for topic in TOPICS]
    await asyncio.sleep(seconds)
    await update_weights(policy, folder, "step-1")
    ledgers = await asyncio.gather(*rollouts)
    for topic, ledger in zip(TOPICS, ledgers, strict=True):
        check_ledger(ledger)
        spans = [span for trajectory in ledger.trajectories for span in trajectory.versions]
        parts = [(version, sum(s.stop - s.start for s in run)) for version, run in groupby(spans, lambda s: s.version)]
        print(f"{topic:14} " + ", then ".join(f"{tokens} tokens by {version!r}" for version, tokens in parts))
    rescored = merge([await rescore(ledger, policy.backend) for ledger in ledgers])
    print(f"re-scored {len(rescored.differences)} tokens: at most {rescored.quantile(1):.1e} nats apart")
    return list(ledgers)


if __name__ == "__main__":
    at_engine.run(main, __doc__)
