"""The names that strands-sglang's READMEs and examples import: `SGLangModel`, a `TITOModel` with their arguments, its
client, rollouts, parsers by name and limits.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import TYPE_CHECKING, Any, Protocol, Unpack

from strands.types.content import Messages

from tito_compat.model import LazyModel, SharedPolicies, rollout_settings
from tito_compat.rollout import Rollout
from tito_core.backend.http.backend import HttpBackend
from tito_core.backend.protocol import OptionalOutputs
from tito_core.backend.registry import ENTRY_POINT_GROUP
from tito_core.chat.messages import template_messages
from tito_core.chat.tokenizer import load_tokenizer
from tito_core.entry_points import load
from tito_core.hooks import (
    LoopLimiter,
    LoopLimitReachedError,
    MaxMessagesReachedError,
    MaxToolCallsReachedError,
    MaxToolIterationsReachedError,
)
from tito_core.model import Policy
from tito_core.parsing.registry import AUTO
from tito_core.policy import run_blocking
from tito_core.settings import RolloutOptions

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = [
    "HermesToolCallParser",
    "HermesToolParser",
    "LoopLimitReachedError",
    "LoopLimiter",
    "MaxMessagesReachedError",
    "MaxToolCallsReachedError",
    "MaxToolIterationsReachedError",
    "QwenXMLToolParser",
    "Rollout",
    "SGLangClient",
    "SGLangModel",
    "TokenManager",
    "ToolIterationLimiter",
    "ToolLimiter",
    "ToolParser",
    "get_client",
    "get_client_from_slime_args",
    "get_tokenizer",
    "get_tool_parser",
]

TokenManager = Rollout  # its name in strands-sglang before 0.4
ToolLimiter = LoopLimiter
DEFAULT_BASE_URL = "http://localhost:30000"


class SGLangClient:
    """The connections to one SGLang server, and the policies of the models that use them. Event loops may share it.

    Args:
        base_url: Such as "http://localhost:30000" or "unix:///run/sglang.sock".
        max_connections: Maximum number of connections per event loop; further requests wait.
        timeout: Longest wait for an answer in seconds.
        **options: Further options of `HttpBackend`, such as `patience_s`, which bounds retries, and `api_key`.
    """

    def __init__(self, base_url: str, *, max_connections: int = 1000, timeout: float = 900.0, **options: Any) -> None:
        self.base_url = base_url.rstrip("/")
        self.backend: HttpBackend = load(ENTRY_POINT_GROUP, "sglang")(
            self.base_url, max_connections=max_connections, timeout_s=timeout, **options
        )
        self.policies = SharedPolicies()

    @classmethod
    def from_slime_args(cls, args: SlimeArguments, **options: Any) -> SGLangClient:
        """Make a client of slime's router, with as many connections as slime would open."""
        return cls(**{**_of_slime(args), **options})

    async def model_info(self) -> dict[str, Any] | None:
        """Return the answer of `/model_info`, or None where the server does not offer it."""
        return await self.backend.get_optional("/model_info", dict[str, Any])

    get_model_info = model_info  # its name in strands-sglang 0.1 and 0.2

    async def close(self) -> None:
        """Close this event loop's connections. A later request opens new ones."""
        await self.backend.aclose()


class SlimeArguments(Protocol):
    """The training arguments of slime that this module reads."""

    sglang_router_ip: str
    sglang_router_port: int
    sglang_server_concurrency: int
    rollout_num_gpus: int
    rollout_num_gpus_per_engine: int


@cache
def get_client(base_url: str, **options: Any) -> SGLangClient:
    """Return the cached client of a server with these options; see `SGLangClient`."""
    return SGLangClient(base_url, **options)


def get_client_from_slime_args(args: SlimeArguments, **options: Any) -> SGLangClient:
    """Return the cached client of slime's router; see `SGLangClient`."""
    return get_client(**{**_of_slime(args), **options})


def _of_slime(args: SlimeArguments) -> dict[str, Any]:
    """Return the arguments of a client of slime's router: as many connections as requests that it sends at once."""
    return {
        "base_url": f"http://{args.sglang_router_ip}:{args.sglang_router_port}",
        "max_connections": int(
            args.sglang_server_concurrency * args.rollout_num_gpus // args.rollout_num_gpus_per_engine
        ),
    }


@cache
def get_tokenizer(tokenizer_path: str) -> PreTrainedTokenizerBase:
    """Return the cached tokenizer of a name or folder. Code of a model's repository is never run.

    Raises:
        TokenizerError: The tokenizer cannot be loaded.
    """
    return load_tokenizer(tokenizer_path)


