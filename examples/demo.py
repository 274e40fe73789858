"""Run an agent with a tool on an engine, and let the engine re-score every token of the rollouts.

python examples/demo.py --backend vllm
python examples/demo.py --backend sglang
python examples/demo.py --backend vllm --base-url http://localhost:8000 --tokenizer Qwen/Qwen3-4B
"""

from __future__ import annotations

import argparse
import asyncio
import time

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from strands.types.exceptions import MaxTokensReachedException

import at_engine
from at_engine import console
from calculator import QUESTIONS, make_agent
from strands_tito import Policy, SamplingParams
from strands_tito.inspect import show as report


async def rollout(policy: Policy, question: str, sampling: SamplingParams, slots: asyncio.Semaphore) -> report.Rollout:
    """Ask one question; return the answer and the rollout's ledger."""
    async with slots:
        model = policy.model(sampling=sampling)
        agent = make_agent(model)
        try:
            result = await agent.invoke_async(question, limits={"turns": 6})
            return report.Rollout(question, str(result).strip(), str(result.stop_reason), model.ledger)
        except MaxTokensReachedException:
            return report.Rollout(question, "", "max_tokens", model.ledger)


async def run(policy: Policy, arguments: argparse.Namespace) -> None:
    """Run all rollouts, several at once, then print the report and write the ledgers."""
    sampling = SamplingParams(temperature=arguments.temperature, max_new_tokens=arguments.max_new_tokens)
    slots = asyncio.Semaphore(arguments.concurrency)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    started = time.perf_counter()
    with Progress(*columns, console=console) as progress:
        bar = progress.add_task("rollouts", total=len(QUESTIONS))

        async def counted(question: str) -> report.Rollout:
            done = await rollout(policy, question, sampling, slots)
            progress.advance(bar)
            return done

        rollouts = await asyncio.gather(*map(counted, QUESTIONS))
    seconds = time.perf_counter() - started
    await report.show(console, policy, rollouts, seconds)
    at_engine.write([done.ledger for done in rollouts], arguments.out, f"demo-{policy.info.backend}")


def main() -> None:
    """Start the engine if necessary, run and report. Expected errors are printed without a traceback."""
    parser = at_engine.options(__doc__)
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--concurrency", type=int, default=12)
    parser.add_argument("--out", default="runs")
    at_engine.run_parsed(run, parser)


if __name__ == "__main__":
    main()
