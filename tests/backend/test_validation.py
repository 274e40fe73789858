"""Validation of raw responses and scores: each wrong value is refused, and the nearest right value is accepted."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.backends import EOS
from support.reported import raw, refused, reported, request
from tito_core.backend import EngineInfo, RawResponse, RawScores, TokenRequest
from tito_core.backend.generate import validated_scores
from tito_core.backend.protocol import NOTHING
from tito_core.backend.validation import validated
from tito_core.ledger.turn import Finish, VersionSpan

INFO = EngineInfo("sglang", "m", None, None)


def validate(response: RawResponse, sent: TokenRequest | None = None) -> Any:
    retried = replace(response, latency_s=0.5, request_id="r7-retry1", response_id="cmpl-r7-retry1")
    return validated(retried, sent or request(), INFO)


def test_a_message_is_that_of_an_abort_and_versions_may_be_unknown() -> None:
    response = validate(reported(message="said", versions=[(0, 2, "a"), (2, 3, None)]))
    assert response.message is None
    assert response.versions == (VersionSpan(0, 2, "a"), VersionSpan(2, 3, None))


def test_an_answer_says_of_itself_what_the_measured_answers_said() -> None:
    """A gateway may fall back to another model, or drop fields that it does not know."""
    spans = [(0, 2, "a"), (2, 3, "b")]
    measured = replace(INFO, answering_models=frozenset({"policy"}), reports_versions=True)
    sent = replace(request(), measured=measured)
    assert validate(reported(model="policy", versions=spans), sent).model == "policy"
    assert validate(reported(versions=spans), sent).model is None, "a stream does not name it"
    refused(
        "Law 4: .*model 'other', but .* named 'policy'", lambda: validate(reported(model="other", versions=spans), sent)
    )
    for lost in ([], [(0, 3, None)], [(0, 2, "a"), (2, 3, None)]):
        refused("Law 10: .*no weight versions", lambda lost=lost: validate(reported(versions=lost), sent))
    cut = {"output_ids": [21, 22], "logprobs": [-1.0, -2.0], "logprob_ids": [21, 22], "completion_tokens": 2}
    aborted = validate(reported(finish="abort", stop=None, **cut), sent)
    assert aborted.versions == (VersionSpan(0, 2, None),), "SGLang leaves them out of some"
    whole = validate(reported(finish="abort", stop=None), sent)
    assert (whole.finish, whole.versions) == (Finish.STOP, (VersionSpan(0, 3, None),)), "also where a stop was sampled"
    nothing = replace(request(), measured=INFO)
    assert validate(reported(model="other"), nothing).versions == (VersionSpan(0, 3, None),)


def of_length(count: int) -> dict[str, Any]:
    """Return the columns of an answer of so many tokens, the last of them a stop."""
    ids = [*([21] * (count - 1)), EOS]
    return {"output_ids": ids, "logprob_ids": ids, "logprobs": [-1.0] * count, "completion_tokens": count}


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"finish": "x" * 101}, "Law 4.*'x+.*'abort'"),
    ({"output_ids": None}, "Law 4.*no output ids"),
    ({"logprob_ids": [21, 22]}, "Law 4.*3 output ids.*2 ids"),
    ({"logprobs": [-1.0, -2.0]}, "3 output ids .* 2 logprobs"),
    ({"logprobs": [-1.0, -1e300, -3.0]}, "logprob -inf at output offset 1"),
    ({"output_ids": [22, 21, EOS]}, r"id 22 .*offset 0\b.* 21"),
    ({"output_ids": [], "logprob_ids": []}, "0 output ids .* 3 logprobs"),
    ({"output_ids": [], "logprob_ids": [], "logprobs": [], "completion_tokens": 0}, "no output ids, not even a stop"),
    ({"output_ids": [21, 22, 23], "logprob_ids": [21, 22, 23]}, "stop token 2,.* 23"),
    (of_length(9), "8 tokens .* 9"),
    ({"echoed": raw([11, 12, 2**63, 14, 15])}, f" {2**63}"),
    ({"echoed": raw([11, 12, 13, 14, 15, 16])}, "5 prompt ids .* 6"),
    ({"versions": [(0, 1, "a"), (2, 3, "b")]}, "span 2:3 should start at output offset 1"),
    ({"logprobs": [-1.0, 0.5, -3.0]}, r"Law 4.*0\.5 at output offset 1.*logits.*--logprobs-mode raw_logprobs"),
    ({"finish": "length"}, "Law 4.*'length'.*3 of 8.*max_new_tokens in the server's --override-generation-config"),
]


@pytest.mark.parametrize(("changes", "pattern"), WRONG)
def test_a_wrong_answer_is_refused(changes: dict[str, Any], pattern: str) -> None:
    refused(pattern, lambda: validate(reported(**changes)))


def test_values_at_the_edge_are_accepted() -> None:
    assert validate(reported(echoed=msgspec.Raw(b"[11, 12, 13, 14, 15]")), request(kept=True)).prompt_length == 5
    assert (
        validate(reported(output_ids=[0, 2**31 - 1, EOS], logprob_ids=[0, 2**31 - 1, EOS])).output_ids[1] == 2**31 - 1
    )
    assert validate(reported(logprobs=(0.0, -9998.0, -1.0))).logprobs.tolist() == [0.0, -9998.0, -1.0]
    word = reported(stop="word", output_ids=[21, 22, 23], logprob_ids=[21, 22, 23])
    assert validate(word, request(stop=["word"])).stop == "word"
    assert validate(reported(finish="length", stop=9), request(max_new_tokens=3)).stop is None
    assert validate(reported(versions=[])).versions == (VersionSpan(0, 3, None),)


@given(other=st.text(st.sampled_from("r7-ety1_x"), max_size=12), prefix=st.sampled_from(["", "cmpl-", "generate-"]))
def test_only_an_answer_to_the_try_that_was_sent_is_accepted(other: str, prefix: str) -> None:
    """A group's rollouts have equal prompts, so that nothing but the id tells their answers apart."""
    sent, answer = "r7-retry1", reported(response_id=prefix + other)
    own = (prefix + other).endswith(sent) and not (prefix + other)[: -len(sent)][-1:].isalnum()
    if own:
        assert validated(replace(answer, request_id=sent), request(), INFO).request_id == sent
    else:
        refused("Law 4.*another request", lambda: validated(replace(answer, request_id=sent), request(), INFO))


