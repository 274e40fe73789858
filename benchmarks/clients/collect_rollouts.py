"""Our rollouts at once, through `collect` and without it."""

from __future__ import annotations

import asyncio
import gc
import shutil
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from strands import Agent

from conversation import CONTEXTS, serve
from crowd import agent_of, crowd, through_agent
from ours_rollouts import Seeds
from strands_tito import Policy, TITOModel
from strands_tito.collect import InProcess, collect
from tito_core.turn.history import as_stored
from tito_engines import models


class Seeded:
    """A run whose model has processed its context: every ledger has the same first turn.

    Args:
        seeds: The processed context.
        turns: Number of turns of each rollout.
        ready: Prepared agents; a run makes its own if none is left.
    """

    def __init__(self, seeds: Seeds, turns: int, ready: list[Agent]) -> None:
        self.seeds, self.turns, self.ready = seeds, turns, ready

    async def __call__(self, model: TITOModel, task: Mapping[str, Any]) -> float:
        """Run the turns."""
        seeds, ledger = self.seeds, model.ledger
        ledger.commit(seeds.draft, ledger.match(seeds.history), as_stored(seeds.messages[1]))
        prompt = model.policy.prompts.text(ledger, None, seeds.draft.prompt_ids)
        model.policy.prompts.keep(ledger, 0, None, prompt.then(seeds.draft.output_ids))
        agent = self.ready.pop() if self.ready else agent_of((model, seeds.messages), self.turns)
        agent.model = model
        await through_agent(agent, self.turns)
        return 1.0


async def collected(seeds: Seeds, rollouts: int, turns: int, *, ready: bool) -> dict[str, float]:
    """Collect rollouts into a folder, all at once; return turns per second of CPU and of wall time."""
    idle = seeds.policy.model()
    agents = [agent_of((idle, seeds.messages), turns) for _ in range(rollouts if ready else 0)]
    workers = InProcess(
        seeds.policy, Seeded(seeds, turns, agents), sampling={"max_new_tokens": 300}, verify_echo="first"
    )
    tasks = [{"prompt": f"Question {number}"} for number in range(rollouts // 4)]
    folder = Path(tempfile.mkdtemp())
    gc.collect()
    gc.freeze()
    began, spent = time.perf_counter(), time.process_time()
    tally = await collect(tasks, workers, folder, n=4, concurrency=rollouts)
    took, spent = time.perf_counter() - began, time.process_time() - spent
    gc.unfreeze()
    shutil.rmtree(folder)
    if tally.missing:
        raise RuntimeError(f"{tally.missing} rollouts are missing: {tally.last_error}")
    taken = tally.turns - tally.finished  # without the prepared first turn of each
    return {"turns_per_cpu_s": taken / spent, "turns_per_s": taken / took}


async def made(seeds: Seeds, rollouts: int, turns: int) -> dict[str, float]:
    """Run the same rollouts without `collect`: each makes its ledger, model and agent, and is dropped when it ends."""

    async def one() -> None:
        await through_agent(agent_of(seeds(), turns), turns)

    gc.collect()
    gc.freeze()
    began, spent = time.perf_counter(), time.process_time()
    await asyncio.gather(*(one() for _ in range(rollouts)))
    took, spent = time.perf_counter() - began, time.process_time() - spent
    gc.unfreeze()
    return {"turns_per_cpu_s": rollouts * turns / spent, "turns_per_s": rollouts * turns / took}


async def main(port: str) -> None:
    """Answer {"what": "crowd" | "made" | "collect", "ready": whether collect finds its agents made, ...}."""
    tokenizer = models.load_tokenizer("smollm2")
    policy = await Policy.connect_async(backend="sglang", base_url=f"http://127.0.0.1:{port}", tokenizer=tokenizer)

    async def answer(request: Any) -> Any:
        seeds = await Seeds.of(policy, CONTEXTS[request["context"]])
        if request["what"] == "crowd":
            return await crowd(seeds, "agent", request["rollouts"], request["turns"])
        if request["what"] == "made":
            return await made(seeds, request["rollouts"], request["turns"])
        return await collected(seeds, request["rollouts"], request["turns"], ready=request["ready"])

    await serve(answer)
    await policy.backend.aclose()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
