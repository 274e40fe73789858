"""Connect a policy: the backend, tokenizer, chat template and parser that its rollouts share."""

from __future__ import annotations

import asyncio
import json
import logging
import sys
from collections.abc import Callable, Collection, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from os import PathLike
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, Self, TypeVar, Unpack, get_args
from weakref import WeakKeyDictionary

from tito_core.backend.adapters import AdapterChecks
from tito_core.backend.errors import ServerChangedError, hidden, printable
from tito_core.backend.generate import connected
from tito_core.backend.http.watch import REMEDY, Check, Watched
from tito_core.backend.id_text import IdText
from tito_core.backend.protocol import Backend, EngineInfo
from tito_core.backend.registry import BackendOptions, check_backend, create_backend, option_names
from tito_core.backend.sampling import SamplingParams, refuse_unknown_option
from tito_core.backend.semantics import measure, semantics_of
from tito_core.backend.values import InvalidValueError, short_repr
from tito_core.chat.certify import Certificate, ContentTokens
from tito_core.chat.probes import user_message
from tito_core.chat.template import ChatTemplate, checked_arguments
from tito_core.chat.tokenizer import load_tokenizer
from tito_core.interrupt import StoppableRunner, in_thread
from tito_core.ledger.columns import TokenIds
from tito_core.ledger.ledger import Ledger
from tito_core.ledger.turn import Sampling, Server, VocabularyCheck
from tito_core.parsing.registry import (
    AUTO,
    Detected,
    ToolCalls,
    ToolParser,
    choose_tool_parser,
    control_strings,
    get_tool_parser,
)
from tito_core.settings import RolloutOptions
from tito_core.store import LedgerFile
from tito_core.vocabulary import QUESTION, compare

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


logger = logging.getLogger(__name__)
OnStage = Callable[[str], None]
T = TypeVar("T")
P = TypeVar("P", bound="PolicyParts")
CONNECTED_TO = ("backend", "base_url", "tokenizer")
"""Arguments of a policy that are not options."""


class PolicyOptions(BackendOptions, total=False):
    """The options of a policy and of its backend. All rollouts of the policy share them.

    Attributes:
        parser: Name of the tool-call format. "auto" (default) detects it from the chat template; the choice is logged,
            and `policy.detected` holds it.
        tool_calls: Which calls run. "strict" (default): those that the model family's documentation or template shows.
            "lenient": also loose ones with exactly one reading, which the ledger marks. Calls are never repaired.
        template_arguments: Arguments of the chat template for all rollouts, such as {"enable_thinking": False}.
        content_tokens: "inert" (default): message content never becomes a control token, whatever text it holds
            (law 6). "as-template": content can become control tokens, as with the plain tokenizer; the certificate
            records it.
        store: A `LedgerFile`, or a file's path, to which every turn is appended at commit, and from which a restored
            session's ledger is loaded. Default: None.
    """

    parser: str
    tool_calls: ToolCalls
    template_arguments: Mapping[str, Any] | None
    content_tokens: ContentTokens
    store: LedgerFile | str | PathLike[str] | None


KEPT_SAMPLINGS = 64
"""Maximum entries of each dictionary of a `SamplingCache`."""
KEPT_TEXTS = 64
"""Maximum paths of one ledger whose text is kept: those of the latest turns. Others are encoded again."""


@dataclass(frozen=True, slots=True, eq=False)
class RecordedSampling:
    """Sampling parameters as a turn records them, and the server with the semantics of its logprobs under them."""

    sampling: Sampling
    server: Server


