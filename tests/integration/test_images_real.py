"""Images on real servers: both read the same prompts, scores confirm every token, and no text becomes an image."""

from __future__ import annotations

import asyncio
import json
import re
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
from rich.console import Console
from typer.testing import CliRunner

import tito_engines as engines
from integration.test_weights_real import other_weights
from strands_tito import cli
from strands_tito.collect import collected
from strands_tito.inspect.verify import rescore
from support.collect_command import HERE
from support.keeping import ENGINES, ONCE, Keeper
from support.picture_attacks import attacked
from support.real import Served
from support.scripted import tokenizer
from tito_conformance import suite
from tito_conformance.checks import Profile
from tito_conformance.target import Target
from tito_conformance.testing.pictures import picture
from tito_core.backend.generate import score
from tito_core.backend.images import PromptImages, collapsed
from tito_core.chat.images import ImageError
from tito_core.ledger import Image, Ledger
from tito_core.model import TITOModel
from tito_engines import install, models

pytestmark = pytest.mark.engine
MODEL = "qwen3-vl-tiny"
PAD = 151655
TOLERANCE = 1e-4
"""For float32 on a CPU, in nats."""
ATTACKS_A_TURN = 4
ADDED = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
    "required": ["a", "b"],
}
WORD = {
    "type": "object",
    "properties": {"word": {"type": "string", "enum": ["tree", "house"]}, "exact": {"type": "boolean"}},
    "required": ["word"],
}
TOOLS: Any = [
    {"name": "add", "description": "Add two numbers.", "inputSchema": {"json": ADDED}},
    {"name": "look_up", "description": "Look a word up; kinds are <noun> and [verb].", "inputSchema": {"json": WORD}},
]
GREEDY = Path(__file__).with_name("images_greedy.json")
"""`columns` of `converse` with temperature 0, as transformers 5.19 computes them in float32, without a cache.

The first and second choice are at least 0.0016 nats apart."""


@pytest.fixture(params=ENGINES)
def seeing(request: pytest.FixtureRequest, keeper: Keeper) -> Served:
    """A server with random weights that reads images."""
    return keeper.served(request.param, MODEL)


def shown(*seeds: int, text: str = "What is this?", sides: tuple[int, int] = (64, 64)) -> Any:
    images = [{"image": {"format": "png", "source": {"bytes": picture(seed, *sides)}}} for seed in seeds]
    return {"role": "user", "content": [*images, {"text": text}]}


async def answered(model: TITOModel, messages: list[Any], **options: Any) -> None:
    """Run a turn, and append a message with the text of the answer."""
    text = ""
    async for event in model.stream(messages, TOOLS, "Be brief.", **options):
        text += event.get("contentBlockDelta", {}).get("delta", {}).get("text", "")
    messages.append({"role": "assistant", "content": [{"text": text or "?"}]})


async def converse(served: Served, *, stream: bool = False, **sampling: Any) -> Ledger:
    """Three turns: a picture, two of other sizes, then text alone."""
    sampling = {"max_new_tokens": 16, "ignore_eos": True, **sampling}
    model = served.policy.model(sampling=sampling, stream=stream, ledger=Ledger("00000000-0000-4000-8000-000000000000"))
    messages: list[Any] = []
    turns = (shown(1), shown(2, 3, sides=(96, 160)), {"role": "user", "content": [{"text": "Compare them."}]})
    for message in turns:
        messages.append(message)
        await answered(model, messages)
    return model.ledger


@pytest.mark.parametrize("stream", [False, True])
async def test_the_engine_confirms_every_token_behind_pictures(seeing: Served, stream: bool) -> None:
    ledger = await converse(seeing, stream=stream, temperature=1.0)
    assert [turn.parent for turn in ledger] == [None, 0, 1]
    [trajectory] = ledger.trajectories()
    assert [span.length for span in trajectory.media] == [4, 15, 15]
    result = await rescore(ledger, seeing.policy.backend)
    assert (len(result.differences), result.not_comparable) == (48, 0)
    assert result.quantile(1.0) <= TOLERANCE


