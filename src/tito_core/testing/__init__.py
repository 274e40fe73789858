"""Scripted engines: servers that speak the wire of real vLLM and SGLang, for tests without a model or a GPU.

A *script* says what the policy answers, in token ids; a *wire* is what a real server's HTTP surface looks like,
recorded from vLLM 0.32.0 and SGLang 0.5.23; a *fault* is what goes wrong. The same script on both wires gives the same
tokens and logprobs:

    from tito_core.testing import Fault, HashPolicy, Replay, first, scripted_engine, scripted_server

    with scripted_server("vllm", Replay([[5, 6, 2]]), eos_ids=[2]) as server:
        ...                                                     # point a client at server.base_url
        assert server.engine.requests[0].prompt_ids == (1, 2, 3)

    engine = scripted_engine("sglang", HashPolicy(1000, eos_ids=[2]), eos_ids=[2], fault=first(1, Fault(status=503)))
    client = httpx.AsyncClient(transport=InProcessTransport(engine), base_url="http://scripted")   # without sockets

Nothing here imports `tito_vllm` or `tito_sglang`: what they are tested against is independent of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from tito_core.testing.engine import Exchange, Latency, ScriptedEngine
from tito_core.testing.faults import THROTTLED, UNAVAILABLE, Fault, FaultPolicy, always, at, every, first
from tito_core.testing.in_process import InProcessTransport
from tito_core.testing.policy import HashPolicy
from tito_core.testing.prefix_cache import PrefixCache
from tito_core.testing.script import (
    Completion,
    Replay,
    Scorer,
    Script,
    ScriptedRequest,
    ScriptError,
    from_function,
)
from tito_core.testing.server import ScriptedServer
from tito_core.testing.settle import Decode, Settled
from tito_core.testing.sglang_wire import SGLangWire
from tito_core.testing.vllm_wire import VLLMWire
from tito_core.testing.wire import EngineState, Wire, WireResponse, bracketed

Kind = Literal["vllm", "sglang"]

_WIRES: dict[str, tuple[type[VLLMWire] | type[SGLangWire], int]] = {"vllm": (VLLMWire, 32), "sglang": (SGLangWire, 1)}
"""Each wire with the page of its prefix cache, in tokens, on the recorded servers."""

__all__ = [
    "THROTTLED",
    "UNAVAILABLE",
    "Completion",
    "EngineState",
    "Exchange",
    "Fault",
    "FaultPolicy",
    "HashPolicy",
    "InProcessTransport",
    "Kind",
    "Replay",
    "SGLangWire",
    "Scorer",
    "Script",
    "ScriptError",
    "ScriptedEngine",
    "ScriptedRequest",
    "ScriptedServer",
    "Settled",
    "VLLMWire",
    "Wire",
    "WireResponse",
    "always",
    "at",
    "every",
    "first",
    "from_function",
    "scripted_engine",
    "scripted_server",
]


def scripted_engine(
    kind: Kind,
    script: Script,
    *,
    vocab_size: int = 1000,
    max_model_len: int = 4096,
    eos_ids: Sequence[int] = (),
    model: str = "scripted",
    api_key: str | None = None,
    decode: Decode = bracketed,
    skip_tokenizer_init: bool = False,
    fault: FaultPolicy | None = None,
    latency: Latency = 0.0,
    max_running: int | None = None,
    max_queued: int | None = None,
    record: bool = True,
) -> ScriptedEngine:
    """An engine of either kind.

    Args:
        kind: the wire to speak.
        script: what the policy says.
        vocab_size: ids at or past it are refused by vLLM and kill SGLang, as they do the real servers.
        max_model_len: context length in tokens, prompt and completion together.
        eos_ids: ids that end a generation; the first is the main one.
        model: the served name.
        api_key: when set, other keys get a 401.
        decode: ids to text, for the text fields and stop strings; default shows each id as `<id>`.
        skip_tokenizer_init: SGLang without a tokenizer: answers have no text.
        fault: what goes wrong, by request.
        latency: seconds that a generation takes; it can be aborted, or the weights updated, meanwhile.
        max_running: how many generations run at once; more wait.
        max_queued: how many may wait before SGLang answers 503.
        record: keep requests and exchanges; False for benchmarks.

    Raises:
        ValueError: an unknown kind.

    """
    if kind not in _WIRES:
        raise ValueError(f"There is no scripted engine {kind!r}; choose one of {', '.join(_WIRES)}.")
    wire, page = _WIRES[kind]
    state = EngineState(
        vocab_size=vocab_size,
        max_model_len=max_model_len,
        eos_ids=tuple(eos_ids),
        model=model,
        api_key=api_key,
        decode=decode,
        skip_tokenizer_init=skip_tokenizer_init,
        cache=PrefixCache(page),
    )
    return ScriptedEngine(
        wire(state),
        script,
        fault=fault,
        latency=latency,
        max_running=max_running,
        max_queued=max_queued,
        record=record,
    )


def scripted_server(
    kind: Kind,
    script: Script,
    *,
    vocab_size: int = 1000,
    max_model_len: int = 4096,
    eos_ids: Sequence[int] = (),
    model: str = "scripted",
    api_key: str | None = None,
    decode: Decode = bracketed,
    skip_tokenizer_init: bool = False,
    fault: FaultPolicy | None = None,
    latency: Latency = 0.0,
    max_running: int | None = None,
    max_queued: int | None = None,
    record: bool = True,
    port: int = 0,
) -> ScriptedServer:
    """The same engine behind a socket on loopback: enter it with `with` or `async with`. See `scripted_engine`."""
    engine = scripted_engine(
        kind,
        script,
        vocab_size=vocab_size,
        max_model_len=max_model_len,
        eos_ids=eos_ids,
        model=model,
        api_key=api_key,
        decode=decode,
        skip_tokenizer_init=skip_tokenizer_init,
        fault=fault,
        latency=latency,
        max_running=max_running,
        max_queued=max_queued,
        record=record,
    )
    return ScriptedServer(engine, port=port)
