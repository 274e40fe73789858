"""A server is restarted as another one while rollouts run: they end before another turn is committed."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import pytest
from strands import Agent

from support.backends import instant
from support.scripted import END, ids_of, tokenizer
from tito_conformance.testing import Completion, HashPolicy, InProcessTransport, ScriptedEngine, scripted_engine
from tito_conformance.testing.wire import FRESH
from tito_core import Policy
from tito_core.backend import AdapterNotInEffectError, EngineConnectionError, ProtocolViolationError, ServerChangedError
from tito_core.backend.http.client import IDLE_S
from tito_core.ledger.errors import LawViolationError
from tito_sglang.backend import SGLangBackend
from tito_vllm.backend import VLLMBackend

BACKENDS: dict[str, Any] = {"vllm": VLLMBackend, "vllm-completions": VLLMBackend, "sglang": SGLangBackend}


class Policies(HashPolicy):
    """A distribution whose logprobs can be measured; a turn's answers are given words."""

    def __call__(self, request: Any) -> Completion:
        if request.scoring or request.ignore_eos:
            return super().__call__(request)
        return Completion(ids_of(f"fine{END}"))


class Address:
    """An address at which one server after another listens; nothing listens where `engine` is None."""

    def __init__(self, kind: str, **options: Any) -> None:
        self.kind, self.requests = kind, 0
        self.engine: ScriptedEngine | None = self.started(**options)
        self.fallback: ScriptedEngine | None = None

    def started(self, **options: Any) -> ScriptedEngine:
        loaded = tokenizer()
        settings: dict[str, Any] = {
            "vocab_size": len(loaded),
            "eos_ids": [loaded.eos_token_id],
            "scale_out": self.kind == "vllm",
            "encode": lambda text, special: loaded.encode(text, add_special_tokens=special),
            **options,
        }
        name: Any = "sglang" if self.kind == "sglang" else "vllm"
        return scripted_engine(name, Policies(settings["vocab_size"], eos_ids=settings["eos_ids"]), **settings)

    async def send(self, *request: Any) -> Any:
        self.requests += 1
        method, url, headers, body = request
        if self.fallback is not None and url.endswith(("/generate", "/completions")):
            sent = json.loads(body if isinstance(body, bytes) else b"".join(body))
            body = json.dumps({**sent, "model": self.fallback.state.model}).encode()
            return await InProcessTransport(self.fallback).send(method, url, headers, body)
        return await InProcessTransport(self.engine or self.away).send(*request)

    @property
    def away(self) -> ScriptedEngine:
        engine = self.started()
        engine.state.dead = True
        return engine

    async def aclose(self) -> None:
        """Nothing is open."""


def connected(kind: str, **options: Any) -> tuple[Policy, Address]:
    address = Address(kind, **options)
    backend = BACKENDS[kind]("http://scripted", **instant({"http_transport": lambda: address}))
    return Policy.connect(backend=backend, tokenizer=tokenizer()), address


def begun(kind: str, adapter: str | None = None, **options: Any) -> tuple[Any, Agent, Address]:
    """Return the model, the agent and the server of a rollout after its first turn."""
    policy, address = connected(kind, **options)
    model = policy.model(adapter=adapter)
    agent = Agent(model=model, callback_handler=None)
    agent("How are you?")
    return model, agent, address


def requests_for(agent: Agent, address: Address, question: str) -> int:
    """Ask, and return how many requests that took."""
    before = address.requests
    agent(question)
    return address.requests - before


def restarts_as(address: Address, agent: Agent, **options: Any) -> None:
    """Restart the server between two turns, one of which finds nothing at the address."""
    address.engine = None
    with pytest.raises(EngineConnectionError):
        agent("Are you there?")
    agent.messages.pop()
    address.engine = address.started(**options)


def shifted(loaded: Any) -> Callable[[str, bool], list[int]]:
    return lambda text, special: [token + 1 for token in loaded.encode(text, add_special_tokens=special)]


REPLACED: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "logprob mode": ({"raw_logprobs": None}, ServerChangedError, "Law 11: .*processed_logprobs was"),
    "model": ({"model": "another"}, ServerChangedError, "Law 15: .*model was 'scripted' and is 'another'"),
    "vocabulary": ({"encode": shifted(tokenizer())}, LawViolationError, "Law 15: .*tokenizer"),
}


@pytest.mark.parametrize("what", REPLACED)
@pytest.mark.parametrize("kind", BACKENDS)
def test_a_rollout_ends_on_a_server_that_was_restarted_as_another(kind: str, what: str) -> None:
    options, error, sentence = REPLACED[what]
    if what == "logprob mode":  # the other one than the engine's own
        options = {"raw_logprobs": kind == "sglang"}
    model, agent, address = begun(kind)
    restarts_as(address, agent, **options)
    for _ in range(2):  # it is refused until the server is what it was
        with pytest.raises(error, match=sentence):
            agent("And now?")
        agent.messages.pop()
    assert len(model.ledger) == 1
    address.engine = address.started()
    agent("And now?")
    assert len(model.ledger) == 2


@pytest.mark.parametrize("kind", BACKENDS)
def test_a_server_that_comes_back_within_a_turn_is_checked_before_the_commit(kind: str) -> None:
    """The retry of a request that nothing listened to is answered by the other server."""
    policy, address = connected(kind)
    model = policy.model()
    address.engine = None

    async def back(seconds: float) -> None:
        address.engine = address.started(raw_logprobs=kind == "sglang")

    policy.backend.http.retries.sleep = back  # type: ignore[attr-defined]
    with pytest.raises(ServerChangedError, match="Law 11"):
        Agent(model=model, callback_handler=None)("How are you?")
    assert len(model.ledger) == 0