class SamplingCache:
    """Values derived from sampling parameters, by the identity of the frozen parameters. Threads may share it."""

    def __init__(self) -> None:
        self._with_stop_tokens: dict[int, tuple[SamplingParams, SamplingParams]] = {}
        self._recorded: dict[int, tuple[SamplingParams, EngineInfo, RecordedSampling]] = {}

    def with_stop_tokens(self, given: SamplingParams, stops: tuple[int, ...]) -> SamplingParams:
        """Return parameters with the policy's stop token ids added, unless `ignore_eos` is set."""
        if given.ignore_eos:
            return given
        cached = self._with_stop_tokens.get(id(given))
        if cached is not None and cached[0] is given:
            return cached[1]
        complete = given.model_copy(update={"stop_token_ids": tuple(sorted({*given.stop_token_ids, *stops}))})
        _keep(self._with_stop_tokens, id(given), (given, complete))
        return complete

    def recorded(self, sampling: SamplingParams, backend: str, info: EngineInfo) -> RecordedSampling:
        """Return what a turn with these parameters records."""
        cached = self._recorded.get(id(sampling))
        if cached is not None and cached[0] is sampling and cached[1] is info:
            return cached[2]
        parameters = sampling.model_dump(mode="json")
        del parameters["max_new_tokens"]
        server = Server(backend, hidden(info.model, own=True), semantics_of(info, sampling))
        made = RecordedSampling(Sampling(parameters), server)
        _keep(self._recorded, id(sampling), (sampling, info, made))
        return made


class PathText(NamedTuple):
    """The text of a path's ids: their JSON, such as `1,2,3`, without brackets.

    Attributes:
        text: That of the ledger's ids.
        collapsed: That of the ids as the next request sends them; None for a path without images.
    """

    text: IdText
    collapsed: IdText | None = None


class PromptCache:
    """Texts of paths' ids, by ledger and last turn. References to ledgers are weak. Threads may share it.

    A text takes up to seven bytes a token, until its ledger is freed or a later turn replaces the text.
    """

    def __init__(self) -> None:
        self._kept: WeakKeyDictionary[Ledger, dict[int, PathText]] = WeakKeyDictionary()

    def path(self, ledger: Ledger, turn: int | None) -> PathText | None:
        """Return the kept text of a path; None where it is not kept."""
        return None if turn is None else self._kept.get(ledger, {}).get(turn)

    def text(self, ledger: Ledger, parent: int | None, delta: TokenIds) -> IdText:
        """Return the text of a path followed by a delta."""
        kept = self.path(ledger, parent)
        return (IdText.of(ledger.path_ids(parent)) if kept is None else kept.text).then(delta)

    def collapsed(self, ledger: Ledger, parent: int | None, ids: TokenIds) -> IdText:
        """Return the text of a path's collapsed ids."""
        kept = self.path(ledger, parent)
        return IdText.of(ids) if kept is None else kept.collapsed or kept.text

    def keep(self, ledger: Ledger, turn: int, parent: int | None, path: PathText) -> None:
        """Keep the text of a committed turn's path in place of its parent's. Never raise: the turn is committed."""
        kept = self._kept.setdefault(ledger, {})
        if parent is not None:
            kept.pop(parent, None)
        kept[turn] = path
        if len(kept) > KEPT_TEXTS:
            kept.pop(list(kept)[0], None)  # noqa: RUF015  # atomic: other threads may change the dict during an iteration


def _keep(cache: dict[int, Any], key: int, value: Any) -> None:
    if len(cache) >= KEPT_SAMPLINGS:
        cache.clear()
    cache[key] = value