async def test_an_exchanged_picture_of_equal_size_is_noticed(seeing: Served) -> None:
    ledger = await converse(seeing, temperature=0.0)
    [path] = ledger.trajectories()
    spans = [(span.offset, span.length) for span in path.media]
    lengths = tuple(length for _, length in spans)
    sampled = path.loss_mask == 1

    async def apart(images: tuple[Image, ...]) -> Any:
        prompt = PromptImages(images, PAD, lengths)
        scores = await score(seeing.policy.backend, collapsed(path.token_ids, spans), prompt)
        return np.abs(scores - path.logprobs)[sampled]

    one, two, three = path.images
    assert (await apart((one, two, three))).max() <= TOLERANCE
    other = replace(one, data=picture(9, one.width, one.height))
    exchanged = await apart((other, two, three))
    assert np.median(exchanged) > 100 * TOLERANCE
    swapped = await apart((one, three, two))
    first_turn = ledger[0].draft.columns.output
    assert swapped[:first_turn].max() <= TOLERANCE  # those before the exchanged pictures
    assert np.median(swapped[first_turn:]) > 100 * TOLERANCE


def columns(ledger: Ledger) -> list[dict[str, Any]]:
    """Return what `GREEDY` holds of each turn."""
    return [
        {
            "prompt": turn.draft.prompt_ids.tolist(),
            "spans": [[span.offset, span.length] for span in turn.draft.media],
            "output": turn.draft.output_ids.tolist(),
            "logprobs": turn.draft.logprobs.tolist(),
        }
        for turn in ledger
    ]


async def test_both_engines_read_the_same_prompts_and_sample_the_same_tokens(seeing: Served) -> None:
    """Each is compared with transformers, so that no test has to start both."""
    found = columns(await converse(seeing, temperature=0.0))
    expected = json.loads(GREEDY.read_text(encoding="utf-8"))
    apart = [
        np.subtract(one.pop("logprobs"), other.pop("logprobs")) for one, other in zip(found, expected, strict=True)
    ]
    assert found == expected
    assert np.abs(np.concatenate(apart)).max() <= TOLERANCE