@pytest.mark.parametrize("within", [False, True])
@pytest.mark.parametrize("kind", BACKENDS)
def test_the_turn_that_meets_a_restart_without_its_adapter_is_not_committed(kind: str, within: bool) -> None:
    model, agent, address = begun(kind, "one", adapters=("one",))

    async def back(seconds: float = 0) -> None:
        address.engine = address.started(adapters=("one",))
        address.engine.state.adapters["one"] = FRESH

    if within:
        model.policy.backend.http.retries.sleep = back
        address.engine = None
    else:
        restarts_as(address, agent)
        asyncio.run(back())
    with pytest.raises(AdapterNotInEffectError):
        agent("And now?")
    assert len(model.ledger) == 1


@pytest.mark.parametrize("kind", BACKENDS)
def test_a_restart_of_the_same_server_and_new_weights_change_nothing(kind: str) -> None:
    model, agent, address = begun(kind)
    assert requests_for(agent, address, "And now?") == 1
    engine = address.engine
    assert engine is not None
    for step in range(3):  # a trainer's updates; their versions are recorded, and cost no measurement
        engine.state.set_version(f"step-{step}")
        assert requests_for(agent, address, f"And after step {step}?") == 1
    restarts_as(address, agent, max_model_len=2048)
    agent("And after the restart?")
    assert requests_for(agent, address, "And then?") == 1, "it was checked once"
    assert len(model.ledger) == 7


@pytest.mark.parametrize("kind", BACKENDS)
def test_a_restart_while_the_client_was_idle_is_noticed(kind: str) -> None:
    """No connection breaks, as none is open: a trainer updates its policy for minutes between two rollouts."""
    policy, address = connected(kind)
    http: Any = policy.backend.http  # type: ignore[attr-defined]
    now = http._clock()
    http._clock = lambda: now
    model = policy.model()
    agent = Agent(model=model, callback_handler=None)
    agent("How are you?")
    now += IDLE_S
    assert requests_for(agent, address, "And now?") == 1, "no engine starts so fast"
    now += IDLE_S + 1
    address.engine = address.started(raw_logprobs=kind == "sglang")
    with pytest.raises(ServerChangedError, match=r"Law 11: .*processed_logprobs was"):
        agent("And then?")
    assert len(model.ledger) == 2


@pytest.mark.parametrize("kind", BACKENDS)
def test_a_server_with_new_weights_is_the_one_it_was(kind: str) -> None:
    """SGLang names its model by the folder of its last weights, and a learner's step leaves the server idle."""
    model, agent, address = begun(kind)
    backend = model.policy.backend
    asyncio.run(backend.load_weights("/weights/1", "step-1"))
    backend.http.interruptions += 1
    agent("And now?")
    versions = [None, None] if kind == "vllm-completions" else ["default", "step-1"]
    assert [turn.draft.versions[0].version for turn in model.ledger] == versions
    named = BACKENDS[kind]("http://scripted", model="scripted", **instant({"http_transport": lambda: address}))
    assert Policy.connect(backend=named, tokenizer=tokenizer()).info.model == "scripted"


async def test_a_long_request_is_no_idle_time() -> None:
    policy, _ = await asyncio.to_thread(connected, "vllm")
    http: Any = policy.backend.http  # type: ignore[attr-defined]
    began = http.interruptions
    mark = http._begun()
    http._last_s -= 2 * IDLE_S
    await Agent(model=policy.model(), callback_handler=None).invoke_async("How are you?")
    http._ended(mark)
    assert http.interruptions == began


async def test_a_check_is_shared_by_the_rollouts_that_wait_for_it() -> None:
    policy, address = await asyncio.to_thread(connected, "vllm")
    models = [policy.model() for _ in range(8)]
    policy.backend.http.interruptions += 1  # type: ignore[attr-defined]
    before = address.requests
    await asyncio.gather(*(Agent(model=model, callback_handler=None).invoke_async("How are you?") for model in models))
    shared = address.requests - before
    policy.backend.http.interruptions += 1  # type: ignore[attr-defined]
    before = address.requests
    await Agent(model=policy.model(), callback_handler=None).invoke_async("How are you?")
    assert shared == address.requests - before + 7


def test_an_answer_that_names_another_model_has_the_server_checked() -> None:
    """A proxy can move an address to another server without breaking a connection."""
    policy, address = connected("vllm-completions")
    model = policy.model()
    agent = Agent(model=model, callback_handler=None)
    agent("How are you?")
    assert address.engine is not None
    address.engine.state.model = "another"
    address.engine.wire.state.model = "another"
    with pytest.raises(Exception, match="another"):
        agent("And now?")
    assert len(model.ledger) == 1


@pytest.mark.parametrize("kind", ["vllm", "vllm-completions"])
def test_another_models_answer_is_refused_while_the_server_is_what_it_was(kind: str) -> None:
    """A gateway falls back to another model while the first is busy; its list of models stays the same."""
    policy, address = connected(kind)
    model = policy.model()
    agent = Agent(model=model, callback_handler=None)
    agent("How are you?")
    address.fallback = address.started(model="tiny-fallback")
    with pytest.raises(ProtocolViolationError, match=r"Law 4: .*model 'tiny-fallback', but .* 'scripted'"):
        agent("And now?")
    assert len(model.ledger) == 1
