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
    choice,
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


# What both wires have, under one name.


def echo(answer: Any) -> list[Any]:
    return holder(answer)["prompt_token_ids"]


def holder(answer: Any) -> Any:
    """The part that holds the echo, which of vLLM's two endpoints one has in the choice."""
    return answer if "prompt_token_ids" in answer else choice(answer)


def content(answer: Any) -> Any:
    """The logprobs of vLLM's own endpoint; None on another wire."""
    return choice(answer)["logprobs"].get("content") if "choices" in answer else None


def set_logprob(value: Any, at: int = 1) -> Edit:
    def edit(answer: Any) -> None:
        if content(answer):
            content(answer)[at]["logprob"] = value
        elif "choices" in answer:
            answer["choices"][0]["logprobs"]["token_logprobs"][at] = value
        else:
            answer["meta_info"]["output_token_logprobs"][at][0] = value

    return edit


def no_logprobs(answer: Any) -> None:
    if "choices" in answer:
        answer["choices"][0]["logprobs"] = None
    else:
        del answer["meta_info"]["output_token_logprobs"]


def set_count(name: str, value: Any) -> Edit:
    def edit(answer: Any) -> None:
        (answer["usage"] if "usage" in answer else answer["meta_info"])[name] = value

    return edit


def set_finish(reason: Any, stop: Any = None) -> Edit:
    def edit(answer: Any) -> None:
        if "choices" in answer:
            answer["choices"][0] |= {"finish_reason": reason, "stop_reason": stop}
        else:
            found = {"type": reason, "matched": stop} if reason is not None else None
            answer["meta_info"]["finish_reason"] = found

    return edit


def set_logprob_id(answer: Any) -> None:
    if content(answer):
        content(answer)[1]["token_id"] = 999
    elif "choices" in answer:
        answer["choices"][0]["logprobs"]["tokens"][1] = "token_id:999"
    else:
        answer["meta_info"]["output_token_logprobs"][1][1] = 999


def set_echo(value: Any) -> Edit:
    return lambda answer: holder(answer).update(prompt_token_ids=value)


def set_ids(value: Any) -> Edit:
    return lambda answer: choice(answer).update({"token_ids" if "choices" in answer else "output_ids": value})


def no_echo(answer: Any) -> None:
    del holder(answer)["prompt_token_ids"]


def two_choices(answer: Any) -> Any:
    if "choices" in answer:
        answer["choices"] *= 2
        return answer
    return [answer, answer]


def no_choice(answer: Any) -> Any:
    if "choices" in answer:
        answer["choices"] = []
        return answer
    return []


# What the core decides of any backend's answer is in test_validation.py; here is what each wire reads.
PLANTED: dict[str, tuple[Edit, str]] = {
    "echo edited": (set_echo([11, 12, 99, 14, 15]), "prompt id 13 at offset 2 .* 99"),
    "echo missing": (set_echo(None), "did not echo"),
    "echo absent": (no_echo, "did not echo"),
    "logprobs missing": (no_logprobs, "no logprobs"),
    "logprob None": (set_logprob(None), r"output token 1 \(id 22\)"),
    "logprob NaN": (set_logprob(float("nan")), "NaN"),
    "logprob -inf": (set_logprob(float("-inf")), "-Infinity"),
    "logprob +inf": (set_logprob(float("inf")), "Infinity"),
    "logprob text": (set_logprob("-1.0"), "Expected `float"),
    "logprobs of another id": (set_logprob_id, r"id 22 .*offset 1\b.* 999"),
    "id past int64": (set_ids([21, 2**70, 23, EOS]), "output id 1180591620717411303424 is not a token id"),
    "id float": (set_ids([21, 22.0, 23, EOS]), "Expected `int`, got `float`"),
    "id true": (set_ids([21, True, 23, EOS]), "Expected `int`, got `bool`"),
    "prompt_tokens": (set_count("prompt_tokens", 6), "prompt_tokens=6.* 5"),
    "completion_tokens": (set_count("completion_tokens", 3), "completion_tokens=3.* 4"),
    "two answers": (two_choices, "one completion .* 2|Expected `object`, got `array`"),
    "no answer": (no_choice, "one completion .* 0|Expected `object`, got `array`"),
    "finish without a word": (set_finish(""), "reason ''"),
    "no finish": (set_finish(None), "reason (None|'none')"),
    "stop of another id": (set_finish("stop", 77), "stop token 77.* 2"),
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
