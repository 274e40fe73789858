"""Whether a server's vocabulary is the client tokenizer's (law 15): both encode the same texts, or their sizes fit."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from tito_core.backend.generate import tokenize
from tito_core.backend.protocol import Backend, EngineInfo
from tito_core.chat.encoder import ContentSafeEncoder
from tito_core.chat.probes import cases, user_message
from tito_core.chat.traced import Traced
from tito_core.ledger.columns import TokenIds
from tito_core.ledger.laws import check_same_ids, check_vocab_size
from tito_core.ledger.turn import VocabularyCheck
from tito_core.parsing.registry import ToolParser, control_strings

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerBase

    from tito_core.chat.template import ChatTemplate

logger = logging.getLogger(__name__)


async def compare(
    backend: Backend,
    info: EngineInfo,
    tokenizer: PreTrainedTokenizerBase,
    template: ChatTemplate,
    parser: ToolParser,
) -> VocabularyCheck:
    """Compare the client's tokenizer with the server's; the ledger records how it was compared.

    With another tokenizer than the server's a rollout would run without an error, on ids with other meanings.

    Only tokens that a rollout can send are compared: ordinary text, added tokens that text becomes, and the control
    tokens that the chat template or the parser uses (all, where content may become control tokens). Other added tokens
    may differ, since they are never exchanged. A server whose tokenizer encodes control tokens as text (vLLM's Mistral
    mode) is compared on ordinary text, and the result is that of the sizes.

    Args:
        backend: A connected backend.
        info: What the server reported.
        tokenizer: The client's tokenizer.
        template: Its chat template.
        parser: Its parser.

    Raises:
        LawViolationError: The tokenizers differ (law 15).
        BackendError: The server could not be reached.
    """
    names = {
        "tokenizer": tokenizer.name_or_path or "(unnamed)",
        "server": f"the {backend.name} server of {info.model!r}",
    }
    probes = [*_probes(tokenizer, template, parser)]
    server_ids = await _server_ids(backend, probes)
    encoded = [(probe, ids) for probe, ids in zip(probes, server_ids, strict=True) if ids is not None]
    if not all(np.array_equal(ids, probe.as_text) for probe, ids in encoded):
        for probe, ids in encoded:
            check_same_ids(probe.text, probe.ids.tolist(), ids.tolist(), **names)
    if len(encoded) == len(probes) and all(np.array_equal(ids, probe.ids) for probe, ids in encoded):
        return VocabularyCheck.TOKENIZE
    check = VocabularyCheck.NOT_CHECKED
    if info.vocab_size is not None:
        check_vocab_size(_largest_id(template.encoder.tokenizer, probes), info.vocab_size, **names)
        check = VocabularyCheck.VOCAB_SIZE
    why = "reads control tokens as text" if encoded else "does not encode text for clients"
    logger.warning("vocabulary=<%s>, tokenizer=<%s> | %s %s", check, names["tokenizer"], names["server"], why)
    return check


ORDINARY = (
    "The quick brown fox jumps over the lazy dog, doesn't it?",
    "0 12 345 6789 31415926 3.14159 2026-11-23",
    "a  b   c\n\n\n    d\t\te \r\n ",
    'def f(x: int) -> str:\n    return {"a": [x], "b": f"{x!r}"}  # != <= >= && ||\n',
    "Größe, naïve, smørrebrød, Привет, Ελληνικά, العربية, हिन्दी, 日本語, 한국어, 中文",
    "🙂 👩🏽‍🚀 🇳🇴 ❤️ ∑ ≠ → ½ x² ①",
)
"""Texts that vocabularies split differently: words, digits, whitespace, code, other scripts, emoji and symbols."""
QUESTION = "Count to ten."


@dataclass(frozen=True, slots=True)
class Probe:
    """A text with its ids.

    Attributes:
        text: The text.
        ids: The client's ids, int32, shape (n,).
        as_text: The client's ids with control tokens encoded as ordinary text, int32, shape (m,).
    """

    text: str
    ids: TokenIds
    as_text: TokenIds


async def _server_ids(backend: Backend, probes: Sequence[Probe]) -> list[TokenIds | None]:
    """Return the server's ids of each probe; all None after the first where the server cannot encode text."""
    first = await tokenize(backend, probes[0].text)
    if first is None:
        return [None] * len(probes)
    return [first, *await asyncio.gather(*(tokenize(backend, probe.text) for probe in probes[1:]))]


def _probes(tokenizer: PreTrainedTokenizerBase, template: ChatTemplate, parser: ToolParser) -> Iterator[Probe]:
    """Yield the probes: ordinary texts, the control tokens in use, a conversation, and a first prompt."""
    encoder = template.encoder
    inert = encoder if encoder.inert else ContentSafeEncoder(tokenizer)
    for text in ORDINARY:
        ids = np.array(encoder.tokenizer.encode(text, add_special_tokens=False).ids, np.int32)
        yield Probe(text, ids, ids)
    added = [token.content for token in encoder.tokenizer.get_added_tokens_decoder().values()]
    if words := [text for text in added if text not in encoder.added]:  # a text becomes these
        ids = inert.encode(Traced.content(" ".join(words), 0)).ids
        yield Probe(" ".join(words), ids, ids)
    used = control_strings(parser)
    source = str(tokenizer.chat_template)
    ends = {*template.stop_ids, tokenizer.eos_token_id}
    control = [
        text
        for text, index in encoder.added.items()
        if not encoder.inert or text in source or text in used or index in ends
    ]
    renderings = [Traced(" ".join(sorted(control)), ())] if control else []
    for case in cases():
        if case.calls and case.tools and case.name in template.certificate.passed:
            messages = [*case.before, case.answer, *case.new]
            renderings.append(template.rendering.of_messages(messages, case.system, case.tools))
            break
    renderings.append(template.rendering.of_messages([user_message(QUESTION)]))
    for text in renderings:
        plain = str.__str__(text)
        yield Probe(plain, encoder.encode(text).ids, inert.encode(Traced.content(plain, 0)).ids)


def _largest_id(backend: Tokenizer, probes: Sequence[Probe]) -> int:
    """Return the largest id that the client may send: in the vocabulary without added tokens, or in the probes."""
    added = backend.get_added_tokens_decoder()
    ordinary = max((index for index in backend.get_vocab().values() if index not in added), default=-1)
    return max(ordinary, *(int(probe.ids.max(initial=-1)) for probe in probes))
