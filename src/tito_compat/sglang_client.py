"""`SGLangClient`: the connection to one server, its errors, and clients and tokenizers that are cached.

An error is one of the core, too. All models of a client share its policies.
"""

from __future__ import annotations

import asyncio
import json
import uuid
from collections.abc import Mapping, Sequence
from functools import cache
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol, TypedDict, TypeVar, Unpack, cast

import msgspec

from tito_compat.model import SharedPolicies
from tito_core.backend.errors import (
    UNREADABLE,
    AuthenticationError,
    BackendError,
    BadRequestError,
    ContextLengthError,
    EngineConnectionError,
    EngineTimeoutError,
    GenerationAbortedError,
    ProtocolViolationError,
    ServerError,
    ThrottledError,
    UnsupportedByServerError,
)
from tito_core.backend.http.backend import HttpBackend
from tito_core.backend.http.body import AnswerSize, size_of
from tito_core.backend.http.client import HttpRequest, HttpTransportFactory, decoded
from tito_core.backend.protocol import MOST_TOP_LOGPROBS, OptionalOutputs
from tito_core.backend.registry import ENTRY_POINT_GROUP
from tito_core.backend.retries import Failures, Retries, Sleep, backoff_s, is_transient
from tito_core.backend.values import at_least
from tito_core.chat.tokenizer import load_tokenizer
from tito_core.entry_points import load

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


T = TypeVar("T")
DEFAULT_MAX_CONNECTIONS = 1000
NON_RETRYABLE_STATUS_CODES = frozenset({401, 403, 404})
"""Statuses after which strands-sglang does not send a request again. Here it is so after every 4xx but 408 and 429."""
_DEFAULT_NEW_TOKENS = 4096
"""Assumed bound on new tokens of a raw request that sets none; the server's default is 128."""
_ANSWER: Any = dict[str, Any] | list[dict[str, Any]]
_NO_TIMEOUT_S = 30 * 86400.0
"""Stands for no timeout: a month."""


class SGLangClient:
    """A client of one SGLang server. Event loops and threads may share it. It connects when it is first used.

    Args:
        base_url: Such as "http://localhost:30000" or "unix:///run/sglang.sock".
        max_connections: Maximum number of connections per event loop; further requests wait.
        timeout: Longest wait for an answer in seconds; None for no limit. The request is aborted on the server and
            retried.
        connect_timeout: Longest wait for a connection in seconds.
        max_retries: Retries after a connection failure, a timeout, 408, 429, 503, another 5xx, or a 200 that is not
            JSON. Another 4xx is not retried.
        retry_delay: Longest wait between two tries in seconds.
        api_key: The server's API key, if it has one.
        http_transport: Makes the HTTP transport; for tests with scripted servers.
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
        self.retry_delay = retry_delay

        async def wait(seconds: float) -> None:
            await asyncio.sleep(min(seconds, self.retry_delay))

        self.backend: HttpBackend = load(ENTRY_POINT_GROUP, "sglang")(
            self.base_url,
            api_key=api_key,
            timeout_s=_NO_TIMEOUT_S if timeout is None else timeout,
            connect_timeout_s=connect_timeout,
            max_connections=max_connections,
            http_transport=http_transport,
        )
        self._retries = self.backend.http.retries = _ClientRetries(max_retries, wait)
        self.policies = SharedPolicies()
        self._length: int | None = None
        self._is_length_known = False
        self._takes_images: bool | None = None

    @classmethod
    def from_slime_args(cls, args: SlimeArguments, **options: Any) -> SGLangClient:
        """Make a client of slime's router, with as many connections as slime would open."""
        return cls(slime_address(args), max_connections=slime_connections(args), **options)

    @property
    def max_retries(self) -> int:
        """Retries of a request; may be changed."""
        return self._retries.max_retries

    @max_retries.setter
    def max_retries(self, retries: int) -> None:
        self._retries.max_retries = at_least("max_retries", retries, 0)

    async def generate(self, input_ids: Sequence[int], **fields: Any) -> dict[str, Any]:
        """POST `/generate` and return the answer unchecked. No ledger records it.

        Like the server, it answers a batch of prompts or `n` samples with a list.

        Raises:
            SGLangClientError: One of its subclasses. A request without an answer is aborted on the server.
        """
        body = {**fields, "input_ids": list(input_ids), "stream": False}
        size = _size(body["input_ids"], fields)

        def prepare(request_id: str) -> HttpRequest:
            return HttpRequest("/generate", json.dumps({"rid": request_id, **body}).encode(), size=size)

        try:
            answer = await self.backend.send_generation(uuid.uuid4().hex, prepare, _ANSWER)
        except BackendError as error:
            raise as_sglang_error(error) from error.__cause__
        return cast(dict[str, Any], answer.value)

    async def health(self) -> bool:
        """Return whether the server reports that it is healthy; no retries."""
        try:
            await self.backend.http.send_once(HttpRequest("/health"), method="GET")
        except BackendError:
            return False
        return True

    async def model_info(self) -> dict[str, Any] | None:
        """Return the answer of `/model_info`, or None if that fails; no retries."""
        return await self._get_or_none("/model_info", dict[str, Any])

    get_model_info = model_info  # its name in strands-sglang 0.1 and 0.2

    async def is_multimodal(self) -> bool:
        """Return whether the model takes images."""
        if self._takes_images is None and (info := await self.model_info()) is not None:
            self._takes_images = bool(info.get("has_image_understanding"))
        return bool(self._takes_images)

    async def max_model_len(self) -> int | None:
        """Return the context length that the server reports, or None. The first answer is cached."""
        if not self._is_length_known:
            served = await self._get_or_none("/v1/models", _ServedModels)
            lengths = (model.max_model_len for model in (served.data if served else ()))
            self._length, self._is_length_known = next(filter(None, lengths), None), True
        return self._length

    async def close(self) -> None:
        """Close this event loop's connections. A later request opens new ones."""
        await self.backend.aclose()

    async def __aenter__(self) -> SGLangClient:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def _get_or_none(self, path: str, kind: type[T]) -> T | None:
        try:
            answer = await self.backend.http.send_once(HttpRequest(path), method="GET")
            return decoded(self.backend.http, answer, kind)
        except BackendError:
            return None


