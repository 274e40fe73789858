"""Streamed answers equal plain ones, and damaged streams are refused."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.backends import (
    BACKENDS,
    EOS,
    KINDS,
    PROMPT,
    WIRES,
    Kind,
    Received,
    Waits,
    answering,
    backend_of,
    bodies,
    engine_of,
    hash_policy,
    http_response,
    in_process,
    in_process_backend,
    request_of,
)
from tito_conformance.testing import Completion, Fault, HashPolicy, ScriptedServer, WireResponse, always, first
from tito_core.backend import (
    BackendError,
    BadRequestError,
    ContextLengthError,
    EngineConnectionError,
    EngineTimeoutError,
    ProtocolViolationError,
    ServerError,
    ThrottledError,
    TokenChunk,
    TokenResponse,
)
from tito_core.backend.generate import generate
from tito_core.ledger.turn import Finish

OUTPUT = (21, 22, 23, 24, EOS)
Events = list[dict[str, Any]]


class Shown(list[int]):
    """The ids that were given on."""

    def __call__(self, chunk: TokenChunk) -> None:
        self.extend(chunk.output_ids.tolist())


def facts(response: TokenResponse) -> Any:
    outcome = (response.finish, response.stop, response.prompt_length, response.versions, response.message)
    return *outcome, response.output_ids.tolist(), response.logprobs.tolist()


def ask(kind: Kind, fault: Fault | None = None, completion: Completion | None = None, **options: Any) -> TokenResponse:
    engine = engine_of(kind, lambda _: completion or Completion(OUTPUT), fault=always(fault) if fault else None)
    return asyncio.run(generate(in_process_backend(engine, **options), request_of(), Shown()))


@pytest.mark.parametrize("kind", WIRES)
@settings(max_examples=10, deadline=None)
@given(
    prompt=st.lists(st.integers(3, 999), min_size=1, max_size=40),
    temperature=st.sampled_from([0.0, 0.7, 1.0]),
    limit=st.integers(1, 40),
)
def test_a_streamed_answer_equals_a_plain_one(kind: Kind, prompt: list[int], temperature: float, limit: int) -> None:
    async def both() -> None:
        answers = []
        for shown in (Shown(), None):
            engine = engine_of(kind, hash_policy())
            backend = backend_of(engine, http_transport=in_process(engine))
            request = request_of(prompt, temperature=temperature, max_new_tokens=limit, seed=7)
            answers.append(await generate(backend, request, shown))
            assert shown is None or shown == answers[0].output_ids.tolist()
        assert facts(answers[0]) == facts(answers[1])
        assert answers[0].output_ids.dtype == np.int32

    asyncio.run(both())


@pytest.mark.parametrize("finish", [None, "abort"])
@pytest.mark.parametrize("tokens", [0, 1, 3])
@pytest.mark.parametrize("kind", WIRES)
def test_every_finish_reason_can_be_streamed(kind: Kind, tokens: int, finish: Any) -> None:
    completion = Completion(OUTPUT[:tokens], finish=finish or "stop") if tokens < 3 or finish else Completion(OUTPUT)
    if not tokens and not finish:
        with pytest.raises(ProtocolViolationError, match="no output ids"):
            ask(kind, None, completion)
        return
    assert facts(ask(kind, None, completion)) == facts(
        asyncio.run(generate(backend_of(engine_of(kind, lambda _: completion)), request_of()))
    )


def token_events(kind: Kind, events: Events) -> int:
    """Count the events that bring a token: vLLM's last brings the usage."""
    return len(events) if kind == "sglang" else len(events) - 1


def events_of(kind: Kind) -> Events:
    seen: list[Events] = []
    ask(kind, Fault(edit=seen.append))
    return seen[0]


