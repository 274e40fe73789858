"""Routed experts on a second read: a path's rows must equal those of the same tokens in one request."""

from __future__ import annotations

import uuid

import numpy as np
from numpy.typing import NDArray

from strands_tito.conformance.laws import Tally, set_place
from strands_tito.conformance.target import ConnectedServer
from tito_core.backend import OptionalOutputs
from tito_core.backend.calls import generate
from tito_core.backend.errors import ContextLengthError
from tito_core.backend.protocol import TokenRequest
from tito_core.backend.sampling import SamplingParams
from tito_core.ledger import Ledger
from tito_core.ledger.columns import TokenIds

LAST_TOKENS = 4
"""Other tokens that replace a prompt's last one."""
MAX_CHANGED_SHARE = 0.5
"""A row may change with this share of those tokens, though they come later: a router's near-tie falls now and then."""
LEAST_SHARED = 0.5
"""Share of a row's experts that must be equal at least: a near-tie of a router exchanges one or two of them."""
MOST_CHANGED = {"float32": 0.001, "float16": 0.01}
"""Share of all experts that may be others on a second read, by the server's dtype: how often a near-tie falls."""
ALWAYS_ALLOWED = 4
"""Experts of a path that may be others, however short it is."""
OTHERWISE_CHANGED = 0.05
"""The same share for any other dtype, such as bfloat16: an allowance, since no rate of near-ties was measured."""
_MISSING = -1


async def check_causality(server: ConnectedServer, tally: Tally, prompt: TokenIds) -> None:
    """Replace a prompt's last token: only its own row may change, and must change for at least one replacement."""
    info, shape = server.policy.info, server.target.experts
    if not info.capabilities.routed_experts or (info.capabilities.expert_shape is not True and shape is None):
        return
    sampling = SamplingParams(max_new_tokens=1, temperature=1.0, top_k=1, ignore_eos=True)
    others = [token for token in dict.fromkeys(prompt.tolist()) if token != prompt[-1]][:LAST_TOKENS]
    rows = []
    for last in (int(prompt[-1]), *others):
        ids = prompt.copy()
        ids[-1] = last
        request = TokenRequest(
            ids, sampling, uuid.uuid4().hex, optional_outputs=OptionalOutputs(routed_experts=shape or True)
        )
        response = await generate(server.policy.backend, request)
        rows.append(np.sort(response.columns["routed_experts"].values[: len(ids)], -1))
    changes = np.mean([(row != rows[0]).any(axis=(1, 2)) for row in rows[1:]], axis=0)
    worst = int(np.argmax(changes[:-1]))
    problem = f"the experts of token {worst} change with a later token, number {len(prompt) - 1}."
    tally.require("routed", float(changes[worst]) <= MAX_CHANGED_SHARE, problem, len(others))
    problem = f"the experts of token {len(prompt) - 1} are the same for {len(rows)} different tokens."
    tally.require("routed", changes[-1] > 0, problem)


async def check_second_read(
    ledger: Ledger, optional_outputs: OptionalOutputs, server: ConnectedServer, tally: Tally
) -> None:
    """Send every path as one prompt, and compare its experts with the rows that arrived turn by turn."""
    if server.live_version is not None:
        tally.skip("routed", "The weights changed, and rows do not say which weights routed them.")
        return
    requested = OptionalOutputs(routed_experts=optional_outputs.routed_experts)
    sampling = SamplingParams(max_new_tokens=1, temperature=1.0, top_k=1, ignore_eos=True)
    for trajectory in ledger.trajectories:
        ids = trajectory.token_ids
        set_place(turn=trajectory.path[-1].index)
        columns = [turn.draft.extras["routed_experts"] for turn in trajectory.path if turn.draft.extras]
        by_turn = np.full((len(ids), *columns[0].shape[1:]), _MISSING, np.int64)
        for column in columns:
            by_turn[column.start : column.start + column.rows] = column.values
        try:
            request = TokenRequest(ids, sampling, uuid.uuid4().hex, optional_outputs=requested)
            response = await generate(server.policy.backend, request)
        except ContextLengthError:
            tally.skip("routed", "The path leaves no room for one more token.")
            continue
        at_once = response.columns["routed_experts"].values[: len(ids)].astype(np.int64)
        rows = slice(0, len(ids) - 1)  # the last token was not routed yet
        missing = np.flatnonzero((by_turn[rows] == _MISSING).any(axis=(1, 2)))
        problem = f"token {missing[0] if len(missing) else 0} of a path has no experts."
        tally.require("routed", by_turn.shape == at_once.shape and not len(missing), problem)
        _check_rows(by_turn[rows], at_once[rows], server, tally)


def _check_rows(by_turn: NDArray[np.int64], at_once: NDArray[np.int64], server: ConnectedServer, tally: Tally) -> None:
    """Compare the experts of each token, shape (n, layers, experts)."""
    if not len(by_turn):
        return
    ordered = np.sort(by_turn, -1)
    twice = np.flatnonzero((ordered[..., 1:] == ordered[..., :-1]).any(axis=(1, 2)))
    problem = f"token {int(twice[0]) if len(twice) else 0} of a path lists an expert twice in one layer."
    tally.require("routed", not len(twice), problem)
    shared = (by_turn[..., :, None] == at_once[..., None, :]).any(-1).mean(axis=(1, 2))
    worst = int(np.argmin(shared))
    problem = (
        f"token {worst} of {len(shared)} of a path shares {shared[worst]:.0%} of its experts with those that it has "
        f"when the path is sent as one prompt, less than {LEAST_SHARED:.0%}."
    )
    tally.require("routed", bool(shared[worst] >= LEAST_SHARED), problem, len(shared))
    changed, most = 1 - float(shared.mean()), MOST_CHANGED.get(server.dtype, OTHERWISE_CHANGED)
    problem = (
        f"{changed:.2%} of the experts of {len(shared)} tokens of a path are others when the path is sent as one "
        f"prompt, more than {most:.2%}: near-ties of a router are rarer."
    )
    tally.require("routed", changed * by_turn.size <= max(ALWAYS_ALLOWED, most * by_turn.size), problem)
