"""The stranger's defects in prompt logprobs, top logprobs, routed experts and scoring."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from conformance.defects.stranger_hooks import is_measured, on_answer, on_engine, on_view
from conformance.defects.views import View
from tito_conformance.testing import ScriptedEngine, ScriptedRequest, Settled

_BOTH = (False, True)


class _Scorer:
    """A scorer whose numbers are changed."""

    def __init__(self, inner: Any, *, score: Any = None, top: Any = None) -> None:
        self._inner, self._score, self._top = inner, score, top

    def score(self, ids: Any, start: int, temperature: float) -> Any:
        if self._score is None:
            return self._inner.score(ids, start, temperature)
        return self._score(self._inner, ids, start, temperature)

    def top(self, ids: Any, position: int, k: int, temperature: float) -> Any:
        if self._top is None:
            return self._inner.top(ids, position, k, temperature)
        return self._top(self._inner, ids, position, k, temperature)


@on_answer(4, "off-by-one of prompt logprobs", scoring=_BOTH)
def prompt_scores_one_late(memory: Any, answer: Settled) -> Settled:
    """Each prompt token has the prompt logprob of the token before it."""

    def score(inner: Any, ids: Any, start: int, temperature: float) -> Any:
        values = inner.score(ids, start, temperature)
        return [*values[:1], *values[:-1]]

    return replace(answer, scorer=_Scorer(answer.scorer, score=score))


@on_answer(4, "prompt logprobs at the edges of prefill chunks; neighbours of vLLM #3251 and #6456", scoring=_BOTH)
def prompt_scores_wrong_at_chunks(memory: Any, answer: Settled) -> Settled:
    """With chunked prefill, the first prompt logprob of each chunk of 256 repeats the one before."""

    def score(inner: Any, ids: Any, start: int, temperature: float) -> Any:
        values = list(inner.score(ids, start, temperature))
        for n in range(1, len(values)):
            if (start + n) % 256 == 0:
                values[n] = values[n - 1]
        return values

    return replace(answer, scorer=_Scorer(answer.scorer, score=score))


@on_answer(4, "prompt logprobs of cached blocks: vLLM #3251, #6456", scoring=_BOTH)
def prompt_scores_of_another_prompt(memory: Any, answer: Settled) -> Settled:
    """Sixteen prompt logprobs near the prompt's end are those of the prompt scored before."""

    def score(inner: Any, ids: Any, start: int, temperature: float) -> Any:
        values = list(inner.score(ids, start, temperature))
        stale = getattr(memory, "stale", None)
        if len(values) > 48:
            memory.stale = values[-24:-8]
            values[-24:-8] = stale or values[-24:-8]
        return values

    return replace(answer, scorer=_Scorer(answer.scorer, score=score))


@on_engine(11, "scoring at the wrong temperature: miles PR #1345")
def scores_at_stale_temperature(engine: ScriptedEngine) -> None:
    """Prompts are scored at the temperature of the last sampled request."""
    wire: Any = engine.wire
    route, inner, last = wire.route, engine.script, {"temperature": 1.0}

    def routed(*arguments: Any) -> Any:
        answer = route(*arguments)
        for request in getattr(answer, "requests", ()):
            if not request.scoring and not is_measured(request) and request.temperature:
                last["temperature"] = request.temperature
        first = answer.requests[0] if hasattr(answer, "requests") else None
        if first is None or not (first.scoring or first.max_new_tokens == 0):
            return answer

        def score(scorer: Any, ids: Any, start: int, temperature: float) -> Any:
            return scorer.score(ids, start, last["temperature"])

        scorer = _Scorer(inner, score=score)
        return replace(
            answer, render=lambda answers, s: answer.render([replace(each, scorer=scorer) for each in answers], s)
        )

    wire.route = routed


@on_answer(4, "top logprobs of the first token for a whole chunk: SGLang #39260")
def top_of_the_token_before(memory: Any, answer: Settled) -> Settled:
    """Every fourth output token has the alternatives of the token before it, beside its own logprob."""
    begin = len(answer.request.prompt_ids)

    def top(inner: Any, ids: Any, position: int, k: int, temperature: float) -> Any:
        late = position > begin and (position - begin) % 4 == 3
        return inner.top(ids, position - 1 if late else position, k, temperature)

    return replace(answer, scorer=_Scorer(answer.scorer, top=top))


@on_answer(11, "top logprobs from another tensor than the sampled one's", wires=("sglang",))
def top_untempered(memory: Any, answer: Settled) -> Settled:
    """The alternatives of top logprobs are raw, while the sampled token's logprob has the temperature."""

    def top(inner: Any, ids: Any, position: int, k: int, temperature: float) -> Any:
        return inner.top(ids, position, k, 1.0)

    return replace(answer, scorer=_Scorer(answer.scorer, top=top))


@on_view(4, "routed experts of cached tokens are not recomputed: vLLM PR #39917")
def experts_zero_when_cached(view: View, request: ScriptedRequest) -> None:
    """After a hit of the prefix cache, the first row of routed experts is all zeros."""
    if (experts := view.experts) is not None and view.cached_tokens and len(experts):
        experts = experts.copy()
        experts[0] = 0
        view.experts = experts


@on_view(4, "layers gathered in pipeline order")
def experts_layers_reversed(view: View, request: ScriptedRequest) -> None:
    """The layers of routed experts are in reverse order."""
    if (experts := view.experts) is not None:
        view.experts = experts[:, ::-1]


@on_view(4, "routed experts one token off: NeMo-RL #2590's expected rows")
def experts_of_outputs_one_late(view: View, request: ScriptedRequest) -> None:
    """The rows of output tokens are one late: the last two rows are equal, and one is lost."""
    if (experts := view.experts) is not None and len(experts) > 3 and len(view.ids) > 2:
        at = len(experts) - len(view.ids) + 1
        view.experts = np.concatenate([experts[:at], experts[at - 1 : -1]])


COLUMNS = [
    *(prompt_scores_one_late, prompt_scores_wrong_at_chunks, prompt_scores_of_another_prompt),
    *(scores_at_stale_temperature, top_of_the_token_before, top_untempered, experts_zero_when_cached),
    *(experts_layers_reversed, experts_of_outputs_one_late),
]
