"""Every sentence that the checks of an answer raise, word for word, and beside each the last value that is right."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.backends import EOS
from support.reported import OUTPUT, raw, refused, reported, request
from tito_core.backend import EngineInfo, RawResponse, RawScores, TokenRequest
from tito_core.backend.checked import validated_scores
from tito_core.backend.protocol import NOTHING
from tito_core.backend.validation import validated
from tito_core.ledger.turn import Finish, VersionSpan

INFO = EngineInfo("sglang", "m", None, None)


def read(said: RawResponse, asked: TokenRequest | None = None) -> Any:
    return validated(replace(said, latency_s=0.5, request_id="r7-retry1"), asked or request(), INFO)


def test_a_right_answer_is_given_whole() -> None:
    response = read(reported(message="said", versions=[(0, 2, "a"), (2, 3, None)]))
    assert response.output_ids.tolist() == list(OUTPUT)
    assert response.logprobs.tolist() == [-1.0, -2.0, -3.0]
    assert (response.output_ids.dtype, response.logprobs.dtype) == (np.int32, np.float32)
    assert (response.finish, response.stop, response.message) == (Finish.STOP, EOS, None)
    assert (response.prompt_length, response.cached_tokens) == (5, 4)
    assert (response.latency_s, response.request_id) == (0.5, "r7-retry1")
    assert response.versions == (VersionSpan(0, 2, "a"), VersionSpan(2, 3, None))
    assert dict(response.columns) == {}


FINISHES = "a generation ends in 'stop' or 'length', or in 'abort'."
WRONG: list[tuple[dict[str, Any], str]] = [
    ({"finish": "error"}, f"Law 4: the server finished with reason 'error'; {FINISHES}"),
    ({"finish": None}, f"Law 4: the server finished with reason None; {FINISHES}"),
    ({"prompt_tokens": None}, "Law 4: the server reported prompt_tokens=None, the request and answer hold 5."),
    ({"prompt_tokens": 4}, "Law 4: the server reported prompt_tokens=4, the request and answer hold 5."),
    ({"completion_tokens": 2}, "Law 4: the server reported completion_tokens=2, the request and answer hold 3."),
    ({"output_ids": None}, "Law 4: the answer holds no output ids, though they were asked for."),
    ({"logprobs": None}, "Law 4: the answer holds no logprobs, though they were asked for."),
    ({"output_ids": [21, 22]}, "Law 2: the server gave 2 output ids and 3 logprobs."),
    ({"output_ids": [], "logprobs": []}, "Law 4: the server gave no output ids, not even a stop token."),
    ({"output_ids": [21, -1, EOS]}, "Law 2: output id -1 is not a token id."),
    ({"output_ids": [21, 2**31, EOS]}, "Law 2: output id 2147483648 is not a token id."),
    ({"output_ids": [2**31, -7, EOS]}, "Law 2: output id -7 is not a token id."),
    ({"logprob_ids": [21, 22]}, "Law 4: 3 output ids, but logprobs of 2 ids."),
    ({"logprob_ids": [21, "x", EOS]}, "Law 4: output id 22 at offset 1 has the logprob of x."),
    ({"logprobs": [-1.0, -2.0, None]}, "Law 4: output token 2 has no logprob (id 2)."),
    ({"logprobs": [-1.0, 0.5, -3.0]}, "Law 4: the answer: logprob 0.5 at output offset 1 is not a log-probability."),
    ({"logprobs": [-1e300, -1, -1]}, "Law 4: the answer: logprob -inf at output offset 0 is not a log-probability."),
    ({"stop": 77}, "Law 4: stop token 77 ended the output, whose last id is 2."),
    ({"finish": "length"}, "Law 4: the output ended for length after 3 of 8 tokens."),
    ({"versions": [(0, 2, "a")]}, "Law 10: the answer: weight-version spans end at 2, the output has 3 tokens."),
    (
        {"echoed": raw(["x"])},
        "Law 4: the echo of the prompt is not a list of ids: Expected `int`, got `str` - at `$[0]`.",
    ),
    (
        {"echoed": raw(None)},
        "Law 4: the server did not echo the prompt ids, so nothing proves what it saw: it is too old for token-exact "
        "rollouts, or a proxy removed the field.",
    ),
    ({"echoed": raw([11, 12, 13, 14])}, "Law 4: 5 prompt ids were sent, the server saw 4."),
    ({"echoed": raw([11, 12, 13, 14, 9])}, "Law 4: prompt id 15 at offset 4 was sent, the server saw 9."),
]


@pytest.mark.parametrize("kept", [False, True])
@pytest.mark.parametrize(("changes", "sentence"), WRONG)
def test_what_an_answer_may_not_say(changes: dict[str, Any], sentence: str, kept: bool) -> None:
    refused(sentence, lambda: read(reported(**changes), request(kept=kept)))


TOKENS = st.tuples(st.integers(0, 2**31 - 1).filter(lambda token: token != EOS), st.floats(-9998, 0))


@given(
    said=st.lists(TOKENS, max_size=40), wrong=st.one_of(st.integers(max_value=-1), st.integers(2**31)), data=st.data()
)
def test_ids_and_logprobs_are_those_that_were_said_and_one_wrong_id_is_found_wherever_it_is(
    said: list[tuple[int, float]], wrong: int, data: st.DataObject
) -> None:
    ids, logprobs = [*(token for token, _ in said), EOS], [*(logprob for _, logprob in said), -1.0]
    asked = request(max_new_tokens=64)

    def of(output: list[int]) -> RawResponse:
        return reported(output_ids=output, logprob_ids=output, logprobs=logprobs, completion_tokens=len(output))

    response = read(of(ids), asked)
    assert response.output_ids.tolist() == ids
    assert response.logprobs.tobytes() == np.array(logprobs, np.float32).tobytes()
    at = data.draw(st.integers(0, len(said)))
    refused(f"Law 2: output id {wrong} is not a token id.", lambda: read(of([*ids[:at], wrong, *ids[at + 1 :]]), asked))


def test_what_an_answer_still_may_say() -> None:
    assert read(reported(echoed=msgspec.Raw(b"[11, 12, 13, 14, 15]")), request(kept=True)).prompt_length == 5
    assert read(reported(output_ids=[0, 2**31 - 1, EOS], logprob_ids=[0, 2**31 - 1, EOS])).output_ids[1] == 2**31 - 1
    assert read(reported(logprobs=(0.0, -9998.0, -1.0))).logprobs.tolist() == [0.0, -9998.0, -1.0]
    assert read(reported(stop="word", output_ids=[21, 22, 23], logprob_ids=[21, 22, 23])).stop == "word"
    assert read(reported(finish="length", stop=9), request(max_new_tokens=3)).stop is None
    assert read(reported(versions=[])).versions == (VersionSpan(0, 3, None),)


def test_more_than_was_asked_for_is_refused() -> None:
    refused("Law 4: 2 tokens were asked for, the server gave 3.", lambda: read(reported(), request(max_new_tokens=2)))
    assert len(read(reported(), request(max_new_tokens=3)).output_ids) == 3


def test_a_stop_that_did_not_stop_names_its_place() -> None:
    ids = [EOS, EOS, EOS, 21, EOS]
    said = reported(output_ids=ids, logprob_ids=ids, logprobs=[-1.0] * 5, completion_tokens=5)
    for least, at in ((0, 0), (1, 1), (2, 2)):
        sentence = f"Law 4: stop token 2 at output offset {at} did not end the output of 5 tokens."
        refused(sentence, lambda least=least: read(said, request(min_new_tokens=least)))
    for asked in (request(min_new_tokens=3), request(ignore_eos=True), request(stop_token_ids=(9,))):
        assert read(said, asked).output_ids.tolist() == ids


def test_an_echo_that_was_not_asked_for_need_not_come_but_is_compared_if_it_does() -> None:
    assert read(reported(echoed=NOTHING), request(echo=False)).prompt_length == 5
    refused(WRONG[-1][1], lambda: read(reported(echoed=raw([11, 12, 13, 14, 9])), request(echo=False)))


def test_what_was_aborted_in_the_queue_tells_nothing() -> None:
    never = {"output_ids": [], "logprobs": [], "logprob_ids": [], "completion_tokens": 0, "echoed": NOTHING}
    said = reported(finish="abort", prompt_tokens=None, cached_tokens=None, message="paused", **never)
    response = read(said, request({"top_logprobs": 2}))
    assert (response.finish, response.stop, response.message, len(response.output_ids)) == ("abort", None, "paused", 0)
    assert dict(response.columns) == {}
    refused(
        WRONG[4][1].replace("=2", "=1").replace("hold 3", "hold 0"),
        lambda: read(reported(**{**never, "finish": "abort", "completion_tokens": 1})),
    )
    # one that ran is held to all of it, and may not hide a stop in its last place
    stopped = reported(finish="abort", stop=9)
    refused("Law 4: stop token 2 at output offset 2 did not end the output of 3 tokens.", lambda: read(stopped))
    assert read(stopped, request(stop_token_ids=(9,))).stop is None
    refused(WRONG[2][1], lambda: read(reported(finish="abort", prompt_tokens=None), request(stop_token_ids=())))


SCORES: list[tuple[list[Any], str]] = [
    ([(7, None), (8, -1.0)], "Law 4: 3 ids were sent for scoring, the server scored 2."),
    ([(7, None), (8, -1.0), (10, -1.0)], "Law 4: id 9 at offset 2 was sent, the server scored 10."),
    ([(7, None), (None, -1.0), (9, -1.0)], "Law 4: id 8 at offset 1 was sent, the server scored None."),
    ([(8, None), (8, -1.0), (9, -1.0)], "Law 4: id 7 at offset 0 was sent, the server scored 8."),
    (
        [(7, -1.0), (8, -1.0), (9, -1.0)],
        "Law 4: the server scored id 7 at offset 0 with -1.0; only the first has none.",
    ),
    (
        [(7, None), (8, None), (9, -1.0)],
        "Law 4: the server scored id 8 at offset 1 with None; only the first has none.",
    ),
    (
        [(7, None), (8, -1.0), (9, 1.0)],
        "Law 4: the answer: logprob 1.0 at output offset 2 is not a log-probability.",
    ),
]


def scores(pairs: list[Any]) -> RawScores:
    return RawScores(
        logprobs=[logprob for _, logprob in pairs], token_ids=[token for token, _ in pairs], request_id="r7"
    )


@pytest.mark.parametrize(("scored", "sentence"), SCORES)
def test_what_scores_may_not_say(scored: list[Any], sentence: str) -> None:
    refused(sentence, lambda: validated_scores(scores(scored), np.array([7, 8, 9], np.int32), INFO))


@pytest.mark.parametrize("first", [7, None])
def test_scores_begin_with_none(first: int | None) -> None:
    found = validated_scores(scores([(first, None), (8, -1.5), (9, -2.5)]), np.array([7, 8, 9], np.int32), INFO)
    assert found.dtype == np.float32
    assert np.isnan(found[0])
    assert found[1:].tolist() == [-1.5, -2.5]
