"""`SGLangClient`: one server's address and patience, and the policies that its models share."""

from __future__ import annotations

import asyncio
import json
import uuid
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, Protocol, TypeVar

import msgspec

from strands_tito.compat.shared_policies import SharedPolicies
from tito_core.backend.errors import BackendError
from tito_core.backend.http.bodies import AnswerSize, size_of
from tito_core.backend.http.transport import HttpRequest, HttpTransportFactory, decoded
from tito_core.backend.optional_outputs import MOST_TOP_LOGPROBS, OptionalOutputs
from tito_sglang.backend import SGLangBackend
from tito_sglang.exceptions import known

T = TypeVar("T")
DEFAULT_MAX_CONNECTIONS = 1000
_DEFAULT_NEW_TOKENS = 4096
"""Counted where a raw request leaves the number to the server, whose own default is 128."""
_FOREVER_S = 30 * 86400.0


class _Length(msgspec.Struct):
    max_model_len: int | None = None


class _Served(msgspec.Struct):
    data: list[_Length] = []


class SlimeArguments(Protocol):
    """Those of slime's training arguments that say where its router is, and how much it takes."""

    sglang_router_ip: str
    sglang_router_port: int
    sglang_server_concurrency: int
    rollout_num_gpus: int
    rollout_num_gpus_per_engine: int


class SGLangClient:
    """Speaks to one SGLang server; event loops and threads may share it, and nothing is sent until it is used.

    Args:
        base_url: Such as "http://localhost:30000", or "unix:///run/sglang.sock".
        max_connections: Most connections of one event loop; further requests wait.
        timeout: Longest wait for an answer, in seconds; None for a month. The request is then aborted on the server,
            and not sent again.
        connect_timeout: Longest wait for a connection, in seconds.
        max_retries: How often what may pass is tried again: connection failures, 429, 503 and other 5xx. Never
            another 4xx: the same request would be refused again.
        retry_delay: Longest wait between two tries, in seconds.
        api_key: The server's, if it has one.
        http_transport: Makes what carries the requests; scripted engines put theirs here.
    """

    def __init__(
        self,
        base_url: str,
        *,
        max_connections: int = DEFAULT_MAX_CONNECTIONS,
        timeout: float | None = 900.0,
        connect_timeout: float = 5.0,
        max_retries: int = 60,
        retry_delay: float = 1.0,
        api_key: str | None = None,
        http_transport: HttpTransportFactory | None = None,
    ) -> None:
        self.base_url = base_url.rstrip("/")
        self.max_retries = max_retries
        self.retry_delay = retry_delay

        async def wait(seconds: float) -> None:
            await asyncio.sleep(min(seconds, self.retry_delay))

        self.backend = SGLangBackend(
            self.base_url,
            api_key=api_key,
            timeout_s=_FOREVER_S if timeout is None else timeout,
            connect_timeout_s=connect_timeout,
            max_connections=max_connections,
            max_attempts=max_retries + 1,
            http_transport=http_transport,
            sleep=wait,
        )
        self.policies = SharedPolicies()
        self._length: int | None = None
        self._asked_length = False
        self._takes_images: bool | None = None

    @classmethod
    def from_slime_args(cls, args: SlimeArguments, **options: Any) -> SGLangClient:
        """Make the client of slime's router, with as many connections as slime itself would open."""
        return cls(slime_address(args), max_connections=slime_connections(args), **options)

    async def generate(self, input_ids: Sequence[int], **fields: Any) -> dict[str, Any]:
        """POST `/generate` and give the answer as it came: nothing is checked, and no ledger holds it.

        Raises:
            SGLangClientError: One of its subclasses. A request that is given up is aborted on the server.
        """
        body = {**fields, "input_ids": list(input_ids), "stream": False}
        size = _size(len(body["input_ids"]), fields)

        def prepare(running: str) -> HttpRequest:
            return HttpRequest("/generate", json.dumps({"rid": running, **body}).encode(), size=size)

        try:
            answer = await self.backend.send_generation(uuid.uuid4().hex, prepare, dict[str, Any])
        except BackendError as error:
            raise known(error) from error.__cause__
        return answer.value

    async def health(self) -> bool:
        """Return whether the server says that it is well, in one try."""
        try:
            await self.backend.http.send_once(HttpRequest("/health"), method="GET")
        except BackendError:
            return False
        return True

    async def model_info(self) -> dict[str, Any] | None:
        """Return what `/model_info` says, in one try; None where that fails."""
        return await self._told("/model_info", dict[str, Any])

    async def is_multimodal(self) -> bool:
        """Return whether the model takes images, asked until it is known. `SGLangModel` refuses them so far."""
        if self._takes_images is None and (info := await self.model_info()) is not None:
            self._takes_images = bool(info.get("has_image_understanding"))
        return bool(self._takes_images)

    async def max_model_len(self) -> int | None:
        """Return the context length that the server reports, asked once; None where it does not say."""
        if not self._asked_length:
            served = await self._told("/v1/models", _Served)
            lengths = (model.max_model_len for model in (served.data if served else ()))
            self._length, self._asked_length = next(filter(None, lengths), None), True
        return self._length

    async def close(self) -> None:
        """Close this event loop's connections; a later request opens others."""
        await self.backend.aclose()

    async def __aenter__(self) -> SGLangClient:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def _told(self, path: str, kind: type[T]) -> T | None:
        try:
            answer = await self.backend.http.send_once(HttpRequest(path), method="GET")
            return decoded(self.backend.http, answer, kind)
        except BackendError:
            return None


def _size(prompt: int, fields: Mapping[str, Any]) -> AnswerSize:
    """Return the bounds on the answer to fields of `/generate`, as if all optional outputs were asked for."""
    sampling = fields.get("sampling_params") or {}
    optional_outputs = OptionalOutputs(
        top_logprobs=min(int(fields.get("top_logprobs_num") or 0), MOST_TOP_LOGPROBS),
        prompt_logprobs=True,
        routed_experts=bool(fields.get("return_routed_experts")),
    )
    sampled = int(sampling.get("max_new_tokens") or _DEFAULT_NEW_TOKENS) * int(sampling.get("n") or 1)
    return size_of(prompt + sampled, sampled, optional_outputs, top_k=int(sampling.get("top_k") or 0))


def slime_address(args: SlimeArguments) -> str:
    """Return the address of slime's router."""
    return f"http://{args.sglang_router_ip}:{args.sglang_router_port}"


def slime_connections(args: SlimeArguments) -> int:
    """Return how many requests slime has in flight: those of a server, times the servers."""
    return int(args.sglang_server_concurrency * args.rollout_num_gpus // args.rollout_num_gpus_per_engine)
