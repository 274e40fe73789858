"""Random turns of every kind, derived from a string of bytes, as plain values and as drafts."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import numpy as np

from support.oracle import PROMPT_KINDS, Oracle, PlainTurn
from tito_core.ledger import (
    Branch,
    CallRecord,
    Column,
    Columns,
    Draft,
    EngineRecord,
    Finish,
    Image,
    LawViolationError,
    MediaSpan,
    Reason,
    Sampling,
    Semantics,
    Server,
    VersionSpan,
)
from tito_core.ledger.history import extended

T = TypeVar("T")

IDS = [200, 201, 202, 0, 2**31 - 1]
# Bounds of valid logprobs: just above the sentinel, the smallest float32, rounding above zero.
LOGPROBS = [-1.0, -0.5, -2.25, 0.0, -0.0, -9998.0, -(2.0**-149), 2.0**-14]
SAMPLINGS: list[dict[str, Any]] = [
    {"temperature": 1.0},
    {"temperature": 1},
    {"temperature": True},
    {},
    {"temperature": 1.0, "seed": 2**63, "stop": ["a", "ü"], "extra": {"deep": [None, {"x": 0.5}]}},
    {"temperature": 1.0, "seed": None},
]
SERVERS: list[tuple[str, str, bool | None, float | None, bool, str]] = [
    ("scripted", "m", False, 1.0, False, "test"),
    ("scripted", "m", True, 0.5, True, "test"),
    ("scripted", "adapter", False, 1.0, False, "test"),
    ("other", "m", None, None, False, "unknown"),
    ("other", "m", None, 1.0, False, "None"),
]
IMAGES = [Image(b"one", "png", 1, 2), Image(b"", "jpeg", 3, 4), Image(bytes(range(256)), "webp", 2**31, 1)]
CALLS: list[tuple[str | None, str, str]] = [
    ("look", "ok", ""),
    (None, "malformed", "It has no name."),
    ("look\nturn 0  ", "malformed", "A name\nof two lines."),
    ("look", "truncated", "It was cut."),
]
# Values at the bounds of each type, and the smallest type that holds them.
INTEGERS: list[tuple[list[int], str]] = [
    ([0, 255], "|u1"),
    ([-1, 127], "|i1"),
    ([-128, 0], "|i1"),
    ([256, 0], "<u2"),
    ([0, 65535], "<u2"),
    ([-1, 128], "<i2"),
    ([-129, 5], "<i2"),
    ([-32768, 32767], "<i2"),
    ([65536, 0], "<i4"),
    ([-1, 32768], "<i4"),
    ([-(2**31), 2**31 - 1], "<i4"),
]
FLOATS = [-1.0, 0.0, -0.25, -(2.0**-149), -3.0]


class Dice:
    """Choices read from a string of bytes. Zeros, and reads beyond its end, choose the simplest option."""

    def __init__(self, data: bytes) -> None:
        self._left = iter(data)

    def pick(self, options: Sequence[T]) -> T:
        return options[next(self._left, 0) % len(options)]

    def number(self, below: int) -> int:
        return next(self._left, 0) % below

    def seldom(self) -> bool:
        return next(self._left, 0) >= 192


def random_turn(dice: Dice, oracle: Oracle, parent: int | None) -> PlainTurn:
    """Return a valid turn after `parent`."""
    start = oracle.length(parent)
    kinds = list(PROMPT_KINDS)
    prompt = [(dice.pick(IDS), dice.pick(kinds)) for _ in range(dice.pick([1, 2, 0, 4]))]
    output = [(dice.pick(IDS), dice.pick(LOGPROBS)) for _ in range(dice.pick([1, 2, 0, 4]))]
    middle, stop = start + len(prompt), start + len(prompt) + len(output)
    calls = []
    for name, status, reason in [dice.pick(CALLS) for _ in range(dice.pick([0, 0, 1, 2]))]:
        calls.append((name, status, 0, len(output), reason))
    turn = PlainTurn(
        parent=parent,
        prompt=prompt,
        output=output,
        constrained=dice.seldom(),
        finish=dice.pick(["stop", "length"]),
        stop=dice.pick([None, 2, 0, "END", ""]),
        sampling=dice.pick(SAMPLINGS),
        max_new_tokens=dice.pick([64, 1, 2**40]),
        server=dice.pick(SERVERS),
        request=dice.pick(["request", "", "ü"]),
        latency_s=dice.pick([0.25, 0.0]),
        cached=dice.pick([None, 0, 7]),
        versions=_versions(dice, len(output)),
        calls=calls,
        reasoning_closed=not dice.seldom(),
        branch=_branch(dice, oracle, parent),
        extras=_extras(dice, middle, stop),
        media=[],
        history=None,
        word=dice.pick([None, None, "repetition"]),
        unordered=dice.seldom(),
    )
    if prompt and dice.seldom():
        turn.media.append((start, 1, bytes(32), "", 0, 0))
        if len(prompt) > 1:
            image = dice.pick(IMAGES)
            turn.prompt[1:] = [(200, "prompt")] * (len(prompt) - 1)
            digest = hashlib.sha256(image.data).digest()
            turn.media.append((start + 1, len(prompt) - 1, digest, image.format, image.width, image.height))
    return turn


def images_of(draft: Draft) -> list[Image]:
    """Return the images that a draft shows, out of `IMAGES`."""
    return [image for span in draft.media for image in IMAGES if image.sha256 == span.sha256]


def _versions(dice: Dice, output: int) -> list[tuple[int, int, str | None]]:
    cuts = sorted({dice.number(output + 1) for _ in range(dice.pick([0, 0, 1, 2]))} | {0})
    if dice.seldom():
        cuts.insert(0, 0)  # an empty span
    spans = [(a, b, dice.pick([None, "v1", "v2", ""])) for a, b in zip(cuts, [*cuts[1:], output], strict=True)]
    return spans if output or dice.seldom() else []


def _branch(dice: Dice, oracle: Oracle, parent: int | None) -> tuple[str, int | None, int | None, str] | None:
    has_sibling = any(turn.parent == parent for turn in oracle.turns)
    if not has_sibling or dice.seldom():  # or it was prepared before the sibling was committed
        return None
    reason = dice.pick([str(reason) for reason in Reason])
    turn = dice.pick([None, *range(len(oracle.turns))])
    return reason, turn, dice.pick([None, 0, 3]), dice.pick(["", "tools"])


def _extras(dice: Dice, middle: int, stop: int) -> dict[str, tuple[int, list[Any], str]]:
    extras: dict[str, tuple[int, list[Any], str]] = {}
    output = stop - middle
    if dice.seldom():
        start = dice.number(stop + 1)
        values = [dice.pick([float("nan"), *FLOATS]) for _ in range(dice.number(stop - start + 1))]
        extras["prompt_logprobs"] = (start, values, "<f4")
    if dice.seldom():
        rows = dice.number(stop + 1)
        (low, high), dtype = dice.pick(INTEGERS)
        values = [[[low, high]] for _ in range(rows)]
        extras["routed_experts"] = (stop - rows, values, dtype if rows else "|u1")
    if dice.seldom() and output:
        extras["top_ids"] = (middle, [[0, 255]] * output, "|u1")
        extras["top_logprobs"] = (middle, [[dice.pick(FLOATS), -7.0] for _ in range(output)], "<f4")
    if dice.seldom() and output:
        extras["sampling_mask"] = (middle, [[-1, dice.pick([7, 127])]] * output, "|i1")
    return extras


def draft_of(turn: PlainTurn) -> Draft:
    """Return a turn as a draft."""
    backend, model, processed, temperature, adjusted, source = turn.server
    return Draft(
        parent=turn.parent,
        columns=Columns.pack(
            np.array([token for token, _ in turn.prompt], np.int32),
            np.array([PROMPT_KINDS[kind] for _, kind in turn.prompt], np.uint8),
            np.array([token for token, _ in turn.output], np.int64),
            np.array([logprob for _, logprob in turn.output], np.float64),
        ),
        constrained=turn.constrained,
        prompt_length=0,  # the caller sets it
        finish=Finish(turn.finish),
        stop=turn.stop,
        fingerprint=turn.fingerprint,
        sampling=Sampling(turn.sampling),
        max_new_tokens=turn.max_new_tokens,
        calls=tuple(CallRecord(*call) for call in turn.calls),
        engine=EngineRecord(
            Server(backend, model, Semantics(processed, temperature, adjusted, source)),
            turn.request,
            turn.latency_s,
            turn.cached,
            tuple(VersionSpan(*span) for span in turn.versions),
            finish_word=turn.word,
            unordered=turn.unordered,
        ),
        reasoning_closed=turn.reasoning_closed,
        branch=None if turn.branch is None else Branch(Reason(turn.branch[0]), *turn.branch[1:]),
        extras={name: _column(*column) for name, column in turn.extras.items()},
        media=tuple(MediaSpan(*span) for span in turn.media),
    )


def _column(start: int, rows: list[Any], dtype: str) -> Column:
    if rows:
        return Column.of(start, rows)
    return Column.of(start, np.zeros((0, 1, 2), np.int64) if dtype != "<f4" else np.zeros(0))


def digest_of(history: Sequence[Any]) -> bytes:
    """Return the digest of a history, opening and answer included, as the model does for a draft's fingerprint."""
    digest = b""
    for message in history:
        digest = extended(digest, message)
    return digest


