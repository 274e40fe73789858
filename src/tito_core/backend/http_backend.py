"""What every backend over HTTP shares: connecting once, and refusing what would not be served."""

from __future__ import annotations

import asyncio
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Annotated, ClassVar, TypeVar

import msgspec
import numpy as np

from tito_core.backend.answer import Checks
from tito_core.backend.carrier import Reply
from tito_core.backend.decoded import decoded
from tito_core.backend.errors import (
    AuthenticationError,
    BadRequestError,
    ProtocolViolationError,
    ServerError,
)
from tito_core.backend.exchanges import Answer, Exchanges
from tito_core.backend.id_text import IdText
from tito_core.backend.protocol import EngineInfo, OnChunk, TokenRequest, TokenResponse
from tito_core.backend.registry import installed_backends
from tito_core.backend.retries import Attempt, Sleep
from tito_core.backend.streaming import Streaming
from tito_core.backend.transport import EngineHttp, HttpRequest, HttpTransportFactory
from tito_core.backend.typed_values import shown
from tito_core.backend.validate import check_input_ids, check_output_ids, check_sampling, clamp_new_tokens
from tito_core.ledger.columns import Logprobs, TokenIds

T = TypeVar("T")
ABORT_WITHIN_S = 5.0
_LISTED_MODELS = 5
"""Names of served models that an error lists."""


class ServedModel(msgspec.Struct):
    """One entry of an OpenAI-style `/v1/models`. vLLM gives an adapter no length of its own."""

    id: str
    max_model_len: int | None = None
    owned_by: str | None = None


class ServedModels(msgspec.Struct):
    """`/v1/models`, which both engines answer."""

    data: list[ServedModel]


class Tokenized(msgspec.Struct):
    """The answer of `/tokenize`, which both engines have."""

    tokens: list[Annotated[int, msgspec.Meta(ge=0, lt=2**31)]]


