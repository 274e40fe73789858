"""Random agents on one model, compared with a slow and simple oracle: parent, prompt, branch, laws."""

from __future__ import annotations

import asyncio
import copy
import json
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from support.scripted import BACKENDS, END, Says, ids_of, model_of
from tito_core.ledger import Ledger, check_ledger
from tito_core.ledger.turn import Reason
from tito_core.store import from_json, to_json
from tito_core.turn.branch import HistoryChangedError
from tito_core.turn.history import find_parent, opening_of

OF_ONE_AGENT = frozenset(Reason) - {Reason.SEPARATE, Reason.SIDE_CALL}
"""Reasons that a change of one agent's own history can have."""
QUESTIONS = ("A?", "B?", "C?")
SYSTEMS = ("Be brief.", "Be long.")
HELLO = ids_of("Hello"), ids_of(" the"), ids_of("re")
ANSWERS: tuple[tuple[str, list[int]], ...] = (
    ("One.", ids_of("One." + END)),
    ("Two.", ids_of("Two." + END)),
    ("Hello there", ids_of("Hello there" + END)),
    ("Hello there", [*HELLO[0], *HELLO[1], *HELLO[2], *ids_of(END)]),
    ("Hello there", ids_of("Hello there")),  # cut off
)
"""The policy's answers, as text and as ids; some texts have several encodings."""


def user(text: str) -> Any:
    return {"role": "user", "content": [{"text": text}]}


def answered(text: str) -> Any:
    return {"role": "assistant", "content": [{"text": text}]}


@dataclass
class Life:
    """An agent: its history, its system prompt, and its state."""

    messages: list[Any] = field(default_factory=list)
    system: str = SYSTEMS[0]
    state: dict[str, Any] = field(default_factory=dict)

    @property
    def history(self) -> list[str]:
        """Return the system prompt and the messages as JSON each, so that 1, 1.0 and true differ."""
        return [json.dumps(item, sort_keys=True) for item in (self.system, *self.messages)]


@dataclass
class Record:
    """A turn in the oracle's memory."""

    history: list[str]
    parent: int | None
    prompt: list[int]
    output: list[int]


