"""One conversation on one server: plays moves through a model, and checks every step."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import json
import re
import threading
from collections.abc import AsyncGenerator, Iterable
from dataclasses import dataclass, field, replace
from typing import Any, cast

import jsonschema
from pydantic import BaseModel, Field
from strands.types.exceptions import ContextWindowOverflowException

from tito_conformance.agents import CLEARED, SYSTEM_PROMPTS, TOOLS, Answer, SimulatedAgent, collect_answer, tool_uses
from tito_conformance.checks import Tally, Where, set_place
from tito_conformance.fixed import ABSENT
from tito_conformance.oracle import OracleImage, ParentOracle, Problem, collapsed, compare_sampling, compare_semantics
from tito_conformance.rendering import CallReader, Renderer, compare_calls, compare_said, differing_excerpts
from tito_conformance.target import FINITE_TOP_K, ConnectedServer
from tito_conformance.testing import moves as m
from tito_conformance.weights import RELOADED_TOKENS, check_live_version, update_weights
from tito_core.backend import OptionalOutputs, SamplingParams
from tito_core.backend.errors import (
    BadRequestError,
    GenerationAbortedError,
    ServerError,
)
from tito_core.backend.sampling import Grammar
from tito_core.chat.messages import MALFORMED_CALL
from tito_core.ledger import Draft, Finish, Ledger, Provenance, Turn
from tito_core.model import TITOModel
from tito_core.parsing.completion import CallStatus
from tito_core.turn.inputs import UnsupportedToolChoiceError

MAX_TOKENS = 24
"""Limit of an ordinary answer: enough to end in several ways, few enough for a small machine."""
CALL_TOKENS = 96
"""Limit of one of three ordinary answers: enough for two calls."""
CANCELLED_TOKENS = 96
"""Limit of an answer that will be cancelled: enough that it is still in progress."""
GRAMMAR_TOKENS = 200
"""Limit of an answer under a grammar, which ends by itself."""
MAX_PICTURES = 8
"""Most pictures of a history, where the server reports no limit."""
REFUSALS = (ServerError, GenerationAbortedError)
"""XGrammar 0.2.7 and 0.2.8 sometimes refuse a control token that their own mask allowed. Both engines then answer 500,
and SGLang ends a stream as aborted."""
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


class Shaped(BaseModel):
    """The structured output that is requested. Its name is part of the request."""

    word: str = Field(pattern="^[a-z]{1,8}$")
    count: int = Field(ge=0, le=99)


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
    abandoned: int = 0
    sampling: dict[str, Any] = field(default_factory=dict)
    requested: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        policy, moves = self.server.policy, list(self.opening)
        self.server.recorder.clear()
        self.streamed = any(isinstance(move, m.Stream) for move in moves)
        self.optional_outputs = next(
            (_optional_outputs(move, self.server) for move in moves if isinstance(move, m.Want)), OptionalOutputs()
        )
        self.model = policy.model(
            ledger=self.ledger,
            sampling=SamplingParams(**self._effective_sampling({})),
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
                await self._stop_at(agent, move)
            case m.Force():
                await self._force(agent, move)
            case m.Call():
                await self._call(agent, move)
            case m.Shape():
                await self._shape(agent, move)
            case m.Cancel():
                await self._cancel(agent, move)
            case m.Reload():
                await self._reload(agent, move)
            case m.Together():
                await self._together(move)
            case m.Sampling():
                self.sampling = {name: getattr(move, name) for name in move.__struct_fields__ if name != "agent"}
            case _:
                await self._change_history(agent, move)

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
        self._check_parent(turn, expected)
        shown = any(block.get("text", "").strip() for block in agent.messages[-1]["content"])
        marked = bool((turn.draft.prompt_provenance == Provenance.PROMPT).any())
        problem = "the last message has a text, but no token of the delta is marked as message content."
        self.tally.require("inert", marked or not shown, problem, where=self.where(turn.index))
        self._check_rendering(agent, turn)
        self._check_pictures(agent, turn)
        self.keep_answer(agent, answer, turn.index)
        self.tally.require(
            "constrained",
            turn.draft.constrained == (bool(arguments) or "grammar" in self.requested),
            f"the turn is {'' if turn.draft.constrained else 'not '}marked as constrained.",
            where=self.where(turn.index),
        )
        self._check_versions(turn)
        if live_version is not None and live_version == self.server.live_version:
            check_live_version(turn.draft.engine.versions, live_version, self.tally)
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

    def stream(self, agent: SimulatedAgent, **arguments: Any) -> AsyncGenerator[Any]:
        """Stream the model's answer to an agent's history."""
        messages: Any = copy.deepcopy(agent.messages)  # as Strands passes it to a model
        tools: Any = self.server.tools or None
        stream = self.model.stream(messages, tools, agent.system, model_state=agent.model_state, **arguments)
        return cast(AsyncGenerator[Any], stream)

    def where(self, index: int, position: int | None = None) -> Where:
        """Return the place of a finding: a turn, or a token of its output."""
        draft = self.model.ledger[index].draft
        token = None if position is None or position >= len(draft.output_ids) else int(draft.output_ids[position])
        return Where(index, position, token, dict(draft.sampling), self.streamed, draft.engine.request_id)

    def set_sampling(self, **changes: Any) -> None:
        """Set the sampling parameters of the next turns."""
        self.requested = self._effective_sampling(changes)
        self.model.update_config(sampling=self.requested)
        set_place(turn=len(self.model.ledger), sampling=self.requested, streamed=self.streamed)

    def _effective_sampling(self, changes: dict[str, Any]) -> dict[str, Any]:
        sampling = {"max_new_tokens": MAX_TOKENS, **self.sampling, **changes, **self.fixed_sampling}
        if self.optional_outputs.sampling_mask and sampling.get("top_k", -1) < 1:
            sampling["top_k"] = FINITE_TOP_K
        return self.server.accepted({name: sampling[name] for name in sampling if name not in self.server.refused})

    def _check_parent(self, turn: Turn, expected: list[int]) -> None:
        """Compare a turn's parent with the turns that may be it: `expected`, or none where that is empty."""
        # No template continues an answer whose stop token was sampled inside reasoning: a new root is expected then.
        allowed = {None if _ended_in_reasoning(self.model.ledger[i].draft) else i for i in expected} or {None}
        problem = (
            f"the parent is {turn.parent}, expected one of {allowed}; the history starts with that of "
            f"{expected or 'no turn'}."
        )
        self.tally.require("parent", turn.parent in allowed, problem, where=self.where(turn.index))

    def _check_versions(self, turn: Turn) -> None:
        """Compare a turn's weight versions with the server's own, if nobody changes them."""
        named, spans = self.server.policy.info.weight_version, turn.draft.engine.versions
        if named is not None and not self.server.target.weights:
            problem = f"the server has the weights {named!r}, which did not change, but the answer reports {spans}."
            right = all(span.version in (named, None) for span in spans)
            reported = sum(span.version is not None for span in spans)
            self.tally.require("versions", right, problem, reported, self.where(turn.index))
            self.server.recorder.compared("versions", "server", turn.draft.engine.request_id if reported else None)

    def _check_rendering(self, agent: SimulatedAgent, turn: Turn) -> None:
        """Compare a turn's delta with the template's own rendering of the whole history."""
        tally, renderer = self.tally, self.renderer
        if any(use["name"] == MALFORMED_CALL for message in agent.messages for use in tool_uses(message)):
            tally.skip("rendering", "The history holds a malformed call, whose feedback the client writes.")
            return
        whole = renderer.text(agent.messages, agent.system, self.server.tools)
        if whole is None:
            tally.skip("rendering", "The template refuses the history.")
            return
        spans = [OracleImage(span.offset, span.length, "") for span in turn.draft.media]
        start = turn.path_length - turn.own_length
        ids = collapsed(turn.draft.prompt_ids.tolist(), [replace(span, offset=span.offset - start) for span in spans])
        parent = turn.parent
        delta = renderer.decode(ids)
        before = None if parent is None else self.model.ledger[parent].draft
        if not whole.endswith(delta) and not renderer.survives(agent.messages, agent.system):
            tally.skip("rendering", "The tokenizer does not decode what it encodes.")
            return
        place = self.where(turn.index)
        where = f"the delta {delta[-200:]!r}"
        closer_id = self.server.policy.template.closer_id
        if before is not None and (part := _truncated_part(before)) is not None:
            closing = self._check_closing(before, part, delta, place)
            if closing is None:
                tally.skip("rendering", f"The template does not show how it closes truncated {part}.")
                return
            delta = delta.removeprefix(closing)  # the closed part belongs to the answer, which a template may hide
        end = whole if before is None else whole[-len(delta) :]
        own, expected = differing_excerpts(delta, end)
        tally.require(
            "rendering", end == delta, f"{where} has {own!r} where the template writes {expected!r}.", 1, place
        )
        stem = whole[: len(whole) - len(delta)]
        closed = ""
        if before is not None and len(before.output_ids) and int(before.output_ids[-1]) == closer_id:
            closed = renderer.decode([closer_id])
            tally.require(
                "rendering", stem.endswith(closed), f"{where} does not continue where the answer ended.", 1, place
            )
        if renderer.is_plain(agent.messages, agent.system) and (closed or before is None):
            expected_ids = renderer.encode(closed + delta)[-len(ids) :]
            problem = f"{where} has the ids {ids}, but the tokenizer encodes it as {expected_ids}."
            tally.require("rendering", expected_ids == ids, problem, 1, place)
        else:
            tally.skip("rendering", "Messages spell a control token or a bracket, or the answer was truncated.")

    def _check_closing(self, before: Draft, part: str, delta: str, place: Where) -> str | None:
        """Check how a delta closes the truncated part of the answer before it.

        Returns:
            The text that closes it; None if the template does not show how it does so.
        """
        renderer, where = self.renderer, f"the delta {delta[-200:]!r}"
        closer = renderer.decode([self.server.policy.template.closer_id])
        tags = renderer.reasoning_tags(closer) if part == "reasoning" else renderer.call_tags(closer)
        if tags is None:
            return None
        *opening, closing = tags
        if closing:
            tag_ids = [renderer.encode(tag) for tag in opening]
            _check_still_open(before.output_ids.tolist(), tag_ids, f"{where} closes {part}", self.tally, place)
        if part != "reasoning":  # what the policy wrote of the blanks before the tag is not written again
            text, blanks = renderer.decode(before.output_ids.tolist()), len(closing) - len(closing.lstrip())
            closing = closing[next(n for n in range(blanks, -1, -1) if text.endswith(closing[:n])) :]
            closing = closing or renderer.spelled_closing(text, delta)
        problem = f"{where} does not close {part} with {closing!r}."
        self.tally.require("rendering", delta.startswith(closing), problem, 1, place)
        return closing

    def _check_pictures(self, agent: SimulatedAgent, turn: Turn) -> None:
        """Compare the pictures of a turn's path with those of the whole history, in the template's order."""
        found = [span.sha256.hex() for each in self.model.ledger.path(turn.index) for span in each.draft.media]
        expected = self.renderer.pictures(agent.messages, agent.system)
        if found or expected:
            short = [[digest[:12] for digest in digests] for digests in (found, expected)]
            problem = f"the path has the pictures {short[0]}, the history {short[1]}."
            self.tally.require("images", found == expected, problem, where=self.where(turn.index))

    def _check_answer(self, answer: Answer, index: int) -> None:
        """Compare a turn with its request, and its message with the sampled text."""
        draft, tally = self.model.ledger[index].draft, self.tally
        wire = [each for each in self.server.recorder.generations() if each.request_id == draft.engine.request_id]
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
            ended = draft.finish == Finish.STOP and isinstance(draft.stop, int)
            text = "<think>" * thinks + self._text(draft, 0, len(draft.output_ids) - ended)
            said = None if None in read or isinstance(draft.stop, str) else self.calls.said(text)
            if said is not None and (ended or "<" not in text):
                problems += compare_said(said, answer.message["content"])
        for check, problem, *_ in problems:
            tally.require(check, False, problem, where=self.where(index))

    def _text(self, draft: Draft, start: int, stop: int) -> str:
        return self.renderer.decode(draft.output_ids[start:stop].tolist())

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

    async def _change_history(self, agent: SimulatedAgent, move: m.Move) -> None:
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

    async def _together(self, move: m.Together) -> None:
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

    async def _stop_at(self, agent: SimulatedAgent, move: m.StopAt) -> None:
        """Sample with a stop string. A server without a tokenizer refuses it."""
        agent.add_input(move.text)
        try:
            await self.sample(agent, stop=(move.stop, ABSENT))
        except BadRequestError as error:
            await self.sample(agent)  # raises again if it is not the stop string that the server refuses
            self.tally.skip("finish", f"The server refuses stop strings: {str(error).partition(': ')[2][:80]}")

    async def _cancel(self, agent: SimulatedAgent, move: m.Cancel) -> None:
        """Cancel a turn. The ledger must be whole, whether or not the answer was complete by then."""
        agent.add_input(move.text)
        self.set_sampling(max_new_tokens=CANCELLED_TOKENS, ignore_eos=True)
        before, signal = len(self.model.ledger), threading.Event()
        self.abandoned += 1
        try:
            answer = await _cancelled_answer(self.stream(agent, cancel_signal=signal), signal, move)
        except ContextWindowOverflowException:
            self.abandoned -= 1
            agent.clear()
            return
        after = len(self.model.ledger)
        completed = answer is not None and answer.stop_reason is not None
        self.tally.require(
            "lost",
            after - before == int(completed),
            f"a turn that was {'complete' if completed else 'cancelled'} left {after - before} turns in the ledger.",
        )
        if completed and answer is not None:
            self.abandoned -= 1
            self.keep_answer(agent, answer, after - 1)

    async def _reload(self, agent: SimulatedAgent, move: m.Reload) -> None:
        """Change the weights during an agent's answer and a watched one."""
        agent.add_input(move.text)
        self.set_sampling(max_new_tokens=RELOADED_TOKENS, ignore_eos=True)
        turn = asyncio.create_task(self.run_turn(agent))
        try:
            self.abandoned += await update_weights(self.server, self.tally)
        finally:
            await asyncio.wait([turn])
        turn.result()

    async def _force(self, agent: SimulatedAgent, move: m.Force) -> None:
        """Force a call, and check it against the tool's schema."""
        tally = self.tally
        if not self.server.tools:
            tally.skip("constrained", "The context is too short for tools.")
            return
        agent.add_input(move.text)
        tool = TOOLS[len(move.text) % len(TOOLS)]
        choice: Any = {"tool": {"name": tool["name"]}} if move.named else {"any": {}}
        answer = await self._constrained(agent, tool_choice=choice)
        if answer is None:
            return
        uses = tool_uses(answer.message)
        names = [each["name"] for each in TOOLS]
        where = self.where(len(self.model.ledger) - 1)
        problem = f"the turn was forced to call {choice}, but its content is {answer.message['content']}."
        tally.require("constrained", bool(uses) and all(use["name"] in names for use in uses), problem, 1, where)
        if move.named:
            tally.require("constrained", {use["name"] for use in uses} == {tool["name"]}, problem, 1, where)
        for use in uses:
            schema = TOOLS[names.index(use["name"])]["inputSchema"]["json"]
            valid = jsonschema.Draft202012Validator(schema).is_valid(use["input"])
            tally.require("constrained", valid, problem, 1, where)

    async def _call(self, agent: SimulatedAgent, move: m.Call) -> None:
        """Make the policy write calls, some of them malformed; `run_turn` checks the result.

        The grammar is a sampling parameter here, so the client reads the answer like any other.
        """
        tags = self.calls.tags
        agent.add_input(move.text)
        if tags is None or not self.server.tools:
            self.tally.skip("calls", "The format is not a JSON object between two tags, or there are no tools.")
            await self.sample(agent)
            return
        added = self.server.policy.tokenizer.get_added_vocab()
        parts = list(filter(None, re.split("(</?think>)", move.before)))
        for call in move.calls:
            parts += (tags[0], f"\n{call}\n", tags[1])
        elements: list[dict[str, Any]] = [
            {"type": "token", "token": added[part]} if part in added else {"type": "const_string", "value": part}
            for part in parts
        ]
        form = {"type": "structural_tag", "format": {"type": "sequence", "elements": elements}}
        grammar = Grammar(kind="structural_tag", value=json.dumps(form))
        try:
            await self.sample(agent, max_new_tokens=GRAMMAR_TOKENS, ignore_eos=False, grammar=grammar)
        except (BadRequestError, *REFUSALS) as error:
            await self._sample_without(agent, "calls", error)

    async def _shape(self, agent: SimulatedAgent, move: m.Shape) -> None:
        """Request a structured output, and validate it."""
        agent.add_input(move.text)
        answer = await self._constrained(agent, structured_output_model=Shaped)
        if answer is None:
            return
        text = "".join(block.get("text", "") for block in answer.message["content"])
        try:
            Shaped.model_validate_json(text)
            valid = True
        except ValueError:
            valid = False
        problem = f"{text!r} does not match the schema {json.dumps(Shaped.model_json_schema())}."
        self.tally.require("constrained", valid, problem, 1, self.where(len(self.model.ledger) - 1))

    async def _constrained(self, agent: SimulatedAgent, **arguments: Any) -> Answer | None:
        """Run a turn under a grammar. Without a whole answer, count the check as skipped and return None."""
        self.set_sampling(max_new_tokens=GRAMMAR_TOKENS, temperature=1.0)
        try:
            answer = await self.run_turn(agent, **arguments)
        except (UnsupportedToolChoiceError, BadRequestError) as error:
            self.tally.skip("constrained", error)
            agent.messages.pop()
            return None
        except REFUSALS as error:
            await self._sample_without(agent, "constrained", error)
            return None
        if answer is None or self.model.ledger[-1].draft.finish == Finish.LENGTH:
            self.tally.skip("constrained", "The answer was longer than the token limit.")
            return None
        self.server.recorder.compared("ids", "schema", self.model.ledger[-1].draft.engine.request_id)
        return answer

    async def _sample_without(self, agent: SimulatedAgent, check: str, error: Exception) -> None:
        """Sample a turn without its grammar, and count the check as skipped. Raise again if another fault remains."""
        self.abandoned += isinstance(error, GenerationAbortedError)
        await self.sample(agent)
        self.tally.skip(check, error)


