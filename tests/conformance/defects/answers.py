"""Defects of a server's responses, whole or streamed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from conformance.defects.defect import Defect, Edit
from conformance.defects.views import View
from tito_conformance.testing import ScriptedRequest


def _late(edit: Edit, after: int = 4) -> Edit:
    """Start a defect after some requests, so that the measurement at connect does not see it."""
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


def _of_request(view: View, request: ScriptedRequest) -> None:
    """What a proxy's cache does to the rollouts of a group; all but the id can be right."""
    holder = view.answer.get("meta_info", view.answer)
    name = "request_id" if "request_id" in holder else "id"
    holder[name] = holder[name][: -len(request.request_id)] + "0" * 32


def _no_stop(view: View, request: ScriptedRequest) -> None:
    if view.finish == "stop" and len(view.ids) > 1:
        view.ids = view.ids[:-1]
        view.drop_row(-1)
        view.completion_tokens -= 1


def _echo_edited(view: View, request: ScriptedRequest) -> None:
    view.echo = [*view.echo[:-1], (view.echo[-1] + 1) % request.vocab_size]


def _half_text(view: View, request: ScriptedRequest) -> None:
    view.text = view.text and view.text[: len(view.text) // 2]


def _other_ids(view: View, request: ScriptedRequest) -> None:
    """Change a token and its row, as if the server reported another token than it sampled."""
    if len(view.ids) > 1:
        other = (view.ids[0] + 1) % request.vocab_size
        view.ids = [other, *view.ids[1:]]
        view.row_ids = [other, *view.row_ids[1:]]


def _halved(view: View, request: ScriptedRequest) -> None:
    """Return the first half of an answer as if it were complete."""
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


def _one_prompt_token_more(view: View, request: ScriptedRequest) -> None:
    view.prompt_tokens += 1


def _all_cached(view: View, request: ScriptedRequest) -> None:
    view.cached_tokens = len(request.prompt_ids)


ANSWERS = (
    Defect("logprobs-of-another-token", 4, "Logprobs are those of another token.", _of_another),
    Defect("logprobs-scaled-later", 11, "Logprobs are scaled, after some requests.", _late(_scaled)),
    Defect("logprobs-shifted", 4, "Logprobs are shifted by one token.", _shifted),
    Defect("logprob-zero", 4, "A missing logprob is 0.0.", _one(0.0)),
    Defect("logprob-null", 4, "A missing logprob is null.", _one(None)),
    Defect("answer-of-another-request", 4, "An answer is that of another request with the same prompt.", _of_request),
    Defect("stop-token-dropped", 4, "The stop token is missing.", _no_stop),
    Defect("echo-edited", 4, "The echoed prompt has another last token.", _echo_edited),
    Defect("text-halved", 4, "The text is half of what the ids say.", _half_text, wires=("vllm-completions", "sglang")),
    Defect("token-changed", 4, "A reported token differs from the sampled one.", _other_ids),
    Defect("answer-halved", 4, "Half an answer is reported as complete.", _halved),
    Defect("length-called-stop", 4, "A truncated answer is reported as stopped.", _finish("length", "stop")),
    Defect("finish-unknown", 4, "The finish reason is unknown.", _finish("stop", "tired")),
    Defect("usage-prompt", 4, "The prompt token count is one too high.", _one_prompt_token_more),
    Defect("cached-whole", 4, "All tokens of the prompt are reported as cached.", _all_cached),
    Defect(
        "versions-with-a-gap",
        10,
        "Version spans skip a token.",
        _spans(lambda n: [("a", 0, 1), ("b", 2, n)]),
        wires=("vllm", "sglang"),
    ),
    Defect(
        "versions-stale",
        10,
        "Answers name weights that the server does not have.",
        _spans(lambda n: [("a", 0, n)]),
        wires=("sglang",),
    ),
)
"""Defects of responses."""


def _lost(events: list[Any]) -> None:
    del events[1]


def _cut_off(events: list[Any]) -> None:
    del events[3:]


OF_EVENTS = ("vllm", "vllm-completions")
"""Wires whose events hold new tokens only. SGLang's repeat all tokens, so a lost or repeated event changes nothing."""
STREAMS = (
    Defect("event-lost", 4, "A stream event is lost.", events=_lost, wires=OF_EVENTS),
    Defect("stream-cut-off", 4, "A stream ends early without an error.", events=_cut_off),
)
"""Defects of streamed responses."""
