"""Caches between turns: sampling parameters as recorded, and prompts as text, on whatever branch a turn is."""

from __future__ import annotations

import copy
import gc
import json
import sys
from types import FrameType
from typing import Any
from unittest import mock

import numpy as np
import pytest

from support.drafts import make_draft
from support.scripted import Says, model_of, with_parts
from tito_core.backend import EngineInfo, SamplingParams
from tito_core.backend.id_text import IdText
from tito_core.ledger import Branch, LawViolationError, Ledger, Reason
from tito_core.policy import KEPT_SAMPLINGS, KEPT_TEXTS, PathText, PromptCache, SamplingCache
from tito_core.turn.prompt import Prompt


async def ask(model: Any, messages: list[Any], text: str) -> None:
    messages.append({"role": "user", "content": [{"text": text}]})
    text = ""
    async for event in model.stream(copy.deepcopy(messages)):
        text += event.get("contentBlockDelta", {}).get("delta", {}).get("text", "")
    messages.append({"role": "assistant", "content": [{"text": text}]})


async def test_no_more_is_kept_than_the_latest_paths_of_live_ledgers() -> None:
    model = model_of("vllm", Says(*["Yes."] * (KEPT_TEXTS + 9)))
    prompts = PromptCache()
    model = with_parts(model, _prompts=prompts)  # other tests share a policy
    for number in range(KEPT_TEXTS + 8):
        await ask(model, [], f"Is {number} a number?")
    assert [len(kept) for kept in prompts._kept.values()] == [KEPT_TEXTS]
    model.reset()
    gc.collect()
    assert not prompts._kept


@pytest.mark.parametrize(("kind", "header"), [("vllm", "x-session-id"), ("sglang", "x-smg-routing-key")])
async def test_requests_carry_the_ledger_as_session_id(kind: str, header: str) -> None:
    script = Says("One.", "Two.", "Three.")
    model = model_of(kind, script)
    messages: list[Any] = []
    await ask(model, messages, "A?")
    await ask(model, messages, "B?")
    first = model.reset()
    await ask(model, [], "C?")
    session_ids = [request.headers[header] for request in script.requests]
    assert session_ids == [first.uuid, first.uuid, model.ledger.uuid]


def ids(*values: int) -> Any:
    return np.array(values, np.int32)


def test_parameters_get_the_policys_stop_ids_once() -> None:
    cache = SamplingCache()
    given = SamplingParams(stop_token_ids=(5, 2))
    stopped = cache.with_stop_tokens(given, (2, 9))
    assert stopped == given.model_copy(update={"stop_token_ids": (2, 5, 9)})
    assert cache.with_stop_tokens(given, (2, 9)) is stopped
    free = SamplingParams(ignore_eos=True)
    assert cache.with_stop_tokens(free, (2, 9)) is free


def test_recorded_parameters_depend_on_the_parameters_and_the_server() -> None:
    cache = SamplingCache()
    info = EngineInfo("fake", "m", 100, "1", processed_logprobs=False)
    sampling = SamplingParams(max_new_tokens=3, temperature=0.5, stop=("x",))
    recorded = cache.recorded(sampling, "fake", info)
    expected = sampling.model_dump(mode="json")
    del expected["max_new_tokens"]
    assert dict(recorded.sampling.parameters) == expected
    assert (recorded.server.backend, recorded.server.model) == ("fake", "m")
    assert recorded.server.semantics.processed is False
    assert cache.recorded(sampling, "fake", info) is recorded
    other = EngineInfo("fake", "n", 100, "1")
    assert cache.recorded(sampling, "fake", other).server.model == "n"
    assert cache.recorded(sampling.model_copy(), "fake", other).server.model == "n"


