"""A teacher: another model with the same vocabulary that scores recorded ids, for on-policy distillation."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from os import PathLike
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from strands_tito.inspect.score import FACTS, PREFIX, TEACHER, Scores, as_json, decoded, encoded, expect_same, recorded
from strands_tito.inspect.verify import score_path
from tito_core.backend.errors import BadRequestError, ServerChangedError, UnsupportedByServerError, task_group
from tito_core.backend.generate import connected
from tito_core.backend.http.watch import Check, Watched
from tito_core.backend.images import media_ids_of
from tito_core.backend.protocol import Backend, EngineInfo
from tito_core.backend.registry import create_backend
from tito_core.backend.values import InvalidValueError
from tito_core.ledger.errors import LawViolationError
from tito_core.ledger.ledger import Ledger
from tito_core.ledger.trajectory import Trajectory
from tito_core.ledger.turn import Semantics, VocabularyCheck
from tito_core.policy import Bound, bind
from tito_core.store.file import LedgerFile
from tito_core.vocabulary import compare

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True, slots=True)
class Teacher:
    """A connected server that scores ids of its own vocabulary; see `connect`."""

    backend: Backend
    info: EngineInfo
    bound: Bound
    vocabulary: VocabularyCheck

    @classmethod
    async def connect(
        cls,
        *,
        backend: str | Backend,
        base_url: str = "",
        tokenizer: str | PreTrainedTokenizerBase,
        **options: Any,
    ) -> Self:
        """Connect to a server and compare its vocabulary with the tokenizer of the rollouts.

        Args:
            backend: Name of the server's backend, or a backend.
            base_url: Its address.
            tokenizer: The tokenizer that the rollouts were recorded with.
            **options: Of the backend, such as `api_key`.

        Raises:
            LawViolationError: The server has another vocabulary (law 15).
            TokenizerError, TemplateError: The tokenizer cannot be used.
            BackendError: The server cannot be reached.
        """
        engine = create_backend(backend, base_url, **options) if isinstance(backend, str) else backend
        try:
            bound = await asyncio.to_thread(bind, tokenizer)
            info = await connected(engine)
            check = await compare(engine, info, bound.tokenizer, bound.template, bound.parser)
            if isinstance(engine, Watched):
                engine.watch.add(f"teacher {bound.template.certificate.tokenizer}", _still_as(bound, info))
        except BaseException:
            if engine is not backend:
                await engine.aclose()
            raise
        return cls(engine, info, bound, check)

    async def score(self, trajectory: Trajectory, token_ids: Sequence[int] = ()) -> Scores:
        """Score one path; nothing is stored.

        Args:
            trajectory: The path.
            token_ids: Ids to score in the place of each token as well, in the same request: `Scores.matrix`.

        Raises:
            UnsupportedByServerError: The server cannot score given ids, or the path has images.
            BadRequestError: The server cannot score it: it is too long, or its images cannot be sent.
            BackendError: Scoring failed.
            ServerChangedError: The server was replaced by one of another model, version or weight version.
            ProtocolViolationError: The scores are not those of these ids (law 4).
        """
        media_ids = self.bound.template.certificate.media_ids
        found = await score_path(trajectory, self.backend, media_ids, of=token_ids)
        if isinstance(found, str):
            raise BadRequestError(f"The path cannot be scored: {found}", backend=self.backend.name)
        facts = self._facts(self.vocabulary)
        if not len(token_ids):
            return Scores(found, **facts)
        return Scores(found[:, 0], **facts, token_ids=np.array(token_ids, np.int32), matrix=found[:, 1:])

    async def annotate(self, ledger: Ledger, column: str = TEACHER) -> list[str]:
        """Score the turns of a ledger that do not have a column yet, and add it to them.

        Returns:
            Why paths could not be scored, a sentence each.

        Raises:
            LawViolationError: The ledger was recorded with another vocabulary (law 15), or its column is damaged.
            InvalidValueError: The column's name is not printable text, or it holds scores of another model.
            BackendError: The server failed, or lacks the model. The path's turns get no scores then.
        """
        written, done = self._begun(ledger, column)
        media_ids, refused = media_ids_of(ledger), []
        for trajectory in ledger.trajectories:
            missing = [turn for turn in trajectory.path if turn.index not in done]
            if not missing:
                continue
            try:
                found = await score_path(trajectory, self.backend, media_ids)
            except (BadRequestError, UnsupportedByServerError) as error:
                if error.status == 404:  # of the model or the address, and not of this path
                    raise
                found = str(error)
            if isinstance(found, str):
                refused.append(f"Rollout {ledger.uuid}, path to turn {trajectory.turns[-1]}: {found}")
                continue
            for turn in missing:
                own = found[turn.path_length - turn.own_length : turn.path_length]
                value = encoded(own, written)
                ledger.annotate(PREFIX + column, value, turn=turn.index)
                done[turn.index] = value
        return refused

    async def annotate_file(
        self,
        path: str | PathLike[str],
        column: str = TEACHER,
        *,
        concurrency: int = 16,
        on_rollout: Callable[[], object] = lambda: None,
    ) -> list[str]:
        """Add a column to every ledger of a file, `concurrency` of them at a time; see `annotate`.

        Each turn's scores are appended as one record. A second run after a kill scores what is missing. A column that
        this teacher cannot continue in one of the ledgers is refused before anything is written.
        """
        slots, refused = asyncio.Semaphore(concurrency), list[str]()

        async def one(uuid: str) -> None:
            async with slots:
                refused.extend(await self.annotate(file.resume(uuid), column))
            on_rollout()

        with LedgerFile(path, "a") as file:
            for ledger in file:
                self._begun(ledger, column)
            async with task_group() as group:
                for uuid in file.uuids:
                    group.create_task(one(uuid))
            file.sync()
        return refused

    def _begun(self, ledger: Ledger, column: str) -> tuple[dict[str, Any], dict[int, Any]]:
        """Return what the column says of this teacher, and its values so far by turn; see `annotate` for errors."""
        if not column or not column.isprintable():
            raise InvalidValueError(f"column={column!r} must be a name of printable characters.")
        written, done = as_json(self._facts(self._checked(ledger))), recorded(ledger).get(column, {})
        for index, value in done.items():
            decoded(column, ledger, ledger[index], value)
            expect_same(column, ledger, index, value, written)
        return written, done

    def _checked(self, ledger: Ledger) -> VocabularyCheck:
        """Compare the tokenizer that a ledger's certificate names with ours; without one, nothing is known of it."""
        own, theirs = self.bound.template.certificate.tokenizer, (ledger.header.certificate or {}).get("tokenizer")
        if theirs is not None and theirs != own:
            raise LawViolationError(
                15,
                f"rollout {ledger.uuid} was recorded with the tokenizer {ledger.header.tokenizer!r} ({theirs}), but "
                f"the teacher was compared with {self.bound.tokenizer.name_or_path!r} ({own}). Use a teacher with the "
                "rollout's vocabulary, and give the rollout's tokenizer.",
            )
        return self.vocabulary if theirs is not None else VocabularyCheck.NOT_CHECKED

    def _facts(self, vocabulary: VocabularyCheck) -> dict[str, Any]:
        info = self.info
        source = f"{info.backend} {info.version or 'of unknown version'}, scored"
        meaning = Semantics(False, 1.0, adjusted=False, source=source)
        return dict(zip(FACTS, (info.model, info.weight_version, vocabulary, meaning), strict=True))


def _still_as(bound: Bound, found: EngineInfo) -> Check:
    """Return the check that a teacher's server still has the vocabulary and the weights that it had at connect."""

    async def check(server: Backend, now: EngineInfo) -> None:
        await compare(server, now, bound.tokenizer, bound.template, bound.parser)
        if None not in (found.weight_version, now.weight_version) and found.weight_version != now.weight_version:
            raise ServerChangedError(
                f"Law 11: the {server.name} server of the teacher was interrupted, and its weight version is "
                f"{now.weight_version!r}, no longer {found.weight_version!r}. Start it as it was, or give its scores "
                "another name.",
                backend=server.name,
            )

    return check