def _optional_outputs(move: m.Want, server: ConnectedServer) -> OptionalOutputs:
    experts: bool | tuple[int, int] = move.routed_experts and (server.target.experts or True)
    return OptionalOutputs(
        top_logprobs=move.top_logprobs,
        prompt_logprobs=move.prompt_logprobs,
        routed_experts=experts,
        sampling_mask=move.sampling_mask,
    )


async def _cancelled_answer(stream: AsyncGenerator[Any], signal: threading.Event, move: m.Cancel) -> Answer | None:
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
        await asyncio.gather(task, return_exceptions=True)  # leave no task behind
        if move.how == "close":
            with contextlib.suppress(RuntimeError):
                await stream.aclose()


def _ended_in_reasoning(draft: Draft) -> bool:
    """Return whether a stop token ended an answer inside its reasoning. A stop string counts as a truncation."""
    return draft.finish == Finish.STOP and not isinstance(draft.stop, str) and not draft.reasoning_closed


def _truncated_part(draft: Draft) -> str | None:
    """Return the part of an answer that was truncated and that the client must close: reasoning, a call or None."""
    if not (draft.finish.cut_off or isinstance(draft.stop, str)):
        return None
    if not draft.reasoning_closed:
        return "reasoning"
    return "a call" if draft.calls and draft.calls[-1].status == CallStatus.TRUNCATED else None


def _check_still_open(output: list[int], tags: list[list[int]], closes: str, tally: Tally, where: Where) -> None:
    """Check that the answer had not closed the part itself. Only possible where both tags are single tokens."""
    if all(len(tag) == 1 for tag in tags):
        (begin,), (end,) = tags
        last = next((token for token in reversed(output) if token in (begin, end)), begin)
        tally.require("rendering", last == begin, f"{closes}, which the answer had closed already.", 1, where)
