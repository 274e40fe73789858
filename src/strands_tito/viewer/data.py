"""The data of a page: a ledger or a trajectory as JSON, with its columns in base64, token texts and pictures."""

from __future__ import annotations

import base64
import hashlib
import os
import re
from bisect import bisect_left
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer, decoders

from strands_tito.inspect.mismatch import Mismatches
from strands_tito.inspect.score import PREFIX, mismatch_with, recorded
from strands_tito.inspect.verify import Rescored
from tito_core.backend.values import InvalidValueError
from tito_core.chat.tokenizer import TokenizerError, load_tokenizer
from tito_core.ledger.columns import Column, Logprobs
from tito_core.ledger.errors import LawViolationError
from tito_core.ledger.laws import check_ledger
from tito_core.ledger.ledger import Ledger
from tito_core.ledger.trajectory import Trajectory
from tito_core.ledger.turn import Header, Image, Turn
from tito_core.parsing.markup import TokenBytes

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_BYTE = re.compile("<0x([0-9A-F]{2})>")
_METASPACE = "▁"
_KINDS = ((b"\x89PNG\r\n\x1a\n", "png"), (b"\xff\xd8\xff", "jpeg"), (b"GIF87a", "gif"), (b"GIF89a", "gif"))
_RIFF, _WEBP = b"RIFF", b"WEBP"
Data = dict[str, Any]
"""Data of a page; it encodes to JSON."""
Facts = list[tuple[str, str]]
"""Rows of (name, value)."""


