"""Validation of optional outputs: each wrong value is refused, and right values become columns."""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import pytest

from support.backends import PROMPT
from support.reported import OUTPUT, READER, refused, request
from tito_core.backend import RawResponse
from tito_core.backend.images import PromptImages
from tito_core.backend.optional_columns import ColumnValidation
from tito_core.ledger import Image

NAMES = {"top": "top_logprobs", "prompt": "prompt_logprobs", "experts": "routed_experts", "mask": "sampling_mask"}
TOP = [(21, -1.0), (30, -1.5)], [(22, -2.0), (30, -0.5)], [(2, -3.0), (31, -0.1)]
FLAT = list(range(7 * 2 * 2))


def packed(values: Sequence[int], dtype: str = "<i4") -> str:
    return base64.b64encode(np.array(values, dtype).tobytes()).decode()


def npy(array: Any) -> str:
    stream = io.BytesIO()
    np.lib.format.write_array(stream, np.asarray(array))
    return base64.b64encode(stream.getvalue()).decode()


def columns(optional_outputs: Any, delta_start: int = 0, top_k: int = -1, **values: Any) -> Any:
    if isinstance(rows := values.get("top"), list | tuple):
        values["top"] = lambda: rows
    sent = request(optional_outputs, delta_start=delta_start, top_k=top_k)
    logprobs = np.array([-1.0, -2.0, -3.0], np.float32)
    raw = RawResponse(
        finish="stop", output_ids=OUTPUT, logprobs=logprobs, **{NAMES[name]: values[name] for name in values}
    )
    return ColumnValidation(READER, sent, np.array(OUTPUT, np.int32), logprobs).columns(raw)


@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize(
    ("recomputed", "spans", "first"),
    [
        (False, [(0, 2, "one"), (2, 3, "two")], 3),
        (True, [(0, 3, "one")], 3),
        (True, [(0, 2, "one"), (2, 3, "two")], 6),
        (True, [(0, 1, "one"), (1, 3, "two")], 5),
    ],
)
def test_experts_that_newer_weights_chose_for_older_ones_tokens_are_left_out(
    whole: bool, recomputed: bool, spans: Any, first: int
) -> None:
    table = np.arange(7 * 2 * 2).reshape(7, 2, 2)  # the prompt has 5 tokens, and the last output token no row
    raw = RawResponse(
        finish="stop",
        output_ids=OUTPUT,
        logprobs=(logprobs := np.array([-1.0, -2.0, -3.0], np.float32)),
        routed_experts=table if whole else table[3:],
        versions=spans,
        recomputed=recomputed,
    )
    sent = request({"routed_experts": True}, delta_start=4)
    column = ColumnValidation(READER, sent, np.array(OUTPUT, np.int32), logprobs).columns(raw)["routed_experts"]
    assert column.start == first
    assert column.values.tolist() == table[first:].tolist()


WRONG: list[tuple[dict[str, Any], str]] = [
    ({}, "Law 4.*no top_logprobs"),
    (
        {"top": [*TOP[:2], [(2, -3.0), (5, -0.1), (5, -0.2)]]},
        r"Law 4.*output token 2 .*two logprobs.*\(5, -0\.1\), \(5, -0\.2\)",
    ),
    ({"top": [*TOP[:2], [(2, -3.0), ("x", -0.1)]]}, "Law 2.*'x'.*output token 2"),
    ({"top": [*TOP[:2], [(2, -3.0), (2**31, -0.1)]]}, "Law 2.*2147483648.*output token 2"),
]


@pytest.mark.parametrize(("values", "pattern"), WRONG)
def test_wrong_optional_outputs_are_refused(values: dict[str, Any], pattern: str) -> None:
    refused(pattern, lambda: columns({"top_logprobs": 2}, **values))


PROMPT_SCORES = [(token, -1.0) for token in PROMPT[1:]]
MASK = [[21, 9], [22, 9], [2, 9]]