@dataclass(frozen=True, slots=True)
class PolicyParts:
    """The shared parts of a policy. `Policy` extends it.

    Attributes:
        backend: The connected backend.
        info: What the server reported, and what was measured.
        tokenizer: The policy's tokenizer.
        template: Its certified chat template.
        parser: Reads reasoning and calls out of completions.
        detected: The parser's format, and why it was chosen: by the chat template or by the user.
        stop_token_ids: Tokens that end a turn: the template's, and the tokenizer's end of sequence.
        store: The file to which every rollout's turns are appended at commit, or None.
        vocabulary: How the tokenizer was compared with the server's (law 15).
    """

    backend: Backend
    info: EngineInfo
    tokenizer: PreTrainedTokenizerBase
    template: ChatTemplate
    parser: ToolParser
    detected: Detected
    stop_token_ids: tuple[int, ...]
    store: LedgerFile | None = None
    vocabulary: VocabularyCheck = VocabularyCheck.NOT_CHECKED
    _prompts: PromptCache = field(default_factory=PromptCache, repr=False)
    _samplings: SamplingCache = field(default_factory=SamplingCache, repr=False)
    _adapters: AdapterChecks = field(default_factory=AdapterChecks, repr=False)

    @classmethod
    def connect(
        cls,
        *,
        backend: str | Backend,
        base_url: str = "",
        tokenizer: str | PreTrainedTokenizerBase,
        **options: Unpack[PolicyOptions],
    ) -> Self:
        """Run `connect_async` from synchronous code. It blocks; in async code, await `connect_async` instead.

        On a terminal and in a notebook each stage is printed when it begins, unless logging shows it.
        """
        given: dict[str, Any] = {"backend": backend, "base_url": base_url, "tokenizer": tokenizer, **options}
        return run_blocking(connect(cls, stage_printer(), **given))

    @classmethod
    async def connect_async(
        cls,
        *,
        backend: str | Backend,
        base_url: str = "",
        tokenizer: str | PreTrainedTokenizerBase,
        **options: Unpack[PolicyOptions],
    ) -> Self:
        """Load the tokenizer, certify its template, connect to the server, and measure its logprobs' semantics.

        `tito_core.policy` logs the start of each stage at INFO. What the server reported is not cached for the next
        call, since a restart may change it.

        Args:
            backend: A name such as "vllm" or "sglang", or a backend object.
            base_url: The server's address, such as "http://localhost:8000" or "unix:///run/vllm.sock", or
                that of a router before several servers.
            tokenizer: Name or folder of the model's tokenizer, or the object.
            **options: See `PolicyOptions` and `BackendOptions`.

        Raises:
            InvalidValueError: An unknown option, or a bad value.
            UnknownBackendError, UnknownParserError: No backend or parser has that name.
            TokenizerError, TemplateError, DetectionError: The tokenizer or its template cannot be used.
            BackendError: The server cannot be reached, or does not answer as expected.
            LawViolationError: The server uses another tokenizer (law 15).
        """
        return await connect(cls, None, backend=backend, base_url=base_url, tokenizer=tokenizer, **options)

    def ledger(
        self,
        uuid: str | None = None,
        *,
        group_id: str | None = None,
        task_id: str | None = None,
        user: Mapping[str, Any] | None = None,
    ) -> Ledger:
        """Make a new ledger with this policy's tokenizer and certificate in its header, attached to the store."""
        ledger = Ledger(
            uuid,
            group_id=group_id,
            task_id=task_id,
            tokenizer=self.tokenizer.name_or_path or None,
            user=user,
            certificate=summary(self.template.certificate),
            vocabulary=self.vocabulary,
        )
        return ledger if self.store is None else self.store.attach(ledger)

    def probe_ids(self) -> TokenIds:
        """Return the prompt that measurements send, int32, shape (n,)."""
        return probe_ids(self.template)

    def sampling(self, given: SamplingParams) -> SamplingParams:
        """Return sampling parameters with the policy's stop token ids added, unless `ignore_eos` is set."""
        return self._samplings.with_stop_tokens(given, self.stop_token_ids)

    @property
    def server(self) -> str:
        """The engine, its version and its model. A server reports the last two, so they may be any text."""
        version = "of unknown version" if self.info.version is None else short_repr(self.info.version)[1:-1]
        return f"{self.info.backend} {version}, model {short_repr(self.info.model)}"

    def __repr__(self) -> str:
        tokenizer = short_repr(self.tokenizer.name_or_path)
        return f"<Policy {self.server}, tokenizer {tokenizer}, parser {self.detected.name!r}>"

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "A Policy cannot be copied or pickled, since it holds connections to the server. Send the arguments of "
            "Policy.connect and connect in the other process. Ledgers and trajectories can be pickled."
        )


