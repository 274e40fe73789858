"""The stranger's defects in what a server remembers: contexts, caches, replicas, weights, other requests' answers."""

from __future__ import annotations

import json
import re
import unicodedata
from dataclasses import replace
from typing import Any

from conformance.defects.defect import latency
from conformance.defects.stranger_hooks import (
    on_answer,
    on_engine,
    on_policy,
    on_view,
    rescored,
    with_ids,
)
from conformance.defects.views import View
from tito_conformance.testing import Completion, ScriptedEngine, ScriptedRequest, Settled

_BUSY = {"latency": lambda request: latency(request) or 0.002}


def _seen_as(policy: Any, request: ScriptedRequest, prompt: Any) -> Completion:
    """Return the answer to another prompt, with its logprobs, as the answer to this one."""
    seen = replace(request, prompt_ids=tuple(prompt))
    done = policy(seen)
    return rescored(policy, seen, done.output_ids, done)


@on_policy(4, "a full cache hit must recompute the last token")
def last_token_lost_on_full_hit(memory: Any, policy: Any, request: ScriptedRequest) -> Completion:
    """A prompt that was answered before is wholly cached, and then read without its last token."""
    known = memory.__dict__.setdefault("known", set())
    hit = request.prompt_ids in known
    known.add(request.prompt_ids)
    return _seen_as(policy, request, request.prompt_ids[:-1]) if hit and not request.images else policy(request)


@on_policy(4, "off-by-one at block boundaries of the KV cache")
def full_last_block_corrupt(memory: Any, policy: Any, request: ScriptedRequest) -> Completion:
    """When a prompt's length is a multiple of 16, its last two tokens are read in the wrong order."""
    ids = request.prompt_ids
    if len(ids) % 16 or request.images:
        return policy(request)
    return _seen_as(policy, request, (*ids[:-2], ids[-1], ids[-2]))


@on_policy(4, "chunked prefill skips a token at the edge of a chunk")
def chunk_edge_lost(memory: Any, policy: Any, request: ScriptedRequest) -> Completion:
    """A prompt of 1 to 3 tokens over a chunk of 64 is read without the chunk's last token."""
    ids, over = request.prompt_ids, len(request.prompt_ids) % 64
    if not 1 <= over <= 3 or request.images or len(ids) < 64:
        return policy(request)
    return _seen_as(policy, request, (*ids[: -over - 1], *ids[-over:]))


@on_policy(
    4,
    "truncate_prompt_tokens set by an operator",
    hard=True,
    why="the scripted model reads four ids only, so what is lost on the left changes nothing here; a real one shows it",
)
def left_truncated_with_a_false_echo(memory: Any, policy: Any, request: ScriptedRequest) -> Completion:
    """Prompts of over 300 tokens are cut on the left, while echo and counts are those of the request."""
    ids = request.prompt_ids
    return _seen_as(policy, request, ids[-300:]) if len(ids) > 300 and not request.images else policy(request)


@on_answer(4, "the echo of a truncated prompt is honest")
def left_truncated(memory: Any, answer: Settled) -> Settled:
    """Prompts of over 300 tokens are cut on the left, and the echo and the counts show it."""
    request = answer.request
    return replace(answer, request=replace(request, prompt_ids=request.prompt_ids[-300:]))


@on_policy(4, "ids through text and back: rllm #816's class, on the prompt")
def prompt_retokenised(memory: Any, policy: Any, request: ScriptedRequest) -> Completion:
    """The prompt's end is decoded and encoded again before the model reads it; the echo is the request's."""
    tail = policy._tokenizer.decode(list(request.prompt_ids[-48:]))
    again = policy._tokenizer.encode(tail, add_special_tokens=False)
    if tuple(again[-8:]) == request.prompt_ids[-8:] or request.images:
        return policy(request)
    return _seen_as(policy, request, (*request.prompt_ids[:-48], *again))


@on_answer(4, "answers crossed between requests")
def every_25th_is_the_one_before(memory: Any, answer: Settled) -> Settled:
    """Every 25th answer is that of the request before, with the right echo and counts."""
    memory.count, before = getattr(memory, "count", 0) + 1, getattr(memory, "before", answer)
    memory.before = answer
    if memory.count % 25 or len(before.output_ids) > answer.request.max_new_tokens:
        return answer
    return replace(before, request=answer.request)


