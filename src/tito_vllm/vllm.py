"""`VLLMModel`: a `TITOModel` by the name and with the arguments that users of strands-vllm know."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeAlias, TypedDict, Unpack

from strands.types.content import Messages, SystemContentBlock
from strands.types.streaming import StreamEvent
from strands.types.tools import ToolChoice, ToolSpec

from strands_tito.compat.lazy_model import LazyModel, check_tokenizer, refuse_overrides
from strands_tito.compat.sampling_names import neutral_sampling
from strands_tito.compat.shared_policies import SharedPolicies
from tito_core.backend.protocol import Backend
from tito_core.chat.messages import template_messages, template_tools
from tito_core.model import Policy
from tito_core.policy import refuse_ignored
from tito_core.settings import RolloutOptions, Settings
from tito_vllm.openai_params import (
    IGNORED,
    RENAMED,
    check_unsupported,
    merged_params,
    openai_tool_choice,
    response_grammar,
)

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_SHARED = SharedPolicies()
_NEVER_CALLED = (
    *("format_request", "format_request_messages", "format_request_message_content", "format_request_tool_message"),
    *("format_request_message_tool_call", "format_chunk"),
)
"""Methods that strands-vllm calls at each turn, and `VLLMModel` does not."""


class VLLMModelConfig(TypedDict, total=False):
    """Arguments of `VLLMModel`, for users who keep them in a dict."""

    base_url: str
    api_key: str
    model_id: str
    params: dict[str, Any] | None
    return_token_ids: bool
    disable_tools: bool


class OpenAIConfig(TypedDict, total=False):
    """The values in `VLLMModel.config` that a user sets."""

    model_id: str
    params: dict[str, Any] | None


_OpenAIConfig = OpenAIConfig


class VLLMModel(LazyModel):
    """A Strands model over one vLLM server, which gets token ids. It connects at the first turn.

    All models with the same server, tokenizer and template arguments share one policy, so make one model per rollout.
    The server needs neither `--enable-auto-tool-choice` nor `--tool-call-parser`: calls are parsed here.

    Args:
        base_url: Such as "http://localhost:8000"; a trailing "/v1" is removed.
        model_id: Name of the model on the server.
        api_key: The server's API key; "EMPTY" for none.
        params: Parameters of every turn by OpenAI's names, with vLLM's own names in "extra_body". There,
            "chat_template_kwargs" are the template's arguments, and unknown names are sent to the server. A sampling
            parameter that is not set has the default of `SamplingParams`, whatever the server's default is.
        return_token_ids: Whether the event that ends a message carries ids, for `VLLMTokenRecorder`.
        disable_tools: Whether to leave the tools out of the prompt, and treat calls as text. The parameter
            `tool_choice="none"` keeps the tools in the prompt, and treats calls as text.
        client: Not supported, because an OpenAI client sends messages. Must be None.
        tokenizer: The model's tokenizer, its name, or a folder. Default: `model_id`.
        parser: Format of tool calls; "auto" detects it from the chat template.
        backend: A backend object, in place of `base_url` and `api_key`; it names the model to its server.
        **choices: See `RolloutOptions`.

    Raises:
        TemplateError, DetectionError: The tokenizer's chat template cannot be used; see `Policy.connect`.
        TypeError: There is no `base_url`.
        ValueError: A bad argument.
    """

    OpenAIConfig: TypeAlias = _OpenAIConfig

    def __init_subclass__(cls, **options: Any) -> None:
        """Refuse to override methods that a turn does not call.

        Raises:
            TypeError: The subclass has such a method.
        """
        super().__init_subclass__(**options)
        refuse_overrides(cls, _NEVER_CALLED)

    def __init__(
        self,
        *,
        base_url: str = "",
        model_id: str,
        api_key: str = "EMPTY",
        params: Mapping[str, Any] | None = None,
        return_token_ids: bool = False,
        disable_tools: bool = False,
        client: None = None,
        tokenizer: PreTrainedTokenizerBase | str | None = None,
        parser: str = "auto",
        backend: Backend | None = None,
        **choices: Unpack[RolloutOptions],
    ) -> None:
        if client is not None:
            raise ValueError(
                f"client={client!r} is not supported: it would send messages, and the server would tokenize them. "
                "Leave it out and set base_url."
            )
        self._model_id = model_id
        self._disable_tools = disable_tools
        self._return_token_ids = return_token_ids
        self._choices = choices
        self._params = merged_params(params, return_token_ids, disable_tools)
        self._tokenizer = model_id if tokenizer is None else tokenizer
        self._policy_options: dict[str, Any] = {
            "parser": parser,
            "template_arguments": dict(self._params["extra_body"].get("chat_template_kwargs") or {}),
            **_server(backend, base_url, model_id, None if api_key == "EMPTY" else api_key),
        }
        settings = self._settings_of(self._params)
        check_tokenizer(self._tokenizer, parser, self._policy_options["template_arguments"])
        super().__init__(self._shared_policy, settings)
        self.publish_config()

    def _user_config(self) -> dict[str, Any]:
        config: dict[str, Any] = {"model_id": self._model_id, "params": _shown(self._params)}
        if not self.is_connected:
            config["context_window_limit"] = self._choices.get("context_window_limit")
        return config

    def _described(self, values: dict[str, Any]) -> dict[str, Any]:
        return {**super()._described({}), **values}

    def _apply_changes(self, changes: Mapping[str, Any]) -> None:
        options = dict(changes)
        if options.get("model_id") == self._model_id:
            del options["model_id"]
        if fixed := {"base_url", "model_id", "api_key", "tokenizer", "parser", "backend"} & set(options):
            raise ValueError(f"{', '.join(sorted(fixed))} cannot change during a rollout: make a new model.")
        if unknown := set(options) - {"params", *RolloutOptions.__annotations__}:
            raise ValueError(f"Unknown setting {', '.join(sorted(unknown))}. Sampling parameters go into params.")
        params = merged_params(options.pop("params", self._params), self._return_token_ids, self._disable_tools)
        if (params["extra_body"].get("chat_template_kwargs") or {}) != self._policy_options["template_arguments"]:
            raise ValueError("chat_template_kwargs cannot change during a rollout: make a new model.")
        before = self._choices
        self._choices = {**before, **options}  # type: ignore[typeddict-item]  # the keys were checked
        try:
            self._use_settings(self._settings_of(params))
        except ValueError:
            self._choices = before
            raise
        self._params = params

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

    def format_request(
        self,
        messages: Messages,
        tool_specs: list[ToolSpec] | None = None,
        system_prompt: str | None = None,
        tool_choice: ToolChoice | None = None,
        **_: Any,
    ) -> dict[str, Any]:
        """Return a turn as a chat-completions request, for logs and tests. `stream` sends token ids instead.

        Args:
            messages: The history; contents are as chat templates read them.
            tool_specs: The tools.
            system_prompt: The system prompt.
            tool_choice: Strands' choice; it wins over the parameter `tool_choice`.
        """
        request: dict[str, Any] = {
            "messages": [dict(message) for message in template_messages(messages, system_prompt)],
            "model": self._model_id,
            "stream": True,
            "stream_options": {"include_usage": True},
            "tools": [] if self._disable_tools else template_tools(tool_specs) or [],
            **_shown(self._params),
        }
        if tool_choice is not None:
            request["tool_choice"] = openai_tool_choice(tool_choice)
        return request

    def _settings_of(self, params: Mapping[str, Any]) -> Settings:
        choices: dict[str, Any] = dict(self._choices)
        given = {**params, **params["extra_body"]}
        tool_choice = given.pop("tool_choice", None)
        if tool_choice not in (None, "none", "auto"):
            raise ValueError(
                f"tool_choice={tool_choice!r} is not supported as a parameter: every turn of an agent would have to "
                "call a tool. Use 'auto' or 'none', or force one call with the agent's structured_output_model."
            )
        if (timeout := given.pop("timeout", None)) is not None:
            choices.setdefault("turn_timeout_s", timeout)
        if grammar := response_grammar(given.pop("response_format", None)):
            given = {**given, **grammar}
        check_unsupported(given)
        if top := given.pop("top_logprobs", None):
            choices["optional_outputs"] = {"top_logprobs": top, **dict(choices.get("optional_outputs") or {})}
        unknown = set(params["extra_body"]) - set(IGNORED) - {"response_format", "timeout"}
        sampling = neutral_sampling(given, renamed=RENAMED, ignored=IGNORED, passed={"logit_bias", *unknown})
        if sampling:
            if choices.get("sampling"):
                raise ValueError("sampling and params both set sampling parameters. Use one of the two.")
            choices["sampling"] = sampling
        runs_calls = not self._disable_tools and tool_choice != "none"
        return replace(Settings.of(**choices), reports_ids=self._return_token_ids, runs_calls=runs_calls)

    def _shared_policy(self) -> Policy:
        loaded = self._tokenizer if isinstance(self._tokenizer, str) else id(self._tokenizer)
        return _SHARED.get((loaded, repr(sorted(self._policy_options.items()))), self._connect_policy)

    def _connect_policy(self) -> Policy:
        return Policy.connect(tokenizer=self._tokenizer, **self._policy_options)


def _shown(params: Mapping[str, Any]) -> dict[str, Any]:
    """Return the parameters as the user gave them, without an empty "extra_body"."""
    return {name: value for name, value in params.items() if name != "extra_body" or value}


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


def make_vllm_openai_model(
    *,
    base_url: str,
    model_id: str,
    api_key: str = "EMPTY",
    params: Mapping[str, Any] | None = None,
    return_token_ids: bool = False,
    disable_tools: bool = False,
    **options: Any,
) -> VLLMModel:
    """Return a `VLLMModel`. The function of strands-vllm returns an OpenAI model, which sends messages."""
    return VLLMModel(
        base_url=base_url,
        model_id=model_id,
        api_key=api_key,
        params=params,
        return_token_ids=return_token_ids,
        disable_tools=disable_tools,
        **options,
    )
