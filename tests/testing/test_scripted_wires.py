"""Both wires transfer one script unchanged: ids, logprobs, stops, lengths, scores, streams and versions."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, Literal

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tito_conformance.testing import Completion, HashPolicy, Replay, ScriptedEngine, from_function, scripted_engine

pytestmark = pytest.mark.suite

Kind = Literal["vllm", "sglang"]
KINDS: tuple[Kind, ...] = ("vllm", "sglang")
FEW = settings(max_examples=25)
VOCAB, EOS = 500, (2, 3)
token_ids = st.integers(0, VOCAB - 1)
prompts = st.lists(token_ids, min_size=1, max_size=60)
outputs = st.lists(st.integers(4, VOCAB - 1), max_size=20)


class WireAnswer:
    """A response of either wire, read with `json` alone."""

    def __init__(self, kind: Kind, content: bytes) -> None:
        value = json.loads(content)
        if kind == "vllm":
            choice = value["choices"][0]
            self.prompt, self.ids = choice["prompt_token_ids"], choice["token_ids"]
            self.logprobs = choice["logprobs"]["token_logprobs"]
            self.finish, self.stop, self.text = choice["finish_reason"], choice["stop_reason"], choice["text"]
            self.prompt_tokens, self.completion_tokens = (
                value["usage"][f"{w}_tokens"] for w in ("prompt", "completion")
            )
            self.cached = value["usage"]["prompt_tokens_details"]["cached_tokens"]
        else:
            meta = value["meta_info"]
            self.prompt, self.ids = value["prompt_token_ids"], value["output_ids"]
            self.logprobs = [entry[0] for entry in meta["output_token_logprobs"]]
            assert [entry[1] for entry in meta["output_token_logprobs"]] == self.ids
            self.finish, self.stop = meta["finish_reason"]["type"], meta["finish_reason"].get("matched")
            self.text, self.cached = value["text"], meta["cached_tokens"]
            self.prompt_tokens, self.completion_tokens = meta["prompt_tokens"], meta["completion_tokens"]


def body(kind: Kind, prompt: Sequence[int], limit: int, **sampling: Any) -> dict[str, Any]:
    """Return the same request for each wire. `sampling` are fields that have the same name on both."""
    if kind == "vllm":
        outputs = {"logprobs": 0, "return_token_ids": True, "max_tokens": limit}
        return {"model": "scripted", "prompt": list(prompt), **outputs, **sampling}
    params = {"max_new_tokens": limit, **sampling}
    outputs = {"return_logprob": True, "return_prompt_token_ids": True}
    return {"input_ids": list(prompt), "sampling_params": params, **outputs}


async def send(engine: ScriptedEngine, fields: dict[str, Any]) -> bytes:
    path = "/v1/completions" if engine.wire.name == "vllm" else "/generate"
    response = await engine.handle("POST", path, {}, json.dumps(fields).encode())
    assert response.status == 200, response.content
    return response.content


async def generate(engine: ScriptedEngine, prompt: Sequence[int], limit: int = 64, **sampling: Any) -> WireAnswer:
    kind = engine.wire.name
    assert kind in KINDS
    return WireAnswer(kind, await send(engine, body(kind, prompt, limit, **sampling)))


async def score(engine: ScriptedEngine, ids: Sequence[int]) -> list[float]:
    """Return teacher-forced logprobs of `ids[1:]`, requested as a client of each wire does."""
    if engine.wire.name == "vllm":
        fields = {"model": "scripted", "prompt": list(ids), "max_tokens": 1, "prompt_logprobs": 0}
        found = json.loads(await send(engine, fields))["choices"][0]["prompt_logprobs"]
        assert found[0] is None
        assert [next(iter(entry)) for entry in found[1:]] == [str(i) for i in ids[1:]]
        return [next(iter(entry.values()))["logprob"] for entry in found[1:]]
    fields = {"input_ids": list(ids), "sampling_params": {"max_new_tokens": 0}, "return_logprob": True}
    found = json.loads(await send(engine, {**fields, "logprob_start_len": 0}))["meta_info"]["input_token_logprobs"]
    assert [entry[1] for entry in found] == [token if token < VOCAB - 1 else 0 for token in ids], "as SGLang 0.5.23"
    assert found[0][0] is None
    return [entry[0] for entry in found[1:]]


def made(kind: Kind, script: Any, **settings: Any) -> ScriptedEngine:
    return scripted_engine(kind, script, vocab_size=VOCAB, eos_ids=EOS, **settings)


@pytest.mark.parametrize("kind", KINDS)
@FEW
@given(prompts, outputs, st.sampled_from(EOS))
async def test_ids_pass_unchanged(kind: Kind, prompt: list[int], output: list[int], eos: int) -> None:
    engine = made(kind, Replay([[*output, eos]]))
    answer = await generate(engine, prompt)
    assert answer.prompt == prompt
    assert list(engine.requests[0].prompt_ids) == prompt
    assert answer.ids == [*output, eos]
    assert (answer.finish, len(answer.logprobs)) == ("stop", len(answer.ids))
    assert answer.stop == (None if kind == "vllm" and eos == EOS[0] else eos)
    assert answer.text == "".join(f"<{i}>" for i in output)
    assert (answer.prompt_tokens, answer.completion_tokens) == (len(prompt), len(answer.ids))


@FEW
@given(prompts, st.integers(0, 2**31), st.sampled_from([0.0, 1.0]), st.integers(1, 40))
@example([VOCAB - 1, 0], 0, 0.0, 1).via("SGLang reports the vocabulary's last id as 0")
async def test_both_wires_return_and_score_the_same_tokens(
    prompt: list[int], seed: int, temperature: float, limit: int
) -> None:
    answers, scores = [], []
    for kind, seed_name in zip(KINDS, ("seed", "sampling_seed"), strict=True):
        engine = made(kind, HashPolicy(VOCAB, eos_ids=EOS))
        answer = await generate(engine, prompt, limit, temperature=temperature, **{seed_name: seed})
        answers.append((answer.ids, answer.logprobs, answer.finish))
        scores.append(await score(engine, [*prompt, *answer.ids]))
        assert scores[-1][len(prompt) - 1 :] == answer.logprobs
    assert answers[0] == answers[1]
    assert scores[0] == scores[1]


@FEW
@given(prompts, outputs.filter(bool))
async def test_derived_logprobs_are_the_same_everywhere(prompt: list[int], output: list[int]) -> None:
    logprobs = []
    for kind in KINDS:
        engine = made(kind, Replay([Completion(output, finish="stop")]))
        answer = await generate(engine, prompt)
        assert all(-8 <= value < 0 for value in answer.logprobs)
        assert (await score(engine, [*prompt, *output]))[len(prompt) - 1 :] == answer.logprobs
        logprobs.append(answer.logprobs)
    assert logprobs[0] == logprobs[1]


@pytest.mark.parametrize("kind", KINDS)
class TestEndings:
    async def test_cut_after_the_first_stop_id(self, kind: Kind) -> None:
        engine = made(kind, Replay([[5, 6, 2, 7, 8]]))
        answer = await generate(engine, [1])
        assert (answer.ids, answer.finish) == ([5, 6, 2], "stop")

    async def test_the_requests_own_stop_id(self, kind: Kind) -> None:
        engine = made(kind, Replay([[5, 6, 7, 2]]))
        answer = await generate(engine, [1], stop_token_ids=[6])
        assert (answer.ids, answer.finish, answer.stop) == ([5, 6], "stop", 6)

    async def test_eos_ignored(self, kind: Kind) -> None:
        engine = made(kind, Replay([[5, 2, 6, 2]]))
        answer = await generate(engine, [1], 3, ignore_eos=True)
        assert (answer.ids, answer.finish) == ([5, 2, 6], "length")

    async def test_length(self, kind: Kind) -> None:
        engine = made(kind, Replay([[5, 6, 7, 8, 2]]))
        answer = await generate(engine, [1], 3)
        assert (answer.ids, answer.finish, answer.stop) == ([5, 6, 7], "length", None)

    async def test_a_stop_string_keeps_the_ids_and_cuts_the_text(self, kind: Kind) -> None:
        engine = made(kind, Replay([[5, 60, 61, 7, 2]]))
        answer = await generate(engine, [1], stop=["0><6"])
        assert (answer.ids, answer.finish, answer.stop) == ([5, 60, 61], "stop", "0><6")
        assert answer.text == "<5><6"

    async def test_a_script_without_an_end_is_a_400(self, kind: Kind) -> None:
        engine = made(kind, Replay([[5, 6]]))
        path = "/v1/completions" if kind == "vllm" else "/generate"
        response = await engine.handle("POST", path, {}, json.dumps(body(kind, [1], 9)).encode())
        assert response.status == 400
        message = response.content.decode()
        assert all(value in message for value in ("stop id", "[2, 3]", "max_new_tokens=9")), message

    async def test_an_exhausted_replay_and_an_unknown_id_are_400s(self, kind: Kind) -> None:
        engine = made(kind, Replay([[VOCAB, 2]]))
        path = "/v1/completions" if kind == "vllm" else "/generate"
        for message in ("outside the vocabulary of 500", "All 1 answers of Replay are used up at request 1"):
            response = await engine.handle("POST", path, {}, json.dumps(body(kind, [1], 9)).encode())
            assert response.status == 400
            assert message in response.content.decode()


@pytest.mark.parametrize("kind", KINDS)
async def test_replay_by_prompt_repeats_itself_and_scores_use_no_answer(kind: Kind) -> None:
    script = Replay([[5, 2], [6, 2]], by="prompt")
    engine = made(kind, script)
    assert (await generate(engine, [1, 1])).ids == [5, 2]
    assert (await generate(engine, [1, 1])).ids == [5, 2]
    await score(engine, [1, 2, 3])
    assert script.remaining == 1
    assert (await generate(engine, [1, 2])).ids == [6, 2]


@pytest.mark.parametrize("kind", KINDS)
async def test_scoring_returns_the_logprobs_of_a_completion(kind: Kind) -> None:
    engine = made(kind, Replay([Completion([5, 6, 2], [-0.5, -0.25, -0.125])]))
    assert (await generate(engine, [1, 9])).logprobs == [-0.5, -0.25, -0.125]
    assert (await score(engine, [1, 9, 5, 6, 2]))[1:] == [-0.5, -0.25, -0.125]


@pytest.mark.parametrize("kind", KINDS)
async def test_from_function(kind: Kind) -> None:
    engine = made(kind, from_function(lambda prompt: [*reversed(prompt), 2]))
    assert (await generate(engine, [7, 8, 9])).ids == [9, 8, 7, 2]


@pytest.mark.parametrize("kind", KINDS)
async def test_the_prefix_cache_counts_as_the_servers_do(kind: Kind) -> None:
    engine = made(kind, from_function(lambda prompt: [5, 2]))
    prompt = list(range(4, 104))
    cached = [(await generate(engine, ids)).cached for ids in (prompt, prompt, [*prompt, 5, 9], [4, 5, 6, 400])]
    assert cached == ([0, 96, 96, 0] if kind == "vllm" else [0, 99, 101, 3])


async def test_n_samples_differ_and_are_numbered() -> None:
    engine = made("sglang", HashPolicy(VOCAB, eos_ids=EOS))
    found = json.loads(await send(engine, body("sglang", [1, 2], 30, n=3)))
    assert len({tuple(one["output_ids"]) for one in found}) == 3
    assert [request.number for request in engine.requests] == [0, 1, 2]


@FEW
@given(prompts, st.integers(0, 100))
@pytest.mark.parametrize("kind", KINDS)
async def test_a_stream_adds_up_to_the_whole(kind: Kind, prompt: list[int], seed: int) -> None:
    name = "seed" if kind == "vllm" else "sampling_seed"
    engine = made(kind, HashPolicy(VOCAB, eos_ids=EOS))
    whole = await generate(engine, prompt, 20, **{name: seed})
    fields = {**body(kind, prompt, 20, **{name: seed}), "stream": True}
    raw = await send(engine, fields)
    assert raw.endswith(b"data: [DONE]\n\n")
    events = [json.loads(part.removeprefix(b"data: ")) for part in raw.split(b"\n\n")[:-2]]
    if kind == "sglang":
        last = events[-1]
        assert (last["output_ids"], last["text"]) == (whole.ids, whole.text)
        assert [entry[0] for entry in last["meta_info"]["output_token_logprobs"]] == whole.logprobs
        assert [len(event["output_ids"]) for event in events] == list(range(1, len(whole.ids) + 1))
        return
    choices = [event["choices"][0] for event in events]
    assert [i for choice in choices for i in choice["token_ids"]] == whole.ids
    assert [v for choice in choices for v in choice["logprobs"]["token_logprobs"]] == whole.logprobs
    assert "".join(choice["text"] for choice in choices) == whole.text
    assert [choice["prompt_token_ids"] for choice in choices] == [prompt] + [None] * (len(choices) - 1)
    assert [choice["finish_reason"] for choice in choices] == [None] * (len(choices) - 1) + [whole.finish]


async def test_generate_returns_the_same_as_completions() -> None:
    engine = made("vllm", HashPolicy(VOCAB, eos_ids=EOS))
    whole = await generate(engine, [1, 2, 3], 20, seed=4)
    params = {"max_tokens": 20, "seed": 4, "logprobs": 2}
    for stream in (False, True):
        fields = {"token_ids": [1, 2, 3], "sampling_params": params, "return_token_ids": True, "stream": stream}
        response = await engine.handle("POST", "/inference/v1/generate", {}, json.dumps(fields).encode())
        parts = response.content.split(b"\n\n")[:-2] if stream else [response.content]
        values = [json.loads(part.removeprefix(b"data: ")) for part in parts]
        assert values[0]["prompt_token_ids"] == [1, 2, 3]
        choices = [value["choices"][0] for value in values]
        assert [i for choice in choices for i in choice["token_ids"]] == whole.ids
        content = [entry for choice in choices for entry in choice["logprobs"]["content"]]
        assert [entry["logprob"] for entry in content] == whole.logprobs
        assert all(len(entry["top_logprobs"]) == 2 for entry in content)
        assert choices[-1]["weight_versions"] == [{"version": "default", "start": 0, "end": len(whole.ids)}]


async def test_sglang_reports_logprobs_at_the_temperature_and_vllm_raw() -> None:
    reported = {}
    for kind, name in zip(KINDS, ("seed", "sampling_seed"), strict=True):
        engine = made(kind, HashPolicy(VOCAB, eos_ids=EOS))
        answer = await generate(engine, [4, 5], 20, temperature=2.0, **{name: 8})
        rescored = (await score(engine, [4, 5, *answer.ids]))[1:]
        reported[kind] = answer.ids
        assert (rescored == answer.logprobs) is (kind == "vllm")
    assert reported["vllm"] == reported["sglang"]


@pytest.mark.parametrize("kind", KINDS)
async def test_top_logprobs_hold_the_chosen_token(kind: Kind) -> None:
    engine = made(kind, HashPolicy(VOCAB, eos_ids=EOS))
    if kind == "vllm":
        value = json.loads(await send(engine, {**body(kind, [1, 2], 9), "logprobs": 3}))
        table = value["choices"][0]["logprobs"]
        for token, logprob, top in zip(*(table[k] for k in ("tokens", "token_logprobs", "top_logprobs")), strict=True):
            assert top[token] == logprob
            assert len(top) in (3, 4)
    else:
        meta = json.loads(await send(engine, {**body(kind, [1, 2], 9), "top_logprobs_num": 3}))["meta_info"]
        for (logprob, token, _), top in zip(meta["output_token_logprobs"], meta["output_top_logprobs"], strict=True):
            assert len(top) == 3
            assert [logprob, token, None] in top or logprob <= top[-1][0]


async def test_engines_started_in_another_logprob_mode() -> None:
    for kind, name in zip(KINDS, ("seed", "sampling_seed"), strict=True):
        engine = made(kind, HashPolicy(VOCAB, eos_ids=EOS), raw_logprobs=kind == "sglang")
        answer = await generate(engine, [4, 5], 20, temperature=2.0, **{name: 8})
        assert ((await score(engine, [4, 5, *answer.ids]))[1:] == answer.logprobs) is (kind == "sglang")


async def test_generate_needs_scale_out() -> None:
    engine = made("vllm", Replay([[5, 2]]), scale_out=False)
    response = await engine.handle("POST", "/inference/v1/generate", {}, b"{}")
    assert response.status == 403
    assert (await generate(engine, [1])).ids == [5, 2]
