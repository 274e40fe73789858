"""Planted defects: a server, or the client itself, that is wrong in one way, to show that the suite notices."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

from tito_conformance.answer_views import View, view_of
from tito_conformance.scripted_policy import ConformancePolicy
from tito_conformance.wire_log import TransportFactory
from tito_core.testing import Completion, Fault, InProcessTransport, Script, ScriptedRequest, scripted_engine

Edit = Callable[[View, ScriptedRequest], None]
Wrap = Callable[[Script], Script]
LEAST_EVENTS = 5
"""Streams of fewer events are left alone."""
SERVERS = ("vllm", "vllm-completions", "sglang")
"""The wires of the scripted engines; vLLM has two."""


@dataclass(frozen=True)
class Defect:
    """One thing that is wrong.

    Attributes:
        name: Short and unique.
        law: The law that it breaks.
        what: What is wrong, as a sentence.
        edit: Changes an answer, or None.
        wrap: Changes what the policy says, or None.
        events: Changes the events of a streamed answer, or None.
        client: Changes the client while it lasts, or None.
        wires: Those on which it can be planted.
    """

    name: str
    law: int
    what: str
    edit: Edit | None = None
    wrap: Wrap | None = None
    events: Callable[[list[Any]], None] | None = None
    client: Callable[[], AbstractContextManager[Any]] = nullcontext
    wires: tuple[str, ...] = SERVERS

    def fault(self, wire: str) -> Callable[[int, ScriptedRequest], Fault | None] | None:
        """Give the fault that plants it in answers of a wire."""
        if self.edit is None and self.events is None:
            return None

        def of_request(number: int, request: ScriptedRequest) -> Fault | None:
            measured = request.ignore_eos and request.temperature == 2.0  # at connect
            if request.scoring or request.max_new_tokens == 0 or measured:
                return None

            def change(answer: Any) -> None:
                if isinstance(answer, list):
                    if self.events is not None and len(answer) > LEAST_EVENTS:
                        self.events(answer)
                elif self.edit is not None:
                    self.edit(view_of(wire, answer), request)

            return Fault(edit=change)

        return of_request


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


def _asked(**changes: Any) -> Wrap:
    """Make a policy that does not hear some parameters."""
    return lambda script: _Wrapped(script, lambda request: replace(request, **changes))


class _Wrapped:
    """A script that hears another request, and scores as before."""

    def __init__(self, script: Any, heard: Callable[[ScriptedRequest], ScriptedRequest]) -> None:
        self.script = script
        self.heard = heard
        self.score, self.top = script.score, script.top

    def __call__(self, request: ScriptedRequest) -> Completion:
        other = self.heard(request)
        completion: Completion = self.script(other)
        if completion.finish is None and completion.output_ids and completion.output_ids[-1] in other.stop_ids:
            return replace(completion, finish="stop", stop=completion.output_ids[-1])  # though the request says go on
        return completion


def _seedless(script: Any) -> Script:
    return _Wrapped(script, lambda request: replace(request, seed=request.number))


def _of_the_neighbour(script: Any) -> Script:
    """Answer each prompt as if it were the one before."""
    before: list[tuple[int, ...]] = []

    def heard(request: ScriptedRequest) -> ScriptedRequest:
        before.append(request.prompt_ids)
        return replace(request, prompt_ids=before[-2] if len(before) > 1 else request.prompt_ids)

    return _Other(script, heard)


class _Other(_Wrapped):
    """A script whose logprobs too are of what it heard."""

    def __call__(self, request: ScriptedRequest) -> Completion:
        other = self.heard(request)
        said: Completion = self.script(other)
        if said.logprobs is not None or not len(said.output_ids):
            return said
        ids = (*other.prompt_ids, *said.output_ids)
        start = len(other.prompt_ids)
        return replace(said, logprobs=self.script.score(ids, start, request.reported_temperature))


def _cut_prompt(script: Any) -> Script:
    return _Other(script, lambda request: replace(request, prompt_ids=request.prompt_ids[:-2] or request.prompt_ids))


def _crowded(script: Any) -> Script:
    """Answer otherwise where others are answered too: every second request hears another prompt."""

    def heard(request: ScriptedRequest) -> ScriptedRequest:
        if request.number % 3:
            return request
        return replace(
            request, prompt_ids=(*request.prompt_ids[:-1], (request.prompt_ids[-1] + 1) % request.vocab_size)
        )

    return _Other(script, heard)


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


POLICIES = (
    Defect("temperature-ignored", 4, "The temperature is ignored: greedy answers vary.", wrap=_asked(temperature=1.0)),
    Defect("seed-ignored", 4, "The seed is ignored.", wrap=_seedless),
    Defect("top-k-ignored", 4, "top_k is ignored.", wrap=_asked(top_k=0)),
    Defect("ignore-eos-ignored", 4, "ignore_eos is ignored.", wrap=_asked(ignore_eos=False)),
    Defect("min-tokens-ignored", 4, "min_new_tokens is ignored.", wrap=_asked(min_new_tokens=0)),
    Defect("grammar-ignored", 9, "A grammar is ignored.", wrap=_asked(grammar=None)),
    Defect("answer-of-the-neighbour", 4, "An answer is that of another request.", wrap=_of_the_neighbour),
    Defect("prompt-cut", 4, "The policy did not read the end of the prompt.", wrap=_cut_prompt),
    Defect("alone-otherwise", 4, "Some answers are to another prompt.", wrap=_crowded),
)
"""Defects of what the policy says."""


def planted(defect: Defect, wire: str, tokenizer: Any, end: int) -> TransportFactory:
    """Give a scripted engine with the defect in its answers or its policy, as a transport.

    Args:
        defect: What is wrong; `SOUND` for nothing.
        wire: One of `SERVERS`.
        tokenizer: The model's.
        end: Id that ends a turn.
    """
    policy: Any = ConformancePolicy(tokenizer, end)
    engine = scripted_engine(
        "sglang" if wire == "sglang" else "vllm",
        policy if defect.wrap is None else defect.wrap(policy),
        vocab_size=len(tokenizer),
        eos_ids=[end],
        decode=lambda ids: str(tokenizer.decode(list(ids))),
        scale_out=wire == "vllm",
        fault=defect.fault(wire),
    )
    return lambda: InProcessTransport(engine)


SOUND = Defect("none", 0, "Nothing is wrong.")
"""A server without a defect, which the suite must pass."""


def all_defects() -> Iterator[tuple[Defect, str]]:
    """Yield each defect with each wire that it can be planted on."""
    from tito_conformance.client_defects import CLIENT

    for defect in (*ANSWERS, *STREAMS, *POLICIES):
        for wire in defect.wires:
            yield defect, wire
    for defect in CLIENT:
        for wire in defect.wires:
            yield defect, wire
