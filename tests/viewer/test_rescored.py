"""Re-scoring for a page: each turn gets its own differences, also where branches share a path."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from strands_tito.inspect.verify import rescore
from strands_tito.viewer.data import Evidence, Pictures, TokenTexts
from strands_tito.viewer.rollouts import Rollouts
from strands_tito.viewer.site import Site
from support.scripted import model_of, tokenizer
from support.shown import data_of, written
from tito_conformance.testing import HashPolicy, ScriptedServer
from tito_core import TITOModel
from tito_core.ledger import Ledger, Semantics
from tito_core.store import read


async def differences(ledger: Ledger, backend: Any) -> Mapping[int, Any]:
    return Evidence(rescored=await rescore(ledger, backend)).differences


async def branched(kind: str, **sampling: object) -> TITOModel:
    policy = HashPolicy(len(tokenizer()), alphabet=range(40, 90), eos_ids=[int(tokenizer().eos_token_id)])
    model = model_of(kind, policy, sampling={"max_new_tokens": 9, "ignore_eos": True, **sampling})
    first = {"role": "user", "content": [{"text": "Question?"}]}
    text = ""
    async for event in model.stream([first]):
        text += event.get("contentBlockDelta", {}).get("delta", {}).get("text", "")
    for question in ("And then?", "And else?"):
        more = [
            first,
            {"role": "assistant", "content": [{"text": text}]},
            {"role": "user", "content": [{"text": question}]},
        ]
        async for _ in model.stream(more):
            pass
    return model


async def test_every_turn_has_its_differences(tmp_path: Path) -> None:
    model = await branched("vllm")
    assert [turn.parent for turn in model.ledger] == [None, 0, 0]
    for ledger in (model.ledger, read(written(tmp_path, model.ledger))[0]):
        found = await differences(ledger, model.policy.backend)
        assert {turn: len(values) for turn, values in found.items()} == {0: 9, 1: 9, 2: 9}
        assert all(np.all(values < 1e-5) for values in found.values())


async def test_a_recorded_logprob_that_is_wrong_stands_out() -> None:
    model = await branched("vllm")
    draft = model.ledger[2].draft
    wrong = draft.logprobs.copy()
    wrong[4] -= 0.5
    columns = type(draft.columns).pack(draft.prompt_ids, draft.prompt_provenance, draft.output_ids, wrong)
    object.__setattr__(draft, "columns", columns)
    found = await differences(model.ledger, model.policy.backend)
    assert found[2].argmax() == 4
    assert abs(found[2][4] - 0.5) < 1e-4


async def test_logprobs_with_other_semantics_are_not_compared() -> None:
    model = await branched("sglang")
    model.ledger[0].draft.engine.server.semantics = Semantics(True, 0.5, False, "test")
    assert await differences(model.ledger, model.policy.backend) == {}


async def test_a_page_shows_the_differences(tmp_path: Path) -> None:
    model = await branched("vllm")
    path = written(tmp_path, model.ledger)
    with ScriptedServer(model.scripted) as server:  # type: ignore[attr-defined]
        page = page_in_thread(Site(Rollouts([path]), TokenTexts(), Pictures(), ("vllm", server.base_url)))
    data = data_of(page)
    assert all(turn["differences"] for turn in data["turns"])
    (mismatch,) = data["mismatches"]
    assert (mismatch["name"], mismatch["leftOut"]) == ("the server", 0)
    assert mismatch["rows"][0][:3] == ["all", "", 27]
    assert mismatch["rows"][0][3] < 1e-9


def page_in_thread(site: Site) -> bytes:
    """Make a page as the server does, in a thread without an event loop."""
    with ThreadPoolExecutor(1) as threads:
        return threads.submit(site.rollout, 1).result()
