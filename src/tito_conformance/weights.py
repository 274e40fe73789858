"""Checks that change the server: weights that are loaded during answers, two folders in turn, and a pause.

They run only where the server's owner names folders of weights.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tito_conformance.checks import Tally, set_place
from tito_conformance.fixed import Arrivals, compare_scores
from tito_conformance.semantics import LONG_PROMPTS, ROOM, long_prompt
from tito_conformance.target import ConnectedServer, can_stream
from tito_core.backend import EngineAdmin
from tito_core.backend.errors import BackendError, WeightsNotLoadedError
from tito_core.backend.generate import score
from tito_core.backend.protocol import TokenResponse
from tito_core.ledger import VersionSpan
from tito_core.ledger.columns import Logprobs, TokenIds

RELOADED_TOKENS = 160
"""Length of an answer during which the weights change, in tokens."""
LONGER = (4 * RELOADED_TOKENS, 10 * RELOADED_TOKENS)
"""Lengths of further tries, for servers that send an answer in one burst, before the weights could change."""
MIN_TOKENS_BEFORE = 4
"""Tokens that arrive before the weights change."""
TRANSFER_S = 0.2
"""Tokens that arrive later than this after the update were sampled after it, in seconds."""
KNOWN_TOKENS = 16
"""Tokens of each answer to a prompt that two folders' weights read."""
PAUSED_TOKENS = 8
"""Tokens of the answer that must wait."""
PAUSE_S = 1.0
"""How long the server stays paused; an answer that ignores the pause is complete by then, or at least begun."""
WAIT_S = 120.0
"""Seconds after which an answer that still did not come is lost."""
NO_VERSION = "The server reports no version with an answer."


async def update_weights(server: ConnectedServer, tally: Tally) -> int:
    """Change the weights during a streamed answer, and check the answer's version spans.

    Returns:
        Number of answers that were requested, which belong to no agent.
    """
    backend = server.backend
    if not server.target.weights:
        return 0
    if not isinstance(backend, EngineAdmin) or not can_stream(backend):
        tally.skip("changed", f"The backend {server.target.backend} cannot change weights.")
        return 0
    answers = 0
    for tokens in (RELOADED_TOKENS, *LONGER):
        sampling = server.sampling(max_new_tokens=tokens, ignore_eos=True)
        prompt = server.prompt_of("Go on and on.")
        counter, answers = Arrivals(MIN_TOKENS_BEFORE), answers + 1
        set_place(turn=None, sampling={"max_new_tokens": tokens, "ignore_eos": True}, streamed=True)
        answer = asyncio.create_task(server.answer(prompt, sampling, on_chunk=counter))
        waiting = asyncio.create_task(counter.enough.wait())
        await asyncio.wait([answer, waiting], return_when=asyncio.FIRST_COMPLETED)
        waiting.cancel()
        if not answer.done():
            break
    old, before, finished = server.live_version, counter.tokens, answer.done()
    new = await _load(server, _other_folder(server))
    await asyncio.sleep(TRANSFER_S)
    update = WeightUpdate(old, new, before, counter.tokens, finished)
    response = await answer
    if [span.version for span in response.versions] == [None]:
        server.live_version, server.reports_versions = None, False
        tally.skip("changed", NO_VERSION)
        tally.skip("live", NO_VERSION)
        return answers
    check_spans(update, response, tally)
    if response.versions[-1].version == new:
        own = response.logprobs[boundary_of(response.versions, new) :]
        ids = np.concatenate([prompt, response.output_ids])
        await compare_scores(server, tally, "changed", ids, own, sampling, f"after update {server.weight_updates}")
    return answers


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


def check_live_version(spans: Sequence[VersionSpan], live_version: str, tally: Tally) -> None:
    """Check a turn during which no weights changed: it must report the live version alone."""
    versions = sorted({str(span.version) for span in spans})
    tally.require(
        "live", versions == [live_version], f"the weights are {live_version!r}, but a later answer reports {versions}."
    )


