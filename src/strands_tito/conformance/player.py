"""One conversation: moves are played on a model, and every step is held to the laws."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncGenerator, Iterable
from dataclasses import dataclass, field
from typing import Any, cast

from strands.types.exceptions import ContextWindowOverflowException

from strands_tito.conformance import deltas, grammars, reloading
from strands_tito.conformance.agents import SYSTEMS, TOOLS, Answer, Life, listen
from strands_tito.conformance.laws import Tally
from strands_tito.conformance.oracle import Parents
from strands_tito.conformance.rendering import Renderer
from strands_tito.conformance.target import Connected, Mark
from strands_tito.testing import moves as m
from tito_core.backend import OptionalOutputs
from tito_core.ledger import Ledger
from tito_core.model import TITOModel

TOKENS = 24
"""Most tokens of an ordinary answer: enough to end in several ways, few enough for a small machine."""
MASKED_TOP_K = 20
"""Tokens to choose from where a sampling mask is wanted and a move leaves all."""


@dataclass
class Player:
    """Plays moves on a model of its own.

    Attributes:
        connected: The server.
        tally: Where checks are counted.
        opening: How the whole conversation is played.
        ledger: The ledger to begin with; a new one when None.
        limit: Tokens of context to use; the server's own when None.
        always: Sampling parameters of every turn, whatever a move says.
        model: The model; its ledger is what is checked.
        lives: The agents.
        first: Where the conversation's part of the logs begins.
        given_up: How many answers no turn has to hold, since somebody broke off.
    """

    connected: Connected
    tally: Tally
    opening: Iterable[m.Move] = ()
    ledger: Ledger | None = None
    limit: int | None = None
    always: dict[str, Any] = field(default_factory=dict)
    model: TITOModel = field(init=False)
    optional_outputs: OptionalOutputs = field(init=False)
    lives: list[Life] = field(default_factory=lambda: [Life(), Life()])
    parents: Parents = field(default_factory=Parents)
    renderer: Renderer = field(init=False)
    first: Mark = field(init=False)
    given_up: int = 0
    sampling: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        policy, moves = self.connected.policy, list(self.opening)
        self.first = self.connected.mark()
        self.optional_outputs = next(
            (_wanted(move, self.connected) for move in moves if isinstance(move, m.Want)), OptionalOutputs()
        )
        self.model = policy.model(
            ledger=self.ledger,
            sampling=self._chosen({}),
            context_window_limit=self.limit,
            stream=any(isinstance(move, m.Stream) for move in moves),
            optional_outputs=self.optional_outputs,
        )
        self.renderer = Renderer(policy.tokenizer, policy.template.arguments)

    async def play(self, move: m.Move) -> None:
        """Play one move."""
        life = self.lives[move.agent % len(self.lives)]
        match move:
            case m.Opening():
                return  # how the whole conversation is played
            case m.Ask():
                life.hear(move.text, move)
                await self.answered(life)
            case m.Cut():
                life.hear(move.text)
                await self.answered(life, max_new_tokens=move.tokens)
            case m.StopAt():
                life.hear(move.text)
                await self.answered(life, stop=(move.stop,))
            case m.Force():
                await grammars.forced(self, life, move)
            case m.Shape():
                await grammars.shaped(self, life, move)
            case m.Cancel():
                await cancelled(self, life, move)
            case m.Reload():
                await reloading.reloaded(self, life, move)
            case m.Together():
                await self._together(move)
            case m.Sampling():
                self.sampling = {name: getattr(move, name) for name in move.__struct_fields__ if name != "agent"}
            case _:
                await self._changed(life, move)

    async def _changed(self, life: Life, move: m.Move) -> None:
        """Do to a history what its owner may; then let the policy speak."""
        match move:
            case m.Edit() if life.messages:
                life.edit(move.at, move.text)
            case m.Trim():
                life.drop_first(move.count)
            case m.Rewind():
                life.drop_last(move.count)
                life.hear(move.text)
            case m.Again():
                if life.messages and life.messages[-1]["role"] == "assistant":
                    life.messages.pop()
            case m.Seed() if not life.pending():
                life.hear("Say something.")
                life.messages.append({"role": "assistant", "content": [{"text": move.text}]})
            case m.System():
                life.system = SYSTEMS[move.system % len(SYSTEMS)]
        if not life.messages or life.messages[-1]["role"] == "assistant":
            life.hear("Go on.")
        await self.answered(life)

    def stream(self, life: Life, **arguments: Any) -> AsyncGenerator[Any]:
        """Let the policy speak to an agent's history."""
        stream = self.model.stream(cast(Any, life.shown()), TOOLS, life.system, model_state=life.state, **arguments)
        return cast(AsyncGenerator[Any], stream)

    def choose(self, **changes: Any) -> None:
        """Set the sampling parameters of what comes next."""
        self.model.update_config(sampling=self._chosen(changes))

    def _chosen(self, changes: dict[str, Any]) -> dict[str, Any]:
        chosen = {"max_new_tokens": TOKENS, **self.sampling, **changes, **self.always}
        if self.optional_outputs.sampling_mask and chosen.get("top_k", -1) < 1:
            chosen["top_k"] = MASKED_TOP_K
        return chosen

    async def answered(self, life: Life, **changes: Any) -> Answer | None:
        """Let the policy speak, and check the turn that comes of it."""
        self.choose(**changes)
        return await self.turn(life)

    async def turn(self, life: Life, **arguments: Any) -> Answer | None:
        """Let the policy speak under what was chosen; None when the history is too long, which ends it."""
        expected = self.parents.fitting(life.history(), life.messages)
        before, live = len(self.model.ledger), self.connected.live
        try:
            answer = await listen(self.stream(life, **arguments))
        except ContextWindowOverflowException:
            life.messages.clear()
            return None
        self.tally.hold(
            "lost", len(self.model.ledger) == before + 1, f"an answer made {len(self.model.ledger) - before} turns."
        )
        turn = self.model.ledger[-1]
        # After a stop that was sampled inside reasoning no template writes on: the history begins anew.
        fits = {None if deltas.ended_in_reasoning(self.model.ledger[i].draft) else i for i in expected} or {None}
        self.tally.hold(
            "parent",
            turn.parent in fits,
            f"turn {turn.index} follows turn {turn.parent}; its history begins with those of {expected or 'none'}, "
            f"so that it has to follow one of {fits}.",
        )
        deltas.rendered(self, life, turn)
        self.keep(life, answer, turn.index)
        constrained = bool(arguments)
        self.tally.hold(
            "constrained",
            turn.draft.constrained == constrained,
            f"turn {turn.index} is {'' if turn.draft.constrained else 'not '}marked as sampled under a grammar.",
        )
        if live is not None and live == self.connected.live:
            reloading.named(turn.draft.engine.versions, live, self.tally)
        return answer

    def keep(self, life: Life, answer: Answer, index: int) -> None:
        """Keep an answer in its agent's history."""
        life.messages.append(answer.message)
        self.parents.add(index, life.history())
        self.tally.turns += 1
        if not answer.message["content"]:  # Strands stores a blank text in its place
            life.messages.pop()

    async def _together(self, move: m.Together) -> None:
        """Let several agents speak at once; each must get its own answer."""
        self.choose()
        lives = [Life(system=SYSTEMS[0]) for _ in move.texts]
        for life, text in zip(lives, move.texts, strict=True):
            life.hear(text)
        before = len(self.model.ledger)
        answers = await asyncio.gather(*(listen(self.stream(life)) for life in lives))
        made = len(self.model.ledger) - before
        self.tally.hold("lost", made == len(lives), f"{len(lives)} agents at once made {made} turns.")
        order = {life.state["tito"]["turn"]: number for number, life in enumerate(lives)}
        self.tally.hold(
            "parent", len(order) == len(lives), f"{len(lives)} agents at once share turns: {sorted(order)}."
        )
        for index in sorted(order):
            number = order[index]
            expected = self.model.ledger[index].parent
            self.tally.hold("parent", expected is None, f"turn {index} of a new agent follows turn {expected}.")
            self.keep(lives[number], answers[number], index)


