"""Prompts and lengths that would crash a server are refused before they are sent."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.backends import (
    EOS,
    KINDS,
    PROMPT,
    VOCAB,
    Kind,
    bodies,
    engine_of,
    in_process_backend,
    request_of,
    reserved,
)
from tito_core.backend import (
    BadRequestError,
    ContextLengthError,
    Grammar,
    OptionalOutputs,
    SamplingParams,
    create_backend,
)
from tito_core.backend.errors import printable
from tito_core.backend.generate import check_input_ids, check_sampling, clamp_new_tokens, generate, score
from tito_core.backend.values import InvalidValueError, short_repr

BAD: list[tuple[Any, str]] = [
    ([], "non-empty list of token ids"),
    (np.zeros(0, np.int32), r"non-empty list of token ids, got shape \(0,\) of int32"),
    ((), "non-empty list of token ids"),
    (5, "non-empty list of token ids"),
    (None, "non-empty list of token ids"),
    ("1 2", "non-empty list of token ids"),
    (["1", "2"], "non-empty list of token ids"),
    ([1.0, 2.0], "float64"),
    ([1, 2.5], "float64"),
    ([1, None], "object"),
    ([True, False], "bool"),
    ([[1, 2], [3, 4]], r"shape \(2, 2\)"),
    ([[]], r"shape \(1, 0\)"),
    ([[1], [2, 3]], "non-empty list of token ids"),
    (np.zeros((2, 3), np.int32), r"shape \(2, 3\)"),
    ([1, -1], "token -1 .*offset 1 .*vocabulary"),
    ([2**31], "token 2147483648 at offset 0"),
    ([2**63], "token 9223372036854775808 at offset 0"),
    ([2**70], "non-empty list of token ids"),
]


@pytest.mark.parametrize(("ids", "sentence"), BAD, ids=lambda value: repr(value)[:25])
@pytest.mark.parametrize("kind", KINDS)
async def test_an_invalid_prompt_is_sent_by_neither_generate_nor_score(kind: Kind, ids: Any, sentence: str) -> None:
    engine = engine_of(kind)
    backend = in_process_backend(engine)
    with pytest.raises(BadRequestError, match=sentence):
        await generate(backend, replace(request_of(), input_ids=ids))
    with pytest.raises(BadRequestError, match=sentence):
        await score(backend, ids)
    assert bodies(engine) == []
    assert not engine.state.dead


@given(ids=st.lists(st.integers(-5, 30), min_size=1, max_size=20), vocab_size=st.integers(1, 30))
@settings(deadline=None)
def test_exactly_ids_below_the_vocabulary_are_accepted(ids: list[int], vocab_size: int) -> None:
    wrong = next((n for n, token in enumerate(ids) if not 0 <= token < vocab_size), None)
    for given_ids in (ids, tuple(ids), np.array(ids), np.array(ids, np.int16)):
        if wrong is None:
            checked = check_input_ids(given_ids, vocab_size, backend="vllm")
            assert checked.dtype == np.int32
            assert checked.tolist() == ids
        else:
            where = f"token {ids[wrong]} at offset {wrong} is outside the vocabulary of {vocab_size} tokens"
            sentence = f"{where}, so it was not sent. .*tokenizer"
            with pytest.raises(BadRequestError, match=sentence) as caught:
                check_input_ids(given_ids, vocab_size, backend="toy")
            assert caught.value.backend == "toy"


def test_ids_of_int32_are_not_copied() -> None:
    ids = np.array([2**31 - 1], np.int32)
    assert check_input_ids(ids, None, backend="vllm") is ids


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_negative_ids_are_refused_for_a_too_large_vocabulary(dtype: Any) -> None:
    with pytest.raises(BadRequestError, match=r"token -1 .*offset 1 .*vocabulary"):
        check_input_ids(np.array([1, -1], dtype), 2**32, backend="vllm")


@pytest.mark.parametrize("token", [VOCAB, VOCAB + 1, 2**31 - 1])
async def test_a_stop_id_outside_the_vocabulary_is_not_sent(token: int) -> None:
    engine = engine_of("sglang")
    with pytest.raises(
        BadRequestError, match=f"Stop token {token} .*vocabulary of 1000 tokens, so .*not sent. .*tokenizer"
    ):
        await generate(in_process_backend(engine), request_of(stop_token_ids=(EOS, token)))
    assert bodies(engine) == []


def test_stop_ids_of_an_unknown_vocabulary_must_not_be_negative() -> None:
    check_sampling(SamplingParams(stop_token_ids=(0, 2**31 - 1)), None, backend="vllm")
    with pytest.raises(BadRequestError, match="Stop token -1"):
        check_sampling(SamplingParams().model_copy(update={"stop_token_ids": (5, -1)}), None, backend="vllm")


@pytest.mark.parametrize("kind", KINDS)
async def test_a_grammar_added_to_min_new_tokens_is_not_sent(kind: Kind) -> None:
    grammar = Grammar(kind="regex", value="[a-z]{5}")
    request = request_of(min_new_tokens=3)
    request = replace(request, sampling=request.sampling.model_copy(update={"grammar": grammar}))
    engine = engine_of(kind)
    with pytest.raises(BadRequestError, match=r"min_new_tokens=3 .*grammar, so .*not sent: leave min_new_tokens out"):
        await generate(in_process_backend(engine), request)
    assert bodies(engine) == []


@given(wanted=st.integers(1, 100), prompt=st.integers(0, 100), limit=st.none() | st.integers(-1, 150))
@settings(deadline=None)
def test_a_clamped_length_fits(wanted: int, prompt: int, limit: int | None) -> None:
    if limit is not None and prompt >= limit:
        lengths = f"prompt has {prompt} tokens and the server's context {limit}, "
        with pytest.raises(ContextLengthError, match=f"{lengths}.*Shorten the history"):
            clamp_new_tokens(wanted, prompt, limit, backend="vllm")
        return
    new = clamp_new_tokens(wanted, prompt, limit, backend="vllm")
    assert 1 <= new <= wanted
    assert limit is None or prompt + new <= limit
    assert new == wanted or prompt + new == limit


@pytest.mark.parametrize("kind", KINDS)
async def test_a_prompt_that_does_not_fit_is_not_sent(kind: Kind) -> None:
    engine = engine_of(kind, max_model_len=len(PROMPT) + reserved(kind))
    with pytest.raises(ContextLengthError, match="no room"):
        await generate(in_process_backend(engine), request_of())
    assert bodies(engine) == []


@pytest.mark.parametrize("kind", KINDS)
async def test_a_sequence_that_cannot_be_scored_is_an_error_of_its_backend(kind: Kind) -> None:
    engine = engine_of(kind, max_model_len=8 + reserved(kind))
    backend = in_process_backend(engine)
    assert len(await score(backend, [5] * 7)) == 7
    sent = bodies(engine)
    for bad, error in (([5] * 8, ContextLengthError), ([], BadRequestError)):
        with pytest.raises(error) as caught:
            await score(backend, bad)
        assert caught.value.backend == kind
    assert bodies(engine) == sent


@pytest.mark.parametrize("kind", KINDS)
async def test_a_request_past_the_context_is_clamped_to_it(kind: Kind) -> None:
    engine = engine_of(kind, max_model_len=12 + reserved(kind))
    response = await generate(
        in_process_backend(engine), request_of(max_new_tokens=50, ignore_eos=True, stop_token_ids=())
    )
    assert len(response.output_ids) == 12 - len(PROMPT)


class Unshowable:
    def __repr__(self) -> str:
        raise ValueError


@given(st.text())
def test_values_are_shown_in_short_and_without_control_characters(text: str) -> None:
    assert short_repr(Unshowable()) == "a value of type Unshowable"
    assert repr(text).startswith(short_repr(text).removesuffix("..."))
    shown = printable(text)
    assert all(letter == "\n" or letter.isprintable() for letter in shown)
    assert shown.count("\n") == text.count("\n")
    assert not text.replace("\n", "").isprintable() or shown == text


def test_a_wrong_option_is_named_with_its_value_but_a_key_is_not() -> None:
    for name, value, shown in (
        ("timeout_s", "soon", "'soon'"),
        ("patience_s", None, "None"),
        ("api_key", 77, None),
        ("admin_api_key", 77, None),
        ("headers", 77, None),
    ):
        options: Any = {name: value}
        with pytest.raises(InvalidValueError, match=name) as caught:
            create_backend("vllm", "http://h", **options)
        assert (shown or "another type") in str(caught.value)
        assert "77" not in str(caught.value)
    with pytest.raises(InvalidValueError, match=r"optional output 'top_logprob'.*'top_logprobs'"):
        OptionalOutputs.of({"top_logprob": 2})
    assert OptionalOutputs.of(wanted := OptionalOutputs(top_logprobs=2)) is wanted
