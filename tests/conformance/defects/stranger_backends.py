"""Third-party backends, each wrong in one way, in front of the toy server; and a runner for them."""

from __future__ import annotations

import asyncio
from contextlib import ExitStack
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

from conformance.defects.stranger_hooks import Planted
from conformance.defects.trial import Verdict, judge
from conformance.toy.toy_backend import ToyBackend
from conformance.toy.toy_server import ToyServer, serving
from tito_conformance.checks import Profile
from tito_conformance.target import Target
from tito_core.backend.protocol import RawResponse, RawScores, TokenRequest
from tito_core.backend.registry import ENTRY_POINT_GROUP
from tito_core.ledger.columns import TokenIds


class LogprobsOneLate(ToyBackend):
    """Each output token has the logprob of the one before it."""

    async def generate(self, request: TokenRequest) -> RawResponse:
        raw = await super().generate(request)
        values = list(raw.logprobs or ())
        return replace(raw, logprobs=[*values[:1], *values[:-1]])


class FillsMissingStop(ToyBackend):
    """Answers that were cut off are reported as complete, for frameworks that know no other finish."""

    async def generate(self, request: TokenRequest) -> RawResponse:
        return replace(await super().generate(request), finish="stop")


class ForgetsTemperature(ToyBackend):
    """The temperature is not sent: the server's default of 1 is used for every request but greedy ones."""

    async def _send(self, method: str, path: str, body: Any = None) -> Any:
        if path == "/sample" and body["temperature"]:
            body = {**body, "temperature": 1.0}
        return await super()._send(method, path, body)


class ForgetsStopIds(ToyBackend):
    """Stop ids of the request are not sent."""

    async def _send(self, method: str, path: str, body: Any = None) -> Any:
        return await super()._send(method, path, {**body, "stop_token_ids": []} if path == "/sample" else body)


class ForgetsMinTokens(ToyBackend):
    """`min_new_tokens` is not sent."""

    async def _send(self, method: str, path: str, body: Any = None) -> Any:
        return await super()._send(method, path, {**body, "min_new_tokens": 0} if path == "/sample" else body)


class TruncatesSeeds(ToyBackend):
    """Seeds are sent with four bits."""

    async def _send(self, method: str, path: str, body: Any = None) -> Any:
        if path == "/sample" and body["seed"] is not None:
            body = {**body, "seed": body["seed"] % 16}
        return await super()._send(method, path, body)


class TopPHardCoded(ToyBackend):
    """A `top_p` of 1 is sent as 0.95."""

    async def _send(self, method: str, path: str, body: Any = None) -> Any:
        if path == "/sample" and body["top_p"] == 1:
            body = {**body, "top_p": 0.95}
        return await super()._send(method, path, body)


class CachesAnswers(ToyBackend):
    """A prompt that was answered before gets its answer again, whatever the parameters; limits are kept."""

    async def generate(self, request: TokenRequest) -> RawResponse:
        known = self.__dict__.setdefault("_known", {})
        key = (request.input_ids.tobytes(), request.sampling.max_new_tokens, request.sampling.stop)
        if key not in known:
            known[key] = await super().generate(request)
        found: RawResponse = known[key]
        return found


class SharesItsBody(ToyBackend):
    """The body is kept on the backend while the request waits, so that concurrent requests send one body."""

    async def _send(self, method: str, path: str, body: Any = None) -> Any:
        if path != "/sample":
            return await super()._send(method, path, body)
        self._body = body
        await asyncio.sleep(0)
        return await super()._send(method, path, self._body)


class EchoesTheRequest(ToyBackend):
    """The last prompt id is not sent; echo and count are filled in from the request."""

    async def generate(self, request: TokenRequest) -> RawResponse:
        shorter = request.input_ids[:-1] if len(request.input_ids) > 200 else request.input_ids
        raw = await super().generate(replace(request, input_ids=shorter, id_text=None))
        return replace(raw, echoed=request.input_ids, prompt_tokens=len(request.input_ids))


class SamplesAgainForLogprobs(ToyBackend):
    """Logprobs come from a second sampling of the same prompt, padded or cut to the first's length."""

    async def generate(self, request: TokenRequest) -> RawResponse:
        raw = await super().generate(request)
        seed = (request.sampling.seed or 0) + 1
        again = await super().generate(replace(request, sampling=request.sampling.model_copy(update={"seed": seed})))
        values = [*(again.logprobs or ()), *[-1.0] * len(raw.output_ids or ())]
        return replace(raw, logprobs=values[: len(raw.output_ids or ())])


class ScoresOneLate(ToyBackend):
    """Scores are one token late: the first token gets the second's."""

    async def score(self, token_ids: TokenIds) -> RawScores:
        raw = await super().score(token_ids)
        values = list(raw.logprobs or ())
        return RawScores(logprobs=[*values[:1], *values[2:], *values[-1:]])


class Clamps(ToyBackend):
    """Logprobs below -3 are clamped."""

    async def generate(self, request: TokenRequest) -> RawResponse:
        raw = await super().generate(request)
        return replace(raw, logprobs=[max(float(value or 0.0), -3.0) for value in raw.logprobs or ()])


CLASSES = (
    *(LogprobsOneLate, FillsMissingStop, ForgetsTemperature, ForgetsStopIds, ForgetsMinTokens, TruncatesSeeds),
    *(TopPHardCoded, CachesAnswers, SharesItsBody, EchoesTheRequest, SamplesAgainForLogprobs, ScoresOneLate, Clamps),
)
BACKENDS = [
    Planted(each.__name__, 4, str(each.__doc__), real="third-party adapters", wires=("toy",)) for each in CLASSES
]
_BY_NAME = {each.__name__: each for each in (ToyBackend, *CLASSES)}


def try_backend(defect: Planted, tokenizer: Any, end: int, profile: Profile, seed: int = 0) -> Verdict:
    """Run the suite on a backend in front of the toy server."""
    made = _BY_NAME[defect.name]
    point = SimpleNamespace(name="toy", load=lambda: made, value=defect.name)
    with ExitStack() as stack:
        stack.enter_context(
            mock.patch("tito_core.entry_points.entry_points", lambda group: [point] * (group == ENTRY_POINT_GROUP))
        )
        url = stack.enter_context(serving(ToyServer(tokenizer, end)))
        return judge(defect, "toy", Target("toy", url, tokenizer, seed=seed, seeds=True), profile)
