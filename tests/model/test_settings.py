"""A rollout's settings: what each may be, word for word what it may not, and what a server makes of them."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import fields, replace
from functools import partial
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from strands.types.exceptions import MaxTokensReachedException

from support.scripted import policy_of
from tito_core import TITOModel, settings
from tito_core.backend import Capabilities, EngineInfo, OptionalOutputs, SamplingParams, UnsupportedByServerError
from tito_core.backend.resume import MAX_RESUMES, AbortPolicy
from tito_core.chat.messages import MALFORMED_CALL
from tito_core.parsing.parsed import CallStatus, ParsedCall, ParsedTurn
from tito_core.settings import RolloutOptions, Settings
from tito_core.turn.inputs import refuse_reserved_name, system_text
from tito_core.turn.read import MalformedCallError, malformed_of
from tito_core.turn.request import TotalTokensReachedError, left_of

INFO = EngineInfo("sglang", "m", 100, "1")


def said(kind: type[Exception], sentence: str, act: Callable[[], Any]) -> None:
    with pytest.raises(kind) as caught:
        act()
    assert str(caught.value) == sentence


def test_what_is_chosen_where_nothing_is() -> None:
    assert (
        Settings.of()
        == Settings()
        == Settings(
            sampling=SamplingParams(),
            context_window_limit=None,
            history="fork",
            malformed_calls="feedback",
            thinking="keep",
            on_abort="resume",
            max_resumes=MAX_RESUMES,
            turn_timeout_s=None,
            max_total_tokens=None,
            stream=False,
            optional_outputs=OptionalOutputs(),
            verify_echo="always",
            reports_ids=False,
            runs_calls=True,
        )
    )
    assert Settings().aborts == AbortPolicy("resume", MAX_RESUMES)


def test_every_option_is_declared_documented_and_checked() -> None:
    declared = {each.name for each in fields(Settings)} - {"reports_ids", "runs_calls", "aborts"}
    assert declared == RolloutOptions.__annotations__.keys() == settings._CHECKS.keys()
    documented = re.findall(r"^        (\w+): ", RolloutOptions.__doc__ or "", re.MULTILINE)
    assert documented == list(RolloutOptions.__annotations__)


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        ({"histry": "fork"}, "Unknown rollout option 'histry'. Did you mean 'history'?"),
        ({"seed": 3}, "seed is a sampling parameter: pass it as sampling={'seed': ...}."),
        (
            {"temprature": 3},
            "Unknown rollout option 'temprature'. Did you mean the sampling parameter sampling={'temperature': ...}?",
        ),
    ],
)
def test_a_name_that_is_not_declared_is_refused_with_the_nearest(wrong: dict[str, Any], sentence: str) -> None:
    said(ValueError, sentence, lambda: Settings.of(**wrong))


def test_what_is_chosen_otherwise() -> None:
    chosen = Settings.of(
        sampling={"temperature": 0.5},
        context_window_limit=50,
        history="error",
        malformed_calls="raise",
        thinking="as-template",
        on_abort="discard",
        max_resumes=2,
        turn_timeout_s=1.5,
        max_total_tokens=70,
        stream=1,  # type: ignore[arg-type]
        optional_outputs={"top_logprobs": 2},
        verify_echo="first",
    )
    assert chosen == Settings(
        sampling=SamplingParams(temperature=0.5),
        context_window_limit=50,
        history="error",
        malformed_calls="raise",
        thinking="as-template",
        on_abort="discard",
        max_resumes=2,
        turn_timeout_s=1.5,
        max_total_tokens=70,
        stream=True,
        optional_outputs=OptionalOutputs(top_logprobs=2),
        verify_echo="first",
    )
    assert chosen.stream is True


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"history": "branch"}, "history must be 'fork' or 'error', not 'branch'."),
    ({"thinking": "strip"}, "thinking must be 'keep' or 'as-template', not 'strip'."),
    ({"verify_echo": "never"}, "verify_echo must be 'always' or 'first', not 'never'."),
    ({"malformed_calls": "x"}, "malformed_calls must be 'feedback', 'end_turn' or 'raise', not 'x'."),
    *(
        ({"turn_timeout_s": bad}, f"turn_timeout_s must be a positive number of seconds, or None, not {bad!r}.")
        for bad in (0, -1.5, float("inf"), float("nan"), "5")
    ),
    *(
        (
            {"context_window_limit": bad},
            f"context_window_limit must be a number of tokens, at least 1, or None, not {bad!r}.",
        )
        for bad in (0, -1, 1.5, True, "5")
    ),
]


@pytest.mark.parametrize(("given_choice", "sentence"), REFUSED)
def test_what_cannot_be_chosen(given_choice: dict[str, Any], sentence: str) -> None:
    said(ValueError, sentence, lambda: Settings.of(**given_choice))


def test_the_least_that_still_can_be_chosen() -> None:
    chosen = Settings.of(max_total_tokens=1, context_window_limit=1, turn_timeout_s=1, malformed_calls="end_turn")
    assert (chosen.max_total_tokens, chosen.context_window_limit, chosen.turn_timeout_s) == (1, 1, 1)
    assert chosen.malformed_calls == "end_turn"
    for word in ("feedback", "end_turn", "raise"):
        assert Settings.of(malformed_calls=word).malformed_calls == word  # type: ignore[arg-type]


@given(asked=st.none() | st.integers(1, 9), served=st.none() | st.integers(1, 9))
def test_the_context_is_what_is_wanted_and_at_most_what_is_served(asked: int | None, served: int | None) -> None:
    found = Settings.of(context_window_limit=asked).at(replace(INFO, max_model_len=served)).context_window_limit
    assert found == min((limit for limit in (asked, served) if limit is not None), default=None)


def test_a_server_that_cannot_give_what_is_wanted_is_named() -> None:
    info = replace(INFO, capabilities=Capabilities(prompt_logprobs=False))
    with pytest.raises(UnsupportedByServerError) as caught:
        Settings.of(optional_outputs={"prompt_logprobs": True}).at(info)
    assert "prompt_logprobs=True" in str(caught.value)
    assert "sglang" in str(caught.value)
    assert caught.value.backend == "sglang"


def test_the_configuration_that_strands_reads() -> None:
    chosen = Settings.of(sampling={"seed": 5}, context_window_limit=50)
    assert chosen.config(INFO, "hermes") == {
        "model_id": "m",
        "backend": "sglang",
        "parser": "hermes",
        "context_window_limit": 50,
        "sampling": SamplingParams(seed=5).model_dump(),
    }


def test_changes() -> None:
    chosen = Settings.of(sampling={"temperature": 0.5, "seed": 3}, history="error", context_window_limit=50)
    changed = chosen.changed(INFO, {"temperature": 0.25, "context_window_limit": 200})
    assert changed == replace(chosen, sampling=SamplingParams(temperature=0.25, seed=3), context_window_limit=100)
    assert chosen.changed(INFO, {"sampling": {"top_p": 0.5}}).sampling == SamplingParams(top_p=0.5)
    both = chosen.changed(INFO, {"sampling": SamplingParams(top_p=0.5), "seed": 9})
    assert both == replace(chosen, sampling=SamplingParams(top_p=0.5, seed=9))
    assert chosen.changed(INFO, {"sampling": None}).sampling == SamplingParams()
    assert chosen.changed(INFO, {}) == chosen
    for fixed in ("model_id", "backend"):
        sentence = f"{fixed} is the policy's and cannot change in a rollout: make another model."
        said(ValueError, sentence, lambda fixed=fixed: chosen.changed(INFO, {fixed: "x"}))
    sentence = "wanted is the same in each turn of a rollout: make another model."
    said(ValueError, sentence, lambda: chosen.changed(INFO, {"optional_outputs": None}))


def test_a_system_prompt_in_blocks() -> None:
    blocks: Any = [{"text": "a"}, {"cachePoint": {"type": "default"}}, {"text": "b"}]
    assert system_text(None, blocks) == "a\nb"
    assert system_text("own", blocks) == "own"
    assert system_text("", blocks) == ""
    assert [system_text(None, empty) for empty in (None, [], blocks[1:2], [{"text": ""}])] == [None] * 4


def test_a_tool_of_the_reserved_name() -> None:
    specs: Any = [{"name": "look"}, {"name": MALFORMED_CALL}]
    refuse_reserved_name(None)
    refuse_reserved_name(specs[:1])
    said(
        ValueError,
        f"A tool is named {MALFORMED_CALL!r}, the name under which malformed calls are reported: rename it.",
        lambda: refuse_reserved_name(specs),
    )


@given(bound=st.none() | st.integers(1, 30), prompt=st.integers(0, 20), asked=st.integers(1, 20))
def test_what_a_bound_leaves(bound: int | None, prompt: int, asked: int) -> None:
    if bound is not None and prompt >= bound:
        sentence = (
            f"The trajectory has {prompt} tokens with what came since its last answer, and max_total_tokens={bound}, "
            "which leaves none to sample: end the rollout, or raise the bound."
        )
        said(TotalTokensReachedError, sentence, lambda: left_of(bound, prompt, asked))
    else:
        assert left_of(bound, prompt, asked) == (asked if bound is None else min(asked, bound - prompt))
    assert issubclass(TotalTokensReachedError, MaxTokensReachedException)


def call_of(status: CallStatus, name: str | None = "look", raw: str = "<raw>") -> ParsedCall:
    return ParsedCall(status, name, None, raw, 0, 1, "Why it is not." if status == CallStatus.MALFORMED else "")


def test_the_error_of_a_malformed_call() -> None:
    one = call_of(CallStatus.MALFORMED, None, "x" * 121)
    message: Any = {"role": "assistant", "content": []}
    error = MalformedCallError((one,), 3, message)
    assert str(error) == (
        "Law 9: the policy's call of an unknown tool in turn 3 is malformed and was not executed: Why it is not. It "
        f"says '{'x' * 120}...'. The turn is committed, since its tokens were sampled; malformed_calls='feedback' "
        "would let the policy read the reason."
    )
    assert (error.calls, error.turn, error.message) == ((one,), 3, message)
    three = MalformedCallError((call_of(CallStatus.MALFORMED), one, one), 0, message)
    assert "the policy's call of look in turn 0 is" in str(three)
    assert "It says '<raw>'. So were 2 more of its calls. The turn is committed" in str(three)


def test_which_calls_are_malformed() -> None:
    calls = tuple(map(call_of, CallStatus))
    assert malformed_of(ParsedTurn("", "", calls)) == (calls[list(CallStatus).index(CallStatus.MALFORMED)],)


@pytest.mark.parametrize("name", ["max_new_tokens", "stop", "stop_token_ids", "min_new_tokens", "seed"])
def test_the_name_of_a_sampling_parameter_is_sent_to_sampling(name: str) -> None:
    policy = policy_of("vllm")
    wrong: Any = {name: 1}
    for make in (policy.model, partial(TITOModel, backend="vllm", base_url="http://x", tokenizer="x")):
        with pytest.raises(ValueError, match=f"{name} is a sampling parameter"):
            make(**wrong)


@pytest.mark.parametrize("name", ["http_transport", "sleep"])
def test_what_only_a_backend_takes_is_no_setting_of_a_rollout(name: str) -> None:
    wrong: Any = {name: 1}
    with pytest.raises(ValueError, match=name):
        Settings.of(**wrong)
