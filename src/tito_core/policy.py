"""What all rollouts of one policy share: the backend, the tokenizer, the chat template, the parser."""

from __future__ import annotations

import json
import logging
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from os import PathLike
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, TypeVar, Unpack

from strands.types.content import Messages

from tito_core.backend.errors import printable
from tito_core.backend.protocol import Backend, EngineInfo
from tito_core.backend.registry import check_backend, create_backend
from tito_core.backend.replicas import agreed
from tito_core.backend.sampling import SamplingParams
from tito_core.backend.semantics import measure, of_all
from tito_core.backend.typed_values import InvalidValueError, shown
from tito_core.chat.certificate import Certificate, ContentTokens
from tito_core.chat.renderers import MakeRenderer
from tito_core.chat.template import ChatTemplate, checked_arguments
from tito_core.chat.tokenizer import load_tokenizer
from tito_core.interrupt import StoppableRunner, in_thread
from tito_core.ledger.ledger import Ledger
from tito_core.ledger.vocabulary import VocabularyCheck
from tito_core.parsing.detection import Detected
from tito_core.parsing.registry import AUTO, ToolParser, choose_tool_parser, control_strings, get_tool_parser
from tito_core.prompts import Prompts
from tito_core.settings import Choices
from tito_core.store import LedgerFile
from tito_core.terms import Terms
from tito_core.vocabulary import compare

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from tito_core.model import TITOModel

