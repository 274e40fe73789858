"""Validate what a server made of a prompt with images (law 4): which tokens it read in place of each placeholder."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import msgspec
import numpy as np

from tito_core.backend.errors import UNREADABLE, ProtocolViolationError
from tito_core.backend.id_text import SAME_ECHO
from tito_core.backend.images import PromptImages, expanded
from tito_core.backend.protocol import NOTHING, RawResponse, TokenRequest
from tito_core.backend.values import RawReader, integer, short_repr
from tito_core.ledger.columns import TokenIds

Span = tuple[int, int]
"""(offset, length) of an image's placeholders in the expanded prompt."""


class ReadPrompt(NamedTuple):
    """A prompt as the server read it.

    Attributes:
        ids: The expanded ids, int32, shape (p,).
        new: The spans of the new images, in order.
    """

    ids: TokenIds
    new: tuple[Span, ...]


@dataclass(frozen=True, slots=True)
class ImageValidation:
    """Checks of the prompt of one generation.

    Attributes:
        reader: Reads values, and builds errors.
        request: The request that was sent.
        images: Its images.
    """

    reader: RawReader
    request: TokenRequest
    images: PromptImages

    def read(self, raw: RawResponse, *, needs_echo: bool, needs_report: bool) -> ReadPrompt:
        """Return the prompt that the server read.

        Args:
            raw: The answer.
            needs_echo: Whether an answer without echo is wrong.
            needs_report: Whether an answer with neither spans nor a count of image tokens is wrong.

        Raises:
            ProtocolViolationError: The echo, the reported spans or the count of image tokens contradict the request, or
                the server does not report what it made of the images.
        """
        sent, images = self.request.input_ids, self.images
        echo = self._echo(raw.echoed)
        if images.new:
            if echo is None:
                raise self.reader.violation(
                    "Law 4: the server did not echo the ids of a prompt with a new image, so nothing tells how many "
                    "tokens the image became. Its version is too old for images, or a proxy removed the field."
                )
            assert isinstance(echo, np.ndarray)  # the text of an unknown prompt cannot be known
            reported = None if raw.media is None else self._spans(raw.media)
            spans = [*self._new_spans(echo, reported)]
            lengths = (*images.lengths, *(length for _, length in spans))
            ids = echo
        else:
            ids, lengths = expanded(sent, images.placeholder, images.lengths), images.lengths
            if echo is None and needs_echo:
                raise self.reader.violation(
                    "Law 4: the server did not echo the prompt ids, so nothing proves which prompt it read."
                )
            if isinstance(echo, np.ndarray):
                self._expect_same(ids, echo, 0)
                if len(echo) != len(ids):
                    raise self._other_length(len(ids), len(echo))
            spans = []
        self._expect_reported(raw, lengths, needs_report=needs_report)
        self._expect_one_length_a_picture(lengths)
        return ReadPrompt(ids, tuple(spans))

    def _echo(self, echoed: object) -> TokenIds | bool | None:
        """Return the echoed ids, True if their text equals the expected one, or None if there is no echo."""
        if echoed is None or (isinstance(echoed, bytes | msgspec.Raw) and echoed == NOTHING):
            return None
        text = self.request.echo_text
        if isinstance(echoed, bytes | msgspec.Raw):
            if text is not None and (echoed == SAME_ECHO or text.is_echoed_in(bytes(echoed))):
                return True
            try:
                echoed = msgspec.json.decode(echoed, type=list[int])
            except UNREADABLE as error:
                raise self.reader.violation(f"Law 4: the echo of the prompt is not a list of ids: {error}.") from error
        return self.reader.token_ids(self.reader.integers("echoed", echoed), "echoed id")

    def _new_spans(self, echo: TokenIds, reported: Sequence[Span] | None) -> Iterator[Span]:
        """Yield the span of each new image, and check that only placeholders were added to the prompt.

        Neighbouring images can be distinguished only by the server's own spans.
        """
        sent, placeholder, old = self.request.input_ids, self.images.placeholder, len(self.images.lengths)
        places = np.flatnonzero(sent == placeholder)
        known = expanded(sent[: places[old]], placeholder, self.images.lengths)
        self._expect_same(known, echo, 0)
        at, done, number = len(known), int(places[old]), old
        while number < len(places):
            group = 1
            while number + group < len(places) and places[number + group] == places[number] + group:
                group += 1
            run = _run(echo, placeholder, at)
            if run < group:
                raise self.reader.violation(
                    f"Law 4: the server read {run} placeholder tokens at offset {at} for {group} images."
                )
            inside = [(at, run)] if group == 1 else self._parts(reported, number, group, at, run)
            yield from inside
            number, at = number + group, at + run
            done = int(places[number - 1]) + 1
            text = sent[done : places[number]] if number < len(places) else sent[done:]
            self._expect_same(text, echo, at)
            at += len(text)
        if at != len(echo):
            raise self._other_length(at, len(echo))

    def _parts(self, reported: Sequence[Span] | None, first: int, group: int, at: int, run: int) -> Sequence[Span]:
        """Return the spans of neighbouring images, as the server reports them, if they tile the run."""
        parts = list(reported or ())[first : first + group]
        ends = [at, *(offset + length for offset, length in parts)]
        tiles = len(parts) == group and ends[-1] == at + run and all(length > 0 for _, length in parts)
        if not tiles or any(offset != end for (offset, _), end in zip(parts, ends, strict=False)):
            raise self.reader.violation(
                f"Law 4: {group} neighbouring images became {run} tokens at offset {at}, and the server's spans "
                f"{short_repr(parts)} do not divide them. Put a text between the images."
            )
        return parts

    def _expect_same(self, sent: TokenIds, echo: TokenIds, at: int) -> None:
        """Check that ids were read unchanged from offset `at` on."""
        found = echo[at : at + len(sent)]
        if len(found) == len(sent) and np.array_equal(found, sent):
            return
        if len(found) < len(sent) and np.array_equal(found, sent[: len(found)]):
            raise self._other_length(at + len(sent), len(echo))
        wrong = int(np.argmax(found != sent[: len(found)]))
        raise self.reader.violation(
            f"Law 4: prompt id {int(sent[wrong])} was sent, but the server read {int(found[wrong])} at offset "
            f"{at + wrong}. A placeholder of an image may only be repeated."
        )

    def _other_length(self, expected: int, found: int) -> ProtocolViolationError:
        return self.reader.violation(
            f"Law 4: the prompt should have {expected} tokens with its images, but the server read {found}."
        )

    def _expect_reported(self, raw: RawResponse, lengths: Sequence[int], *, needs_report: bool) -> None:
        """Compare the server's own spans and count with the prompt. Without them a dropped image looks like a token."""
        if raw.media is None and raw.image_tokens is None and (needs_report or 1 in lengths):
            raise self.reader.violation(
                f"Law 4: the server reports no placeholders for the images of the prompt ({len(lengths)}), so nothing "
                "proves that it read them. A proxy may have removed the images or the report, or the server's version "
                "is too old for images."
            )
        if raw.media is not None and (found := self._spans(raw.media)) != (expected := self._expected_spans(lengths)):
            raise self.reader.violation(
                f"Law 4: the server reports the images' spans {short_repr(found)}, but the prompt has "
                f"{short_repr(expected)}."
            )
        if raw.image_tokens is not None and integer(raw.image_tokens) != sum(lengths):
            raise self.reader.violation(
                f"Law 4: the server reports {short_repr(raw.image_tokens)} image tokens, but its prompt has "
                f"{sum(lengths)}."
            )

    def _expect_one_length_a_picture(self, lengths: Sequence[int]) -> None:
        """Require that a picture that a prompt shows twice has one number of tokens."""
        seen: dict[bytes, int] = {}
        for image, length in zip(self.images.images, lengths, strict=True):
            if (other := seen.setdefault(image.sha256, length)) != length:
                raise self.reader.violation(
                    f"Law 4: the server made {other} and {length} tokens of one picture ({image.width} x "
                    f"{image.height} pixels) that the prompt shows twice, so it read another one in one of its places."
                )

    def _expected_spans(self, lengths: Sequence[int]) -> list[Span]:
        places = np.flatnonzero(self.request.input_ids == self.images.placeholder)
        more = np.cumsum([0, *(length - 1 for length in lengths)])[:-1]
        return list(zip((places + more).tolist(), lengths, strict=True))

    def _spans(self, media: object) -> list[Span]:
        spans = []
        for span in media if isinstance(media, Sequence) else [media]:
            offset, length = span if isinstance(span, Sequence) and len(span) == 2 else (None, None)
            first, count = integer(offset), integer(length)
            if first is None or count is None:
                raise self.reader.violation(f"Law 4: media must be (offset, length) pairs, not {short_repr(media)}.")
            spans.append((first, count))
        return spans


def _run(ids: TokenIds, token: int, at: int) -> int:
    """Return how many times a token stands from offset `at` on."""
    other = np.flatnonzero(ids[at:] != token)
    return int(other[0]) if len(other) else len(ids) - at