def _wanted(move: m.Want, connected: Connected) -> OptionalOutputs:
    experts: bool | tuple[int, int] = move.routed_experts and (connected.target.experts or True)
    return OptionalOutputs(
        top_logprobs=move.top_logprobs,
        prompt_logprobs=move.prompt_logprobs,
        routed_experts=experts,
        sampling_mask=move.sampling_mask,
    )


CANCELLED_TOKENS = 96
"""Tokens of an answer that is to be broken off: enough for it to be under way."""


async def cancelled(player: Player, life: Life, move: m.Cancel) -> None:
    """Break off; whether or not the answer was in by then, the ledger must be whole."""
    life.hear(move.text)
    player.choose(max_new_tokens=CANCELLED_TOKENS, ignore_eos=True)
    before, signal = len(player.model.ledger), threading.Event()
    player.given_up += 1
    answer = await _broken_off(player.stream(life, cancel_signal=signal), signal, move)
    after = len(player.model.ledger)
    came = answer is not None and answer.reason is not None
    player.tally.hold("cancelled", after - before == int(came), f"a turn that was cancelled left {after - before}.")
    if came and answer is not None:
        player.given_up -= 1
        player.keep(life, answer, after - 1)


async def _broken_off(stream: AsyncGenerator[Any], signal: threading.Event, move: m.Cancel) -> Answer | None:
    task = asyncio.ensure_future(listen(stream))
    try:
        await asyncio.sleep(move.after_s)
        if move.how == "signal":
            signal.set()
        else:
            task.cancel()
        await asyncio.wait({task})  # unlike `await task`, raises only a cancellation that is meant for this one
        return None if task.cancelled() else task.result()
    finally:
        if not task.cancelling():
            task.cancel()
        await asyncio.gather(task, return_exceptions=True)  # nothing of it is left behind, whoever broke off
        if move.how == "close":
            with contextlib.suppress(RuntimeError):
                await stream.aclose()