def at_2(pair: tuple[int, float]) -> list[tuple[int, float]]:
    """Return scores of the prompt of which one, at offset 2, is another."""
    return [PROMPT_SCORES[0], pair, *PROMPT_SCORES[2:]]


@pytest.mark.parametrize(
    ("wanted", "value", "pattern"),
    [
        ("top", [*TOP[:1], [(22, -2.0)], *TOP[2:]], "2 top_logprobs .*output token 1 has 1"),
        ("top", [*TOP[:1], [(22, -2.0)] * 3, *TOP[2:]], "2 top_logprobs .* has 1"),
        ("top", [*TOP[:1], [(22, -2.1), (30, -0.5)], *TOP[2:]], "Law 4: .*(list another|two logprobs)"),
        ("top", [*TOP[:1], [(31, -2.5), (30, -2.6)], *TOP[2:]], "Law 4: .*offset 1 .*missing.*top_logprobs"),
        ("top", [*TOP[:1], [(22, -2.0), (30, 19.5)], *TOP[2:]], "Law 4: a top logprob is .*not a log-prob"),
        ("prompt", PROMPT_SCORES[:-1], "Law 2: prompt_logprobs of 4 tokens from offset 1"),
        ("prompt", at_2((99, -1.0)), "prompt id 13 at offset 2 .* 99"),
        ("prompt", at_2((13, 1.5)), "logprob 1.5"),
        ("prompt", at_2((13, -9999.0)), "logprob -9999.0"),
        ("experts", np.zeros((6, 2, 2), int), "Law 2: routed_experts have 6 rows, expected 7"),
        ("experts", np.zeros((8, 2, 2), int), "have 8 rows, expected 7"),
        ("experts", np.zeros((7, 1, 2), int), "Law 2: routed_experts have"),
        ("experts", npy(np.zeros((7, 2, 2), np.float32)), "Law 2: routed_experts cannot be read.*float32"),
        ("mask", [MASK[0], [7, 9], MASK[2]], "Law 4: .*offset 1 .*not among the 2 ids"),
        ("mask", MASK[:-1], "Law 2: .*3 output ids, but sampling_mask of 2 tokens"),
        ("mask", [[21, 9] * 2, *MASK[1:]], "sampling_mask of output token 0 .*twice"),
        ("mask", [[21, -1], *MASK[1:]], "token id -1 .*output token 0"),
    ],
)
def test_a_column_that_does_not_agree_is_refused_with_its_values(wanted: str, value: Any, pattern: str) -> None:
    asked: dict[str, Any] = {"top": 2, "prompt": True, "experts": (2, 2), "mask": True}
    refused(pattern, lambda: columns({NAMES[wanted]: asked[wanted]}, top_k=2, **{wanted: value}))


def test_an_unknown_expert_shape_is_read_from_the_array() -> None:
    refused(
        r"Law 2.*\(7, 4\).*\(7, layers, experts\)",
        lambda: columns({"routed_experts": True}, experts=packed(FLAT)),
    )
    found = columns({"routed_experts": True}, experts=npy(np.reshape(FLAT, (7, 2, 2))))["routed_experts"]
    assert (found.start, found.shape) == (0, (7, 2, 2))


def test_rows_requested_from_the_delta_on() -> None:
    def experts(text: str) -> Any:
        return lambda: columns({"routed_experts": (2, 2)}, delta_start=3, experts=text)

    refused(r"Law 2.*\(1, 6\).*\(5, 2, 2\)", experts(packed(range(6))))
    refused("Law 2.*6 rows.* 7 or .*2.* 5", experts(packed(range(24))))
    large = npy(np.full((5, 2, 2), 2**40))
    refused("Law 2.*1099511627776.*int32", experts(large))


