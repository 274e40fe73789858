"""What the scripted policy says, whichever wire asks for it.

A `Script` is a plain callable from a `ScriptedRequest` to a `Completion`. It knows nothing of HTTP, so one script
answers on the vLLM wire and on the SGLang wire and the two answers hold the same tokens and logprobs.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, runtime_checkable

FinishReason = Literal["stop", "length", "abort"]

_MASK = (1 << 64) - 1


class ScriptError(Exception):
    """The script cannot answer the request. The wire reports it as a 400, which no client retries."""


@dataclass(frozen=True, slots=True)
class ScriptedRequest:
    """One generation, as the wire read it. A request for n samples or a batch of prompts becomes several of these."""

    prompt_ids: tuple[int, ...]
    max_new_tokens: int = 16
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    """0 means no limit; the wires translate vLLM's 0 or -1 and SGLang's -1."""
    min_p: float = 0.0
    seed: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    """Stop ids of the request alone; the engine's own are in `eos_ids`."""
    stop: tuple[str, ...] = ()
    eos_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    min_new_tokens: int = 0
    grammar: Any = None
    """The request's grammar field as sent (vLLM `structured_outputs`, SGLang `json_schema`, `regex`, ...), or None."""
    reported_temperature: float = 1.0
    """Temperature of the logprobs that this engine reports: 1.0 on vLLM (raw), the request's on SGLang (greedy 1.0)."""
    reported_truncated: bool = False
    """Whether they are over what `top_k`, `top_p` and `min_p` leave, as vLLM's `processed_logprobs` are."""
    vocab_size: int = 0
    scoring: bool = False
    """The request is for prompt logprobs and wants at most one new token, which engines cannot leave out."""
    number: int = 0
    """Position among all generations the engine has been asked for, from 0."""
    request_id: str = ""
    """The client's own id (vLLM `X-Request-Id`, SGLang `rid`), else the server's."""
    server_id: str = ""
    """The id by which the server aborts it."""
    wire: str = ""
    path: str = ""
    headers: Mapping[str, str] = field(default_factory=dict)
    body: Mapping[str, Any] = field(default_factory=dict)
    """The decoded JSON body, untouched."""

    @property
    def stop_ids(self) -> frozenset[int]:
        """Every id that ends this generation."""
        own = frozenset(self.stop_token_ids)
        return own if self.ignore_eos else own | frozenset(self.eos_ids)


@dataclass(frozen=True, slots=True)
class Completion:
    """What the policy says to one request.

    `finish=None` means "as an engine would": the ids are cut after the first stop id, or at `max_new_tokens`. Logprobs
    of None are derived from the script's own distribution (see `Scorer`), one per output id. `weight_versions` are
    `(version, start, end)` spans over the output ids, None for one span of the engine's live version. `routed_experts`
    is the base64 text that the wire shows. `top_logprobs[i]` lists `(id, logprob)`, most likely first, and so does
    `support[i]` for the ids that a truncated sampler kept.
    """

    output_ids: Sequence[int]
    logprobs: Sequence[float] | None = None
    finish: FinishReason | None = None
    stop: int | str | None = None
    top_logprobs: Sequence[Sequence[tuple[int, float]]] | None = None
    weight_versions: Sequence[tuple[str, int, int]] | None = None
    cached_tokens: int | None = None
    routed_experts: str | None = None
    text: str | None = None
    support: Sequence[Sequence[tuple[int, float]]] | None = None


Script = Callable[[ScriptedRequest], Completion]


@runtime_checkable
class Scorer(Protocol):
    """A script that is also a distribution: it can score a sequence that it is given (teacher forcing)."""

    def score(self, ids: Sequence[int], start: int, temperature: float) -> list[float]:
        """Logprobs of `ids[start:]`, each given all ids before it. Length `len(ids) - start`; `start` is at least 1."""

    def top(self, ids: Sequence[int], position: int, k: int, temperature: float) -> list[tuple[int, float]]:
        """The `k` most likely ids at `position` given `ids[:position]`, most likely first. Used for top-k logprobs."""


def float32(value: float) -> float:
    """The nearest float32, as engines report logprobs."""
    rounded: float = struct.unpack("f", struct.pack("f", value))[0]
    return rounded


def mix64(value: int) -> int:
    """splitmix64's finaliser: a fast, well-mixed, platform-independent hash of one 64-bit integer."""
    value = (value + 0x9E3779B97F4A7C15) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


