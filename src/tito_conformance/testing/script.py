"""Scripts: the policies of scripted engines, and what every engine makes of their completions.

A `Script` is a callable from a `ScriptedRequest` to a `Completion`. It knows nothing of HTTP, so one script gives the
same tokens and logprobs on every wire.
"""

from __future__ import annotations

import math
import re
import struct
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from hashlib import sha256
from typing import Any, Literal, Protocol, TypeVar, runtime_checkable

import numpy as np
import numpy.typing as npt

from tito_conformance.testing.pictures import PlacedImage

FinishReason = Literal["stop", "length", "abort"]
Decode = Callable[[Sequence[int]], str]
MASKED = -9999.0
"""vLLM's logprob of a token that cannot be sampled."""
MOST_KEPT = 64
"""Likeliest ids that `top_p` and `min_p` choose from; where more would be kept, all are."""
EXPERTS = 8
"""Number of experts in each layer of a scripted mixture-of-experts model."""
_STAMP = 1 << 32
_MASK = (1 << 64) - 1
_Ids = TypeVar("_Ids", int, np.ndarray)


class ScriptError(Exception):
    """The script cannot answer a request. The wire reports it as a 400, which clients do not retry."""


@dataclass(frozen=True, slots=True)
class ScriptedRequest:
    """One generation request. A request of SGLang for n samples, or for a batch of prompts, becomes several."""

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
    """The weights when the generation starts; see `EngineState.weights_of`."""
    adapter: str | None = None
    """The LoRA adapter that the request names."""

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
    def repetition(self) -> float:
        """The `repetition_penalty`, which multiplies the logits of the output's tokens."""
        params: Any = self.body.get("sampling_params") or self.body
        return float(params.get("repetition_penalty") or 1.0)

    @property
    def measures(self) -> bool:
        """Whether a client measures the server, as when it connects: at temperature 2, to the token limit."""
        return self.ignore_eos and self.temperature == 2.0

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
    """

    def __init__(
        self,
        answers: Iterable[Sequence[int] | Completion],
        *,
        by: Literal["order", "prompt"] = "order",
        cycle: bool = False,
    ) -> None:
        self._answers = [a if isinstance(a, Completion) else Completion(tuple(a)) for a in answers]
        self._by_prompt: dict[tuple[int, ...], Completion] | None = {} if by == "prompt" else None
        self._cycle = cycle
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


@dataclass(frozen=True, slots=True)
class Settled:
    """One finished generation, ready for the wire. `logprobs` has one entry for each output id."""

    request: ScriptedRequest
    output_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish: FinishReason
    stop: int | str | None
    completion: Completion
    scorer: Scorer
    queued: bool = False
    """Aborted before it started to run; SGLang's response differs then."""

    def cut(self, emitted: int, *, queued: bool = False) -> Settled:
        """Return the same generation, aborted after `emitted` tokens."""
        n = min(emitted, len(self.output_ids))
        completion = replace(self.completion, weight_versions=clip_spans(self.completion.weight_versions, n), text=None)
        ids, logprobs = self.output_ids[:n], self.logprobs[:n]
        return replace(
            self, output_ids=ids, logprobs=logprobs, finish="abort", stop=None, completion=completion, queued=queued
        )

    def reloaded(self, start: int, change: int) -> Settled:
        """Return the same ids, with the logprobs that other weights give them from the output token `start` on.

        Args:
            start: Index of the first output token of the other weights.
            change: Number of the other weights, minus that of the weights before.
        """
        if not change or self.completion.logprobs is not None:
            return self
        request, first = self.request, len(self.request.prompt_ids)
        scorer = _Reloaded(self.scorer, first + start, change)
        logprobs = tuple(reported(scorer, request, request.whole(self.output_ids), first))
        return replace(self, scorer=scorer, logprobs=logprobs)


