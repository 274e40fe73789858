"""Hooks with which the stranger's defects are written: each decorator makes a `Defect` of one function.

The function's docstring is the error. Hooks that need memory get a namespace of their own engine as first argument.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, fields, replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

from conformance.defects.defect import Defect
from tito_conformance.testing import Completion, ScriptedEngine, ScriptedRequest, Settled
from tito_conformance.testing.script import reported, settle
from tito_conformance.testing.wire import Generation

Hook = Callable[..., Any]
VLLM = ("vllm", "vllm-completions")
LONG = 800
"""Prompts of more ids are long."""


@dataclass(frozen=True)
class Planted(Defect):
    """A defect, and where it comes from.

    Attributes:
        real: The bug or class of bugs that it is after.
        hard: Whether no black-box client can be expected to see it; `why` says why.
        why: See `hard`.
    """

    real: str = ""
    hard: bool = False
    why: str = ""


def _made(function: Hook, law: int, real: str, **settings: Any) -> Planted:
    name = function.__name__.strip("_").replace("_", "-")
    return Planted(name, law, " ".join((function.__doc__ or "").split()), real=real, **settings)


def is_measured(request: ScriptedRequest) -> bool:
    """Return whether a request is the client's measurement at connect, which the frame's defects leave alone too."""
    return request.max_new_tokens == 0 or (request.ignore_eos and request.temperature == 2.0)


def streamed(request: ScriptedRequest) -> bool:
    """Return whether the client wants events."""
    return bool(request.body.get("stream"))


def params_of(request: ScriptedRequest) -> dict[str, Any]:
    """Return the sampling fields of a body."""
    params: Any = request.body.get("sampling_params") or request.body
    return dict(params)


def with_params(request: ScriptedRequest, **changes: Any) -> ScriptedRequest:
    """Return a request whose body has other sampling fields."""
    params = {**params_of(request), **changes}
    body = {**request.body, "sampling_params": params} if "sampling_params" in request.body else params
    return replace(request, body=body)


def as_kind(kind: type[ScriptedRequest], request: ScriptedRequest) -> ScriptedRequest:
    """Return the same request as an object of a subclass."""
    return kind(**{each.name: getattr(request, each.name) for each in fields(ScriptedRequest)})


def with_ids(answer: Settled, ids: Sequence[int], **changes: Any) -> Settled:
    """Return an answer with other output ids, and the logprobs that a forward pass gives them."""
    request = answer.request
    logprobs = tuple(reported(answer.scorer, request, request.whole(ids), len(request.prompt_ids))) if ids else ()
    completion = replace(answer.completion, top_logprobs=None, weight_versions=None, support=None)
    return replace(answer, output_ids=tuple(ids), logprobs=logprobs, completion=completion, **changes)


def with_logprobs(answer: Settled, values: Sequence[float]) -> Settled:
    """Return an answer with other logprobs, none above zero."""
    return replace(answer, logprobs=tuple(min(float(value), 0.0) for value in values))


def rescored(policy: Any, seen: ScriptedRequest, ids: Sequence[int], finish: Completion) -> Completion:
    """Return a completion with the logprobs of the prompt that the model saw, which is not the one it was sent."""
    logprobs = reported(policy, seen, seen.whole(ids), len(seen.prompt_ids)) if ids else []
    return replace(finish, output_ids=tuple(ids), logprobs=tuple(logprobs))


def _on_generations(engine: ScriptedEngine, change: Callable[[Generation], Generation]) -> None:
    wire: Any = engine.wire
    route = wire.route

    def changed(*arguments: Any) -> Any:
        answer = route(*arguments)
        return change(answer) if isinstance(answer, Generation) else answer

    wire.route = changed


def on_request(law: int, real: str, *, scoring: bool = False, **settings: Any) -> Callable[[Hook], Planted]:
    """Change a request as the server reads it: `hook(memory, request)`. Scoring requests too with `scoring`."""

    def make(hook: Hook) -> Planted:
        def spoil(engine: ScriptedEngine) -> None:
            memory = SimpleNamespace(engine=engine)

            def one(request: ScriptedRequest) -> ScriptedRequest:
                spared = is_measured(request) or (request.scoring and not scoring)
                found: ScriptedRequest = request if spared else hook(memory, request)
                return found

            _on_generations(engine, lambda each: replace(each, requests=[one(request) for request in each.requests]))

        return _made(hook, law, real, spoil=spoil, **settings)

    return make


def on_answer(
    law: int, real: str, *, scoring: tuple[bool, ...] = (False,), **settings: Any
) -> Callable[[Hook], Planted]:
    """Change an answer before it is written, whole or streamed: `hook(memory, answer)`."""

    def make(hook: Hook) -> Planted:
        def spoil(engine: ScriptedEngine) -> None:
            memory = SimpleNamespace(engine=engine)

            def one(answer: Settled) -> Settled:
                request = answer.request
                spared = is_measured(request) or request.scoring not in scoring
                found: Settled = answer if spared else hook(memory, answer)
                return found

            def change(each: Generation) -> Generation:
                return replace(each, render=lambda answers, s: each.render([one(answer) for answer in answers], s))

            _on_generations(engine, change)

        return _made(hook, law, real, spoil=spoil, **settings)

    return make


class Changed:
    """A policy that answers otherwise, and scores as before.

    Args:
        inner: The sound policy.
        hook: `hook(memory, policy, request)` returns the completion.
    """

    def __init__(self, inner: Any, hook: Hook) -> None:
        self.inner = inner
        self._hook = hook
        self._memory = SimpleNamespace()

    def __call__(self, request: ScriptedRequest) -> Completion:
        """Answer one request."""
        spared = request.scoring or is_measured(request)
        found: Completion = self.inner(request) if spared else self._hook(self._memory, self.inner, request)
        return found

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def score(self, *arguments: Any) -> Any:
        """See `Scorer`."""
        return self.inner.score(*arguments)

    def top(self, *arguments: Any) -> Any:
        """See `Scorer`."""
        return self.inner.top(*arguments)


def on_policy(law: int, real: str, **settings: Any) -> Callable[[Hook], Planted]:
    """Change the model: `hook(memory, policy, request)` returns the completion."""
    return lambda hook: _made(hook, law, real, wrap=lambda policy: Changed(policy, hook), **settings)


def on_sampler(law: int, real: str, **settings: Any) -> Callable[[Hook], Planted]:
    """Change how one token is drawn: `hook(draw, step, context, request, noise, eos, offsets)` returns its id."""

    def make(hook: Hook) -> Planted:
        def wrap(policy: Any) -> Any:
            model, memory = policy._policy, SimpleNamespace(last=None, step=0)
            draw = model._sample

            def sample(context: int, request: ScriptedRequest, *rest: Any) -> Any:
                memory.step = memory.step + 1 if memory.last is request else 0
                memory.last = request
                if is_measured(request) or request.scoring:
                    return draw(context, request, *rest)
                return hook(draw, memory.step, context, request, *rest)

            model._sample = sample
            return policy

        return _made(hook, law, real, wrap=wrap, **settings)

    return make


def on_settling(law: int, real: str, **settings: Any) -> Callable[[Hook], Planted]:
    """Change where an answer ends: `hook(settle, script, request, decode)` returns the settled answer."""

    def make(hook: Hook) -> Planted:
        def patched(script: Any, request: ScriptedRequest, decode: Any) -> Any:
            if is_measured(request) or request.scoring:
                return settle(script, request, decode)
            return hook(settle, script, request, decode)

        def client() -> AbstractContextManager[Any]:
            return mock.patch("tito_conformance.testing.engine.settle", patched)

        return _made(hook, law, real, client=client, **settings)

    return make


def on_events(law: int, real: str, **settings: Any) -> Callable[[Hook], Planted]:
    """Change the events of a stream in place: `hook(events)`."""
    return lambda hook: _made(hook, law, real, events=hook, **settings)


def on_view(law: int, real: str, **settings: Any) -> Callable[[Hook], Planted]:
    """Change a whole response in place: `hook(view, request)`."""
    return lambda hook: _made(hook, law, real, edit=hook, **settings)


def on_engine(law: int, real: str, **settings: Any) -> Callable[[Hook], Planted]:
    """Change the engine itself: `hook(engine)`."""
    return lambda hook: _made(hook, law, real, spoil=hook, **settings)


def on_client(law: int, real: str, **settings: Any) -> Callable[[Hook], Planted]:
    """Change the client: `hook()` returns a context that patches it."""
    return lambda hook: _made(hook, law, real, client=hook, **settings)
