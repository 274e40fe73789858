"""Checks of LoRA adapters that the server has loaded: their answers are their own, also among others."""

from __future__ import annotations

import numpy as np

from tito_conformance.checks import Tally, set_place, together
from tito_conformance.target import ConnectedServer
from tito_core.backend.generate import score
from tito_core.backend.semantics import semantics_of
from tito_core.ledger import Adapter

ADAPTED_TOKENS = 24
"""Tokens of each answer."""


async def check(server: ConnectedServer, tally: Tally) -> None:
    """Sample one prompt with the model alone and with each adapter at once, and score each answer by all of them."""
    adapters: list[Adapter | None] = [None, *map(Adapter, server.target.adapters)]
    prompt = server.prompt_of("Say something that only you would say.")
    parameters = {"max_new_tokens": ADAPTED_TOKENS, "temperature": 1.0, "ignore_eos": True}
    sampling, tolerance = server.sampling(**parameters), server.tolerance_nats
    set_place(sampling=parameters)
    if not semantics_of(server.policy.info, sampling).comparable_with_scoring():
        tally.skip("adapted", "The server's logprobs cannot be compared with its scores.")
        return
    answers = await together(server.answer(prompt, sampling, adapter=adapter) for adapter in adapters)
    for adapter, answer in zip(adapters, answers, strict=True):
        ids, name = np.concatenate([prompt, answer.output_ids]), adapter or "the model alone"
        for other in adapters:
            scores = (await score(server.policy.backend, ids, adapter=other))[len(prompt) :]
            apart = float(np.max(np.abs(scores - answer.logprobs)))
            problem = (
                f"an answer of {name} differs by {apart:.4g} nats from its scores by {other or 'the model alone'}, "
            )
            if adapter == other:
                tally.require("adapted", apart <= tolerance, f"{problem}more than {tolerance:g}.", len(scores))
            else:
                problem += f"not by more than {tolerance:g}: both have the same effect."
                tally.require("adapted", apart > tolerance, problem)