def settle(script: Script, request: ScriptedRequest, decode: Decode) -> Settled:
    """Run the script, and apply what every engine does: first stop id, stop strings, `max_new_tokens`, logprobs.

    A script that is no distribution is not asked what a client measures or scores: its answers are for turns.

    Raises:
        ScriptError: The completion is invalid, or does not end.
    """
    listed = isinstance(script, Replay) or not isinstance(script, Scorer)
    if not request.max_new_tokens or (listed and (request.scoring or request.measures)):
        completion = Completion(request.prompt_ids[-1:] * request.max_new_tokens, finish="length")
    else:
        completion = script(request)
    ids = tuple(completion.output_ids)
    if bad := [i for i in ids if not 0 <= i < request.vocab_size]:
        raise ScriptError(f"the script returned id {bad[0]}, which is outside the vocabulary of {request.vocab_size}.")
    ids, finish, stop = _end(completion, ids, request, decode)
    scorer = scorer_of(script)
    if completion.logprobs is None:
        whole, start = request.whole(ids), len(request.prompt_ids)
        logprobs = tuple(reported(scorer, request, whole, start)) if ids else ()
    else:
        if len(completion.logprobs) != len(completion.output_ids):
            raise ScriptError(
                f"the script returned {len(completion.output_ids)} ids and {len(completion.logprobs)} logprobs. "
                "Return one logprob for each id."
            )
        logprobs = tuple(completion.logprobs[: len(ids)])
    completion = replace(completion, weight_versions=clip_spans(completion.weight_versions, len(ids)))
    return Settled(request, ids, logprobs, finish, stop, completion, scorer)


def _end(
    completion: Completion, ids: tuple[int, ...], request: ScriptedRequest, decode: Decode
) -> tuple[tuple[int, ...], FinishReason, int | str | None]:
    """Find where a generation ends, in an engine's order: stop id, stop string, length, the script's `finish`."""
    limit = request.max_new_tokens
    stops = request.stop_ids
    first = next((n for n, i in enumerate(ids[:limit]) if i in stops and n >= request.min_new_tokens), None)
    matched = _stop_string(ids[: limit if first is None else first], request, decode)
    if matched is not None:
        return ids[: matched[0]], "stop", matched[1]
    if first is not None and completion.finish != "abort":
        return ids[: first + 1], "stop", ids[first]
    if len(ids) > limit or (len(ids) == limit and completion.finish is None):
        return ids[:limit], "length", None
    if completion.finish is not None:
        return ids, completion.finish, completion.stop
    raise ScriptError(
        f"the scripted answer of {len(ids)} ids contains no stop id (any of {sorted(stops)}) and is shorter than "
        f"max_new_tokens={limit}. End it with a stop id, or return Completion(..., finish=...)."
    )


def _stop_string(ids: tuple[int, ...], request: ScriptedRequest, decode: Decode) -> tuple[int, str] | None:
    """Return the number of ids up to the end of the first stop string or pattern, and it; None without one."""
    if not request.stop_regex and not any(stop in decode(ids) for stop in request.stop):
        return None
    for n in range(max(1, request.min_new_tokens), len(ids) + 1):
        text = decode(ids[:n])
        found = [stop for stop in request.stop if stop in text]
        found += [pattern for pattern in request.stop_regex if re.search(pattern, text)]
        if found:
            return n, found[0]
    return None


def clip_spans(spans: Sequence[tuple[str, int, int]] | None, length: int) -> Sequence[tuple[str, int, int]] | None:
    """Cut version spans to the first `length` tokens."""
    if spans is None:
        return None
    return [(v, start, min(end, length)) for v, start, end in spans if start < length or (start == 0 and length == 0)]


@dataclass(frozen=True, slots=True)
class _Reloaded:
    """A scorer whose weights change at a position of the whole sequence."""

    before: Scorer
    position: int
    change: int

    def score(self, ids: Sequence[int], start: int, temperature: float) -> list[float]:
        cut = min(max(start, self.position), len(ids))
        old = self.before.score(ids[:cut], start, temperature) if start < cut else []
        new = self.before.score(weighted(ids, self.change), cut, temperature) if cut < len(ids) else []
        return [*old, *new]

    def top(self, ids: Sequence[int], position: int, k: int, temperature: float) -> list[tuple[int, float]]:
        own = weighted(ids, self.change) if position >= self.position else ids
        return self.before.top(own, position, k, temperature)


