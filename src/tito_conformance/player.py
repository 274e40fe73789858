"""One conversation: moves are played on a model, and every step is held to the laws."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from typing import Any, cast

import jsonschema
from pydantic import BaseModel, Field
from strands.types.exceptions import ContextWindowOverflowException

from tito_conformance import moves as m
from tito_conformance.agents import SYSTEMS, TOOLS, Answer, Life, listen
from tito_conformance.laws import Tally
from tito_conformance.parents import Parents
from tito_conformance.rendering import Renderer, apart
from tito_conformance.target import Connected
from tito_core.asked import UnsupportedToolChoiceError
from tito_core.backend.errors import BadRequestError
from tito_core.chat.messages import MALFORMED_CALL
from tito_core.ledger import Finish, Turn
from tito_core.model import TITOModel

TOKENS = 24
"""Most tokens of an ordinary answer: enough to end in several ways, few enough for a small machine."""
FORCED_TOKENS = 200


class Shaped(BaseModel):
    """What an answer of a given shape holds."""

    word: str = Field(pattern="^[a-z]{1,8}$")
    count: int = Field(ge=0, le=99)


@dataclass
class Player:
    """Plays moves on a model of its own.

    Attributes:
        connected: The server.
        tally: Where checks are counted.
        stream: Whether answers are streamed.
        model: The model; its ledger is what is checked.
        lives: The agents.
        cancelled: Requests that were given up, whose answers may be missing.
        given_up: How many answers no turn has to hold, since somebody broke off.
    """

    connected: Connected
    tally: Tally
    stream: bool = False
    model: TITOModel = field(init=False)
    lives: list[Life] = field(default_factory=lambda: [Life(), Life()])
    parents: Parents = field(default_factory=Parents)
    renderer: Renderer = field(init=False)
    given_up: int = 0
    sampling: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        policy = self.connected.policy
        self.model = policy.model(sampling={"max_new_tokens": TOKENS}, stream=self.stream)
        self.renderer = Renderer(policy.tokenizer, policy.template.arguments)

    async def play(self, move: m.Move) -> None:
        """Play one move."""
        life = self.lives[move.agent % len(self.lives)]
        match move:
            case m.Stream():
                return  # how the whole conversation is played
            case m.Ask():
                life.hear(move.text, move)
                await self._answered(life)
            case m.Cut():
                life.hear(move.text)
                await self._answered(life, max_new_tokens=move.tokens)
            case m.StopAt():
                life.hear(move.text)
                await self._answered(life, stop=(move.stop,))
            case m.Force():
                await self._forced(life, move)
            case m.Shape():
                await self._shaped(life, move)
            case m.Cancel():
                await self._cancelled(life, move)
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
                message = life.messages[move.at % len(life.messages)]
                if any("text" in block for block in message["content"]):
                    message["content"] = [
                        {"text": move.text} if "text" in block else block for block in message["content"]
                    ]
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
            case m.Opening():
                life.system = SYSTEMS[move.system % len(SYSTEMS)]
        if not life.messages or life.messages[-1]["role"] == "assistant":
            life.hear("Go on.")
        await self._answered(life)

    def _stream(self, life: Life, **arguments: Any) -> AsyncGenerator[Any]:
        stream = self.model.stream(cast(Any, life.shown()), TOOLS, life.system, model_state=life.state, **arguments)
        return cast(AsyncGenerator[Any], stream)

    def _set(self, **changes: Any) -> None:
        self.model.update_config(sampling={"max_new_tokens": TOKENS, **self.sampling, **changes})

    async def _answered(self, life: Life, **changes: Any) -> Answer | None:
        """Let the policy speak, and check the turn that comes of it."""
        self._set(**changes)
        return await self._turn(life)

    async def _turn(self, life: Life, **arguments: Any) -> Answer | None:
        expected = self.parents.fitting(life.history(), life.messages)
        before = len(self.model.ledger)
        try:
            answer = await listen(self._stream(life, **arguments))
        except ContextWindowOverflowException:
            life.messages.clear()
            return None
        self.tally.hold(
            "lost", len(self.model.ledger) == before + 1, f"an answer made {len(self.model.ledger) - before} turns."
        )
        turn = self.model.ledger[-1]
        found = turn.parent
        self.tally.hold(
            "parent",
            found in expected if expected else found is None,
            f"turn {turn.index} follows turn {found}; its history begins with those of {expected or 'none'}.",
        )
        self._rendered(life, turn)
        self._keep(life, answer, turn.index)
        constrained = bool(arguments)
        self.tally.hold(
            "constrained",
            turn.draft.constrained == constrained,
            f"turn {turn.index} is {'' if turn.draft.constrained else 'not '}marked as sampled under a grammar.",
        )
        return answer

    def _rendered(self, life: Life, turn: Turn) -> None:
        """Hold what a turn added to the prompt to the template's own rendering of the whole history."""
        if any(use["name"] == MALFORMED_CALL for message in life.messages for use in _uses(message)):
            self.tally.skip("rendering", "The history holds a malformed call, whose feedback is the client's.")
            return
        whole = self.renderer.text(life.messages, life.system, TOOLS)
        if whole is None:
            self.tally.skip("rendering", "The template refuses the history.")
            return
        ids, parent = turn.draft.prompt_ids.tolist(), turn.parent
        spelled = self.renderer.spell(ids)
        before = None if parent is None else self.model.ledger[parent].draft
        if not whole.endswith(spelled) and not self.renderer.survives(life.messages, life.system):
            self.tally.skip("rendering", "The tokenizer does not decode what it encodes.")
            return
        where = f"turn {turn.index}: the prompt's new part {spelled[-200:]!r}"
        end = whole if before is None else whole[-len(spelled) :]
        mine, others = apart(spelled, end)
        self.tally.hold("rendering", end == spelled, f"{where} says {mine!r} where the template says {others!r}.")
        stem = whole[: len(whole) - len(spelled)]
        closer = self.connected.policy.template.closer_id
        closed = ""
        if before is not None and len(before.output_ids) and int(before.output_ids[-1]) == closer:
            closed = self.renderer.spell([closer])
            self.tally.hold("rendering", stem.endswith(closed), f"{where} does not go on where the answer ended.")
        if self.renderer.is_plain(life.messages, life.system) and (closed or before is None):
            own = self.renderer.ids(closed + spelled)[-len(ids) :]
            self.tally.hold("tokens", own == ids, f"{where} is encoded as {ids}, by the tokenizer as {own}.")
        else:
            self.tally.skip("tokens", "Messages spell a control token or a bracket, or the answer was cut off.")

    def _keep(self, life: Life, answer: Answer, index: int) -> None:
        life.messages.append(answer.message)
        self.parents.add(index, life.history())
        self.tally.turns += 1
        if not answer.message["content"]:  # Strands stores a blank text in its place
            life.messages.pop()

    async def _forced(self, life: Life, move: m.Force) -> None:
        life.hear(move.text)
        tool = TOOLS[len(move.text) % len(TOOLS)]
        choice: Any = {"tool": {"name": tool["name"]}} if move.named else {"any": {}}
        self._set(max_new_tokens=FORCED_TOKENS, temperature=1.0)
        try:
            answer = await self._turn(life, tool_choice=choice)
        except (UnsupportedToolChoiceError, BadRequestError) as error:
            self.tally.skip("forced", _first_line(error))
            life.messages.pop()
            return
        draft = self.model.ledger[-1].draft
        if answer is None or draft.finish == Finish.LENGTH:
            self.tally.skip("forced", "The call was longer than the tokens allowed.")
            return
        uses = _uses(answer.message)
        names = [each["name"] for each in TOOLS]
        problem = (
            f"turn {len(self.model.ledger) - 1} was forced to call {choice}, and says {answer.message['content']}."
        )
        self.tally.hold("forced", bool(uses) and all(use["name"] in names for use in uses), problem)
        if move.named:
            self.tally.hold("forced", {use["name"] for use in uses} == {tool["name"]}, problem)
        for use in uses:
            schema = TOOLS[names.index(use["name"])]["inputSchema"]["json"]
            sound = jsonschema.Draft202012Validator(schema).is_valid(use["input"])
            self.tally.hold("forced", sound, problem)

    async def _shaped(self, life: Life, move: m.Shape) -> None:
        life.hear(move.text)
        self._set(max_new_tokens=FORCED_TOKENS, temperature=1.0)
        try:
            answer = await self._turn(life, structured_output_model=Shaped)
        except BadRequestError as error:
            self.tally.skip("shaped", _first_line(error))
            life.messages.pop()
            return
        if answer is None or self.model.ledger[-1].draft.finish == Finish.LENGTH:
            self.tally.skip("shaped", "The answer was longer than the tokens allowed.")
            return
        text = "".join(block.get("text", "") for block in answer.message["content"])
        try:
            Shaped.model_validate_json(text)
            sound = True
        except ValueError:
            sound = False
        self.tally.hold("shaped", sound, f"{text!r} has not the shape {json.dumps(Shaped.model_json_schema())}.")

    async def _cancelled(self, life: Life, move: m.Cancel) -> None:
        """Break off; whether or not the answer was in by then, the ledger must be whole."""
        life.hear(move.text)
        self._set(max_new_tokens=4 * TOKENS, ignore_eos=True)
        before, signal = len(self.model.ledger), threading.Event()
        self.given_up += 1
        answer = await _broken_off(self._stream(life, cancel_signal=signal), signal, move)
        after = len(self.model.ledger)
        came = answer is not None and answer.reason is not None
        self.tally.hold("cancelled", after - before == int(came), f"a turn that was cancelled left {after - before}.")
        if came and answer is not None:
            self.given_up -= 1
            self._keep(life, answer, after - 1)

    async def _together(self, move: m.Together) -> None:
        """Let several agents speak at once; each must get its own answer."""
        self._set()
        lives = [Life(system=SYSTEMS[0]) for _ in move.texts]
        for life, text in zip(lives, move.texts, strict=True):
            life.hear(text)
        before = len(self.model.ledger)
        answers = await asyncio.gather(*(listen(self._stream(life)) for life in lives))
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
            self._keep(lives[number], answers[number], index)


def _uses(message: Any) -> list[Any]:
    return [block["toolUse"] for block in message["content"] if "toolUse" in block]


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]


async def _broken_off(stream: AsyncGenerator[Any], signal: threading.Event, move: m.Cancel) -> Answer | None:
    task = asyncio.ensure_future(listen(stream))
    await asyncio.sleep(move.after_s)
    if move.how == "signal":
        signal.set()
        answer = await task
        return answer if answer.reason is not None else None
    task.cancel()
    try:
        return await task
    except asyncio.CancelledError:
        return None
    finally:
        if move.how == "close":
            with contextlib.suppress(RuntimeError):
                await stream.aclose()
