"""The names that strands-vllm's README and examples import: `VLLMModel`, a `TITOModel` with their arguments, and its
hooks.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Unpack

from strands.types.content import Messages, SystemContentBlock
from strands.types.streaming import StreamEvent
from strands.types.tools import ToolSpec

from tito_compat.model import LazyModel, SharedPolicies, rollout_settings
from tito_core.backend.protocol import Backend
from tito_core.hooks import ToolCallGuard
from tito_core.model import Policy
from tito_core.policy import refuse_ignored
from tito_core.settings import RolloutOptions

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_SHARED = SharedPolicies()
VLLMToolValidationHooks = ToolCallGuard


class VLLMModel(LazyModel):
    """A Strands model over one vLLM server, which gets token ids. It connects at the first turn.

    All models with the same server, tokenizer and template arguments share one policy, so make one model per rollout.
    The server needs neither `--enable-auto-tool-choice` nor `--tool-call-parser`: calls are parsed here.

    Args:
        base_url: Such as "http://localhost:8000"; a trailing "/v1" is removed.
        model_id: Name of the model on the server.
        api_key: The server's API key; "EMPTY" for none.
        params: Sampling parameters of every turn by OpenAI's names or ours, also in "extra_body". There,
            "chat_template_kwargs" are the template's arguments. A sampling parameter that is not set has the default of
            `SamplingParams`, whatever the server's default is.
        return_token_ids: Whether the event that ends a message carries ids, for `VLLMTokenRecorder`.
        disable_tools: Whether to leave the tools out of the prompt, and treat calls as text.
        tokenizer: The model's tokenizer, its name, or a folder. Default: `model_id`.
        parser: Format of tool calls; "auto" detects it from the chat template.
        backend: A backend object, in place of `base_url` and `api_key`; it names the model to its server.
        **options: See `RolloutOptions`. Unknown names are refused.

    Raises:
        TypeError: There is neither `base_url` nor `backend`.
        ValueError: A bad argument.
    """

    def __init__(
        self,
        *,
        base_url: str = "",
        model_id: str,
        api_key: str = "EMPTY",
        params: Mapping[str, Any] | None = None,
        return_token_ids: bool = False,
        disable_tools: bool = False,
        tokenizer: PreTrainedTokenizerBase | str | None = None,
        parser: str = "auto",
        backend: Backend | None = None,
        **options: Unpack[RolloutOptions],
    ) -> None:
        given = dict(params or {})
        given |= given.pop("extra_body", None) or {}
        self._disable_tools = disable_tools
        self._tokenizer = model_id if tokenizer is None else tokenizer
        self._policy_options: dict[str, Any] = {
            "parser": parser,
            "template_arguments": given.pop("chat_template_kwargs", None) or {},
            **_server(backend, base_url, model_id, None if api_key == "EMPTY" else api_key),
        }
        settings = rollout_settings(given, options)
        settings = replace(settings, reports_ids=return_token_ids, runs_calls=not disable_tools)
        super().__init__(self._shared_policy, settings)

    def stream(
        self,
        messages: Messages,
        tool_specs: list[ToolSpec] | None = None,
        system_prompt: str | None = None,
        **options: Any,
    ) -> AsyncGenerator[StreamEvent]:
        """Run one turn; see `TITOModel.stream`."""
        return super().stream(messages, None if self._disable_tools else tool_specs, system_prompt, **options)

    async def count_tokens(
        self,
        messages: Messages,
        tool_specs: list[ToolSpec] | None = None,
        system_prompt: str | None = None,
        system_prompt_content: list[SystemContentBlock] | None = None,
    ) -> int:
        """Count the tokens of a history, without the tools if they are disabled."""
        specs = [] if self._disable_tools and tool_specs is not None else tool_specs
        return await super().count_tokens(messages, specs, system_prompt, system_prompt_content)

    def _shared_policy(self) -> Policy:
        loaded = self._tokenizer if isinstance(self._tokenizer, str) else id(self._tokenizer)
        return _SHARED.get((loaded, repr(sorted(self._policy_options.items()))), self._connect_policy)

    def _connect_policy(self) -> Policy:
        return Policy.connect(tokenizer=self._tokenizer, **self._policy_options)


def _server(backend: Backend | None, base_url: str, model_id: str, api_key: str | None) -> dict[str, Any]:
    """Return the arguments of `Policy.connect` that name the server.

    Raises:
        TypeError: Neither a backend nor an address.
        ValueError: Both.
    """
    if backend is not None:
        refuse_ignored(backend, {"base_url": base_url, "api_key": api_key})
        return {"backend": backend}
    if not base_url:
        raise TypeError("base_url is missing: give the server's address, such as 'http://localhost:8000/v1'.")
    url = base_url.rstrip("/").removesuffix("/v1")
    return {"backend": "vllm", "base_url": url, "model": model_id, "api_key": api_key}
