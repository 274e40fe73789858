"""Images that cannot be sent: one sentence that says how to go on, nothing sent, nothing committed."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from strands import Agent

from support.byte_level import CHATML_TOOLS
from support.vision import LIMIT, TEMPLATE, VIDEO_TEXT, VISION, VisionEngine, bound, image, png, policy_of, tokenizer
from tito_core import store
from tito_core.backend import BadRequestError
from tito_core.backend.errors import UnsupportedByServerError
from tito_core.backend.images import ImageSupport
from tito_core.chat.images import ImageError
from tito_core.chat.template import ChatTemplate
from tito_core.ledger import check_ledger
from tito_core.model import Policy
from tito_core.policy import bind
from tito_core.store import LedgerFile

GOOD, OTHER = image(png(8, 8, 1)), image(png(8, 8, 2))


ADVICE = re.compile(r"agent\.messages\S* = \{'text': '\.\.\.'\}")


def follow_advice(agent: Agent, error: BaseException) -> None:
    """Run the Python statement in an error message."""
    statement = ADVICE.search(str(error))
    assert statement is not None, str(error)
    exec(statement[0], {"agent": agent})  # as a user would type it


async def agent_of(engine: VisionEngine, template: str = TEMPLATE, **options: Any) -> tuple[Agent, Any]:
    model = (await policy_of(engine, template)).model(**options)
    return Agent(model=model, callback_handler=None), model


BAD: list[tuple[Any, str]] = [
    (image(b"GIF89a"), "broken|not a picture"),
    (image(png(8, 8, 1)[:70]), "broken picture"),
    (image(png(1, 300, 1)), "1 x 300"),
    (image(png(8, 8, 1), "heic"), "'heic'"),
    ({"image": {"format": "png", "source": {"location": {"type": "s3", "uri": "s3://a"}}}}, "'location'.*{'bytes'"),
    ({"image": {"format": "png", "source": {"bytes": b"a", "location": {"uri": "s3://a"}}}}, "'location'.*{'bytes'"),
    (image(bytearray(png(8, 8, 1))), r"'bytes' of type bytearray.*bytes\("),
    ({"document": {"format": "txt", "name": "a", "source": {"bytes": b"a"}}}, "'document'"),
    ({"video": {"format": "mp4", "source": {"bytes": b"a"}}}, "'video'"),
]


@pytest.mark.parametrize(("block", "words"), BAD)
@pytest.mark.parametrize("after", [False, True])
async def test_a_bad_block_is_refused_and_the_agent_goes_on(block: Any, words: str, after: bool) -> None:
    engine = VisionEngine()
    agent, model = await agent_of(engine)
    if after:
        await agent.invoke_async([GOOD, {"text": "What?"}])
    before, sent = store.encode(model.ledger), len(engine.requests)
    with pytest.raises(ValueError, match=words) as caught:
        await agent.invoke_async([{"text": "And this?"}, GOOD, block])
    assert (store.encode(model.ledger), len(engine.requests)) == (before, sent)
    if "type" not in words and "location" not in str(block):
        follow_advice(agent, caught.value)
        await agent.invoke_async()
        assert len(engine.requests[-1].images.images) == 1 + after
        check_ledger(model.ledger)


async def test_more_images_than_the_server_takes() -> None:
    engine = VisionEngine()
    agent, model = await agent_of(engine)
    await agent.invoke_async([GOOD] * LIMIT)
    with pytest.raises(BadRequestError, match=f"{LIMIT + 1} images.* at most {LIMIT}"):
        await agent.invoke_async([OTHER])
    assert (len(model.ledger), len(engine.requests), len(model.ledger.images)) == (1, 1, 1)


async def test_a_server_without_images_is_named_with_its_remedy() -> None:
    engine = VisionEngine(support=ImageSupport(remedy="Start it with --enable-pictures."))
    agent, model = await agent_of(engine)
    words = r"toy server takes no images\. Start it with --enable-pictures"
    with pytest.raises(UnsupportedByServerError, match=words) as caught:
        await agent.invoke_async([{"text": "a"}, GOOD])
    assert (len(model.ledger), engine.requests) == (0, [])
    follow_advice(agent, caught.value)
    await agent.invoke_async()
    assert len(model.ledger) == 1


RESULTS = "show(message.content) + '\n</tool_response>"
PLAIN_RESULTS = TEMPLATE.replace(RESULTS, RESULTS.removeprefix("show"))
TEXT: Any = {"text": "a"}


def history(question: Any, *result: Any, content: Any = None) -> list[Any]:
    """Return a question, a call and its result, or another message in the place of that."""
    use = {"toolUse": {"toolUseId": "call_1", "name": "look", "input": {}}}
    shown = {"toolResult": {"toolUseId": "call_1", "status": "success", "content": [*result]}}
    roles = ("user", "assistant", "user")
    return [{"role": r, "content": [b]} for r, b in zip(roles, (question, use, content or shown), strict=True)]


async def policy_with(template: str = TEMPLATE, **options: Any) -> Policy:
    engine = VisionEngine()
    engine.tokenizer = tokenizer(template)
    parts = bind(engine.tokenizer, **options) if options else bound(template)
    return Policy(engine, await engine.connect(), *parts)


async def refusal(policy: Any, messages: list[Any], words: str) -> str:
    """Return the error of a turn, which was not sent."""
    with pytest.raises(ImageError, match=words) as caught:
        async for _ in policy.model().stream(messages):
            pass
    assert policy.backend.requests == []
    return str(caught.value)


async def test_one_dict_is_checked_in_every_place() -> None:
    """A template that shows images to users only may get the same dict in a tool's result."""
    await refusal(await policy_with(PLAIN_RESULTS), history(GOOD, GOOD), r"tool results .law 7")