def test_the_number_of_cached_parameters_is_limited() -> None:
    cache = SamplingCache()
    held = [SamplingParams(seed=number) for number in range(KEPT_SAMPLINGS + 1)]
    for each in held[:-1]:
        cache.with_stop_tokens(each, (1,))
    assert len(cache._with_stop_tokens) == KEPT_SAMPLINGS
    cache.with_stop_tokens(held[-1], (1,))
    assert len(cache._with_stop_tokens) == 1


def keep(prompts: PromptCache, ledger: Ledger, turn: int, prompt: IdText, output: Any) -> None:
    path = Prompt(ids(), prompt).checked_path(prompts, ledger, ledger[turn].draft, output)
    prompts.keep(ledger, turn, ledger[turn].parent, path)


def text_of(text: IdText) -> list[int]:
    parsed_ids: list[int] = json.loads(text.body({"n": 1}, "ids"))["ids"]
    return parsed_ids


def test_the_next_turn_replaces_the_text_of_its_parent() -> None:
    prompts, ledger = PromptCache(), Ledger()
    ledger.commit(make_draft(None, 0, [100, 101], [200]))
    ledger.commit(make_draft(0, 3, [102], [201]))
    assert text_of(prompts.text(ledger, None, ids(9))) == [9]
    written = prompts.text(ledger, 0, ids(9))
    assert text_of(written) == [100, 101, 200, 9], "rendered again where it is not cached"
    keep(prompts, ledger, 0, IdText.of(ids(100, 101)), ids(200))
    kept = prompts._kept[ledger][0].text
    assert text_of(kept) == [100, 101, 200]
    with mock.patch.object(Ledger, "path_ids", side_effect=AssertionError("it is cached")):
        taken = prompts.text(ledger, 0, ids(102))
    keep(prompts, ledger, 1, taken, ids(201))
    assert text_of(prompts.text(ledger, 1, ids())) == [100, 101, 200, 102, 201]
    assert list(prompts._kept[ledger]) == [1], "the later turn's text replaces it"


@pytest.mark.parametrize("parent_is_kept", [False, True])
@pytest.mark.parametrize(
    ("prompt", "output"),
    [
        ((100, 101, 200, 103), (201,)),
        ((100, 101, 200, 102), (202,)),
        ((100, 101, 102), (201,)),
        ((1, 101, 200, 102), (201,)),
    ],
)
def test_a_turn_with_other_tokens_than_the_request_and_response_is_refused(
    prompt: tuple[int, ...], output: tuple[int, ...], parent_is_kept: bool
) -> None:
    prompts, ledger = PromptCache(), Ledger()
    ledger.commit(make_draft(None, 0, [100, 101], [200]))
    ledger.commit(make_draft(0, 3, [102], [201]))
    if parent_is_kept:
        keep(prompts, ledger, 0, IdText.of(ids(100, 101)), ids(200))
    with pytest.raises(LawViolationError, match=r"^Law 4: .*turn 2"):
        keep(prompts, ledger, 1, IdText.of(ids(*prompt)), ids(*output))
    assert 1 not in prompts._kept.get(ledger, {})


def test_another_thread_may_add_a_text_while_the_oldest_one_is_dropped() -> None:
    """An error here would follow the turn's commit. Python calls a profiler before each C function."""
    prompts, ledger = PromptCache(), Ledger()
    for number in range(KEPT_TEXTS + 2):
        ledger.commit(make_draft(None, 0, [100], [200], branch=Branch(Reason.SEPARATE) if number else None))
        keep(prompts, ledger, number, IdText.of(ids(100)), ids(200))
    others = iter(range(1000, 2000))

    def meanwhile(frame: FrameType, event: str, called: object) -> None:
        if event == "c_call" and frame.f_code is PromptCache.keep.__code__:
            prompts._kept[ledger][next(others)] = PathText(IdText())

    sys.setprofile(meanwhile)
    try:
        keep(prompts, ledger, 0, IdText.of(ids(100)), ids(200))
    finally:
        sys.setprofile(None)
    assert next(others) > 1000
    assert 2 not in prompts._kept[ledger], "the oldest"