class PositionScorer:
    """Logprobs for scripts that have no distribution of their own: a hash of (id, position), float32 in [-8, 0).

    A pure function of the sequence, so re-scoring prompt + completion gives exactly what sampling reported.
    """

    def score(self, ids: Sequence[int], start: int, temperature: float) -> list[float]:
        """See `Scorer.score`; the temperature has no effect."""
        return [self._logprob(ids[i], i) for i in range(start, len(ids))]

    def top(self, ids: Sequence[int], position: int, k: int, temperature: float) -> list[tuple[int, float]]:
        """The id at `position` with made-up rivals that share the rest of the mass, most likely first."""
        chosen, logprob = ids[position], self._logprob(ids[position], position)
        rest = math.log(-math.expm1(logprob))
        rivals = [((chosen + j) % (chosen + k + 2), float32(rest - j * math.log(2))) for j in range(1, k + 1)]
        return sorted([(chosen, logprob), *rivals], key=lambda pair: -pair[1])[:k]

    @staticmethod
    def _logprob(token_id: int, position: int) -> float:
        unit = (mix64(token_id << 32 ^ position) >> 41) + 1  # 1 .. 2**23, so that every value below is exact in float32
        return -8.0 * unit / (1 << 23)


class Replay:
    """Answers requests from a list, in order.

    `answers` are id sequences or whole `Completion`s; `cycle=True` starts over at the end instead of failing. With
    `by="prompt"` a prompt seen before gets its first answer again, so that a client's retry does not use up an answer.
    Scoring requests use up no answer unless `answer_scoring=True`.
    """

    def __init__(
        self,
        answers: Iterable[Sequence[int] | Completion],
        *,
        by: Literal["order", "prompt"] = "order",
        cycle: bool = False,
        answer_scoring: bool = False,
    ) -> None:
        self._answers = [a if isinstance(a, Completion) else Completion(tuple(a)) for a in answers]
        self._by_prompt: dict[tuple[int, ...], Completion] | None = {} if by == "prompt" else None
        self._cycle = cycle
        self._answer_scoring = answer_scoring
        self._next = 0
        self._told: list[tuple[tuple[int, ...], Sequence[float]]] = []
        self._derived = PositionScorer()

    @property
    def remaining(self) -> int:
        """How many answers have not been given yet."""
        return max(0, len(self._answers) - self._next)

    def __call__(self, request: ScriptedRequest) -> Completion:
        """The next answer; `ScriptError` when there is none."""
        if request.scoring and not self._answer_scoring:
            return Completion(request.prompt_ids[-1:])
        if self._by_prompt is not None and request.prompt_ids in self._by_prompt:
            return self._by_prompt[request.prompt_ids]
        if self._next >= len(self._answers) and not (self._cycle and self._answers):
            raise ScriptError(
                f"Replay holds {len(self._answers)} answers and request {request.number} asks for one more; "
                "add an answer, or pass cycle=True."
            )
        answer = self._answers[self._next % len(self._answers)]
        self._next += 1
        if self._by_prompt is not None:
            self._by_prompt[request.prompt_ids] = answer
        if answer.logprobs is not None:
            self._told.append(((*request.prompt_ids, *answer.output_ids), answer.logprobs))
        return answer

    def score(self, ids: Sequence[int], start: int, temperature: float) -> list[float]:
        """Derived logprobs, except where `ids` repeats an answer that came with logprobs of its own."""
        scores = self._derived.score(ids, start, temperature)
        key = tuple(ids) if self._told else ()
        for told, logprobs in self._told:
            if key[: len(told)] == told:
                for offset, logprob in enumerate(logprobs, len(told) - len(logprobs)):
                    if offset >= start:
                        scores[offset - start] = logprob
        return scores

    def top(self, ids: Sequence[int], position: int, k: int, temperature: float) -> list[tuple[int, float]]:
        """See `PositionScorer.top`."""
        return self._derived.top(ids, position, k, temperature)


def from_function(answer: Callable[[tuple[int, ...]], Sequence[int] | Completion]) -> Script:
    """A script from a function of the prompt ids alone; it may return bare output ids."""

    def script(request: ScriptedRequest) -> Completion:
        said = answer(request.prompt_ids)
        return said if isinstance(said, Completion) else Completion(tuple(said))

    return script
