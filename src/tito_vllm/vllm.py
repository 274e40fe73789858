"""`VLLMModel`: the core's model by the name and the arguments that users of strands-vllm know, now token-in."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypedDict, Unpack, cast

from strands.types.content import Messages, SystemContentBlock
from strands.types.streaming import StreamEvent
from strands.types.tools import ToolSpec

from strands_tito.compat.lazy_model import LazyModel, check_tokenizer
from strands_tito.compat.sampling_names import neutral_sampling
from strands_tito.compat.shared_policies import SharedPolicies
from tito_core.backend.protocol import Backend
from tito_core.model import Policy
from tito_core.settings import RolloutOptions, Settings, TITOConfig

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_OTHER_NAMES = {
    "max_tokens": "max_new_tokens",
    "max_completion_tokens": "max_new_tokens",
    "min_tokens": "min_new_tokens",
}
_IGNORED = ("logprobs", "stream", "stream_options", "return_token_ids", "chat_template_kwargs", "extra_body")
"""What is always so here, or is read apart."""
_SHARED = SharedPolicies()


class VLLMModelConfig(TypedDict, total=False):
    """Arguments of `VLLMModel`, for users who keep them together."""

    base_url: str
    api_key: str
    model_id: str
    params: dict[str, Any] | None
    return_token_ids: bool
    disable_tools: bool


class VLLMModel(LazyModel):
    """A Strands model over one vLLM server, which gets token ids. Nothing is asked of it before the first turn.

    All models with the same server, tokenizer and template arguments share what is costly, so make one a rollout. The
    server needs no `--enable-auto-tool-choice` and no `--tool-call-parser`: calls are read here, out of the ids.

    Args:
        base_url: Such as "http://localhost:8000"; a "/v1" at its end is left out.
        model_id: Name of the model on the server.
        api_key: The server's; "EMPTY" where it has none.
        params: Sampling parameters by OpenAI's names, and in "extra_body" by vLLM's. "chat_template_kwargs" there are
            the template's arguments; what is unknown there goes to the server. Parameters that are not given have
            `SamplingParams`' defaults, whatever the server's own are.
        return_token_ids: Whether the event that ends a message carries ids, for `VLLMTokenRecorder`.
        disable_tools: Whether the policy is shown no tools, and what reads like a call all the same is text. With the
            parameter `tool_choice="none"` it is shown them, and may not call one either.
        client: Must be None: an OpenAI client speaks messages.
        tokenizer: The model's, its name, or a folder; `model_id` when None.
        parser: The format of tool calls; "auto" takes the one that the chat template shows.
        backend: What speaks to the server, where it is made apart; `base_url` and `api_key` are then not looked at.
        **choices: See `TITOModel`.

    Raises:
        TemplateError, DetectionError, ValueError: What is given cannot work; each a sentence.
    """

    def __init__(
        self,
        *,
        base_url: str,
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
                f"client={client!r} would send messages, for the server to tokenize: leave it out, and requests of "
                "token ids go to base_url."
            )
        self._model_id = model_id
        self._disable_tools = disable_tools
        self._return_token_ids = return_token_ids
        self._choices = choices
        self._params = _merged(params, return_token_ids, disable_tools)
        self._tokenizer = model_id if tokenizer is None else tokenizer
        self._connecting_with: dict[str, Any] = {
            "backend": backend or "vllm",
            "base_url": base_url.rstrip("/").removesuffix("/v1"),
            "parser": parser,
            "template_arguments": dict(self._params["extra_body"].get("chat_template_kwargs") or {}),
            "model": model_id,
            "api_key": None if api_key == "EMPTY" else api_key,
        }
        chosen = self._settings_of(self._params)
        check_tokenizer(self._tokenizer, parser, self._connecting_with["template_arguments"])
        super().__init__(self._shared_policy, chosen)

    @property
    def config(self) -> TITOConfig:
        """The model's name and parameters, and once connected what came of them."""
        given: Any = {"model_id": self._model_id, "params": self._params}
        if not self.is_connected:
            given["context_window_limit"] = self._choices.get("context_window_limit")
            return cast(TITOConfig, given)
        return {**super().config, **given}

    def update_config(self, **model_config: Any) -> None:
        """Change `params`, or one of `TITOModel`'s choices.

        Raises:
            ValueError: A bad value or an unknown name, or what cannot change in a rollout; nothing is changed.
        """
        if fixed := {"base_url", "model_id", "api_key", "tokenizer", "parser"} & set(model_config):
            raise ValueError(f"{', '.join(sorted(fixed))} cannot change in a rollout: make a new model.")
        if unknown := set(model_config) - {"params", *RolloutOptions.__annotations__}:
            raise ValueError(f"There is no setting {', '.join(sorted(unknown))}; sampling parameters go into params.")
        params = _merged(model_config.pop("params", self._params), self._return_token_ids, self._disable_tools)
        if (params["extra_body"].get("chat_template_kwargs") or {}) != self._connecting_with["template_arguments"]:
            raise ValueError("chat_template_kwargs are the same in each turn of a rollout: make a new model.")
        before = self._choices
        self._choices = {**before, **model_config}  # type: ignore[typeddict-item]  # its keys were looked at
        try:
            self._choose(self._settings_of(params))
        except ValueError:
            self._choices = before
            raise
        self._params = params

    def stream(
        self,
        messages: Messages,
        tool_specs: list[ToolSpec] | None = None,
        system_prompt: str | None = None,
        **asked: Any,
    ) -> AsyncGenerator[StreamEvent]:
        """Run one turn; see `TITOModel.stream`."""
        return super().stream(messages, None if self._disable_tools else tool_specs, system_prompt, **asked)

    async def count_tokens(
        self,
        messages: Messages,
        tool_specs: list[ToolSpec] | None = None,
        system_prompt: str | None = None,
        system_prompt_content: list[SystemContentBlock] | None = None,
    ) -> int:
        """Count the tokens of a history, with the tools that the policy is shown."""
        shown = [] if self._disable_tools and tool_specs is not None else tool_specs
        return await super().count_tokens(messages, shown, system_prompt, system_prompt_content)

    def _settings_of(self, params: Mapping[str, Any]) -> Settings:
        choices: dict[str, Any] = dict(self._choices)
        given = {**params, **params["extra_body"]}
        if (tool_choice := given.pop("tool_choice", None)) not in (None, "none", "auto"):
            raise ValueError(f"tool_choice={tool_choice!r} is the agent's to ask for, not a parameter of every turn.")
        if top := given.pop("top_logprobs", None):
            choices["optional_outputs"] = {"top_logprobs": top, **dict(choices.get("optional_outputs") or {})}
        unknown = set(params["extra_body"]) - set(_IGNORED)
        sampling = neutral_sampling(given, renamed=_OTHER_NAMES, ignored=_IGNORED, passed={"logit_bias", *unknown})
        if sampling:
            choices["sampling"] = sampling
        runs_calls = not self._disable_tools and tool_choice != "none"
        return replace(Settings.of(**choices), reports_ids=self._return_token_ids, runs_calls=runs_calls)

    def _shared_policy(self) -> Policy:
        loaded = self._tokenizer if isinstance(self._tokenizer, str) else id(self._tokenizer)
        return _SHARED.get((loaded, repr(sorted(self._connecting_with.items()))), self._policy)

    def _policy(self) -> Policy:
        return Policy.connect(tokenizer=self._tokenizer, **self._connecting_with)


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
    """Make a `VLLMModel`; what strands-vllm makes here sends messages, for the server to tokenize."""
    return VLLMModel(
        base_url=base_url,
        model_id=model_id,
        api_key=api_key,
        params=params,
        return_token_ids=return_token_ids,
        disable_tools=disable_tools,
        **options,
    )


def _merged(params: Mapping[str, Any] | None, return_token_ids: bool, disable_tools: bool) -> dict[str, Any]:
    """Give parameters with what the other arguments add to them."""
    merged = dict(params or {})
    body = dict(merged.get("extra_body") or {})
    if return_token_ids:
        body.setdefault("return_token_ids", True)
    if disable_tools:
        merged.setdefault("tool_choice", "none")
    return {**merged, "extra_body": body}
