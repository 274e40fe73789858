"""A third party's backend for a server with its own API.

`POST /sample` takes ids and parameters and returns ids, logprobs, likely tokens, the finish and the prompt. `POST
/score` takes ids and returns their logprobs. `GET /about` describes the model. The backend copies the server's response
into a `RawResponse`, and the core checks it. A backend needs no base class, and need not use HTTP.
"""

from __future__ import annotations

import ssl
import time
from typing import Any

import httpx

from tito_core.backend.errors import BadRequestError, ContextLengthError, EngineConnectionError
from tito_core.backend.protocol import Capabilities, EngineInfo, RawResponse, RawScores, TokenRequest
from tito_core.ledger.columns import TokenIds

TLS = ssl.create_default_context()


class ToyBackend:
    """A client of one toy server."""

    name = "toy"

    def __init__(self, base_url: str, *, model: str | None = None, api_key: str | None = None, **_: Any) -> None:
        self._url = base_url
        self._info: EngineInfo | None = None

    async def connect(self) -> EngineInfo:
        if self._info is None:
            about = await self._send("GET", "/about")
            can = Capabilities(top_logprobs=about["most_top"])  # without it the suite cannot judge the sampler
            self._info = EngineInfo(
                "toy", about["model"], about["length"], "1", vocab_size=about["vocabulary"], capabilities=can
            )
        return self._info

    async def generate(self, request: TokenRequest) -> RawResponse:
        started, sampling = time.perf_counter(), request.sampling
        if sampling.grammar is not None:
            raise BadRequestError("A toy server does not support grammars.", backend=self.name)
        if sampling.extra:
            raise BadRequestError(f"A toy server does not support {sorted(sampling.extra)}.", backend=self.name)
        body = sampling.model_dump(mode="json") | {"id": request.request_id, "ids": request.input_ids.tolist()}
        body["top"] = request.optional_outputs.top_logprobs
        answer = await self._send("POST", "/sample", body)
        return RawResponse(
            response_id=answer["id"],
            finish=answer["why"],
            stop=answer["stop"],
            output_ids=answer["ids"],
            logprobs=answer["logprobs"],
            echoed=answer["read"],
            prompt_tokens=answer["prompt_tokens"],
            completion_tokens=answer["completion_tokens"],
            top_logprobs=answer["top"],
            latency_s=time.perf_counter() - started,
        )

    async def score(self, token_ids: TokenIds) -> RawScores:
        answer = await self._send("POST", "/score", {"ids": token_ids.tolist()})
        return RawScores(logprobs=[None, *answer["logprobs"]])

    async def tokenize(self, text: str) -> list[int]:
        ids: list[int] = (await self._send("POST", "/tokenize", {"text": text}))["ids"]
        return ids

    async def abort(self, request_id: str) -> None:
        """A toy server cannot abort a request."""

    async def aclose(self) -> None:
        """Every request uses its own connection."""

    async def _send(self, method: str, path: str, body: Any = None) -> Any:
        try:
            async with httpx.AsyncClient(base_url=self._url, verify=TLS, trust_env=False, timeout=60) as client:
                response = await client.request(method, path, json=body)
        except httpx.HTTPError as error:
            raise EngineConnectionError(f"No connection to {self._url}: {error}", backend=self.name) from error
        if response.status_code == 413:
            raise ContextLengthError(response.text, backend=self.name)
        if response.status_code != 200:
            raise BadRequestError(response.text, backend=self.name)
        return response.json()
