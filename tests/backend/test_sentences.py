"""Every sentence that the checks of an answer raise, word for word, and beside each the last value that is right."""

from __future__ import annotations

import base64
import io
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import numpy as np
import pytest

from support.backends import EOS, PROMPT
from tito_core.backend import ProtocolViolationError, SamplingParams, TokenRequest, Wanted
from tito_core.backend.answer import NOTHING, Checks, Reported
from tito_core.backend.beside import Beside, BesideChecks
from tito_core.backend.id_text import IdText
from tito_core.ledger.turn import Finish, VersionSpan

CHECKS = Checks("sglang", "r7")
OUTPUT = (21, 22, EOS)


def raw(value: Any) -> msgspec.Raw:
    return msgspec.Raw(msgspec.json.encode(value))


def reported(**changes: Any) -> Reported:
    given = {
        "finish": "stop",
        "stop": EOS,
        "output_ids": list(OUTPUT),
        "logprobs": [-1.0, -2.0, -3.0],
        "logprob_ids": list(OUTPUT),
        "echoed": raw(list(PROMPT)),
        "prompt_tokens": len(PROMPT),
        "completion_tokens": 3,
        "cached_tokens": 4,
    }
    return Reported(**{**given, **changes})


def request(wanted: Any = None, **sampling: Any) -> TokenRequest:
    echo, delta_start = sampling.pop("echo", True), sampling.pop("delta_start", 0)
    settings = {"max_new_tokens": 8, "stop_token_ids": (EOS,), **sampling}
    ids = np.array(PROMPT, np.int32)
    text = IdText.of(ids) if sampling.pop("kept", False) else None
    settings.pop("kept", None)
    return TokenRequest(
        ids, SamplingParams(**settings), "r7", text=text, wanted=Wanted.of(wanted), echo=echo, delta_start=delta_start
    )


def read(said: Reported, asked: TokenRequest | None = None) -> Any:
    return CHECKS.response(said, asked or request(), latency_s=0.5, running_id="r7-retry1")


def refused(sentence: str, act: Callable[[], Any]) -> None:
    with pytest.raises(ProtocolViolationError) as caught:
        act()
    assert str(caught.value) == sentence
    assert (caught.value.backend, caught.value.request_id) == ("sglang", "r7")


def test_a_right_answer_is_given_whole() -> None:
    response = read(reported(message="said", spans=[(0, 2, "a"), (2, 3, None)]))
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
    ({"output_ids": [21, -1, EOS]}, "Law 2: output id -1 is no token."),
    ({"output_ids": [21, 2**31, EOS]}, "Law 2: output id 2147483648 is no token."),
    ({"output_ids": [2**31, -7, EOS]}, "Law 2: output id -7 is no token."),
    ({"logprob_ids": [21, 22]}, "Law 4: 3 output ids, but logprobs of 2 ids."),
    ({"logprob_ids": [21, "x", EOS]}, "Law 4: output id 22 at offset 1 has the logprob of x."),
    ({"logprobs": [-1.0, -2.0, None]}, "Law 4: output token 2 has no logprob (id 2)."),
    ({"logprobs": [-1.0, 0.5, -3.0]}, "Law 4: the answer: logprob 0.5 at output offset 1 is no log-probability."),
    ({"logprobs": [-1e300, -1, -1]}, "Law 4: the answer: logprob -inf at output offset 0 is no log-probability."),
    ({"stop": 77}, "Law 4: stop token 77 ended the output, whose last id is 2."),
    ({"finish": "length"}, "Law 4: the output ended for length after 3 of 8 tokens."),
    ({"spans": [(0, 2, "a")]}, "Law 10: the answer: weight-version spans end at 2, the output has 3 tokens."),
    ({"echoed": raw(["x"])}, "Law 4: the echo of the prompt is no list of ids: Expected `int`, got `str` - at `$[0]`."),
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


