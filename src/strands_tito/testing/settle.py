"""Turns a script's completion into what an engine would emit: applies stops, lengths and logprobs."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from strands_tito.testing.images import weighted
from strands_tito.testing.optional_outputs import reported
from strands_tito.testing.script import (
    Completion,
    FinishReason,
    PositionScorer,
    Scorer,
    Script,
    ScriptedRequest,
    ScriptError,
)

Decode = Callable[[Sequence[int]], str]

_DERIVED = PositionScorer()


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


def scorer_of(script: Script) -> Scorer:
    """Return the script itself if it is a distribution, else the derived one."""
    return script if isinstance(script, Scorer) else _DERIVED


def settle(script: Script, request: ScriptedRequest, decode: Decode) -> Settled:
    """Run the script, and apply what every engine does: first stop id, stop strings, `max_new_tokens`, logprobs.

    Raises:
        ScriptError: The completion is invalid, or does not end.
    """
    completion = script(request) if request.max_new_tokens else Completion(())
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


def rank_of(logprob: float, vocab_size: int) -> int:
    """Return the worst rank that a token of this probability can have: at most 1/p tokens are as likely."""
    return max(1, min(vocab_size, int(math.exp(min(-logprob, 40.0)))))
