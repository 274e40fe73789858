"""Sampling parameters are sent under each engine's names; invalid ones are refused at construction."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.backends import WIRES, Kind, backend_of, bodies, engine_name, engine_of, in_process_backend, request_of
from tito_conformance.testing import Completion
from tito_core.backend import Grammar, SamplingParams
from tito_core.backend.generate import generate
from tito_core.backend.sampling import OWNED_FIELDS
from tito_core.backend.values import InvalidValueError, refuse_unknown
from tito_sglang.wire import sampling_fields as sglang_fields
from tito_vllm.wire import sampling_fields as vllm_fields

NAMES = {
    "vllm": {"max_new_tokens": "max_tokens", "min_new_tokens": "min_tokens", "seed": "seed"},
    "sglang": {"max_new_tokens": "max_new_tokens", "min_new_tokens": "min_new_tokens", "seed": "sampling_seed"},
}
SAME = ("temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty")

temperatures = st.just(0.0) | st.floats(0.01, 2.0)
parameters = st.fixed_dictionaries(
    {
        "max_new_tokens": st.integers(1, 3000),
        "temperature": temperatures,
        "top_p": st.floats(0.01, 1.0),
        "top_k": st.just(-1) | st.integers(1, 500),
        "min_p": st.floats(0, 1),
        "presence_penalty": st.floats(-2, 2),
        "frequency_penalty": st.floats(-2, 2),
        "repetition_penalty": st.floats(0.1, 2),
        "stop_token_ids": st.lists(st.integers(0, 999), max_size=4).map(tuple),
        "stop": st.lists(st.text(st.characters(codec="utf-8"), min_size=1, max_size=5), max_size=3).map(tuple),
        "seed": st.none() | st.integers(-(2**63), 2**63 - 1),
        "min_new_tokens": st.just(0) | st.just(1),
        "ignore_eos": st.booleans(),
    }
)


def sent(kind: Kind, sampling: dict[str, Any]) -> dict[str, Any]:
    """The sampling fields of the body that a generation with these parameters sends."""
    completion = Completion([7] * 3000, finish="length")
    engine = engine_of(
        kind, lambda request: Completion(completion.output_ids[: request.max_new_tokens], finish="length")
    )
    backend = in_process_backend(engine)

    async def run() -> None:
        await generate(backend, request_of(**sampling))

    try:
        asyncio.run(run())
    except Exception:
        assert bodies(engine), "the request never left"
    (body,) = bodies(engine)
    return body if kind == "vllm-completions" else body["sampling_params"]


@pytest.mark.parametrize("kind", WIRES)
@settings(deadline=None, max_examples=8)
@given(sampling=parameters)
def test_every_parameter_is_sent_explicitly_under_the_engines_name(kind: Kind, sampling: dict[str, Any]) -> None:
    fields = sent(kind, sampling)
    expected = SamplingParams(**sampling)
    for name in SAME:
        assert fields[name] == getattr(expected, name), name
    for name, wire in NAMES[engine_name(kind)].items():
        if name == "seed" and expected.seed is None:
            assert fields.get(wire) is None
        else:
            assert fields[wire] == getattr(expected, name), name
    assert fields["stop_token_ids"] == list(expected.stop_token_ids)
    assert fields["stop"] == list(expected.stop)
    assert fields["ignore_eos"] is expected.ignore_eos


@pytest.mark.parametrize("kind", WIRES)
def test_avoided_ids_of_a_grammar_are_added_to_the_users_bias(kind: Kind) -> None:
    grammar = {"kind": "structural_tag", "value": "{}", "avoided_ids": [7, 5]}
    assert sent(kind, {"grammar": grammar})["logit_bias"] == {"7": -100.0, "5": -100.0}
    own = {"extra": {"logit_bias": {"5": 1.5, "6": 2.0}}}
    assert sent(kind, {"grammar": grammar, **own})["logit_bias"] == {"5": -100.0, "6": 2.0, "7": -100.0}
    assert sent(kind, {"grammar": {**grammar, "avoided_ids": []}, **own})["logit_bias"] == own["extra"]["logit_bias"]


@pytest.mark.parametrize("kind", WIRES)
def test_extra_cannot_contain_fields_of_the_backend_or_parameters(kind: Kind) -> None:
    """Every name in a real body, whichever level, is refused: the wires cannot outgrow the list unseen."""
    fields = {"vllm": vllm_fields, "sglang": sglang_fields}[engine_name(kind)]
    grammar = Grammar(kind="regex", value="x")
    engine = engine_of(kind)
    asyncio.run(generate(backend_of(engine), request_of()))
    (body,) = bodies(engine)
    for name in {*body, *fields(SamplingParams(seed=1, grammar=grammar))} - {"sampling_params"}:
        with pytest.raises(InvalidValueError, match=name):
            SamplingParams(extra={name: 1})


@pytest.mark.parametrize("name", sorted(OWNED_FIELDS))
def test_owned_fields_are_refused_by_name(name: str) -> None:
    with pytest.raises(InvalidValueError, match=f"{name}.*: the backend sets"):
        SamplingParams(extra={name: 1})


REFUSED = ["structured_outputs", "json_schema", "guided_regex", "response_format", "structural_tag", "choice"]


@pytest.mark.parametrize("name", REFUSED)
def test_a_grammar_in_extra_is_refused(name: str) -> None:
    with pytest.raises(InvalidValueError, match="'grammar', which is recorded"):
        SamplingParams(extra={name: {}})


@pytest.mark.parametrize("value", ["(((", ["a", "a{2,1}"], "a{99999999999}", 5])
def test_a_malformed_stop_regex_is_refused_as_it_crashes_sglang(value: Any) -> None:
    with pytest.raises(InvalidValueError, match=r"stop_regex: .* is not a regular expression: "):
        SamplingParams(extra={"stop_regex": value})


def test_stop_patterns() -> None:
    assert SamplingParams().stop_patterns == ()
    assert SamplingParams(extra={"stop_regex": "[0-9]+"}).stop_patterns == ("[0-9]+",)
    assert SamplingParams(extra={"stop_regex": ["a", "b"]}).stop_patterns == ("a", "b")


@pytest.mark.parametrize(
    ("wrong", "meant"),
    [
        ("max_tokens", "max_new_tokens"),
        ("temprature", "temperature"),
        ("topp", "top_p"),
        ("top_K", "top_k"),
        ("stop_tokens", "stop_token_ids"),
        ("min_tokens", "min_new_tokens"),
    ],
)
def test_an_unknown_name_suggests_the_nearest(wrong: str, meant: str) -> None:
    with pytest.raises(InvalidValueError, match=rf"sampling parameter '{wrong}'\. Did you mean '{meant}'"):
        SamplingParams(**{wrong: 1})


def test_an_unknown_name_without_a_near_one_lists_all() -> None:
    with pytest.raises(InvalidValueError, match="Available: max_new_tokens, temperature"):
        SamplingParams(**{"zzz": 1})
    refuse_unknown("sampling parameter", ["zzz"], ["top_p"])  # no mapping, which pydantic refuses


NAN, INF = float("nan"), float("inf")
BAD: list[tuple[str, Any]] = [
    *(("temperature", value) for value in (NAN, INF, -0.1, 1e-7, "hot", None)),
    *(("top_p", value) for value in (NAN, 0, -1, 1.01, INF)),
    *(("top_k", value) for value in (0, -2, 1.5, NAN, 2**31, 2**40)),
    *(("min_p", value) for value in (NAN, -0.1, 1.1)),
    *((name, value) for name in ("presence_penalty", "frequency_penalty") for value in (NAN, -2.1, 2.1, INF)),
    *(("repetition_penalty", value) for value in (NAN, 0, -1, 2.1, 1e-300)),
    *(("max_new_tokens", value) for value in (0, -1, 2.5, None, NAN, 2**31)),
    *(("min_new_tokens", value) for value in (-1, 1025)),
    *(("stop_token_ids", value) for value in ((-1,), (2**31,), (1.5,), 5, ("x",))),
    *(("stop", value) for value in (("",), (5,), "", 5)),
    *(("seed", value) for value in (2**63, -(2**63) - 1, 1.5, "x")),
    *(("grammar", value) for value in ({"kind": "regex", "value": ""}, {"kind": "lark", "value": "x"}, "x")),
    *(("extra", value) for value in ({"a": print}, {"a": NAN}, {"a": {1}}, [1])),
]


@pytest.mark.parametrize(("name", "value"), BAD, ids=lambda value: repr(value)[:30])
def test_a_bad_value_is_refused_at_construction(name: str, value: Any) -> None:
    with pytest.raises(InvalidValueError) as caught:
        SamplingParams(**{name: value})
    assert name in str(caught.value)
    assert "\n" not in str(caught.value)


SENTENCES: list[tuple[dict[str, Any], str]] = [
    ({"top_k": 0}, "top_k=0 .*-1"),
    ({"temperature": 0.009}, r"temperature=0\.009 .*0\.01"),
    ({"extra": {"n": 2, "echo": True}}, "extra .*echo, n:"),
    ({"extra": {"max_tokens": 2}}, "extra .*'max_tokens'.*'max_new_tokens'"),
    ({"extra": {"top_p": 2}}, "extra .*'top_p': use the sampling parameter 'top_p'"),
    ({"extra": {"logit_bias": [5]}}, r"logit_bias .*\[5\]"),
    ({"extra": {"a": {1}}}, r"JSON .*set.*\{'a': \{1\}\}"),
    ({"min_new_tokens": 9, "max_new_tokens": 8}, "min_new_tokens=9 .*max_new_tokens=8"),
    ({"min_new_tokens": 1, "grammar": {"kind": "regex", "value": "a"}}, "min_new_tokens=1 .*grammar"),
]


@pytest.mark.parametrize(("given_values", "sentence"), SENTENCES)
def test_a_refusal_says_what_to_do(given_values: dict[str, Any], sentence: str) -> None:
    with pytest.raises(InvalidValueError, match=sentence):
        SamplingParams(**given_values)


def test_a_string_is_one_stop_string() -> None:
    assert SamplingParams(stop="x") == SamplingParams(stop=("x",))


@given(room=st.integers(1, 50), wanted=st.integers(1, 50), least=st.integers(0, 50))
@settings(deadline=None)
def test_within_lowers_both_lengths_and_nothing_else(room: int, wanted: int, least: int) -> None:
    given_params = SamplingParams(max_new_tokens=wanted, min_new_tokens=min(least, wanted), temperature=0.5)
    cut = given_params.within(room)
    assert cut.max_new_tokens == min(room, wanted)
    assert cut.min_new_tokens == min(least, wanted, room)
    assert SamplingParams.model_validate(cut.model_dump()) == cut
    assert cut.model_copy(update={"max_new_tokens": 1, "min_new_tokens": 0}) == given_params.model_copy(
        update={"max_new_tokens": 1, "min_new_tokens": 0}
    )