_DERIVED = PositionScorer()


def scorer_of(script: Script) -> Scorer:
    """Return the script itself if it is a distribution, else the derived one."""
    return script if isinstance(script, Scorer) else _DERIVED


Top = Sequence[tuple[int, float]]
"""(id, logprob), most likely first."""


def reported(scorer: Scorer, request: ScriptedRequest, ids: Sequence[int], start: int) -> list[float]:
    """Return logprobs of `ids[start:]` as this engine reports sampled tokens."""
    offsets = request.reported_offsets and (request.offsets(ids[start:]) or request.repetition != 1)
    if not _truncates(request) and not offsets:
        return scorer.score(ids, start, request.reported_temperature)
    plain = scorer.score(ids, start, request.reported_temperature)
    tokens = [token_of(each) for each in ids[start:]]
    return [
        dict(_changed(scorer, request, ids, n, 0, token) or [(token, value)])[token]
        for n, (token, value) in enumerate(zip(tokens, plain, strict=True), start)
    ]


def given_scores(answer: Settled, rows: Sequence[Sequence[int]], first: int = 1) -> list[list[float]]:
    """Return raw logprobs of the ids of each row as the token after `first` tokens of the prompt and more."""
    ids, score = answer.request.whole((0,)), answer.scorer.score
    return [
        [score([*ids[:n], token + stamp_of(ids[n])], n, 1.0)[0] for token in row] for n, row in enumerate(rows, first)
    ]


def reported_top(scorer: Scorer, request: ScriptedRequest, ids: Sequence[int], position: int, k: int) -> Top:
    """Return the `k` most likely ids with the same logprobs, filled up with masked ids where fewer were kept."""
    left = _changed(scorer, request, ids, position, k)
    if not left:
        return scorer.top(ids, position, k, request.reported_temperature)
    if not _truncates(request):
        return left
    known = {token for token, _ in left}
    others = [token for token in range(k + len(left)) if token not in known]
    return sorted(left, key=lambda pair: -pair[1])[:k] + [(token, MASKED) for token in others[: max(0, k - len(left))]]


def support(scorer: Scorer, request: ScriptedRequest, ids: Sequence[int], position: int) -> list[tuple[int, float]]:
    """Return the ids that `top_k`, `top_p` and `min_p` keep at a position, with logprobs normalised over them.

    An empty list means all ids. The sampled id is always kept, as on a real engine.
    """
    k = 1 if request.temperature == 0 else request.top_k
    if k < 1 and request.top_p >= 1 and not request.min_p:
        return []
    top = scorer.top(ids, position, k if k > 0 else MOST_KEPT, request.temperature or 1.0)
    weights = [math.exp(logprob) for _, logprob in top]
    nucleus, kept, total = 0.0, 0, sum(weights) if k > 0 else 1.0
    while kept < len(top) and nucleus < request.top_p * total and weights[kept] >= request.min_p * weights[0]:
        nucleus += weights[kept]
        kept += 1
    if k < 1 and kept == len(top):
        return []
    left = list(top[:kept])
    if (sampled := token_of(ids[position])) not in dict(left):
        left[-1] = (sampled, left[-1][1])
    whole = sum(math.exp(logprob) for _, logprob in left)
    return [(token, float32(logprob - math.log(whole))) for token, logprob in left]


def moves(scorer: Scorer, request: ScriptedRequest, ids: Sequence[int], position: int) -> dict[int, float]:
    """Return what penalties and a `logit_bias` add to the logits of a place, which are logprobs at temperature 1."""
    output = ids[len(request.prompt_ids) : position]
    found = request.offsets(output)
    if (repetition := request.repetition) != 1:
        for token in set(map(token_of, output)):
            [own] = scorer.score([*ids[:position], token], position, 1.0)
            found[token] = found.get(token, 0.0) + own * (repetition - 1)
    return found


def _changed(
    scorer: Scorer, request: ScriptedRequest, ids: Sequence[int], position: int, k: int, *own: int
) -> list[tuple[int, float]]:
    """Return the tokens of a place where penalties, a bias or a truncation change logprobs; else an empty list."""
    if _truncates(request) and (left := support(scorer, request, ids, position)):
        return left
    moved = request.reported_offsets and moves(scorer, request, ids, position)
    return _moved(scorer, request, ids, position, k, *own) if moved else []


