"""Run an agent that looks at pictures on an engine, and let the engine score again what it sampled.

A model with random weights calls no tool by itself, so the calls are forced, except with --free. A score has no
grammar: the tokens of forced calls are not compared.

python examples/demo_images.py --backend vllm
python examples/demo_images.py --backend sglang
python examples/demo_images.py --backend vllm --base-url http://host:8000 --tokenizer Qwen/Qwen3-VL-4B-Instruct --free
"""

from __future__ import annotations

import argparse
import asyncio
import time

from strands.types.exceptions import MaxTokensReachedException

import at_engine
from at_engine import console
from shapes import AGAIN, QUESTIONS, DrawsFirst, make_agent
from strands_tito import Policy, TITOModel
from strands_tito.inspect import show as report


async def rollout(policy: Policy, question: str, arguments: argparse.Namespace) -> report.Rollout:
    """Ask for two pictures; return the last answer and the rollout's ledger."""
    kind = TITOModel if arguments.free else DrawsFirst
    model = kind.of(policy, sampling={"max_new_tokens": arguments.max_new_tokens, "temperature": 1.0})
    agent = make_agent(model)
    answer = ""
    for text in (question, AGAIN):
        try:
            answer = str(await agent.invoke_async(text, limits={"turns": 4})).strip()
        except MaxTokensReachedException:  # the answer is cut; its tokens are recorded
            answer = "".join(block.get("text", "") for block in agent.messages[-1]["content"])
    return report.Rollout(question, answer, "", model.ledger)


async def run(policy: Policy, arguments: argparse.Namespace) -> None:
    """Run all rollouts at once, then print the report and write the ledgers."""
    started = time.perf_counter()
    rollouts = await asyncio.gather(*(rollout(policy, question, arguments) for question in QUESTIONS))
    await report.show(console, policy, list(rollouts), time.perf_counter() - started)
    ledgers = [done.ledger for done in rollouts]
    spans = [span for ledger in ledgers for turn in ledger for span in turn.draft.media]
    tokens, held = sum(span.length for span in spans), [image for ledger in ledgers for image in ledger.images.values()]
    console.print(
        f"pictures    {len(spans)} of {tokens} tokens in all, {sum(len(image.data) for image in held):,} bytes in the "
        "ledgers",
        highlight=False,
    )
    at_engine.write(ledgers, arguments.out, f"demo-images-{policy.info.backend}")


def main() -> None:
    """Start the engine if necessary, run and report. Expected errors are printed without a traceback."""
    parser = at_engine.options(__doc__, model="qwen3-vl-tiny")
    parser.add_argument("--free", action="store_true", help="let the model decide whether it calls the tool")
    parser.add_argument("--max-new-tokens", type=int, default=96)
    parser.add_argument("--out", default="runs")
    at_engine.run_parsed(run, parser)


if __name__ == "__main__":
    main()
