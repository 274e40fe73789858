"""Weight updates while the policy answers, on a server whose owner allows them: law 10 on each token."""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from strands_tito.conformance.agents import SimulatedAgent
from strands_tito.conformance.laws import Tally, set_place
from strands_tito.conformance.target import ConnectedServer, can_stream
from strands_tito.testing import moves as m
from tito_core.backend import EngineAdmin
from tito_core.backend.calls import generate, score
from tito_core.backend.errors import BackendError, WeightsNotLoadedError
from tito_core.backend.protocol import TokenChunk, TokenRequest, TokenResponse
from tito_core.backend.sampling import SamplingParams
from tito_core.backend.semantics import semantics_of
from tito_core.ledger import VersionSpan

if TYPE_CHECKING:
    from strands_tito.conformance.player import Player

TOKENS = 160
"""Length of an answer during which the weights change, in tokens."""
LONGER = (4 * TOKENS, 10 * TOKENS)
"""Lengths of further tries, for servers that send an answer in one burst, before the weights could change."""
MIN_TOKENS_BEFORE = 4
"""Tokens that arrive before the weights change."""
TRANSFER_S = 0.2
"""Tokens that arrive later than this after the update were sampled after it, in seconds."""


NO_VERSION = "The server reports no version with an answer."


async def play_reload(player: Player, agent: SimulatedAgent, move: m.Reload) -> None:
    """Change the weights during an agent's answer and a watched one."""
    agent.add_input(move.text)
    player.set_sampling(max_new_tokens=TOKENS, ignore_eos=True)
    turn = asyncio.create_task(player.run_turn(agent))
    try:
        player.abandoned += await update_weights(player.server, player.tally)
    finally:
        await asyncio.wait([turn])
    turn.result()


@dataclass
class WeightUpdate:
    """One weight update during an answer.

    Attributes:
        old: The version before; None if the server never reported one.
        new: The version after.
        before: Tokens of the answer that had arrived when the update was requested.
        after: Tokens that had arrived when the update was done, those in transfer included.
        finished: Whether the answer was complete before the update was requested.
    """

    old: str | None
    new: str
    before: int = 0
    after: int = 0
    finished: bool = False


class _ChunkCounter:
    """Counts the tokens of an answer's chunks."""

    def __init__(self) -> None:
        self.tokens = 0
        self.enough = asyncio.Event()

    def __call__(self, chunk: TokenChunk) -> None:
        self.tokens += len(chunk.output_ids)
        if self.tokens >= MIN_TOKENS_BEFORE:
            self.enough.set()


async def update_weights(server: ConnectedServer, tally: Tally) -> int:
    """Change the weights during a streamed answer, and check the answer's version spans.

    Returns:
        Number of answers that were requested, which belong to no agent.
    """
    backend, weights = server.backend, server.target.weights
    if weights is None:
        return 0
    if not isinstance(backend, EngineAdmin) or not can_stream(backend):
        tally.skip("changed", f"The backend {server.target.backend} cannot change weights.")
        return 0
    answers = 0
    for tokens in (TOKENS, *LONGER):
        sampling = server.sampling(max_new_tokens=tokens, ignore_eos=True)
        prompt = server.policy.template.first_prompt(
            [{"role": "user", "content": [{"text": "Go on and on."}]}], None, None
        ).ids
        counter, answers = _ChunkCounter(), answers + 1
        request = TokenRequest(prompt, sampling, uuid.uuid4().hex)
        set_place(turn=None, sampling={"max_new_tokens": tokens, "ignore_eos": True}, streamed=True)
        answer = asyncio.create_task(generate(server.policy.backend, request, counter))
        waiting = asyncio.create_task(counter.enough.wait())
        await asyncio.wait([answer, waiting], return_when=asyncio.FIRST_COMPLETED)
        waiting.cancel()
        if not answer.done():
            break
    server.weight_updates += 1
    update = WeightUpdate(
        server.live_version, f"tito-{server.weight_updates}", before=counter.tokens, finished=answer.done()
    )
    await _load(backend, weights, update.new, images=server.policy.info.images.accepted)
    server.live_version = update.new
    await asyncio.sleep(TRANSFER_S)
    update.after = counter.tokens
    response = await answer
    if [span.version for span in response.versions] == [None]:
        server.live_version, server.reports_versions = None, False
        tally.skip("changed", NO_VERSION)
        tally.skip("live", NO_VERSION)
        return answers
    check_spans(update, response, tally)
    ids = [*prompt.tolist(), *response.output_ids.tolist()]
    await _check_scores(server, tally, update, response, ids, sampling)
    return answers


async def _load(backend: EngineAdmin, weights: str, version: str, *, images: bool) -> None:
    """Load weights. Whether a server that takes images kept old features of them, `check_after_update` finds out."""
    more: dict[str, Any] = {"images_uncached": True} if images else {}  # other backends may lack the option
    try:
        await backend.load_weights(weights, version, **more)
    except WeightsNotLoadedError:
        with contextlib.suppress(BackendError):
            await backend.resume()  # other clients' requests may be waiting
        raise


def check_spans(update: WeightUpdate, response: TokenResponse, tally: Tally) -> None:
    """Compare an answer's version spans with the number of tokens before and after the update."""
    versions = [span.version for span in response.versions]
    if update.finished:
        tally.skip("changed", "The answer was complete before the weights changed.")
        return
    old, n = update.old, len(response.output_ids)
    problem = (
        f"weights {old!r} became {update.new!r} after {update.before} to {update.after} of {n} tokens, but the answer "
        f"reports {[tuple(span) for span in response.versions]}."
    )
    tally.require("changed", versions[-1] == update.new or update.after >= n, problem)
    tally.require("changed", len(versions) <= 2 and update.new not in versions[:-1], problem)
    if old is not None:
        tally.require("changed", all(version in (old, update.new) for version in versions), problem)
    boundary = boundary_of(response.versions, update.new)
    tally.require("changed", update.before <= boundary <= max(update.before, update.after), problem)


def boundary_of(spans: Sequence[VersionSpan], new: str) -> int:
    """Return the position of the first token of the new weights."""
    return next((span.start for span in spans if span.version == new), spans[-1].stop)


async def _check_scores(
    server: ConnectedServer,
    tally: Tally,
    update: WeightUpdate,
    response: TokenResponse,
    ids: list[int],
    sampling: SamplingParams,
) -> None:
    """Let the new weights score the tokens that they sampled according to the version spans."""
    if not semantics_of(server.policy.info, sampling).comparable_with_scoring():
        return
    boundary = boundary_of(response.versions, update.new)
    own = response.logprobs[boundary:]
    if response.versions[-1].version != update.new or not len(own):
        return
    apart = float(np.max(np.abs((await score(server.policy.backend, ids))[len(ids) - len(own) :] - own)))
    tolerance = server.tolerance_nats
    problem = (
        f"a token's logprob under weights {update.new!r} differs by {apart:.4g} nats from their own score, more than "
        f"{tolerance:g}."
    )
    tally.require("changed", apart <= tolerance, problem, len(own))


def check_live_version(spans: Sequence[VersionSpan], live_version: str, tally: Tally) -> None:
    """Check a turn during which no weights changed: it must report the live version alone."""
    versions = sorted({str(span.version) for span in spans})
    tally.require(
        "live", versions == [live_version], f"the weights are {live_version!r}, but a later answer reports {versions}."
    )
