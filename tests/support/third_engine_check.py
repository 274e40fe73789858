"""Check the README's claims about examples/third_engine, which needs torch. The argument is the model's folder."""

from __future__ import annotations

import asyncio
import sys

import numpy as np
import pytest

from tito_core.backend import InvalidValueError, SamplingParams, TokenRequest, create_backend
from tito_core.backend.generate import generate, score, tokenize


async def check(folder: str) -> None:
    with pytest.raises(InvalidValueError, match="device"):
        create_backend("transformers", folder, devices="cpu")
    backend = create_backend("transformers", folder, device="cpu")
    ids = await tokenize(backend, "The quick brown fox")
    assert ids is not None

    def request(name: str, **sampling: object) -> TokenRequest:
        return TokenRequest(ids, SamplingParams(**sampling), name)

    one, same, other = [
        await generate(backend, request(f"seed {n}", max_new_tokens=6, seed=seed)) for n, seed in enumerate((1, 1, 2))
    ]
    assert one.output_ids.tolist() == same.output_ids.tolist() != other.output_ids.tolist()
    scores = await score(backend, np.concatenate([ids, one.output_ids]))
    assert np.abs(scores[len(ids) :] - one.logprobs).max() < 1e-3, "logprobs are raw"
    long = asyncio.create_task(generate(backend, request("long", max_new_tokens=4000, ignore_eos=True)))
    while not backend._aborts:  # type: ignore[attr-defined]
        await asyncio.sleep(0.05)
    await asyncio.sleep(1.0)
    await backend.abort("long")
    part = await long
    assert (str(part.finish), 1 <= len(part.output_ids) < 4000) == ("abort", True), part
    lost = asyncio.create_task(generate(backend, request("lost", max_new_tokens=4000, ignore_eos=True)))
    await asyncio.sleep(1.0)
    lost.cancel()
    after = await asyncio.wait_for(generate(backend, request("after", max_new_tokens=2)), 120)
    assert len(after.output_ids) <= 2, "the thread was free again"


if __name__ == "__main__":
    asyncio.run(check(sys.argv[1]))
    print("sound")
