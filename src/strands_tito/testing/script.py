"""Scripts: the policies of scripted engines.

A `Script` is a callable from a `ScriptedRequest` to a `Completion`. It knows nothing of HTTP, so one script gives the
same tokens and logprobs on every wire.
"""

from __future__ import annotations

import math
import struct
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, runtime_checkable

from strands_tito.testing.images import PlacedImage, stamp_of, stamped, token_of, weighted

FinishReason = Literal["stop", "length", "abort"]

_MASK = (1 << 64) - 1


class ScriptError(Exception):
    """The script cannot answer a request. The wire reports it as a 400, which clients do not retry."""


@dataclass(frozen=True, slots=True)
class ScriptedRequest:
    """One generation request. A request for n samples, or for a batch of prompts, becomes several of these."""

    prompt_ids: tuple[int, ...]
    max_new_tokens: int = 16
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    """0 means no limit, for which vLLM has 0 or -1 and SGLang -1."""
    min_p: float = 0.0
    seed: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    """Stop ids of the request; the engine's own are in `eos_ids`."""
    stop: tuple[str, ...] = ()
    eos_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    min_new_tokens: int = 0
    stop_regex: tuple[str, ...] = ()
    grammar: Any = None
    """The request's grammar field as sent (vLLM `structured_outputs`, SGLang `json_schema`, `regex`, ...), or None."""
    reported_temperature: float = 1.0
    """Temperature of reported logprobs: 1.0 on vLLM (raw), the request's on SGLang (1.0 if greedy)."""
    reported_truncated: bool = False
    """Whether reported logprobs are normalised over the ids that `top_k`, `top_p` and `min_p` keep, as vLLM's
    `processed_logprobs` are."""
    reported_offsets: bool = False
    """Whether reported logprobs include penalties and a `logit_bias`, as SGLang's and vLLM's processed ones do."""
    vocab_size: int = 0
    scoring: bool = False
    """Whether the request is for prompt logprobs, with at most one new token because engines require one."""
    number: int = 0
    """Position among all generation requests of the engine, from 0."""
    request_id: str = ""
    """The client's id (vLLM `X-Request-Id`, SGLang `rid`), or else the server's."""
    server_id: str = ""
    """The id that an abort call uses."""
    wire: str = ""
    path: str = ""
    headers: Mapping[str, str] = field(default_factory=dict)
    body: Mapping[str, Any] = field(default_factory=dict)
    """The decoded JSON body."""
    images: tuple[PlacedImage, ...] = ()
    """The images of the prompt, in order; `prompt_ids` is expanded."""
    weights: int = 0
    """The weights when the generation starts; see `EngineState.weights`."""

    @property
    def context(self) -> tuple[int, ...]:
        """The prompt as a distribution sees it: each id carries a stamp of the images so far, and of the weights.

        `token_of` takes the stamp off. Without images and other weights these are the prompt's ids.
        """
        return self.whole(())

    def whole(self, output_ids: Sequence[int]) -> tuple[int, ...]:
        """Return `context` and, after it, an output with the stamp of all images and the weights."""
        return weighted(stamped((*self.prompt_ids, *output_ids), self.images), self.weights)

    def offsets(self, output: Sequence[int]) -> dict[int, float]:
        """Return what penalties and a `logit_bias` add to logits after some output ids, by id, without zeros.

        The output ids may be stamped.
        """
        params: Any = self.body.get("sampling_params") or self.body
        presence, frequency = (float(params.get(f"{name}_penalty") or 0) for name in ("presence", "frequency"))
        found = {int(token): float(bias) for token, bias in (params.get("logit_bias") or {}).items()}
        for token, count in Counter(map(token_of, output)).items() if presence or frequency else ():
            found[token] = found.get(token, 0.0) - presence - frequency * count
        return found

    @property
    def stop_ids(self) -> frozenset[int]:
        """Every id that ends this generation."""
        own = frozenset(self.stop_token_ids)
        return own if self.ignore_eos else own | frozenset(self.eos_ids)


