"""Images through whole turns: what the engine reads, what the ledger holds, and which history a turn continues."""

from __future__ import annotations

import asyncio
import gc
import hashlib
import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from support.conversations import LOOK
from support.vision import VISION, VisionEngine, image, png, policy_of, tokens_of
from tito_core import store
from tito_core.backend.generate import score
from tito_core.backend.images import ImageSupport, PromptImages, collapsed
from tito_core.chat.images import ImageError
from tito_core.ledger import LawViolationError, Ledger, MediaSpan, Provenance, check_ledger
from tito_core.model import TITOModel
from tito_core.store import LedgerFile
from tito_core.turn.answer import sampled_placeholders
from tito_core.turn.prompt import Prompt

PICTURES = [png(8, 8, 1), png(8, 8, 2), png(12, 4, 3), png(4, 4, 4), png(1, 1, 5)]
"""The first two become equally many tokens."""
TEXTS = st.text(max_size=6) | st.sampled_from([*VISION, "".join(VISION), "<|im_end|>", "\n", "<|image_", "pad|>"])
BLOCKS = st.one_of(TEXTS.map(lambda text: {"text": text}), st.sampled_from(PICTURES).map(image))
CALL = '<tool_call>{"name": "look", "arguments": {"at": "x"}}</tool_call><|im_end|>'


async def ask(model: TITOModel, messages: list[Any], **options: Any) -> Any:
    """Run a turn as Strands does, and append the answer to the messages."""
    content: list[Any] = []
    async for event in model.stream(messages, [LOOK], **options):
        start = event.get("contentBlockStart", {}).get("start", {})
        delta = event.get("contentBlockDelta", {}).get("delta", {})
        if "toolUse" in start:
            content.append({"toolUse": {**start["toolUse"], "input": {"at": "x"}}})
        elif "text" in delta and content and "text" in content[-1]:
            content[-1]["text"] += delta["text"]
        elif "text" in delta:
            content.append({"text": delta["text"]})
    messages.append({"role": "assistant", "content": content or [{"text": "[blank text]"}]})


def images_in(messages: list[Any]) -> list[bytes]:
    """The pictures of a history in the order of their placeholders: a message's results come before its own blocks."""
    found = []
    for message in messages:
        results = [block["toolResult"]["content"] for block in message["content"] if "toolResult" in block]
        for blocks in (*results, message["content"]):
            found += [block["image"]["source"]["bytes"] for block in blocks if "image" in block]
    return found


def expect_ledger(engine: VisionEngine, ledger: Ledger, messages: list[Any]) -> None:
    """The last turn's path is what the engine read and sampled; its media are the history's pictures, in order."""
    check_ledger(ledger)
    turn = ledger[len(ledger) - 1]
    ids, digests = engine.read[-1]
    shown = images_in(messages)
    assert digests == [hashlib.sha256(data).digest() for data in shown]
    assert ledger.path_ids(turn.index).tolist() == [*ids, *turn.draft.output_ids.tolist()]
    media = ledger.media(turn.index)
    assert [span.sha256 for span in media] == digests
    assert [span.length for span in media] == list(map(tokens_of, shown))
    sizes = [struct.unpack(">II", data[16:24]) for data in shown]  # a PNG's header
    assert [span[3:] for span in media] == [("png", *size) for size in sizes]
    expect_texts(engine.requests[-1], np.array(ids, np.int32))
    inside = np.zeros(len(ids), bool)
    for span in media:
        inside[span.offset : span.offset + span.length] = True
    assert np.array_equal(inside, np.array(ids) == engine.pad)
    [trajectory] = [each for each in ledger.trajectories() if each.turns[-1] == turn.index]
    assert [each.data for each in trajectory.images] == shown
    assert not trajectory.loss_mask[: len(ids)][inside].any()
    assert (trajectory.provenance[: len(ids)][inside] == Provenance.PROMPT).all()
    assert {image.data for image in ledger.images.values()} >= set(shown)
    assert len({image.data for image in ledger.images.values()}) == len(ledger.images)


