"""Every error that a program may catch, by name. `TITOError` is the base class of all.

Errors are described on the page docs/errors.md."""

from __future__ import annotations

from strands_tito.collect.rollout import AgentError, CollectError, FolderError, TaskError, TooManyFailuresError
from strands_tito.export.batch import TooLongError
from strands_tito.export.parquet import SamplesSchemaError
from strands_tito.export.sample import BranchedRolloutError
from strands_tito.export.trainer import (
    ImageGridError,
    ImagesNotSupportedError,
    LogprobMismatchError,
    MissingPackageError,
    SampledPlaceholderError,
    UnreadRewardError,
)
from tito_core.backend.errors import (
    AdapterNotInEffectError,
    AnswerTooLargeError,
    AuthenticationError,
    BackendError,
    BadRequestError,
    ContextLengthError,
    DamagedAnswerError,
    EngineConnectionError,
    EngineTimeoutError,
    GenerationAbortedError,
    ProtocolViolationError,
    ServerChangedError,
    ServerError,
    ThrottledError,
    UnknownBackendError,
    UnsupportedByServerError,
    WeightsNotLoadedError,
)
from tito_core.backend.values import InvalidValueError
from tito_core.chat.images import ImageError
from tito_core.chat.message_check import InvalidMessageError
from tito_core.chat.messages import UnsupportedContentError
from tito_core.chat.rendering import TemplateError
from tito_core.chat.tokenizer import TokenizerError
from tito_core.entry_points import BrokenEntryPointError
from tito_core.hooks import (
    LoopLimitReachedError,
    MaxMessagesReachedError,
    MaxSampledTokensReachedError,
    MaxToolCallsReachedError,
    MaxToolIterationsReachedError,
)
from tito_core.ledger.errors import LawViolationError, TITOError
from tito_core.model import SeveralTrajectoriesError
from tito_core.parsing.grammar import NoCallGrammarError
from tito_core.parsing.registry import DetectionError, UnknownParserError
from tito_core.parsing.schema import ToolSchemaError
from tito_core.parsing.turn import PreviewError
from tito_core.store.file import FileLockedError
from tito_core.store.frames import SchemaError
from tito_core.turn.answer import MalformedCallError
from tito_core.turn.history import HistoryChangedError
from tito_core.turn.inputs import UnsupportedToolChoiceError
from tito_core.turn.request import TotalTokensReachedError, TrimmedHistoryError
from tito_core.turn.run import TurnNotStoredError
from tito_engines.errors import (
    Cancelled,
    CannotInstall,
    EngineError,
    InstallFailed,
    ModelUnavailable,
    StartFailed,
    UnknownEngine,
    UnknownModel,
    WrongHash,
)

__all__ = [
    "AdapterNotInEffectError",
    "AgentError",
    "AnswerTooLargeError",
    "AuthenticationError",
    "BackendError",
    "BadRequestError",
    "BranchedRolloutError",
    "BrokenEntryPointError",
    "Cancelled",
    "CannotInstall",
    "CollectError",
    "ContextLengthError",
    "DamagedAnswerError",
    "DetectionError",
    "EngineConnectionError",
    "EngineError",
    "EngineTimeoutError",
    "FileLockedError",
    "FolderError",
    "GenerationAbortedError",
    "HistoryChangedError",
    "ImageError",
    "ImageGridError",
    "ImagesNotSupportedError",
    "InstallFailed",
    "InvalidMessageError",
    "InvalidValueError",
    "LawViolationError",
    "LogprobMismatchError",
    "LoopLimitReachedError",
    "MalformedCallError",
    "MaxMessagesReachedError",
    "MaxSampledTokensReachedError",
    "MaxToolCallsReachedError",
    "MaxToolIterationsReachedError",
    "MissingPackageError",
    "ModelUnavailable",
    "NoCallGrammarError",
    "PreviewError",
    "ProtocolViolationError",
    "SampledPlaceholderError",
    "SamplesSchemaError",
    "SchemaError",
    "ServerChangedError",
    "ServerError",
    "SeveralTrajectoriesError",
    "StartFailed",
    "TITOError",
    "TaskError",
    "TemplateError",
    "ThrottledError",
    "TokenizerError",
    "TooLongError",
    "TooManyFailuresError",
    "ToolSchemaError",
    "TotalTokensReachedError",
    "TrimmedHistoryError",
    "TurnNotStoredError",
    "UnknownBackendError",
    "UnknownEngine",
    "UnknownModel",
    "UnknownParserError",
    "UnreadRewardError",
    "UnsupportedByServerError",
    "UnsupportedContentError",
    "UnsupportedToolChoiceError",
    "WeightsNotLoadedError",
    "WrongHash",
]