def test_what_an_answer_still_may_say() -> None:
    assert read(reported(echoed=msgspec.Raw(b"[11, 12, 13, 14, 15]")), request(kept=True)).prompt_length == 5
    assert read(reported(output_ids=[0, 2**31 - 1, EOS], logprob_ids=[0, 2**31 - 1, EOS])).output_ids[1] == 2**31 - 1
    assert read(reported(logprobs=(0.0, -9998.0, -1.0))).logprobs.tolist() == [0.0, -9998.0, -1.0]
    assert read(reported(stop="word", output_ids=[21, 22, 23], logprob_ids=[21, 22, 23])).stop == "word"
    assert read(reported(finish="length", stop=9), request(max_new_tokens=3)).stop is None
    assert read(reported(spans=[])).versions == (VersionSpan(0, 3, None),)


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
        "Law 4: the answer: logprob 1.0 at output offset 1 is no log-probability.",
    ),
]


@pytest.mark.parametrize(("scored", "sentence"), SCORES)
def test_what_scores_may_not_say(scored: list[Any], sentence: str) -> None:
    refused(sentence, lambda: CHECKS.scores(np.array([7, 8, 9], np.int32), scored))


@pytest.mark.parametrize("first", [7, None])
def test_scores_begin_with_none(first: int | None) -> None:
    scores = CHECKS.scores(np.array([7, 8, 9], np.int32), [(first, None), (8, -1.5), (9, -2.5)])
    assert scores.dtype == np.float32
    assert np.isnan(scores[0])
    assert scores[1:].tolist() == [-1.5, -2.5]


# What is said beside.

TOP = [(21, -1.0), (30, -1.5)], [(22, -2.0), (30, -0.5)], [(2, -3.0), (31, -0.1)]
FLAT = list(range(7 * 2 * 2))


def packed(values: Sequence[int], dtype: str = "<i4") -> str:
    return base64.b64encode(np.array(values, dtype).tobytes()).decode()


def npy(array: Any) -> str:
    stream = io.BytesIO()
    np.lib.format.write_array(stream, np.asarray(array))
    return base64.b64encode(stream.getvalue()).decode()


def columns(wanted: Any, delta_start: int = 0, top_k: int = -1, **said: Any) -> Any:
    if isinstance(rows := said.get("top"), list | tuple):
        said["top"] = lambda: rows
    asked = request(wanted, delta_start=delta_start, top_k=top_k)
    logprobs = np.array([-1.0, -2.0, -3.0], np.float32)
    return BesideChecks(CHECKS, asked, np.array(OUTPUT, np.int32), logprobs).columns(Beside(**said))


ALL = {"top_logprobs": 2, "prompt_logprobs": True, "routed_experts": (2, 2), "sampling_mask": True}


@pytest.mark.parametrize("name", ALL)
def test_what_was_wanted_must_come(name: str) -> None:
    sentence = f"Law 4: the answer holds no {name}, though they were asked for."
    refused(sentence, lambda: columns({name: ALL[name]}, top_k=2))


def test_what_was_not_wanted_is_left() -> None:
    assert dict(columns(None, top=TOP, prompt=[(1, 0.5)], experts="?", mask=[[]])) == {}


