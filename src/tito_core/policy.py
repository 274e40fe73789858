"""Connecting a policy: the backend, the tokenizer, the chat template and the parser that all of its rollouts share."""

from __future__ import annotations

import logging
from collections.abc import Coroutine, Mapping, Sequence
from os import PathLike
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar, get_args

from tito_core.backend.checked import connected
from tito_core.backend.engine_info import EngineInfo
from tito_core.backend.errors import printable
from tito_core.backend.measurement import common_measurement, measure
from tito_core.backend.protocol import Backend
from tito_core.backend.registry import (
    BackendOptions,
    check_backend,
    create_backend,
    option_names,
)
from tito_core.backend.replicas import agreed
from tito_core.backend.sampling import refuse_unknown_option
from tito_core.backend.typed_values import InvalidValueError, shown
from tito_core.chat.certificate import ContentTokens
from tito_core.chat.probes import asked
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
from tito_core.store import LedgerFile
from tito_core.turn.policy_parts import PolicyParts
from tito_core.vocabulary import QUESTION, compare

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)
T = TypeVar("T")


class PolicyOptions(BackendOptions, total=False):
    """The options of a policy, which all of its rollouts share, with those of its backend.

    Attributes:
        parser: Name of the tool-call format; "auto", the default, takes the one that the chat template shows, and the
            choice is logged and kept as `policy.detected`.
        tool_calls: Which calls run: on "strict", the default, those that the family's documentation or template shows,
            on "lenient" also loose ones that have exactly one reading, which the ledger marks. Nothing is repaired.
        template_arguments: Arguments of the chat template, fixed for all rollouts, such as {"enable_thinking": False}.
        content_tokens: "inert", the default: no control token comes from message content, whatever it spells (law 6).
            "as-template" lets content spell them, as the tokenizer itself would; the certificate says so.
        store: A file, or its path, that takes every turn as it is committed, and gives an agent's ledger back when its
            session is restored. Default: None.
    """

    parser: str
    tool_calls: ToolCalls
    template_arguments: Mapping[str, Any] | None
    content_tokens: ContentTokens
    store: LedgerFile | str | PathLike[str] | None


def check_arguments(what: str, given: Mapping[str, Any], known: Sequence[str], backend: Any) -> None:
    """Check the names of arguments, of which a backend may take some of its own.

    Raises:
        InvalidValueError: One is not known; the sentence says where a sampling parameter goes, or names the nearest.
    """
    own = option_names(backend)
    if own is not None:
        refuse_unknown_option(f"argument of {what}", given, list(dict.fromkeys([*known, *own])))


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
    **options: Any,
) -> PolicyParts:
    """Connect a policy; see `Policy.connect_async`."""
    check_backend(backend)
    if not isinstance(store, LedgerFile | str | PathLike | None):
        raise InvalidValueError(f"store must be a file's path, a LedgerFile, or None, not {shown(store)}.")
    file = store if isinstance(store, LedgerFile) or store is None else _opened(store)
    if file is not None and not file.appends:
        raise ValueError(f"{file.path} was opened to read: open it with LedgerFile(path, 'a') to take turns.")
    engine = create_backend(backend, base_url, **options) if isinstance(backend, str) else backend
    check_backend(engine)
    name = getattr(tokenizer, "name_or_path", tokenizer)
    logger.info("tokenizer=<%s> | loading it and certifying its chat template", name)
    bound = bind(
        tokenizer,
        parser,
        tool_calls=tool_calls,
        template_arguments=template_arguments,
        content_tokens=content_tokens,
    )
    logger.info("parser=<%s> | %s", bound.detected.name, bound.detected.why)
    probe = bound.template.first_prompt([asked(QUESTION)], None, bound.template.rendering.usual_tools)
    logger.info("backend=<%s> | asking the server what it is", engine.name)
    info = await connected(engine)
    logger.info(
        "model=<%s>, version=<%s> | comparing its tokenizer", printable(info.model), printable(str(info.version))
    )
    # Before anything is sampled: ids of another vocabulary may lie past the end of the server's.
    vocabulary = await compare(engine, info, bound.tokenizer, bound.template, bound.parser)
    logger.info("measuring what its logprobs mean")
    found = await agreed(engine, lambda server: measure(server, info, probe.ids), _measured)
    return PolicyParts(engine, common_measurement(found), *bound, file, vocabulary=vocabulary)


class Bound(NamedTuple):
    """A tokenizer with what is read off it; see `Policy`."""

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
    """Load a tokenizer, choose its parser and certify its template; no server is asked. Arguments: see `Policy`.

    Raises:
        TokenizerError, TemplateError, UnknownParserError, DetectionError: Each a sentence.
    """
    if not isinstance(parser, str):
        raise InvalidValueError(f"parser must be the name of a tool-call format, or 'auto', not {shown(parser)}.")
    if tool_calls not in get_args(ToolCalls):
        raise InvalidValueError(f"tool_calls must be 'strict' or 'lenient', not {shown(tool_calls)}.")
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
        InvalidValueError: There can be no file at the path.
        SchemaError: There is another kind of file.
    """
    try:
        return LedgerFile(path, "a")
    except OSError as error:
        raise InvalidValueError(
            f"store={shown(str(path))} cannot be opened to append turns ({error.strerror or error}): give the path of "
            "a file, in a folder that exists and can be written to."
        ) from error


def _measured(info: EngineInfo) -> dict[str, object]:
    return {
        "what logprobs include": info.processed_logprobs,
        "whether logprobs are truncated": info.truncated_logprobs,
        "the optional outputs it offers": info.capabilities,
    }


def run_blocking(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine to its end from synchronous code, also inside a running event loop, in a loop of its own.

    Ctrl-C in the meantime cancels it, and is raised once it has ended.
    """
    runner = StoppableRunner()

    def run() -> T:
        with runner:
            return runner.run(work)

    return in_thread(run, runner.stop)
