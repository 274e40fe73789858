"""Recorded optional outputs of real servers are read as columns."""

from __future__ import annotations

import base64
import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from support.backends import Kind, Received, answering, http_response, request_of
from tito_conformance.testing import WireResponse
from tito_core.backend import OptionalOutputs, ProtocolViolationError, RawResponse, TokenResponse
from tito_core.backend.generate import generate
from tito_core.backend.optional_columns import ColumnValidation
from tito_core.backend.values import RawReader
from tito_sglang import wire as sglang_wire
from tito_vllm import wire as vllm_wire

WIRE = Path(__file__).parents[1] / "wire"


def recorded(folder: str, name: str) -> tuple[dict[str, Any], Any]:
    """Body and answer of a recorded exchange."""
    record = json.loads((WIRE / folder / f"{name}.json").read_text())
    request = record["request"]
    return request["json" if "json" in request else "body"], record.get("response_json", record.get("response"))


async def read(
    folder: str, name: str, optional_outputs: OptionalOutputs, *, older: bool = False, delta_start: int = 0
) -> TokenResponse:
    """Ask a server that gives one recorded answer, with the echo that most recordings did not ask for."""
    sent, answer = recorded(folder, name)
    ids = sent.get("input_ids") or sent.get("token_ids") or sent["prompt"]
    kind: Kind = "sglang" if "meta_info" in answer else "vllm" if "token_ids" in sent else "vllm-completions"
    (answer["choices"][0] if kind == "vllm-completions" else answer)["prompt_token_ids"] = ids
    if kind == "vllm-completions":  # asked for by us, and not when it was recorded
        table = answer["choices"][0]["logprobs"]
        table["tokens"] = [f"token_id:{token}" for token in answer["choices"][0]["token_ids"]]
    for entry in _entries(answer) if older else ():
        entry["token"] = f"token_id:{entry.pop('token_id')}"

    def handler(request: Received) -> WireResponse:
        if request.path == "/server_info":
            return http_response(404)
        if request.method == "GET":
            return http_response(200, json={"data": [{"id": "m"}], "version": "1"})
        return http_response(200, json=answer)

    params = sent.get("sampling_params", sent)
    limit = params.get("max_tokens") or params["max_new_tokens"]
    sampling = {name: params[name] for name in ("temperature", "top_k") if name in params}
    request = request_of(ids, max_new_tokens=limit, stop_token_ids=(), **sampling)
    backend = answering(kind, handler, refuses=404 if kind == "vllm-completions" else 400)
    return await generate(backend, replace(request, optional_outputs=optional_outputs, delta_start=delta_start))


def _entries(answer: Any) -> list[Any]:
    content = answer["choices"][0]["logprobs"]["content"]
    return [*content, *(entry for one in content for entry in one["top_logprobs"])]


def table(response: TokenResponse) -> list[list[tuple[int, float]]]:
    """The likeliest of each output token, as pairs."""
    ids, logprobs = (response.columns[name].values.tolist() for name in ("top_ids", "top_logprobs"))
    return [[(i, round(lp, 4)) for i, lp in zip(*row, strict=True)] for row in zip(ids, logprobs, strict=True)]


async def test_sglang_top_logprobs() -> None:
    response = await read("sglang-0.5.23", "gen_top_logprobs", OptionalOutputs(top_logprobs=3))
    assert table(response) == [
        [(57, -1.5069), (19556, -1.7052), (67, -2.7272)],
        [(5248, -0.1146), (6737, -3.2043), (744, -3.6044)],
    ]
    assert response.columns["top_ids"].start == 37


async def test_sglangs_prompt_logprobs_begin_after_the_token_without_one() -> None:
    optional_outputs = OptionalOutputs(top_logprobs=2, prompt_logprobs=True)
    response = await read("sglang-0.5.23", "gen_top_logprobs_input", optional_outputs, delta_start=35)
    column = response.columns["prompt_logprobs"]
    assert column.start == 35
    assert column.values.tolist() == np.float32([-1.1920922133867862e-06, -0.00025233422638848424]).tolist()
    assert response.cached_tokens == 34, "the cache was kept up to the token before"
    assert table(response) == [[(57, -1.5069), (19556, -1.7052)]]


async def test_sglang_grammar_returns_fewer_top_tokens() -> None:
    """A masked token has float32's lowest number there."""
    response = await read("sglang-0.5.23", "gen_top_logprobs_grammar", OptionalOutputs(top_logprobs=3))
    ids, logprobs = (response.columns[name].values for name in ("top_ids", "top_logprobs"))
    assert ids.tolist() == [[64, 370, -1], [151645, 65, -1]]
    assert np.isnan(logprobs[:, 2]).all()
    assert np.allclose(np.exp(logprobs[:, :2]).sum(1), 1, atol=1e-5)


def test_sglang_sampling_mask() -> None:
    sent, answer = recorded("sglang-0.5.23", "gen_sampling_mask_support")
    generation = msgspec.json.decode(msgspec.json.encode(answer), type=sglang_wire.Generation)
    request = replace(request_of(sent["input_ids"], top_k=4), optional_outputs=OptionalOutputs(sampling_mask=True))
    mask = sglang_wire.reported(generation, request, "r", None)["sampling_mask"]
    assert mask == [[57, 19556, 67, 26843], [28, 665, 17, 30]]
    ids, logprobs = np.int32(answer["output_ids"]), np.zeros(2, np.float32)
    column = ColumnValidation(RawReader("sglang", "r"), request, ids, logprobs).columns(
        RawResponse(finish="stop", output_ids=ids, logprobs=logprobs, sampling_mask=mask)
    )["sampling_mask"]
    assert (column.start, column.values.tolist()) == (37, mask)


