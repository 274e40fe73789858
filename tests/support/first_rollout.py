"""Run a rollout on both scripted servers; without extras, also see that each missing one is named.

python first_rollout.py "with extras"
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from importlib import import_module
from typing import Any

from strands import Agent, tool

from strands_tito import Policy, export
from strands_tito.collect.on_ray import Connection, OnRay
from strands_tito.export import agent_lightning, hf, parquet, skyrl, tinker, verifiers, verl
from strands_tito.export.batch import padded
from strands_tito.inspect.template_check import RendererComparison
from tito_conformance.testing import scripted_server
from tito_conformance.testing.script import Completion, PositionScorer, ScriptedRequest
from tito_core.chat.images import read_image
from tito_core.ledger import Ledger, check_ledger
from tito_engines import bring_up, models

CALL = '<tool_call>\n{"name": "multiply", "arguments": {"a": 25, "b": 17}}\n</tool_call>'


@tool
def multiply(a: int, b: int) -> int:
    """Multiply two numbers.

    Args:
        a: The first.
        b: The second.
    """
    return a * b


class Answers(PositionScorer):
    """Calls the tool when it is asked, then answers; anything else are requests of the connection."""

    def __init__(self, tokenizer: Any) -> None:
        self.turns = {
            len(ids): ids
            for ids in ([*tokenizer.encode(text, add_special_tokens=False), tokenizer.eos_token_id] for text in TEXTS)
        }
        self._asked, self._result = (tokenizer.encode(text, add_special_tokens=False) for text in ("multiply", "425"))

    def __call__(self, request: ScriptedRequest) -> Completion:
        """Return the answer to a request."""
        call, answer = self.turns.values()
        if _holds(request.prompt_ids, self._result):
            return Completion(answer)
        if _holds(request.prompt_ids, self._asked):
            return Completion(call)
        return Completion([5] * request.max_new_tokens, finish="length")


TEXTS = (CALL, "It is 425.")


def _holds(ids: Any, part: list[int]) -> bool:
    return any(list(ids[at : at + len(part)]) == part for at in range(len(ids)))


def main(extras: str) -> None:
    """Run everything, and print one line."""
    tokenizer = models.load_tokenizer("smollm2")
    for engine in ("vllm", "sglang"):
        answers, eos = Answers(tokenizer), tokenizer.eos_token_id
        with scripted_server(engine, answers, vocab_size=len(tokenizer), eos_ids=[eos]) as server:
            policy = Policy.connect(backend=engine, base_url=server.base_url, tokenizer=tokenizer)
            model = policy.model(sampling={"max_new_tokens": 64})
            Agent(model=model, tools=[multiply], callback_handler=None)("What is 25 * 17?")
            check_ledger(model.ledger)
            sampled = [list(turn.draft.output_ids) for turn in model.ledger]
            assert sampled == list(answers.turns.values()), sampled
            assert model.trajectory.loss_mask.astype(int).sum() == sum(answers.turns), model.trajectory
    print("rollouts on both engines", end="")
    if extras == "without extras":
        print(f", the errors of {missing(model.ledger, policy)} missing extras", end="")
    print()


def missing(ledger: Ledger, policy: Policy) -> int:
    """Return the number of extras, each of which the error names that comes where it is missing.

    Raises:
        AssertionError: There is no error, or another one.
    """
    sample = export.sample_of(ledger)
    exported: dict[str, Any] = {"temperature": 1.0}
    calls: dict[str, Callable[[], object]] = {
        "engines": lambda: bring_up("vllm"),
        "images": lambda: read_image({"format": "png", "source": {"bytes": b"x"}}),
        "torch": lambda: padded([sample], pad_id=0).torch(),
        "parquet": lambda: parquet.table_of([sample]),
        "datasets": lambda: hf.dataset_of([sample]),
        "tinker": lambda: tinker.datum_of(sample, advantage=1.0),
        "skyrl": lambda: skyrl.generator_output_of([ledger], end_id=0, **exported),
        "verl": lambda: verl.output_of(ledger, end_id=0, **exported),
        "agentlightning": lambda: agent_lightning.events_of(ledger, **exported),
        "verifiers": lambda: verifiers.trace_of(ledger, decode=policy.tokenizer.decode, **exported),
        "renderers": lambda: RendererComparison.of("qwen3", policy.tokenizer, policy.template),
        "ray": lambda: asyncio.run(OnRay.start("local", Connection("vllm", "", ""), "agent:make")),
        "conformance": lambda: import_module("tito_conformance.testing.strategies"),
    }
    for extra, uses in calls.items():
        try:
            uses()
        except Exception as error:
            if f"[{extra}]" not in str(error):
                raise AssertionError(f"The error of a missing {extra!r} does not name it.") from error
        else:
            raise AssertionError(f"{extra} is not missing.")
    return len(calls)


if __name__ == "__main__":
    main(sys.argv[1])