class ClientOptions(TypedDict, total=False):
    """Options of `SGLangClient` for cached clients."""

    max_connections: int
    timeout: float | None
    connect_timeout: float
    max_retries: int
    retry_delay: float


@cache
def get_client(base_url: str, **options: Unpack[ClientOptions]) -> SGLangClient:
    """Return the cached client of a server with these settings; see `SGLangClient`."""
    return SGLangClient(base_url, **options)


class SlimeArguments(Protocol):
    """The training arguments of slime that this module reads."""

    sglang_router_ip: str
    sglang_router_port: int
    sglang_server_concurrency: int
    rollout_num_gpus: int
    rollout_num_gpus_per_engine: int


def get_client_from_slime_args(args: SlimeArguments, **options: Unpack[ClientOptions]) -> SGLangClient:
    """Return the cached client of slime's router; see `SGLangClient`."""
    return get_client(slime_address(args), **{"max_connections": slime_connections(args), **options})


def slime_address(args: SlimeArguments) -> str:
    """Return the address of slime's router."""
    return f"http://{args.sglang_router_ip}:{args.sglang_router_port}"


def slime_connections(args: SlimeArguments) -> int:
    """Return slime's number of concurrent requests: those per server, times the servers."""
    return int(args.sglang_server_concurrency * args.rollout_num_gpus // args.rollout_num_gpus_per_engine)


@cache
def get_tokenizer(tokenizer_path: str) -> PreTrainedTokenizerBase:
    """Return the cached tokenizer of a name or folder. Code of a model's repository is never run.

    Raises:
        TokenizerError: The tokenizer cannot be loaded.
    """
    return load_tokenizer(tokenizer_path)


class SGLangClientError(BackendError):
    """A request to the server failed."""


class SGLangHTTPError(SGLangClientError):
    """The server answered with an error; `status` and `body` hold its answer."""


class SGLangContextLengthError(SGLangHTTPError, ContextLengthError):
    """The prompt, or prompt and answer, exceed the context length or the server's memory."""


class SGLangThrottledError(SGLangHTTPError, ThrottledError):
    """429 or 503 on every try."""


class SGLangBadRequestError(SGLangHTTPError, BadRequestError):
    """Another 4xx. Only a 408 is retried."""


class SGLangAuthenticationError(SGLangHTTPError, AuthenticationError):
    """401 or 403."""


class SGLangServerError(SGLangHTTPError, ServerError):
    """Another 5xx on every try."""


class SGLangConnectionError(SGLangClientError, EngineConnectionError):
    """No connection, or the connection broke."""


class SGLangTimeoutError(SGLangConnectionError, EngineTimeoutError):
    """No answer within the timeout on every try. The request was aborted on the server."""


class SGLangDecodingError(SGLangClientError, ProtocolViolationError):
    """The answer is not JSON, or not an answer of SGLang."""


class SGLangAbortedError(SGLangClientError, GenerationAbortedError):
    """The server aborted the generation, and the answer was discarded."""


class SGLangUnsupportedError(SGLangClientError, UnsupportedByServerError):
    """The server was not started with the option that the request needs."""


_KINDS: dict[type[BackendError], type[SGLangClientError]] = {
    kind.__bases__[1]: kind
    for kind in (
        *(SGLangContextLengthError, SGLangThrottledError, SGLangBadRequestError, SGLangAuthenticationError),
        *(SGLangServerError, SGLangTimeoutError, SGLangConnectionError, SGLangDecodingError, SGLangAbortedError),
        SGLangUnsupportedError,
    )
}
"""Our type of each error of the core; the first that fits counts."""


def as_sglang_error(error: BackendError) -> BackendError:
    """Return an error of the core as its SGLang type, with the same message and attributes."""
    if isinstance(error, SGLangClientError):
        return error
    kind = next((ours for core, ours in _KINDS.items() if isinstance(error, core)), SGLangClientError)
    if isinstance(error, EngineTimeoutError) and error.status is not None:
        kind = SGLangHTTPError  # 408 and 504, by which a gateway gave up
    translated = kind(*error.args)
    translated.__dict__.update(error.__dict__)
    return translated.with_traceback(error.__traceback__)


class _ClientRetries(Retries):
    """The retries of strands-sglang's client: a number of them, whatever time they take."""

    def __init__(self, max_retries: int, sleep: Sleep) -> None:
        super().__init__(sleep=sleep, may_retry=_may_retry)
        self.max_retries = at_least("max_retries", max_retries, 0)

    def wait_s(self, error: BackendError, failures: Failures) -> float | None:
        """See `Retries.wait_s`."""
        return backoff_s(failures.count) if failures.count <= self.max_retries else None


def _may_retry(error: BackendError) -> bool:
    """Return whether a request is sent again: also to a new address, after a timeout, a 408 or a 200 without JSON."""
    if isinstance(error, ProtocolViolationError):
        cause = error.__cause__
        return isinstance(cause, UNREADABLE) and not isinstance(cause, msgspec.ValidationError)
    if isinstance(error, EngineConnectionError | EngineTimeoutError) or error.status == 408:
        return not error.was_streamed
    return is_transient(error)


class _ModelLength(msgspec.Struct):
    max_model_len: int | None = None


class _ServedModels(msgspec.Struct):
    data: list[_ModelLength] = []


def _size(prompts: Sequence[Any], fields: Mapping[str, Any]) -> AnswerSize:
    """Return the size bounds of the answer of `/generate` to one prompt or a batch of them."""
    batch = [prompt for prompt in prompts if isinstance(prompt, Sequence)] or [prompts]
    given = fields.get("sampling_params") or {}
    each = list(given) if isinstance(given, Sequence) else [given] * len(batch)
    optional_outputs = OptionalOutputs(
        top_logprobs=min(int(fields.get("top_logprobs_num") or 0), MOST_TOP_LOGPROBS),
        prompt_logprobs=True,
        routed_experts=bool(fields.get("return_routed_experts")),
    )
    answers = max((int(sampling.get("n") or 1) for sampling in each), default=1)
    sampled = answers * sum(int(sampling.get("max_new_tokens") or _DEFAULT_NEW_TOKENS) for sampling in each)
    top_k = max((int(sampling.get("top_k") or 0) for sampling in each), default=0)
    return size_of(answers * sum(map(len, batch)) + sampled, sampled, optional_outputs, top_k=top_k)
