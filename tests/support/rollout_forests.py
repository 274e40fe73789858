"""Random finished rollouts for exporters: forests with branches, grammars, experts, versions, and every termination."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from hypothesis import strategies as st

from support.drafts import drafts, engine_record, make_draft
from tito_core.ledger import Column, Columns, Finish, Ledger, Provenance, Sampling, Semantics, Server
from tito_core.termination import Termination, record_termination

RAW = Semantics(False, 1.0, False, "test")
HOT = Semantics(True, 0.7, False, "test")
CUT = Semantics(True, 1.0, True, "test")


@st.composite
def rollouts(draw: st.DrawFn, most_turns: int = 6, experts: bool | None = None) -> Ledger:
    """Draw a ledger of one to `most_turns` turns, with branches, and perhaps a termination and rewards of all kinds."""
    ledger = Ledger(group_id=draw(st.sampled_from([None, "g"])), task_id=draw(st.sampled_from([None, "t"])))
    routed = draw(st.booleans()) if experts is None else experts
    for index in range(draw(st.integers(1, most_turns))):
        parent = draw(st.sampled_from([*range(index), index - 1, index - 1])) if index else None
        parent = None if index and draw(st.integers(0, 7)) == 0 else parent
        before = ledger.path_length(parent)
        draft = draw(drafts(parent, before))
        draft = replace(draft, engine=replace(draft.engine, request_id=f"request-{index}"))
        if routed:
            start = max(before - 1, 0)
            rows = before + draft.columns.prompt + draft.columns.output - 1 - start
            values = np.arange(start, start + rows)[:, None, None] % 250 + np.arange(4).reshape(1, 2, 2)
            draft = replace(draft, extras={"routed_experts": Column.of(start, values)})
        ledger.commit(draft)
    if draw(st.booleans()):
        record_termination(ledger, draw(st.sampled_from(list(Termination))))
    if draw(st.booleans()):
        ledger.annotate("reward", draw(st.sampled_from([0, 1, -0.5, 0.25])))
    for turn in draw(st.lists(st.sampled_from(list(ledger)), max_size=3)):
        calls = [None, *range(len(turn.draft.calls))]
        credit = draw(st.sampled_from([1, -0.5, 0.125, None]))
        ledger.annotate("reward", credit, turn=turn.index, call=draw(st.sampled_from(calls)))
    return ledger


def chain(*turns: tuple[int, int], semantics: Semantics = RAW, finish: Finish = Finish.STOP) -> Ledger:
    """Return a ledger of one path with turns of (prompt, output) tokens: prompt ids from 100, output ids from 200."""
    ledger = Ledger()
    for prompt, output in turns:
        before = ledger.path_length(len(ledger) - 1 if len(ledger) else None)
        grow(ledger, len(ledger) - 1 if len(ledger) else None, prompt, output, semantics=semantics, finish=finish)
        assert ledger.path_length(len(ledger) - 1) == before + prompt + output
    return ledger


def grow(
    ledger: Ledger,
    parent: int | None,
    prompt: int,
    output: int,
    *,
    semantics: Semantics = RAW,
    finish: Finish = Finish.STOP,
    constrained: bool = False,
) -> int:
    """Commit a turn after `parent`, and return its index."""
    before, number = ledger.path_length(parent), len(ledger)
    record = engine_record(output)
    record = replace(record, server=Server("scripted", "m", semantics))
    ids = [200 + (number * 16 + place) % 1000 for place in range(output)]
    columns = Columns.pack(
        np.arange(100, 100 + prompt, dtype=np.int32),
        np.full(prompt, Provenance.PROMPT, np.uint8),
        np.array(ids, np.int32),
        -np.arange(1, output + 1, dtype=np.float32) / 8,
    )
    sampling = Sampling({"temperature": semantics.temperature or 1.0})
    draft = make_draft(parent, before, [1] * prompt, [1] * output, sampling=sampling)
    return ledger.commit(
        replace(draft, columns=columns, engine=record, finish=finish, constrained=constrained, stop=None)
    ).index


def group_of_one_prompt(name: str = "g") -> list[Ledger]:
    """Return six rollouts of one prompt: two plain ones, one with a branch, one bad, one unrewarded, one empty.

    Their rewards are 1, 0 and 0.5; the bad one, which the engine ended, has 0, and the last two have none.
    """
    found = []
    for sample, reward in enumerate((1.0, 0.0, 0.5, 0.0, None, None)):
        ledger = Ledger(group_id=name, task_id=f"task of {name}", user={"sample": sample})
        if sample < 5:
            grow(ledger, grow(ledger, None, 3, 2), 1, 2)
        if sample == 2:
            grow(ledger, 0, 2, 1)
        if reward is not None:
            ledger.annotate("reward", reward)
        ended = Termination.COMPLETED if sample not in (3, 5) else Termination.ENGINE_ERROR
        record_termination(ledger, ended)
        found.append(ledger)
    return found


REWARDS = (1.0, 0.0, 0.5)
"""The rewards that count in `group_of_one_prompt`."""
