"""One conversation on one server: plays moves through a model, and checks every step."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncGenerator, Iterable
from dataclasses import dataclass, field
from typing import Any, cast

from strands.types.exceptions import ContextWindowOverflowException

from strands_tito.conformance import deltas, grammars, reloading
from strands_tito.conformance.agents import SYSTEM_PROMPTS, TOOLS, Answer, SimulatedAgent, collect_answer
from strands_tito.conformance.laws import Tally
from strands_tito.conformance.oracle import ParentOracle
from strands_tito.conformance.rendering import Renderer
from strands_tito.conformance.target import ConnectedServer, LogPosition
from strands_tito.testing import moves as m
from tito_core.backend import OptionalOutputs
from tito_core.ledger import Ledger
from tito_core.model import TITOModel

MAX_TOKENS = 24
"""Limit of an ordinary answer: enough to end in several ways, few enough for a small machine."""
MASKED_TOP_K = 20
"""`top_k` where a sampling mask is requested and the move sets none."""


@dataclass
class Player:
    """Plays moves on a model of its own.

    Attributes:
        server: The server.
        tally: Counts the checks.
        opening: Moves that configure the whole conversation.
        ledger: The ledger to begin with; a new one when None.
        context_limit: Tokens of context to use; the server's own limit when None.
        fixed_sampling: Sampling parameters of every turn, which override those of moves.
        model: The model, whose ledger is checked.
        agents: The agents.
        log_start: Where the conversation begins in the server's logs.
        abandoned: Number of answers that may be in no turn, because a move cancelled them.
        sampling: Sampling parameters that the last `Sampling` move set.
    """

    server: ConnectedServer
    tally: Tally
    opening: Iterable[m.Move] = ()
    ledger: Ledger | None = None
    context_limit: int | None = None
    fixed_sampling: dict[str, Any] = field(default_factory=dict)
    model: TITOModel = field(init=False)
    optional_outputs: OptionalOutputs = field(init=False)
    agents: list[SimulatedAgent] = field(default_factory=lambda: [SimulatedAgent(), SimulatedAgent()])
    parents: ParentOracle = field(default_factory=ParentOracle)
    renderer: Renderer = field(init=False)
    log_start: LogPosition = field(init=False)
    abandoned: int = 0
    sampling: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        policy, moves = self.server.policy, list(self.opening)
        self.log_start = self.server.log_position()
        self.optional_outputs = next(
            (_optional_outputs(move, self.server) for move in moves if isinstance(move, m.Want)), OptionalOutputs()
        )
        self.model = policy.model(
            ledger=self.ledger,
            sampling=self._effective_sampling({}),
            context_window_limit=self.context_limit,
            stream=any(isinstance(move, m.Stream) for move in moves),
            optional_outputs=self.optional_outputs,
        )
        self.renderer = Renderer(policy.tokenizer, policy.template.arguments)

    async def play(self, move: m.Move) -> None:
        """Play one move."""
        agent = self.agents[move.agent % len(self.agents)]
        match move:
            case m.Opening():
                return  # read in __post_init__
            case m.Ask():
                agent.add_input(move.text, move)
                await self.sample(agent)
            case m.Cut():
                agent.add_input(move.text)
                await self.sample(agent, max_new_tokens=move.tokens)
            case m.StopAt():
                agent.add_input(move.text)
                await self.sample(agent, stop=(move.stop,))
            case m.Force():
                await grammars.play_forced_call(self, agent, move)
            case m.Shape():
                await grammars.play_structured_output(self, agent, move)
            case m.Cancel():
                await play_cancel(self, agent, move)
            case m.Reload():
                await reloading.play_reload(self, agent, move)
            case m.Together():
                await self._play_concurrent_agents(move)
            case m.Sampling():
                self.sampling = {name: getattr(move, name) for name in move.__struct_fields__ if name != "agent"}
            case _:
                await self._play_history_change(agent, move)

    async def _play_history_change(self, agent: SimulatedAgent, move: m.Move) -> None:
        """Change a history as its owner may, then sample an answer."""
        match move:
            case m.Edit() if agent.messages:
                agent.edit(move.at, move.text)
            case m.Trim():
                agent.drop_first(move.count)
            case m.Rewind():
                agent.drop_last(move.count)
                agent.add_input(move.text)
            case m.Again():
                if agent.messages and agent.messages[-1]["role"] == "assistant":
                    agent.messages.pop()
            case m.Seed() if not agent.pending_calls():
                agent.add_input("Say something.")
                agent.messages.append({"role": "assistant", "content": [{"text": move.text}]})
            case m.System():
                agent.system = SYSTEM_PROMPTS[move.system % len(SYSTEM_PROMPTS)]
        if not agent.messages or agent.messages[-1]["role"] == "assistant":
            agent.add_input("Go on.")
        await self.sample(agent)

    def stream(self, agent: SimulatedAgent, **arguments: Any) -> AsyncGenerator[Any]:
        """Stream the model's answer to an agent's history."""
        stream = self.model.stream(
            cast(Any, agent.copied_messages()), TOOLS, agent.system, model_state=agent.model_state, **arguments
        )
        return cast(AsyncGenerator[Any], stream)

    def set_sampling(self, **changes: Any) -> None:
        """Set the sampling parameters of the next turns."""
        self.model.update_config(sampling=self._effective_sampling(changes))

    def _effective_sampling(self, changes: dict[str, Any]) -> dict[str, Any]:
        sampling = {"max_new_tokens": MAX_TOKENS, **self.sampling, **changes, **self.fixed_sampling}
        if self.optional_outputs.sampling_mask and sampling.get("top_k", -1) < 1:
            sampling["top_k"] = MASKED_TOP_K
        return sampling

    async def sample(self, agent: SimulatedAgent, **changes: Any) -> Answer | None:
        """Set sampling parameters, then run a turn; see `run_turn`."""
        self.set_sampling(**changes)
        return await self.run_turn(agent)

    async def run_turn(self, agent: SimulatedAgent, **arguments: Any) -> Answer | None:
        """Run a turn and check it. If the history is too long for the model, clear it and return None."""
        expected = self.parents.candidates(agent.fingerprint(), agent.messages)
        before, live_version = len(self.model.ledger), self.server.live_version
        try:
            answer = await collect_answer(self.stream(agent, **arguments))
        except ContextWindowOverflowException:
            agent.messages.clear()
            return None
        count = len(self.model.ledger) - before
        self.tally.require("lost", count == 1, f"an answer made {count} turns.")
        turn = self.model.ledger[-1]
        # No template continues an answer whose stop token was sampled inside reasoning: a new root is expected then.
        allowed = {None if deltas.ended_in_reasoning(self.model.ledger[i].draft) else i for i in expected} or {None}
        self.tally.require(
            "parent",
            turn.parent in allowed,
            f"the parent of turn {turn.index} is {turn.parent}, expected one of {allowed}; its history starts with "
            f"that of {expected or 'no turn'}.",
        )
        deltas.check_rendering(self, agent, turn)
        self.keep_answer(agent, answer, turn.index)
        self.tally.require(
            "constrained",
            turn.draft.constrained == bool(arguments),
            f"turn {turn.index} is {'' if turn.draft.constrained else 'not '}marked as constrained.",
        )
        if live_version is not None and live_version == self.server.live_version:
            reloading.check_live_version(turn.draft.engine.versions, live_version, self.tally)
        return answer

    def keep_answer(self, agent: SimulatedAgent, answer: Answer, index: int) -> None:
        """Append an answer to its agent's history."""
        agent.messages.append(answer.message)
        self.parents.add(index, agent.fingerprint())
        self.tally.turns += 1
        if not answer.message["content"]:  # Strands stores a blank text in its place
            agent.messages.pop()

    async def _play_concurrent_agents(self, move: m.Together) -> None:
        """Run one turn of several new agents at once. Each must get its own answer."""
        self.set_sampling()
        agents = [SimulatedAgent(system=SYSTEM_PROMPTS[0]) for _ in move.texts]
        for agent, text in zip(agents, move.texts, strict=True):
            agent.add_input(text)
        before = len(self.model.ledger)
        answers = await asyncio.gather(*(collect_answer(self.stream(agent)) for agent in agents))
        count = len(self.model.ledger) - before
        self.tally.require("lost", count == len(agents), f"{len(agents)} concurrent agents made {count} turns.")
        order = {agent.model_state["tito"]["turn"]: number for number, agent in enumerate(agents)}
        self.tally.require(
            "parent", len(order) == len(agents), f"{len(agents)} concurrent agents share turns: {sorted(order)}."
        )
        for index in sorted(order):
            number = order[index]
            parent = self.model.ledger[index].parent
            self.tally.require("parent", parent is None, f"turn {index} of a new agent has the parent {parent}.")
            self.keep_answer(agents[number], answers[number], index)


