"""A rollout's settings: defaults, allowed values, errors of the others, and the server's limits."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable
from dataclasses import fields, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from strands.types.exceptions import MaxTokensReachedException

from support.scripted import policy_of
from tito_core import TITOModel, settings
from tito_core.backend import EngineInfo, OptionalOutputs, SamplingOptions, SamplingParams
from tito_core.backend.values import InvalidValueError
from tito_core.parsing.completion import CallStatus, ParsedCall
from tito_core.policy import PolicyOptions
from tito_core.settings import RolloutOptions, Settings
from tito_core.turn.answer import MalformedCallError
from tito_core.turn.inputs import system_text
from tito_core.turn.request import TotalTokensReachedError, remaining_tokens

INFO = EngineInfo("sglang", "m", 100, "1")


def check_error(kind: type[Exception], parts: Iterable[str], act: Callable[[], Any]) -> None:
    """Check that a call raises an error with these values and remedies."""
    with pytest.raises(kind) as caught:
        act()
    assert [part for part in parts if part not in str(caught.value)] == [], str(caught.value)


def test_the_defaults() -> None:
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
            turn_timeout_s=None,
            max_total_tokens=None,
            stream=False,
            optional_outputs=OptionalOutputs(),
            verify_echo="always",
            reports_ids=False,
            runs_calls=True,
        )
    )


def test_every_sampling_parameter_is_typed_as_an_option() -> None:
    assert list(SamplingOptions.__annotations__) == list(SamplingParams.model_fields)


def test_every_option_is_declared_documented_and_checked() -> None:
    declared = {each.name for each in fields(Settings)} - {"reports_ids", "runs_calls"}
    assert declared == RolloutOptions.__annotations__.keys() == settings._CHECKS.keys()
    documented = re.findall(r"^    (\w+): ", inspect.cleandoc(RolloutOptions.__doc__ or ""), re.MULTILINE)
    assert documented == list(RolloutOptions.__annotations__)


@pytest.mark.parametrize(
    ("wrong", "parts"),
    [
        ({"histry": "fork"}, ("'histry'", "'history'")),
        ({"seed": 3}, ("seed", "sampling={'seed'")),
        ({"temprature": 3}, ("'temprature'", "sampling={'temperature'")),
    ],
)
def test_an_unknown_name_is_refused_with_the_nearest(wrong: dict[str, Any], parts: tuple[str, ...]) -> None:
    check_error(InvalidValueError, parts, lambda: Settings.of(**wrong))


def test_other_values() -> None:
    chosen = Settings.of(
        sampling={"temperature": 0.5},
        context_window_limit=50,
        history="error",
        malformed_calls="raise",
        thinking="as-template",
        on_abort="discard",
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
        turn_timeout_s=1.5,
        max_total_tokens=70,
        stream=True,
        optional_outputs=OptionalOutputs(top_logprobs=2),
        verify_echo="first",
    )
    assert chosen.stream is True


REFUSED: list[tuple[dict[str, Any], tuple[str, ...]]] = [
    ({"history": "branch"}, ("history", "'fork'", "'error'", "'branch'")),
    ({"thinking": "strip"}, ("thinking", "'keep'", "'as-template'", "'strip'")),
    ({"verify_echo": "never"}, ("verify_echo", "'always'", "'first'", "'never'")),
    ({"malformed_calls": "x"}, ("malformed_calls", "'feedback'", "'end_turn'", "'raise'", "'x'")),
    ({"on_abort": "x"}, ("on_abort", "'resume'", "'discard'", "'commit'", "'x'")),
    ({"stream": "no"}, ("stream", "True", "False", "'no'")),
    *(
        ({"turn_timeout_s": bad}, ("turn_timeout_s", "positive", "seconds", repr(bad)))
        for bad in (0, -1.5, float("inf"), float("nan"), "5")
    ),
    *(
        ({name: bad}, (name, "tokens", "at least 1", repr(bad)))
        for name in ("context_window_limit", "max_total_tokens")
        for bad in (0, -1, 1.5, True, "5")
    ),
]


@pytest.mark.parametrize(("options", "parts"), REFUSED)
def test_bad_values(options: dict[str, Any], parts: tuple[str, ...]) -> None:
    check_error(InvalidValueError, parts, lambda: Settings.of(**options))


@given(limit=st.none() | st.integers(1, 9), served=st.none() | st.integers(1, 9))
def test_the_context_limit_is_at_most_the_servers(limit: int | None, served: int | None) -> None:
    used = Settings.of(context_window_limit=limit).at(replace(INFO, max_model_len=served)).context_window_limit
    assert used == min((each for each in (limit, served) if each is not None), default=None)


def test_the_configuration_for_strands() -> None:
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
        check_error(ValueError, (fixed, "another model"), lambda fixed=fixed: chosen.changed(INFO, {fixed: "x"}))
    parts = ("optional_outputs", "another model")
    check_error(ValueError, parts, lambda: chosen.changed(INFO, {"optional_outputs": None}))


def test_a_system_prompt_in_blocks() -> None:
    blocks: Any = [{"text": "a"}, {"cachePoint": {"type": "default"}}, {"text": "b\n"}, {"text": ""}]
    assert system_text(None, blocks) == "a\nb\n\n"
    assert system_text("own", blocks) == "own"
    assert system_text("", blocks) == ""
    assert [system_text(None, empty) for empty in (None, [], blocks[1:2], [{"text": ""}])] == [None] * 4


@given(bound=st.none() | st.integers(1, 30), prompt=st.integers(0, 20), new=st.integers(1, 20))
def test_the_tokens_that_a_bound_leaves(bound: int | None, prompt: int, new: int) -> None:
    if bound is not None and prompt >= bound:
        parts = (f" {prompt} tokens", f"max_total_tokens={bound} ")
        check_error(TotalTokensReachedError, parts, lambda: remaining_tokens(bound, prompt, new))
    else:
        assert remaining_tokens(bound, prompt, new) == (new if bound is None else min(new, bound - prompt))
    assert issubclass(TotalTokensReachedError, MaxTokensReachedException)


def call_of(status: CallStatus, name: str | None = "look", raw: str = "<raw>") -> ParsedCall:
    return ParsedCall(status, name, None, raw, 0, 1, "Why it is not." if status == CallStatus.MALFORMED else "")


def test_the_error_of_a_malformed_call() -> None:
    one = call_of(CallStatus.MALFORMED, None, "x" * 121)
    message: Any = {"role": "assistant", "content": []}
    error = MalformedCallError((one,), 3, message)
    parts = ["Law 9", "unknown tool", "turn 3", "Why it is not.", f"'{'x' * 120}...'", "malformed_calls='feedback'"]
    assert [part for part in parts if part not in str(error)] == []
    assert (error.calls, error.turn, error.message) == ((one,), 3, message)
    three = MalformedCallError((call_of(CallStatus.MALFORMED), one, one), 0, message)
    assert [part for part in ("look", "turn 0", "'<raw>'", " 2 more ") if part not in str(three)] == []


@pytest.mark.parametrize("name", ["http_transport", "sleep"])
def test_a_backends_option_is_not_a_rollouts(name: str) -> None:
    wrong: Any = {name: 1}
    with pytest.raises(ValueError, match=name):
        Settings.of(**wrong)


CONNECT: dict[str, Any] = {"backend": "vllm", "base_url": "http://127.0.0.1:9", "tokenizer": "none"}


BELONGS = {
    "sampling={'max_new_tokens': ...}": "max_tokens max_completion_tokens max_length max_new_tokens",
    "sampling={'temperature': ...}": "temperature do_sample",
    "sampling={'seed': ...}": "seed sampling_seed",
    "sampling={'stop': ...}": "stop stop_sequences",
    "sampling={'stop_token_ids': ...}": "stop_token_ids eos_token_id",
    "sampling={'min_new_tokens': ...}": "min_new_tokens min_tokens",
    "sampling={'grammar': ...}": "json_schema guided_json response_format",
    "sampling={'extra': {'logit_bias': ...}}": "logit_bias",
    "optional_outputs={'top_logprobs': ...}": "top_logprobs top_logprobs_num",
    "optional_outputs={'prompt_logprobs': ...}": "prompt_logprobs",
    "optional_outputs={'routed_experts': ...}": "return_routed_experts",
    "is always on": "logprobs",
    "for n samples, run n rollouts": "n num_return_sequences",
}


@pytest.mark.parametrize(("name", "hint"), [(name, hint) for hint in BELONGS for name in BELONGS[hint].split()])
def test_a_sampling_field_of_any_library_says_where_it_belongs(name: str, hint: str) -> None:
    policy, given = policy_of("vllm"), {name: 1}
    for take in (
        lambda: TITOModel(**CONNECT, **given),
        lambda: type(policy).connect(**CONNECT, **given),
        lambda: policy.model(**given),
        lambda: Settings.of(**given),
    ):
        with pytest.raises(InvalidValueError, match=f"^{name} .*{re.escape(hint)}"):
            take()


def test_an_option_of_the_other_function_names_it() -> None:
    policy = policy_of("vllm")
    for name in RolloutOptions.__annotations__:
        with pytest.raises(
            InvalidValueError, match=rf"{name} is an option of a rollout.*policy\.model\({name}=\.\.\.\)"
        ):
            type(policy).connect(**CONNECT, **{name: None})  # type: ignore[arg-type]
    for name in (*PolicyOptions.__annotations__, "backend", "base_url", "tokenizer"):
        with pytest.raises(
            InvalidValueError, match=rf"{name} is an option of a policy.*Policy\.connect\({name}=\.\.\.\)"
        ):
            policy.model(**{name: None})  # type: ignore[arg-type]


def test_a_copy_of_sampling_parameters_is_checked_and_shares_nothing_with_its_maker() -> None:
    """Pydantic checks no update of `model_copy`, by which frozen parameters are changed."""
    update: dict[str, Any] = {"extra": {"logit_bias": {"5": 1.0}}}
    settings = Settings.of(sampling=SamplingParams().model_copy(update=update))
    update["extra"]["logit_bias"]["5"] = -100.0
    assert settings.sampling.extra == {"logit_bias": {"5": 1.0}}
    for wrong in ({"temperature": 0.001}, {"tempratur": 1.0}, {"extra": {"n": 2}}):
        with pytest.raises(InvalidValueError):
            Settings.of(sampling=SamplingParams().model_copy(update=wrong))


FORCING = (
    *("thinking_token_budget", "max_thinking_tokens", "trace_decode_token_ids", "custom_logit_processor"),
    *("custom_params", "extra_args", "watermark", "watermarking", "allowed_token_ids", "kv_transfer_params"),
    *("lora_path", "session_params", "require_reasoning"),
)


@pytest.mark.parametrize("name", FORCING)
def test_a_field_that_makes_tokens_of_another_source_is_refused_with_its_reason(name: str) -> None:
    check_error(
        InvalidValueError, (f"must not contain {name!r}: ",), lambda: Settings.of(sampling={"extra": {name: 4}})
    )


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
def test_extra_has_the_fields_of_a_list_of_each_engine(kind: str) -> None:
    info = policy_of(kind).info
    assert info.extra_fields is not None
    for name in info.extra_fields:
        Settings.of(sampling={"extra": {name: {} if name == "logit_bias" else "a"}}).at(info)
    for wrong, parts in (("logit_bais", ("'logit_bais'", "'logit_bias'")), ("vllm_xargs", ("'vllm_xargs'", kind))):
        settings = Settings.of(sampling={"extra": {wrong: {}}})
        check_error(InvalidValueError, parts, lambda settings=settings: settings.at(info))
    settings = Settings.of()
    check_error(InvalidValueError, ("logit_bais",), lambda: settings.changed(info, {"extra": {"logit_bais": {}}}))
    unknown = replace(info, extra_fields=None)  # a third party's
    assert Settings.of(sampling={"extra": {"own": 1}}).at(unknown).sampling.extra == {"own": 1}


@given(bias=st.floats(-100, 100))
def test_a_bias_that_chooses_the_token_is_refused(bias: float) -> None:
    settings = Settings.of(sampling={"extra": {"logit_bias": {"5": bias}}})
    if bias <= 10:
        assert settings.at(INFO).sampling.extra == {"logit_bias": {"5": bias}}
    else:
        check_error(InvalidValueError, ("token 5", "at most 10", "grammar"), lambda: settings.at(INFO))