async def connect(
    kind: type[P],
    on_stage: OnStage | None,
    /,
    *,
    backend: str | Backend,
    base_url: str = "",
    tokenizer: str | PreTrainedTokenizerBase,
    parser: str = AUTO,
    tool_calls: ToolCalls = "strict",
    template_arguments: Mapping[str, Any] | None = None,
    content_tokens: ContentTokens = "inert",
    store: LedgerFile | str | PathLike[str] | None = None,
    **options: Any,
) -> P:
    """Connect a policy of this kind; see `Policy.connect_async`. `on_stage` is called when a stage begins."""

    def stage(message: str, *values: object) -> None:
        logger.info(message, *values)
        if on_stage is not None:
            on_stage(message % values)

    check_arguments("Policy.connect", options, [*PolicyOptions.__annotations__, *CONNECTED_TO], backend)
    check_backend(backend)
    if not isinstance(store, LedgerFile | str | PathLike | None):
        raise InvalidValueError(f"store must be a file's path, a LedgerFile, or None, not {short_repr(store)}.")
    file = store if isinstance(store, LedgerFile) or store is None else await asyncio.to_thread(_opened, store)
    if file is not None and not file.appends:
        raise ValueError(f"{file.path} was opened for reading. Open it with LedgerFile(path, 'a') to append turns.")
    if not isinstance(backend, str):
        refuse_ignored(backend, {"base_url": base_url, **options})
    engine = create_backend(backend, base_url, **options) if isinstance(backend, str) else backend
    name = getattr(tokenizer, "name_or_path", tokenizer)
    stage("tokenizer=<%s> | loading the tokenizer and certifying its chat template", name)
    bound = bind(
        tokenizer,
        parser,
        tool_calls=tool_calls,
        template_arguments=template_arguments,
        content_tokens=content_tokens,
    )
    stage("parser=<%s> | %s", bound.detected.name, bound.detected.why)
    adapters = AdapterChecks()
    stage("backend=<%s> | connecting to the server", engine.name)
    info = await connected(engine)
    stage(
        "model=<%s>, version=<%s> | comparing the server's tokenizer",
        printable(info.model),
        printable(str(info.version)),
    )
    # Before anything is sampled: ids of another vocabulary may be past the end of the server's.
    vocabulary = await compare(engine, info, bound.tokenizer, bound.template, bound.parser)
    stage("measuring the semantics of the server's logprobs")
    found = await measure(engine, info, probe_ids(bound.template))
    if isinstance(engine, Watched):
        engine.watch.add(
            f"{bound.template.certificate.tokenizer} {bound.detected.name}", still_as(bound, found, adapters)
        )
    return kind(engine, found, *bound, file, vocabulary=vocabulary, _adapters=adapters)


def _opened(path: str | PathLike[str]) -> LedgerFile:
    """Open a file to append to.

    Raises:
        InvalidValueError: The file cannot be opened or made.
        SchemaError: The file is of another kind.
    """
    try:
        return LedgerFile(path, "a")
    except OSError as error:
        raise InvalidValueError(
            f"store={short_repr(str(path))} cannot be opened to append turns ({error.strerror or error}). Give the "
            "path of a file in a folder that exists and is writable."
        ) from error


def still_as(bound: Bound, found: EngineInfo, adapters: AdapterChecks) -> Check:
    """Return the check that a server still has the vocabulary and the semantics that were found at connect.

    Adapters are measured again when they are used next.
    """

    async def check(server: Backend, info: EngineInfo) -> None:
        await compare(server, info, bound.tokenizer, bound.template, bound.parser)
        adapters.forget()
        now = await measure(server, info, probe_ids(bound.template))
        for name in ("processed_logprobs", "truncated_logprobs"):
            before, after = getattr(found, name), getattr(now, name)
            if before is not None and after is None:
                logger.warning("%s=<%s> | it could not be measured again after an interruption", name, before)
            if None not in (before, after) and before != after:
                raise ServerChangedError(
                    f"Law 11: the {server.name} server was replaced by one whose logprobs have another meaning: "
                    f"{name} was {before} at connect and is {after}. {REMEDY}",
                    backend=server.name,
                )

    return check


def probe_ids(template: ChatTemplate) -> TokenIds:
    """Return the prompt that measurements send, int32, shape (n,)."""
    return template.first_prompt([user_message(QUESTION)], None, template.rendering.default_tools).ids


class Bound(NamedTuple):
    """A tokenizer with the policy parts that follow from it; see `PolicyParts`."""

    tokenizer: PreTrainedTokenizerBase
    template: ChatTemplate
    parser: ToolParser
    detected: Detected
    stop_token_ids: tuple[int, ...]


