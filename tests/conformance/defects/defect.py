"""A planted defect: one error in a server or in the client, and a scripted engine that has it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from conformance.defects.scripted_policy import ConformancePolicy
from conformance.defects.views import EXPERTS, VIEWS, View
from tito_conformance.fixed import ABORTED_TOKENS, ADAPTED_TOKENS
from tito_conformance.log import TransportFactory
from tito_conformance.testing import (
    Fault,
    ImageSettings,
    InProcessTransport,
    Script,
    ScriptedEngine,
    ScriptedRequest,
    scripted_engine,
)
from tito_conformance.weights import RELOADED_TOKENS

Edit = Callable[[View, ScriptedRequest], None]
Wrap = Callable[[Script], Script]
MIN_EVENTS = 5
"""Streams of fewer events are not changed."""
SERVERS = ("vllm", "vllm-completions", "sglang")
"""The wires of the scripted engines; vLLM has two."""


@dataclass(frozen=True)
class Defect:
    """One error.

    Attributes:
        name: Short and unique.
        law: Number of the law that it breaks.
        what: The error, as a sentence.
        edit: Changes a response, or None.
        wrap: Changes the policy, or None.
        events: Changes the events of a streamed response, or None.
        client: Makes a context that patches the client or the scripted engine.
        spoil: Changes the scripted engine after it is made, or None.
        options: Settings of the scripted engine, see `tito_conformance.testing.Options`.
        wires: Wires that it can be planted on.
        weights: Folders of weights that it takes to see it: none, one that is loaded repeatedly, or two.
        needs_second_server: Whether it is visible only in a comparison with a sound server.
        images: Whether the engine reads images.
        adapters: LoRA adapters that the engine has loaded.
    """

    name: str
    law: int
    what: str
    edit: Edit | None = None
    wrap: Wrap | None = None
    events: Callable[[list[Any]], None] | None = None
    client: Callable[[], AbstractContextManager[Any]] = nullcontext
    spoil: Callable[[ScriptedEngine], None] | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    wires: tuple[str, ...] = SERVERS
    weights: int = 0
    needs_second_server: bool = False
    images: bool = False
    adapters: tuple[str, ...] = ()

    def fault(self, wire: str) -> Callable[[int, ScriptedRequest], Fault | None] | None:
        """Return the fault that plants the defect in responses of a wire."""
        if self.edit is None and self.events is None:
            return None

        def of_request(number: int, request: ScriptedRequest) -> Fault | None:
            if request.scoring or request.max_new_tokens == 0 or request.measures:
                return None

            def change(answer: Any) -> None:
                if isinstance(answer, list):
                    if self.events is not None and len(answer) > MIN_EVENTS:
                        self.events(answer)
                elif self.edit is not None:
                    self.edit(VIEWS[wire](answer), request)

            return Fault(edit=change)

        return of_request


_LATENCY_S = 0.5


def latency(request: ScriptedRequest) -> float:
    """Return a latency for answers that are aborted, that run side by side or while weights change, 0 for others."""
    return _LATENCY_S if request.max_new_tokens in (RELOADED_TOKENS, ABORTED_TOKENS, ADAPTED_TOKENS) else 0.0


@lru_cache(100_000)
def _decode(tokenizer: Any, ids: tuple[int, ...]) -> str:
    return str(tokenizer.decode(list(ids)))


def plant(
    defect: Defect, wire: str, tokenizer: Any, end: int, *, greedily: bool = False, varied: bool = False
) -> TransportFactory:
    """Return the transport of a scripted engine that has the defect.

    Args:
        defect: The defect; `SOUND` for none.
        wire: One of `SERVERS`.
        tokenizer: The model's tokenizer.
        end: Id that ends a turn.
        greedily: Whether the policy gives its fixed answers at temperature 0 too; see `ConformancePolicy`.
        varied: Whether its answers depend on the whole prompt, and differ without a seed.
    """
    policy: Any = ConformancePolicy(tokenizer, end, greedily=greedily, varied=varied)
    options: Any = {
        "vocab_size": len(tokenizer),
        "eos_ids": [end],
        "decode": lambda ids: _decode(tokenizer, tuple(ids)),
        "encode": lambda text, special: list(tokenizer.encode(text, add_special_tokens=special)),
        "scale_out": wire == "vllm",
        "fault": defect.fault(wire),
        "experts": EXPERTS,
        "latency": latency,
        "images": ImageSettings(tokenizer.convert_tokens_to_ids(PLACEHOLDER)) if defect.images else None,
        "adapters": defect.adapters,
        **defect.options,
    }
    script = policy if defect.wrap is None else defect.wrap(policy)
    engine = scripted_engine("sglang" if wire == "sglang" else "vllm", script, **options)
    if defect.spoil is not None:
        defect.spoil(engine)
    return lambda: InProcessTransport(engine)


SOUND = Defect("none", 0, "No error.")
"""No defect: the suite must pass."""
SOUND_WITH_IMAGES = Defect("none", 0, "No error.", images=True)
VISION_MODEL = "qwen3-vl-tiny"
"""The tokenizer of engines that read images."""
PLACEHOLDER = "<|image_pad|>"