DAMAGES: dict[str, Callable[[Events, int], Any]] = {
    "lost": lambda events, at: [*events[:at], *events[at + 1 :]],
    "twice": lambda events, at: [*events[: at + 1], *events[at:]],
    "swapped": lambda events, at: [*events[:at], events[at + 1], events[at], *events[at + 2 :]],
}


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("kind", WIRES)
def test_lost_duplicated_and_reordered_events_are_refused(kind: Kind, damage: str) -> None:
    count = token_events(kind, events_of(kind))
    assert count == len(OUTPUT)
    for at in range(count - (damage == "swapped")):
        fault = Fault(edit=lambda events, at=at: DAMAGES[damage](events, at))
        # SGLang repeats the whole output in each event, so a lost or repeated event is harmless.
        harmless = kind == "sglang" and (damage == "twice" or (damage == "lost" and at < count - 1))
        if harmless:
            assert ask(kind, fault).output_ids.tolist() == list(OUTPUT)
            continue
        with pytest.raises(ProtocolViolationError, match=r"Law [24]|text offset"):
            ask(kind, fault)


def uncounted(events: Events) -> Events:
    """Return vLLM's events without their usage."""
    return [{**event, "usage": None} for event in events[:-1]]


def test_an_answer_whose_events_do_not_show_their_order_says_so() -> None:
    """A server that knows no `continuous_usage_stats`, or a proxy in front of it, sends the usage at the end only."""

    def at_the_end(events: Events) -> Events:
        return [*uncounted(events), events[-1]]

    def swapped(events: Events) -> Events:
        return DAMAGES["swapped"](at_the_end(events), 1)

    silent = ask("vllm", Fault(edit=swapped))
    assert silent.output_ids.tolist() == [21, 23, 22, 24, EOS], "nothing shows it"
    assert silent.unordered
    for kind in WIRES:
        assert not ask(kind).unordered, "counted"
    assert not ask("vllm-completions", Fault(edit=at_the_end)).unordered, "text_offset"
    with pytest.raises(ProtocolViolationError, match="text offset"):
        ask("vllm-completions", Fault(edit=swapped))
    # The first event has the prompt's ids and the last the reason, which leaves one place for one between them.
    assert not ask("vllm", Fault(edit=at_the_end), Completion((21, 22, EOS))).unordered
    assert ask("vllm", Fault(edit=at_the_end), Completion((21, 22, 23, EOS))).unordered


@pytest.mark.parametrize("kind", WIRES)
def test_an_event_of_another_request_is_refused(kind: Kind) -> None:
    def edit(events: Events) -> None:
        named = events[2]["meta_info"] if kind == "sglang" else events[2]
        name = "request_id" if kind == "vllm" else "id"
        named[name] = named[name][:-1] + "x"

    with pytest.raises(ProtocolViolationError, match=r"event of request '.*x' follows events of '.*r'"):
        ask(kind, Fault(edit=edit))


@pytest.mark.parametrize("kind", ["vllm", "vllm-completions"])
def test_a_stream_without_its_usage_is_refused(kind: Kind) -> None:
    with pytest.raises(ProtocolViolationError, match="prompt_tokens=None"):
        ask(kind, Fault(edit=uncounted))


def incremental(events: Events) -> Events:
    """Return SGLang's events with `--incremental-streaming-output`: each holds only new tokens."""
    before = 0
    for event in events:
        meta = event["meta_info"]
        count = meta["completion_tokens"]
        event["output_ids"] = event["output_ids"][before:]
        meta["output_token_logprobs"] = meta["output_token_logprobs"][before:]
        before = count
    return events


def test_sglang_may_stream_incrementally() -> None:
    assert facts(ask("sglang", Fault(edit=incremental))) == facts(ask("sglang"))
    for damage, change in DAMAGES.items():
        for at in range(len(OUTPUT) - (damage == "swapped")):
            if damage == "twice" and at == 0:
                continue  # the first holds all tokens so far, which may be repeated
            fault = Fault(edit=lambda events, at=at, change=change: change(incremental(events), at))
            with pytest.raises(ProtocolViolationError):
                ask("sglang", fault)