@pytest.mark.parametrize(("template", "words"), [(CHATML_TOOLS, "user messages"), (PLAIN_RESULTS, "tool results")])
async def test_a_template_without_images_is_named_with_its_reason(template: str, words: str) -> None:
    shown = history(TEXT, content=GOOD) if words == "user messages" else history(TEXT, TEXT, GOOD)
    await refusal(await policy_with(template), shown, f"shows no images in {words} \\(law 7\\)")


@pytest.mark.parametrize(
    ("refused", "reason"),
    [
        ((), ""),
        ((("user messages", "It hides them."), ("tool results", "Other.")), "It hides them."),
        ((("tool results", "It fails there."),), "It fails there."),
    ],
)
async def test_an_image_is_refused_with_its_place_and_the_reason_of_the_certificate(refused: Any, reason: str) -> None:
    policy = await policy_with()
    certificate = replace(policy.template.certificate, images=(), images_refused=refused)
    policy = replace(policy, template=replace(policy.template, certificate=certificate))
    error = await refusal(policy, [{"role": "user", "content": [TEXT, GOOD]}], r"user messages \(law 7\)")
    assert "messages[0]['content'][1]" in error
    assert reason in error
    assert "None" not in error


async def test_a_bad_image_in_a_result_is_named_with_its_place() -> None:
    error = await refusal(await policy_with(), history(TEXT, TEXT, image(b"GIF89a")), "'call_1'")
    assert "messages[2]['content'][0]['toolResult']['content'][1]" in error


@given(st.lists(st.sampled_from([*VISION, "<|image_", "pad|>", "<|", "\x00", "a"]), max_size=6).map("".join))
async def test_content_that_spells_a_placeholder_is_text(text: str) -> None:
    engine = VisionEngine()
    agent, model = await agent_of(engine)
    await agent.invoke_async([{"text": text}, GOOD, {"text": text}])
    [(ids, digests)] = engine.read
    assert (ids.count(engine.pad), len(digests)) == (5, 1)
    assert engine.tokenizer.decode(ids).count(VISION[0]) == 1 + 2 * text.count(VISION[0])
    check_ledger(model.ledger)


async def test_content_as_template_cannot_smuggle_an_image_in() -> None:
    """The opt-out lets content write control tokens; an image's place must still be the template's own."""
    policy = await policy_with(content_tokens="as-template")
    for spelled in (VISION[1], VIDEO_TEXT):
        shown: Any = [{"role": "user", "content": [{"text": spelled}, GOOD]}]
        await refusal(policy, shown, r"2 media placeholders for 1 images.* remove those that the messages")


async def test_a_placeholder_that_content_spelled_is_not_blamed_on_the_policy() -> None:
    policy: Any = await policy_with(content_tokens="as-template")
    agent = Agent(model=policy.model(), callback_handler=None)
    await agent.invoke_async([{"text": VISION[1]}])
    with pytest.raises(ImageError, match="a message's text spelled a media placeholder"):
        await agent.invoke_async([GOOD])
    assert len(policy.backend.requests) == 1


DUMMY = "{%- if messages|length == 1 and messages[0].content is string -%}{{- '<|video_pad|>' -}}{%- endif -%}"


@pytest.mark.parametrize("certified", [True, False])
async def test_a_placeholder_that_no_image_stands_for_is_not_sent(certified: bool, tmp_path: Path) -> None:
    """The ledger could not be loaded again. No probe for images shows what a template writes without them."""
    engine = VisionEngine()
    with LedgerFile(tmp_path / "r.tito", "a") as file:
        policy = await policy_of(engine, DUMMY + TEMPLATE, store=file)
        ledger = policy.ledger()
        if not certified:  # another policy continues the ledger of one that takes images
            bare = ChatTemplate.of(
                tokenizer(DUMMY + TEMPLATE.replace("<|vision_start|><|image_pad|><|vision_end|>", "")),
                certificates=tmp_path,
            )
            policy = replace(policy, template=bare)
        assert bool(policy.template.certificate.media_ids) == certified
        model = policy.model(ledger=ledger)
        with pytest.raises(ImageError, match="1 media placeholders for 0 images, so nothing was sent"):
            async for _ in model.stream([{"role": "user", "content": [{"text": "Hi."}]}]):
                pass
    assert (engine.requests, len(model.ledger)) == ([], 0)
