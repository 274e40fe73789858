"""Connect a policy: the backend, tokenizer, chat template and parser that its rollouts share."""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import Callable, Collection, Coroutine, Mapping, Sequence
from os import PathLike
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar, get_args

from tito_core.backend.calls import connected
from tito_core.backend.engine_info import EngineInfo
from tito_core.backend.errors import ServerChangedError, printable
from tito_core.backend.http.watch import REMEDY, Check, Watched
from tito_core.backend.measurement import common_measurement, measure
from tito_core.backend.protocol import Backend
from tito_core.backend.registry import (
    BackendOptions,
    check_backend,
    create_backend,
    option_names,
)
from tito_core.backend.replicas import agreed, servers_of
from tito_core.backend.sampling import refuse_unknown_option
from tito_core.backend.typed_values import InvalidValueError, short_repr
from tito_core.chat.certificate import ContentTokens
from tito_core.chat.probes import user_message
from tito_core.chat.template import ChatTemplate
from tito_core.chat.template_arguments import checked_arguments
from tito_core.chat.tokenizer import load_tokenizer
from tito_core.interrupt import StoppableRunner, in_thread
from tito_core.parsing.detection import Detected
from tito_core.parsing.registry import (
    AUTO,
    ToolCalls,
    ToolParser,
    choose_tool_parser,
    control_strings,
    get_tool_parser,
)
from tito_core.settings import RolloutOptions
from tito_core.store import LedgerFile
from tito_core.turn.policy_parts import PolicyParts
from tito_core.vocabulary import QUESTION, compare

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)
T = TypeVar("T")
OnStage = Callable[[str], None]


def stage_printer() -> OnStage | None:
    """Return a function that prints a stage of connecting on a terminal or in a notebook.

    None if output is hidden, or if logging shows it already.
    """
    is_watched = "ipykernel" in sys.modules or (sys.stderr is not None and sys.stderr.isatty())
    if not is_watched or logger.isEnabledFor(logging.INFO):
        return None
    return lambda text: print(text, file=sys.stderr, flush=True)


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


def check_arguments(what: str, given: Mapping[str, Any], known: Sequence[str], backend: Any) -> None:
    """Check the names of arguments; a backend may accept names of its own.

    Raises:
        InvalidValueError: A name is unknown. The error suggests the nearest name, or `sampling` for its parameters, or
            says which function takes it.
    """
    refuse_elsewhere(what, given, known, RolloutOptions.__annotations__, "of a rollout", "policy.model")
    own = option_names(backend)
    if own is not None:
        refuse_unknown_option(f"argument of {what}", given, list(dict.fromkeys([*known, *own])))


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


async def connect(
    *,
    backend: str | Backend,
    base_url: str | Sequence[str] = "",
    tokenizer: str | PreTrainedTokenizerBase,
    parser: str = AUTO,
    tool_calls: ToolCalls = "strict",
    template_arguments: Mapping[str, Any] | None = None,
    content_tokens: ContentTokens = "inert",
    store: LedgerFile | str | PathLike[str] | None = None,
    on_stage: OnStage | None = None,
    **options: Any,
) -> PolicyParts:
    """Connect a policy; see `Policy.connect_async`. `on_stage` is called when a stage begins."""

    def stage(message: str, *values: object) -> None:
        logger.info(message, *values)
        if on_stage is not None:
            on_stage(message % values)

    check_backend(backend)
    if not isinstance(store, LedgerFile | str | PathLike | None):
        raise InvalidValueError(f"store must be a file's path, a LedgerFile, or None, not {short_repr(store)}.")
    file = store if isinstance(store, LedgerFile) or store is None else await asyncio.to_thread(_opened, store)
    if file is not None and not file.appends:
        raise ValueError(f"{file.path} was opened for reading. Open it with LedgerFile(path, 'a') to append turns.")
    if not isinstance(backend, str):
        refuse_ignored(backend, {"base_url": base_url, **options})
    engine = create_backend(backend, base_url, **options) if isinstance(backend, str) else backend
    check_backend(engine)
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
    probe = bound.template.first_prompt([user_message(QUESTION)], None, bound.template.rendering.default_tools)
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
    measured = await agreed(engine, lambda server: measure(server, info, probe.ids), _measured)
    found = common_measurement(measured)
    for server in servers_of(engine):
        if isinstance(server, Watched):
            server.watch.add(f"{bound.template.certificate.tokenizer} {bound.detected.name}", still_as(bound, found))
    return PolicyParts(engine, found, *bound, file, vocabulary=vocabulary)


def still_as(bound: Bound, found: EngineInfo) -> Check:
    """Return the check that a server still has the vocabulary and the semantics that were found at connect."""

    async def check(server: Backend, info: EngineInfo) -> None:
        await compare(server, info, bound.tokenizer, bound.template, bound.parser)
        probe = bound.template.first_prompt([user_message(QUESTION)], None, bound.template.rendering.default_tools)
        now = await measure(server, info, probe.ids)
        for name in ("processed_logprobs", "truncated_logprobs"):
            before, after = getattr(found, name), getattr(now, name)
            if None not in (before, after) and before != after:
                raise ServerChangedError(
                    f"Law 11: the {server.name} server was replaced by one whose logprobs have another meaning: "
                    f"{name} was {before} at connect and is {after}. {REMEDY}",
                    backend=server.name,
                )

    return check


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


def _measured(info: EngineInfo) -> dict[str, object]:
    return {
        "processed logprobs": info.processed_logprobs,
        "truncated logprobs": info.truncated_logprobs,
        "optional outputs": info.capabilities,
    }


def run_blocking(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine in an event loop of its own and return its result. It may be called inside a running loop.

    Ctrl-C cancels the coroutine, and KeyboardInterrupt is raised when it has ended.
    """
    runner = StoppableRunner()

    def run() -> T:
        with runner:
            return runner.run(work)

    return in_thread(run, runner.stop)
