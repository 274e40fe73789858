"""The stranger's defects in where an answer ends, and in what ends it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from conformance.defects.stranger_hooks import (
    on_answer,
    on_engine,
    on_policy,
    on_request,
    on_settling,
    streamed,
    with_ids,
)
from tito_conformance.testing import Completion, ScriptedEngine, ScriptedRequest, Settled


@on_settling(4, "speculative decoding past max_tokens")
def one_past_the_limit(settle: Any, script: Any, request: ScriptedRequest, decode: Any) -> Settled:
    """In long answers, one accepted draft token comes after `max_tokens`."""
    if request.max_new_tokens < 24 or request.grammar is not None:
        return settle(script, request, decode)
    longer = settle(script, replace(request, max_new_tokens=request.max_new_tokens + 1), decode)
    return replace(longer, request=request)


@on_answer(4, "draft tokens kept past EOS: class of vLLM PR #41493")
def token_after_eos_when_streamed(memory: Any, answer: Settled) -> Settled:
    """In streams one draft token follows the stop token, with its own logprob."""
    if answer.finish != "stop" or not streamed(answer.request) or len(answer.output_ids) < 2:
        return answer
    return with_ids(answer, (*answer.output_ids, answer.output_ids[0]))


@on_settling(4, "tokens left past a stop string: vLLM PR #47616")
def stop_string_seen_late(settle: Any, script: Any, request: ScriptedRequest, decode: Any) -> Settled:
    """Stop strings are looked for every four tokens only, so tokens after one stay in the answer."""
    found = settle(script, request, decode)
    if not isinstance(found.stop, str):
        return found
    size = min(-(-len(found.output_ids) // 4) * 4, request.max_new_tokens)
    longer = settle(script, replace(request, stop=(), max_new_tokens=size), decode)
    return replace(longer, request=request, finish="stop", stop=found.stop)


@on_answer(4, "text truncation mapped back to tokens, one too many")
def stop_string_token_lost(memory: Any, answer: Settled) -> Settled:
    """The token that completes a stop string is removed from the ids, with its logprob."""
    if not isinstance(answer.stop, str) or len(answer.output_ids) < 2:
        return answer
    return replace(answer, output_ids=answer.output_ids[:-1], logprobs=answer.logprobs[:-1])


@on_answer(4, "stop tokens trimmed as their text is")
def own_stop_id_trimmed(memory: Any, answer: Settled) -> Settled:
    """A stop id of the request, other than EOS, is removed from the ids, with its logprob."""
    request, ids = answer.request, answer.output_ids
    if answer.finish != "stop" or len(ids) < 2 or ids[-1] not in request.stop_token_ids or ids[-1] in request.eos_ids:
        return answer
    return replace(answer, output_ids=ids[:-1], logprobs=answer.logprobs[:-1])


@on_answer(4, "EOS left out of streamed chunks")
def eos_trimmed_when_streamed(memory: Any, answer: Settled) -> Settled:
    """In streams the EOS is left out of the ids, and the finish names no stop token."""
    ids = answer.output_ids
    if answer.finish != "stop" or len(ids) < 2 or ids[-1] not in answer.request.eos_ids:
        return answer
    if not streamed(answer.request):
        return answer
    return replace(answer, output_ids=ids[:-1], logprobs=answer.logprobs[:-1], stop=None)


@on_answer(4, "order of the checks for length and stop")
def length_wins(memory: Any, answer: Settled) -> Settled:
    """An answer whose stop token is also its last allowed token is reported as cut off."""
    full = len(answer.output_ids) == answer.request.max_new_tokens
    return replace(answer, finish="length", stop=None) if answer.finish == "stop" and full else answer


@on_answer(4, "finish reasons mapped by a proxy")
def cut_off_called_stop(memory: Any, answer: Settled) -> Settled:
    """Answers that were cut off after more than 24 tokens are reported as complete."""
    cut = answer.finish == "length" and len(answer.output_ids) > 24
    return replace(answer, finish="stop", stop=None) if cut else answer


@on_request(4, "a gateway's own limit of tokens")
def capped_at_32(memory: Any, request: ScriptedRequest) -> ScriptedRequest:
    """At most 32 tokens are sampled, whatever was asked; the finish is "length"."""
    return replace(request, max_new_tokens=min(request.max_new_tokens, 32))


@on_policy(4, "a second eos_token_id from generation_config.json")
def blank_is_an_eos(memory: Any, policy: Any, request: ScriptedRequest) -> Completion:
    """The model's configuration names one more EOS, a blank's token; answers of over 8 tokens end at it."""
    blank = policy._tokenizer.encode(" ", add_special_tokens=False)[0]
    done = policy(request)
    ids = list(done.output_ids)
    at = next((n for n, token in enumerate(ids[: request.max_new_tokens]) if token == blank and n >= 8), None)
    if at is None or request.ignore_eos or request.grammar is not None:
        return done
    return Completion(ids[: at + 1], finish="stop", stop=blank)


@on_request(11, "min_tokens counted with the first token of the prefill")
def min_tokens_one_short(memory: Any, request: ScriptedRequest) -> ScriptedRequest:
    """The end of the turn is allowed one token before `min_tokens`."""
    return replace(request, min_new_tokens=max(0, request.min_new_tokens - 1))


@on_request(11, "min_tokens lost in one endpoint")
def min_tokens_lost_when_streamed(memory: Any, request: ScriptedRequest) -> ScriptedRequest:
    """`min_tokens` is ignored in streams."""
    return replace(request, min_new_tokens=0) if streamed(request) else request


@on_policy(11, "min_tokens suppresses EOS only, not stop_token_ids")
def min_tokens_forgets_stop_ids(memory: Any, policy: Any, request: ScriptedRequest) -> Completion:
    """`min_tokens` holds back the EOS, but not the request's other stop ids."""
    done, least = policy(request), request.min_new_tokens
    others = set(request.stop_token_ids) - set(request.eos_ids)
    early = [n for n, token in enumerate(done.output_ids[:least]) if token in others]
    if not early:
        return done
    ids = done.output_ids[: early[0] + 1]
    return Completion(ids, finish="stop", stop=ids[-1])


