"""Re-scoring: which recorded logprobs are compared with the engine's scores."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import Result

from strands_tito.inspect.show import rescored_line
from strands_tito.inspect.verify import merge, rescore
from support.scripted import BACKENDS, model_of, tokenizer
from support.typed import tito
from support.vision import PAD_TEXT, VisionEngine, image, png, policy_of
from tito_conformance.testing import HashPolicy, ScriptedEngine, scripted_server
from tito_core import TITOModel, store
from tito_core.ledger import LawViolationError, Ledger, VersionSpan


def policy() -> HashPolicy:
    return HashPolicy(len(tokenizer()), alphabet=range(40, 90), eos_ids=[int(tokenizer().eos_token_id)])


async def talk(model: TITOModel, questions: int = 2) -> list[int]:
    """Ask questions and name new weights after each; return the number of tokens of each answer."""
    engine: ScriptedEngine = model.scripted  # type: ignore[attr-defined]
    messages: list[Any] = []
    for number in range(questions):
        messages.append({"role": "user", "content": [{"text": f"Question {number}?"}]})
        text = ""
        async for event in model.stream(messages):
            text += event.get("contentBlockDelta", {}).get("delta", {}).get("text", "")
        messages.append({"role": "assistant", "content": [{"text": text}]})
        engine.state.set_version(f"step-{number}")
    return [turn.draft.columns.output for turn in model.ledger]


async def test_every_sampled_token_is_compared_once() -> None:
    model = model_of("vllm", policy(), sampling={"max_new_tokens": 12, "ignore_eos": True})
    counts = await talk(model)
    found = await rescore(model.ledger, model.policy.backend)
    assert (len(found.differences), found.not_comparable, len(found.prompt_differences)) == (sum(counts), 0, 0)
    assert found.quantile(1) < 1e-5


async def test_tokens_of_older_weights_are_not_compared() -> None:
    model = model_of("vllm", policy(), sampling={"max_new_tokens": 12, "ignore_eos": True})
    first, second = await talk(model)
    assert [turn.draft.engine.versions for turn in model.ledger] == [
        (VersionSpan(0, first, "default"),),
        (VersionSpan(0, second, "step-0"),),
    ]
    engine: ScriptedEngine = model.scripted  # type: ignore[attr-defined]
    for version, compared in (("default", first), ("step-0", second), ("step-1", 0)):
        before = len(engine.requests)
        found = await rescore(model.ledger, model.policy.backend, version=version)
        assert (len(found.differences), found.not_comparable) == (compared, first + second - compared)
        assert len(engine.requests) - before == bool(compared), "no request if nothing can be compared"


async def test_prompt_logprobs_are_compared_if_the_weights_are_the_same() -> None:
    model = model_of("sglang", policy(), sampling={"max_new_tokens": 6}, optional_outputs={"prompt_logprobs": True})
    await talk(model)
    found = await rescore(model.ledger, model.policy.backend)
    prompts = sum(turn.draft.columns.prompt for turn in model.ledger) - 1
    assert len(found.prompt_differences) == prompts, "all but the first token of the path"
    assert np.max(found.prompt_differences) < 1e-5
    assert len(merge([found, found]).prompt_differences) == 2 * prompts
    assert not len((await rescore(model.ledger, model.policy.backend, version="step-1")).prompt_differences)


async def test_wrong_prompt_logprobs_show() -> None:
    model = model_of("sglang", policy(), sampling={"max_new_tokens": 6}, optional_outputs={"prompt_logprobs": True})
    await talk(model, 1)
    column = model.ledger[0].draft.extras["prompt_logprobs"]
    off = type(column).of(column.start, np.roll(column.values, 1))
    model.ledger[0].draft.extras["prompt_logprobs"] = off  # type: ignore[index]
    found = await rescore(model.ledger, model.policy.backend)
    assert np.max(found.prompt_differences) > 0.5
    assert found.quantile(1) < 1e-5


@pytest.mark.parametrize("stray", [True, False])
async def test_a_path_on_which_a_placeholder_was_sampled_is_not_compared(stray: bool) -> None:
    """The server would put the images elsewhere; the other paths are compared."""
    engine = VisionEngine()
    looks: list[Any] = [{"role": "user", "content": [image(png(8, 8, 1)), {"text": "?"}]}]
    model = (await policy_of(engine)).model()
    engine.answers = [f"a{PAD_TEXT if stray else 'b'}<|im_end|>", "cd<|im_end|>"]
    for messages in (looks, [{"role": "user", "content": [{"text": "Hi"}]}]):
        async for _ in model.stream(messages):
            pass
    first, second = (turn.draft.columns.output for turn in model.ledger)
    found = await rescore(model.ledger, engine)
    assert (len(found.differences), found.not_comparable) == ((second, first) if stray else (first + second, 0))
    assert found.quantile(1) < 1e-5
    with pytest.raises(LawViolationError, match="stores no image"):
        Ledger.load(model.ledger.header, [turn.draft for turn in model.ledger], ())


def rolled_out(kind: str, url: str, **sampling: float) -> Ledger:
    sampling = {"max_new_tokens": 4, **sampling}
    model = TITOModel(backend=kind, base_url=url, tokenizer=tokenizer(), sampling=sampling)

    async def turn() -> None:
        async for _ in model.stream([{"role": "user", "content": [{"text": "Hello?"}]}]):
            pass

    asyncio.run(turn())
    return model.ledger


def verified(path: Path, *more: str) -> Result:
    return tito("verify", path, *more)


def test_a_file_is_scored_by_the_backend_of_its_rollouts_or_the_given_one(tmp_path: Path) -> None:
    path, both = tmp_path / "rollouts.tito", tmp_path / "both.tito"
    for kind in BACKENDS:
        settings = {"vocab_size": len(tokenizer()), "eos_ids": [tokenizer().eos_token_id]}
        with scripted_server(kind, policy(), **settings) as server:
            path.unlink(missing_ok=True)
            store.append(path, [rolled_out(kind, server.base_url)])
            store.append(both, store.read(path))
            assert verified(path, "--base-url", server.base_url).exit_code == 0
            mixed = verified(both, "--base-url", server.base_url)
            assert mixed.exit_code == (2 if kind == BACKENDS[-1] else 0)
            named = verified(both, "--base-url", server.base_url, "--backend", kind)
            assert named.exit_code == 0, named.output
    assert all(kind in mixed.output.partition("Usage")[2] for kind in BACKENDS)


def test_a_rollout_of_which_nothing_can_be_compared_says_why(tmp_path: Path) -> None:
    path, settings = tmp_path / "rollouts.tito", {"vocab_size": len(tokenizer()), "eos_ids": [tokenizer().eos_token_id]}
    with scripted_server("sglang", policy(), **settings) as server:
        store.append(path, [made := rolled_out("sglang", server.base_url, temperature=0.7)])
        printed = verified(path, "--base-url", server.base_url)
    sampled = sum(len(turn.draft.output_ids) for turn in made)
    assert printed.exit_code == 0
    assert f"nothing was compared, because none of {sampled} sampled tokens is comparable" in printed.output
    assert "temperature" in printed.output
    assert "nan" not in printed.output
    assert rescored_line(merge([])).endswith("nothing was compared, because the rollouts hold no sampled tokens")
