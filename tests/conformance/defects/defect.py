"""A planted defect: a server, or the client itself, that is wrong in one way; and the scripted engine that has it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

from conformance.defects.answer_views import View, view_of
from conformance.defects.column_views import EXPERTS
from conformance.defects.scripted_policy import ConformancePolicy
from strands_tito.conformance.aborting import TOKENS as ABORTED
from strands_tito.conformance.reloading import TOKENS as RELOADED
from strands_tito.conformance.wire_log import TransportFactory
from strands_tito.testing import Fault, InProcessTransport, Script, ScriptedEngine, ScriptedRequest, scripted_engine

Edit = Callable[[View, ScriptedRequest], None]
Wrap = Callable[[Script], Script]
LEAST_EVENTS = 5
"""Streams of fewer events are left alone."""
SERVERS = ("vllm", "vllm-completions", "sglang")
"""The wires of the scripted engines; vLLM has two."""


@dataclass(frozen=True)
class Defect:
    """One thing that is wrong.

    Attributes:
        name: Short and unique.
        law: The law that it breaks.
        what: What is wrong, as a sentence.
        edit: Changes an answer, or None.
        wrap: Changes what the policy says, or None.
        events: Changes the events of a streamed answer, or None.
        client: Changes the client, or the scripted engine, while it lasts.
        spoil: Changes the scripted engine once it is made, or None.
        weights: Whether it shows only where weights change.
        beside: Whether it shows only beside another server of the same weights, which has no defect.
        wires: Those on which it can be planted.
    """

    name: str
    law: int
    what: str
    edit: Edit | None = None
    wrap: Wrap | None = None
    events: Callable[[list[Any]], None] | None = None
    client: Callable[[], AbstractContextManager[Any]] = nullcontext
    spoil: Callable[[ScriptedEngine], None] | None = None
    wires: tuple[str, ...] = SERVERS
    weights: bool = False
    beside: bool = False

    def fault(self, wire: str) -> Callable[[int, ScriptedRequest], Fault | None] | None:
        """Give the fault that plants it in answers of a wire."""
        if self.edit is None and self.events is None:
            return None

        def of_request(number: int, request: ScriptedRequest) -> Fault | None:
            measured = request.ignore_eos and request.temperature == 2.0  # at connect
            if request.scoring or request.max_new_tokens == 0 or measured:
                return None

            def change(answer: Any) -> None:
                if isinstance(answer, list):
                    if self.events is not None and len(answer) > LEAST_EVENTS:
                        self.events(answer)
                elif self.edit is not None:
                    self.edit(view_of(wire, answer), request)

            return Fault(edit=change)

        return of_request


_WATCHED_S = 0.5


def latency(request: ScriptedRequest) -> float:
    """Take time for those answers under which weights change or that are aborted, and for no other."""
    return _WATCHED_S if request.max_new_tokens in (RELOADED, ABORTED) else 0.0


def planted(defect: Defect, wire: str, tokenizer: Any, end: int, *, greedily: bool = False) -> TransportFactory:
    """Give a scripted engine with the defect in its answers or its policy, as a transport.

    Args:
        defect: What is wrong; `SOUND` for nothing.
        wire: One of `SERVERS`.
        tokenizer: The model's.
        end: Id that ends a turn.
        greedily: Whether the policy has something to say at temperature 0, too; see `ConformancePolicy`.
    """
    policy: Any = ConformancePolicy(tokenizer, end, greedily=greedily)
    engine = scripted_engine(
        "sglang" if wire == "sglang" else "vllm",
        policy if defect.wrap is None else defect.wrap(policy),
        vocab_size=len(tokenizer),
        eos_ids=[end],
        decode=lambda ids: str(tokenizer.decode(list(ids))),
        encode=lambda text, special: list(tokenizer.encode(text, add_special_tokens=special)),
        scale_out=wire == "vllm",
        fault=defect.fault(wire),
        experts=EXPERTS,
        latency=latency,
    )
    if defect.spoil is not None:
        defect.spoil(engine)
    return lambda: InProcessTransport(engine)


SOUND = Defect("none", 0, "Nothing is wrong.")
"""A server without a defect, which the suite must pass."""
