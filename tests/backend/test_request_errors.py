"""Requests, options and addresses: each wrong value is refused, and the nearest right value is accepted."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from support.backends import http_to, request_of
from tito_core.backend import (
    AuthenticationError,
    BackendError,
    BadRequestError,
    Capabilities,
    ContextLengthError,
    GenerationAbortedError,
    Grammar,
    OnAbort,
    OptionalOutputs,
    SamplingParams,
    UnsupportedByServerError,
    generate_resuming,
)
from tito_core.backend.generate import check_input_ids, check_sampling, clamp_new_tokens
from tito_core.backend.http.connection import checked_key
from tito_core.backend.protocol import EngineInfo, RawResponse
from tito_core.backend.retries import Retries
from tito_core.backend.values import InvalidValueError, refuse_unknown

B = "sglang"


def refused(kind: type[Exception], pattern: str, act: Callable[[], Any]) -> Any:
    with pytest.raises(kind, match=pattern) as caught:
        act()
    assert type(caught.value) is kind
    if isinstance(caught.value, BackendError):
        assert caught.value.backend == B
    return caught.value


PROMPTS: list[tuple[Any, int | None, str]] = [
    ([], 10, r"non-empty list.*\(0,\) of float64"),
    ([[1]], 10, r"non-empty list.*\(1, 1\) of int64"),
    ([[1], [1, 2]], 10, r"non-empty list.*\(2,\) of object"),
    ([1.0], 10, r"\(1,\) of float64"),
    ([True], 10, r"\(1,\) of bool"),
    ([0, 9, 10, -1], 10, "Prompt token 10 at offset 2 .* 10 tokens.*not sent.*tokenizer"),
    ([0, -1], 10, "Prompt token -1 at offset 1 .* 10 tokens"),
    ([2**31 - 1, 2**31], None, "Prompt token 2147483648 at offset 1 .*outside the vocabulary,"),
]


@pytest.mark.parametrize(("ids", "size", "pattern"), PROMPTS)
def test_an_invalid_prompt_is_refused(ids: Any, size: int | None, pattern: str) -> None:
    refused(BadRequestError, pattern, lambda: check_input_ids(ids, size, backend=B))


def test_valid_prompts_are_accepted() -> None:
    for ids, size in (([0, 9], 10), ([2**31 - 1], None), (np.array([3], np.uint8), 4)):
        checked = check_input_ids(ids, size, backend=B)
        assert (checked.tolist(), checked.dtype) == (list(ids), np.int32)
    same = np.array([1], np.int32)
    assert check_input_ids(same, 2, backend=B) is same


def test_parameters_that_crash_a_server_are_refused() -> None:
    for stops, size, pattern in (
        ((9, 10), 10, "Stop token 10 .* 10 tokens.*not sent.*tokenizer"),
        ((-1,), None, "Stop token -1 .*outside the vocabulary,"),
    ):
        sampling = SamplingParams.model_construct(**{**SamplingParams().model_dump(), "stop_token_ids": stops})
        refused(
            BadRequestError, pattern, lambda sampling=sampling, size=size: check_sampling(sampling, size, backend=B)
        )
    check_sampling(SamplingParams(stop_token_ids=(0, 9)), 10, backend=B)
    check_sampling(SamplingParams(stop_token_ids=(2**31 - 1,)), None, backend=B)
    forced = SamplingParams(grammar=Grammar(kind="regex", value="a"))
    check_sampling(forced, 10, backend=B)
    refused(
        BadRequestError,
        "min_new_tokens=2 .*grammar.*not sent: leave min_new_tokens out",
        lambda: check_sampling(forced.model_copy(update={"min_new_tokens": 2}), 10, backend=B),
    )


def test_a_prompt_that_leaves_no_room() -> None:
    assert [clamp_new_tokens(8, 5, most, backend=B) for most in (None, 6, 12, 13, 14)] == [8, 1, 7, 8, 8]
    refused(
        ContextLengthError,
        "prompt has 5 tokens.*context 5.*Shorten the history",
        lambda: clamp_new_tokens(8, 5, 5, backend=B),
    )


SAMPLING: list[tuple[dict[str, Any], str]] = [
    ({"top_k": 0}, "top_k=0 .*-1"),
    ({"temperature": 0.009}, r"temperature=0\.009 .*0\.01"),
    ({"extra": {"n": 2, "echo": True}}, "extra .*echo, n:"),
    ({"extra": {"max_tokens": 2}}, "extra .*'max_tokens'.*'max_new_tokens'"),
    ({"extra": {"top_p": 2}}, "extra .*'top_p': use the sampling parameter 'top_p'"),
    ({"extra": {"priority": 2}}, "extra .*'priority'.*optional_outputs={'priority'"),
    ({"extra": {"logit_bias": [5]}}, r"logit_bias .*\[5\]"),
    ({"extra": {"a": {1}}}, r"JSON .*set.*\{'a': \{1\}\}"),
    ({"min_new_tokens": 9, "max_new_tokens": 8}, "min_new_tokens=9 .*max_new_tokens=8"),
    ({"min_new_tokens": 1, "grammar": {"kind": "regex", "value": "a"}}, "min_new_tokens=1 .*grammar"),
    ({"temprature": 1}, "sampling parameter 'temprature'.*'temperature'"),
]


@pytest.mark.parametrize(("given", "pattern"), SAMPLING)
def test_wrong_sampling_parameters_are_refused(given: dict[str, Any], pattern: str) -> None:
    with pytest.raises(InvalidValueError, match=pattern):
        SamplingParams(**given)


def test_valid_sampling_parameters_are_accepted() -> None:
    for given in ({"temperature": 0.01}, {"top_k": 1}, {"min_new_tokens": 8, "max_new_tokens": 8}):
        assert SamplingParams.model_validate(given).model_dump() == {**SamplingParams().model_dump(), **given}
    assert SamplingParams(extra={"logit_bias": {}, "own": [None]}).extra == {"logit_bias": {}, "own": [None]}


def test_a_salt_that_vllm_refuses() -> None:
    with pytest.raises(InvalidValueError, match=r"cache_salt .*'a@'"):
        OptionalOutputs(cache_salt="a@")


def test_an_unknown_name_suggests_or_lists() -> None:
    known = ["alpha", "beta"]
    refused(
        InvalidValueError,
        "greek letter 'ALPH'.*'alpha'",
        lambda: refuse_unknown("greek letter", {"ALPH": 1}, known),
    )
    refused(
        InvalidValueError,
        "greek letter 5.*alpha, beta",
        lambda: refuse_unknown("greek letter", {"beta": 1, 5: 1}, known),
    )
    refuse_unknown("greek letter", {"alpha": 1}, known)
    refuse_unknown("greek letter", [5], known)


CAPABILITIES: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({"top_logprobs": 3}, {"top_logprobs": 2}, r"top_logprobs=3 .* 2\. Lower it\."),
    (
        {"top_logprobs": 3},
        {"top_logprobs": 2, "options": {"top_logprobs": "--max-logprobs"}},
        "top_logprobs=3 .* 2.*--max-logprobs",
    ),
    ({"prompt_logprobs": True}, {"prompt_logprobs": False}, "prompt_logprobs=True .*sglang.*Leave it out"),
    (
        {"priority": 0},
        {"priority": False, "options": {"priority": "--by-priority"}},
        "priority=0 .*sglang.*Start the server with --by-priority",
    ),
    ({"sampling_mask": True}, {"sampling_mask": False}, "sampling_mask=True "),
    ({"routed_experts": (2, 2)}, {"routed_experts": False}, r"routed_experts=\(2, 2\) "),
    ({"routed_experts": True}, {"expert_shape": False}, r"routed_experts=True .*\(layers, experts"),
    ({"sampling_mask": True}, {}, "sampling_mask=True .*top_k"),
]


@pytest.mark.parametrize(("optional_outputs", "can", "pattern"), CAPABILITIES)
def test_an_unsupported_output_is_refused(optional_outputs: dict[str, Any], can: dict[str, Any], pattern: str) -> None:
    def check() -> None:
        Capabilities(**can).check(OptionalOutputs.of(optional_outputs), SamplingParams(), backend=B)

    refused(UnsupportedByServerError, pattern, check)


def test_supported_outputs_are_accepted() -> None:
    every = {"top_logprobs": 2, "prompt_logprobs": True, "routed_experts": True, "priority": 1, "sampling_mask": True}
    for can in (Capabilities(), Capabilities(2, True, True, True, True, True)):
        can.check(OptionalOutputs.of(every), SamplingParams(top_k=1), backend=B)
        can.check(OptionalOutputs.of(every), SamplingParams(temperature=0.0), backend=B)
    nothing = Capabilities(0, False, False, False, False, False)
    nothing.check(OptionalOutputs(), SamplingParams(), backend=B)
    nothing.check(OptionalOutputs(cache_salt="s"), SamplingParams(), backend=B)
    assert nothing.service_fields(OptionalOutputs(priority=3, cache_salt="s")) == {"priority": 3, "cache_salt": "s"}
    assert replace(nothing, lower_first=True).service_fields(OptionalOutputs(priority=3)) == {"priority": -3}
    assert nothing.service_fields(OptionalOutputs()) == {}


class Aborting:
    """A backend that aborts every generation after a number of tokens."""

    name = B

    def __init__(self, tokens: int, message: str | None = None) -> None:
        self.tokens, self.message = tokens, message

    async def connect(self) -> EngineInfo:
        return EngineInfo(B, "m", None, None)

    async def generate(self, request: Any, on_chunk: Any = None) -> RawResponse:
        return RawResponse(
            response_id=request.request_id,
            finish="abort",
            output_ids=[7] * self.tokens,
            logprobs=[-1.0] * self.tokens,
            echoed=request.input_ids,
            prompt_tokens=len(request.input_ids),
            completion_tokens=self.tokens,
            message=self.message,
        )


ABORTED: list[tuple[OnAbort, Aborting, dict[str, Any], bool, str]] = [
    ("discard", Aborting(2, "paused"), {}, False, r"\(paused\).*on_abort='resume'"),
    ("commit", Aborting(0), {}, False, "no tokens to commit.*Run the turn again"),
    ("resume", Aborting(1), {"stop": ("x",)}, True, "stop strings.*streamed"),
]


@pytest.mark.parametrize(("on_abort", "backend", "sampling", "streams", "pattern"), ABORTED)
async def test_an_abort_that_is_an_error(
    on_abort: OnAbort, backend: Any, sampling: dict[str, Any], streams: bool, pattern: str
) -> None:
    on_chunk = (lambda _: None) if streams else None
    with pytest.raises(GenerationAbortedError, match=pattern) as caught:
        await generate_resuming(backend, request_of(**sampling), on_abort, on_chunk)
    assert (caught.value.backend, caught.value.request_id) == (B, "r")


def test_the_api_key(monkeypatch: pytest.MonkeyPatch) -> None:
    for bad in ("k\u00e9y", "a\nb"):
        refused(AuthenticationError, "API key.*api_key or TITO_API_KEY", lambda bad=bad: checked_key(bad, backend=B))
    monkeypatch.delenv("TITO_API_KEY", raising=False)
    assert [checked_key(given, backend=B) for given in (None, "", " key\n")] == [None, None, "key"]
    monkeypatch.setenv("TITO_API_KEY", " of-the-environment ")
    assert checked_key(None, backend=B) == "of-the-environment"
    assert checked_key("own", backend=B) == "own"
    assert checked_key("", backend=B) is None


def test_limits_of_retries_and_timeouts() -> None:
    refused(InvalidValueError, "patience_s .*or 0, not -1", lambda: Retries(-1))
    assert (Retries(0).patience_s, Retries().patience_s) == (0, 60)
    for bad in (0, -1.5, float("inf"), float("nan"), True, 10**400, 10**5000):
        for name in ("timeout_s", "connect_timeout_s"):
            with pytest.raises(InvalidValueError, match=f"^{name} must be a positive number.{{1,120}}\n"):
                http_to(B, "http://h", **{name: bad})
    for bad in (-1, True, 1.5, None):
        with pytest.raises(InvalidValueError, match=f"max_connections .*at least 0.* {bad}"):
            http_to(B, "http://h", max_connections=bad)
    http = http_to(B, "http://h", timeout_s=0.5)
    assert (http.connection.timeout_s, http.connection.connect_timeout_s) == (0.5, 0.5)
    assert http_to(B, "http://h").connection.connect_timeout_s == 5.0
