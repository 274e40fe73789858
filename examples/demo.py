"""Run an agent with a tool on an engine, and let the engine re-score every token of the rollouts.

python examples/demo.py --backend vllm
python examples/demo.py --backend sglang
python examples/demo.py --backend vllm --base-url http://localhost:8000 --tokenizer Qwen/Qwen3-4B
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import sys
import time
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from strands.types.exceptions import MaxTokensReachedException

from calculator import QUESTIONS, make_agent
from strands_tito import Policy, engines
from strands_tito.engines import models
from strands_tito.inspect import summary as report
from tito_core import store

console = Console(width=None if sys.stdout.isatty() else 118)


async def rollout(
    policy: Policy, question: str, sampling: dict[str, float], slots: asyncio.Semaphore
) -> report.Rollout:
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
    sampling = {"temperature": arguments.temperature, "max_new_tokens": arguments.max_new_tokens}
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
    path = Path(arguments.out) / f"demo-{policy.info.backend}-{time.strftime('%Y%m%d-%H%M%S')}.tito"
    path.parent.mkdir(parents=True, exist_ok=True)
    store.append(path, [done.ledger for done in rollouts])
    console.print(f"Rollouts written to [bold]{path}[/]; read them with tito_core.store.read({str(path)!r}).")


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", default="vllm", help="vllm, sglang or another installed backend")
    parser.add_argument("--model", default="smollm2", help="model that a local engine runs")
    parser.add_argument("--base-url", default="", help="address of a running server; default: start one here")
    parser.add_argument("--tokenizer", default="", help="tokenizer of that server's model; default: --model's")
    parser.add_argument("--torch-index", default=None, help="package index with CPU builds of torch, if pip needs one")
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--concurrency", type=int, default=12)
    parser.add_argument("--out", default="runs")
    return parser.parse_args()


def main() -> int:
    """Start the engine if necessary, run and report. Expected errors are printed without a traceback."""
    # Strands logs an error for each malformed call, because no tool has its name; the table counts them.
    logging.getLogger("strands.tools").setLevel(logging.CRITICAL)
    arguments = parse_arguments()
    try:
        with contextlib.ExitStack() as stack:
            url = arguments.base_url
            if not url:
                show_progress = stack.enter_context(engines.on_console())
                options = {"model": arguments.model, "torch_index": arguments.torch_index, "on_progress": show_progress}
                url = stack.enter_context(engines.running_sync(arguments.backend, **options))
            tokenizer = arguments.tokenizer or models.load_tokenizer(arguments.model)
            policy = Policy.connect(backend=arguments.backend, base_url=url, tokenizer=tokenizer)
            asyncio.run(run(policy, arguments))
    except report.EXPECTED_ERRORS as error:
        console.print(f"[red]{type(error).__name__}[/]: {error}", highlight=False, markup=True)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