logger = logging.getLogger(__name__)
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Policy:
    """The heavy, shared parts. Make one with `Policy.connect` and a model a rollout with `policy.model()`.

    Attributes:
        backend: The connected backend.
        info: What the server said of itself, and what was measured.
        tokenizer: The policy's tokenizer.
        template: Its certified chat template.
        parser: Reads reasoning and calls out of completions.
        detected: Which format that is, and why: what the chat template shows, or what the user named.
        stop_token_ids: Ends of a turn: the template's and the tokenizer's end of sequence.
        store: The file that every rollout's turns are appended to as they are committed, or None.
        prompts: The text of what is sent, by ledger and turn.
        terms: What is recorded of sampling parameters, worked out once.
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
    prompts: Prompts = field(default_factory=Prompts)
    terms: Terms = field(default_factory=Terms)
    vocabulary: VocabularyCheck = VocabularyCheck.NOT_CHECKED

    @classmethod
    def connect(cls, **settings: Any) -> Policy:
        """Do `connect_async` from synchronous code. It blocks; inside a running loop, await `connect_async` instead."""
        return run_blocking(cls.connect_async(**settings))

    @classmethod
    async def connect_async(
        cls,
        *,
        backend: str | Backend,
        base_url: str | Sequence[str] = "",
        tokenizer: str | PreTrainedTokenizerBase,
        parser: str = AUTO,
        template_arguments: Mapping[str, Any] | None = None,
        content_tokens: ContentTokens = "inert",
        renderer: str | MakeRenderer | None = None,
        store: LedgerFile | str | PathLike[str] | None = None,
        **options: Any,
    ) -> Policy:
        """Load the tokenizer, check its template, ask the server what it is, and measure what its logprobs mean.

        Each of these stages is logged at INFO by `tito_core.policy` as it begins. Nothing that a server said or that
        was measured is kept for the next call, since a restart may change it.

        Args:
            backend: A name such as "vllm" or "sglang", or a backend object.
            base_url: Address of the server, such as "http://localhost:8000" or "unix:///run/vllm.sock", or a list of
                the addresses of equal servers, over which rollouts are spread.
            tokenizer: Name or folder of the model's tokenizer, or the object.
            parser: Name of the tool-call format; "auto" takes the one that the chat template shows, and the choice is
                logged and kept as `policy.detected`.
            template_arguments: Fixed for all rollouts, such as {"enable_thinking": False}.
            content_tokens: "inert", or "as-template" to let content spell control tokens as the tokenizer itself would.
            renderer: Takes the deltas from the package `renderers`; see `ChatTemplate.of`.
            store: A file, or its path, that takes every turn as it is committed, and gives an agent's ledger back
                when its session is restored.
            **options: For the backend: `model`, `api_key`, `timeout_s`, `connect_timeout_s`,
            `max_connections`, `max_attempts`.

        Raises:
            TokenizerError, TemplateError, UnknownBackendError, UnknownParserError, DetectionError, BackendError: Each a
                sentence.
            LawViolationError: The tokenizer is not the one that the server uses (law 15).
        """
        check_backend(backend)
        if not isinstance(store, LedgerFile | str | PathLike | None):
            raise InvalidValueError(f"store must be a file's path, a LedgerFile, or None, not {shown(store)}.")
        file = store if isinstance(store, LedgerFile) or store is None else _opened(store)
        if file is not None and not file.appends:
            raise ValueError(f"{file.path} was opened to read: open it with LedgerFile(path, 'a') to take turns.")
        engine = create_backend(backend, base_url, **options) if isinstance(backend, str) else backend
        name = getattr(tokenizer, "name_or_path", tokenizer)
        logger.info("tokenizer=<%s> | loading it and certifying its chat template", name)
        bound = bind(
            tokenizer, parser, template_arguments=template_arguments, content_tokens=content_tokens, renderer=renderer
        )
        logger.info("parser=<%s> | %s", bound.detected.name, bound.detected.why)
        counted: Messages = [{"role": "user", "content": [{"text": "Count to ten."}]}]
        probe = bound.template.first_prompt(counted, None, bound.template.rendering.usual_tools)
        logger.info("backend=<%s> | asking the server what it is", engine.name)
        asked = await engine.connect()
        logger.info(
            "model=<%s>, version=<%s> | comparing its tokenizer", printable(asked.model), printable(str(asked.version))
        )
        # Before anything is sampled: ids of another vocabulary may lie past the end of the server's.
        vocabulary = await compare(engine, asked, bound.tokenizer, bound.template, bound.parser)
        logger.info("measuring what its logprobs mean")
        found = await agreed(engine, lambda server: measure(server, asked, probe.ids), _measured)
        return cls(engine, of_all(found), *bound, file, vocabulary=vocabulary)

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "A Policy cannot be copied or pickled: it holds connections to the server. Send the arguments of "
            "Policy.connect, and connect in the other process; ledgers and trajectories can be sent."
        )

    def model(self, *, ledger: Ledger | None = None, **choices: Unpack[Choices]) -> TITOModel:
        """Make the Strands model of one rollout.

        Args:
            ledger: See `TITOModel`, which also says what the others mean.
            **choices: `sampling`, `context_window_limit`, `history`, `malformed_calls`, `thinking`, `verify_echo`,
                `wanted`, `on_abort`, `max_resumes`, `turn_timeout_s`, `max_total_tokens`, `stream`.
        """
        from tito_core.model import TITOModel

        return TITOModel.of(self, ledger, **choices)

    def ledger(
        self, *, group_id: str | None = None, task_id: str | None = None, user: Mapping[str, Any] | None = None
    ) -> Ledger:
        """Make a new ledger that names this policy's tokenizer and certified template, and streams to the store."""
        ledger = Ledger(
            group_id=group_id,
            task_id=task_id,
            tokenizer=self.tokenizer.name_or_path or None,
            user=user,
            certificate=summary(self.template.certificate),
            vocabulary=self.vocabulary,
        )
        return ledger if self.store is None else self.store.attach(ledger)

    def sampling(self, given: SamplingParams) -> SamplingParams:
        """Add the policy's own stops to a user's sampling parameters, unless these ignore the end of a turn."""
        return self.terms.stopped(given, self.stop_token_ids)


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
    template_arguments: Mapping[str, Any] | None = None,
    content_tokens: ContentTokens = "inert",
    renderer: str | MakeRenderer | None = None,
) -> Bound:
    """Load a tokenizer, choose its parser and certify its template; no server is asked. Arguments: see `Policy`.

    Raises:
        TokenizerError, TemplateError, UnknownParserError, DetectionError: Each a sentence.
    """
    if not isinstance(parser, str):
        raise InvalidValueError(f"parser must be the name of a tool-call format, or 'auto', not {shown(parser)}.")
    loaded = load_tokenizer(tokenizer)
    detected = choose_tool_parser(parser, loaded)
    chosen = get_tool_parser(detected.name, loaded)
    markup = control_strings(chosen).union([loaded.eos_token] if loaded.eos_token else [])
    template = ChatTemplate.of(
        loaded,
        content_tokens=content_tokens,
        markup=markup,
        renderer=renderer,
        **checked_arguments(template_arguments),
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
        "what can be had beside": info.capabilities,
    }


@lru_cache(maxsize=16)
def summary(certificate: Certificate) -> Mapping[str, Any]:
    """Give a certificate as every ledger's header keeps a copy of it: the probes that passed are counted, not named."""
    fields: dict[str, Any] = json.loads(certificate.to_json())
    return {**fields, "passed": len(certificate.passed)}


def run_blocking(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine to its end from synchronous code, also inside a running event loop, in a loop of its own.

    Ctrl-C in the meantime cancels it, and is raised once it has ended.
    """
    runner = StoppableRunner()

    def run() -> T:
        with runner:
            return runner.run(work)

    return in_thread(run, runner.stop)