def bind(
    tokenizer: str | PreTrainedTokenizerBase,
    parser: str = AUTO,
    *,
    tool_calls: ToolCalls = "strict",
    template_arguments: Mapping[str, Any] | None = None,
    content_tokens: ContentTokens = "inert",
) -> Bound:
    """Load a tokenizer, choose its parser and certify its template, without a server. Arguments: see `PolicyOptions`.

    Raises:
        InvalidValueError: `parser` or `tool_calls` has a bad value.
        TokenizerError, TemplateError, UnknownParserError, DetectionError: The tokenizer, its template or the parser
            cannot be used.
    """
    if not isinstance(parser, str):
        raise InvalidValueError(f"parser must be the name of a tool-call format, or 'auto', not {short_repr(parser)}.")
    if tool_calls not in get_args(ToolCalls):
        raise InvalidValueError(f"tool_calls must be 'strict' or 'lenient', not {short_repr(tool_calls)}.")
    loaded = load_tokenizer(tokenizer)
    detected = choose_tool_parser(parser, loaded)
    chosen = get_tool_parser(detected.name, loaded, tool_calls=tool_calls)
    markup = control_strings(chosen).union([loaded.eos_token] if loaded.eos_token else [])
    template = ChatTemplate.of(
        loaded, content_tokens=content_tokens, markup=markup, **checked_arguments(template_arguments)
    )
    stops = {*template.stop_ids, *([loaded.eos_token_id] if loaded.eos_token_id is not None else [])}
    return Bound(loaded, template, chosen, detected, tuple(sorted(stops)))


@lru_cache(maxsize=16)
def summary(certificate: Certificate) -> Mapping[str, Any]:
    """Return a certificate as ledgers' headers hold it: the number of passed probes, nothing of how deltas are made."""
    fields: dict[str, Any] = json.loads(certificate.to_json())
    del fields["layouts"]
    if not certificate.images:
        for name in ("placeholder", "images", "images_refused", "media_ids"):
            del fields[name]
    for name in ("switches", "system_switches", "whole_history"):
        if not fields[name]:
            del fields[name]
    return {**fields, "passed": len(certificate.passed)}


def check_arguments(what: str, given: Mapping[str, Any], known: Sequence[str], backend: Any) -> None:
    """Check the names of arguments; a backend may accept names of its own.

    Raises:
        InvalidValueError: A name is unknown. The error suggests the nearest name, or `sampling` for its parameters, or
            says which function takes it.
    """
    refuse_elsewhere(what, given, known, RolloutOptions.__annotations__, "of a rollout", "policy.model")
    backend_options = option_names(backend)
    if backend_options is not None:
        refuse_unknown_option(f"argument of {what}", given, list(dict.fromkeys([*known, *backend_options])))


def refuse_elsewhere(
    what: str, given: Mapping[str, Any], known: Collection[str], others: Collection[str], whose: str, taker: str
) -> None:
    """Refuse options that another function takes.

    Raises:
        InvalidValueError: An option is not `known`, but one of `others`, which `taker` takes.
    """
    for name in given:
        if name not in known and name in others:
            raise InvalidValueError(
                f"{name} is an option {whose}, and not of {what}: pass it as {taker}({name}=...). TITOModel(...) takes "
                "the options of both."
            )


def refuse_ignored(backend: Backend, given: Mapping[str, Any]) -> None:
    """Refuse arguments together with a backend object, which has its own.

    Raises:
        InvalidValueError: One of them is set.
    """
    if names := [name for name, value in given.items() if value is not None and value != ""]:
        raise InvalidValueError(
            f"{', '.join(names)} cannot be set together with a backend object ({type(backend).__name__}), which has "
            "its own address and options. Make the object with them, or pass the backend's name."
        )


def stage_printer() -> OnStage | None:
    """Return a function that prints a stage of connecting on a terminal or in a notebook.

    None if output is hidden, or if logging shows it already.
    """
    is_watched = "ipykernel" in sys.modules or (sys.stderr is not None and sys.stderr.isatty())
    if not is_watched or logger.isEnabledFor(logging.INFO):
        return None
    return lambda text: print(text, file=sys.stderr, flush=True)


def run_blocking(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine in an event loop of its own and return its result. It may be called inside a running loop.

    Ctrl-C cancels the coroutine, and KeyboardInterrupt is raised when it has ended.
    """
    runner = StoppableRunner()

    def run() -> T:
        with runner:
            return runner.run(work)

    return in_thread(run, runner.stop)
