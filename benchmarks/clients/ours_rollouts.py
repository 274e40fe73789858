"""Our rollouts at once; the cost of Strands' own loop per turn; the memory of an idle rollout."""

from __future__ import annotations

import asyncio
import gc
import sys
import tracemalloc
from typing import Any

from strands.models.model import Model

from conversation import CONTEXTS, SYSTEM, message_of, opening, result, serve, turn
from crowd import SPECS, Seeded, agent_of, crowd, through_agent
from strands_tito import Policy
from tito_core.policy import PathText
from tito_core.turn.history import as_stored, opening_of
from tito_engines import models


class Canned(Model):
    """A model with a prepared answer."""

    def __init__(self, events: list[Any]) -> None:
        self.events = events

    def update_config(self, **_: Any) -> None:
        """Do nothing."""

    def get_config(self) -> dict[str, Any]:
        """Return no configuration."""
        return {}

    async def structured_output(self, *_: Any, **__: Any) -> Any:
        """Not used."""
        raise NotImplementedError
        yield

    async def stream(self, *_: Any, **__: Any) -> Any:
        """Yield the prepared answer."""
        for event in self.events:
            yield event


class Seeds:
    """Rollouts with a processed context: the first one asks the server, the others get the same first turn."""

    def __init__(self, policy: Policy, model: Any, messages: list[Any]) -> None:
        self.policy, self.messages = policy, messages
        self.draft = model.ledger[0].draft
        self.history = [opening_of(SYSTEM, SPECS, policy.template.fingerprint), messages[0]]

    @classmethod
    async def of(cls, policy: Policy, tokens: int) -> Seeds:
        """Process a context."""
        model, messages = policy.model(sampling={"max_new_tokens": 300}), opening(tokens)
        await turn(model, messages, SPECS)
        return cls(policy, model, messages)

    def __call__(self) -> Seeded:
        """Return a rollout."""
        ledger = self.policy.ledger()
        ledger.commit(self.draft, ledger.match(self.history), as_stored(self.messages[1]))
        model = self.policy.model(ledger=ledger, sampling={"max_new_tokens": 300}, verify_echo="first")
        prompt = self.policy._prompts.text(ledger, None, self.draft.prompt_ids)
        self.policy._prompts.keep(ledger, 0, None, PathText(prompt.then(self.draft.output_ids)))
        return model, self.messages


def canned(tokens: int) -> Seeded:
    """Return a rollout with a number of context tokens, whose model has no cost."""
    call = {"toolUseId": "call_1", "name": "look"}
    events: list[Any] = [
        {"messageStart": {"role": "assistant"}},
        {"contentBlockStart": {"start": {}}},
        {"contentBlockDelta": {"delta": {"text": "word " * 280}}},
        {"contentBlockStop": {}},
        {"contentBlockStart": {"start": {"toolUse": call}}},
        {"contentBlockDelta": {"delta": {"toolUse": {"input": '{"n": 17}'}}}},
        {"contentBlockStop": {}},
        {"messageStop": {"stopReason": "tool_use"}},
    ]
    history, answer = opening(tokens), message_of(events)
    return Canned(events), [*history, answer, result(answer)]


async def memory(seeds: Seeds, rollouts: int, turns: int) -> dict[str, float]:
    """Return the bytes of an idle rollout with its agent, and how many of them are tokens and request body."""
    gc.collect()
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    agents = [agent_of(seeds(), turns) for _ in range(rollouts)]
    for agent in agents:
        await through_agent(agent, turns)
    gc.collect()
    held = (tracemalloc.get_traced_memory()[0] - before) / rollouts
    tracemalloc.stop()
    model: Any = agents[0].model
    ledger = model.ledger
    # The first turn's columns are shared with the rollout that asked the server.
    tokens = sum(len(turn.draft.columns.buffer) for turn in list(ledger)[1:])
    kept = model.policy._prompts.text(ledger, len(ledger) - 1, ledger[0].draft.prompt_ids[:0])
    sent = kept.body({"n": 1}, "input_ids")
    body = len(sent) if isinstance(sent, bytes) else sum(map(len, sent))
    return {"held": held, "tokens": tokens, "body": body, "idle": held - tokens - body}


async def main(port: str) -> None:
    """Answer {"what": "crowd" | "strands" | "memory", ...}."""
    tokenizer = models.load_tokenizer("smollm2")
    policy = await Policy.connect_async(backend="sglang", base_url=f"http://127.0.0.1:{port}", tokenizer=tokenizer)

    async def answer(request: Any) -> Any:
        if request["what"] == "strands":
            seeded = canned(CONTEXTS[request["context"]])
            return await crowd(lambda: seeded, "agent", request["rollouts"], request["turns"])
        seeds = await Seeds.of(policy, CONTEXTS[request["context"]])
        if request["what"] == "memory":
            return await memory(seeds, request["rollouts"], request["turns"])
        return await crowd(seeds, request["way"], request["rollouts"], request["turns"])

    await serve(answer)
    await policy.backend.aclose()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