@on_answer(4, "answers crossed under load", options=_BUSY)
def crossed_when_busy(memory: Any, answer: Settled) -> Settled:
    """While other requests run, an answer is sometimes that of the one before, with its own echo."""
    memory.count, before = getattr(memory, "count", 0) + 1, getattr(memory, "before", answer)
    memory.before = answer
    busy = memory.engine.running > 1 and memory.count % 4 == 0
    fits = len(before.output_ids) <= answer.request.max_new_tokens
    return replace(before, request=answer.request) if busy and fits else answer


@on_policy(10, "a balancer over replicas of different weights")
def every_5th_of_old_weights(memory: Any, policy: Any, request: ScriptedRequest) -> Completion:
    """Every fifth answer is of a replica that missed the last weight update, but names the same version."""
    memory.count = getattr(memory, "count", 0) + 1
    if memory.count % 5:
        return policy(request)
    old = policy.with_weights(tail=3.0)
    done = old(request)
    return rescored(old, request, done.output_ids, done)


@on_policy(10, "a balancer over replicas of nearly equal weights")
def every_2nd_of_an_older_step(memory: Any, policy: Any, request: ScriptedRequest) -> Completion:
    """Every second answer is of a replica one training step behind: end-of-turn weights differ by 1%."""
    memory.count = getattr(memory, "count", 0) + 1
    if memory.count % 2:
        return policy(request)
    old = memory.__dict__.setdefault("old", policy.with_weights(eos_weight=4.04))
    done = old(request)
    return rescored(old, request, done.output_ids, done)


@on_engine(10, "weights half loaded on one rank", weights=1)
def reload_spoils_weights(engine: ScriptedEngine) -> None:
    """A reload of the same weights changes the model."""
    changed, script = engine.state.version_changed, engine.script

    def version_changed(version: str) -> None:
        changed(version)
        script._policy = script.with_weights(tail=2.5)._policy  # type: ignore[attr-defined]

    engine.state.version_changed = version_changed


@on_engine(10, "prefix cache kept over a weight update", weights=1)
def cache_survives_update(engine: ScriptedEngine) -> None:
    """A weight update does not clear the prefix cache, so old keys and values are read with new weights."""
    engine.state.cache.clear = lambda: None  # type: ignore[method-assign]


@on_answer(10, "the version is read when the answer is written", weights=1, wires=("vllm", "sglang"))
def whole_answer_has_the_last_version(memory: Any, answer: Settled) -> Settled:
    """An answer during which weights changed is reported as wholly of the new version."""
    spans = answer.completion.weight_versions
    if not spans or len(spans) < 2:
        return answer
    completion = replace(answer.completion, weight_versions=[(spans[-1][0], 0, len(answer.output_ids))])
    return replace(answer, completion=completion)


@on_answer(
    10,
    "the version is read when the request arrives",
    weights=1,
    wires=("vllm", "sglang"),
    hard=True,
    why="no client knows at which token an update took effect, and here both versions have the same weights",
)
def versions_change_one_token_late(memory: Any, answer: Settled) -> Settled:
    """The span of a new version starts one token late."""
    spans = list(answer.completion.weight_versions or ())
    if len(spans) < 2 or spans[1][2] - spans[1][1] < 2:
        return answer
    (first, start, cut), (second, _, end), *rest = spans
    moved = [(first, start, cut + 1), (second, cut + 1, end), *rest]
    return replace(answer, completion=replace(answer.completion, weight_versions=moved))


@on_answer(10, "a cached version label", weights=1, wires=("vllm", "sglang"))
def version_lags_one_answer(memory: Any, answer: Settled) -> Settled:
    """The first answer after an update still names the old version."""
    now, known = memory.engine.state.weight_version, getattr(memory, "known", None)
    memory.known = now
    if known in (None, now) or answer.completion.weight_versions:
        return answer
    spans = [(known, 0, len(answer.output_ids))]
    return replace(answer, completion=replace(answer.completion, weight_versions=spans))


@on_answer(
    4,
    "ids through text and back: rllm #816, strands-sglang's reason to exist",
    hard=True,
    why="the ids of a canonical encoding with their true logprobs are an answer that the model could have sampled",
)
def output_retokenised(memory: Any, answer: Settled) -> Settled:
    """Output ids are the text's canonical encoding, scored anew; other ids of the same text were sampled."""
    body = answer.output_ids[:-1] if answer.finish == "stop" and isinstance(answer.stop, int) else answer.output_ids
    again = memory.engine.state.encode(memory.engine.state.decode(body), False)
    if tuple(again) == tuple(body) or len(again) != len(body):
        return answer
    return with_ids(answer, (*again, *answer.output_ids[len(body) :]))