@pytest.mark.parametrize("tokens", [1, 4])
@pytest.mark.parametrize("incrementally", [True, False])
def test_sglangs_abort_of_a_request_that_waits_again_keeps_its_tokens(incrementally: bool, tokens: int) -> None:
    """It ends with the last token again, the count of all, and neither prompt nor usage (0.5.23)."""

    def edit(events: Events) -> Events:
        kept = events[:tokens]
        meta = {name: kept[-1]["meta_info"][name] for name in ("id", "completion_tokens", "output_token_logprobs")}
        reason = {"type": "abort", "message": "Abort in waiting queue"}
        spans = [{"version": "default", "start": 0, "end": tokens}]
        last = {"output_ids": [OUTPUT[tokens - 1]], "meta_info": {**meta, "finish_reason": reason}}
        last["meta_info"]["weight_versions"] = spans
        return [*(incremental(kept) if incrementally else kept), last]

    response = ask("sglang", Fault(edit=edit))
    assert (response.finish, response.message) == (Finish.ABORT, "Abort in waiting queue")
    assert response.output_ids.tolist() == list(OUTPUT[:tokens])
    assert [span.version for span in response.versions] == ["default"]
    with pytest.raises(ProtocolViolationError, match="follows the one that aborted"):
        ask("sglang", Fault(edit=lambda events: [*edit(events[:]), events[-1]]))


def echo_holders(events: Events) -> list[dict[str, Any]]:
    """Return the objects that hold an echo: events, or their choices on `/v1/completions`."""
    found = [holder for event in events for holder in (event, *event.get("choices", ()))]
    return [holder for holder in found if holder.get("prompt_token_ids")]


@pytest.mark.parametrize(("kind", "incrementally"), [*((kind, False) for kind in WIRES), ("sglang", True)])
def test_every_echo_of_a_stream_is_compared(kind: Kind, incrementally: bool) -> None:
    count = len(echo_holders(events_of(kind)))
    assert count == (len(OUTPUT) if kind == "sglang" else 1)

    def edit(events: Events, at: int) -> Events:
        echo_holders(events)[at]["prompt_token_ids"][0] += 1
        return incremental(events) if incrementally else events

    for at in range(count):
        fault = Fault(edit=lambda events, at=at: edit(json.loads(json.dumps(events)), at))
        with pytest.raises(ProtocolViolationError, match=r"Law 4: .*(prompt id|another prompt)"):
            ask(kind, fault)


def test_a_later_echo_of_vllm_does_not_hide_a_wrong_one() -> None:
    def edit(events: Events) -> None:
        events[-1]["prompt_token_ids"] = list(events[0]["prompt_token_ids"])  # with the usage
        events[0]["prompt_token_ids"][0] += 1

    with pytest.raises(ProtocolViolationError, match=r"Law 4: .*another prompt"):
        ask("vllm", Fault(edit=edit))


