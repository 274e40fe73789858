"""Every sentence about what is asked, word for word, and beside each the last value that is right."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from support.backends import request_of
from tito_core.backend import (
    AbortPolicy,
    AuthenticationError,
    BackendError,
    BadRequestError,
    Capabilities,
    ContextLengthError,
    EngineConnectionError,
    GenerationAbortedError,
    Grammar,
    OptionalOutputs,
    SamplingParams,
    UnsupportedByServerError,
    create_backend,
    generate_whole,
)
from tito_core.backend.checked import check_input_ids, check_sampling, clamp_new_tokens
from tito_core.backend.engine_info import EngineInfo
from tito_core.backend.errors import OUT_OF_VOCABULARY
from tito_core.backend.http.address import Address, api_key
from tito_core.backend.http.transport import EngineHttp
from tito_core.backend.protocol import RawResponse
from tito_core.backend.retries import Retries
from tito_core.backend.typed_values import InvalidValueError, refuse_unknown

B = "sglang"


def said(kind: type[Exception], sentence: str, act: Callable[[], Any]) -> Any:
    with pytest.raises(kind) as caught:
        act()
    assert type(caught.value) is kind
    assert str(caught.value) == sentence
    if isinstance(caught.value, BackendError):
        assert caught.value.backend == B
    return caught.value


OUTSIDE = f"so it was not sent. {OUT_OF_VOCABULARY}"
NO_PROMPT = "A prompt must be a non-empty list of token ids, got shape"
PROMPTS: list[tuple[Any, int | None, str]] = [
    ([], 10, f"{NO_PROMPT} (0,) of float64."),
    ([[1]], 10, f"{NO_PROMPT} (1, 1) of int64."),
    ([[1], [1, 2]], 10, f"{NO_PROMPT} (2,) of object."),
    ([1.0], 10, f"{NO_PROMPT} (1,) of float64."),
    ([True], 10, f"{NO_PROMPT} (1,) of bool."),
    ([0, 9, 10, -1], 10, f"Prompt token 10 at offset 2 is outside the vocabulary of 10 tokens, {OUTSIDE}"),
    ([0, -1], 10, f"Prompt token -1 at offset 1 is outside the vocabulary of 10 tokens, {OUTSIDE}"),
    ([2**31 - 1, 2**31], None, f"Prompt token 2147483648 at offset 1 is outside the vocabulary, {OUTSIDE}"),
]


@pytest.mark.parametrize(("ids", "size", "sentence"), PROMPTS)
def test_what_is_no_prompt(ids: Any, size: int | None, sentence: str) -> None:
    said(BadRequestError, sentence, lambda: check_input_ids(ids, size, backend=B))


def test_what_still_is_a_prompt() -> None:
    for ids, size in (([0, 9], 10), ([2**31 - 1], None), (np.array([3], np.uint8), 4)):
        checked = check_input_ids(ids, size, backend=B)
        assert (checked.tolist(), checked.dtype) == (list(ids), np.int32)
    same = np.array([1], np.int32)
    assert check_input_ids(same, 2, backend=B) is same


NEVER = "so it could never stop anything and the request was not sent: does the tokenizer belong to the model that the "


def test_stops_and_lengths_that_kill_a_server() -> None:
    for stops, size, sentence in (
        ((9, 10), 10, f"Stop token 10 is outside the vocabulary of 10 tokens, {NEVER}server runs?"),
        ((-1,), None, f"Stop token -1 is outside the vocabulary, {NEVER}server runs?"),
    ):
        sampling = SamplingParams.model_construct(**{**SamplingParams().model_dump(), "stop_token_ids": stops})
        said(BadRequestError, sentence, lambda sampling=sampling, size=size: check_sampling(sampling, size, backend=B))
    check_sampling(SamplingParams(stop_token_ids=(0, 9)), 10, backend=B)
    check_sampling(SamplingParams(stop_token_ids=(2**31 - 1,)), None, backend=B)
    forced = SamplingParams(grammar=Grammar(kind="regex", value="a"))
    check_sampling(forced, 10, backend=B)
    said(
        BadRequestError,
        "min_new_tokens=2 was not sent together with a grammar, which says by itself how long it is: leave "
        "min_new_tokens out.",
        lambda: check_sampling(forced.model_copy(update={"min_new_tokens": 2}), 10, backend=B),
    )


def test_a_prompt_that_leaves_no_room() -> None:
    assert [clamp_new_tokens(8, 5, most, backend=B) for most in (None, 6, 12, 13, 14)] == [8, 1, 7, 8, 8]
    said(
        ContextLengthError,
        "The prompt has 5 tokens and the context 5, which leaves no room to answer: shorten the history or start the "
        "server with a longer context.",
        lambda: clamp_new_tokens(8, 5, 5, backend=B),
    )


ITSELF = "itself, since token-exact rollouts depend on it. For n samples, make n rollouts."
SAMPLING: list[tuple[dict[str, Any], str]] = [
    ({"top_k": 0}, "top_k=0 would leave nothing to sample; use -1 for all tokens or 1 for the likeliest."),
    (
        {"temperature": 0.009},
        "temperature=0.009 is too low for engines to tell from 0: use 0 for greedy, or 0.01.",
    ),
    ({"extra": {"n": 2, "echo": True}}, f"The backend sets echo, n {ITSELF}"),
    (
        {"extra": {"max_tokens": 2}},
        "extra may not hold 'max_tokens': use the sampling parameter 'max_new_tokens', which is recorded.",
    ),
    (
        {"extra": {"top_p": 2}},
        "extra may not hold 'top_p': use the sampling parameter 'top_p', which is recorded.",
    ),
    (
        {"extra": {"priority": 2}},
        "extra may not hold 'priority': ask for it by wanted={'priority': ...}.",
    ),
    ({"extra": {"logit_bias": [5]}}, "extra: logit_bias must map token ids to numbers, not [5]."),
    (
        {"extra": {"a": {1}}},
        "extra cannot be sent as JSON (Object of type set is not JSON serializable): {'a': {1}}.",
    ),
    ({"min_new_tokens": 9, "max_new_tokens": 8}, "min_new_tokens=9 is more than max_new_tokens=8: lower it."),
    (
        {"min_new_tokens": 1, "grammar": {"kind": "regex", "value": "a"}},
        "min_new_tokens=1 and a grammar do not go together: once the grammar is complete no token is left to sample, "
        "which kills some servers. Let the grammar say how long it is.",
    ),
    ({"temprature": 1}, "There is no sampling parameter 'temprature'; did you mean 'temperature'?"),
]


@pytest.mark.parametrize(("given", "sentence"), SAMPLING)
def test_what_nobody_can_sample_with(given: dict[str, Any], sentence: str) -> None:
    with pytest.raises(InvalidValueError) as caught:
        SamplingParams(**given)
    assert str(caught.value) == sentence


def test_what_one_still_can_sample_with() -> None:
    for given in ({"temperature": 0.01}, {"top_k": 1}, {"min_new_tokens": 8, "max_new_tokens": 8}):
        assert SamplingParams.model_validate(given).model_dump() == {**SamplingParams().model_dump(), **given}
    assert SamplingParams(extra={"logit_bias": {}, "own": [None]}).extra == {"logit_bias": {}, "own": [None]}


def test_a_salt_that_vllm_refuses() -> None:
    with pytest.raises(InvalidValueError) as caught:
        OptionalOutputs(cache_salt="a@")
    assert str(caught.value) == "cache_salt may not hold '@', '/', a backslash or NUL, which some servers refuse: 'a@'."


def test_a_name_that_nobody_knows() -> None:
    known = ["alpha", "beta"]
    said(
        InvalidValueError,
        "There is no greek letter 'ALPH'; did you mean 'alpha'?",
        lambda: refuse_unknown("greek letter", {"ALPH": 1}, known),
    )
    said(
        InvalidValueError,
        "There is no greek letter 5. Known: alpha, beta.",
        lambda: refuse_unknown("greek letter", {"beta": 1, 5: 1}, known),
    )
    refuse_unknown("greek letter", {"alpha": 1}, known)
    refuse_unknown("greek letter", [5], known)


MASKED = (
    "sampling_mask=True is wanted with all tokens to choose from: set top_k, so that the ids that are left fit into an "
    "answer."
)
CAPABILITIES: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    (
        {"top_logprobs": 3},
        {"top_logprobs": 2},
        "top_logprobs=3 is more than this sglang server gives, which is 2: lower it.",
    ),
    (
        {"top_logprobs": 3},
        {"top_logprobs": 2, "options": {"top_logprobs": "--max-logprobs"}},
        "top_logprobs=3 is more than this sglang server gives, which is 2: lower it, or start the server with a "
        "greater --max-logprobs.",
    ),
    (
        {"prompt_logprobs": True},
        {"prompt_logprobs": False},
        "prompt_logprobs=True is wanted, and this sglang server does not give it: leave it out.",
    ),
    (
        {"priority": 0},
        {"priority": False, "options": {"priority": "--by-priority"}},
        "priority=0 is wanted, and this sglang server does not give it: start the server with --by-priority.",
    ),
    (
        {"sampling_mask": True},
        {"sampling_mask": False},
        "sampling_mask=True is wanted, and this sglang server does not give it: leave it out.",
    ),
    (
        {"routed_experts": (2, 2)},
        {"routed_experts": False},
        "routed_experts=(2, 2) is wanted, and this sglang server does not give it: leave it out.",
    ),
    (
        {"routed_experts": True},
        {"expert_shape": False},
        "routed_experts=True is wanted, and this sglang server does not say of how many layers they are: give "
        "routed_experts=(layers, experts a token), as the model's configuration has them.",
    ),
    ({"sampling_mask": True}, {}, MASKED),
]


@pytest.mark.parametrize(("optional_outputs", "can", "sentence"), CAPABILITIES)
def test_what_a_server_cannot_give(optional_outputs: dict[str, Any], can: dict[str, Any], sentence: str) -> None:
    def check() -> None:
        Capabilities(**can).check(OptionalOutputs.of(optional_outputs), SamplingParams(), backend=B)

    said(UnsupportedByServerError, sentence, check)


def test_what_a_server_may_still_give() -> None:
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


def test_choices_about_aborts() -> None:
    with pytest.raises(ValueError, match=r"^on_abort must be 'resume', 'discard' or 'commit', not 'stop'\.$"):
        AbortPolicy("stop")
    for bad in (-1, True, 1.0):
        with pytest.raises(ValueError, match=rf"^max_resumes must be a whole number, at least 0, not {bad}\.$"):
            AbortPolicy("resume", bad)
    assert AbortPolicy("discard", 0).max_resumes == 0


class Aborting:
    """A backend that aborts everything, after so many tokens."""

    name = B

    def __init__(self, tokens: int, message: str | None = None) -> None:
        self.tokens, self.message = tokens, message

    async def connect(self) -> EngineInfo:
        return EngineInfo(B, "m", None, None)

    async def generate(self, request: Any, on_chunk: Any = None) -> RawResponse:
        return RawResponse(
            finish="abort",
            output_ids=[7] * self.tokens,
            logprobs=[-1.0] * self.tokens,
            echoed=request.input_ids,
            prompt_tokens=len(request.input_ids),
            completion_tokens=self.tokens,
            message=self.message,
        )


GONE = "its partial tokens were discarded and the ledger is as before."
ABORTED: list[tuple[AbortPolicy, Aborting, dict[str, Any], bool, str]] = [
    (
        AbortPolicy("discard"),
        Aborting(2, "paused"),
        {},
        False,
        f"sglang aborted the generation (paused); {GONE} on_abort='resume' would go on from them. Run the turn again.",
    ),
    (
        AbortPolicy("commit"),
        Aborting(0),
        {},
        False,
        f"sglang aborted the generation; {GONE} There were none to commit. Run the turn again.",
    ),
    (
        AbortPolicy("resume", 0),
        Aborting(1),
        {},
        False,
        f"sglang aborted the generation; {GONE} It was resumed 0 times, as max_resumes allows, and aborted each time. "
        "Run the turn again.",
    ),
    (
        AbortPolicy("resume"),
        Aborting(1),
        {"stop": ("x",)},
        True,
        f"sglang aborted the generation; {GONE} An answer with a grammar or stop strings cannot be resumed, and not be "
        "sampled again once it was shown. Run the turn again.",
    ),
]


@pytest.mark.parametrize(("policy", "backend", "sampling", "shown", "sentence"), ABORTED)
async def test_an_abort_that_is_an_error(
    policy: AbortPolicy, backend: Any, sampling: dict[str, Any], shown: bool, sentence: str
) -> None:
    watcher = (lambda _: None) if shown else None
    with pytest.raises(GenerationAbortedError) as caught:
        await generate_whole(backend, request_of(**sampling), policy, watcher)
    assert str(caught.value) == sentence
    assert (caught.value.backend, caught.value.request_id) == (B, "r")


LIKE = "give an address like 'http://localhost:8000'."
ADDRESSES: list[tuple[Any, str]] = [
    (
        "unix://run/a.sock",
        "'unix://run/a.sock' names no Unix socket: give its whole path, like 'unix:///run/server.sock'.",
    ),
    ("http://user:hunter2@h", f"The server address holds a user name or password; give the key as api_key: {LIKE}"),
    ("ftp://h", f"'ftp://h' is no server address: {LIKE}"),
    ("http://", f"'http://' is no server address: {LIKE}"),
    ("http://h:65536", f"'http://h:65536' is no server address (Port out of range 0-65535): {LIKE}"),
    ("http://h:0", f"'http://h:0' has no port between 1 and 65535: {LIKE}"),
    ("http://h?a=1", f"'http://h?a=1' holds a query or a fragment: {LIKE}"),
    ("http://h/v1", f"'http://h/v1' ends in /v1, which is not the server's root: {LIKE}"),
    (None, f"None is no server address: {LIKE}"),
]


@pytest.mark.parametrize(("given", "sentence"), ADDRESSES)
def test_what_is_no_address(given: Any, sentence: str) -> None:
    said(EngineConnectionError, sentence, lambda: Address.of(given, backend=B))


def test_what_still_is_an_address() -> None:
    assert Address.of("http://h:65535/a/", backend=B).root == "http://h:65535/a"
    assert Address.of("http://h:1", backend=B).shown == "http://h:1"


def test_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    sentence = "The API key holds characters that no HTTP header can: check api_key or TITO_API_KEY."
    for bad in ("k\u00e9y", "a\nb"):
        said(AuthenticationError, sentence, lambda bad=bad: api_key(bad, backend=B))
    monkeypatch.delenv("TITO_API_KEY", raising=False)
    assert [api_key(given, backend=B) for given in (None, "", " key\n")] == [None, None, "key"]
    monkeypatch.setenv("TITO_API_KEY", " of-the-environment ")
    assert api_key(None, backend=B) == "of-the-environment"
    assert api_key("own", backend=B) == "own"
    assert api_key("", backend=B) is None


def test_backends_by_name() -> None:
    said(
        InvalidValueError,
        "base_url is an empty list: give at least one address, like 'http://localhost:8000'.",
        lambda: create_backend("vllm", []),
    )
    said(
        InvalidValueError,
        "base_url has 'http://a' twice: each server is listed once.",
        lambda: create_backend("vllm", ["http://a", "http://b", "http://b", "http://a"]),
    )


def test_bounds_of_tries_and_time() -> None:
    said(InvalidValueError, "max_attempts must be a whole number, at least 1, not 0.", lambda: Retries(0))
    assert (Retries(1).max_attempts, Retries().max_attempts) == (1, 4)
    for bad in (0, -1.5, float("inf"), float("nan"), True, 10**400, 10**5000):
        for name in ("timeout_s", "connect_timeout_s"):
            with pytest.raises(
                InvalidValueError, match=f"^{name} must be a positive number of seconds, not .{{1,99}}$"
            ):
                EngineHttp(B, "http://h", **{name: bad})
    for bad in (-1, True, 1.5, None):
        with pytest.raises(InvalidValueError, match=f"max_connections must be a whole number, at least 0, not {bad}"):
            EngineHttp(B, "http://h", max_connections=bad)
    http = EngineHttp(B, "http://h", timeout_s=0.5)
    assert (http.timeout_s, http.connect_timeout_s) == (0.5, 0.5)
    assert EngineHttp(B, "http://h").connect_timeout_s == 5.0