def expect_texts(request: Any, read: Any) -> None:
    """A request has the text of its ids, and of the echo if the client knows what the server will read."""
    assert request.id_text.matches(request.input_ids)
    if request.images is not None:
        known = len(request.images.lengths) == len(request.images.images)
        assert (request.images.echo_text is not None) == known
        assert not known or request.images.echo_text.matches(read)


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_conversations_with_images_hold_the_laws(tmp_path: Path, data: st.DataObject) -> None:
    path = tmp_path / "rollouts.tito"
    path.unlink(missing_ok=True)
    spans = data.draw(st.booleans())
    engine = VisionEngine(support=ImageSupport(True), spans=spans, counts=not spans or data.draw(st.booleans()))

    async def play() -> None:
        with LedgerFile(path, "a") as file:
            model = (await policy_of(engine, store=file)).model(stream=data.draw(st.booleans()))
            messages: list[Any] = []
            for _ in range(data.draw(st.integers(1, 3))):
                messages.append({"role": "user", "content": data.draw(st.lists(BLOCKS, min_size=1, max_size=3))})
                if calls := data.draw(st.integers(0, 2)):
                    engine.answers.append(CALL.removesuffix("<|im_end|>") * (calls - 1) + CALL)
                await ask(model, messages)
                uses = [block["toolUse"]["toolUseId"] for block in messages[-1]["content"] if "toolUse" in block]
                expect_ledger(engine, model.ledger, messages)
                if uses:
                    results = [
                        {
                            "toolResult": {
                                "toolUseId": use,
                                "status": "success",
                                "content": data.draw(st.lists(BLOCKS, max_size=2)),
                            }
                        }
                        for use in uses
                    ]
                    messages.append({"role": "user", "content": results})
                    await ask(model, messages)
                    expect_ledger(engine, model.ledger, messages)
            await _expect_scores(engine, model.ledger)
        [loaded] = store.read(path)
        assert store.encode(loaded) == store.encode(model.ledger)
        assert list(loaded.images) == list(model.ledger.images)

    asyncio.run(play())


async def _expect_scores(engine: VisionEngine, ledger: Ledger) -> None:
    """Scoring the path with its stored images gives the recorded logprobs."""
    [trajectory] = ledger.trajectories()
    spans = [(span.offset, span.length) for span in trajectory.media]
    images = PromptImages(trajectory.images, engine.pad, tuple(length for _, length in spans)) if spans else None
    scores = await score(engine, collapsed(trajectory.token_ids, spans), images)
    sampled = trajectory.loss_mask == 1
    assert np.allclose(scores[sampled], trajectory.logprobs[sampled], atol=1e-6)
    assert np.isnan(scores[trajectory.token_ids == engine.pad]).all()


async def test_another_picture_of_equal_size_is_another_history() -> None:
    engine = VisionEngine()
    model = (await policy_of(engine)).model()
    first: list[Any] = [{"role": "user", "content": [image(PICTURES[0]), {"text": "What?"}]}]
    await ask(model, first)
    exchanged = [{"role": "user", "content": [image(PICTURES[1]), {"text": "What?"}]}, *first[1:]]
    for history in (first, exchanged):
        history.append({"role": "user", "content": [{"text": "And now?"}]})
        await ask(model, history)
    assert [turn.parent for turn in model.ledger] == [None, 0, None]
    assert model.ledger[2].draft.branch is not None
    assert engine.read[1][1] != engine.read[2][1]
    again = model.ledger[1].draft.logprobs, model.ledger[2].draft.logprobs
    assert again[0][0] != again[1][0]
    check_ledger(model.ledger)


async def test_a_picture_is_stored_once_and_sent_with_every_request() -> None:
    gc.collect()  # a ledger of an earlier test would share its equal bytes
    engine = VisionEngine()
    model = (await policy_of(engine)).model()
    messages: list[Any] = [{"role": "user", "content": [image(PICTURES[0]), {"text": "a"}, image(PICTURES[0])]}]
    await ask(model, messages)
    messages.append({"role": "user", "content": [{"text": "b"}, image(PICTURES[0])]})
    await ask(model, messages)
    [stored] = model.ledger.images.values()
    assert stored.data is PICTURES[0]
    assert [len(request.images.images) for request in engine.requests] == [2, 3]
    assert all(sent is stored for request in engine.requests for sent in request.images.images)
    assert engine.requests[1].images.lengths == (5, 5)


