"""A `TITOModel` that is made without a server and connects at its first turn, as the models of other providers do.

`LazyModel` is what `SGLangModel` and `VLLMModel` share: it shows the rollout as lists, and its configuration is a live
dict. Models of one server share a policy (`SharedPolicies`).
"""

from __future__ import annotations

import asyncio
import json
import threading
from abc import abstractmethod
from collections.abc import AsyncGenerator, Callable, Collection, Hashable, Mapping, Sequence
from contextlib import aclosing
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar, cast

from pydantic import BaseModel
from strands.types.content import Messages, SystemContentBlock
from strands.types.streaming import StreamEvent
from strands.types.tools import ToolSpec

from tito_compat.rollout import Rollout
from tito_core.backend.errors import BackendError
from tito_core.backend.sampling import SamplingParams
from tito_core.ledger.ledger import Ledger
from tito_core.ledger.turn import Turn
from tito_core.model import Policy, SeveralTrajectoriesError, TITOModel
from tito_core.policy import bind
from tito_core.settings import Settings, TITOConfig
from tito_core.turn.answer import ParseReport
from tito_core.turn.history import STATE_KEY

M = TypeVar("M", bound=BaseModel)
UNKNOWN_TOOL_NAME = "unknown_tool"
"""The key of calls that do not name a tool for certain."""
_SET_ON_CONNECT = frozenset({"_policy", "_settings", "_recording"})
_GRAMMARS = ("json_schema", "regex", "ebnf", "structural_tag")
_TEXT_ONLY = frozenset(("skip_special_tokens", "spaces_between_special_tokens", "no_stop_trim"))
"""Options of the response's text, which is not used: only ids are read."""


