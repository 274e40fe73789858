"""`SGLangModel`: a `TITOModel` by the name and with the arguments that users of strands-sglang know.

Also its message formats, which no turn uses, and the older names of rollouts and limits.
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, TypeAlias, Unpack

from strands.types.content import ContentBlock, Message, Messages
from strands.types.tools import ToolResultContent, ToolSpec

from tito_compat.model import LazyModel, check_tokenizer, neutral_sampling
from tito_compat.rollout import Rollout, Token, decode_routed_experts
from tito_compat.sglang_client import (
    SGLangClient,
    SGLangClientError,
    SGLangConnectionError,
    SGLangContextLengthError,
    SGLangDecodingError,
    SGLangHTTPError,
    SGLangThrottledError,
    as_sglang_error,
    get_client,
    get_client_from_slime_args,
    get_tokenizer,
)
from tito_compat.sglang_parsers import (
    UNKNOWN_TOOL_NAME,
    HermesToolCallParser,
    ToolCallParser,
    ToolCallParseResult,
    ToolParser,
    get_tool_parser,
    resolve,
    with_text_parser,
)
from tito_core.backend.errors import BackendError
from tito_core.backend.protocol import OptionalOutputs
from tito_core.backend.values import refuse_unknown
from tito_core.chat.messages import UnsupportedContentError, template_messages, template_tools
from tito_core.hooks import (
    LoopLimiter,
    LoopLimitReachedError,
    MaxMessagesReachedError,
    MaxToolCallsReachedError,
    MaxToolIterationsReachedError,
)
from tito_core.model import Policy
from tito_core.policy import run_blocking
from tito_core.settings import RolloutOptions, Settings

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = [
    "DEFAULT_BASE_URL",
    "UNKNOWN_TOOL_NAME",
    "HermesToolCallParser",
    "LoopLimitReachedError",
    "LoopLimiter",
    "MaxMessagesReachedError",
    "MaxToolCallsReachedError",
    "MaxToolIterationsReachedError",
    "Rollout",
    "SGLangClient",
    "SGLangClientError",
    "SGLangConfig",
    "SGLangConnectionError",
    "SGLangContextLengthError",
    "SGLangDecodingError",
    "SGLangHTTPError",
    "SGLangModel",
    "SGLangThrottledError",
    "Token",
    "TokenManager",
    "ToolCallParseResult",
    "ToolCallParser",
    "ToolIterationLimiter",
    "ToolLimiter",
    "UnsupportedBlockError",
    "collect_image_data",
    "decode_routed_experts",
    "format_content_block",
    "format_messages",
    "get_client",
    "get_client_from_slime_args",
    "get_tokenizer",
    "get_tool_parser",
    "sort_tool_results",
]

TokenManager = Rollout  # its name in strands-sglang before 0.4
ToolLimiter = LoopLimiter


Part = dict[str, Any]
DEFAULT_BASE_URL = "http://localhost:30000"
_RENAMED = {"sampling_seed": "seed"}
_PASSED = ("logit_bias", "custom_params", "stop_regex", "stream_interval", "choice")


class SGLangConfig(RolloutOptions, total=False):
    """The options of one rollout, in addition to those of `RolloutOptions`.

    Attributes:
        sampling_params: Sampling parameters by SGLang's names. A parameter that is not set has the default of
            `SamplingParams`, whatever the server's default is.
        return_logprob: Whether prompt tokens get logprobs, too. Default: True. Sampled tokens always have theirs.
        return_routed_experts: Whether to record the experts of each token. SGLang does not report their shape: pass
            (layers, experts per token) to get it in `trajectory`, or True for flat rows, which `decode_routed_experts`
            can shape.
        enable_thinking: The chat template's argument of that name, fixed for the rollout. Default: True.
        params: Older name of `sampling_params`.
        return_logprobs: Older name of `return_logprob`.
        model_id: A name for the model, which is not sent: a server has one model. That of a LoRA adapter is refused.
    """

    sampling_params: Mapping[str, Any] | None
    return_logprob: bool | None
    return_routed_experts: bool | tuple[int, int] | None
    enable_thinking: bool | None
    params: Mapping[str, Any] | None
    return_logprobs: bool | None
    model_id: str | None


_Config = SGLangConfig


class UnsupportedBlockError(UnsupportedContentError, KeyError):
    """A block cannot be formatted. strands-sglang raises `KeyError`."""

    __str__ = Exception.__str__  # that of KeyError quotes the sentence


def format_content_block(block: ContentBlock | ToolResultContent, is_multimodal: bool = False) -> Part | str:
    """Return a text, JSON or image block as a part of a template's content, or as text if not `is_multimodal`.

    Raises:
        UnsupportedBlockError: Another block; or an image, if not `is_multimodal`.
    """
    content: Mapping[str, Any] = block
    if "text" in content or "json" in content:
        text = content["text"] if "text" in content else json.dumps(content["json"])
        return {"type": "text", "text": text} if is_multimodal else str(text)
    if "image" in content and is_multimodal:
        data = base64.b64encode(content["image"]["source"]["bytes"]).decode("ascii")
        return {"type": "image", "image": f"data:image/{content['image']['format']};base64,{data}"}
    raise UnsupportedBlockError(
        f"A {next(iter(content), 'empty')!r} block cannot be formatted with is_multimodal={is_multimodal}. Use text "
        "and JSON blocks, and image blocks with is_multimodal=True."
    )


def format_messages(
    messages: Messages, system_prompt: str | None = None, is_multimodal: bool = False
) -> list[dict[str, Any]]:
    """Return a history as chat templates read it; each tool result is a message of the role "tool".

    Args:
        messages: Strands messages.
        system_prompt: The system prompt, or None.
        is_multimodal: Whether contents are lists of parts, which may be images, and not text.

    Raises:
        UnsupportedBlockError: A block cannot be formatted.
    """
    if not is_multimodal:
        return [dict(message) for message in template_messages(messages, system_prompt)]
    formatted = [each for message in messages for each in _multimodal(message)]
    if not system_prompt:
        return formatted
    return [{"role": "system", "content": [format_content_block({"text": system_prompt}, True)]}, *formatted]


def sort_tool_results(messages: Messages) -> Messages:
    """Return messages in which the tool results of a message are sorted by the numbers in their ids."""
    return [
        {**message, "content": sorted(message["content"], key=_number)} if _has_results(message) else message
        for message in messages
    ]


def collect_image_data(messages: Messages, is_multimodal: bool = False) -> list[str]:
    """Return the images of a history as data URLs, in order; none if not `is_multimodal`."""
    if not is_multimodal:
        return []
    parts = (part for message in format_messages(messages, is_multimodal=True) for part in message["content"])
    return [part["image"] for part in parts if part["type"] == "image"]


class SGLangModel(LazyModel):
    """A Strands model over one SGLang server, which it connects to at the first turn.

    All models with the same client, tokenizer and format share one policy, so make one model per rollout.

    Args:
        client: The server's client.
        tokenizer: The model's tokenizer, or its name.
        tool_parser: The format of tool calls, its name, or a `ToolParser` with a `parse` of its own. None detects the
            format from the chat template.
        base_url: Address of the server, in place of `client`. Models with the same address share one client.
            Default: "http://localhost:30000".
        timeout: Longest wait for an answer in seconds, with `base_url`; None for no limit.
        tool_call_parser: Older name of `tool_parser`.
        **config: See `SGLangConfig`. Unknown names are refused.

    Raises:
        TemplateError, DetectionError: The tokenizer's chat template cannot be used; see `Policy.connect`.
        UnknownParserError, ValueError: A bad argument.
    """

    SGLangConfig: TypeAlias = _Config

    never_called = (
        *("format_messages", "format_request_messages", "format_tool_specs", "format_content_block"),
        *("sort_tool_results", "collect_image_data", "tokenize_prompt_messages", "message_separator"),
    )

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase | str,
        tool_call_parser: ToolParser | str | None = None,
        client: SGLangClient | None = None,
        *,
        tool_parser: ToolParser | str | None = None,
        base_url: str | None = None,
        timeout: float | None = 900.0,
        **config: Unpack[_Config],
    ) -> None:
        self.client = _client(client, base_url, timeout)
        self.tokenizer = tokenizer
        self.tool_parser = tool_call_parser if tool_parser is None else tool_parser
        self._format, self._text_parser = resolve(self.tool_parser)
        self._options: dict[str, Any] = dict(config)
        thinking = self._options.get("enable_thinking")
        self._template_arguments: dict[str, Any] = {"enable_thinking": thinking is None or bool(thinking)}
        settings = _settings(self._options)
        check_tokenizer(tokenizer, self._format, self._template_arguments)
        super().__init__(self._shared_policy, settings)
        self.publish_config()

    if not TYPE_CHECKING:

        def __setattr__(self, name: str, value: Any) -> None:
            """Set an attribute. The client, the tokenizer and the parser can change until the model has connected."""
            if name in ("client", "tokenizer", "tool_parser") and name in self.__dict__:
                if self.is_connected:
                    raise ValueError(f"{name} cannot change during a rollout: make a new model.")
                if name == "tool_parser":
                    self._format, self._text_parser = resolve(value)
            super().__setattr__(name, value)

    def _user_config(self) -> dict[str, Any]:
        return dict(self._options)

    def _apply_changes(self, changes: Mapping[str, Any]) -> None:
        fixed = self._options.get("enable_thinking")
        if changes.get("enable_thinking", fixed) != fixed:
            raise ValueError("enable_thinking cannot change during a rollout: make a new model.")
        options = {**self._options, **changes}
        self._use_settings(_settings(options))
        self._options = options

    @property
    def routed_experts(self) -> str | None:
        """The routed experts of the rollout so far, int32 rows in base64; None if there are none.

        `decode_routed_experts` gives them their shape.
        """
        return self.rollout.joined_routed_experts()

    format_messages = staticmethod(format_messages)
    format_request_messages = format_messages
    format_content_block = staticmethod(format_content_block)
    sort_tool_results = staticmethod(sort_tool_results)
    collect_image_data = staticmethod(collect_image_data)

    @staticmethod
    def format_tool_specs(tool_specs: list[ToolSpec]) -> list[dict[str, Any]]:
        """Return tool specifications as chat templates read them."""
        return template_tools(tool_specs) or []

    def _shared_policy(self) -> Policy:
        _check_generate(self.client)
        self._format, self._text_parser = resolve(self.tool_parser)  # its patterns may have been replaced
        loaded = self.tokenizer if isinstance(self.tokenizer, str) else id(self.tokenizer)
        key = (loaded, self._format, self._options.get("model_id"), *self._template_arguments.items())
        policy = self.client.policies.get(key, self._connect_policy)
        return policy if self._text_parser is None else with_text_parser(policy, self._text_parser)

    def _connect_policy(self) -> Policy:
        if (name := self._options.get("model_id")) is not None:
            run_blocking(self.client.backend.refuse_adapter(name))
        return Policy.connect(
            backend=self.client.backend,
            tokenizer=self.tokenizer,
            parser=self._format,
            template_arguments=self._template_arguments,
        )

    def _translate(self, error: BackendError) -> BackendError:
        return as_sglang_error(error)


class ToolIterationLimiter(LoopLimiter):
    """Limit tool iterations only, by the oldest name, which slime's example imports.

    Args:
        max_iterations: See `max_tool_iters` of `LoopLimiter`.
    """

    def __init__(self, max_iterations: int | None = None) -> None:
        super().__init__(max_tool_iters=max_iterations)

    @property
    def iteration_count(self) -> int:
        """Tool iterations so far."""
        return self.tool_iter_count


def _client(client: SGLangClient | None, base_url: str | None, timeout: float | None) -> SGLangClient:
    if client is None:
        return get_client((base_url or DEFAULT_BASE_URL).rstrip("/"), timeout=timeout)
    if base_url is not None and base_url.rstrip("/") != client.base_url:
        raise ValueError(f"base_url={base_url!r} is not the client's address {client.base_url!r}. Pass one of the two.")
    return client


def _check_generate(client: SGLangClient) -> None:
    """Refuse a client whose `generate` is the user's: it would not be called.

    Raises:
        TypeError: It is.
    """
    if isinstance(client, SGLangClient) and getattr(client.generate, "__func__", None) is not SGLangClient.generate:
        raise TypeError(
            "SGLangModel does not call client.generate, so a generate of your own has no effect. To see or change "
            "requests, pass SGLangClient(..., http_transport=...); to answer them, use tito_conformance.testing."
        )


def _settings(config: Mapping[str, Any]) -> Settings:
    """Return the settings that a configuration stands for.

    Raises:
        ValueError: An unknown name or a bad value.
    """
    refuse_unknown("SGLangModel setting", dict(config), SGLangConfig.__annotations__)
    choices: Any = {name: config[name] for name in RolloutOptions.__annotations__ if name in config}
    params = {**(config.get("params") or {}), **(config.get("sampling_params") or {})}
    if params.get("watermark") is not None:
        raise ValueError("watermark is not supported: its key, not chance, selects the tokens. Leave it out.")
    if params:
        if config.get("sampling"):
            raise ValueError("sampling and sampling_params both set sampling parameters. Use one of the two.")
        choices["sampling"] = neutral_sampling(params, renamed=_RENAMED, passed=_PASSED)
    scores_prompts = config.get("return_logprob", config.get("return_logprobs"))
    experts = config.get("return_routed_experts")
    optional_outputs = {
        **({"prompt_logprobs": True} if scores_prompts is None or scores_prompts else {}),
        **({"routed_experts": "flat" if experts is True else experts} if experts else {}),
        **OptionalOutputs.of(config.get("optional_outputs")).model_dump(exclude_unset=True),
    }
    return Settings.of(**{**choices, "optional_outputs": optional_outputs})


def _multimodal(message: Message) -> Iterator[dict[str, Any]]:
    if message["role"] == "assistant":
        (formatted,) = map(dict, template_messages([message]))
        text: Any = formatted["content"]
        yield {**formatted, "content": [format_content_block({"text": text}, True)] if text else []}
        return
    results = [block["toolResult"] for block in message["content"] if "toolResult" in block]
    for result in results:
        parts = [format_content_block(each, True) for each in result["content"]]
        yield {"role": "tool", "tool_call_id": result["toolUseId"], "content": parts}
    if rest := [block for block in message["content"] if "toolResult" not in block]:
        yield {"role": message["role"], "content": [format_content_block(each, True) for each in rest]}


def _has_results(message: Message) -> bool:
    return bool(message["content"]) and all("toolResult" in block for block in message["content"])


def _number(block: ContentBlock) -> list[tuple[int, str]]:
    """Return a key that sorts "call_10" after "call_2"."""
    parts = re.split(r"(\d+)", block["toolResult"]["toolUseId"])
    return [(int(part), "") if part.isdigit() else (-1, part) for part in parts]