async def test_each_turn_of_a_path_with_images_asks_for_the_echo() -> None:
    engine = VisionEngine()
    model = (await policy_of(engine)).model(verify_echo="first")
    messages: list[Any] = []
    for content in ([{"text": "a"}], [{"text": "a"}], [image(PICTURES[0])], [{"text": "b"}]):
        messages.append({"role": "user", "content": content})
        await ask(model, messages)
    assert [request.echo for request in engine.requests] == [True, False, True, True]
    expect_ledger(engine, model.ledger, messages)


async def test_a_path_whose_picture_bytes_are_gone_is_not_continued() -> None:
    """Media of an unknown format load without bytes; the error of a new image names the missing ones."""
    engine = VisionEngine()
    policy = await policy_of(engine)
    model = policy.model()
    messages: list[Any] = [{"role": "user", "content": [image(PICTURES[0]), {"text": "a"}]}]
    await ask(model, messages)
    draft = model.ledger[0].draft
    [span] = draft.media
    bare = Ledger.load(model.ledger.header, [replace(draft, media=(MediaSpan(*span[:3]),))], ())
    messages.append({"role": "user", "content": [image(PICTURES[1])]})
    with pytest.raises(ImageError, match=f"no bytes of the image {span.sha256.hex()[:12]}.* Load the ledger"):
        await ask(policy.model(ledger=bare), messages)
    assert (len(bare), len(engine.requests)) == (1, 1)


@pytest.mark.parametrize("pad", ["<|image_pad|>", "<|video_pad|>"])
async def test_a_sampled_placeholder_is_recorded_and_ends_images(pad: str) -> None:
    engine = VisionEngine(answers=[f"a{pad}b<|im_end|>"])
    model = (await policy_of(engine)).model()
    messages: list[Any] = [{"role": "user", "content": [{"text": "a"}]}]
    await ask(model, messages)
    [call] = model.ledger[0].draft.calls
    assert (call.name, call.status, call.start, call.stop) == (None, "suspect", 1, 2)
    messages.append({"role": "user", "content": [{"text": "b"}]})
    await ask(model, messages)  # a path of text goes on
    messages.append({"role": "user", "content": [image(PICTURES[0])]})
    with pytest.raises(ValueError, match="the policy sampled a media placeholder"):
        await ask(model, messages)
    assert (len(model.ledger), len(engine.requests), len(model.ledger.images)) == (2, 2, 0)


async def test_texts_of_a_path_are_those_of_its_ids_or_the_turn_is_refused() -> None:
    engine = VisionEngine()
    policy = await policy_of(engine)
    model = policy.model()
    messages: list[Any] = [{"role": "user", "content": [image(PICTURES[0]), {"text": "a"}]}]
    await ask(model, messages)
    [turn], [request] = model.ledger, engine.requests
    prompt, output = Prompt(request.input_ids, request.id_text, request.images), turn.draft.output_ids
    texts = prompt.checked_path(policy._prompts, Ledger(), turn.draft, output)
    assert texts[0].matches(turn.draft.columns.ids)
    assert texts[1] is not None
    assert texts[1].matches(np.concatenate([request.input_ids, output]))
    for images in (request.images, None):
        prompt = Prompt(request.input_ids, request.id_text, images)
        with pytest.raises(LawViolationError) as caught:
            prompt.checked_path(policy._prompts, Ledger(), turn.draft, output[:-1])
        assert caught.value.law == 4


@given(st.lists(st.integers(0, 3), max_size=9), st.sets(st.integers(0, 3)))
def test_each_sampled_placeholder_is_a_suspect(ids: list[int], media_ids: set[int]) -> None:
    found = sampled_placeholders(np.array(ids, np.int32), tuple(media_ids))
    places = [at for at, token in enumerate(ids) if token in media_ids]
    assert [(call.name, call.status, call.start, call.stop) for call in found] == [
        (None, "suspect", at, at + 1) for at in places
    ]
