"""Weights that change while the policy speaks, on a server whose owner asked for it: law 10 on each token."""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from strands_tito.conformance.agents import Life
from strands_tito.conformance.laws import Tally
from strands_tito.conformance.target import Connected, takes_chunks
from strands_tito.testing import moves as m
from tito_core.backend import EngineAdmin
from tito_core.backend.checked import generate, score
from tito_core.backend.errors import BackendError, WeightsNotLoadedError
from tito_core.backend.protocol import TokenChunk, TokenRequest, TokenResponse
from tito_core.backend.sampling import SamplingParams
from tito_core.backend.semantics import semantics_of
from tito_core.ledger import VersionSpan

if TYPE_CHECKING:
    from strands_tito.conformance.player import Player

TOKENS = 160
"""Tokens of an answer in whose middle the weights change."""
LONGER = (4 * TOKENS, 10 * TOKENS)
"""Those of the next ones, where an answer was in before anything could be changed: some servers send it in a burst."""
SEEN = 4
"""Tokens that are in before they change."""
ON_THE_WAY_S = 0.2
"""Tokens that come later than so long after the change were sampled after it."""


UNNAMED = "The server names no version on an answer."


async def reloaded(player: Player, life: Life, move: m.Reload) -> None:
    """Change the weights while an agent's answer and one that is watched are under way."""
    life.hear(move.text)
    player.choose(max_new_tokens=TOKENS, ignore_eos=True)
    turn = asyncio.create_task(player.turn(life))
    try:
        player.given_up += await change(player.connected, player.tally)
    finally:
        await asyncio.wait([turn])
    turn.result()


@dataclass
class Change:
    """One change of weights under an answer.

    Attributes:
        old: The version before; None where nobody named it.
        new: The version after.
        before: Tokens of the answer that were in when the change was asked for.
        after: Tokens that were in once the change was over, those on the way included.
        finished: Whether the answer was in by the time that the change was asked for.
    """

    old: str | None
    new: str
    before: int = 0
    after: int = 0
    finished: bool = False


class _Ear:
    """Hears the chunks of an answer."""

    def __init__(self) -> None:
        self.seen = 0
        self.enough = asyncio.Event()

    def __call__(self, chunk: TokenChunk) -> None:
        self.seen += len(chunk.output_ids)
        if self.seen >= SEEN:
            self.enough.set()


async def change(connected: Connected, tally: Tally) -> int:
    """Change the weights under an answer that streams, and hold its version spans to what was seen of it.

    Returns:
        How many answers were asked for, which are no agent's.
    """
    backend, weights = connected.backend, connected.target.weights
    if weights is None:
        return 0
    if not isinstance(backend, EngineAdmin) or not takes_chunks(backend):
        tally.skip("changed", f"The backend {connected.target.backend} has no calls that change weights.")
        return 0
    asked = 0
    for tokens in (TOKENS, *LONGER):
        sampling = SamplingParams(max_new_tokens=tokens, ignore_eos=True)
        prompt = connected.policy.template.first_prompt(
            [{"role": "user", "content": [{"text": "Go on and on."}]}], None, None
        ).ids
        ear, asked = _Ear(), asked + 1
        request = TokenRequest(prompt, sampling, uuid.uuid4().hex)
        answer = asyncio.create_task(generate(connected.policy.backend, request, ear))
        waiting = asyncio.create_task(ear.enough.wait())
        await asyncio.wait([answer, waiting], return_when=asyncio.FIRST_COMPLETED)
        waiting.cancel()
        if not answer.done():
            break
    connected.changes += 1
    found = Change(connected.live, f"tito-{connected.changes}", before=ear.seen, finished=answer.done())
    await _load(backend, weights, found.new)
    connected.live = found.new
    await asyncio.sleep(ON_THE_WAY_S)
    found.after = ear.seen
    response = await answer
    if [span.version for span in response.versions] == [None]:
        connected.live, connected.names_versions = None, False
        tally.skip("changed", UNNAMED)
        tally.skip("live", UNNAMED)
        return asked
    spans_of(found, response, tally)
    await _scored(connected, tally, found, response, [*prompt.tolist(), *response.output_ids.tolist()], sampling)
    return asked


async def _load(backend: EngineAdmin, weights: str, version: str) -> None:
    try:
        await backend.load_weights(weights, version)
    except WeightsNotLoadedError:
        with contextlib.suppress(BackendError):
            await backend.resume()  # somebody else's requests wait
        raise


def spans_of(found: Change, response: TokenResponse, tally: Tally) -> None:
    """Hold the spans of an answer to what was in before the change and what came after it."""
    versions = [span.version for span in response.versions]
    if found.finished:
        tally.skip("changed", "The answer was in before the weights changed.")
        return
    old, n = found.old, len(response.output_ids)
    problem = f"weights {old!r} became {found.new!r} after {found.before} to {found.after} of {n} tokens, and the "
    problem += f"answer names {[tuple(span) for span in response.versions]}."
    tally.hold("changed", versions[-1] == found.new or found.after >= n, problem)
    tally.hold("changed", len(versions) <= 2 and found.new not in versions[:-1], problem)
    if old is not None:
        tally.hold("changed", all(version in (old, found.new) for version in versions), problem)
    boundary = boundary_of(response.versions, found.new)
    tally.hold("changed", found.before <= boundary <= max(found.before, found.after), problem)


def boundary_of(spans: Sequence[VersionSpan], new: str) -> int:
    """Return the first token that the new weights sampled."""
    return next((span.start for span in spans if span.version == new), spans[-1].stop)


async def _scored(
    connected: Connected,
    tally: Tally,
    found: Change,
    response: TokenResponse,
    ids: list[int],
    sampling: SamplingParams,
) -> None:
    """Have the new weights score what they are said to have sampled."""
    if not semantics_of(connected.policy.info, sampling).comparable_with_scoring():
        return
    boundary = boundary_of(response.versions, found.new)
    own = response.logprobs[boundary:]
    if response.versions[-1].version != found.new or not len(own):
        return
    apart = float(np.max(np.abs((await score(connected.policy.backend, ids))[len(ids) - len(own) :] - own)))
    tolerance = connected.target.tolerance_nats
    problem = f"of weights {found.new!r} a token's logprob lies {apart:.4g} nats from their own score, more than "
    tally.hold("changed", apart <= tolerance, f"{problem}{tolerance:g}.", len(own))


def named(spans: Sequence[VersionSpan], live: str, tally: Tally) -> None:
    """Hold a turn that no change ran into to the one version that was live."""
    names = sorted({str(span.version) for span in spans})
    tally.hold("live", names == [live], f"the weights are {live!r}, and an answer after that names {names}.")