@on_request(11, "stop ids lost when a slot is reused")
def stop_ids_lost_after_20(memory: Any, request: ScriptedRequest) -> ScriptedRequest:
    """After 20 requests, stop ids of the request are ignored; the model's own EOS still ends a turn."""
    memory.count = getattr(memory, "count", 0) + 1
    return replace(request, stop_token_ids=()) if memory.count > 20 else request


@on_request(11, "ignore_eos dropped by a proxy")
def ignore_eos_dropped(memory: Any, request: ScriptedRequest) -> ScriptedRequest:
    """`ignore_eos` is ignored."""
    return replace(request, ignore_eos=False)


@on_answer(4, "abort races: a partial answer that looks complete")
def abort_called_stop(memory: Any, answer: Settled) -> Settled:
    """A generation that was aborted is reported as complete, with its partial tokens."""
    aborted = answer.finish == "abort" and answer.output_ids
    return replace(answer, finish="stop", stop=None) if aborted else answer


@on_answer(4, "duplicate tokens at a preemption or abort: vLLM PR #38624")
def abort_repeats_a_token(memory: Any, answer: Settled) -> Settled:
    """The partial answer of an aborted generation has its last token twice."""
    ids, values = answer.output_ids, answer.logprobs
    if answer.finish != "abort" or not ids:
        return answer
    return replace(answer, output_ids=(*ids, ids[-1]), logprobs=(*values, values[-1]))


@on_engine(5, "rids matched by prefix: SGLang #30912, and #25561 for the empty rid")
def abort_hits_everyone(engine: ScriptedEngine) -> None:
    """An abort of one request ends every running generation."""
    abort = engine.state.abort
    engine.state.abort = lambda matches: abort(lambda request: True)


@on_request(11, "grammar lost in one endpoint")
def grammar_lost_when_streamed(memory: Any, request: ScriptedRequest) -> ScriptedRequest:
    """Grammars are ignored in streams."""
    return replace(request, grammar=None) if streamed(request) else request


@on_request(11, "grammar lost after a preemption or a cache eviction")
def every_third_grammar_lost(memory: Any, request: ScriptedRequest) -> ScriptedRequest:
    """Every third grammar is ignored."""
    if request.grammar is None:
        return request
    memory.count = getattr(memory, "count", 0) + 1
    return replace(request, grammar=None) if memory.count % 3 == 0 else request


@on_policy(11, "EOS allowed inside a grammar under speculation: vLLM PR #36138's class")
def grammar_ends_early(memory: Any, policy: Any, request: ScriptedRequest) -> Completion:
    """Under a grammar, the turn ends before the text is complete."""
    done = policy(request)
    if request.grammar is None or len(done.output_ids) < 8:
        return done
    return Completion([*done.output_ids[:-4], done.output_ids[-1]])


FINISHING = [
    *(one_past_the_limit, token_after_eos_when_streamed, stop_string_seen_late, stop_string_token_lost),
    *(own_stop_id_trimmed, eos_trimmed_when_streamed, length_wins, cut_off_called_stop, capped_at_32),
    *(blank_is_an_eos, min_tokens_one_short, min_tokens_lost_when_streamed, min_tokens_forgets_stop_ids),
    *(stop_ids_lost_after_20, ignore_eos_dropped, abort_called_stop, abort_repeats_a_token, abort_hits_everyone),
    *(grammar_lost_when_streamed, every_third_grammar_lost, grammar_ends_early),
]