def _moved(
    scorer: Scorer, request: ScriptedRequest, ids: Sequence[int], position: int, k: int, *own: int
) -> list[tuple[int, float]]:
    """Return the `k` most likely ids, and `own`, with their logprobs under penalties and a `logit_bias`."""
    temperature = request.reported_temperature
    offsets = {token: value / temperature for token, value in moves(scorer, request, ids, position).items()}
    known = dict(scorer.top(ids, position, k + len(offsets), temperature)) if k else {}
    for token in {*offsets, *own} - known.keys():
        [known[token]] = scorer.score([*ids[:position], token], position, temperature)
    mass = {token: math.exp(value) for token, value in known.items()}
    # A simple script's scores may sum to more than 1. The mass without an offset is at least that of the known tokens.
    others = sum(value for token, value in mass.items() if token not in offsets)
    unmoved = max(1 - sum(mass[token] for token in offsets), others)
    whole = unmoved + sum(mass[token] * math.exp(min(value, 700.0)) for token, value in offsets.items())
    whole = max(whole, 1e-300)  # a script's certain token may have a bias that leaves no mass
    moved = [(token, float32(value + offsets.get(token, 0.0) - math.log(whole))) for token, value in known.items()]
    ordered = sorted(moved, key=lambda pair: (-pair[1], pair[0]))
    return [pair for place, pair in enumerate(ordered) if place < k or pair[0] in own]


def _truncates(request: ScriptedRequest) -> bool:
    """Return whether logprobs are normalised over the kept ids. vLLM truncates nothing for a greedy request."""
    cuts = request.top_k > 0 or request.top_p < 1 or request.min_p > 0
    return request.reported_truncated and cuts and request.temperature > 0


def routed(ids: Sequence[int], layers: int, experts: int) -> npt.NDArray[np.uint8]:
    """Return experts of each token but the last, shape (len(ids) - 1, layers, experts), from a hash of the token."""
    rows = [_experts(token, place, layers, experts) for place, token in enumerate(ids[:-1])]
    return np.array(rows, np.uint8).reshape(-1, layers, experts)


@lru_cache(100_000)
def _experts(token: int, place: int, layers: int, experts: int) -> tuple[tuple[int, ...], ...]:
    return tuple(
        tuple((mix64(token << 20 ^ place << 4 ^ layer) + n) % EXPERTS for n in range(experts))
        for layer in range(layers)
    )


def rank_of(logprob: float, vocab_size: int) -> int:
    """Return the worst rank that a token of this probability can have: at most 1/p tokens are as likely."""
    return max(1, min(vocab_size, int(math.exp(min(-logprob, 40.0)))))


def stamped(ids: Sequence[int], images: Sequence[PlacedImage]) -> tuple[int, ...]:
    """Return ids with a stamp of the images before each, so that a function of ids is one of the images too.

    A stamp is a multiple of 2**32 below 2**62; before the first image it is 0.
    """
    if not images:
        return tuple(ids)
    whole, stamp = list(ids), b""
    ends = [*(image.offset for image in images[1:]), len(whole)]
    for image, end in zip(images, ends, strict=True):
        stamp = sha256(stamp + image.digest).digest()
        number = (int.from_bytes(stamp[:4], "big") >> 2) * _STAMP
        whole[image.offset : end] = [token + number for token in whole[image.offset : end]]
    return tuple(whole)


def weighted(ids: Sequence[int], weights: int) -> tuple[int, ...]:
    """Return ids with a stamp of the weights on each, besides that of images, so that scores depend on them too."""
    return tuple(ids) if not weights else tuple(id_ + weights * _STAMP for id_ in ids)


def token_of(id_: _Ids) -> _Ids:
    """Return a stamped id without its stamp, or the ids of an int64 array."""
    return id_ % _STAMP


def stamp_of(id_: int) -> int:
    """Return the stamp of an id."""
    return id_ - token_of(id_)


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
