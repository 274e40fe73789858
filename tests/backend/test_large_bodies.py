"""A large request does not block the event loop."""

from __future__ import annotations

import warnings

from support.backends import Waits, backend_of, engine_of
from tito_conformance.testing import ScriptedServer
from tito_core.backend.generate import score

LENGTH = 270_000  # of four bytes each: more than a mebibyte


async def test_scoring_a_long_sequence_does_not_block_the_loop() -> None:
    """aiohttp warns of a body of more than a mebibyte in one piece."""
    engine = engine_of("sglang", max_model_len=10**6)
    async with ScriptedServer(engine) as server:
        backend = type(backend_of(engine))(server.base_url, sleep=Waits())
        with warnings.catch_warnings():
            warnings.simplefilter("error", ResourceWarning)
            scored = await score(backend, [100 + n % 900 for n in range(LENGTH)])
        await backend.aclose()
    assert len(scored) == LENGTH
