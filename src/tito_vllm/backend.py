"""vLLM as a backend: token ids in and out over `/v1/completions`."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

import msgspec

from tito_core.backend.answer import Checks, Reported
from tito_core.backend.errors import AuthenticationError, BadRequestError
from tito_core.backend.http_backend import HttpBackend
from tito_core.backend.id_text import IdText
from tito_core.backend.protocol import EngineInfo, TokenRequest, TokenResponse
from tito_core.backend.transport import HttpRequest
from tito_core.ledger.columns import TokenIds
from tito_vllm import wire

_PATH = "/v1/completions"


class VLLMBackend(HttpBackend):
    """Speaks to one vLLM server. Arguments: see `HttpBackend`."""

    name = "vllm"

    async def _discover(self) -> EngineInfo:
        model = await self.served_model()
        version = await self.get_if_there("/version", wire.Version)
        return EngineInfo(self.name, model.id, model.max_model_len, version.version if version else None)

    async def _generate(self, info: EngineInfo, request: TokenRequest, prompt: IdText) -> TokenResponse:
        fields = {
            **wire.sampling_fields(request.sampling),
            "model": info.model,
            "n": 1,
            "stream": False,
            "logprobs": 0,
            "return_token_ids": True,
            "return_tokens_as_token_ids": True,
        }
        body = prompt.body(fields, "prompt")
        answer = await self.exchange(request.request_id, lambda running: _post(body, running), wire.Completion)
        checks, choices, usage = Checks(self.name, request.request_id), answer.value.choices, answer.value.usage
        if len(choices) != 1:
            raise checks.violation(f"Law 4: one completion was asked for, {len(choices)} came.")
        choice, logprobs = choices[0], choices[0].logprobs
        said = Reported(
            finish=choice.finish_reason,
            stop=_stop(choice),
            output_ids=choice.token_ids,
            logprobs=logprobs.token_logprobs if logprobs else None,
            logprob_ids=[wire.token_of(text) for text in logprobs.tokens] if logprobs else [],
            echoed=choice.prompt_token_ids,
            prompt_tokens=usage.prompt_tokens,
            completion_tokens=usage.completion_tokens,
            cached_tokens=usage.prompt_tokens_details.cached_tokens if usage.prompt_tokens_details else None,
            # /v1/completions does not tell weight versions
        )
        return checks.response(said, request, latency_s=answer.latency_s, running_id=answer.request_id)

    async def _scored(
        self, info: EngineInfo, ids: TokenIds, request_id: str
    ) -> Sequence[tuple[int | None, float | None]]:
        """Score by `prompt_logprobs`, which are raw in every logprob mode."""
        body = msgspec.json.encode(
            {"model": info.model, "prompt": ids.tolist(), "max_tokens": 1, "temperature": 0.0, "prompt_logprobs": 0}
        )
        answer = await self.exchange(request_id, lambda running: _post(body, running), wire.Completion)
        entries = (answer.value.choices[0].prompt_logprobs if answer.value.choices else None) or []
        return [wire.score_of(entry) for entry in entries]

    async def abort(self, request_id: str) -> None:
        """Abort by the server's id; an unknown id does nothing.

        Only a server with `--enable-scale-out` has the call. For others a closed connection is the abort, and of a
        lost request it has been closed by now.
        """
        body = msgspec.json.encode({"request_ids": [f"cmpl-{request_id}-0"]})
        with contextlib.suppress(AuthenticationError, BadRequestError):
            await self.http.send_once(HttpRequest("/inference/v1/abort_requests", body))


def _post(body: bytes, running: str) -> HttpRequest:
    return HttpRequest(_PATH, body, {"X-Request-Id": running})


def _stop(choice: wire.Choice) -> int | str | None:
    """Give what stopped it: vLLM reports null for the model's own end-of-sequence token."""
    if choice.stop_reason is None and choice.token_ids:
        return choice.token_ids[-1]
    return choice.stop_reason