@on_answer(4, "ids through text and back, logprobs of the old ids: rllm #816")
def output_retokenised_logprobs_padded(memory: Any, answer: Settled) -> Settled:
    """Output ids are the text's canonical encoding; logprobs are cut, or padded with zeros, to their number."""
    body = answer.output_ids[:-1] if answer.finish == "stop" and isinstance(answer.stop, int) else answer.output_ids
    again = tuple(memory.engine.state.encode(memory.engine.state.decode(body), False))
    if again == tuple(body):
        return answer
    ids = (*again, *answer.output_ids[len(body) :])
    padded = (*answer.logprobs, *[0.0] * len(ids))[: len(ids)]
    return replace(with_ids(answer, ids), logprobs=padded)


def _rewritten(memory: Any, answer: Settled, text: str) -> Settled:
    """Return an answer whose text, but not its stop token, is another."""
    end = answer.output_ids[-1:] if answer.finish == "stop" and isinstance(answer.stop, int) else ()
    ids = (*memory.engine.state.encode(text, False), *end)
    return with_ids(answer, ids) if 0 < len(ids) <= answer.request.max_new_tokens else answer


def _text(memory: Any, answer: Settled) -> str:
    stopped = answer.finish == "stop" and isinstance(answer.stop, int)
    return str(memory.engine.state.decode(answer.output_ids[:-1] if stopped else answer.output_ids))


@on_answer(4, "reasoning stripped by a server's parser")
def reasoning_stripped(memory: Any, answer: Settled) -> Settled:
    """Everything up to </think> is removed from the ids, with its logprobs, as by a reasoning parser."""
    ids, decode = answer.output_ids, memory.engine.state.decode
    end = next((n for n in range(1, len(ids)) if "</think>" in decode(ids[:n])), 0)
    if not end or answer.finish != "stop":
        return answer
    return replace(answer, output_ids=ids[end:], logprobs=answer.logprobs[end:])


@on_answer(
    4,
    "tool calls parsed and written again by a gateway",
    hard=True,
    why="with true logprobs of the new ids, the answer is one that the model could have sampled",
)
def calls_written_again(memory: Any, answer: Settled) -> Settled:
    """The JSON of tool calls is parsed and written again without blanks; ids and logprobs are those of the new text."""
    text = _text(memory, answer) if answer.finish == "stop" else ""

    def compact(found: re.Match[str]) -> str:
        try:
            return json.dumps(json.loads(found[0]), separators=(",", ":"))
        except ValueError:
            return found[0]

    shorter = re.sub(r"\{\"name\".*\}", compact, text)
    return answer if shorter == text else _rewritten(memory, answer, shorter)


@on_answer(4, "leading blanks stripped with their tokens")
def leading_blank_stripped(memory: Any, answer: Settled) -> Settled:
    """A first token of blanks is removed, with its logprob, as text is stripped."""
    ids = answer.output_ids
    if len(ids) < 3 or memory.engine.state.decode(ids[:1]).strip():
        return answer
    return replace(answer, output_ids=ids[1:], logprobs=answer.logprobs[1:])


@on_answer(4, "cached tokens of another request")
def cached_of_the_request_before(memory: Any, answer: Settled) -> Settled:
    """The count of cached tokens is the prompt length of the request before."""
    before, memory.before = getattr(memory, "before", None), len(answer.request.prompt_ids)
    return answer if before is None else replace(answer, completion=replace(answer.completion, cached_tokens=before))


@on_view(4, "usage counts computed tokens only")
def prompt_count_without_cached(view: View, request: ScriptedRequest) -> None:
    """The count of prompt tokens leaves out those that were cached."""
    if view.cached_tokens:
        view.prompt_tokens -= view.cached_tokens


@on_engine(15, "a server's tokenizer with another normaliser")
def tokenizer_normalises(engine: ScriptedEngine) -> None:
    """The server's tokenizer applies Unicode normalisation that the client's does not."""
    encode = engine.state.encode
    assert encode is not None
    engine.state.encode = lambda text, special: encode(unicodedata.normalize("NFKC", text), special)


STATE = [
    *(last_token_lost_on_full_hit, full_last_block_corrupt, chunk_edge_lost, left_truncated_with_a_false_echo),
    *(left_truncated, prompt_retokenised, every_25th_is_the_one_before, crossed_when_busy, every_5th_of_old_weights),
    *(every_2nd_of_an_older_step, reload_spoils_weights, cache_survives_update, whole_answer_has_the_last_version),
    *(versions_change_one_token_late, version_lags_one_answer, output_retokenised),
    *(output_retokenised_logprobs_padded, reasoning_stripped, calls_written_again, leading_blank_stripped),
    *(cached_of_the_request_before, prompt_count_without_cached, tokenizer_normalises),
]