async def test_sglangs_sampling_mask_of_a_greedy_token_is_itself() -> None:
    response = await read("sglang-0.5.23", "gen_sampling_mask_greedy", OptionalOutputs(sampling_mask=True))
    assert response.columns["sampling_mask"].values.tolist() == [[token] for token in response.output_ids.tolist()]


@pytest.mark.parametrize("name", ["moe_routed_experts", "moe_routed_experts_start"])
async def test_sglangs_routed_experts_whole_and_cropped(name: str) -> None:
    sent, answer = recorded("sglang-0.5.23", name)
    start = sent.get("routed_experts_start_len", 0)
    raw = np.frombuffer(base64.b64decode(answer["meta_info"]["routed_experts"]), "<i4").reshape(-1, 3, 2)
    response = await read("sglang-0.5.23", name, OptionalOutputs(routed_experts=(3, 2)), delta_start=4)
    column = response.columns["routed_experts"]
    assert (column.start, column.shape, column.dtype) == (3, (3, 3, 2), "|u1")
    assert column.values.tolist() == raw[3 - start :].tolist()
    with pytest.raises(ProtocolViolationError, match=r"Law 2: routed_experts have shape \(\d, \d+\), expected"):
        await read("sglang-0.5.23", name, OptionalOutputs(routed_experts=(7, 4)), delta_start=4)


def test_sglang_capabilities() -> None:
    _, answer = recorded("sglang-0.5.23-more", "info_server_info")
    found = sglang_wire.capabilities(msgspec.convert(answer, sglang_wire.ServerInfo), 151936)
    assert (found.routed_experts, found.sampling_mask, found.priority, found.lower_first) == (True, True, False, False)
    assert (found.top_logprobs, found.expert_shape) == (1024, False)
    unknown = sglang_wire.capabilities(None, None)
    assert (unknown.routed_experts, unknown.sampling_mask, unknown.priority) == (None, None, None)
    assert unknown.top_logprobs == 1000
    bare = sglang_wire.capabilities(sglang_wire.ServerInfo(schedule_low_priority_values_first=True), 7)
    assert (bare.lower_first, bare.sampling_mask, bare.top_logprobs) == (True, False, 7)


@pytest.mark.parametrize("older", [False, True], ids=["0.32", "0.31"])
async def test_vllm_top_and_prompt_logprobs_in_both_shapes(older: bool) -> None:
    optional_outputs = OptionalOutputs(top_logprobs=1, prompt_logprobs=True)
    response = await read("vllm-0.32.0", "generate_prompt_logprobs_2", optional_outputs, older=older, delta_start=2)
    assert table(response) == [[(81033, -6.1067)]], "the sampled token is listed first, and is not the likeliest"
    assert response.output_ids.tolist() == [92822]
    column = response.columns["prompt_logprobs"]
    assert column.start == 2
    assert column.values.tolist() == np.float32([-11.459646224975586, -17.06833839416504]).tolist()
    with pytest.raises(ProtocolViolationError, match=r"3 top_logprobs .*output token 0 has 2"):
        await read("vllm-0.32.0", "generate_prompt_logprobs_2", OptionalOutputs(top_logprobs=3), older=older)


async def test_vllms_openai_endpoint_lists_one_more() -> None:
    response = await read("vllm-0.32.0", "completions_ids_logprobs1_as_ids", OptionalOutputs(top_logprobs=1))
    assert table(response)[0] == [(81033, -6.1067)]
    assert (response.logprobs < response.columns["top_logprobs"].values[:, 0]).all()


async def test_vllm_processed_logprobs_mask_truncated_tokens() -> None:
    response = await read("vllm-0.32.0", "processed_topk_logprobs5", OptionalOutputs(top_logprobs=4))
    ((first, second, third, fourth),) = response.columns["top_ids"].values.tolist()
    assert (first, second, third, fourth) == (59232, 117743, -1, -1)
    logprobs = response.columns["top_logprobs"].values[0]
    assert np.exp(logprobs[:2]).sum() == pytest.approx(1, abs=1e-6)
    assert np.isnan(logprobs[2:]).all()


@pytest.mark.parametrize(
    "name", ["routed_experts_completions", "routed_experts_completions_pstart", "routed_experts_generate"]
)
async def test_vllm_routed_experts_have_a_shape(name: str) -> None:
    sent, answer = recorded("vllm-0.30.0", name)
    whole = np.load(io.BytesIO(base64.b64decode(answer["choices"][0]["routed_experts"])))
    start = sent.get("routed_experts_prompt_start", 0)
    response = await read("vllm-0.30.0", name, OptionalOutputs(routed_experts=True), delta_start=10 if start else 4)
    column = response.columns["routed_experts"]
    assert (column.start, column.shape[1:], column.dtype) == (9 if start else 3, (3, 2), "|u1")
    assert column.values.tolist() == whole[column.start - start :].tolist()
    assert column.start + column.rows == 14


def test_vllm_reports_its_limit_of_top_logprobs() -> None:
    _, answer = recorded("vllm-0.32.0", "generate_logprobs_all")
    limits = [(json.dumps(answer), True, 19), (json.dumps(answer), False, 20), ("no such thing", True, None)]
    for refusal, one_more, most in limits:
        assert vllm_wire.capabilities(refusal, one_more=one_more, grammar=None).top_logprobs == most
