"""Defects of what a server writes on the wire, whole or as a stream."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from conformance.defects.answer_views import View
from conformance.defects.defect import Defect, Edit
from strands_tito.testing import ScriptedRequest


def _late(edit: Edit, after: int = 4) -> Edit:
    """Begin with a defect only after some requests, so that what is measured at connect does not know of it."""
    return lambda view, request: edit(view, request) if request.number >= after else None


def _shifted(view: View, request: ScriptedRequest) -> None:
    view.logprobs = view.logprobs[1:] + view.logprobs[:1]


def _of_another(view: View, request: ScriptedRequest) -> None:
    view.logprobs = [value - 0.7 for value in view.logprobs]


def _scaled(view: View, request: ScriptedRequest) -> None:
    view.logprobs = [value * 0.5 for value in view.logprobs]


def _one(value: Any) -> Edit:
    def change(view: View, request: ScriptedRequest) -> None:
        view.logprobs = [*view.logprobs[:-1], value] if view.logprobs else []

    return change


def _short(view: View, request: ScriptedRequest) -> None:
    view.drop_row(-1)


def _other_rows(view: View, request: ScriptedRequest) -> None:
    view.row_ids = [(token + 1) % request.vocab_size for token in view.row_ids]


def _no_stop(view: View, request: ScriptedRequest) -> None:
    if view.finish == "stop" and len(view.ids) > 1:
        view.ids = view.ids[:-1]
        view.drop_row(-1)
        view.completion_tokens -= 1


def _stop_twice(view: View, request: ScriptedRequest) -> None:
    if view.finish == "stop" and view.ids:
        view.repeat_row(-1)
        view.ids = [*view.ids, view.ids[-1]]
        view.completion_tokens += 1


def _stop_in_ids_only(view: View, request: ScriptedRequest) -> None:
    if view.finish == "stop":
        view.drop_row(-1)


def _echo_edited(view: View, request: ScriptedRequest) -> None:
    view.echo = [*view.echo[:-1], (view.echo[-1] + 1) % request.vocab_size]


def _echo_short(view: View, request: ScriptedRequest) -> None:
    view.echo = view.echo[:-1]


def _echo_long(view: View, request: ScriptedRequest) -> None:
    view.echo = [view.echo[0], *view.echo]


def _echo_missing(view: View, request: ScriptedRequest) -> None:
    view.echo = None


def _other_text(view: View, request: ScriptedRequest) -> None:
    view.text = "something else"


def _other_ids(view: View, request: ScriptedRequest) -> None:
    """Change a token and its row, as a server that reports another token than it went on with."""
    if len(view.ids) > 1:
        other = (view.ids[0] + 1) % request.vocab_size
        view.ids = [other, *view.ids[1:]]
        view.row_ids = [other, *view.row_ids[1:]]


def _halved(view: View, request: ScriptedRequest) -> None:
    """Give the first half of an answer as if it were the whole."""
    half = len(view.ids) // 2
    if half:
        while len(view.ids) > half:
            view.ids = view.ids[:-1]
            view.drop_row(-1)
        view.completion_tokens = half
        view.finish = "stop"


def _finish(old: str, new: str) -> Edit:
    def change(view: View, request: ScriptedRequest) -> None:
        if view.finish == old:
            view.finish = new

    return change


def _spans(change: Callable[[int], list[tuple[str, int, int]]]) -> Edit:
    def edit(view: View, request: ScriptedRequest) -> None:
        if len(view.ids) > 2:
            view.versions = change(len(view.ids))

    return edit


def _usage(prompt: int = 0, completion: int = 0) -> Edit:
    def change(view: View, request: ScriptedRequest) -> None:
        view.prompt_tokens += prompt
        view.completion_tokens += completion

    return change


def _cached(by: Callable[[int], int]) -> Edit:
    def change(view: View, request: ScriptedRequest) -> None:
        view.cached_tokens = by(len(request.prompt_ids))

    return change


def _too_long(view: View, request: ScriptedRequest) -> None:
    if view.finish == "length":
        view.repeat_row(-1)
        view.ids = [*view.ids, view.ids[-1]]
        view.completion_tokens += 1


def _nothing(view: View, request: ScriptedRequest) -> None:
    view.ids, view.completion_tokens = [], 0
    while view.row_ids:
        view.drop_row(-1)


def _stopped_by_another(view: View, request: ScriptedRequest) -> None:
    if isinstance(view.part.get("stop_reason"), str):
        view.part["stop_reason"] = "\N{SNOWMAN}"


ANSWERS = (
    Defect("logprobs-shifted", 4, "Logprobs are shifted by one token.", _shifted),
    Defect("logprobs-of-another-token", 4, "Logprobs are those of another token.", _of_another),
    Defect("logprobs-scaled-later", 11, "Logprobs are divided by something in silence, after a while.", _late(_scaled)),
    Defect("logprobs-shifted-later", 4, "Logprobs are shifted by one token, after a while.", _late(_shifted)),
    Defect("logprob-zero", 4, "A missing logprob is 0.0.", _one(0.0)),
    Defect("logprob-sentinel", 4, "A missing logprob is -9999.", _one(-9999.0)),
    Defect("logprob-null", 4, "A missing logprob is null.", _one(None)),
    Defect("logprob-nan", 4, "A logprob is NaN.", _one(float("nan"))),
    Defect("logprob-positive", 4, "A logprob is above 0.", _one(0.5)),
    Defect("logprob-minus-infinity", 4, "A logprob is minus infinity.", _one(float("-inf"))),
    Defect("logprobs-short", 2, "There is a logprob less than tokens.", _short),
    Defect("logprobs-named-wrong", 4, "Logprobs name other tokens than the answer's.", _other_rows),
    Defect("stop-token-dropped", 4, "The stop token is not in the answer.", _no_stop),
    Defect("stop-token-doubled", 4, "The stop token is there twice.", _stop_twice),
    Defect("stop-token-without-logprob", 2, "The stop token is in the ids alone.", _stop_in_ids_only),
    Defect("echo-edited", 4, "The server read another last token.", _echo_edited),
    Defect("echo-short", 4, "The server cut the prompt.", _echo_short),
    Defect("echo-with-bos", 4, "The server put a token before the prompt.", _echo_long),
    Defect("echo-missing", 4, "The server echoes nothing.", _echo_missing),
    Defect("text-of-others", 4, "The text is not that of the ids.", _other_text, wires=("vllm-completions", "sglang")),
    Defect("token-changed", 4, "A reported token is not the one that was sampled.", _other_ids),
    Defect("answer-halved", 4, "Half an answer is called whole.", _halved),
    Defect("answer-empty", 4, "An answer has no token.", _nothing),
    Defect("length-called-stop", 4, "A truncated answer is called stopped.", _finish("length", "stop")),
    Defect("stop-called-length", 4, "A stopped answer is called truncated.", _finish("stop", "length")),
    Defect(
        "stop-string-not-there",
        4,
        "An answer is said to end by a stop string that it does not hold.",
        _stopped_by_another,
        wires=("vllm", "vllm-completions"),
    ),
    Defect("finish-unknown", 4, "An answer ends for a reason that nobody knows.", _finish("stop", "tired")),
    Defect("usage-prompt", 4, "The server counts a prompt token too many.", _usage(prompt=1)),
    Defect("usage-prompt-less", 4, "The server counts a prompt token too few.", _usage(prompt=-1)),
    Defect("usage-completion", 4, "The server counts a completion token too many.", _usage(completion=1)),
    Defect("cached-too-many", 4, "More tokens are cached than the prompt has.", _cached(lambda n: n + 1)),
    Defect("cached-negative", 4, "Fewer tokens than none are cached.", _cached(lambda n: -1)),
    Defect("longer-than-asked", 4, "An answer is longer than was asked for.", _too_long),
    Defect(
        "versions-with-a-gap",
        10,
        "Weight versions leave out a token.",
        _spans(lambda n: [("a", 0, 1), ("b", 2, n)]),
        wires=("vllm", "sglang"),
    ),
    Defect(
        "versions-overlap",
        10,
        "Weight versions claim a token twice.",
        _spans(lambda n: [("a", 0, 2), ("b", 1, n)]),
        wires=("vllm", "sglang"),
    ),
    Defect(
        "versions-short",
        10,
        "Weight versions end early.",
        _spans(lambda n: [("a", 0, n - 1)]),
        wires=("vllm", "sglang"),
    ),
    Defect(
        "versions-long", 10, "Weight versions end late.", _spans(lambda n: [("a", 0, n + 1)]), wires=("vllm", "sglang")
    ),
)
"""Defects of what is written on the wire."""


def _repeated(events: list[Any]) -> None:
    events.insert(2, events[1])


def _lost(events: list[Any]) -> None:
    del events[1]


def _swapped(events: list[Any]) -> None:
    events[1], events[2] = events[2], events[1]


def _cut_off(events: list[Any]) -> None:
    del events[3:]


OF_EVENTS = ("vllm", "vllm-completions")
"""Wires whose events hold new tokens only; SGLang's repeat all, so that one lost or doubled changes nothing."""
STREAMS = (
    Defect("event-repeated", 4, "An event of a stream comes twice.", events=_repeated, wires=OF_EVENTS),
    Defect("event-lost", 4, "An event of a stream is lost.", events=_lost, wires=OF_EVENTS),
    Defect("events-swapped", 4, "Two events of a stream change places.", events=_swapped, wires=OF_EVENTS),
    Defect("stream-cut-off", 4, "A stream ends early, as if it were whole.", events=_cut_off),
)
"""Defects of streamed answers."""