def test_bare_rows_of_an_unknown_shape_have_the_largest_possible_count() -> None:
    token_request = replace(request({"routed_experts": True}, delta_start=3), is_probe=True)
    logprobs = np.array([-1.0, -2.0, -3.0], np.float32)
    for rows in (7, 5):
        text = packed(range(rows * 4))
        found = ColumnValidation(READER, token_request, np.array(OUTPUT, np.int32), logprobs).columns(
            RawResponse(finish="stop", output_ids=OUTPUT, logprobs=logprobs, routed_experts=text)
        )
        column = found["routed_experts"]
        assert (column.start, column.shape) == (2, (5, 4))
        assert column.values.ravel().tolist() == list(range(rows * 4))[-20:]


def test_top_logprobs_that_cannot_be_decoded_are_refused() -> None:
    def decoded() -> Any:
        return msgspec.json.decode(b"[1,", type=list[int])

    refused(
        "Law 2.*top_logprobs cannot be read.*truncated",
        lambda: columns({"top_logprobs": 2}, top=decoded),
    )


def test_top_tokens_are_sorted_and_masked_ones_come_last() -> None:
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


@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("packing", ["bare", "npy", "old npy", "fortran"])
def test_routed_experts_begin_one_before_the_delta_whether_whole_or_cut(whole: bool, packing: str) -> None:
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
        rows = [[21, 5, 0], [22, -1, -1], [2, 9, -1]]
        assert (found.start, found.values.dtype.kind) == (len(PROMPT), "i")
        assert found.values.tolist() == [[*row, *[-1] * (width - 3)] for row in rows]
    greedy = columns({"sampling_mask": True}, top_k=-1, mask=[[21], [22], [2]])["sampling_mask"]
    assert greedy.values.tolist() == [[21], [22], [2]]


def test_an_id_that_is_listed_twice_with_one_logprob_counts_once() -> None:
    found = columns({"top_logprobs": 2}, top=[[(21, -1.0), (21, -1.0), (30, -1.5)], *TOP[1:]])
    assert found["top_ids"].values[0].tolist() == [21, 30]
    assert found["top_logprobs"].values[0].tolist() == [-1.0, -1.5]
    everywhere = [[*row, row[0]] for row in TOP]
    assert columns({"top_logprobs": 2}, top=everywhere)["top_ids"].values.shape == (3, 2)


def test_rows_of_different_lengths_keep_the_top_k() -> None:
    found = columns({"top_logprobs": 2}, top=[[(40, -4.0), (21, -1.0), (30, -1.5), (31, None)], *TOP[1:]])
    assert found["top_ids"].values.tolist() == [[21, 30], [30, 22], [31, 2]]
    assert found["top_logprobs"].values.tolist() == np.float32([[-1.0, -1.5], [-0.5, -2.0], [-0.1, -3.0]]).tolist()


def test_values_of_numpy_are_pythons() -> None:
    rows = [[(np.int32(token), np.float32(logprob)) for token, logprob in row] for row in TOP]
    found = columns({"top_logprobs": 2}, top=rows)
    assert found["top_ids"].values.tolist() == [[21, 30], [30, 22], [31, 2]]


def test_logprobs_of_image_tokens_in_the_prompt_are_missing() -> None:
    """Engines report another id there, and a number that means nothing."""
    sent = replace(
        request({"prompt_logprobs": True}),
        images=PromptImages((Image(b"x", "png", 28, 28),), PROMPT[2], (1,)),
    )
    logprobs = np.array([-1.0, -2.0, -3.0], np.float32)

    def column(*prompt: Any) -> Any:
        raw = RawResponse(finish="stop", output_ids=OUTPUT, logprobs=logprobs, prompt_logprobs=prompt)
        return ColumnValidation(READER, sent, np.array(OUTPUT, np.int32), logprobs).columns(raw)["prompt_logprobs"]

    for token, number in ((99, 7.0), (99, None), (PROMPT[2], -1.0)):
        found = column((12, -1.0), (token, number), (14, -2.0), (15, -3.0))
        assert (found.start, np.nan_to_num(found.values, nan=9.0).tolist()) == (1, [-1.0, 9.0, -2.0, -3.0])
    refused("Law 4.*id 12 at offset 1.*99", lambda: column((99, -1.0), (13, -1.0), (14, -2.0), (15, -3.0)))