async def check_folders(server: ConnectedServer, tally: Tally) -> None:
    """Load two folders in turn: the scores of a text and the answers to one prompt must follow the weights."""
    if len(server.target.weights) < 2 or not isinstance(server.backend, EngineAdmin) or not can_stream(server.backend):
        return
    first, second = server.target.weights
    longest = LONG_PROMPTS[0]  # fills pages of a prefix cache, in which old keys and values would be found
    prompt = long_prompt(server, min(longest, (server.policy.info.max_model_len or longest) - ROOM))
    text: list[int] = []
    scores: list[Logprobs] = []
    for folder in (first, second, first):
        await _load(server, folder)
        answer = await _first_answer(server, tally, prompt)
        text = text or [*prompt.tolist(), *answer]
        scores.append((await score(server.policy.backend, text))[1:])
    set_place()
    tolerance = server.tolerance_nats
    apart, kept = (float(np.max(np.abs(scores[0] - each))) for each in scores[1:])
    problem = (
        f"the scores of a text by the weights in {second!r} differ by {apart:.4g} nats from those by the weights in "
        f"{first!r}, not by more than {tolerance:g}: the reload changed nothing, or both folders hold the same weights."
    )
    tally.require("changed", apart > tolerance, problem, len(text) - 1)
    problem = (
        f"the scores of a text by the weights in {first!r} differ by {kept:.4g} nats before and after {second!r} was "
        f"loaded, more than {tolerance:g}."
    )
    tally.require("changed", kept <= tolerance, problem, len(text) - 1)


async def load_first_again(server: ConnectedServer) -> None:
    """Leave the server with the weights of the first folder."""
    if server.folder not in (None, *server.target.weights[:1]):
        await _load(server, server.target.weights[0])


async def check_pause(server: ConnectedServer, tally: Tally) -> None:
    """Check that a paused server answers nothing, and answers what waits once it resumes."""
    backend = server.backend
    if not isinstance(backend, EngineAdmin) or not can_stream(backend):
        tally.skip("paused", f"The backend {server.target.backend} cannot pause.")
        return
    parameters = {"max_new_tokens": PAUSED_TOKENS, "temperature": 0.0, "ignore_eos": True}
    set_place(sampling=parameters, streamed=True)
    prompt = server.prompt_of("Wait for me.")
    early = Arrivals()
    await backend.pause()
    try:
        answer = asyncio.create_task(server.answer(prompt, server.sampling(**parameters), on_chunk=early))
        await asyncio.wait([answer], timeout=PAUSE_S)
        arrived = early.tokens
    finally:
        await backend.resume()
    await asyncio.wait([answer], timeout=WAIT_S)
    if not answer.done():
        answer.cancel()
        await asyncio.gather(answer, return_exceptions=True)
        tally.require("paused", False, f"a request waited for {WAIT_S:.0f} s after the server resumed.")
    tally.require("paused", not arrived, f"{arrived} tokens arrived while the server was paused.")
    whole = len((await answer).output_ids)
    tally.require("paused", whole == PAUSED_TOKENS, f"an answer that waited has {whole} tokens, not {PAUSED_TOKENS}.")


async def _first_answer(server: ConnectedServer, tally: Tally, prompt: TokenIds) -> list[int]:
    """Return the first answer after an update, which nothing of older weights may have a part in."""
    sampling = server.sampling(max_new_tokens=KNOWN_TOKENS, temperature=1.0)
    response = await server.answer(prompt, sampling)
    if server.live_version is not None:
        check_live_version(response.versions, server.live_version, tally)
    output: list[int] = response.output_ids.tolist()
    ids, when = np.concatenate([prompt, response.output_ids]), f"after update {server.weight_updates}"
    await compare_scores(server, tally, "changed", ids, response.logprobs, sampling, when)
    cached = response.cached_tokens
    problem = f"{cached} tokens of the first prompt after an update were cached, so older weights have computed them."
    tally.require("changed", not cached, problem, int(cached is not None))
    return output


def _other_folder(server: ConnectedServer) -> str:
    """Return the folder to load next: the other one, if there are two."""
    folders = server.target.weights
    return next((each for each in reversed(folders) if each != server.folder), folders[0])


async def _load(server: ConnectedServer, folder: str) -> str:
    """Load weights, and return their new version.

    Whether a server that takes images kept old features of them, `check_after_update` finds out.
    """
    backend: Any = server.backend
    more = {"images_uncached": True} if server.policy.info.images.accepted else {}  # other backends may lack the option
    server.weight_updates += 1
    server.unscored.clear()  # older weights sampled them
    version = f"tito-{server.weight_updates}"
    try:
        await backend.load_weights(folder, version, **more)
    except WeightsNotLoadedError:
        with contextlib.suppress(BackendError):
            await backend.resume()  # other clients' requests may be waiting
        raise
    server.folder, server.live_version = folder, version if server.reports_versions else None
    return version