@dataclass(frozen=True, slots=True)
class Completion:
    """The policy's answer to one request.

    Attributes:
        output_ids: The sampled ids.
        logprobs: One for each output id. None derives them from the script's own distribution (see `Scorer`).
        finish: None cuts the ids as an engine would: after the first stop id, or at `max_new_tokens`.
        stop: The stop id or stop string, for a `finish` of "stop".
        top_logprobs: For each output id a list of (id, logprob), most likely first. None derives them.
        weight_versions: (version, start, end) spans over the output ids. None means one span of the current version.
        cached_tokens: None takes the count of the engine's prefix cache.
        routed_experts: The base64 text on the wire. None derives it if the engine has experts.
        text: None decodes the output ids.
        support: For each output id the (id, logprob) that a truncating sampler kept. None derives them.
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
    """A script that is also a distribution: it can score a given sequence (teacher forcing).

    The ids are those of `ScriptedRequest.whole`. Where a prompt has images, or other weights were loaded, they are
    stamped: `token_of` returns the token, and the stamp is the same only after the same images by the same weights.
    """

    def score(self, ids: Sequence[int], start: int, temperature: float) -> list[float]:
        """Return logprobs of `ids[start:]`, each given all ids before it. Length `len(ids) - start`; `start` >= 1."""

    def top(self, ids: Sequence[int], position: int, k: int, temperature: float) -> list[tuple[int, float]]:
        """Return the `k` most likely ids at `position` given `ids[:position]`, most likely first."""


def float32(value: float) -> float:
    """Round to float32, the precision of reported logprobs."""
    rounded: float = struct.unpack("f", struct.pack("f", value))[0]
    return rounded


def mix64(value: int) -> int:
    """Hash a 64-bit integer with splitmix64's finaliser, the same on every platform."""
    value = (value + 0x9E3779B97F4A7C15) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


class PositionScorer:
    """Logprobs for scripts without a distribution: a hash of (id, position), float32 in [-8, 0).

    They are a pure function of the sequence, so scoring prompt + completion gives exactly what sampling reported.
    """

    def score(self, ids: Sequence[int], start: int, temperature: float) -> list[float]:
        """See `Scorer.score`; the temperature has no effect."""
        return [self._logprob(ids[i], i) for i in range(start, len(ids))]

    def top(self, ids: Sequence[int], position: int, k: int, temperature: float) -> list[tuple[int, float]]:
        """Return the id at `position` and invented ids that share the remaining probability, most likely first."""
        chosen, logprob = token_of(ids[position]), self._logprob(ids[position], position)
        rest = math.log(-math.expm1(logprob))
        rivals = [((chosen + j) % (chosen + k + 2), float32(rest - j * math.log(2))) for j in range(1, k + 1)]
        return sorted([(chosen, logprob), *rivals], key=lambda pair: -pair[1])[:k]

    @staticmethod
    def _logprob(token_id: int, position: int) -> float:
        mixed = mix64(token_of(token_id) << 32 ^ position ^ stamp_of(token_id))
        unit = (mixed >> 41) + 1  # 1 .. 2**23, so that every value below is exact in float32
        return -8.0 * unit / (1 << 23)


class Replay:
    """Answers requests from a list, in order.

    Args:
        answers: Id sequences, or `Completion`s.
        by: With "prompt", a known prompt gets its first answer again, so that a client's retry uses up no answer.
        cycle: Whether to start over at the end of the list instead of failing.
        answer_scoring: Whether scoring requests use up answers.
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
        self._reported: list[tuple[tuple[int, ...], Sequence[float]]] = []
        self._derived = PositionScorer()

    @property
    def remaining(self) -> int:
        """Number of unused answers."""
        return max(0, len(self._answers) - self._next)

    def __call__(self, request: ScriptedRequest) -> Completion:
        """Return the next answer.

        Raises:
            ScriptError: All answers are used up.
        """
        if request.scoring and not self._answer_scoring:
            return Completion(request.prompt_ids[-1:])
        if self._by_prompt is not None and request.context in self._by_prompt:
            return self._by_prompt[request.context]
        if self._next >= len(self._answers) and not (self._cycle and self._answers):
            raise ScriptError(
                f"All {len(self._answers)} answers of Replay are used up at request {request.number}. Add answers, or "
                "pass cycle=True."
            )
        answer = self._answers[self._next % len(self._answers)]
        self._next += 1
        if self._by_prompt is not None:
            self._by_prompt[request.context] = answer
        if answer.logprobs is not None:
            self._reported.append((request.whole(answer.output_ids), answer.logprobs))
        return answer

    def score(self, ids: Sequence[int], start: int, temperature: float) -> list[float]:
        """Return derived logprobs, or an answer's own logprobs where `ids` repeats it."""
        scores = self._derived.score(ids, start, temperature)
        key = tuple(ids) if self._reported else ()
        for sequence, logprobs in self._reported:
            if key[: len(sequence)] == sequence:
                for offset, logprob in enumerate(logprobs, len(sequence) - len(logprobs)):
                    if offset >= start:
                        scores[offset - start] = logprob
        return scores

    def top(self, ids: Sequence[int], position: int, k: int, temperature: float) -> list[tuple[int, float]]:
        """See `PositionScorer.top`."""
        return self._derived.top(ids, position, k, temperature)


def from_function(answer: Callable[[tuple[int, ...]], Sequence[int] | Completion]) -> Script:
    """Make a script from a function of the prompt ids, which may return plain output ids."""

    def script(request: ScriptedRequest) -> Completion:
        output = answer(request.prompt_ids)
        return output if isinstance(output, Completion) else Completion(tuple(output))

    return script
