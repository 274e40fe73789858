"""A third backend, of somebody else's: it knows the core's seam and a server with an API of its own.

The server takes `POST /sample` with ids and parameters and gives ids, logprobs, why it stopped and what it read; `POST
/score` takes ids and gives their logprobs; `GET /about` tells the model. A backend copies what its server says into a
`RawResponse`; the core checks it. It need not be over HTTP, nor derive from anything.
"""

from __future__ import annotations

import time
from typing import Any

import httpx

from tito_core.backend.engine_info import EngineInfo
from tito_core.backend.errors import BadRequestError, ContextLengthError, EngineConnectionError
from tito_core.backend.protocol import RawResponse, RawScores, TokenRequest
from tito_core.ledger.columns import TokenIds


class ToyBackend:
    """Speaks to one toy server."""

    name = "toy"

    def __init__(self, base_url: str, *, model: str | None = None, api_key: str | None = None, **_: Any) -> None:
        self._url = base_url
        self._info: EngineInfo | None = None

    async def connect(self) -> EngineInfo:
        if self._info is None:
            about = await self._ask("GET", "/about")
            self._info = EngineInfo("toy", about["model"], about["length"], "1", vocab_size=about["vocabulary"])
        return self._info

    async def generate(self, request: TokenRequest) -> RawResponse:
        started, sampling = time.perf_counter(), request.sampling
        if sampling.grammar is not None:
            raise BadRequestError("A toy server knows no grammar.", backend=self.name)
        wanted = sampling.model_dump(mode="json") | {"ids": request.input_ids.tolist()}
        said = await self._ask("POST", "/sample", wanted)
        return RawResponse(
            finish=said["why"],
            stop=said["stop"],
            output_ids=said["ids"],
            logprobs=said["logprobs"],
            echoed=said["read"],
            prompt_tokens=said["prompt_tokens"],
            completion_tokens=said["completion_tokens"],
            latency_s=time.perf_counter() - started,
        )

    async def score(self, token_ids: TokenIds) -> RawScores:
        said = await self._ask("POST", "/score", {"ids": token_ids.tolist()})
        return RawScores(logprobs=[None, *said["logprobs"]])

    async def tokenize(self, text: str) -> list[int]:
        ids: list[int] = (await self._ask("POST", "/tokenize", {"text": text}))["ids"]
        return ids

    async def abort(self, request_id: str) -> None:
        """A toy server answers before anybody could abort."""

    async def aclose(self) -> None:
        """Every request has a connection of its own."""

    async def _ask(self, method: str, path: str, body: Any = None) -> Any:
        try:
            async with httpx.AsyncClient(base_url=self._url, trust_env=False) as client:
                answer = await client.request(method, path, json=body)
        except httpx.HTTPError as error:
            raise EngineConnectionError(f"{self._url} cannot be reached: {error}", backend=self.name) from error
        if answer.status_code == 413:
            raise ContextLengthError(answer.text, backend=self.name)
        if answer.status_code != 200:
            raise BadRequestError(answer.text, backend=self.name)
        return answer.json()