class World:
    """Two agents and side calls on one model; every call is predicted and then compared."""

    def __init__(self, kind: str) -> None:
        self.script = Says("")
        self.model = model_of(kind, self.script)
        self.lives = [Life(), Life()]
        self.records: list[Record] = []

    async def call(self, life: Life, state: dict[str, Any] | None, answer: int) -> Any:
        """Play one turn and return the answer."""
        ledger = self.model.ledger
        own = None if not state else state["tito"]["turn"]
        parent = self.parent(life, own)
        prompt = self.prompt(life, parent)
        self.check_refusal(life, state, parent)
        text, ids = ANSWERS[answer]
        self.script.answers = [lambda request: ids]
        self.model.update_config(max_new_tokens=len(ids))
        shown = json.loads(json.dumps(life.messages)) if answer % 2 else copy.deepcopy(life.messages)
        async for _ in self.model.stream(shown, None, life.system, model_state=state):
            pass
        turn = ledger[-1]
        assert turn.parent == parent
        assert list(self.script.requests[-1].prompt_ids) == prompt
        assert turn.draft.output_ids.tolist() == ids
        self.check_branch(life, state is not None, own, parent, turn.draft.branch)
        message = answered(text)
        self.records.append(Record([*life.history, json.dumps(message, sort_keys=True)], parent, prompt, ids))
        return message

    def parent(self, life: Life, own: int | None) -> int | None:
        """Return the deepest turn that the history continues; among several the agent's own, else the latest."""
        history = life.history
        fits: list[tuple[int, int]] = []
        for index, record in enumerate(self.records):
            depth = len(record.history)
            rest = life.messages[depth - 1 :]
            if history[:depth] == record.history and all(message["role"] != "assistant" for message in rest):
                fits.append((depth, index))
        deepest = [index for depth, index in fits if depth == max(fits)[0]]
        if not deepest:
            return None
        return next((turn for turn in self.came_from(own) if turn in deepest), max(deepest))

    def came_from(self, turn: int | None) -> list[int]:
        """Return a turn and its ancestors, past roots to the turns that they left."""
        found: list[int] = []
        while turn is not None:
            found.append(turn)
            draft = self.model.ledger[turn].draft
            turn = draft.branch.turn if draft.parent is None and draft.branch is not None else draft.parent
        return found

    def prompt(self, life: Life, parent: int | None) -> list[int]:
        """Return the path's ids and the new messages after them in ChatML; for a root, all messages."""
        if parent is None:
            return ids_of(_chatml("system", life.system) + _talk(life.messages) + "<|im_start|>assistant\n")
        record = self.records[parent]
        closer = [] if record.output[-1] == ids_of(END)[0] else ids_of(END)
        new = _talk(life.messages[len(record.history) - 1 :])
        return [*record.prompt, *record.output, *closer, *ids_of("\n" + new + "<|im_start|>assistant\n")]

    def check_refusal(self, life: Life, state: Any, parent: int | None) -> None:
        """Check that `history="error"` raises exactly for the agent's own changes."""
        ledger, template = self.model.ledger, self.model.policy.template.fingerprint
        arguments = (ledger, opening_of(life.system, None, template), life.messages, state)
        match = find_parent(*arguments)
        assert match.parent == parent
        if match.branch is not None and match.branch.reason in OF_ONE_AGENT:
            with pytest.raises(HistoryChangedError, match="Law 8") as caught:
                find_parent(*arguments, may_branch=False)
            named = match.branch.reason == Reason.OPENING or f"message {match.branch.message} (" in str(caught.value)
            assert named or "was not sampled here" in str(caught.value)
        else:
            find_parent(*arguments, may_branch=False)

    def check_branch(self, life: Life, is_agents: bool, own: int | None, parent: int | None, branch: Any) -> None:
        """Check whether the turn is a branch, its reason, and the turn that it left."""
        if all(record.parent != parent for record in self.records):
            assert branch is None
            return
        assert branch is not None
        if own is None or own == parent:
            assert branch.reason == (Reason.SEPARATE if is_agents else Reason.SIDE_CALL)
            assert parent is None or (branch.turn, branch.message) == (parent, None)
            return
        assert branch.reason in OF_ONE_AGENT
        before, now = self.records[own].history, life.history
        at = next((i for i, (old, new) in enumerate(zip(before, now, strict=False)) if old != new), None)
        at = min(len(before), len(now)) if at is None else at
        assert (branch.reason == Reason.OPENING) == (at == 0)
        assert branch.message == (None if at == 0 else at - 1)
        if parent is not None or at == 0:
            assert branch.turn == (own if parent is None else parent)
        else:
            ends = [(len(r.history), i) for i, r in enumerate(self.records) if r.history == before[: len(r.history)]]
            common = [(depth, index) for depth, index in ends if depth <= at]
            last = [index for depth, index in common if depth == max(common)[0]]
            assert branch.turn == next((t for t in self.came_from(own) if t in last), max(last, default=own))
        if at > 0:
            repeated = any(r.history[:-1] == now and r.parent == parent for r in self.records)
            assert (branch.reason == Reason.RETRY) == repeated
        if at > 0 and parent is not None:
            assert branch.reason in (Reason.RETRY, Reason.REWIND)
        if branch.reason == Reason.REWIND and parent is None:  # else the agent may have gone to what another one knows
            assert all(message["role"] != "assistant" for message in life.messages[at - 1 :])
        if branch.reason == Reason.TRIM:
            assert now[at] in before[at + 1 :], "what comes is what came later"
        if branch.reason == Reason.SUMMARY:
            assert all(now[at:] != before[later : later + len(now) - at] for later in range(at + 1, len(before)))
            assert now[at + 1] in before[at + 2 :], "what follows it is what followed several"
        if branch.reason == Reason.EDIT:
            assert any(message["role"] == "assistant" for message in life.messages[at - 1 :])


def _chatml(role: str, text: str) -> str:
    return f"<|im_start|>{role}\n{text}{END}\n"


def _talk(messages: list[Any]) -> str:
    return "".join(_chatml(message["role"], message["content"][0]["text"]) for message in messages)


async def ask(world: World, life: Life, a: int, b: int) -> None:
    life.messages.append(user(QUESTIONS[a % 3]))
    life.messages.append(await world.call(life, life.state, b))


async def retry(world: World, life: Life, a: int, b: int) -> None:
    while life.messages and life.messages[-1]["role"] == "assistant":
        life.messages.pop()
    if life.messages:
        life.messages.append(await world.call(life, life.state, b))


async def go_on_unasked(world: World, life: Life, a: int, b: int) -> None:
    if life.messages:
        life.messages.append(await world.call(life, life.state, b))


async def lose_the_answer(world: World, life: Life, a: int, b: int) -> None:
    life.messages.append(user(QUESTIONS[a % 3]))
    await world.call(life, life.state, b)


async def roll_back(world: World, life: Life, a: int, b: int) -> None:
    life.messages.append(user(QUESTIONS[a % 3]))
    await world.call(life, copy.deepcopy(life.state), b)


async def side_call(world: World, life: Life, a: int, b: int) -> None:
    messages = [*life.messages[: b * 2], user(QUESTIONS[a % 3])]
    await world.call(Life(messages, SYSTEMS[a % 2]), None, b)


async def pop(world: World, life: Life, a: int, b: int) -> None:
    del life.messages[-1 - a :]


async def trim(world: World, life: Life, a: int, b: int) -> None:
    del life.messages[: a + 1]


async def leave_out(world: World, life: Life, a: int, b: int) -> None:
    del life.messages[a : a + b]


async def summarise(world: World, life: Life, a: int, b: int) -> None:
    if life.messages:
        life.messages[: a + 1] = [user("So far: " + QUESTIONS[b % 3])]


async def edit(world: World, life: Life, a: int, b: int) -> None:
    if life.messages:
        message = life.messages[a % len(life.messages)]
        message["content"] = [{"text": (*QUESTIONS, "One.", "Two.")[b]}]


