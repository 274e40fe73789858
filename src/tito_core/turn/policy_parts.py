"""The parts of a policy that its rollouts share, and caches of values that many turns use."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from tito_core.backend.engine_info import EngineInfo
from tito_core.backend.id_text import IdText
from tito_core.backend.protocol import Backend
from tito_core.backend.sampling import SamplingParams
from tito_core.backend.semantics import semantics_of
from tito_core.chat.certificate import Certificate
from tito_core.chat.template import ChatTemplate
from tito_core.ledger.columns import TokenIds
from tito_core.ledger.errors import LawViolationError
from tito_core.ledger.ledger import Ledger
from tito_core.ledger.turn import Draft, Sampling, Server
from tito_core.ledger.vocabulary import VocabularyCheck
from tito_core.parsing.detection import Detected
from tito_core.parsing.registry import ToolParser
from tito_core.store import LedgerFile

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


KEPT_SAMPLINGS = 64
"""Maximum entries of each dictionary of a `SamplingCache`."""


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
        known = self._with_stop_tokens.get(id(given))
        if known is not None and known[0] is given:
            return known[1]
        complete = given.model_copy(update={"stop_token_ids": tuple(sorted({*given.stop_token_ids, *stops}))})
        _keep(self._with_stop_tokens, id(given), (given, complete))
        return complete

    def recorded(self, sampling: SamplingParams, backend: str, info: EngineInfo) -> RecordedSampling:
        """Return what a turn with these parameters records."""
        known = self._recorded.get(id(sampling))
        if known is not None and known[0] is sampling and known[1] is info:
            return known[2]
        parameters = sampling.model_dump(mode="json")
        del parameters["max_new_tokens"]
        made = RecordedSampling(Sampling(parameters), Server(backend, info.model, semantics_of(info, sampling)))
        _keep(self._recorded, id(sampling), (sampling, info, made))
        return made


def _keep(known: dict[int, Any], key: int, value: Any) -> None:
    if len(known) >= KEPT_SAMPLINGS:
        known.clear()
    known[key] = value


KEPT_TEXTS = 64
"""Maximum paths of one ledger whose text is kept: those of the latest turns. Others are encoded again."""


class PromptCache:
    """Texts of paths' ids, by ledger and last turn. References to ledgers are weak. Threads may share it.

    A text takes up to seven bytes a token, until its ledger is freed or a later turn replaces the text.
    """

    def __init__(self) -> None:
        self._kept: WeakKeyDictionary[Ledger, dict[int, IdText]] = WeakKeyDictionary()

    def text(self, ledger: Ledger, parent: int | None, delta: TokenIds, path: TokenIds | None = None) -> IdText:
        """Return the text of a path followed by a delta. `path` are its ids, if they are not those of the ledger."""
        kept = self._of(ledger, parent)
        if kept is None:
            kept = IdText.of(ledger.path_ids(parent) if path is None else path)
        return kept.then(delta)

    def answered(self, ledger: Ledger, draft: Draft, prompt: IdText, output: TokenIds) -> IdText:
        """Return the text of a draft's path, with its prompt and its output, before the draft is committed.

        Raises:
            LawViolationError: The draft holds other tokens than the request and the response (law 4).
        """
        text, before = prompt.then(output), self._of(ledger, draft.parent)
        ids = draft.columns.ids
        same = text.matches(ledger.path_ids(draft.parent, ids)) if before is None else text.continues(before, ids)
        if not same:
            raise LawViolationError(
                4,
                f"turn {len(ledger)} does not hold the tokens of its request and response, so it was not committed. "
                "Report the template or backend that changed them.",
            )
        return text

    def keep(self, ledger: Ledger, turn: int, parent: int | None, text: IdText) -> None:
        """Keep the text of a committed turn's path in place of its parent's. Never raise: the turn is committed."""
        kept = self._kept.setdefault(ledger, {})
        if parent is not None:
            kept.pop(parent, None)
        kept[turn] = text
        if len(kept) > KEPT_TEXTS:
            kept.pop(list(kept)[0], None)  # noqa: RUF015  # atomic: other threads may change the dict during an iteration

    def _of(self, ledger: Ledger, turn: int | None) -> IdText | None:
        return None if turn is None else self._kept.get(ledger, {}).get(turn)


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
        prompts: Cache of the prompts' text, by ledger and turn.
        collapsed_prompts: The same of prompts with images, as they travel.
        samplings: Cache of sampling parameters as turns record them.
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
    prompts: PromptCache = field(default_factory=PromptCache)
    collapsed_prompts: PromptCache = field(default_factory=PromptCache)
    samplings: SamplingCache = field(default_factory=SamplingCache)
    vocabulary: VocabularyCheck = VocabularyCheck.NOT_CHECKED

    def ledger(
        self, *, group_id: str | None = None, task_id: str | None = None, user: Mapping[str, Any] | None = None
    ) -> Ledger:
        """Make a new ledger with this policy's tokenizer and certificate in its header, attached to the store."""
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
        """Return sampling parameters with the policy's stop token ids added, unless `ignore_eos` is set."""
        return self.samplings.with_stop_tokens(given, self.stop_token_ids)


@lru_cache(maxsize=16)
def summary(certificate: Certificate) -> Mapping[str, Any]:
    """Return a certificate as ledgers' headers hold it, with the number of passed probes instead of their names."""
    fields: dict[str, Any] = json.loads(certificate.to_json())
    if not certificate.images:
        for name in ("placeholder", "images", "images_refused", "media_ids"):
            del fields[name]
    for name in ("switches", "system_switches", "whole_history"):
        if not fields[name]:
            del fields[name]
    return {**fields, "passed": len(certificate.passed)}
