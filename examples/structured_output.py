"""Structured output: the engine holds the answer to a schema, and the mask leaves out what it forced.

python examples/structured_output.py --backend vllm
"""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, Field
from strands import Agent

import at_engine
from tito_core import Ledger, Policy, Provenance
from tito_core.ledger import check_ledger


class Ticket(BaseModel):
    """What a support request is about."""

    topic: Literal["billing", "delivery", "other"]
    urgency: int = Field(ge=1, le=5)


REQUEST = "My parcel is two weeks late and the party is tomorrow!"


async def main(policy: Policy) -> Ledger:
    """Ask for a ticket: a forced call of a tool that Strands makes of the schema."""
    model = policy.model(sampling={"temperature": 0.0, "max_new_tokens": 96})
    agent = Agent(model=model, system_prompt="You sort support requests.", callback_handler=None)
    result = await agent.invoke_async(REQUEST, structured_output_model=Ticket, limits={"turns": 4})
    print(repr(result.structured_output))
    check_ledger(model.ledger)
    for trajectory in model.trajectories:
        counts = {kind.name: trajectory.count(kind) for kind in Provenance if trajectory.count(kind)}
        print(f"{len(trajectory)} tokens: {counts}; mask 1 on {trajectory.loss_mask.sum()}")
    # Under a grammar no token is quite the policy's own choice, so none of them is trained unless you say so.
    trained = sum(int(t.loss_mask.sum()) for t in model.ledger.trajectories(train_constrained=True))
    print(f"with train_constrained=True mask 1 on {trained}")
    return model.ledger


if __name__ == "__main__":
    at_engine.run(main, __doc__)