async def speak_for_it(world: World, life: Life, a: int, b: int) -> None:
    life.messages += [user(QUESTIONS[a % 3]), answered(ANSWERS[b][0])]


async def change_the_system(world: World, life: Life, a: int, b: int) -> None:
    life.system = SYSTEMS[a % 2]


async def forget(world: World, life: Life, a: int, b: int) -> None:
    life.state.clear()


async def copy_the_other(world: World, life: Life, a: int, b: int) -> None:
    other = world.lives[life is world.lives[0]]
    life.messages, life.system = copy.deepcopy(other.messages), other.system
    if a % 2:
        life.state = copy.deepcopy(other.state)


ACTS = (ask, retry, go_on_unasked, lose_the_answer, roll_back, side_call, pop, trim, leave_out, summarise, edit)
RARER = (speak_for_it, change_the_system, forget, copy_the_other)
SPOKEN_FOR = [(ask, 0, 0, 0), (speak_for_it, 0, 1, 1), (ask, 0, 2, 0), (retry, 0, 0, 1)]
"""A user message after a known answer that was not sampled: no earlier turn may be extended."""
BACK = [(ask, 0, 0, 0), (ask, 0, 1, 0), (change_the_system, 0, 1, 0), (pop, 0, 3, 0), (ask, 0, 0, 0)]
BACK += [(change_the_system, 0, 0, 0), (ask, 0, 2, 0)]
"""A system prompt that is back: the branch leaves the last turn under it, not the agent's own last turn."""
CHANGED_LATE = [(pop, 1, 0, 0), (speak_for_it, 1, 1, 1), (ask, 1, 0, 0)]
"""A change after the last question, after which nothing can be extended: the branch leaves the last unchanged turn."""
OWN_OF_TWO = [(ask, 1, 0, 0), (ask, 0, 0, 0), (ask, 1, 0, 0)]
"""Two agents with one history: each has its own turn, and its own ancestors."""
PAST_A_ROOT = [(ask, 1, 0, 2), (speak_for_it, 1, 0, 0), (ask, 0, 0, 2), (ask, 1, 0, 0), (retry, 1, 0, 0)]
"""Where the agent's own turn is a root, it comes from the turn that the root left."""
LATER_KNOWN = [(speak_for_it, 1, 0, 0), (ask, 1, 0, 0), (ask, 0, 0, 0)]
"""An answer that nobody had sampled when the agent went on from it, and that another agent sampled later."""
TWICE = [(ask, 1, 0, 0), (retry, 1, 0, 0)]
"""One answer, sampled twice by one agent: the later one counts, also for a call that is nobody's."""
act = st.tuples(
    st.one_of(st.just(ask), st.sampled_from(ACTS), st.sampled_from(RARER)),
    st.integers(0, 1),
    st.integers(0, 4),
    st.integers(0, len(ANSWERS) - 1),
)


@settings(max_examples=60)
@example(kind="vllm", acts=SPOKEN_FOR)
@example(kind="sglang", acts=BACK)
@example(kind="vllm", acts=[*OWN_OF_TWO, (retry, 1, 0, 0)])
@example(kind="sglang", acts=[*OWN_OF_TWO, *CHANGED_LATE])
@example(kind="vllm", acts=PAST_A_ROOT)
@example(kind="sglang", acts=[*LATER_KNOWN, *CHANGED_LATE])
@example(kind="vllm", acts=[*LATER_KNOWN, (ask, 0, 1, 0), (retry, 1, 0, 1)])
@example(kind="sglang", acts=[*TWICE, (ask, 1, 0, 0), *CHANGED_LATE])
@example(kind="vllm", acts=[*TWICE, (forget, 1, 0, 0), (ask, 1, 0, 0)])
@given(kind=st.sampled_from(BACKENDS), acts=st.lists(act, max_size=25))
def test_every_history_has_the_parent_prompt_and_branch_of_a_slow_oracle(kind: str, acts: Any) -> None:
    async def live() -> World:
        world = World(kind)
        for do, agent, a, b in acts:
            await do(world, world.lives[agent], a, b)
        return world

    world = asyncio.run(live())
    ledger = world.model.ledger
    check_ledger(ledger)
    assert len(ledger) == len(world.records) == len(world.script.requests)
    sampled = sum(len(record.output) for record in world.records)
    assert sum(int(trajectory.loss_mask.sum()) for trajectory in world.model.trajectories) == sampled
    _check_that_digests_find_the_same(world, from_json(to_json(ledger)))
    _check_that_digests_find_the_same(world, ledger.seal())


def _check_that_digests_find_the_same(world: World, ledger: Ledger) -> None:
    """Check that a ledger without messages finds every turn and each agent's place again."""
    template = world.model.policy.template.fingerprint
    for life in world.lives:
        if life.messages:
            own = life.state["tito"]["turn"] if life.state else None
            opening = opening_of(life.system, None, template)
            place = find_parent(ledger, opening, copy.deepcopy(life.messages), life.state)
            assert place.parent == world.parent(life, own)
