"""Defects of the policy: ignored parameters and changed prompts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from conformance.defects.defect import Defect, Wrap
from tito_conformance.testing import Completion, Script, ScriptedRequest


def _ignores(**changes: Any) -> Wrap:
    """Make a policy that ignores some parameters."""
    return lambda script: _Wrapped(script, lambda request: replace(request, **changes))


class _Wrapped:
    """A script that answers a changed request, but scores the original one."""

    def __init__(self, script: Any, change: Callable[[ScriptedRequest], ScriptedRequest]) -> None:
        self.script = script
        self.change = change
        self.score, self.top = script.score, script.top

    def __call__(self, request: ScriptedRequest) -> Completion:
        other = self.change(request)
        completion: Completion = self.script(other)
        if completion.finish is None and completion.output_ids and completion.output_ids[-1] in other.stop_ids:
            return replace(
                completion, finish="stop", stop=completion.output_ids[-1]
            )  # although the request does not allow it
        return completion


def _seedless(script: Any) -> Script:
    return _Wrapped(script, lambda request: replace(request, seed=request.number))


def _of_the_neighbour(script: Any) -> Script:
    """Answer each prompt as if it were the previous one."""
    before: list[tuple[int, ...]] = []

    def change(request: ScriptedRequest) -> ScriptedRequest:
        before.append(request.prompt_ids)
        return replace(request, prompt_ids=before[-2] if len(before) > 1 else request.prompt_ids)

    return _Other(script, change)


class _Other(_Wrapped):
    """A script that answers a changed request, and reports its logprobs."""

    def __call__(self, request: ScriptedRequest) -> Completion:
        other = self.change(request)
        completion: Completion = self.script(other)
        if completion.logprobs is not None or not len(completion.output_ids):
            return completion
        ids = (*other.prompt_ids, *completion.output_ids)
        start = len(other.prompt_ids)
        return replace(completion, logprobs=self.script.score(ids, start, request.reported_temperature))


def _cut_prompt(script: Any) -> Script:
    return _Other(script, lambda request: replace(request, prompt_ids=request.prompt_ids[:-2] or request.prompt_ids))


def _crowded(script: Any) -> Script:
    """Answer every third request as if it had another prompt."""

    def change(request: ScriptedRequest) -> ScriptedRequest:
        if request.number % 3:
            return request
        return replace(
            request, prompt_ids=(*request.prompt_ids[:-1], (request.prompt_ids[-1] + 1) % request.vocab_size)
        )

    return _Other(script, change)


POLICIES = (
    Defect(
        "temperature-ignored", 4, "The temperature is ignored, so greedy answers vary.", wrap=_ignores(temperature=1.0)
    ),
    Defect("seed-ignored", 4, "The seed is ignored.", wrap=_seedless),
    Defect("top-k-ignored", 4, "top_k is ignored.", wrap=_ignores(top_k=0)),
    Defect("ignore-eos-ignored", 4, "ignore_eos is ignored.", wrap=_ignores(ignore_eos=False)),
    Defect("min-tokens-ignored", 4, "min_new_tokens is ignored.", wrap=_ignores(min_new_tokens=0)),
    Defect("grammar-ignored", 9, "A grammar is ignored.", wrap=_ignores(grammar=None)),
    Defect("answer-of-the-neighbour", 4, "An answer is that of another request.", wrap=_of_the_neighbour),
    Defect("prompt-cut", 4, "The policy ignores the end of the prompt.", wrap=_cut_prompt),
    Defect("alone-otherwise", 4, "Some answers are those of another prompt.", wrap=_crowded),
)
"""Defects of the policy."""
