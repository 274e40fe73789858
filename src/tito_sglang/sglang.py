"""`SGLangModel`: the core's model by the name and the arguments that users of strands-sglang know."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Unpack

from strands.types.content import Messages
from strands.types.tools import ToolSpec

from strands_tito.compat.lazy_model import LazyModel, check_tokenizer
from strands_tito.compat.sampling_names import neutral_sampling
from tito_core.backend.errors import BackendError
from tito_core.backend.optional_outputs import OptionalOutputs
from tito_core.backend.typed_values import refuse_unknown
from tito_core.chat.messages import template_messages, template_tools
from tito_core.model import Policy
from tito_core.settings import RolloutOptions, Settings, TITOConfig
from tito_sglang.client import SGLangClient
from tito_sglang.exceptions import known
from tito_sglang.tool_parsers import ToolParser, format_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_OTHER_NAMES = {"sampling_seed": "seed"}
_PASSED = ("logit_bias", "custom_params")


class SGLangConfig(RolloutOptions, total=False):
    """What may be chosen for one rollout, beside what `TITOModel` says of its own.

    Attributes:
        sampling_params: Parameters by SGLang's names. Those that are not there have `SamplingParams`' defaults,
            whatever the server's own are.
        return_logprob: Whether prompt tokens get logprobs, too; sampled ones always have theirs.
        return_routed_experts: (layers, experts a token), as the model's configuration has them, to get the experts
            that each token went through: SGLang does not say the shape.
        enable_thinking: The chat template's argument of that name, fixed for the rollout.
        params: `sampling_params`, by their older name.
        model_id: Ignored: a server has one model.
    """

    sampling_params: Mapping[str, Any] | None
    return_logprob: bool | None
    return_routed_experts: bool | tuple[int, int] | None
    enable_thinking: bool | None
    params: Mapping[str, Any] | None
    model_id: str


class SGLangModel(LazyModel):
    """A Strands model over one SGLang server. Nothing is asked of the server before the first turn.

    All models of one client, tokenizer and format share what is costly, so make one a rollout.

    Args:
        client: The server's.
        tokenizer: The model's, or its name.
        tool_parser: The format of tool calls, or its name; None takes the one that the chat template shows.
        **config: See `SGLangConfig`; a name that is not there is refused.

    Raises:
        TemplateError, DetectionError, UnknownParserError, ValueError: What is given cannot work; each a sentence.
    """

    def __init__(
        self,
        *,
        client: SGLangClient,
        tokenizer: PreTrainedTokenizerBase | str,
        tool_parser: ToolParser | str | None = None,
        **config: Unpack[SGLangConfig],
    ) -> None:
        self.client = client
        self.tokenizer = tokenizer
        self.tool_parser = tool_parser
        self._format = format_of(tool_parser)
        self._given: dict[str, Any] = dict(config)
        thinking = self._given.get("enable_thinking")
        self._arguments: dict[str, Any] = {"enable_thinking": thinking is None or bool(thinking)}
        chosen = _settings(self._given)
        check_tokenizer(tokenizer, self._format, self._arguments)
        super().__init__(self._shared_policy, chosen)

    @property
    def config(self) -> TITOConfig:
        """What was chosen, and once connected what came of it."""
        given: Any = dict(self._given)
        return {**given, **super().config} if self.is_connected else given

    def update_config(self, **model_config: Any) -> None:
        """Change what was chosen.

        Raises:
            ValueError: A bad value or an unknown name, or what cannot change in a rollout; nothing is changed.
        """
        fixed = self._given.get("enable_thinking")
        if model_config.get("enable_thinking", fixed) != fixed:
            raise ValueError("enable_thinking is the same in each turn of a rollout: make a new model.")
        changed = {**self._given, **model_config}
        self._choose(_settings(changed))
        self._given = changed

    @staticmethod
    def format_messages(messages: Messages, system_prompt: str | None = None) -> list[dict[str, Any]]:
        """Return a history as chat templates read it; each tool result is a message of the role "tool"."""
        return [dict(message) for message in template_messages(messages, system_prompt)]

    format_request_messages = format_messages

    @staticmethod
    def format_tool_specs(tool_specs: list[ToolSpec]) -> list[dict[str, Any]]:
        """Give tool specifications as chat templates read them."""
        return template_tools(tool_specs) or []

    def _shared_policy(self) -> Policy:
        loaded = self.tokenizer if isinstance(self.tokenizer, str) else id(self.tokenizer)
        key = (loaded, self._format, *self._arguments.items())
        return self.client.policies.get(key, self._policy)

    def _policy(self) -> Policy:
        return Policy.connect(
            backend=self.client.backend,
            tokenizer=self.tokenizer,
            parser=self._format,
            template_arguments=self._arguments,
        )

    def _told(self, error: BackendError) -> BackendError:
        return known(error)


def _settings(config: Mapping[str, Any]) -> Settings:
    """Read a configuration.

    Raises:
        ValueError: A bad value, or an unknown name.
    """
    refuse_unknown("SGLangModel setting", dict(config), SGLangConfig.__annotations__)
    choices: Any = {name: config[name] for name in RolloutOptions.__annotations__ if name in config}
    by_name = {**(config.get("params") or {}), **(config.get("sampling_params") or {})}
    if by_name:
        choices["sampling"] = neutral_sampling(by_name, renamed=_OTHER_NAMES, passed=_PASSED)
    scores_prompts = config.get("return_logprob")
    optional_outputs = {
        **({"prompt_logprobs": True} if scores_prompts is None or scores_prompts else {}),
        **({"routed_experts": config["return_routed_experts"]} if config.get("return_routed_experts") else {}),
        **OptionalOutputs.of(config.get("optional_outputs")).model_dump(exclude_unset=True),
    }
    return Settings.of(**{**choices, "optional_outputs": optional_outputs})
