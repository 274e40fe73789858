"""A router between client and server builds each request anew from the fields that it knows (law 4).

What the real ones drop is in `tests/routers`; here one drops those fields before a scripted server.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection
from typing import Any

import pytest
from strands import Agent

from support.backends import Handler, Received, http_response, in_process, instant
from support.scripted import Says, engine_of, tokenizer
from tito_conformance.testing import ScriptedEngine, WireResponse
from tito_core import Policy, TITOModel
from tito_core.backend import ProtocolViolationError, SamplingParams, UnsupportedByServerError
from tito_core.backend.sampling import Grammar
from tito_core.ledger.laws import check_ledger
from tito_sglang.backend import SGLangBackend

SMG = ("logit_bias", "stop_regex", "stream_interval", "structural_tag")
ROUTER = (*SMG, "return_prompt_token_ids", "cache_salt", "mm_content_hashes", "routed_dp_rank", "custom_params")
Edit = Callable[[dict[str, Any]], None]


def behind(engine: ScriptedEngine, dropped: Collection[str], edit: Edit = lambda body: None) -> SGLangBackend:
    """Return a backend behind a router, which answers for itself, or with 404, what is no generation."""

    async def route(request: Received) -> WireResponse:
        if request.path == "/v1/models":
            return http_response(200, json={"data": [{"id": "scripted", "owned_by": "local"}]})
        if request.path not in ("/generate", "/get_model_info"):
            return http_response(404)
        content = request.content
        if content:
            body = json.loads(content)
            edit(body)
            parameters = body.pop("sampling_params")
            kept = {name: value for name, value in body.items() if name not in dropped}
            kept["sampling_params"] = {name: value for name, value in parameters.items() if name not in dropped}
            content = json.dumps(kept).encode()
        path = request.path.replace("get_", "")
        return await engine.handle(request.method, path, request.headers, content)

    return SGLangBackend("http://router", http_transport=in_process(Handler(route)), **instant())


async def connect(engine: ScriptedEngine, dropped: Collection[str], edit: Edit = lambda body: None) -> Policy:
    return await Policy.connect_async(backend=behind(engine, dropped, edit), tokenizer=tokenizer())


async def three_turns(model: TITOModel) -> list[Any]:
    agent = Agent(model=model, callback_handler=None)
    for question in ("Hi", "And then?", "And now?"):
        await agent.invoke_async(question)
    ledger = model.reset()
    check_ledger(ledger)
    return [*ledger]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("verify_echo", ["always", "first"])
async def test_where_the_echo_is_dropped_the_ids_beside_the_prompts_logprobs_prove_it(
    verify_echo: Any, stream: bool
) -> None:
    """Each turn its own tokens, from the parent's last on, so that the prefix cache still holds what is before."""
    engine = engine_of("sglang", Says("One.", "Two.", "Three."))
    policy = await connect(engine, ROUTER)
    turns = await three_turns(policy.model(verify_echo=verify_echo, stream=stream))
    begins = [0, *(turn.draft.prompt_length + len(turn.draft.columns.output_ids) - 1 for turn in turns[:-1])]
    lengths = [turn.draft.prompt_length for turn in turns]
    proven = begins if verify_echo == "always" else [0, *lengths[1:]]
    assert [turn.draft.engine.echoed_from for turn in turns] == proven
    assert [turn.draft.engine.cached_tokens for turn in turns] == begins, "no more than the cost of the own tokens"
    scored = [request.body["logprob_start_len"] for request in engine.requests[-3:]]
    assert scored == (begins if verify_echo == "always" else [0, -1, -1])


async def test_where_the_echo_passes_it_proves_the_whole_prompt_and_costs_nothing() -> None:
    engine = engine_of("sglang", Says("One.", "Two.", "Three."))
    turns = await three_turns((await connect(engine, SMG)).model())
    assert [turn.draft.engine.echoed_from for turn in turns] == [0, 0, 0]
    assert [request.body["logprob_start_len"] for request in engine.requests[-3:]] == [-1, -1, -1]


async def test_a_router_that_begins_to_pass_the_echo_on_proves_the_whole_prompt() -> None:
    changes, dropped = list[int](), list(ROUTER)

    def edit(body: dict[str, Any]) -> None:
        for change in changes:
            body["input_ids"][0] = change

    policy = await connect(engine_of("sglang", Says("One.", "Two.", "Three.")), dropped, edit)
    dropped.remove("return_prompt_token_ids")
    model = policy.model()
    agent = Agent(model=model, callback_handler=None)
    await agent.invoke_async("Hi")
    await agent.invoke_async("And then?")
    assert [turn.draft.engine.echoed_from for turn in model.ledger] == [0, 0]
    changes.append(5)
    with pytest.raises(ProtocolViolationError, match=r"Law 4: prompt id \d+ at offset 0 was sent, but .* read 5"):
        await agent.invoke_async("And now?")


@pytest.mark.parametrize("at", [0, -1])
async def test_a_router_that_changes_an_id_is_refused(at: int) -> None:
    changes: list[int] = []

    def edit(body: dict[str, Any]) -> None:
        for change in changes:
            body["input_ids"][at] = change

    engine = engine_of("sglang", Says("One."))
    policy = await connect(engine, ROUTER, edit)
    changes.append(5)
    with pytest.raises(ProtocolViolationError, match=r"Law 4: prompt id \d+ .* but the server read 5"):
        await Agent(model=policy.model(), callback_handler=None).invoke_async("Hi")


async def test_where_nothing_proves_the_prompt_connecting_says_which_router_to_use() -> None:
    """As vllm-router 0.1.17 before SGLang."""
    with pytest.raises(UnsupportedByServerError, match=r"http://router drops return_prompt_token_ids and.*Use smg"):
        await connect(engine_of("sglang", Says("One.")), (*ROUTER, "logprob_start_len"))


LOST: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "a grammar": (
        {"sampling": SamplingParams(grammar=Grammar(kind="structural_tag", value='{"format": {}}'))},
        SMG,
    ),
    "a bias": ({"sampling": {"extra": {"logit_bias": {"5": 1.0}}}}, SMG),
    "a salt": ({"optional_outputs": {"cache_salt": "a"}}, ROUTER),
}


@pytest.mark.parametrize("name", LOST)
async def test_what_a_router_would_drop_is_refused_before_it_is_sent(name: str) -> None:
    options, dropped = LOST[name]
    engine = engine_of("sglang", Says("One."))
    policy = await connect(engine, dropped)
    sent = len(engine.requests)
    with pytest.raises(UnsupportedByServerError, match=r"The router before the server drops .* was not sent"):
        await Agent(model=policy.model(**options), callback_handler=None).invoke_async("Hi")
    assert len(engine.requests) == sent
