"""The same task, solved by a harness that knows nothing of Strands: a loop around OpenAI's responses."""

from __future__ import annotations

import json
from typing import Any

import aiohttp

from calculator_agent import Agents, calculator, question_of, scores_of
from strands_tito import TITOModel
from strands_tito.gateway import HarnessAgent

SPEC = calculator.tool_spec
TOOL = {"name": SPEC["name"], "description": SPEC["description"], "parameters": SPEC["inputSchema"]["json"]}


async def harness(url: str, question: str, rounds: int) -> tuple[str, list[str]]:
    """Solve a problem at an address of OpenAI's API; return the last answer, and the tool's results."""
    items: list[dict[str, Any]] = [{"role": "user", "content": question}]
    body = {"model": "any", "input": items, "tools": [{"type": "function", **TOOL}]}
    results: list[str] = []
    async with aiohttp.ClientSession() as session:
        for _ in range(rounds):
            async with session.post(f"{url}/v1/responses", json=body) as reply:
                reply.raise_for_status()
                output = (await reply.json())["output"]
            items += output
            calls = [item for item in output if item["type"] == "function_call"]
            if not calls:
                break
            for call in calls:
                results.append(_computed(call["arguments"]))
                items.append({"type": "function_call_output", "call_id": call["call_id"], "output": results[-1]})
    texts = [part["text"] for item in output if item["type"] == "message" for part in item["content"]]
    return "".join(texts), results


def _computed(arguments: str) -> str:
    try:
        return str(calculator(**json.loads(arguments)))
    except (TypeError, ValueError) as error:
        return f"Error: {error}"


class HarnessAgents(Agents):
    """Makes what TRL's loop takes for agents; their harness's requests are turns of the rollouts' ledgers."""

    def make(self, model: TITOModel, row: Any) -> Any:
        """Make the one of a rollout, which records its two scores in the ledger; `row` is the prompt."""
        self.ledgers[model.ledger.uuid] = model.ledger

        async def run(url: str, prompt: Any) -> None:
            answer, results = await harness(url, question_of(row), self.operations + 1)
            status = ("error" if text.startswith("Error") else "success" for text in results)
            shown: Any = [
                {"toolResult": {"toolUseId": "x", "status": each, "content": [{"text": text}]}}
                for each, text in zip(status, results, strict=True)
            ]
            messages: Any = [{"role": "user", "content": shown}, {"role": "assistant", "content": [{"text": answer}]}]
            right, used = scores_of(messages, self.answers[question_of(row)])
            model.ledger.annotate("reward", right)
            model.ledger.annotate("tool_use", used)

        return HarnessAgent(model, run)