class HttpBackend(ABC):
    """Base of a backend over HTTP.

    Args:
        base_url: Such as "http://localhost:8000", or "unix:///run/vllm.sock" for a Unix socket.
        model: Name of the model; the server's first one when None.
        api_key: See `EngineHttp`.
        timeout_s: Longest wait for an answer, in seconds.
        connect_timeout_s: Longest wait for a connection, in seconds.
        max_connections: See `EngineHttp`.
        max_attempts: Tries for what is retried: connection failures, 429, 503 and other 5xx.
        http_transport: Makes what carries the requests; scripted engines put theirs here.
        sleep: Waits between tries.
    """

    name: ClassVar[str]

    def __init__(
        self,
        base_url: str,
        *,
        model: str | None = None,
        api_key: str | None = None,
        timeout_s: float = 600.0,
        connect_timeout_s: float = 5.0,
        max_connections: int = 0,
        max_attempts: int = 4,
        http_transport: HttpTransportFactory | None = None,
        sleep: Sleep = asyncio.sleep,
    ) -> None:
        self.http = EngineHttp(
            self.name,
            base_url,
            api_key=api_key,
            timeout_s=timeout_s,
            connect_timeout_s=connect_timeout_s,
            max_connections=max_connections,
            max_attempts=max_attempts,
            http_transport=http_transport,
            sleep=sleep,
        )
        self._model = model
        self._info: EngineInfo | None = None
        self._exchanges = Exchanges(self.http, self._abort_call)

    async def connect(self) -> EngineInfo:
        """Ask the server what it is; later calls give the first answer."""
        if self._info is None:
            self._info = await self._discover()
        return self._info

    async def generate(self, request: TokenRequest, on_chunk: OnChunk | None = None) -> TokenResponse:
        """Sample one completion; see `Backend.generate`. What does not fit the context is refused or clamped here."""
        info = await self.connect()
        ids = check_input_ids(request.input_ids, info.vocab_size, backend=self.name)
        check_sampling(request.sampling, info.vocab_size, backend=self.name)
        if not request.lenient:
            info.capabilities.check(request.wanted, request.sampling, backend=self.name)
        room = clamp_new_tokens(request.sampling.max_new_tokens, len(ids), info.max_model_len, backend=self.name)
        text = IdText.of(ids) if request.text is None else request.text
        if not text.is_of(ids):
            raise BadRequestError(
                f"Law 4: the text that was kept of a prompt, of {text.length} ids, is not that of its {len(ids)} ids, "
                "so it was not sent. Leave `text` out of the request and it is written anew.",
                backend=self.name,
                request_id=request.request_id,
            )
        sampling = request.sampling.within(room)
        if ids is not request.input_ids or sampling is not request.sampling or request.text is None:
            request = replace(request, input_ids=ids, sampling=sampling, text=text)
        response = await self._generate(info, request, text, on_chunk)
        check_output_ids(response.output_ids, info.vocab_size, backend=self.name, request_id=request.request_id)
        if response.message is not None:
            response = replace(response, message=self.http.hide_key(response.message))
        return response

    async def score(self, token_ids: Sequence[int]) -> Logprobs:
        """Score a sequence teacher-forced; see `Backend.score`."""
        info = await self.connect()
        ids = check_input_ids(token_ids, info.vocab_size, backend=self.name)
        clamp_new_tokens(1, len(ids), info.max_model_len, backend=self.name)  # vLLM cannot score without sampling one
        request_id = uuid.uuid4().hex
        return Checks(self.name, request_id).scores(ids, await self._scored(info, ids, request_id))

    async def tokenize(self, text: str) -> TokenIds | None:
        """Encode text with the server's tokenizer; see `Backend.tokenize`.

        A server that refuses has no such endpoint, or guards it; one that fails (500, 501) has no tokenizer.
        """
        info = await self.connect()
        body = {"model": info.model, "prompt": text, "add_special_tokens": False}
        request = HttpRequest("/tokenize", msgspec.json.encode(body))

        async def ask(attempt: Attempt) -> TokenIds | None:
            try:
                raw = await self.http.send_once(request)
                return np.array(decoded(self.http, raw, Tokenized).tokens, np.int32)
            except (AuthenticationError, BadRequestError, ProtocolViolationError) as error:
                error.with_traceback(None)
            except ServerError as error:
                if error.status not in (500, 501):
                    raise
                error.with_traceback(None)
            return None

        return await self.http.retrying(ask)

    @abstractmethod
    async def _discover(self) -> EngineInfo: ...

    @abstractmethod
    async def _generate(
        self, info: EngineInfo, request: TokenRequest, prompt: IdText, on_chunk: OnChunk | None
    ) -> TokenResponse: ...

    @abstractmethod
    async def _scored(
        self, info: EngineInfo, ids: TokenIds, request_id: str
    ) -> Sequence[tuple[int | None, float | None]]:
        """Give (id, raw logprob) for each token of a prompt as the engine says them, None for what it leaves out."""

    @staticmethod
    @abstractmethod
    def _abort_call(request_id: str) -> HttpRequest:
        """Give the call that stops a generation on the engine; it needs no backend, which may be gone by then."""

    async def abort(self, request_id: str) -> None:
        """Stop a generation on the engine; an unknown id does nothing."""
        await self.http.send_once(self._abort_call(request_id))

    async def aclose(self) -> None:
        """Close this event loop's connections."""
        await self.http.aclose()

    async def get(self, path: str, kind: type[T]) -> T:
        """GET and decode."""
        return decoded(self.http, await self.http.send(HttpRequest(path), method="GET"), kind)

    async def get_if_there(self, path: str, kind: type[T]) -> T | None:
        """GET and decode what not every version of a server tells; None where there is no such path."""
        try:
            return await self.get(path, kind)
        except BadRequestError as error:
            if error.status == 404:
                error.with_traceback(None)
                return None
            raise

    async def refusal(self, path: str, body: bytes) -> AuthenticationError | BadRequestError | None:
        """POST what a server should refuse, and give what it says; None when it does not refuse.

        The error comes without its traceback, whose frames hold the connections in a cycle of references.
        """
        try:
            await self.http.retrying(lambda _: self.http.reading(HttpRequest(path, body), _unread))
        except (AuthenticationError, BadRequestError) as error:
            return error.with_traceback(None)
        return None

    async def exchange(
        self,
        request_id: str,
        prepare: Callable[[str], HttpRequest],
        kind: type[T],
        streaming: Streaming[T] | None = None,
        prompt: IdText | None = None,
    ) -> Answer[T]:
        """Send a generation; see `Exchanges.run`."""
        return await self._exchanges.run(request_id, prepare, kind, streaming, self.abort, prompt)

    async def served_model(self) -> ServedModel:
        """Choose the model asked for among those served, and check that the server is of our kind."""
        models = (await self.get("/v1/models", ServedModels)).data
        where = f"The {self.name} server at {self.http.base_url}"
        if not models:
            raise BadRequestError(f"{where} serves no model: start it with one.", backend=self.name)
        owner = models[0].owned_by
        if owner != self.name and owner in installed_backends():
            raise BadRequestError(
                f"The server at {self.http.base_url} says that it is {owner}, not {self.name}: use backend={owner!r}.",
                backend=self.name,
            )
        for model in models:
            if self._model in (None, model.id):
                length = next((m.max_model_len for m in (model, *models) if m.max_model_len is not None), None)
                return ServedModel(model.id, length, owner)
        names = ", ".join(shown(model.id) for model in models[:_LISTED_MODELS])
        if len(models) > _LISTED_MODELS:
            names = f"{names} and {len(models) - _LISTED_MODELS} more"
        raise BadRequestError(
            f"{where} does not serve {shown(self._model)}; it serves {names}. Give one of these as model_id, or leave "
            "it out.",
            backend=self.name,
        )


async def _unread(reply: Reply) -> None:
    """Leave an answer that should have been a refusal: it may be long, and says nothing that is needed."""
