"""The scripted engines answer recorded requests as the recorded servers did: status, every key, type and value.

The sentence of a refusal may be that of another request, if a client reads no value of it.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from support.wire_recordings import Recorded, Recording, load, trimmed
from tito_conformance.testing import Fault, ScriptedEngine, first, from_function, scripted_engine

pytestmark = pytest.mark.suite

# Fields whose values only the server knows: only their type is compared.
OWN = {
    "created",
    "e2e_latency",
    "response_sent_to_client_ts",
    "system_fingerprint",
    "rank",  # a bound on the scripted side, see `rank_of`
    "root",  # a path on the server's disk
}

TIMES = {
    *("storage_prefetch_wait", "storage_staging_wait", "forward_entry_time", "prefill_finished_time"),
    *("queue_time", "api_server_dispatch_finish_ts", "decode_throughput", "first_token_latency"),
    *("request_finished_ts", "request_received_ts"),
}

# Keys that a scripted engine does not return: recording -> (keys left out of the comparison, reason).
DIFFERENCES: dict[str, tuple[set[str], str]] = {
    "info_model_info": ({"embedding", "cache", "model_type", "architectures"}, "a scripted engine has no weights"),
    "moe_routed_experts": (TIMES, "times of a server with metrics enabled"),
    "moe_routed_experts_start": (TIMES, "the same"),
    "gen_while_paused": ({"cached_tokens", "cached_tokens_details"}, "recorded before a pause cleared the cache"),
}

# Recordings of a busy server, each with its own test below, and one that is read elsewhere.
APART = {
    *("dup_rid_second", "q_overflow", "q_waiting_aborted", "abort_requests_all"),
    "completions_n2_prompt_logprobs",  # test_vllm_backend reads it; scripted servers give one answer
}


def engine_for(recording: Recording) -> ScriptedEngine:
    script = Recorded(recording)
    served = recording.response.get("model") if isinstance(recording.response, dict) else None
    name = recording.fields.get("model", served or "qwen3-tiny")
    model = "models/qwen3-tiny-f32" if recording.kind == "sglang" else "qwen3-tiny" if name == "nope" else name
    engine = scripted_engine(
        recording.kind,
        script,
        vocab_size=151936,
        eos_ids=recording.eos_ids,
        model=model,
        decode=script.decode,
        encode=lambda text, special: recording.response["tokens"],
        api_key="sk-x" if recording.name.startswith("auth") else None,
        skip_tokenizer_init=recording.name.startswith("skiptok"),
    )
    if recording.path == "/tokenize":  # SGLang reports the tokenizer's own limit there
        engine.state.max_model_len = recording.response.get("max_model_len", 4096)
    if found := re.search(r'"weight_version": "([^"]+)"', json.dumps(recording.response)):
        engine.state.weight_version = found[1]
    return engine


WORDS = re.compile(r"validation error|invalid type:|unknown field")
"""Sentences of schema errors: they repeat the body, and clients read no value of them."""


def decoded(content: bytes) -> Any:
    if content.startswith(b"data: "):
        return [json.loads(part.removeprefix(b"data: ")) for part in content.split(b"\n\n")[:-2]]
    try:
        return json.loads(content) if content else ""
    except json.JSONDecodeError:
        return content.decode()


def differences(expected: Any, actual: Any, left_out: set[str], at: str = "") -> Iterator[str]:
    if isinstance(expected, dict) and isinstance(actual, dict):
        if expected.keys() - left_out != actual.keys() - left_out:
            yield f"{at}: keys {sorted(expected.keys() ^ actual.keys())}"
        for key in (expected.keys() & actual.keys()) - left_out:
            yield from differences(expected[key], actual[key], left_out, f"{at}.{key}")
    elif isinstance(expected, list) and isinstance(actual, list):
        shown, more = trimmed(expected)
        if len(shown) + more != len(actual):
            yield f"{at}: {len(shown) + more} elements, scripted {len(actual)}"
        for n, (one, other) in enumerate(zip(shown, actual, strict=False)):
            yield from differences(one, other, left_out, f"{at}[{n}]")
    elif at.rpartition(".")[2] in ("error", "message") and isinstance(expected, str) and WORDS.search(expected):
        if WORDS.findall(expected)[0] not in actual:
            yield f"{at}: {expected!r}, scripted {actual!r}"
    elif at.rpartition(".")[2] in OWN:
        if type(expected) is not type(actual):
            yield f"{at}: {expected!r} and {actual!r}"
    elif unhexed(expected) != unhexed(actual) or type(expected) is not type(actual):
        yield f"{at}: {expected!r}, scripted {actual!r}"


def unhexed(value: Any) -> Any:
    """Replace random ids and addresses by one placeholder."""
    return (
        re.sub(r"\b([0-9a-f]{32}|[0-9a-f]{16})\b| at 0x[0-9a-f]+", "<hex>", value) if isinstance(value, str) else value
    )


def recorded(kind: str, name: str) -> Recording:
    return next(recording for recording in load(kind) if recording.name == name)


RECORDINGS = [r for kind in ("vllm", "sglang") for r in load(kind) if r.name not in APART]


@pytest.mark.parametrize("recording", RECORDINGS, ids=lambda r: f"{r.kind}-{r.name}")
async def test_answers_as_recorded(recording: Recording) -> None:
    engine = engine_for(recording)
    response = await engine.handle(recording.method, recording.path, recording.headers, recording.sent)
    if recording.status == -1:
        assert response.dropped
        assert engine.state.dead
        return
    assert response.status == recording.status
    left_out, _ = DIFFERENCES.get(recording.name, (set(), ""))
    assert list(differences(recording.response, decoded(response.content), left_out)) == []


@asynccontextmanager
async def busy(recording: Recording, rid: str, **settings: Any) -> AsyncIterator[ScriptedEngine]:
    """Yield an engine that answers as the recorded one, while a request with this id never ends."""
    engine = engine_for(recording)
    again = Recorded(recording)
    engine.script = from_function(lambda prompt: [5] * 16)
    engine.fault = first(1, Fault(hang=True))
    for name, value in settings.items():
        setattr(engine, name, value)
    params = {"max_new_tokens": 16}
    prompt = {"prompt": [1]} if recording.kind == "vllm" else {"input_ids": [1], "rid": rid, "sampling_params": params}
    path = "/v1/completions" if recording.kind == "vllm" else "/generate"
    running = asyncio.create_task(engine.handle("POST", path, {}, json.dumps(prompt).encode()))
    await asyncio.sleep(0.01)
    assert engine.running == 1
    engine.script = again
    yield engine
    running.cancel()


async def replay_differences(engine: ScriptedEngine, recording: Recording) -> list[str]:
    response = await engine.handle(recording.method, recording.path, recording.headers, recording.sent)
    assert response.status == recording.status
    return list(differences(recording.response, decoded(response.content), set()))


async def test_a_rid_runs_only_once() -> None:
    second = recorded("sglang", "dup_rid_second")
    async with busy(second, "d1") as engine:
        assert await replay_differences(engine, second) == []


async def test_an_abort_in_the_queue_and_a_full_queue() -> None:
    waiting, full = recorded("sglang", "q_waiting_aborted"), recorded("sglang", "q_overflow")
    async with busy(waiting, "a1", max_running=1, max_queued=1) as engine:
        pending = asyncio.create_task(replay_differences(engine, waiting))
        await asyncio.sleep(0.01)
        assert engine.running == 2
        assert await replay_differences(engine, full) == []
        assert await replay_differences(engine, recorded("sglang", "q_abort_waiting")) == []
        assert await pending == []
    assert engine.aborted == ["a2"]


async def test_aborting_everything_counts_it() -> None:
    everything = recorded("vllm", "abort_requests_all")
    async with busy(everything, "") as engine:
        assert await replay_differences(engine, everything) == []
    assert len(engine.aborted) == 1


def test_every_exception_is_still_needed() -> None:
    names = {recording.name for kind in ("vllm", "sglang") for recording in load(kind)}
    assert names >= APART | DIFFERENCES.keys()
