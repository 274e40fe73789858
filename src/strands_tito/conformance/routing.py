"""Routed experts, asked for a second time: the rows of a path are those of the same tokens read at once."""

from __future__ import annotations

import uuid

import numpy as np

from strands_tito.conformance.laws import Tally
from strands_tito.conformance.target import Connected
from tito_core.backend import OptionalOutputs
from tito_core.backend.checked import generate
from tito_core.backend.errors import ContextLengthError
from tito_core.backend.protocol import TokenRequest
from tito_core.backend.sampling import SamplingParams
from tito_core.ledger import Ledger
from tito_core.ledger.columns import TokenIds

OTHERS = 4
"""Tokens that come last in one prompt."""
MOST_CHANGES = 0.5
"""Share of those tokens with which a row may change that is not theirs: a router's near-tie falls now and then."""
LEAST_EQUAL = 0.95
"""Share of rows that must be equal: a router's near-ties fall otherwise where kernels change with the batch."""
_NONE = -1


async def causal(connected: Connected, tally: Tally, prompt: TokenIds) -> None:
    """Change the last token of a prompt: its row alone may change, and does for one token or another."""
    info, shape = connected.policy.info, connected.target.experts
    if not info.capabilities.routed_experts or (info.capabilities.expert_shape is not True and shape is None):
        return
    sampling = SamplingParams(max_new_tokens=1, temperature=1.0, top_k=1, ignore_eos=True)
    others = [token for token in dict.fromkeys(prompt.tolist()) if token != prompt[-1]][:OTHERS]
    rows = []
    for last in (int(prompt[-1]), *others):
        ids = prompt.copy()
        ids[-1] = last
        request = TokenRequest(
            ids, sampling, uuid.uuid4().hex, optional_outputs=OptionalOutputs(routed_experts=shape or True)
        )
        response = await generate(connected.policy.backend, request)
        rows.append(np.sort(response.columns["routed_experts"].values[: len(ids)], -1))
    changes = np.mean([(row != rows[0]).any(axis=(1, 2)) for row in rows[1:]], axis=0)
    worst = int(np.argmax(changes[:-1]))
    problem = f"the experts of token {worst} change with a token that comes after it, number {len(prompt) - 1}."
    tally.hold("routed", float(changes[worst]) <= MOST_CHANGES, problem, len(others))
    problem = f"the experts of token {len(prompt) - 1} are the same for {len(rows)} tokens in its place."
    tally.hold("routed", changes[-1] > 0, problem)


async def again(ledger: Ledger, optional_outputs: OptionalOutputs, connected: Connected, tally: Tally) -> None:
    """Let the server read every path at once, and compare its experts with those that came turn after turn."""
    if connected.live is not None:
        tally.skip("routed", "Other weights may route otherwise, and no row says which weights it is of.")
        return
    asked = OptionalOutputs(routed_experts=optional_outputs.routed_experts)
    sampling = SamplingParams(max_new_tokens=1, temperature=1.0, top_k=1, ignore_eos=True)
    for trajectory in ledger.trajectories():
        ids = trajectory.token_ids
        columns = [turn.draft.extras["routed_experts"] for turn in trajectory.path if turn.draft.extras]
        said = np.full((len(ids), *columns[0].shape[1:]), _NONE, np.int64)
        for column in columns:
            said[column.start : column.start + column.rows] = column.values
        try:
            request = TokenRequest(ids, sampling, uuid.uuid4().hex, optional_outputs=asked)
            response = await generate(connected.policy.backend, request)
        except ContextLengthError:
            tally.skip("routed", "The path leaves no room for one token more.")
            continue
        whole = response.columns["routed_experts"].values[: len(ids)]
        rows = slice(0, len(ids) - 1)  # the last token was routed nowhere by then
        missing = np.flatnonzero((said[rows] == _NONE).any(axis=(1, 2)))
        problem = f"token {missing[0] if len(missing) else 0} of a path has no experts."
        tally.hold("routed", said.shape == whole.shape and not len(missing), problem)
        equal = (np.sort(said[rows], -1) == np.sort(whole[rows], -1)).all(axis=(1, 2))
        problem = (
            f"{np.count_nonzero(~equal)} of {len(equal)} tokens of a path have other experts, the first at "
            f"{int(np.argmin(equal)) if len(equal) else 0}, than when the server reads it at once."
        )
        tally.hold("routed", bool(equal.mean() >= LEAST_EQUAL) if len(equal) else True, problem, len(equal))