def test_an_answer_that_names_no_request_is_refused_unless_its_backend_says_so() -> None:
    nameless = reported(response_id=None)
    refused("Law 4.*does not name its request", lambda: validated(nameless, request(), INFO))
    unreported = replace(INFO, unreported=frozenset({"response_id"}))
    assert validated(nameless, request(), unreported).request_id == "r7"
    refused("Law 4.*another request", lambda: validated(reported(response_id="r8"), request(), unreported))
    refused("Law 4.*sent the request as 'r8'", lambda: validated(reported(request_id="r8"), request(), INFO))
    refused(
        "Law 4.*another request",
        lambda: validated_scores(replace(scores([(7, None)]), response_id="cmpl-r8"), np.array([7], np.int32), INFO),
    )


WORDS: list[tuple[str, dict[str, Any], dict[str, Any], Finish]] = [
    ("repetition", {"stop": "repetition_detected"}, {"stop_token_ids": ()}, Finish.LENGTH),
    ("tool_calls", {}, {}, Finish.STOP),
    ("stop_sequence", {"stop": "there"}, {"stop": ["there"], "stop_token_ids": ()}, Finish.STOP),
    ("max_tokens", {}, {"max_new_tokens": 3, "stop_token_ids": ()}, Finish.LENGTH),
    ("content_filter", {}, {"ignore_eos": True}, Finish.LENGTH),
    ("error", {}, {"stop_token_ids": ()}, Finish.ABORT),
    ("preempted", {"output_ids": [], "logprobs": [], "logprob_ids": [], "completion_tokens": 0}, {}, Finish.ABORT),
]


@pytest.mark.parametrize(("word", "changes", "sampling", "nearest"), WORDS)
def test_an_unknown_finish_reason_becomes_the_nearest_and_is_kept(
    word: str, changes: dict[str, Any], sampling: dict[str, Any], nearest: Finish
) -> None:
    response = validate(reported(finish=word, **changes), request(**sampling))
    assert (response.finish, response.finish_word) == (nearest, word)
    assert validate(reported()).finish_word is None