@pytest.mark.parametrize("kind", WIRES)
def test_a_broken_stream_is_retried_only_before_its_first_chunk(kind: Kind) -> None:
    async def broken(at: int, cut: str) -> None:
        engine = engine_of(kind, lambda _: Completion(OUTPUT), fault=first(1, Fault(**{cut: at})))
        shown, waits = Shown(), Waits()
        generation = generate(backend_of(engine, sleep=waits), request_of(), shown)
        [outcome] = await asyncio.gather(generation, return_exceptions=True)
        if isinstance(outcome, TokenResponse):
            assert outcome.output_ids.tolist() == list(OUTPUT) == shown
            assert len(engine.requests) == 2
            return
        assert isinstance(outcome, EngineConnectionError)
        assert (outcome.sent, outcome.was_streamed) == (True, True)
        assert (len(engine.requests), waits.seconds) == (1, [])
        assert shown
        assert any("abort" in exchange.path for exchange in engine.exchanges)

    whole = sum(len(json.dumps(event, separators=(",", ":"))) + 8 for event in events_of(kind)) + len("data: [DONE]\n")
    for at in sorted({*range(1, whole, max(1, whole // 15)), whole - 14, whole - 2, whole - 1}):
        asyncio.run(broken(at, "close_after"))
        if at % 3 == 0:
            asyncio.run(broken(at, "reset_after"))


def failing(error: Any, after: int) -> Fault:
    return Fault(edit=lambda events: [*events[:after], {"error": error}])


@pytest.mark.parametrize(
    ("error", "kind_of_error", "words"),
    [
        ({"message": "temperature must be a non-negative number", "code": 400}, BadRequestError, "temperature must be"),
        ({"message": "the maximum context length is 8", "code": 400}, ContextLengthError, "maximum context length"),
        ({"message": "Internal server error", "type": "InternalServerError", "code": 500}, ServerError, "Internal"),
        ({"message": "queue full", "code": 503}, ThrottledError, "queue full"),
        ({"message": "a proxy's text", "code": "400"}, BadRequestError, "a proxy's text"),
        ({"message": "a code of its own", "code": "E400"}, ServerError, "a code of its own"),
        ({"message": "no", "code": 599}, ServerError, "answered 599: no"),
        ({"message": "no", "code": 600}, ServerError, "answered 500: no"),
        ({"message": "no", "code": 399}, ServerError, "answered 500: no"),
        ({"message": "no"}, ServerError, "answered 500: no"),
        ("what is this", ServerError, "answered 500: what is this"),
    ],
)
@pytest.mark.parametrize("kind", WIRES)
def test_errors_in_a_stream_are_typed_with_the_server_message(
    kind: Kind, error: Any, kind_of_error: type[BackendError], words: str
) -> None:
    with pytest.raises(kind_of_error, match=words) as caught:
        ask(kind, failing(error, 2))
    assert type(caught.value) is kind_of_error
    assert caught.value.was_streamed
    with pytest.raises(kind_of_error, match=words) as caught:
        ask(kind, failing(error, 0))
    assert not caught.value.was_streamed


@pytest.mark.parametrize("kind", WIRES)
def test_a_body_that_is_not_a_stream_is_refused(kind: Kind) -> None:
    with pytest.raises(ProtocolViolationError, match="content type is 'text/html'"):
        ask(kind, Fault(content_type="text/html"))
    for body in (b"data: {]\n\ndata: [DONE]\n\n", b"data: 5\n\ndata: [DONE]\n\n"):
        with pytest.raises(ProtocolViolationError, match=r"answered 200, but .*'.*'"):
            ask(kind, Fault(body=body))
    with pytest.raises(ProtocolViolationError, match="no event"):
        ask(kind, Fault(body=b"data: [DONE]\n\n"))


@pytest.mark.parametrize("kind", WIRES)
async def test_a_stream_is_requested_only_with_on_chunk(kind: Kind) -> None:
    engine = engine_of(kind)
    backend = backend_of(engine)
    await generate(backend, request_of(), Shown())
    await generate(backend, request_of())
    watched, plain = bodies(engine)
    assert (watched["stream"], plain["stream"]) == (True, False)
    if kind != "sglang":
        assert watched["stream_options"] == {"include_usage": True, "continuous_usage_stats": True}
        assert "stream_options" not in plain
    else:
        assert watched["sampling_params"]["stream_interval"] == 1
        assert "stream_interval" not in plain["sampling_params"]


@pytest.mark.parametrize(("status", "error"), [(400, BadRequestError), (500, ServerError), (503, ThrottledError)])
@pytest.mark.parametrize("ids", [[0], list(OUTPUT[:3])])
async def test_an_aborted_answer_with_a_status_is_an_error(
    ids: list[int], status: int, error: type[BackendError]
) -> None:
    """SGLang's scheduler refuses a request so; its event names a prompt of one token, which nobody sent.

    Its words may quote a prompt, so they are not searched for what proxies say to http on an https port.
    """

    def edit(events: Events) -> Events:
        [event] = events[-1:]
        words = "No grammars here: The plain HTTP request was sent to HTTPS port."
        reason = {"type": "abort", "message": words, "status_code": status, "err_type": "BadRequestError"}
        meta = {**event["meta_info"], "finish_reason": reason, "prompt_tokens": 1, "completion_tokens": len(ids)}
        return [{**event, "output_ids": ids, "meta_info": {**meta, "output_token_logprobs": []}}]

    engine = engine_of("sglang", fault=always(Fault(edit=edit)))
    with pytest.raises(error, match="No grammars here: The plain HTTP request was sent to HTTPS port") as caught:
        await generate(in_process_backend(engine, patience_s=0), request_of(), Shown())
    assert caught.value.status == status


@pytest.mark.parametrize("stream", [True, False])
async def test_what_sglangs_scheduler_refuses_is_the_same_error_in_a_stream(stream: bool) -> None:
    backend = in_process_backend(engine_of("sglang", skip_tokenizer_init=True))
    with pytest.raises(BadRequestError, match="Grammar-based generation"):
        await generate(backend, request_of(grammar={"kind": "regex", "value": "a+"}), Shown() if stream else None)
    backend = in_process_backend(engine_of("sglang", max_model_len=40))
    await backend.connect()
    backend._info = replace(backend._info, max_model_len=40)
    with pytest.raises(ContextLengthError, match="34 tokens"):
        await generate(backend, request_of([11] * 34, max_new_tokens=2), Shown() if stream else None)


@pytest.mark.parametrize("kind", KINDS)
async def test_a_slow_stream_times_out_and_is_aborted(kind: Kind) -> None:
    engine = engine_of(kind, HashPolicy(1000), latency=30.0)
    async with ScriptedServer(engine) as server:
        backend = BACKENDS[kind](server.base_url, timeout_s=0.5)
        backend._info = await backend_of(engine_of(kind)).connect()  # which a busy machine may answer later than that
        with pytest.raises(EngineTimeoutError, match=r"within 0\.5 s"):
            await generate(backend, request_of(max_new_tokens=600, stop_token_ids=()), Shown())
        while engine.running:
            await asyncio.sleep(0.01)
        await backend.aclose()


@pytest.mark.parametrize("bad", [-7, 2**31])
async def test_an_event_that_the_core_refuses_is_aborted(bad: int) -> None:
    """Law 5. SGLang's events hold all ids so far; of a wrong one in mid-stream the engine would go on to its end."""

    def edit(events: Events) -> None:
        for event in events:
            event["output_ids"] = [bad if token == OUTPUT[1] else token for token in event["output_ids"]]

    in_pieces = Fault(edit=edit, drip=(64, 0.001))  # so that no read brings two events
    engine, shown = engine_of("sglang", lambda _: Completion(OUTPUT), fault=always(in_pieces)), Shown()
    with pytest.raises(ProtocolViolationError, match=str(bad)) as caught:
        await generate(backend_of(engine), request_of(), shown)
    assert (caught.value.sent, caught.value.was_streamed) == (True, True)
    assert shown == [OUTPUT[0]]
    assert any("abort" in exchange.path for exchange in engine.exchanges)


@pytest.mark.parametrize("kind", WIRES)
async def test_an_exception_in_on_chunk_ends_the_request(kind: Kind) -> None:
    engine = engine_of(kind)

    def watcher(_: TokenChunk) -> None:
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        await generate(backend_of(engine), request_of(), watcher)
    assert any("abort" in exchange.path for exchange in engine.exchanges)


def test_a_refused_stream_request_is_a_typed_error() -> None:
    async def handler(request: Received) -> WireResponse:
        if request.method == "GET":
            return http_response(200, json={"data": [{"id": "m"}], "version": "1"})
        return http_response(400, json={"error": {"message": "no"}})

    with pytest.raises(BadRequestError, match="answered 400: no"):
        asyncio.run(generate(answering("vllm", handler), request_of(PROMPT), Shown()))
