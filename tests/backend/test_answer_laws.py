"""Laws 2, 4 and 10 on answers of both wires: each place of an answer reaches the checks."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.backends import (
    EOS,
    WIRES,
    Kind,
    Received,
    answering,
    engine_name,
    engine_of,
    http_response,
    in_process_backend,
    request_of,
)
from tito_conformance.testing import Completion, Fault, WireResponse, always
from tito_core.backend import ProtocolViolationError, TokenResponse
from tito_core.backend.generate import generate

OUTPUT = (21, 22, 23, EOS)
Edit = Callable[[Any], Any]


def ask(kind: Kind, edit: Edit | None, completion: Completion | None = None, **sampling: Any) -> TokenResponse:
    """One generation whose answer, of four tokens and a stop, was edited on the way."""
    completion = completion or Completion(OUTPUT)
    engine = engine_of(kind, lambda _: completion, fault=always(Fault(edit=edit)) if edit else None)
    return asyncio.run(generate(in_process_backend(engine), request_of(**sampling)))


CHOICE, META = ("choices", 0), "meta_info"
LOGPROBS = (*CHOICE, "logprobs")
CONTENT = (*LOGPROBS, "content", 1)
GONE = object()
PLACES: dict[str, tuple[tuple[Any, ...], ...]] = {
    "echo": (("prompt_token_ids",), ("prompt_token_ids",), (*CHOICE, "prompt_token_ids")),
    "ids": (("output_ids",), (*CHOICE, "token_ids")),
    "logprobs": ((META, "output_token_logprobs"), LOGPROBS),
    "logprob": ((META, "output_token_logprobs", 1, 0), (*CONTENT, "logprob"), (*LOGPROBS, "token_logprobs", 1)),
    "logprob id": ((META, "output_token_logprobs", 1, 1), (*CONTENT, "token_id"), (*LOGPROBS, "tokens", 1)),
    "prompt_tokens": ((META, "prompt_tokens"), ("usage", "prompt_tokens")),
    "completion_tokens": ((META, "completion_tokens"), ("usage", "completion_tokens")),
    "finish": ((META, "finish_reason"), CHOICE),
    "top": ((META, "output_top_logprobs"), (*CONTENT, "top_logprobs"), (*LOGPROBS, "top_logprobs")),
    "top id": (
        (META, "output_top_logprobs", 1, 2),
        (*CONTENT, "top_logprobs", 2),
        (*LOGPROBS, "top_logprobs", 1, "token_id:-3"),
    ),
    "prompt": ((META, "input_token_logprobs"), ("prompt_logprobs",), (*CHOICE, "prompt_logprobs")),
    "experts": ((META, "routed_experts"), (*CHOICE, "routed_experts")),
    "mask": ((META, "output_token_sampling_mask"), (*CHOICE, "sampling_mask")),
}
"""Where an answer of SGLang, of vLLM's own endpoint and of its OpenAI endpoint holds a thing; the last also stands for
the next ones."""


def put(place: str, *values: Any) -> Edit:
    """Return an edit of one thing in an answer: its new value, or a function of the old one, on each wire or on all."""

    def edit(answer: Any) -> None:
        wire = 0 if META in answer else 1 if "prompt_token_ids" in answer else 2
        *path, last = PLACES[place][min(wire, len(PLACES[place]) - 1)]
        for key in path:
            answer = answer[key]
        if (value := values[min(wire, len(values) - 1)]) is GONE:
            del answer[last]
        else:
            answer[last] = value(answer[last]) if callable(value) else value

    return edit


def finish(reason: Any, stop: Any = None) -> Edit:
    """Return an edit of why an answer ended."""
    found = None if reason is None else {"type": reason, "matched": stop}
    return put("finish", found, lambda choice: {**choice, "finish_reason": reason, "stop_reason": stop})


def scored(at: int, *, token: int | None = None, logprob: Any = -1.0) -> Edit:
    """Return an edit of the score of one token of the prompt, or of the token that was scored."""

    def of_vllm(entries: list[Any]) -> list[Any]:
        (own,) = entries[at] or {"0": None}
        return [
            *entries[:at],
            {own if token is None else str(token): {"logprob": logprob, "rank": 1}},
            *entries[at + 1 :],
        ]

    def of_sglang(entries: list[Any]) -> list[Any]:
        return [*entries[:at], [logprob, entries[at][1] if token is None else token, None], *entries[at + 1 :]]

    return put("prompt", of_sglang, of_vllm)


def answers(count: int) -> Edit:
    """Return an edit that leaves so many completions in an answer."""
    return lambda answer: {**answer, "choices": answer["choices"] * count} if "choices" in answer else [answer] * count


# What the core decides of any backend's answer is in test_validation.py; here is what each wire reads.
PLANTED: dict[str, tuple[Edit, str]] = {
    "echo edited": (put("echo", [11, 12, 99, 14, 15]), "prompt id 13 at offset 2 .* 99"),
    "echo missing": (put("echo", None), "did not echo"),
    "echo absent": (put("echo", GONE), "did not echo"),
    "logprobs missing": (put("logprobs", GONE, None), "no logprobs"),
    "logprob None": (put("logprob", None), r"output token 1 \(id 22\)"),
    "logprob NaN": (put("logprob", float("nan")), "NaN"),
    "logprob -inf": (put("logprob", float("-inf")), "-Infinity"),
    "logprob +inf": (put("logprob", float("inf")), "Infinity"),
    "logprob text": (put("logprob", "-1.0"), "Expected `float"),
    "logprobs of another id": (put("logprob id", 999, 999, "token_id:999"), r"id 22 .*offset 1\b.* 999"),
    "id past int64": (put("ids", [21, 2**70, 23, EOS]), "output id 1180591620717411303424 is not a token id"),
    "id float": (put("ids", [21, 22.0, 23, EOS]), "Expected `int`, got `float`"),
    "id true": (put("ids", [21, True, 23, EOS]), "Expected `int`, got `bool`"),
    "prompt_tokens": (put("prompt_tokens", 6), "prompt_tokens=6.* 5"),
    "completion_tokens": (put("completion_tokens", 3), "completion_tokens=3.* 4"),
    "two answers": (answers(2), "one completion .* 2|Expected `object`, got `array`"),
    "no answer": (answers(0), "one completion .* 0|Expected `object`, got `array`"),
    "finish without a word": (finish(""), "reason ''"),
    "no finish": (finish(None), "reason (None|'none')"),
    "stop of another id": (finish("stop", 77), "stop token 77.* 2"),
}


@pytest.mark.parametrize("name", PLANTED)
@pytest.mark.parametrize("kind", WIRES)
def test_a_planted_edit_is_refused_with_its_values(kind: Kind, name: str) -> None:
    edit, sentence = PLANTED[name]
    with pytest.raises(ProtocolViolationError, match=sentence) as caught:
        ask(kind, edit)
    assert caught.value.backend == engine_name(kind)
    assert caught.value.request_id == "r"


VERSIONED: tuple[Kind, ...] = ("vllm", "sglang")
"""The wires that tell weight versions."""


@pytest.mark.parametrize("kind", VERSIONED)
@given(cuts=st.lists(st.integers(0, 4), max_size=3))
@settings(deadline=None, max_examples=10)
def test_version_spans_that_tile_are_kept(kind: Kind, cuts: list[int]) -> None:
    edges = [0, *sorted(cuts), 4]
    reported = [(f"v{n}", start, end) for n, (start, end) in enumerate(itertools.pairwise(edges))]
    response = ask(kind, None, Completion(OUTPUT, weight_versions=[s for s in reported if s[1] < s[2]]))
    assert [(v.version, v.start, v.stop) for v in response.versions] == [s for s in reported if s[1] < s[2]]


@pytest.mark.parametrize("kind", WIRES)
@given(
    prompt=st.lists(st.integers(0, 999), min_size=1, max_size=40),
    output=st.lists(st.integers(3, 999), min_size=0, max_size=20),
    stops=st.booleans(),
)
@settings(deadline=None, max_examples=12)
def test_a_right_answer_is_accepted_and_equal_on_both_wires(
    kind: Kind, prompt: list[int], output: list[int], stops: bool
) -> None:
    expected = [*output, EOS] if stops or not output else output
    engine = engine_of(kind, lambda _: Completion(expected))
    backend = in_process_backend(engine)
    response = asyncio.run(generate(backend, request_of(prompt, max_new_tokens=len(expected))))
    other = engine_of("vllm" if kind == "sglang" else "sglang", lambda _: Completion(expected))
    twin = asyncio.run(generate(in_process_backend(other), request_of(prompt, max_new_tokens=len(expected))))
    assert response.output_ids.tolist() == expected == twin.output_ids.tolist()
    assert response.logprobs.tobytes() == twin.logprobs.tobytes()
    assert (response.finish, response.stop) == (twin.finish, twin.stop)


BODIES: dict[str, tuple[bytes, str | None, str]] = {
    "not JSON": (b"<html>Sign in</html>", "text/html", "malformed.*'<html>Sign in"),
    "not JSON, said to be": (b"<html>Sign in</html>", "application/json", "malformed.*'<html>Sign in"),
    "empty": (b"", "application/json", "its body is empty"),
    "truncated": (b'{"choices": [', "application/json", "truncated"),
    "another shape": (b'{"hello": 1}', "application/json", "missing required field"),
    "a list": (b"[1, 2]", "application/json", "got `array`"),
    "no type, no JSON": (b"hello", None, "malformed.*'hello'"),
    "not UTF-8": (b'{"a": "\xff\xfe"}', "application/json", "missing required field"),
}


@pytest.mark.parametrize("name", BODIES)
@pytest.mark.parametrize("kind", WIRES)
async def test_a_200_that_is_not_an_answer_is_refused(kind: Kind, name: str) -> None:
    body, content_type, sentence = BODIES[name]
    headers = {} if content_type is None else {"content-type": content_type}
    requests = []

    def handler(request: Received) -> WireResponse:
        if request.method == "GET":
            return http_response(200, json={"data": [{"id": "m", "max_model_len": 100}], "version": "1"})
        requests.append(request)
        return http_response(200, content=body, headers=headers)

    with pytest.raises(ProtocolViolationError, match=sentence) as caught:
        await generate(answering(kind, handler), request_of())
    assert "http://scripted" in str(caught.value)
    assert caught.value.status == 200
    assert caught.value.request_id == "r"
    assert len(requests) == 1, "it is not sent again"


@pytest.mark.parametrize("kind", WIRES)
async def test_json_is_read_whatever_its_content_type(kind: Kind) -> None:
    backend = in_process_backend(engine_of(kind, fault=always(Fault(content_type="text/plain; charset=utf-8"))))
    assert len((await generate(backend, request_of())).output_ids)