class LazyModel(TITOModel):
    """A model of one rollout that connects when the policy is first needed, and shows the rollout as lists.

    A subclass calls `publish_config` when it has set up its own fields.

    Args:
        connect: Returns the policy. It blocks until the server has answered.
        settings: The rollout's checked settings.

    Attributes:
        never_called: Methods that the other provider calls at each turn, and no turn calls here.
    """

    never_called: ClassVar[tuple[str, ...]] = ()

    def __init_subclass__(cls, **options: Any) -> None:
        """Refuse to override a method that a turn does not call.

        Raises:
            TypeError: The subclass has such a method.
        """
        super().__init_subclass__(**options)
        if found := [name for name in getattr(super(cls, cls), "never_called", ()) if name in vars(cls)]:
            raise TypeError(
                f"{cls.__name__} overrides {', '.join(found)}, which a turn does not call, so the override has no "
                "effect. Change the messages and tools in a hook of the agent, or the tokenizer's chat template."
            )

    def __init__(self, connect: Callable[[], Policy], settings: Settings) -> None:
        self._connect = connect
        self._requested = settings  # before they are limited to what the server offers
        self._connect_lock = threading.Lock()
        self._rollout_lock = threading.Lock()
        self._rollout = Rollout()
        self._rollout_turns = 0  # turns that it holds
        self._rollout_tokens = 0  # tokens of those turns
        self._is_rollout_shared = False  # the user has a reference to it, so it grows with each turn
        self._parse_errors = _ParseErrors()
        self._standalone: set[int] = set()  # turns of `structured_output`, which are not part of `rollout`
        self._live_config = _LiveConfig()
        self.rollout_history: list[Rollout] = []

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            """Connect when an attribute of a connected model is read. This blocks a running event loop."""
            if name not in _SET_ON_CONNECT:
                raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
            self._ensure_connected()
            return self.__dict__[name]

    @property
    def is_connected(self) -> bool:
        """Whether the model has connected to its server."""
        return "_recording" in self.__dict__  # set last

    def __repr__(self) -> str:
        return super().__repr__() if self.is_connected else f"<{type(self).__name__}: not connected>"

    async def connected(self) -> Policy:
        """Connect if necessary, and return the policy.

        Raises:
            TokenizerError, TemplateError, DetectionError, BackendError: As `Policy.connect`.
        """
        if not self.is_connected:
            await asyncio.to_thread(self._ensure_connected)
        return self.policy

    def _ensure_connected(self) -> None:
        with self._connect_lock:
            if not self.is_connected:
                try:
                    policy = self._connect()
                    self._requested.at(policy.info)
                except BackendError as error:
                    raise self._translate(error) from error.__cause__
                self._begin(policy, None, self._requested)

    @property
    def config(self) -> TITOConfig:
        """The configuration, a live dict: a value that is changed in it takes effect, or raises, at the next turn."""
        with self._live_config.lock:
            if not self._live_config.changes():
                self.publish_config()
        return cast(TITOConfig, self._live_config.values)

    def update_config(self, **model_config: Any) -> None:
        """Change the configuration by name.

        Raises:
            ValueError: An unknown name, a bad value, or an option that is fixed for a rollout. Nothing is changed.
        """
        with self._live_config.lock:
            self._apply_changes({**self._live_config.changes(), **model_config})
            self.publish_config()

    @abstractmethod
    def _apply_changes(self, changes: Mapping[str, Any]) -> None:
        """Apply changed configuration values, or raise ValueError and change nothing."""

    @abstractmethod
    def _user_config(self) -> dict[str, Any]:
        """Return the configuration as the user wrote it."""

    def publish_config(self) -> None:
        """Write the applied configuration into the dict that `config` returns."""
        values = self._user_config()
        self._live_config.publish(self._described(values) if self.is_connected else values)

    def _described(self, values: dict[str, Any]) -> dict[str, Any]:
        """Add what is known of a connected model; a subclass decides which side wins."""
        return {**values, **super().config}

    def _use_settings(self, settings: Settings) -> None:
        """Use other settings from the next turn on.

        Raises:
            ValueError: They change the optional outputs, which all turns of a rollout share.
        """
        if self.is_connected and settings.optional_outputs != self._settings.optional_outputs:
            raise ValueError("The optional outputs cannot change during a rollout: make a new model.")
        self._requested = settings
        if self.is_connected:
            self._settings = settings.at(self.policy.info)

    def _translate(self, error: BackendError) -> BackendError:
        """Return an engine's error as the type that users of the provider catch."""
        return error

    @property
    def rollout(self) -> Rollout:
        """The rollout so far: one object until `reset`, which grows with each turn.

        Turns of `structured_output` are not part of it; `ledger` and `rollouts` hold them.

        Raises:
            SeveralTrajectoriesError: A history was edited, retried or shared. Use `rollouts`.
        """
        self._is_rollout_shared = True
        if self.is_connected:
            if len(self._agent_leaves(self.ledger)) > 1:
                raise SeveralTrajectoriesError(
                    "The rollout has several trajectories because a history was edited, retried or shared. Use "
                    f"model.rollouts, a list.\n{self.ledger.tree()}"
                )
            self._grow()
        return self._rollout

    @property
    def token_manager(self) -> Rollout:
        """The rollout, by its older name."""
        return self.rollout

    @property
    def rollouts(self) -> list[Rollout]:
        """One rollout per trajectory; each sampled token is trained in exactly one."""
        return _rollouts(self.ledger) if self.is_connected else []

    @property
    def tool_parse_errors(self) -> dict[str, int]:
        """Number of malformed calls by tool; "unknown_tool" for calls that do not name one for certain.

        It is one dict until `reset`, which may be changed and cleared; each turn adds its errors.
        """
        if self.is_connected:
            self._parse_errors.add(self.parse_report)
        return self._parse_errors.share()

    @tool_parse_errors.setter
    def tool_parse_errors(self, counts: dict[str, int]) -> None:
        if self.is_connected:
            self._parse_errors.add(self.parse_report)
        self._parse_errors.replace(counts)

    def reset(self) -> Ledger:
        """Return the ledger and start the next one. The rollout is appended to `rollout_history`."""
        with self._rollout_lock:
            ledger = super().reset() if self.is_connected else Ledger().seal()
            self.rollout_history += self._rollouts_of(ledger)
            self._rollout, self._rollout_turns, self._is_rollout_shared = Rollout(), 0, False
            self._rollout_tokens = 0
            self._standalone = set()
            self._parse_errors.reset()
        return ledger

    def _rollouts_of(self, ledger: Ledger) -> list[Rollout]:
        leaves = self._agent_leaves(ledger)
        if not leaves and len(self._rollout):
            return [self._rollout]  # made by hand
        if len(leaves) == 1 and self._is_rollout_shared:
            self._grow_to(ledger.path(leaves[0]))
            return [self._rollout]  # the object that the user may hold, and may have changed
        if self._standalone and len(leaves) < 2:
            return [_path_rollout(ledger, leaf) for leaf in leaves]
        return _rollouts(ledger)

    def stream(
        self,
        messages: Messages,
        tool_specs: list[ToolSpec] | None = None,
        system_prompt: str | None = None,
        **options: Any,
    ) -> AsyncGenerator[StreamEvent]:
        """Connect if necessary and run one turn; see `TITOModel.stream`."""
        return self._run_turn(messages, tool_specs, system_prompt, options)

    async def _run_turn(
        self, messages: Messages, tool_specs: list[ToolSpec] | None, system_prompt: str | None, options: dict[str, Any]
    ) -> AsyncGenerator[StreamEvent]:
        if self._live_config.changes():
            self.update_config()
        self._refuse_tokens_by_hand()
        is_standalone = options.pop("standalone", False)
        state = dict(options.get("model_state") or {})
        before = state.get(STATE_KEY)
        if is_standalone:
            options["model_state"] = state
        await self.connected()
        try:
            async with aclosing(super().stream(messages, tool_specs, system_prompt, **options)) as events:
                async for event in events:
                    yield event
        except BackendError as error:
            raise self._translate(error) from error.__cause__
        if is_standalone:
            key = state.get(STATE_KEY)  # written by the commit
            if key is not None and key != before and key["ledger"] == self.ledger.uuid:
                self._standalone.add(key["turn"])
        elif self._is_rollout_shared:
            self._grow()
        if self._parse_errors.is_shared:
            self._parse_errors.add(self.parse_report)

    async def structured_output(
        self, output_model: type[M], prompt: Messages, system_prompt: str | None = None, **kwargs: Any
    ) -> AsyncGenerator[dict[str, M | Any]]:
        """Sample a JSON object; see `TITOModel.structured_output`. Its turn is not part of `rollout`.

        The one event is the output, as it is with the other providers.
        """
        outputs = super().structured_output(output_model, prompt, system_prompt, **{**kwargs, "standalone": True})
        async with aclosing(outputs) as events:
            async for event in events:
                if "output" in event:
                    yield event

    async def count_tokens(
        self,
        messages: Messages,
        tool_specs: list[ToolSpec] | None = None,
        system_prompt: str | None = None,
        system_prompt_content: list[SystemContentBlock] | None = None,
    ) -> int:
        """Connect if necessary and count the tokens of a history; see `TITOModel.count_tokens`."""
        await self.connected()
        return await super().count_tokens(messages, tool_specs, system_prompt, system_prompt_content)

    def _agent_leaves(self, ledger: Ledger) -> Sequence[int]:
        """Return the leaves of a ledger without the turns of `structured_output`."""
        if not self._standalone:
            return ledger.leaves()
        turns = [turn for turn in ledger if turn.index not in self._standalone]
        parents = {turn.parent for turn in turns}
        return [turn.index for turn in turns if turn.index not in parents]

    def _grow(self) -> None:
        """Append the new turns of the only path; the cost grows with the new tokens (law 14)."""
        with self._rollout_lock:
            leaves = self._agent_leaves(self.ledger)
            if len(leaves) == 1:
                self._grow_to(self.ledger.path(leaves[0]))

    def _grow_to(self, path: Sequence[Turn]) -> None:
        for turn in path[self._rollout_turns :]:
            self._rollout.add_turn(turn, self.ledger.images)
        self._rollout_turns = len(path)
        self._rollout_tokens = len(self._rollout)

    def _refuse_tokens_by_hand(self) -> None:
        """Refuse a turn after the user has added tokens to `rollout`, or removed some: they would not be sent.

        Raises:
            ValueError: The user has.
        """
        with self._rollout_lock:
            tokens, expected = len(self._rollout), self._rollout_tokens
        if tokens != expected:
            raise ValueError(
                f"model.rollout has {tokens} tokens, and its turns have {expected}. It shows "
                "the ledger, so tokens that are added to it are not part of the next prompt. Change a copy: "
                "model.rollout.model_copy(deep=True)."
            )


