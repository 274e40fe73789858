"""Our rollouts at once, through `collect` and without it."""

from __future__ import annotations

import asyncio
import gc
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from strands import Agent

from conversation import CONTEXTS, SYSTEM, serve
from crowd import agent_of, crowd, looking, through_agent
from ours_rollouts import Seeds
from strands_tito import Policy, TITOModel
from strands_tito.collect import Connection, InProcess, Processes, collect
from tito_core.policy import PathText
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
        prompt = model.policy._prompts.text(ledger, None, seeds.draft.prompt_ids)
        model.policy._prompts.keep(ledger, 0, None, PathText(prompt.then(seeds.draft.output_ids)))
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


async def fresh(model: TITOModel, task: Mapping[str, Any]) -> float:
    """Run an agent's turns, from a prompt of 2,000 tokens."""
    tools = [looking(task["turns"])]
    agent = Agent(
        model=model, tools=tools, system_prompt=SYSTEM, callback_handler=None, load_tools_from_directory=False
    )
    await agent.invoke_async("word " * 2_000)
    return 1.0


async def in_processes(port: str, workers: int, rollouts: int, turns: int) -> dict[str, float]:
    """Collect in this process (0) or in others; return the CPU milliseconds of a rollout, here and in all processes."""
    connection = Connection("sglang", f"http://127.0.0.1:{port}", str(models.ensure_tokenizer("smollm2")))
    options: Any = {"sampling": {"max_new_tokens": 300}, "verify_echo": "first"}
    pool: InProcess | Processes
    if workers:
        here = Path(__file__).parent
        pool = await Processes.start(connection, "collect_rollouts:fresh", workers=workers, folder=here, **options)
    else:
        pool = InProcess(await connection.connect(), fresh, **options)
    tasks, folder = [{"turns": turns} for _ in range(rollouts)], Path(tempfile.mkdtemp())
    await collect(tasks[: max(1, rollouts // 4)], pool, folder, concurrency=rollouts)  # warm-up
    gc.collect()
    spent, others, began = time.process_time(), others_cpu_s(), time.perf_counter()
    tally = await collect(tasks, pool, folder, n=2, concurrency=rollouts)
    spent, others, took = time.process_time() - spent, others_cpu_s() - others, time.perf_counter() - began
    await pool.aclose()
    shutil.rmtree(folder)
    if tally.missing:
        raise RuntimeError(f"{tally.missing} rollouts are missing: {tally.last_error}")
    per = 1e3 / tally.finished
    return {"here_ms": spent * per, "all_ms": (spent + others) * per, "rollouts_per_s": tally.finished / took}


def others_cpu_s() -> float:
    """Return the CPU seconds of this process's running children (Linux)."""
    stats = (path.read_text().rpartition(")")[2].split() for path in Path("/proc").glob("[0-9]*/stat"))
    ticks = sum(int(fields[11]) + int(fields[12]) for fields in stats if int(fields[1]) == os.getpid())
    return ticks / os.sysconf("SC_CLK_TCK")


async def main(port: str) -> None:
    """Answer {"what": "crowd" | "made" | "collect" | "workers", "ready": whether collect finds agents made, ...}."""
    tokenizer = models.load_tokenizer("smollm2")
    policy = await Policy.connect_async(backend="sglang", base_url=f"http://127.0.0.1:{port}", tokenizer=tokenizer)

    async def answer(request: Any) -> Any:
        if request["what"] == "workers":
            return await in_processes(port, request["workers"], request["rollouts"], request["turns"])
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
