"""Rollouts for the viewer: real ones, one with everything that a page can show, and a hostile one."""

from __future__ import annotations

import re
from collections.abc import Sequence
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from tokenizers import Tokenizer, decoders
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from strands_tito.inspect.score import PREFIX, encoded
from strands_tito.viewer.data import TokenText, TokenTexts
from strands_tito.viewer.rollouts import Rollouts
from support.drafts import engine_record, make_draft
from tito_core import store
from tito_core.ledger import (
    Annotation,
    Branch,
    CallRecord,
    Column,
    EngineRecord,
    Finish,
    Ledger,
    MediaSpan,
    Provenance,
    Reason,
    Sampling,
    Semantics,
    Server,
    VersionSpan,
)
from tito_core.parsing.completion import CallStatus

REAL = Path(__file__).parent.parent / "viewer" / "real"
"""Rollouts of a small model: a tool call, a malformed call, a branch, a truncated answer, the top five tokens."""
UUID = "00000001-0000-4000-8000-000000000000"
ATTACKS = (
    "</script><script>window.hit=1</script>",
    "<img src=x onerror=window.hit=2>",
    "<style>*{display:none!important}</style>",
    "<link rel=stylesheet href=http://attack.invalid/a.css>",
    '"><a href="javascript:window.hit=3">click</a>',
    "<iframe srcdoc='<script>parent.hit=4</script>'></iframe>",
    "<!--<script>",
    "{{script}}{{data}}",
    "\u202e\u2066\u0000\x1b]0;x\x07",
    "\u2028window.hit=5\u2029",
)
_WORDS = {text: number for number, text in enumerate(ATTACKS)}


class Texts(TokenTexts):
    """The same tokenizer for every rollout."""

    def __init__(self, tokenizer: Any) -> None:
        super().__init__()
        self._override = TokenText(tokenizer)


def real(kind: str) -> Rollouts:
    return Rollouts([REAL / f"{kind}.tito"])


def rich() -> Ledger:
    """A rollout with branches, pictures, versions, a grammar, inserted closers and prompt logprobs."""
    ledger = Ledger(UUID, task_id="task", group_id="group", user={"sample": 3})
    kinds = np.array([Provenance.SCAFFOLD, Provenance.PROMPT, Provenance.PROMPT], np.uint8)
    ledger.commit(
        make_draft(
            None, 0, [100, 101, 102], [200, 201, 202, 203], prompt_provenance=kinds, stop=None, finish=Finish.LENGTH,
            engine=engine_record(4, 2), media=(MediaSpan(1, 2, bytes(range(32))),),
            calls=(CallRecord("look", "truncated", 2, 4, "The limit of tokens cut it off."),),
            extras={"prompt_logprobs": Column.of(1, [-0.5, -0.25])},
        )
    )  # fmt: skip
    inserted = np.array([Provenance.INSERTED, Provenance.PROMPT], np.uint8)
    top = Column.of(9, [[201, 7], [8, 201]]), Column.of(9, np.log([[0.5, 0.5], [0.75, 0.125]]))
    ledger.commit(
        make_draft(0, 7, [103, 104], [201, 201], prompt_provenance=inserted, logprobs=np.log([0.5, 0.125]),
                   extras=dict(zip(("top_ids", "top_logprobs"), top, strict=True)))
    )  # fmt: skip
    branch = Branch(Reason.RETRY, 1, 2)
    ledger.commit(make_draft(0, 7, [103], [205, 206], constrained=True, reasoning_closed=False, branch=branch))
    ledger.annotate("reward", 0.5)
    ledger.annotate("reward", 1.0)
    ledger.annotate("termination", "completed")
    ledger.annotate("judge", {"why": "right"}, turn=1)
    return ledger


def ledger_of_calls() -> Ledger:
    """One turn with a call of each status, on one token each."""
    ledger = Ledger(UUID)
    calls = tuple(CallRecord("look", status.value, at, at + 1, f"why {status}") for at, status in enumerate(CallStatus))
    ledger.commit(make_draft(None, 0, [100], [200 + at for at in range(len(calls) + 1)], calls=calls))
    return ledger


def hostile(uuid: str = UUID) -> Ledger:
    """A rollout with markup in every string of the ledger and in its tokens."""
    every = "".join(ATTACKS).replace("\u0000", "")
    ids = list(range(len(ATTACKS)))
    server = Server(every, every, Semantics(None, 1.0, False, every))
    engine = EngineRecord(server, every, 0.1, 3, (VersionSpan(0, len(ids), every),))
    ledger = Ledger(uuid, task_id=every, group_id=every, user={every: every})
    calls = (CallRecord(every, every, 0, 2, every), CallRecord(None, "malformed", 2, 3, every))
    fields = {"engine": engine, "sampling": Sampling({every: every}), "calls": calls, "stop": every, "agent": every}
    ledger.commit(make_draft(None, 0, ids, ids, **fields))
    ledger.commit(make_draft(0, 2 * len(ids), ids, ids, **fields))
    ledger.commit(make_draft(0, 2 * len(ids), ids, ids, **fields, branch=Branch(Reason.OPENING, 0, 1, every)))
    notes = [Annotation("reward", every)]  # as a hostile file may hold it
    ledger = Ledger.load(ledger.header, [turn.draft for turn in ledger], notes)
    ledger.annotate("termination", every)
    ledger.annotate(every, {every: [every]}, turn=1)
    meaning = {"processed": every, "temperature": 1.0, "adjusted": False, "source": every}
    facts = {"model": {every: every}, "weight_version": every, "vocabulary": "not checked", "semantics": meaning}
    for turn in ledger:
        ledger.annotate(PREFIX + every, encoded(np.full(turn.own_length, -1, np.float32), facts), turn=turn.index)
    ledger.annotate(f"{PREFIX}{every}2", every, turn=1)
    return ledger


def hostile_tokenizer() -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel(_WORDS, unk_token=ATTACKS[0])))


def sentencepiece_like() -> PreTrainedTokenizerFast:
    """A vocabulary with ▁ for blanks and named byte tokens."""
    words = {"▁Hi": 0, "<0xE2>": 1, "<0x82>": 2, "<0xAC>": 3, "!": 4}
    made = Tokenizer(WordLevel(words, unk_token="!"))
    made.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()])
    return PreTrainedTokenizerFast(tokenizer_object=made)


def written(folder: Path, *ledgers: Ledger, name: str = "rollouts.tito") -> Path:
    path = folder / name
    store.append(path, ledgers)
    return path


class _Elements(HTMLParser):
    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.found: list[tuple[str, dict[str, str | None]]] = []

    def handle_starttag(self, tag: str, attributes: Sequence[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attributes)))


def elements(page: str) -> list[tuple[str, dict[str, str | None]]]:
    """Return the elements of a page's HTML, before any script runs."""
    parser = _Elements()
    parser.feed(page)
    return parser.found


def data_of(page: bytes) -> Any:
    """Read a page's data."""
    found = re.search(rb'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    assert found is not None
    return msgspec.json.decode(found[1])