BESIDE: list[tuple[str, dict[str, Any], str]] = [
    ("top_logprobs", {"top": TOP[:2]}, "Law 2: 3 output ids, but top_logprobs of 2 tokens."),
    (
        "top_logprobs",
        {"top": [*TOP[:2], [(2, -3.0)]]},
        "Law 2: 2 top_logprobs a token were asked for, output token 2 has 1.",
    ),
    (
        "top_logprobs",
        {"top": [*TOP[:2], [(2, -3.0), (5, -0.1), (5, -0.2)]]},
        "Law 4: output token 2 has a top id with two logprobs: [(2, -3.0), (5, -0.1), (5, -0.2)].",
    ),
    (
        "top_logprobs",
        {"top": [*TOP[:2], [(2, -3.0), ("x", -0.1)]]},
        "Law 2: 'x', told beside output token 2, is no token.",
    ),
    (
        "top_logprobs",
        {"top": [*TOP[:2], [(2, -3.0), (2**31, -0.1)]]},
        "Law 2: 2147483648, told beside output token 2, is no token.",
    ),
    (
        "top_logprobs",
        {"top": [*TOP[:2], [(2, -3.0), (-1, -0.1)]]},
        "Law 2: -1, told beside output token 2, is no token.",
    ),
    (
        "top_logprobs",
        {"top": [*TOP[:2], [(2, -3.0), (5, 0.5)]]},
        "Law 4: a top logprob is 0.5, which is no log-probability.",
    ),
    (
        "top_logprobs",
        {"top": [TOP[0], [(22, -2.5), (30, -0.5)], TOP[2]]},
        "Law 4: output id 22 at offset 1 has logprob -2.0 and among the likeliest another: [(30, -0.5), (22, -2.5)].",
    ),
    (
        "top_logprobs",
        {"top": [TOP[0], [(31, -2.5), (30, -0.5)], TOP[2]]},
        "Law 4: output id 22 at offset 1 has logprob -2.0, which is among the likeliest, and is not one of them: "
        "[(30, -0.5), (31, -2.5)].",
    ),
    (
        "prompt_logprobs",
        {"prompt": [(12, -1.0)] * 3},
        "Law 2: prompt_logprobs of 4 tokens from offset 1 were asked for, the server gave 3.",
    ),
    (
        "prompt_logprobs",
        {"prompt": [(12, -1.0), (13, -1.0), (99, -1.0), (15, -1.0)]},
        "Law 4: prompt id 14 at offset 3 was sent, the server scored 99.",
    ),
    (
        "prompt_logprobs",
        {"prompt": [(12, -1.0), (13, -1.0), (14, None), (15, -1.0)]},
        "Law 4: prompt token 3 has no logprob (id 14).",
    ),
    (
        "prompt_logprobs",
        {"prompt": [(12, -1.0), (13, 0.5), (14, -1.0), (15, -1.0)]},
        "Law 4: the answer: logprob 0.5 at output offset 1 is no log-probability.",
    ),
    (
        "routed_experts",
        {"experts": "?"},
        "Law 2: routed_experts cannot be read: Only base64 data is allowed.",
    ),
    (
        "routed_experts",
        {"experts": base64.b64encode(b"abc").decode()},
        "Law 2: routed_experts cannot be read: buffer size must be a multiple of element size.",
    ),
    (
        "routed_experts",
        {"experts": packed(range(6))},
        "Law 2: routed_experts have shape (1, 6), expected (7, 2, 2).",
    ),
    (
        "routed_experts",
        {"experts": packed(range(24))},
        "Law 2: routed_experts have 6 rows, expected 7, or 7 from 0 on.",
    ),
    (
        "routed_experts",
        {"experts": npy(np.zeros((7, 2, 3), np.uint8))},
        "Law 2: routed_experts have shape (7, 2, 3), expected (7, 2, 2).",
    ),
    (
        "routed_experts",
        {"experts": npy(np.zeros((7, 2, 2), np.float32))},
        "Law 2: routed_experts cannot be read: 112 bytes are no float32 of shape (7, 2, 2).",
    ),
    ("sampling_mask", {"mask": [[21], [22]]}, "Law 2: 3 output ids, but sampling_mask of 2 tokens."),
    (
        "sampling_mask",
        {"mask": [[21, 5], [5, 6], [2]]},
        "Law 4: output id 22 at offset 1 is not among the 2 ids that its sampling_mask says it was chosen from.",
    ),
    (
        "sampling_mask",
        {"mask": [[21, 5], [22, 5, 5], [2]]},
        "Law 4: the sampling_mask of output token 1 holds an id twice.",
    ),
    (
        "sampling_mask",
        {"mask": [[21, 5], [22, -3], [2]]},
        "Law 2: -3, told beside output token 1, is no token.",
    ),
]


