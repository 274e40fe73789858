"""One conversation on one server: plays moves through a model, and checks every step."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterable
from dataclasses import dataclass, field
from typing import Any, cast

from strands.types.exceptions import ContextWindowOverflowException

from strands_tito.conformance import cancelling, deltas, grammars, reloading
from strands_tito.conformance.agents import CLEARED, SYSTEM_PROMPTS, Answer, SimulatedAgent, collect_answer, tool_uses
from strands_tito.conformance.fixed_prompts import ABSENT
from strands_tito.conformance.laws import Tally, Where, set_place
from strands_tito.conformance.oracle import ParentOracle
from strands_tito.conformance.oracle_turn import Problem
from strands_tito.conformance.rendering import Renderer
from strands_tito.conformance.request_check import CallReader, compare_calls, compare_sampling, compare_semantics
from strands_tito.conformance.target import FINITE_TOP_K, ConnectedServer, LogPosition
from strands_tito.testing import moves as m
from tito_core.backend import OptionalOutputs
from tito_core.backend.errors import BadRequestError
from tito_core.chat.messages import MALFORMED_CALL
from tito_core.ledger import Ledger, Provenance
from tito_core.ledger.turn import Draft
from tito_core.model import TITOModel

REASONS: dict[type[m.Move], tuple[str, ...]] = {
    m.Edit: ("edit", "trim", "summary", "retry", "rewind"),  # the new text may be that of a later message
    m.Trim: ("trim", "retry", "rewind"),
    m.Rewind: ("rewind", "retry", "edit", "trim"),
    m.Again: ("retry", "rewind"),
    m.Seed: ("edit", "retry", "rewind"),
    m.System: ("new system prompt or tools", "retry", "rewind"),
}
"""Reasons that the next branch may have after a move. What an agent had before may come back: a retry or a rewind."""
ANY_MOVE = ("separate agent", "thinking stripped")
"""Reasons that depend on earlier moves, and on other agents."""
CALL_TOKENS = 96
"""Limit of one of three ordinary answers: enough for two calls."""
MAX_TOKENS = 24
"""Limit of an ordinary answer: enough to end in several ways, few enough for a small machine."""
MAX_PICTURES = 8
"""Most pictures of a history, where the server reports no limit."""


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
        streamed: Whether its answers are streamed.
        agents: The agents.
        log_start: Where the conversation begins in the server's logs.
        abandoned: Number of answers that may be in no turn, because a move cancelled them or the server aborted them.
        sampling: Sampling parameters that the last `Sampling` move set.
        requested: Sampling parameters of the current turn.
        calls: Reads the calls of an answer, independently of the client.
    """

    server: ConnectedServer
    tally: Tally
    opening: Iterable[m.Move] = ()
    ledger: Ledger | None = None
    context_limit: int | None = None
    fixed_sampling: dict[str, Any] = field(default_factory=dict)
    model: TITOModel = field(init=False)
    optional_outputs: OptionalOutputs = field(init=False)
    streamed: bool = field(init=False)
    agents: list[SimulatedAgent] = field(default_factory=lambda: [SimulatedAgent(), SimulatedAgent()])
    parents: ParentOracle = field(default_factory=ParentOracle)
    renderer: Renderer = field(init=False)
    calls: CallReader = field(init=False)
    log_start: LogPosition = field(init=False)
    abandoned: int = 0
    sampling: dict[str, Any] = field(default_factory=dict)
    requested: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        policy, moves = self.server.policy, list(self.opening)
        self.log_start = self.server.log_position()
        self.streamed = any(isinstance(move, m.Stream) for move in moves)
        self.optional_outputs = next(
            (_optional_outputs(move, self.server) for move in moves if isinstance(move, m.Want)), OptionalOutputs()
        )
        self.model = policy.model(
            ledger=self.ledger,
            sampling=self._effective_sampling({}),
            context_window_limit=self.context_limit,
            stream=self.streamed,
            optional_outputs=self.optional_outputs,
        )
        self.renderer = Renderer(policy.tokenizer, policy.template.arguments)
        self.calls = CallReader(policy.tokenizer)

    async def play(self, move: m.Move) -> None:
        """Play one move."""
        agent = self.agents[move.agent % len(self.agents)]
        match move:
            case m.Opening():
                return  # read in __post_init__
            case m.Ask():
                agent.add_input(move.text, move)
                long = len(self.model.ledger) % 3 == 0
                await self.sample(agent, **({"max_new_tokens": CALL_TOKENS} if long else {}))
            case m.Look():
                await self._look(agent, move)
            case m.Cut():
                agent.add_input(move.text)
                await self.sample(agent, max_new_tokens=move.tokens)
            case m.StopAt():
                await play_stop_string(self, agent, move)
            case m.Force():
                await grammars.play_forced_call(self, agent, move)
            case m.Call():
                await grammars.play_calls(self, agent, move)
            case m.Shape():
                await grammars.play_structured_output(self, agent, move)
            case m.Cancel():
                await cancelling.play_cancel(self, agent, move)
            case m.Reload():
                await reloading.play_reload(self, agent, move)
            case m.Together():
                await self._play_concurrent_agents(move)
            case m.Sampling():
                self.sampling = {name: getattr(move, name) for name in move.__struct_fields__ if name != "agent"}
            case _:
                await self._play_history_change(agent, move)

    async def _look(self, agent: SimulatedAgent, move: m.Look) -> None:
        """Show pictures, as many as the server takes in one request; a history with too many begins anew."""
        if agent.pending_calls() and "tool results" not in self.server.policy.template.certificate.images:
            agent.add_input(move.text)
            await self.sample(agent)
            return
        most = self.server.policy.info.images.most or MAX_PICTURES
        shown = len(move.pictures) * max(1, len(agent.pending_calls()))
        if agent.pictures() + shown > most:
            agent.clear()
        agent.add_pictures(move)
        await self.sample(agent)

    async def _play_history_change(self, agent: SimulatedAgent, move: m.Move) -> None:
        """Change a history as its owner may, then sample an answer."""
        agent.reasons.update(REASONS[type(move)])
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
        tools: Any = self.server.tools or None
        stream = self.model.stream(
            cast(Any, agent.copied_messages()), tools, agent.system, model_state=agent.model_state, **arguments
        )
        return cast(AsyncGenerator[Any], stream)

    def where(self, index: int, position: int | None = None) -> Where:
        """Return the place of a finding: a turn, or a token of its output."""
        draft = self.model.ledger[index].draft
        token = None if position is None or position >= len(draft.output_ids) else int(draft.output_ids[position])
        return Where(index, position, token, dict(draft.sampling), self.streamed)

    def set_sampling(self, **changes: Any) -> None:
        """Set the sampling parameters of the next turns."""
        self.requested = self._effective_sampling(changes)
        self.model.update_config(sampling=self.requested)
        set_place(turn=len(self.model.ledger), sampling=self.requested, streamed=self.streamed)

    def _effective_sampling(self, changes: dict[str, Any]) -> dict[str, Any]:
        sampling = {"max_new_tokens": MAX_TOKENS, **self.sampling, **changes, **self.fixed_sampling}
        if self.optional_outputs.sampling_mask and sampling.get("top_k", -1) < 1:
            sampling["top_k"] = FINITE_TOP_K
        return self.server.accepted(sampling)

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
            agent.clear()
            return None
        count = len(self.model.ledger) - before
        self.tally.require("lost", count == 1, f"an answer made {count} turns.")
        turn = self.model.ledger[-1]
        # No template continues an answer whose stop token was sampled inside reasoning: a new root is expected then.
        allowed = {None if deltas.ended_in_reasoning(self.model.ledger[i].draft) else i for i in expected} or {None}
        self.tally.require(
            "parent",
            turn.parent in allowed,
            f"the parent is {turn.parent}, expected one of {allowed}; the history starts with that of "
            f"{expected or 'no turn'}.",
            where=self.where(turn.index),
        )
        shown = any(block.get("text", "").strip() for block in agent.messages[-1]["content"])
        marked = bool((turn.draft.prompt_provenance == Provenance.PROMPT).any())
        problem = "the last message has a text, but no token of the delta is marked as message content."
        self.tally.require("inert", marked or not shown, problem, where=self.where(turn.index))
        deltas.check_rendering(self, agent, turn)
        deltas.check_order_of_pictures(self, agent, turn)
        self.keep_answer(agent, answer, turn.index)
        self.tally.require(
            "constrained",
            turn.draft.constrained == (bool(arguments) or "grammar" in self.requested),
            f"the turn is {'' if turn.draft.constrained else 'not '}marked as constrained.",
            where=self.where(turn.index),
        )
        named, spans = self.server.policy.info.weight_version, turn.draft.engine.versions
        if named is not None and not self.server.target.weights:
            problem = f"the server has the weights {named!r}, which did not change, but the answer reports {spans}."
            right = all(span.version in (named, None) for span in spans)
            reported = sum(span.version is not None for span in spans)
            self.tally.require("versions", right, problem, reported, self.where(turn.index))
        if live_version is not None and live_version == self.server.live_version:
            reloading.check_live_version(turn.draft.engine.versions, live_version, self.tally)
        return answer

    def keep_answer(self, agent: SimulatedAgent, answer: Answer, index: int) -> None:
        """Append an answer to its agent's history."""
        self._check_answer(answer, index)
        branch = self.model.ledger[index].draft.branch
        problem = f"the turn branches by {branch}, after changes that allow {sorted(agent.reasons) or 'no reason'}."
        right = branch is None or branch.reason in (*agent.reasons, *ANY_MOVE)
        self.tally.require("branch", right, problem, where=self.where(index))
        agent.reasons.clear()
        agent.messages.append(answer.message)
        self.parents.add(index, agent.fingerprint())
        self.tally.turns += 1
        if not answer.message["content"]:  # Strands stores a blank text in its place
            agent.messages.pop()
            agent.reasons.update(CLEARED)

    def _check_answer(self, answer: Answer, index: int) -> None:
        """Compare a turn with its request, and its message with the sampled text."""
        draft, tally = self.model.ledger[index].draft, self.tally
        wire = [each for each in self.server.generations(self.log_start) if each.request_id == draft.engine.request_id]
        problems: list[Problem] = []
        if len(wire) == 1:
            problems += compare_sampling(self.requested, wire[0].sampling, draft.sampling, draft.max_new_tokens)
            tally.require("requested", True, "")
        processed, semantics = self.server.policy.info.processed_logprobs, draft.engine.semantics
        problems += compare_semantics(self.requested, semantics, processed, draft.constrained)
        thinks = self.renderer.decode(draft.prompt_ids.tolist()).rstrip().endswith("<think>")
        read = self.calls.read("<think>" * thinks + self.renderer.decode(draft.output_ids.tolist()))
        if read is None:
            tally.skip("calls", "The format is not a JSON object between two tags, or reasoning holds markup.")
        else:
            problems += compare_calls(read, tool_uses(answer.message), MALFORMED_CALL, whole=not draft.finish.cut_off)
            problems += self.calls.misplaced(draft.calls, lambda start, stop: self._text(draft, start, stop))
            tally.require("calls", True, "", len(read))
        for check, problem, *_ in problems:
            tally.require(check, False, problem, where=self.where(index))

    def _text(self, draft: Draft, start: int, stop: int) -> str:
        return self.renderer.decode(draft.output_ids[start:stop].tolist())

    async def _play_concurrent_agents(self, move: m.Together) -> None:
        """Run one turn of several new agents at once. Each must get its own answer."""
        self.set_sampling()
        agents = [SimulatedAgent(system=SYSTEM_PROMPTS[0]) for _ in move.texts]
        for agent, text in zip(agents, move.texts, strict=True):
            agent.add_input(text)
        before = len(self.model.ledger)
        streams = (collect_answer(self.stream(agent)) for agent in agents)
        results = await asyncio.gather(*streams, return_exceptions=True)
        for result in results:
            if isinstance(result, BaseException) and not isinstance(result, ContextWindowOverflowException):
                raise result
        agents = [agent for agent, result in zip(agents, results, strict=True) if isinstance(result, Answer)]
        answers = [result for result in results if isinstance(result, Answer)]
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


async def play_stop_string(player: Player, agent: SimulatedAgent, move: m.StopAt) -> None:
    """Sample with a stop string. A server without a tokenizer refuses it."""
    agent.add_input(move.text)
    try:
        await player.sample(agent, stop=(move.stop, ABSENT))
    except BadRequestError as error:
        await player.sample(agent)  # raises again if it is not the stop string that the server refuses
        player.tally.skip("stopped", f"The server refuses stop strings: {str(error).partition(': ')[2][:80]}")