def broken(dice: Dice, good: Draft, oracle: Oracle) -> tuple[Draft, type[Exception]]:
    """Return a draft that breaks one law, and the error that refuses it."""
    start, turns = oracle.length(good.parent), len(oracle.turns)
    stop = start + good.columns.prompt + good.columns.output
    engine = good.engine

    def columns(prompt: int, kind: int, output: int, logprob: float) -> Columns:
        return Columns.pack(
            np.full(good.columns.prompt + 1, prompt, np.int64), np.full(good.columns.prompt + 1, kind, np.uint8),
            np.full(good.columns.output + 1, output, np.int64), np.full(good.columns.output + 1, logprob),
        )  # fmt: skip

    longer = {
        "prompt_length": good.prompt_length + 1,
        "engine": _with_versions(engine, [(0, good.columns.output + 1, None)]),
        "extras": {},
        "media": (),
    }
    is_first = all(turn.parent != good.parent for turn in oracle.turns)

    def with_logprob(value: float) -> dict[str, Any]:
        return {"columns": columns(1, 0, 1, value), **longer}

    changes: list[Callable[[], dict[str, Any]]] = [
        lambda: {"prompt_length": good.prompt_length + 1},
        lambda: {"columns": columns(-1, 0, 1, -1.0), **longer},
        lambda: {"columns": columns(1, 3, 1, -1.0), **longer},
        lambda: {"columns": columns(1, 255, 1, -1.0), **longer},
        lambda: {"columns": columns(1, 0, -1, -1.0), **longer},
        *(partial(with_logprob, bad) for bad in (np.nan, np.inf, -np.inf, 0.001, -9999.0, -1e300)),
        lambda: {"engine": _with_versions(engine, [(0, good.columns.output + 1, "v")])},
        lambda: {"engine": _with_versions(engine, [(1, good.columns.output, "v")])},
        lambda: {"engine": _with_versions(engine, [(0, good.columns.output, "v"), (good.columns.output + 1, 0, "v")])},
        lambda: {"extras": {"prompt_logprobs": Column.of(-1, [0.0])}},
        lambda: {"extras": {"routed_experts": Column.of(stop, [[1]])}},
        lambda: {
            "extras": {"top_ids": Column.of(start + good.columns.prompt + 1, np.zeros((good.columns.output, 2), int))}
        },
        lambda: {"extras": {"sampling_mask": Column.of(stop - good.columns.output, [[1]] * (good.columns.output + 1))}},
        lambda: {"media": (MediaSpan(start, good.columns.prompt + 1, bytes(32)),)},
        lambda: {"media": (MediaSpan(start - 1, 1, bytes(32)),)},
        lambda: {"media": (MediaSpan(start, 0, bytes(32)),)},
        lambda: {"media": (MediaSpan(start, 1, bytes(32), "png", 1, 1),)},
        lambda: {"media": (MediaSpan(start, 1, IMAGES[0].sha256, "png", 1, 1),)},
        lambda: {"parent": turns},
        lambda: {"parent": -1},
        lambda: {"branch": Branch(Reason.EDIT) if is_first else Branch(Reason.EDIT, turns)},
        lambda: {"branch": Branch(Reason.EDIT) if is_first else Branch(Reason.RETRY, -1)},
    ]
    change = dice.pick(changes)()
    return replace(good, **change), IndexError if "parent" in change else LawViolationError


def _with_versions(engine: EngineRecord, spans: Sequence[tuple[int, int, str | None]]) -> EngineRecord:
    return replace(engine, versions=tuple(VersionSpan(*span) for span in spans))