@dataclass(frozen=True, slots=True)
class Evidence:
    """Data that a page shows in addition to the ledger.

    Attributes:
        text: Text of the tokens; None shows ids.
        rescored: The comparison with a server's scores.
        differences: |recorded - re-scored| of each output token in nats, by turn.
        pictures: Images as `data:` URLs, by the SHA-256 of their bytes.
    """

    text: TokenText | None = None
    rescored: Rescored | None = None
    differences: Mapping[int, Logprobs] = field(default_factory=dict, init=False)
    pictures: Mapping[bytes, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Compute the differences."""
        compared = self.rescored.by_turn if self.rescored is not None else ()
        object.__setattr__(self, "differences", {turn: np.abs(signed) for turn, _, signed in compared})


def ledger_data(ledger: Ledger, evidence: Evidence) -> Data:
    """Return a ledger as the data of a page."""
    notes = [
        {"name": note.name if note.call is None else f"{note.name} (call {note.call})", "value": as_text(note.value)}
        | {"turn": note.turn}
        for note in latest(ledger)
    ]
    try:
        check_ledger(ledger)
        laws = ""
    except LawViolationError as error:
        laws = str(error)
    data = _turns_data(list(ledger), evidence) | {"mismatches": _mismatches(ledger, evidence.rescored)}
    return data | {"uuid": ledger.uuid, "facts": _header_facts(ledger.header), "notes": notes, "broken": laws}


def trajectory_data(trajectory: Trajectory, evidence: Evidence) -> Data:
    """Return a trajectory as the data of a page; `context` lists the turns that an earlier trajectory trains."""
    data = _turns_data(trajectory.path, evidence)
    context = sorted(trajectory.context_turns)
    return data | {"uuid": "", "facts": [], "notes": [], "mismatches": [], "broken": "", "context": context}


def _mismatches(ledger: Ledger, rescored: Rescored | None) -> list[Data]:
    """Return how far each column of scores, and the server that scored again, is from what sampled."""
    found = []
    for column in recorded(ledger):
        try:
            scores = mismatch_with(ledger, column)
            found.append(_mismatch(f"the column {column}", as_text(scores.model), scores.mismatches, scores.left_out))
        except (LawViolationError, InvalidValueError) as error:
            found.append({"name": f"the column {column}", "problem": str(error)})
    if rescored is not None:
        found.append(_mismatch("the server", "scored again", rescored.mismatch(), rescored.not_comparable))
    return found


def _mismatch(name: str, model: str, found: Mismatches, left_out: int) -> Data:
    parts = {"turn": found.by_turn, "position": found.by_position}
    rows = [("all", "", found.whole)] if found.whole else []
    rows += [(kind, str(key), each) for kind, values in parts.items() for key, each in values.items()]
    figures = [(kind, key, each.tokens, each.kl, each.reverse_kl, each.effective, each.far) for kind, key, each in rows]
    return {"name": name, "model": model, "leftOut": left_out, "rows": figures}


def latest(ledger: Ledger) -> Iterable[Any]:
    """Return the last annotation of each (name, turn, call), in order of first use, without columns of scores."""
    notes = [note for note in ledger.annotations if not note.name.startswith(PREFIX)]
    return {(note.name, note.turn, note.call): note for note in notes}.values()


def as_text(value: Any) -> str:
    """Return a JSON value as text, and a string unchanged."""
    return value if isinstance(value, str) else msgspec.json.encode(value).decode()


def _header_facts(header: Header) -> Facts:
    facts = {
        "task": header.task_id,
        "group": header.group_id,
        "ledger": header.uuid,
        "tokenizer": header.tokenizer,
        "vocabulary check": header.vocabulary,
        "user": as_text(header.user) if header.user else None,
        "template certificate": as_text(header.certificate) if header.certificate else None,
    }
    return [(name, str(value)) for name, value in facts.items() if value is not None]


def _turns_data(turns: Sequence[Turn], evidence: Evidence) -> Data:
    text = evidence.text
    every = [_turn_data(turn, evidence) for turn in turns]
    drifted = [token for data in every for drift in data["drift"] for token in drift.ids]
    return {
        "turns": every,
        "text": text is not None,
        "pieces": {} if text is None else _pieces(text, {*_ids_of(turns), *drifted}),
        "pictures": _pictures(turns, evidence.pictures),
    }


def _ids_of(turns: Sequence[Turn]) -> Collection[int]:
    """Return every distinct id of the turns, including the top alternatives."""
    parts: list[npt.NDArray[np.generic]] = [turn.draft.columns.ids for turn in turns]
    parts += [turn.draft.extras["top_ids"].values.ravel() for turn in turns if "top_ids" in turn.draft.extras]
    whole = np.unique(np.concatenate([part.astype(np.int64) for part in parts])) if parts else np.zeros(0, np.int64)
    found: list[int] = whole[whole >= 0].tolist()
    return found


def _pieces(text: TokenText, ids: Collection[int]) -> Data:
    """Return each id's text; bytes that are not UTF-8 as a list with one hexadecimal string."""
    pieces: Data = {}
    for token in ids:
        piece = text.piece(token)
        try:
            pieces[str(token)] = piece.decode()
        except UnicodeDecodeError:
            pieces[str(token)] = [piece.hex()]
    return pieces


def _pictures(turns: Sequence[Turn], pictures: Mapping[bytes, str]) -> Data:
    digests = {span.sha256 for turn in turns for span in turn.draft.media}
    return {digest.hex(): pictures[digest] for digest in digests if digest in pictures}


def _turn_data(turn: Turn, evidence: Evidence) -> Data:
    draft, columns = turn.draft, turn.draft.columns
    start = turn.path_length - turn.own_length
    differences = evidence.differences.get(turn.index)
    return {
        "index": turn.index,
        "parent": turn.parent,
        "agent": draft.agent,
        "prompt": columns.prompt,
        "output": columns.output,
        "ids": _packed(columns.ids),
        "logprobs": _packed(columns.logprobs),
        "provenance": _packed(columns.prompt_provenance),
        "constrained": draft.constrained,
        "finish": str(draft.finish),
        "stop": draft.stop if isinstance(draft.stop, int) else None,
        "calls": [dict(zip(call._fields, call, strict=True)) for call in draft.calls],
        "open": not draft.reasoning_closed,
        "branch": None if draft.branch is None else {"why": str(draft.branch), "turn": draft.branch.turn},
        "versions": [tuple(span) for span in draft.versions],
        "media": [(span.offset - start, span.length, span.sha256.hex()) for span in draft.media],
        "top": _top(draft.extras, start),
        "promptLogprobs": _column(draft.extras.get("prompt_logprobs"), start),
        "differences": None if differences is None else _packed(differences),
        "drift": [] if evidence.text is None else evidence.text.drift(draft.output_ids.tolist()),
        "record": _record(turn),
        "sampling": [(name, as_text(value)) for name, value in draft.sampling.items()],
    }


def _top(extras: Mapping[str, Column], start: int) -> Data | None:
    """Return the top tokens of each position with a lower bound of the entropy there; see `entropy`."""
    ids, logprobs = extras.get("top_ids"), extras.get("top_logprobs")
    if ids is None or logprobs is None or len(ids.shape) != 2 or ids.shape != logprobs.shape:
        return None
    return {
        "start": ids.start - start,
        "k": ids.shape[1],
        "ids": _packed(ids.values.astype("<i4")),
        "logprobs": _packed(logprobs.values.astype("<f4")),
        "entropy": _packed(entropy(logprobs.values.astype(np.float64)).astype("<f4")),
    }


def entropy(logprobs: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Return a lower bound of the entropy in nats, shape (n,).

    Args:
        logprobs: Log-probabilities of the top tokens, shape (n, k); NaN and -inf mean no token. The probability that
            is left over counts as one token.
    """
    probabilities = np.exp(np.where(np.isfinite(logprobs), logprobs, -np.inf))
    rest = np.clip(1 - probabilities.sum(axis=1, keepdims=True), 0, 1)
    every = np.concatenate([probabilities, rest], axis=1)
    return np.asarray(-np.sum(np.where(every > 0, every * np.log(np.where(every > 0, every, 1)), 0), axis=1) + 0.0)


def _column(column: Column | None, start: int) -> Data | None:
    if column is None or len(column.shape) != 1:
        return None
    return {"start": column.start - start, "values": _packed(column.values.astype("<f4"))}


def _record(turn: Turn) -> Facts:
    """Return the facts about a turn's request, response and engine."""
    draft, engine = turn.draft, turn.draft.engine
    server, semantics = engine.server, engine.semantics
    kind = {True: "processed", False: "raw", None: "of unknown processing"}[semantics.processed]
    temperature = "" if semantics.temperature is None else f", temperature {semantics.temperature:g}"
    responses = [f"{start} to {stop}: {request}" for start, stop, request in engine.responses]
    facts = {
        "agent": draft.agent or "",
        "backend": server.backend,
        "model": server.model,
        "request": engine.request_id,
        "latency": f"{engine.latency_s:.3f} s",
        "prompt": f"{draft.prompt_length:,} tokens, {_cached(engine.cached_tokens)}",
        "logprobs": f"{kind}{temperature}{', adjusted' if semantics.adjusted else ''} ({semantics.source})",
        "finish": f"{draft.finish}{'' if draft.stop is None else f', stop {draft.stop!r}'}",
        "at most": f"{draft.max_new_tokens:,} new tokens",
        "responses": "; ".join(responses),
        "columns": ", ".join(f"{name} {list(column.shape)}" for name, column in draft.extras.items()),
        "history": draft.fingerprint.hex(),
    }
    return [(name, value) for name, value in facts.items() if value]


def _cached(tokens: int | None) -> str:
    return "cached: not reported" if tokens is None else f"{tokens:,} cached"


def _packed(values: npt.NDArray[Any]) -> str:
    return base64.b64encode(np.ascontiguousarray(values).data).decode()


class Drift(NamedTuple):
    """A run of tokens that re-tokenizing their text would change.

    Attributes:
        start: First token, as an offset in the compared ids.
        stop: One past the last token.
        ids: The ids that re-tokenizing returns instead.
    """

    start: int
    stop: int
    ids: list[int]


class TokenText:
    """The text of a tokenizer's tokens."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        backend = getattr(tokenizer, "backend_tokenizer", None)
        self._pieces: dict[int, bytes] = {}
        self._piece: Callable[[int], bytes] = self._plain_piece
        if isinstance(backend, Tokenizer) and isinstance(backend.decoder, decoders.ByteLevel):
            self._piece = TokenBytes(backend).__getitem__

    def piece(self, token: int) -> bytes:
        """Return the bytes of a token; empty if the tokenizer does not know the id."""
        return self._piece(token)

    def drift(self, ids: Sequence[int]) -> list[Drift]:
        """Return the runs of `ids` that change when they are decoded and encoded again."""
        text = str(self._tokenizer.decode(ids, skip_special_tokens=False))
        again = list(self._tokenizer.encode(text, add_special_tokens=False))
        return [] if again == list(ids) else self._differing(list(ids), again)

    def _differing(self, ids: list[int], again: list[int]) -> list[Drift]:
        """Compare the runs between the byte offsets where both sequences have a token border."""
        ours, theirs = self._edges(ids), self._edges(again)
        edges = sorted({*ours} & {*theirs}) if ours[-1] == theirs[-1] else [0]
        bounds = [(bisect_left(ours, edge), bisect_left(theirs, edge)) for edge in edges[:-1]]
        bounds.append((len(ids), len(again)))
        runs = [(0, 0), *bounds] if bounds[0] != (0, 0) else bounds
        found: list[Drift] = []
        for (start, first), (stop, last) in pairwise(runs):
            if ids[start:stop] != again[first:last]:
                found.append(Drift(start, stop, again[first:last]))
        return found

    def _edges(self, ids: list[int]) -> list[int]:
        return list(accumulate((len(self.piece(token)) for token in ids), initial=0))

    def _plain_piece(self, token: int) -> bytes:
        """Return the bytes that a token's name spells, in a vocabulary that is not byte-level."""
        piece = self._pieces.get(token)
        if piece is None:
            piece = self._pieces[token] = self._bytes_of_name(token)
        return piece

    def _bytes_of_name(self, token: int) -> bytes:
        added = self._tokenizer.added_tokens_decoder.get(token)
        if added is not None:
            return str(added.content).encode()
        try:
            name = self._tokenizer.convert_ids_to_tokens(token)
        except (IndexError, OverflowError):
            return b""
        if not isinstance(name, str):
            return b""
        byte = _BYTE.fullmatch(name)
        return bytes([int(byte[1], 16)]) if byte else name.replace(_METASPACE, " ").encode()


class TokenTexts:
    """The tokenizers of rollouts, each loaded once.

    The name in a file is not trusted, so it is looked up in local folders and the model hub's cache only. The tokenizer
    that the user gives may be downloaded.

    Args:
        tokenizer: The user's tokenizer for all rollouts; empty to use the one named in each rollout.

    Raises:
        TokenizerError: The user's tokenizer cannot be loaded.
    """

    def __init__(self, tokenizer: str = "") -> None:
        self._override = TokenText(load_tokenizer(tokenizer)) if tokenizer else None
        self._loaded: dict[str, TokenText | None] = {}

    def named(self, name: str | None) -> TokenText | None:
        """Return the tokenizer of the given name as `TokenText`; None if it is not on this machine."""
        if self._override is not None or not name:
            return self._override
        if name not in self._loaded:
            try:
                self._loaded[name] = TokenText(load_tokenizer(name, local_files_only=True))
            except TokenizerError:
                self._loaded[name] = None
        return self._loaded[name]


class Pictures:
    """The images of ledgers, and those in a folder, found by SHA-256. It is read when a rollout first needs it.

    Args:
        folder: The folder, or None for none.
    """

    def __init__(self, folder: str | os.PathLike[str] | None = None) -> None:
        self._folder = None if folder is None else Path(folder)
        self._files: dict[bytes, Path] | None = None

    def urls(self, ledger: Ledger) -> Mapping[bytes, str]:
        """Return the ledger's images as `data:` URLs by digest: those that it holds, and those in the folder."""
        urls = dict(urls_of(ledger.images.values()))
        missing = {span.sha256 for turn in ledger for span in turn.draft.media} - urls.keys()
        if missing and self._folder is not None:
            files = self._read(self._folder)
            urls |= {digest: _url(files[digest].read_bytes()) for digest in missing if digest in files}
        return {digest: url for digest, url in urls.items() if url}

    def _read(self, folder: Path) -> Mapping[bytes, Path]:
        if self._files is None:
            files = sorted(path for path in folder.rglob("*") if path.is_file())
            self._files = {hashlib.sha256(path.read_bytes()).digest(): path for path in files}
        return self._files


def urls_of(images: Iterable[Image]) -> Mapping[bytes, str]:
    """Return images as `data:` URLs by digest; an image that is no PNG, JPEG, GIF or WebP is left out."""
    urls = {image.sha256: _url(image.data) for image in images}
    return {digest: url for digest, url in urls.items() if url}


def _url(data: bytes) -> str:
    """Return an image as a `data:` URL; empty unless it is a PNG, JPEG, GIF or WebP. An SVG may hold a script."""
    kind = next((kind for start, kind in _KINDS if data.startswith(start)), "")
    if data.startswith(_RIFF) and data[8:12] == _WEBP:
        kind = "webp"
    return f"data:image/{kind};base64,{base64.b64encode(data).decode()}" if kind else ""
