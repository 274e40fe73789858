"""What is kept from turn to turn: parameters as they are recorded, and prompts as text."""

from __future__ import annotations

import json
from typing import Any

import numpy as np

from support.drafts import make_draft
from tito_core.backend import EngineInfo, SamplingParams
from tito_core.backend.id_text import IdText
from tito_core.ledger import Branch, Ledger, Reason
from tito_core.prompts import KEPT, Prompts
from tito_core.terms import KEPT as TERMS_KEPT
from tito_core.terms import Terms


def ids(*values: int) -> Any:
    return np.array(values, np.int32)


def test_parameters_get_the_policys_stops_once() -> None:
    terms = Terms()
    given = SamplingParams(stop_token_ids=(5, 2))
    stopped = terms.stopped(given, (2, 9))
    assert stopped == given.model_copy(update={"stop_token_ids": (2, 5, 9)})
    assert terms.stopped(given, (2, 9)) is stopped
    free = SamplingParams(ignore_eos=True)
    assert terms.stopped(free, (2, 9)) is free


def test_what_is_recorded_of_parameters_is_of_them_and_of_their_server() -> None:
    terms = Terms()
    info = EngineInfo("fake", "m", 100, "1", processed_logprobs=False)
    sampling = SamplingParams(max_new_tokens=3, temperature=0.5, stop=("x",))
    recorded = terms.recorded(sampling, "fake", info)
    expected = sampling.model_dump(mode="json")
    del expected["max_new_tokens"]
    assert dict(recorded.sampling.parameters) == expected
    assert (recorded.server.backend, recorded.server.model) == ("fake", "m")
    assert recorded.server.semantics.processed is False
    assert terms.recorded(sampling, "fake", info) is recorded
    other = EngineInfo("fake", "n", 100, "1")
    assert terms.recorded(sampling, "fake", other).server.model == "n"
    assert terms.recorded(sampling.model_copy(), "fake", other).server.model == "n"


def test_no_more_parameters_are_remembered_than_so_many() -> None:
    terms = Terms()
    held = [SamplingParams(seed=number) for number in range(TERMS_KEPT + 1)]
    for given in held[:-1]:
        terms.stopped(given, (1,))
    assert len(terms._stopped) == TERMS_KEPT
    terms.stopped(held[-1], (1,))
    assert len(terms._stopped) == 1


def text_of(text: IdText) -> list[int]:
    found: list[int] = json.loads(text.body({"n": 1}, "ids"))["ids"]
    return found


def test_the_text_of_a_path_is_taken_over_by_the_turn_that_goes_on() -> None:
    prompts, ledger = Prompts(), Ledger()
    ledger.commit(make_draft(None, 0, [100, 101], [200]))
    ledger.commit(make_draft(0, 3, [102], [201]))
    assert text_of(prompts.text(ledger, None, ids(9))) == [9]
    assert text_of(prompts.text(ledger, 0, ids(9))) == [100, 101, 200, 9], "written anew where it was not kept"
    prompts.keep(ledger, 0, IdText.of(ids(1, 2)), ids(3))
    assert text_of(prompts.text(ledger, 0, ids(9))) == [1, 2, 3, 9]
    prompts.keep(ledger, 1, IdText.of(ids(1, 2, 3, 4)), ids(5))
    assert text_of(prompts.text(ledger, 1, ids())) == [1, 2, 3, 4, 5]
    assert list(prompts._kept[ledger]) == [1], "no turn goes on from the first any more, most likely"


def test_of_many_paths_the_latest_are_kept() -> None:
    prompts, ledger = Prompts(), Ledger()
    for number in range(KEPT + 2):
        branch = None if number == 0 else Branch(Reason.SEPARATE)
        ledger.commit(make_draft(None, 0, [100], [200], branch=branch))
        prompts.keep(ledger, number, IdText.of(ids(number)), ids(1))
        assert len(prompts._kept[ledger]) == min(number + 1, KEPT)
    assert list(prompts._kept[ledger]) == list(range(2, KEPT + 2))