def check_tokenizer(tokenizer: Any, parser: str, template_arguments: dict[str, Any]) -> None:
    """Certify the chat template of a loaded tokenizer, so that an unsound template fails when the model is made.

    A tokenizer given by name is loaded and certified at the first turn. Objects of other classes, such as mocks, are
    not checked here.

    Raises:
        TemplateError, DetectionError: As `Policy.connect`.
    """
    if isinstance(tokenizer, str):
        return
    from transformers import PreTrainedTokenizerBase

    if isinstance(tokenizer, PreTrainedTokenizerBase):
        bind(tokenizer, parser, template_arguments=template_arguments)


def neutral_sampling(
    params: Mapping[str, Any],
    *,
    renamed: Mapping[str, str],
    ignored: Collection[str] = (),
    passed: Collection[str] = ("logit_bias",),
) -> dict[str, Any]:
    """Return the parameters as arguments of `SamplingParams`, which refuses names that are still unknown.

    Args:
        params: Parameters as the user wrote them. None means not set.
        renamed: Neutral names by the provider's names.
        ignored: Names that have no effect on sampling.
        passed: Names that are passed to the engine unchanged.

    Raises:
        ValueError: `n` or `beam_width` is not 1.
    """
    fields: dict[str, Any] = {}
    extra: dict[str, Any] = dict(params.get("extra") or {})
    for name, value in params.items():
        name = renamed.get(name, name)
        if value is None or name == "extra" or name in _TEXT_ONLY or name in ignored:
            continue
        if name in ("n", "beam_width"):
            if value != 1:
                raise ValueError(f"{name}={value!r} is not supported: a turn has one sample. Make n rollouts instead.")
        elif name in _GRAMMARS:
            text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
            fields["grammar"] = {"kind": name, "value": text}
        elif name == "stop" and isinstance(value, str):
            fields["stop"] = (value,)
        elif name in passed and name not in SamplingParams.model_fields:
            extra[name] = value
        else:
            fields[name] = value
    return {**fields, "extra": extra} if extra else fields


