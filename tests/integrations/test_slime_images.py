"""slime's `generate` with pictures: one rollout that cannot be trained is marked, and the others go on."""

from __future__ import annotations

from typing import Any

import pytest
from strands import Agent

from strands_tito.export import SampledPlaceholderError, samples_of
from strands_tito.export.slime import fields_of
from strands_tito.integrations.slime_generate import PARTIAL, generate_with
from support.scripted import tokenizer
from support.seeing import NAME, PAD, seeing
from support.slime_facts import PARAMETERS, Recorded, arguments
from support.vision import image
from tito_conformance.testing import Completion, ScriptedRequest
from tito_conformance.testing.pictures import picture

END = tokenizer(NAME).eos_token_id
LOOK = {"role": "user", "content": [image(picture(1)), {"text": "What is this?"}]}


def says(*answers: list[int]) -> Any:
    """Answer each request with the next of these ids, then with the last."""
    left = list(answers)

    def script(request: ScriptedRequest) -> Completion:
        return Completion([*(left.pop(0) if len(left) > 1 else left[0]), END])

    return script


def processor(checkpoint: str) -> Any:
    def tensors(images: list[Any], return_tensors: str) -> dict[str, Any]:
        return {"pixel_values": [[0.0]] * len(images)}

    return tensors


def shown(model: Any, row: Any) -> Agent:
    """Return an agent that has a picture before it in its history."""
    return Agent(model=model, messages=[LOOK, {"role": "assistant", "content": [{"text": "!"}]}], callback_handler=None)


def plain(model: Any, row: Any) -> Agent:
    return Agent(model=model, callback_handler=None)


async def ran(make: Any, script: Any, *, evaluation: bool = False, sample: Any = None, **options: Any) -> Any:
    _, policy = seeing("sglang", script)
    args = arguments("http://nowhere:1", "unused", partial_rollout=options.get("partial", False))
    own = Recorded(index=3, prompt="What is this?") if sample is None else sample
    run = generate_with(make, policy=policy, branches=options.get("branches"))
    return own, await run(args, own, {**PARAMETERS}, evaluation=evaluation)


@pytest.fixture(autouse=True)
def _processor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("strands_tito.integrations.slime_generate._processor", processor)


@pytest.mark.parametrize("partial", [False, True])
@pytest.mark.parametrize("make", [shown, plain])
async def test_a_rollout_that_sampled_a_placeholder_is_aborted_with_the_reason(
    make: Any, partial: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Without pictures too: slime packs it with rollouts that have some, whose features it would take."""
    branches = "last" if partial else "list"
    _, done = await ran(make, says([1000, PAD, 1001]), partial=partial, branches=branches)
    (one,) = done if isinstance(done, list) else [done]
    assert one.status is Recorded.Status["ABORTED"]  # type: ignore[attr-defined]
    assert (one.tokens, one.response_length, one.loss_mask, one.rollout_log_probs) == ([0, 0], 1, [0], [0.0])
    assert (one.remove_sample, one.reward, one.multimodal_train_inputs) == (True, 0.0, None)
    assert f"sampled 1 more placeholders, of the tokens {PAD}" in one.metadata["tito"]["refused"]
    assert one.metadata["tito"]["rollout"] in caplog.text
    assert PARTIAL not in one.metadata
    _, (done,) = await ran(make, says([1000, 1001]), sample=one)
    assert done.status is Recorded.Status["COMPLETED"]  # type: ignore[attr-defined]
    assert sum(done.loss_mask) == 3
    assert (done.reward, done.remove_sample) == (None, False)
    assert "refused" not in done.metadata["tito"]
    assert (done.multimodal_train_inputs is None) is (make is plain)


async def test_only_the_trajectory_with_the_placeholder_is_left_out() -> None:
    """The history is edited after the first answer, so the rollout has two trajectories; the second is trained."""

    def make(model: Any, row: Any) -> Agent:
        class Twice(Agent):
            async def invoke_async(self, *arguments: Any, **options: Any) -> Any:
                await super().invoke_async("First?")
                self.messages[:] = self.messages[:2]
                return await super().invoke_async(*arguments, **options)

        return Twice(
            model=model, messages=[LOOK, {"role": "assistant", "content": [{"text": "!"}]}], callback_handler=None
        )

    _, done = await ran(make, says([1000, PAD], [1002, 1003]))
    names = [one.status.name for one in done]
    assert names == ["ABORTED", "COMPLETED"]
    assert [sum(one.loss_mask) for one in done] == [0, 3]
    assert {one.rollout_id for one in done} == {3}
    assert done[1].multimodal_train_inputs == {"pixel_values": [[0.0]]}


async def test_an_evaluation_needs_no_tensors_and_keeps_its_tokens() -> None:
    _, done = await ran(shown, says([1000, PAD, 1001]), evaluation=True)
    assert done.status is Recorded.Status["COMPLETED"]  # type: ignore[attr-defined]
    assert done.tokens[-4:] == [1000, PAD, 1001, END]
    assert done.multimodal_train_inputs is None


async def test_what_is_marked_is_an_error_for_who_calls_the_exporter() -> None:
    _, policy = seeing("sglang", says([PAD]))
    model = policy.model()
    await plain(model, None).invoke_async("Hello.")
    [sample] = samples_of(model.ledger)
    with pytest.raises(SampledPlaceholderError, match=rf"{model.ledger.uuid}.*{PAD}"):
        fields_of(sample, decode=str, temperature=1.0)
