"""Checks of the prompts with images that a server reports and that are sent (laws 4 and 6)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from support import picture_ledgers
from support.vision import LIMIT, VisionEngine, png, tokens_of
from tito_core.backend import BadRequestError, ContextLengthError, EngineInfo, ProtocolViolationError, SamplingParams
from tito_core.backend.errors import UnsupportedByServerError
from tito_core.backend.generate import generate, room_of, score, sendable
from tito_core.backend.images import (
    ImageSupport,
    PromptImages,
    clamp_for_images,
    collapsed,
    expanded,
    media_ids_of,
)
from tito_core.backend.protocol import RawResponse, TokenRequest
from tito_core.backend.resume import generate_resuming
from tito_core.backend.validation import validated
from tito_core.ledger import Image

PAD, EOS = 7, 2
INFO = EngineInfo("toy", "m", 100_000, "1", vocab_size=100, images=ImageSupport(True, 4))
PICTURES = [Image(bytes([number]), "png", 28, 28) for number in range(4)]


def request_of(ids: Sequence[int], lengths: Sequence[int] = (), **fields: Any) -> TokenRequest:
    count = list(ids).count(PAD)
    images = PromptImages(tuple(PICTURES[:count]), PAD, tuple(lengths))
    sampling = SamplingParams(max_new_tokens=8, stop_token_ids=(EOS,))
    return TokenRequest(np.array(ids, np.int32), sampling, "r", images=images, **fields)


def answer(echo: Any, **fields: Any) -> RawResponse:
    known = {
        "response_id": "r",
        "finish": "stop",
        "stop": EOS,
        "output_ids": [9, EOS],
        "logprobs": [-1.0, -0.5],
        "completion_tokens": 2,
    }
    length = len(echo) if isinstance(echo, list) else None
    return RawResponse(**{**known, "echoed": echo, "prompt_tokens": length, **fields})


def read(request: TokenRequest, echo: Any, **fields: Any) -> Any:
    return validated(answer(echo, **fields), sendable(request, INFO, backend="toy"), INFO)


@given(st.data())
def test_each_placeholder_becomes_its_tokens_and_nothing_else(data: st.DataObject) -> None:
    """Any prompt, some of whose images are old: the spans are those that the server made, and no changed id passes."""
    ids = data.draw(
        st.lists(st.integers(3, 20) | st.just(PAD), min_size=1, max_size=9).filter(lambda ids: ids.count(PAD) <= 4)
    )
    places = [at for at, token in enumerate(ids) if token == PAD]
    lengths = data.draw(st.lists(st.integers(1, 3), min_size=len(places), max_size=len(places)))
    old = data.draw(st.integers(0, len(places)))
    if not places:
        return
    echo: list[int] = []
    spans = []
    left = iter(lengths)
    for token in ids:
        if token == PAD:
            spans.append((len(echo), next(left)))
        echo += [token] * (spans[-1][1] if token == PAD else 1)
    request = request_of(ids, lengths[:old])
    as_json = msgspec.Raw(msgspec.json.encode(echo))  # as it comes from a server
    given = data.draw(st.sampled_from([echo, np.array(echo), as_json]))
    response = read(request, given, media=spans, image_tokens=sum(lengths), prompt_tokens=len(echo))
    assert response.media == tuple(spans[old:])
    assert response.prompt_length == len(echo)
    assert expanded(request.input_ids, PAD, lengths).tolist() == echo
    assert collapsed(np.array(echo, np.int32), spans).tolist() == ids
    at = data.draw(st.integers(0, len(echo) - 1))
    changed = [*echo]
    changed[at] = data.draw(st.sampled_from([21, 22, PAD]))
    if changed != echo:
        with pytest.raises(ProtocolViolationError):
            read(request, changed, media=spans, image_tokens=sum(lengths))


WRONG: list[tuple[list[int], list[int], list[int] | None, dict[str, Any]]] = [
    ([5, PAD, 6], [], [5, 6], {}),  # the image was dropped
    ([5, PAD, 6], [], [5, PAD, PAD, 6, 6], {}),  # a text token was added
    ([5, PAD, 6], [], [5, PAD, 8, PAD, 6], {}),  # row breaks
    ([5, PAD, 6], [], [5, 8, PAD, PAD, 6], {}),
    ([5, PAD, 6], [], [4, PAD, PAD, 6], {}),  # an id before it changed
    ([5, PAD, 6], [], [5, PAD, PAD], {}),  # cut off
    ([5, PAD, 6], [], None, {}),  # no echo
    ([5, PAD, 6], [2], [5, PAD, PAD, PAD, 6], {}),  # another length than in the turn before
    ([5, PAD, 6], [2], [5, PAD, 6], {}),
    ([5, PAD, 6, PAD], [2], [5, PAD, PAD, PAD, 6, PAD], {}),
    ([5, PAD, 6], [], [5, PAD, PAD, 6], {"media": [(1, 1)]}),
    ([5, PAD, 6], [], [5, PAD, PAD, 6], {"media": [(2, 2)]}),
    ([5, PAD, 6], [], [5, PAD, PAD, 6], {"media": []}),
    ([5, PAD, 6], [], [5, PAD, PAD, 6], {"media": ["12"]}),
    ([5, PAD, 6], [], [5, PAD, PAD, 6], {"image_tokens": 3}),
    ([5, PAD, 6], [], [5, PAD, PAD, 6], {"image_tokens": "2"}),
    ([5, PAD, 6], [], [5, PAD, PAD, 6], {"prompt_tokens": 3, "image_tokens": 2}),
    ([5, PAD, 6], [2], [5, PAD, PAD, 6], {"image_tokens": 1}),
    ([PAD, PAD], [], [PAD, PAD, PAD], {}),  # neighbours that nothing divides
    ([PAD, PAD], [], [PAD, PAD, PAD], {"media": [(0, 1), (2, 1)]}),
    ([PAD, PAD], [], [PAD], {"media": [(0, 1), (1, 0)]}),
]


@pytest.mark.parametrize(("ids", "lengths", "echo", "fields"), WRONG)
def test_another_prompt_is_refused(ids: Any, lengths: Any, echo: Any, fields: Any) -> None:
    with pytest.raises(ProtocolViolationError, match=r"Law 4: .*[0-9]|Law 4: the server did not echo"):
        read(request_of(ids, lengths), echo, **fields)


def test_a_picture_that_is_shown_twice_has_one_length() -> None:
    request = request_of([5, PAD, 6, PAD])
    assert request.images is not None
    shown = replace(request, images=replace(request.images, images=(PICTURES[0], PICTURES[0])))
    with pytest.raises(ProtocolViolationError, match=r"Law 4: .* 2 and 3 tokens of one picture"):
        read(shown, [5, PAD, PAD, 6, PAD, PAD, PAD], image_tokens=5)
    assert read(shown, [5, PAD, PAD, 6, PAD, PAD], image_tokens=4).prompt_length == 6


@pytest.mark.parametrize("lengths", [[], [2]])
def test_every_prompt_with_images_is_echoed(lengths: list[int]) -> None:
    request = request_of([5, PAD, 6], lengths, echo=False)
    assert sendable(request, INFO, backend="toy").echo
    with pytest.raises(ProtocolViolationError, match="did not echo"):
        read(request, None, prompt_tokens=4, image_tokens=2)


@pytest.mark.parametrize("lengths", [[], [1]])
def test_images_that_the_server_may_have_dropped_are_refused(lengths: list[int]) -> None:
    """A dropped image leaves its placeholder, which the server reads as a token of text."""
    request, dropped = request_of([5, PAD, 6], lengths), [5, PAD, 6]
    for info in (INFO, replace(INFO, unreported=frozenset({"media"}))):
        with pytest.raises(ProtocolViolationError, match=r"reports no placeholders for the images of the prompt \(1\)"):
            validated(answer(dropped), sendable(request, info, backend="toy"), info)
    assert read(request, dropped, image_tokens=1).prompt_length == 3


def test_a_backend_may_declare_that_it_cannot_report_images() -> None:
    request, echo = request_of([5, PAD, 6]), [5, PAD, PAD, 6]
    with pytest.raises(ProtocolViolationError, match="reports no placeholders"):
        read(request, echo)
    info = replace(INFO, unreported=frozenset({"media"}))
    assert validated(answer(echo), sendable(request, info, backend="toy"), info).media == ((1, 2),)


def changed(ids: Sequence[int]) -> TokenRequest:
    return replace(request_of([5, PAD]), input_ids=np.array(ids, np.int32))


UNSENT: list[tuple[TokenRequest, ImageSupport, type[Exception], str]] = [
    (request_of([5, PAD]), ImageSupport(remedy="Start it with --so."), UnsupportedByServerError, "--so"),
    (changed([5, 6]), ImageSupport(True), BadRequestError, "0 placeholder.* 1 image"),
    (changed([PAD, PAD]), ImageSupport(True), BadRequestError, "2 placeholder"),
    (request_of([5, PAD], [1, 1]), ImageSupport(True), BadRequestError, "2 of them"),
    (request_of([5, PAD, PAD]), ImageSupport(True, 1), BadRequestError, "2 images.* at most 1"),
]


@pytest.mark.parametrize(("request_", "support", "error", "words"), UNSENT)
def test_what_a_server_would_misread_is_not_sent(request_: Any, support: Any, error: Any, words: str) -> None:
    with pytest.raises(error, match=words):
        sendable(request_, replace(INFO, images=support), backend="toy")


def test_a_new_image_leaves_room_for_its_tokens() -> None:
    """The context has 1000 tokens; a picture of 28 x 28 pixels counts as 256, and as half of the room at most."""
    long = replace(request_of([5, PAD]), sampling=SamplingParams(max_new_tokens=5000))
    assert room_of(long, 1000, backend="toy") == 1000 - 2 - 256
    assert long.images is not None
    assert room_of(replace(long, images=replace(long.images, lengths=(20,))), 1000, backend="toy") == 1000 - 21
    assert room_of(long, 100, backend="toy") == 49
    assert room_of(long, 3, backend="toy") == 1


@given(
    sizes=st.lists(st.tuples(st.integers(1, 3000), st.integers(1, 3000)), max_size=4),
    limit=st.integers(1, 40_000),
    length=st.integers(1, 40_000),
    bound=st.none() | st.integers(1, 60_000),
)
def test_room_is_kept_for_the_expected_tokens_of_new_images(
    sizes: list[tuple[int, int]], limit: int, length: int, bound: int | None
) -> None:
    """One token for each 28 x 28 pixels, at least 256 for an image, and at most half of the room for all."""
    bound = None if bound is None else length + bound
    found = clamp_for_images([Image(b"x", "png", *size) for size in sizes], limit, length, bound)
    if bound is None or not sizes:
        assert found == limit
    else:
        expected = sum(max(256, int(width * height / 784)) for width, height in sizes)
        half = (bound - length) // 2
        assert found == min(limit, bound - length - min(expected, half))
        assert found >= 1
        assert found == limit or found >= half


async def test_images_that_do_not_fit_the_context_are_not_scored() -> None:
    engine = VisionEngine(context=9)
    picture = Image(png(8, 8, 1), "png", 8, 8)
    images = PromptImages((picture,), engine.pad, (tokens_of(picture.data),))
    assert tokens_of(picture.data) == 5
    assert len(await score(engine, [20, engine.pad, 21, 22], images)) == 8
    with pytest.raises(ContextLengthError):
        await score(engine, [20, engine.pad, 21, 22, 23], images)


async def test_scores_inside_an_image_are_not_numbers() -> None:
    engine = VisionEngine()
    ids = [20, engine.pad, 21, 22]
    picture = Image(png(8, 8, 1), "png", 8, 8)
    found = await score(engine, ids, PromptImages((picture,), engine.pad, (tokens_of(picture.data),)))
    assert np.isnan(found).tolist() == [True, *[True] * 5, False, False]
    with pytest.raises(BadRequestError, match="lengths of all 1"):
        await score(engine, ids, PromptImages((picture,), engine.pad))
    with pytest.raises(BadRequestError):
        await score(engine, [engine.pad] * (LIMIT + 1), PromptImages((picture,) * (LIMIT + 1), engine.pad, (5,) * 9))


class Aborting(VisionEngine):
    """It aborts each request but the third after its first token."""

    async def generate(self, request: Any, on_chunk: Any = None) -> RawResponse:
        raw = await super().generate(request, on_chunk)
        if len(self.requests) == 3:
            return raw
        kept = int(len(self.requests) == 2)
        ids, logprobs = list(raw.output_ids or ())[:kept], list(raw.logprobs or ())[:kept]
        fields: dict[str, Any] = {"finish": "abort", "stop": None, "output_ids": ids, "logprobs": logprobs}
        return replace(raw, **fields, completion_tokens=kept)


async def test_a_resumed_generation_sends_its_images_again() -> None:
    engine = Aborting()
    ids = np.array([20, engine.pad, 21, engine.pad], np.int32)
    pictures = tuple(Image(png(8, 8, seed), "png", 8, 8) for seed in (1, 2))
    sampling = SamplingParams(max_new_tokens=8, stop_token_ids=(engine.end,))
    request = TokenRequest(ids, sampling, "r", images=PromptImages(pictures, engine.pad, (5,)))
    response = await generate_resuming(engine, request)
    assert [each.images.lengths for each in engine.requests] == [(5,), (5,), (5, 5)]
    assert [each.images.images for each in engine.requests] == [pictures] * 3
    assert (response.prompt_length, response.media) == (12, ((7, 5),))
    whole = await generate(VisionEngine(), request)
    assert response.logprobs[0] == whole.logprobs[0]


async def test_a_resumed_generation_that_sampled_a_placeholder_starts_again() -> None:
    engine = Aborting(answers=["b", "<|image_pad|>", "a<|im_end|>"])
    sampling = SamplingParams(max_new_tokens=8, stop_token_ids=(engine.end,))
    images = PromptImages((Image(png(8, 8, 1), "png", 8, 8),), engine.pad)
    request = TokenRequest(np.array([20, engine.pad], np.int32), sampling, "r", images=images)
    response = await generate_resuming(engine, request)
    assert [len(each.input_ids) for each in engine.requests] == [2, 2, 2]
    assert response.output_ids.tolist() == [*engine.tokenizer.encode("a"), engine.end]


def test_a_ledgers_placeholders_are_those_of_its_certificate_and_of_its_images() -> None:
    ledger = picture_ledgers.two_images()
    assert media_ids_of(ledger) == (picture_ledgers.PAD,)
    ledger.header = replace(ledger.header, certificate=None)
    assert media_ids_of(ledger) == (picture_ledgers.PAD,)
    ledger.header = replace(ledger.header, certificate={"media_ids": [PAD]})
    assert media_ids_of(ledger) == (PAD, picture_ledgers.PAD)