class SharedPolicies:
    """Policies by the arguments they were made with. Thread-safe. A failed attempt is not remembered."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._locks: dict[Hashable, threading.Lock] = {}
        self._policies: dict[Hashable, Policy] = {}

    def get(self, key: Hashable, make: Callable[[], Policy]) -> Policy:
        """Return the policy of a key. The first caller makes it while other callers of the key wait.

        Args:
            key: All arguments that the policy depends on.
            make: Makes the policy. It blocks until the server has answered.
        """
        with self._lock:
            lock = self._locks.setdefault(key, threading.Lock())
        with lock:
            if key not in self._policies:
                self._policies[key] = make()
            return self._policies[key]


class _LiveConfig:
    """A dict that a user may change, and the values that were last applied. Thread-safe.

    Attributes:
        values: The dict. Nested dicts in it stay the same objects while their content does not change.
        lock: Held while changes are applied.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.values: dict[str, Any] = {}
        self._applied: dict[str, Any] = {}

    def changes(self) -> dict[str, Any]:
        """Return the values that differ from the applied ones; None for those that were deleted."""
        with self.lock:
            live, applied = self.values, self._applied
            if live == applied:
                return {}
            changed = {name: value for name, value in live.items() if name not in applied or value != applied[name]}
            return {**changed, **dict.fromkeys(applied.keys() - live.keys())}

    def publish(self, values: Mapping[str, Any]) -> None:
        """Set the applied values, in the dict too."""
        with self.lock:
            self._applied = _copied(values)
            for name in self.values.keys() - values.keys():
                del self.values[name]
            for name, value in values.items():
                if name not in self.values or self.values[name] != value:  # else keep a dict that the user holds
                    self.values[name] = value


class _ParseErrors:
    """A dict of counts by tool, to which new errors are added. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: dict[str, int] = {}
        self._seen: dict[str, int] = {}
        self.is_shared = False

    def add(self, report: ParseReport) -> None:
        """Add the errors of a rollout's report that earlier reports did not have."""
        with self._lock:
            for tool, calls in report.tools.items():
                name, total = tool or UNKNOWN_TOOL_NAME, sum(calls.malformed.values())
                if new := total - self._seen.get(name, 0):
                    self._counts[name] = self._counts.get(name, 0) + new
                    self._seen[name] = total

    def share(self) -> dict[str, int]:
        """Return the dict; from now on the user may hold it."""
        self.is_shared = True
        return self._counts

    def replace(self, counts: dict[str, int]) -> None:
        """Continue in another dict."""
        with self._lock:
            self._counts, self.is_shared = counts, True

    def reset(self) -> None:
        """Start a new rollout with a new dict."""
        with self._lock:
            self._counts, self._seen, self.is_shared = {}, {}, False


def _copied(value: Any) -> Any:
    """Copy dicts and lists, so that later changes of the original can be found."""
    if isinstance(value, Mapping):
        return {name: _copied(item) for name, item in value.items()}
    return [_copied(item) for item in value] if isinstance(value, list) else value


def _rollouts(ledger: Ledger) -> list[Rollout]:
    return [Rollout.of(trajectory) for trajectory in ledger.iter_trajectories()]


def _path_rollout(ledger: Ledger, leaf: int) -> Rollout:
    rollout = Rollout()
    for turn in ledger.path(leaf):
        rollout.add_turn(turn, ledger.images)
    return rollout