def test_a_stop_is_held_against_what_was_requested() -> None:
    spoken = reported(stop="there")
    refused("Law 4.*'there' ended the output.*not requested", lambda: validate(spoken, request(stop=["here"])))
    assert validate(spoken, request(stop=["here", "there"])).stop == "there"
    refused("Law 4.*ignore_eos", lambda: validate(reported(), request(ignore_eos=True, stop_token_ids=())))
    refused("Law 4.*after 3 tokens.*min_new_tokens=4", lambda: validate(reported(), request(min_new_tokens=4)))
    assert validate(reported(), request(min_new_tokens=3)).stop == EOS
    grammar = request(ignore_eos=True, stop_token_ids=(), grammar={"kind": "regex", "value": "a"})
    assert validate(reported(), grammar).stop == EOS


def test_a_stop_token_before_the_end_is_named_with_its_offset() -> None:
    ids = [EOS, EOS, EOS, 21, EOS]
    answer = reported(output_ids=ids, logprob_ids=ids, logprobs=[-1.0] * 5, completion_tokens=5)
    for least, at in ((0, 0), (1, 1), (2, 2)):
        pattern = f"Law 4.*stop token 2 at output offset {at} .* 5 tokens"
        refused(pattern, lambda least=least: validate(answer, request(min_new_tokens=least)))
    for sent in (request(min_new_tokens=3), request(ignore_eos=True), request(stop_token_ids=(9,))):
        assert validate(answer, sent).output_ids.tolist() == ids


def test_an_echo_that_was_not_requested_is_compared_if_present() -> None:
    assert validate(reported(echoed=NOTHING), request(echo=False)).prompt_length == 5
    other = reported(echoed=raw([11, 12, 13, 14, 9]))
    refused("Law 4.*prompt id 15 at offset 4.* 9", lambda: validate(other, request(echo=False)))
    longer = reported(echoed=NOTHING, prompt_tokens=6)
    refused("Law 4: the server reported prompt_tokens=6", lambda: validate(longer, request(echo=False)))


def test_a_part_of_the_prompt_proves_it_where_it_holds_the_turns_own_tokens() -> None:
    sent = replace(request(), delta_start=3)
    for start in (0, 2, 3):
        part = reported(echoed=[11, 12, 13, 14, 15][start:], echoed_from=start)
        assert validate(part, sent).echoed_from == start
    assert validate(reported(echoed=NOTHING), replace(sent, echo=False)).echoed_from == 5, "none"
    for start in (4, -1, None):
        wrong = reported(echoed=[15], echoed_from=start)
        refused("Law 4.*repeated the prompt's ids from offset", lambda wrong=wrong: validate(wrong, sent))
    other = reported(echoed=[13, 9, 15], echoed_from=2)
    refused("Law 4.*prompt id 14 at offset 1 of those from 2 on was sent.* 9", lambda: validate(other, sent))
    short = reported(echoed=[14, 15], echoed_from=2)
    refused("Law 4: 3 prompt ids were sent, but the server read 2", lambda: validate(short, sent))


def test_a_request_aborted_in_the_queue_reports_nothing() -> None:
    never = {"output_ids": [], "logprobs": [], "logprob_ids": [], "completion_tokens": 0, "echoed": NOTHING}
    answer = reported(finish="abort", prompt_tokens=None, cached_tokens=None, message="paused", **never)
    response = validate(answer, request({"top_logprobs": 2}))
    assert (response.finish, response.stop, response.message, len(response.output_ids)) == ("abort", None, "paused", 0)
    assert dict(response.columns) == {}
    refused(
        "Law 4.*completion_tokens=1.* 0",
        lambda: validate(reported(**{**never, "finish": "abort", "completion_tokens": 1})),
    )
    # one that ran is held to all of it, and may not hide a stop before its last place
    stopped = reported(finish="abort", stop=9)
    refused(
        "Law 4.*stop token 22 at output offset 1 .* 3 tokens", lambda: validate(stopped, request(stop_token_ids=(22,)))
    )
    assert validate(stopped, request(stop_token_ids=(9,))).stop is None
    whole = validate(stopped)
    assert (whole.finish, whole.stop) == (Finish.STOP, EOS), "the server's own stop is that of no token that it sampled"
    refused(
        "Law 4.*prompt_tokens=None.* 5",
        lambda: validate(reported(finish="abort", prompt_tokens=None), request(stop_token_ids=())),
    )


def scores(pairs: list[Any]) -> RawScores:
    return RawScores(
        logprobs=[logprob for _, logprob in pairs],
        token_ids=[token for token, _ in pairs],
        request_id="r7",
        response_id="cmpl-r7",
    )