class ToolParser:
    """A format of tool calls by name. Calls are read by token id, by the core's parser of the format.

    Attributes:
        name: The core's name of the format.
    """

    name: str = AUTO

    def __init_subclass__(cls) -> None:
        """Refuse a parser of text.

        Raises:
            TypeError: The subclass has a `parse`, which would not be called.
        """
        if "parse" in vars(cls):
            raise TypeError(
                f"{cls.__name__}.parse would not be called, as calls are read by token id. Write a CallFormat "
                "(tito_core.parsing) and give its name as tool_parser."
            )


class HermesToolParser(ToolParser):
    """Qwen2.5, Qwen3 and Hermes."""

    name = "hermes"


class QwenXMLToolParser(ToolParser):
    """Qwen3-Coder and Qwen3.5."""

    name = "qwen_xml"


HermesToolCallParser = HermesToolParser  # its name in strands-sglang 0.0


def get_tool_parser(name: str) -> ToolParser:
    """Return a parser by its name, which is checked when the model connects."""
    parser = ToolParser()
    parser.name = name
    return parser


class SGLangModel(LazyModel):
    """A Strands model over one SGLang server, which it connects to at the first turn.

    All models with the same client, tokenizer and format share one policy, so make one model per rollout.

    Args:
        tokenizer: The model's tokenizer, or its name.
        client: The server's client.
        base_url: Address of the server, in place of `client`. Models with the same address share one client.
        tool_parser: The format of tool calls, or its name. None detects the format from the chat template.
        tool_call_parser: Older name of `tool_parser`.
        sampling_params: Sampling parameters by SGLang's names. A parameter that is not set has the default of
            `SamplingParams`, whatever the server's default is.
        params: Older name of `sampling_params`.
        return_logprob: Whether prompt tokens get logprobs, too. Sampled tokens always have theirs.
        return_routed_experts: Whether to record the experts of each token, as flat rows.
        enable_thinking: The chat template's argument of that name.
        model_id: A name for the model, which is not sent: a server has one model. That of a LoRA adapter is refused.
        **options: See `RolloutOptions`. Unknown names are refused.

    Raises:
        ValueError: A bad argument.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase | str,
        *,
        client: SGLangClient | None = None,
        base_url: str = DEFAULT_BASE_URL,
        tool_parser: ToolParser | str | None = None,
        tool_call_parser: ToolParser | str | None = None,
        sampling_params: Mapping[str, Any] | None = None,
        params: Mapping[str, Any] | None = None,
        return_logprob: bool = True,
        return_routed_experts: bool = False,
        enable_thinking: bool = True,
        model_id: str | None = None,
        **options: Unpack[RolloutOptions],
    ) -> None:
        self._tokenizer = tokenizer
        self._client = get_client(base_url.rstrip("/")) if client is None else client
        parser = tool_parser or tool_call_parser or AUTO
        self._format = parser if isinstance(parser, str) else parser.name
        self._thinking = enable_thinking
        self._model_id = model_id
        options["optional_outputs"] = {
            **({"prompt_logprobs": True} if return_logprob else {}),
            **({"routed_experts": "flat"} if return_routed_experts else {}),
            **OptionalOutputs.of(options.get("optional_outputs")).model_dump(exclude_unset=True),
        }
        super().__init__(self._shared_policy, rollout_settings({**(params or {}), **(sampling_params or {})}, options))

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The policy's tokenizer. The model connects if it was given by name."""
        return self.policy.tokenizer if isinstance(self._tokenizer, str) else self._tokenizer

    @staticmethod
    def format_request_messages(messages: Messages, system_prompt: str | None = None) -> list[dict[str, Any]]:
        """Return a history as chat templates read it; each tool result is a message of the role "tool"."""
        return [dict(message) for message in template_messages(messages, system_prompt)]

    def _shared_policy(self) -> Policy:
        loaded = self._tokenizer if isinstance(self._tokenizer, str) else id(self._tokenizer)
        key = (loaded, self._format, self._model_id, self._thinking)
        return self._client.policies.get(key, self._connect_policy)

    def _connect_policy(self) -> Policy:
        if self._model_id is not None:
            run_blocking(self._client.backend.refuse_adapter(self._model_id))
        return Policy.connect(
            backend=self._client.backend,
            tokenizer=self._tokenizer,
            parser=self._format,
            template_arguments={"enable_thinking": self._thinking},
        )


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