@pytest.mark.parametrize(("name", "said", "sentence"), BESIDE)
def test_what_may_not_be_said_beside(name: str, said: dict[str, Any], sentence: str) -> None:
    refused(sentence, lambda: columns({name: ALL[name]}, top_k=2, **said))


def test_a_shape_that_was_not_said_is_read_from_the_rows() -> None:
    refused(
        "Law 2: routed_experts have shape (7, 4), expected (7, layers, experts).",
        lambda: columns({"routed_experts": True}, experts=packed(FLAT)),
    )
    found = columns({"routed_experts": True}, experts=npy(np.reshape(FLAT, (7, 2, 2))))["routed_experts"]
    assert (found.start, found.shape) == (0, (7, 2, 2))


def test_top_logprobs_that_cannot_be_decoded_are_named() -> None:
    def decoded() -> Any:
        return msgspec.json.decode(b"[1,", type=list[int])

    refused(
        "Law 2: top_logprobs cannot be read: Input data was truncated.",
        lambda: columns({"top_logprobs": 2}, top=decoded),
    )


def test_the_likeliest_come_first_and_what_was_masked_last() -> None:
    lowest = float(np.finfo(np.float32).min)
    rows = [
        [(30, -1.5), (40, -1.0), (21, -1.0), (7, -5.0)],
        [(22, -2.0), (9, None), (8, -9999.0)],
        [(2, -3.0), (31, lowest)],
    ]
    found = columns({"top_logprobs": 2}, top=rows)
    assert found["top_ids"].start == found["top_logprobs"].start == len(PROMPT)
    assert found["top_ids"].values.tolist() == [[21, 40], [22, -1], [2, -1]]
    assert np.nan_to_num(found["top_logprobs"].values, nan=9.0).tolist() == [[-1.0, -1.0], [-2.0, 9.0], [-3.0, 9.0]]


def test_the_sampled_token_may_be_less_likely_than_all_that_are_told() -> None:
    found = columns({"top_logprobs": 1}, top=[[(5, -0.5)], [(6, -1.9999)], [(2, -3.0)]])
    assert found["top_ids"].values.tolist() == [[5], [6], [2]]


def test_prompt_logprobs_begin_where_the_delta_does() -> None:
    found = columns({"prompt_logprobs": True}, delta_start=3, prompt=[(14, -1.0), (15, -2.0)])["prompt_logprobs"]
    assert (found.start, found.values.tolist(), found.values.dtype) == (3, [-1.0, -2.0], np.float32)


@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("packing", ["bare", "npy", "old npy", "fortran"])
def test_routed_experts_begin_one_before_the_delta_whether_the_server_cut_them_or_not(
    whole: bool, packing: str
) -> None:
    table = np.reshape(FLAT, (7, 2, 2))
    sent = table if whole else table[2:]
    if packing == "bare":
        text = packed(sent.ravel().tolist())
    elif packing == "old npy":
        stream = io.BytesIO()
        np.lib.format.write_array(stream, sent.astype(np.uint8), version=(2, 0))
        text = base64.b64encode(stream.getvalue()).decode()
    else:
        text = npy(np.asfortranarray(sent) if packing == "fortran" else sent)
    found = columns({"routed_experts": (2, 2)}, delta_start=3, experts=text)["routed_experts"]
    assert (found.start, found.values.tolist()) == (2, table[2:].tolist())


def test_a_sampling_mask_is_as_wide_as_top_k_or_as_its_widest_row() -> None:
    for top_k, width in ((4, 4), (2, 3)):
        found = columns({"sampling_mask": True}, top_k=top_k, mask=[[21, 5, 0], [22], [2, 9]])["sampling_mask"]
        assert (found.start, found.shape) == (len(PROMPT), (3, width))
        assert [[i for i in row if i >= 0] for row in found.values.tolist()] == [[21, 5, 0], [22], [2, 9]]
