"""A large request never holds up the event loop, whoever wrote its body."""

from __future__ import annotations

import warnings

import numpy as np
import pytest

from strands_tito.testing import ScriptedServer
from support.backends import WIRES, Kind, Waits, backend_of, engine_of
from tito_core.backend.checked import score

LONG = np.full(400_000, 12345, np.int32)


@pytest.mark.parametrize("kind", WIRES)
async def test_a_long_sequence_is_scored_without_holding_up_the_loop(kind: Kind) -> None:
    """aiohttp warns of a body of more than a mebibyte in one piece."""
    engine = engine_of(kind, max_model_len=10**6)
    async with ScriptedServer(engine) as server:
        backend = type(backend_of(engine))(server.base_url, sleep=Waits())
        with warnings.catch_warnings():
            warnings.simplefilter("error", ResourceWarning)
            scored = await score(backend, [3 + n % 900 for n in range(400_000)])
        await backend.aclose()
    assert len(scored) == 400_000
