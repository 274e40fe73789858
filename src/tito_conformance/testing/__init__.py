"""Scripted engines: servers that speak the wire of real vLLM and SGLang, for tests without a model or a GPU.

A *script* maps a request to a completion in token ids. A *wire* is the HTTP interface of a real server; vLLM's and
SGLang's are here, another engine's in its package (see `WireKit`). A *fault* is an error to inject. The same script
gives the same tokens and logprobs on every wire:

    from tito_conformance.testing import Fault, HashPolicy, Replay, first, scripted_engine, scripted_server

    with scripted_server("vllm", Replay([[5, 6, 2]]), eos_ids=[2]) as server:
        ...                                                     # point a client at server.base_url
        assert server.engine.requests[0].prompt_ids == (1, 2, 3)

    engine = scripted_engine("sglang", HashPolicy(1000, eos_ids=[2]), eos_ids=[2], fault=first(1, Fault(status=503)))
    backend = create_backend("sglang", "http://scripted", http_transport=lambda: InProcessTransport(engine))

Neither this package nor a wire imports a backend, so that the scripted servers are independent of the code under test.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any, TypedDict, Unpack

from tito_conformance.testing.engine import (
    THROTTLED,
    UNAVAILABLE,
    Exchange,
    Fault,
    FaultPolicy,
    Latency,
    ScriptedEngine,
    always,
    at,
    every,
    first,
)
from tito_conformance.testing.pictures import ImageSettings, PlacedImage
from tito_conformance.testing.policy import HashPolicy
from tito_conformance.testing.script import (
    Completion,
    Decode,
    Replay,
    Scorer,
    Script,
    ScriptedRequest,
    ScriptError,
    Settled,
    from_function,
)
from tito_conformance.testing.server import InProcessTransport, ScriptedServer
from tito_conformance.testing.wire import (
    Encode,
    EngineState,
    PrefixCache,
    Wire,
    WireKit,
    WireResponse,
)
from tito_core.entry_points import load, offered

_GROUP = "tito.wires"

__all__ = [
    "THROTTLED",
    "UNAVAILABLE",
    "Completion",
    "EngineState",
    "Exchange",
    "Fault",
    "FaultPolicy",
    "HashPolicy",
    "ImageSettings",
    "InProcessTransport",
    "Options",
    "PlacedImage",
    "Replay",
    "Scorer",
    "Script",
    "ScriptError",
    "ScriptedEngine",
    "ScriptedRequest",
    "ScriptedServer",
    "Settled",
    "Wire",
    "WireKit",
    "WireResponse",
    "always",
    "at",
    "every",
    "find_wire",
    "first",
    "from_function",
    "installed_wires",
    "scripted_engine",
    "scripted_server",
]


class Options(TypedDict, total=False):
    """Settings of a scripted engine, with their defaults.

    Keys:
        vocab_size: 1000. Larger ids are refused by vLLM and crash SGLang, as on the real servers.
        max_model_len: 4096. Context length in tokens, prompt and completion together.
        eos_ids: () by default. Ids that end a generation; the first is the main one.
        model: "scripted". The served name.
        api_key: None. If set, requests with another key get a 401.
        decode: Converts ids to text, for text fields and stop strings. By default each id becomes `<id>`.
        encode: None. Converts (text, whether to add special tokens) to ids for `/tokenize`, such as
            `lambda text, special: tokenizer.encode(text, add_special_tokens=special)`. Without it the path does not
            exist, as behind a router that forwards generation only.
        skip_tokenizer_init: False. A server without a tokenizer: SGLang's responses have no text, and no wire encodes
            text.
        scale_out: True. vLLM's `--enable-scale-out`: without it `/inference/v1/*` returns 403.
        adapters: (). Names of LoRA adapters that are loaded from the start, each from a folder of its own name.
        release: "0.32.0". The vLLM release to play. From 0.33 on `/pause` in the modes `abort` and `wait` refuses new
            requests with 503 until `/resume`.
        model_runner: 1. vLLM's model runner: 2, on a GPU, scores given ids; 1, on a CPU, refuses them.
        ranks: 1. Data-parallel ranks, which SGLang's `/server_info` reports. A request for another is refused.
        reasoning: None. Ids of `<think>` and `</think>` on a vLLM server with `--reasoning-parser`, which applies a
            grammar only after the reasoning.
        raw_logprobs: None, the engine's default. Completions report raw logprobs (True, vLLM's default) or logprobs
            at the request's temperature (False, SGLang's default). Prompt logprobs are always raw.
        truncated_logprobs: False. Whether logprobs are normalised over the tokens that `top_k`, `top_p` and
            `min_p` keep, as vLLM's `processed_logprobs` are.
        max_logprobs: 20. vLLM's `--max-logprobs`.
        experts: None. (layers, experts a token) of a mixture-of-experts model on a server with
            `--enable-return-routed-experts`.
        sampling_masks: False. vLLM's `--return-sampling-mask`; SGLang needs no option.
        priorities: False. SGLang's `--enable-priority-scheduling`.
        images: None, a server of a text model. How the server reads images.
        fault: None. Chooses a fault for each request.
        latency: 0. Seconds that a generation takes; during them it can be aborted, and weights can be updated.
        max_running: None. Generations that run at once; further ones wait.
        max_queued: None. Generations that may wait before SGLang returns 503; vLLM queues without limit.
        record: True. Whether to keep requests and exchanges; False for benchmarks.
    """

    vocab_size: int
    max_model_len: int
    eos_ids: Sequence[int]
    model: str
    api_key: str | None
    decode: Decode
    encode: Encode | None
    skip_tokenizer_init: bool
    scale_out: bool
    adapters: Sequence[str]
    release: str
    model_runner: int
    ranks: int
    reasoning: tuple[int, int] | None
    raw_logprobs: bool | None
    truncated_logprobs: bool
    max_logprobs: int
    experts: tuple[int, int] | None
    sampling_masks: bool
    priorities: bool
    images: ImageSettings | None
    fault: FaultPolicy | None
    latency: Latency
    max_running: int | None
    max_queued: int | None
    record: bool


def installed_wires() -> list[str]:
    """Return the names of the installed wires."""
    return offered(_GROUP)


@cache
def find_wire(name: str) -> WireKit[Any]:
    """Return the wire of that name.

    Raises:
        ValueError: No installed package offers it.
        BrokenEntryPointError: The package that offers it cannot be imported.
    """
    kit: WireKit[Any] | None = load(_GROUP, name, WireKit)
    if kit is None:
        raise ValueError(f"Unknown wire {name!r}. Installed wires: {', '.join(installed_wires())}.")
    return kit


def scripted_engine(kind: str, script: Script, **options: Unpack[Options]) -> ScriptedEngine:
    """Return an engine that speaks the installed wire `kind` and answers from `script`.

    Args:
        kind: Name of an installed wire.
        script: Maps requests to completions.
        options: See `Options`.

    Raises:
        ValueError: No installed package offers a scripted server of that kind.
    """
    kit = find_wire(kind)
    if kit.wire is None:
        raise ValueError(f"The wire {kind!r} has a reader but no scripted server. Set `wire` in its WireKit.")
    settings: dict[str, Any] = {name: value for name, value in options.items() if name in EngineState.__slots__}
    state = EngineState(cache=PrefixCache(kit.cache_page), **settings)
    state.eos_ids = tuple(state.eos_ids)
    names, state.adapters = tuple(state.adapters), {}
    for name in names:
        state.load_adapter(name, name)
    return ScriptedEngine(
        kit.wire(state),
        script,
        fault=options.get("fault"),
        latency=options.get("latency", 0.0),
        max_running=options.get("max_running"),
        max_queued=options.get("max_queued"),
        record=options.get("record", True),
    )


def scripted_server(kind: str, script: Script, *, port: int = 0, **options: Unpack[Options]) -> ScriptedServer:
    """Return the same engine behind a loopback socket. Start it with `with` or `async with`."""
    return ScriptedServer(scripted_engine(kind, script, **options), port=port)
