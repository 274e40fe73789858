"""Structured output: a grammar forces the answer into a schema, and the loss mask excludes the forced tokens.

python examples/structured_output.py --backend vllm
"""

from __future__ import annotations

from pydantic import BaseModel, Field

import at_engine
from calculator import make_agent
from strands_tito import Ledger, Policy, Provenance
from tito_core.ledger import check_ledger


class Sum(BaseModel):
    """The sum."""

    total: int = Field(ge=0, le=1000)


async def main(policy: Policy) -> Ledger:
    """Run an agent, then force its answer into the schema, which Strands does with a forced tool call."""
    model = policy.model(sampling={"temperature": 0.0, "max_new_tokens": 96})
    result = await make_agent(model).invoke_async("What is 2 + 3?", structured_output_model=Sum, limits={"turns": 4})
    print(repr(result.structured_output))
    check_ledger(model.ledger)
    for trajectory in model.trajectories:
        counts = {kind.name: trajectory.count(kind) for kind in Provenance if trajectory.count(kind)}
        print(f"{len(trajectory)} tokens: {counts}; mask 1 on {trajectory.loss_mask.sum()}")
    # A grammar changes the distribution of every token, so these tokens are trained only on request.
    trained = sum(int(t.loss_mask.sum()) for t in model.ledger.trajectories(train_constrained=True))
    print(f"with train_constrained=True mask 1 on {trained}")
    return model.ledger


if __name__ == "__main__":
    at_engine.run(main, __doc__)
