"""`VLLMModel`: a `TITOModel` by the name and with the arguments that users of strands-vllm know.

Parameters have OpenAI's names: each is translated, ignored or refused.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeAlias, TypedDict, Unpack

from strands.hooks import BeforeToolCallEvent
from strands.types.content import Messages, SystemContentBlock
from strands.types.streaming import StreamEvent
from strands.types.tools import ToolChoice, ToolSpec

from tito_compat.model import LazyModel, SharedPolicies, check_tokenizer, neutral_sampling
from tito_core.backend.protocol import Backend
from tito_core.chat.messages import template_messages, template_tools
from tito_core.hooks import ToolCallGuard
from tito_core.model import Policy
from tito_core.policy import refuse_ignored
from tito_core.settings import RolloutOptions, Settings

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


_SHARED = SharedPolicies()
_RENAMED = {
    "max_tokens": "max_new_tokens",
    "max_completion_tokens": "max_new_tokens",
    "min_tokens": "min_new_tokens",
}
_IGNORED = ("logprobs", "stream", "stream_options", "return_token_ids", "chat_template_kwargs", "extra_body", "user")
"""Names that are always set here or read elsewhere. vLLM 0.32 reads no `user`."""
_OF_CHAT = (
    *("chat_template", "documents", "continue_final_message", "add_generation_prompt", "prompt_token_ids"),
    *("mm_processor_kwargs", "media_io_kwargs", "reasoning_effort", "include_reasoning"),
)
"""Fields of vLLM's chat endpoint that change the prompt or the reading of the answer; `/generate` ignores them."""
_AS_HERE = {"continue_final_message": False, "add_generation_prompt": True, "include_reasoning": True}
"""Values that ask for what is done here."""


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
            "chat_template_kwargs" are the template's arguments; an unknown name is refused at the first turn. A
            sampling parameter that is not set has the default of `SamplingParams`, whatever the server's default is.
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

    never_called = (
        *("format_request", "format_request_messages", "format_request_message_content", "format_chunk"),
        *("format_request_tool_message", "format_request_message_tool_call"),
    )

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
        self._params = _merged_params(params, return_token_ids, disable_tools)
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
        params = _merged_params(options.pop("params", self._params), self._return_token_ids, self._disable_tools)
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
            request["tool_choice"] = _openai_tool_choice(tool_choice)
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
        if grammar := _response_grammar(given.pop("response_format", None)):
            given = {**given, **grammar}
        _check_unsupported(given)
        if top := given.pop("top_logprobs", None):
            choices["optional_outputs"] = {"top_logprobs": top, **dict(choices.get("optional_outputs") or {})}
        unknown = set(params["extra_body"]) - set(_IGNORED) - {"response_format", "timeout"}
        sampling = neutral_sampling(given, renamed=_RENAMED, ignored=_IGNORED, passed={"logit_bias", *unknown})
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


class VLLMToolValidationHooks(ToolCallGuard):
    """`ToolCallGuard` with strands-vllm's arguments.

    Args:
        include_allowed_tools_in_errors: Whether the error about an unknown tool lists the tools.
        max_allowed_tools_in_error: Maximum number of tools that it lists.
        validate_input_shape: Whether arguments must match the tool's whole JSON Schema.
    """

    def __init__(
        self,
        include_allowed_tools_in_errors: bool = True,
        max_allowed_tools_in_error: int = 25,
        validate_input_shape: bool = True,
    ) -> None:
        super().__init__(max_allowed_tools_in_error if include_allowed_tools_in_errors else None)
        self.include_allowed_tools_in_errors = include_allowed_tools_in_errors
        self.max_allowed_tools_in_error = max_allowed_tools_in_error
        self.validate_input_shape = validate_input_shape

    def before_tool_call(self, event: BeforeToolCallEvent) -> None:
        """Cancel an invalid call by setting `cancel_tool`."""
        self.check_call(event)

    def check_call(self, event: BeforeToolCallEvent) -> None:
        """Cancel an invalid call."""
        if event.selected_tool is not None and not self.validate_input_shape:
            return
        if event.selected_tool is not None and not isinstance(event.tool_use["input"], Mapping):
            name = event.tool_use["name"]
            event.cancel_tool = f"The arguments of {name!r} must be an object, not {event.tool_use['input']!r}."
            return
        super().check_call(event)


def _merged_params(params: Mapping[str, Any] | None, return_token_ids: bool, disable_tools: bool) -> dict[str, Any]:
    """Return the parameters, with those that other arguments imply."""
    merged = dict(params or {})
    body = dict(merged.get("extra_body") or {})
    if return_token_ids:
        body.setdefault("return_token_ids", True)
    if disable_tools:
        merged.setdefault("tool_choice", "none")
    return {**merged, "extra_body": body}


def _check_unsupported(params: dict[str, Any]) -> None:
    """Remove parameters that ask for nothing, and refuse those that would be ignored.

    Raises:
        ValueError: `parallel_tool_calls` is False, or there are `extra_headers`.
    """
    if params.pop("parallel_tool_calls", None) is False:
        raise ValueError(
            "parallel_tool_calls=False is not supported: the server does not parse calls. Use the hook "
            "LoopLimiter(max_parallel_tool_calls=1)."
        )
    if of_chat := [name for name in _OF_CHAT if (value := params.pop(name, None)) and value is not _AS_HERE.get(name)]:
        raise ValueError(
            f"{', '.join(of_chat)} cannot be set: the server gets token ids and does not render the prompt. Pass the "
            "template's arguments in chat_template_kwargs, and another template as tokenizer.chat_template."
        )
    if headers := params.pop("extra_headers", None):
        raise ValueError(
            f"extra_headers ({', '.join(map(str, headers))}) are not supported. Use api_key for authentication, or "
            "pass backend=VLLMBackend(..., headers=...) to send headers of your own."
        )


def _response_grammar(response_format: Any) -> dict[str, Any]:
    """Return OpenAI's `response_format` as a parameter of `neutral_sampling`.

    Raises:
        ValueError: An unknown type, or no schema.
    """
    match response_format:
        case None | {"type": "text"}:
            return {}
        case {"type": "json_object"}:
            return {"json_schema": {"type": "object"}}
        case {"type": "json_schema", "json_schema": {"schema": Mapping() as schema}}:
            return {"json_schema": dict(schema)}
    raise ValueError(
        f"response_format={response_format!r} is not supported. Use {{'type': 'text'}}, {{'type': 'json_object'}} "
        "or {'type': 'json_schema', 'json_schema': {'schema': ...}}."
    )


def _openai_tool_choice(choice: ToolChoice) -> Any:
    """Return Strands' tool choice as OpenAI writes it."""
    match dict(choice):
        case {"auto": _}:
            return "auto"
        case {"any": _}:
            return "required"
        case {"tool": {"name": name}}:
            return {"type": "function", "function": {"name": name}}
    return "auto"


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


def _shown(params: Mapping[str, Any]) -> dict[str, Any]:
    """Return the parameters as the user gave them, without an empty "extra_body"."""
    return {name: value for name, value in params.items() if name != "extra_body" or value}
