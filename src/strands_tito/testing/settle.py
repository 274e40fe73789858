"""From what a script says to what an engine would have emitted: stops, lengths and logprobs put in order."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

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
    """One finished generation, ready to be written on a wire. `logprobs` has one entry per output id."""

    request: ScriptedRequest
    output_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish: FinishReason
    stop: int | str | None
    said: Completion
    scorer: Scorer
    queued: bool = False
    """Aborted before it began to run; SGLang writes such an answer differently."""

    def cut(self, emitted: int, *, queued: bool = False) -> Settled:
        """The same generation, aborted after `emitted` tokens."""
        n = min(emitted, len(self.output_ids))
        kept = replace(self.said, weight_versions=clip_spans(self.said.weight_versions, n), text=None)
        ids, logprobs = self.output_ids[:n], self.logprobs[:n]
        return replace(self, output_ids=ids, logprobs=logprobs, finish="abort", stop=None, said=kept, queued=queued)


def scorer_of(script: Script) -> Scorer:
    """The script itself when it is a distribution, else the derived one."""
    return script if isinstance(script, Scorer) else _DERIVED


def settle(script: Script, request: ScriptedRequest, decode: Decode) -> Settled:
    """Asks the script and applies what every engine does: first stop id, stop strings, `max_new_tokens`, logprobs."""
    said = script(request) if request.max_new_tokens else Completion(())
    ids = tuple(said.output_ids)
    if bad := [i for i in ids if not 0 <= i < request.vocab_size]:
        raise ScriptError(f"the script answered id {bad[0]}, which is outside the vocabulary of {request.vocab_size}.")
    ids, finish, stop = _end(said, ids, request, decode)
    scorer = scorer_of(script)
    if said.logprobs is None:
        whole = (*request.prompt_ids, *ids)
        start = len(request.prompt_ids)
        logprobs = tuple(reported(scorer, request, whole, start)) if ids else ()
    else:
        if len(said.logprobs) != len(said.output_ids):
            raise ScriptError(
                f"the script answered {len(said.output_ids)} ids with {len(said.logprobs)} logprobs; give as many."
            )
        logprobs = tuple(said.logprobs[: len(ids)])
    said = replace(said, weight_versions=clip_spans(said.weight_versions, len(ids)))
    return Settled(request, ids, logprobs, finish, stop, said, scorer)


def _end(
    said: Completion, ids: tuple[int, ...], request: ScriptedRequest, decode: Decode
) -> tuple[tuple[int, ...], FinishReason, int | str | None]:
    """Where the generation ends and why, in an engine's order: stop id, stop string, length, then the script's word."""
    limit = request.max_new_tokens
    stops = request.stop_ids
    first = next((n for n, i in enumerate(ids[:limit]) if i in stops and n >= request.min_new_tokens), None)
    matched = _stop_string(ids[: limit if first is None else first], request, decode)
    if matched is not None:
        return ids[: matched[0]], "stop", matched[1]
    if first is not None and said.finish != "abort":
        return ids[: first + 1], "stop", ids[first]
    if len(ids) > limit or (len(ids) == limit and said.finish is None):
        return ids[:limit], "length", None
    if said.finish is not None:
        return ids, said.finish, said.stop
    raise ScriptError(
        f"the scripted answer of {len(ids)} ids holds no stop id (any of {sorted(stops)}) and does not fill "
        f"max_new_tokens={limit}; end it with a stop id, or give Completion(..., finish=...)."
    )


def _stop_string(ids: tuple[int, ...], request: ScriptedRequest, decode: Decode) -> tuple[int, str] | None:
    """Number of ids up to the one that completes the earliest stop string, and the string."""
    if not request.stop or not any(s in decode(ids) for s in request.stop):
        return None
    for n in range(max(1, request.min_new_tokens), len(ids) + 1):
        text = decode(ids[:n])
        for stop in request.stop:
            if stop in text:
                return n, stop
    return None


def clip_spans(spans: Sequence[tuple[str, int, int]] | None, length: int) -> Sequence[tuple[str, int, int]] | None:
    """Version spans cut to the tokens that are left."""
    if spans is None:
        return None
    return [(v, start, min(end, length)) for v, start, end in spans if start < length or (start == 0 and length == 0)]


def rank_of(logprob: float, vocab_size: int) -> int:
    """The worst rank a token of this probability can have (at most 1/p tokens are as likely): a bound, not a count."""
    return max(1, min(vocab_size, int(math.exp(min(-logprob, 40.0)))))