@pytest.mark.parametrize("seeing", ONCE, indirect=True)
@pytest.mark.parametrize("attacks", [100, pytest.param(300, marks=pytest.mark.long)])
async def test_no_text_becomes_an_image(seeing: Served, attacks: int) -> None:
    """What the server echoed holds placeholders for the pictures alone."""
    slots = asyncio.Semaphore(8)

    async def attack(number: int) -> None:
        random = Random(number)
        images = random.randrange(3)
        blocks = attacked(random, ATTACKS_A_TURN, images)
        async with slots:
            model = seeing.policy.model(sampling={"max_new_tokens": 1})
            async for _ in model.stream([{"role": "user", "content": blocks}]):
                pass
        [turn] = model.ledger
        assert len(turn.draft.media) == images, blocks
        inside = [at for span in turn.draft.media for at in range(span.offset, span.offset + span.length)]
        assert np.flatnonzero(turn.draft.prompt_ids == PAD).tolist() == inside, blocks

    await asyncio.gather(*map(attack, range(attacks // ATTACKS_A_TURN)))


@pytest.mark.parametrize("seeing", ONCE, indirect=True)
async def test_a_bias_moves_the_placeholder_and_a_path_that_sampled_it_takes_no_image(seeing: Served) -> None:
    """The ban of docs/images.md, and its opposite, which shows that the server obeys the bias for this token."""
    media = seeing.policy.template.certificate.media_ids
    assert PAD in media
    for bias, strays in ((dict.fromkeys(media, -100), 0), ({PAD: 10}, 8)):
        extra = {"logit_bias": {str(token): value for token, value in bias.items()}}
        sampling: Any = {"max_new_tokens": 8, "temperature": 0.0, "ignore_eos": True, "extra": extra}
        model = seeing.policy.model(sampling=sampling)
        messages: list[Any] = [shown(1)]
        await answered(model, messages)
        [turn] = model.ledger
        assert np.count_nonzero(turn.draft.output_ids == PAD) == strays
        assert turn.draft.engine.semantics.adjusted is (seeing.kind == "sglang")
        assert [call.status for call in turn.draft.calls] == ["suspect"] * strays
        result = await rescore(model.ledger, seeing.policy.backend)
        compared = 8 if seeing.kind == "vllm" and not strays else 0
        assert (len(result.differences), result.not_comparable) == (compared, 8 - compared)
        if not strays:
            continue
        text = messages[-1]["content"][0]["text"]
        messages[-1]["content"] = [{"text": "[blank text]" if text == "?" else text}]  # as Strands writes it
        messages.append(shown(2))
        with pytest.raises(ImageError, match="the policy sampled a media placeholder"):
            await answered(model, messages)
        assert len(model.ledger) == 1


@pytest.mark.parametrize("seeing", ONCE, indirect=True)
def test_pictures_are_collected_and_the_engine_confirms_them(
    seeing: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(HERE)
    monkeypatch.setattr(cli, "console", Console(width=200))
    tokenizer(MODEL).save_pretrained(tmp_path / "tokenizer")
    tasks, out = tmp_path / "tasks.jsonl", tmp_path / "out"
    url = ("--backend", seeing.kind, "--base-url", seeing.url)
    argv = ["collect", str(tasks), *url, "--tokenizer", str(tmp_path / "tokenizer"), "--out", str(out)]
    argv += ["-n", "2", "--agent", "collect_agents:looking", "--sampling", "max_new_tokens=16"]
    for lines in (2, 4):  # the second run resumes the first
        tasks.write_text("".join(json.dumps({"prompt": "?", "number": number}) + "\n" for number in range(lines)))
        ran = CliRunner().invoke(cli.app, argv)
        assert ran.exit_code == 0, ran.output
    ledgers = list(collected(out))
    assert len(ledgers) == 8
    for ledger in ledgers:
        number = int(str(ledger.header.task_id).removeprefix("line-")) - 1
        assert [image.data for image in ledger.trajectories()[0].images] == [picture(number)]
    verified = CliRunner().invoke(cli.app, ["verify", str(out / "rollouts-00001.tito"), *url])
    assert verified.exit_code == 0, verified.output
    assert "hold on 8 ledgers" in verified.output
    assert f"re-scored   {sum(len(turn.draft.output_ids) for ledger in ledgers for turn in ledger)} sampled" in (
        verified.output
    )
    most = re.search(r"max (\S+) nats", verified.output)
    assert most is not None, verified.output
    assert float(most[1]) <= TOLERANCE


def target(served: Served, **options: Any) -> Target:
    return Target(served.kind, served.url, tokenizer(MODEL), tolerance_nats=TOLERANCE, **options)


@pytest.mark.long
def test_the_suite_draws_images_and_every_law_holds(seeing: Served) -> None:
    outcome = suite.run(target(seeing), Profile("pictures", 8, 6, 1))
    assert outcome.sound, (str(outcome.broken), outcome.error, outcome.moves)
    passed = outcome.tally.passed
    assert passed["images"] > 10
    assert passed["looked"] == 7
    assert passed["rescored"] > 200


def updated(kind: str, folder: Path, environment: dict[str, str] | None = None) -> suite.Outcome:
    """Let the suite load other weights on a server that has read pictures."""
    spec = engines.find(kind)
    known = models.ensure(MODEL, install.ensure(spec).python)
    with engines.running_sync(
        spec if environment is None else replace(spec, env=lambda launch: {**spec.env(launch), **environment}),
        model=MODEL,
        dev_mode=True,
    ) as url:
        weights = str(other_weights(known, folder / "new"))
        seen = Target(kind, url, tokenizer(MODEL), tolerance_nats=TOLERANCE, weights=(weights,))
        return suite.run(seen, Profile("weights", 1, 2, 1))


@pytest.mark.long  # .ci/run updates weights on servers of text, and finds stale features on scripted ones
@pytest.mark.parametrize("kind", ENGINES)
def test_new_weights_read_pictures_that_were_seen_before(kind: str, tmp_path: Path) -> None:
    outcome = updated(kind, tmp_path)
    assert outcome.sound, (str(outcome.broken), outcome.error, outcome.moves)
    assert (outcome.tally.passed["looked"], outcome.tally.passed["fresh"]) == (7, 1)


@pytest.mark.long
def test_the_suite_finds_the_stale_features_of_a_default_sglang(tmp_path: Path) -> None:
    """Measured with 0.5.23: its cache of features outlives an update."""
    outcome = updated("sglang", tmp_path, {"SGLANG_VLM_CACHE_SIZE_MB": "100"})
    assert outcome.broken is not None, outcome.error
    assert outcome.broken.check.name == "fresh"


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_two_hundred_conversations_with_images_are_the_same_on_both(keeper: Keeper) -> None:
    vllm, sglang = (keeper.served(kind, MODEL) for kind in ENGINES)
    outcome = suite.run(target(vllm), Profile("two hundred", 200, 4, 1), against=target(sglang))
    assert outcome.sound, (str(outcome.broken), outcome.error, outcome.moves)
    passed = outcome.tally.passed
    print(f"{outcome.turns} turns, {passed['images']} with pictures, {outcome.tally.apart_nats:.2g} nats apart")
    print(f"{passed['greedy']} equal tokens; near-ties: {outcome.tally.notes}")
    assert outcome.conversations >= 200
    assert passed["images"] > 200
    assert outcome.tally.apart_nats <= TOLERANCE
