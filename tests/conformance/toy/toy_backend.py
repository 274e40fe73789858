"""A third backend, of somebody else's: it knows the core's seam and a server with an API of its own.

The server takes `POST /sample` with ids and parameters and gives ids, logprobs and why it stopped; `POST /score` takes
ids and gives their logprobs; `GET /about` tells the model. A backend need not be over HTTP, nor derive from anything.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import httpx
import numpy as np

from tito_core.backend.errors import BadRequestError, ContextLengthError, EngineConnectionError
from tito_core.backend.protocol import EngineInfo, TokenRequest, TokenResponse
from tito_core.ledger import Finish, VersionSpan


class ToyBackend:
    """Speaks to one toy server."""

    name = "toy"

    def __init__(self, base_url: str, *, model: str | None = None, api_key: str | None = None, **_: Any) -> None:
        self._url = base_url

    async def connect(self) -> EngineInfo:
        about = await self._ask("GET", "/about")
        return EngineInfo("toy", about["model"], about["length"], "1", vocab_size=about["vocabulary"])

    async def generate(self, request: TokenRequest) -> TokenResponse:
        started, sampling = time.perf_counter(), request.sampling
        if sampling.grammar is not None:
            raise BadRequestError("A toy server knows no grammar.", backend=self.name)
        wanted = sampling.model_dump(mode="json") | {"ids": request.input_ids.tolist()}
        said = await self._ask("POST", "/sample", wanted)
        output = np.array(said["ids"], np.int32)
        return TokenResponse(
            output_ids=output,
            logprobs=np.array(said["logprobs"], np.float32),
            finish=Finish(said["why"]),
            stop=said["stop"],
            prompt_length=len(request.input_ids),
            cached_tokens=None,
            latency_s=time.perf_counter() - started,
            request_id=request.request_id,
            versions=(VersionSpan(0, len(output), None),),
        )

    async def score(self, token_ids: Sequence[int]) -> Any:
        said = await self._ask("POST", "/score", {"ids": [int(token) for token in token_ids]})
        return np.array([np.nan, *said["logprobs"]], np.float32)

    async def tokenize(self, text: str) -> Any:
        return np.array((await self._ask("POST", "/tokenize", {"text": text}))["ids"], np.int32)

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