def _optional_outputs(move: m.Want, server: ConnectedServer) -> OptionalOutputs:
    experts: bool | tuple[int, int] = move.routed_experts and (server.target.experts or True)
    return OptionalOutputs(
        top_logprobs=move.top_logprobs,
        prompt_logprobs=move.prompt_logprobs,
        routed_experts=experts,
        sampling_mask=move.sampling_mask,
    )


CANCELLED_TOKENS = 96
"""Limit of an answer that will be cancelled: enough that it is still in progress."""


async def play_cancel(player: Player, agent: SimulatedAgent, move: m.Cancel) -> None:
    """Cancel a turn. The ledger must be whole, whether or not the answer was complete by then."""
    agent.add_input(move.text)
    player.set_sampling(max_new_tokens=CANCELLED_TOKENS, ignore_eos=True)
    before, signal = len(player.model.ledger), threading.Event()
    player.abandoned += 1
    answer = await _cancel(player.stream(agent, cancel_signal=signal), signal, move)
    after = len(player.model.ledger)
    completed = answer is not None and answer.stop_reason is not None
    player.tally.require(
        "cancelled",
        after - before == int(completed),
        f"a turn that was {'complete' if completed else 'cancelled'} left {after - before} turns in the ledger.",
    )
    if completed and answer is not None:
        player.abandoned -= 1
        player.keep_answer(agent, answer, after - 1)


async def _cancel(stream: AsyncGenerator[Any], signal: threading.Event, move: m.Cancel) -> Answer | None:
    task = asyncio.ensure_future(collect_answer(stream))
    try:
        await asyncio.sleep(move.after_s)
        if move.how == "signal":
            signal.set()
        else:
            task.cancel()
        await asyncio.wait({task})  # unlike `await task`, this raises only if this coroutine itself is cancelled
        return None if task.cancelled() else task.result()
    finally:
        if not task.cancelling():
            task.cancel()
        await asyncio.gather(task, return_exceptions=True)  # leave no task behind, whoever cancelled
        if move.how == "close":
            with contextlib.suppress(RuntimeError):
                await stream.aclose()
