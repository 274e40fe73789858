"""Candidates for a template's delta, and the tail of a rendering that each gives."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from strands.types.content import Message, Messages
from strands.types.tools import ToolSpec

from tito_core.chat.cutting import content_start, find_run
from tito_core.chat.encoder import ContentSafeEncoder, Control
from tito_core.chat.ending import Ending
from tito_core.chat.form import TemplateMessage
from tito_core.chat.learning import THOUGHT, Sample, learn_answers, learn_calls, share_closers
from tito_core.chat.messages import template_messages, template_tools
from tito_core.chat.probes import LOOK, asked, called, returned, said
from tito_core.chat.rendering import Rendering, TemplateError
from tito_core.chat.traced import Traced

_ASKED = asked(".")
_SAID = said(".")
_LOOKED = ("look", {"at": "it"})
_CALLED = called(_LOOKED)
_RETURNED = returned([{"text": "seen"}])
_ROUND: Messages = [_ASKED, _CALLED, _RETURNED, _SAID, _ASKED]


@dataclass(frozen=True, slots=True)
class Candidate:
    """What is rendered around the real calls and the new messages, so that the template writes these as in place.

    Attributes:
        before: Messages before the turn.
        later: The same for a turn that comes after tool results, where that makes a difference.
        system: System prompt.
        tools: No tools, a tool of ours, or those of the rollout.
        remark: Text beside the calls.
    """

    name: str
    before: Messages = field(default_factory=lambda: [_ASKED])
    later: Messages | None = None
    system: str | None = None
    tools: Literal["none", "ours", "own"] = "none"
    remark: str = ""


CANDIDATES = (
    Candidate("after a question"),
    Candidate("after a system prompt and a question", system="."),
    Candidate("after a question, with a tool", tools="ours"),
    Candidate("after a system prompt and a question, with a tool", system=".", tools="ours"),
    Candidate("after a round of tools, with a tool", _ROUND, tools="ours"),
    Candidate("after a round of tools where there was one", later=_ROUND),
    Candidate("after a question, with a remark beside the calls", remark="."),
    Candidate("after a question, with the rollout's tools", tools="own"),
)
"""In the order of what a delta costs: the first that is right on all probes is chosen."""


@dataclass(frozen=True, slots=True)
class Placed:
    """A turn in the minimal conversation around it, as the template reads it.

    Attributes:
        opening: Messages before the turn.
        source: Trace source of the turn's stand-in.
        stand_in: It.
        new: Messages after it.
        tools: The tools that are shown.
        ending: How the turn ends.
    """

    opening: list[TemplateMessage]
    source: int
    stand_in: TemplateMessage
    new: list[TemplateMessage]
    tools: list[dict[str, Any]] | None
    ending: Ending

    @property
    def calls(self) -> list[dict[str, Any]]:
        """Give the turn's calls."""
        calls: list[dict[str, Any]] = self.stand_in.get("tool_calls", [])
        return calls

    def messages(self, calls: Sequence[Any], new: Sequence[TemplateMessage]) -> list[TemplateMessage]:
        """Give them all, with these calls and these new messages."""
        turn = {**self.stand_in, "tool_calls": calls} if calls else self.stand_in
        return [*self.opening, turn, *new]


@dataclass(frozen=True, slots=True)
class Tail:
    """A rendering and where in it the next messages begin.

    Attributes:
        text: The stand-in conversation, the new messages and the generation prompt.
        source: Trace source of the turn's stand-in.
        start: The character after what closes the turn.
        controls: The control tokens from there on.
    """

    text: Traced
    source: int
    start: int
    controls: list[Control]
    ending: Ending


@dataclass(frozen=True, slots=True)
class DeltaSource:
    """One candidate at work on one template. Build it with `DeltaSource.of`."""

    rendering: Rendering
    encoder: ContentSafeEncoder
    candidate: Candidate
    answers: Ending
    calls: Ending | None
    opening: list[TemplateMessage]
    """The candidate's messages before the turn, translated once."""

    @classmethod
    def of(cls, rendering: Rendering, encoder: ContentSafeEncoder, candidate: Candidate) -> DeltaSource:
        """Learn how turns end in the candidate's surroundings.

        Raises:
            TemplateError: The template refuses these, or no control token ends its turns.
        """
        specs = [LOOK] if candidate.tools == "ours" else None

        def shown(turn: Message, *new: Message) -> Traced:
            history = [*candidate.before, turn, *new]
            return rendering.of_messages(history, candidate.system, specs, generation_prompt=bool(new))

        source = len(candidate.before)
        thoughts = [_or_none(shown, said("", THOUGHT)), _or_none(shown, called(_LOOKED, thought=THOUGHT))]
        answers = learn_answers(
            Sample(encoder, shown(_SAID), shown(_SAID, _ASKED), source), [text for text in thoughts if text is not None]
        )
        if answers is None:
            raise TemplateError(
                "The chat template ends assistant turns with no control token, so turns cannot be told apart."
            )
        alone, followed = _or_none(shown, _CALLED), _or_none(shown, _CALLED, _RETURNED)
        calls = None
        if alone is not None and followed is not None:
            calls = learn_calls(Sample(encoder, alone, followed, source), answers)
        if calls is not None:
            answers, calls = share_closers(answers, calls)
        opening = template_messages(candidate.before, candidate.system, form=rendering.form)
        return cls(rendering, encoder, candidate, answers, calls, opening)

    def tail(
        self,
        answered: Message,
        new: Messages,
        tools: Sequence[ToolSpec] | None = None,
        history: Messages | None = None,
    ) -> Tail:
        """Render a minimal conversation around the real calls of an answer and find where the answer ends.

        Args:
            answered: The assistant message as Strands stores it; some templates quote its calls in the results.
            new: The messages after it.
            tools: The rollout's own, for a candidate that shows them.
            history: Messages before the answer, for a candidate that looks for results there.

        Raises:
            TemplateError: The template refuses the messages, or the candidate needs what was not given.
        """
        return self.rendered(self.placed(answered, new, tools, history))

    def placed(
        self,
        answered: Message,
        new: Messages,
        tools: Sequence[ToolSpec] | None = None,
        history: Messages | None = None,
    ) -> Placed:
        """Put a minimal conversation around the real calls of an answer; arguments and errors as `tail`."""
        self._check_given(tools, history)
        uses = [block for block in answered["content"] if "toolUse" in block]
        candidate = self.candidate
        before, opening = candidate.before, self.opening
        if candidate.later is not None and _has_results(history):
            before = candidate.later
            opening = template_messages(before, candidate.system, form=self.rendering.form)
        stand_in = _SAID
        if uses:
            stand_in = {"role": "assistant", "content": [*said(candidate.remark)["content"], *uses]}
        shown: Any = {"none": None, "ours": [LOOK], "own": tools}[candidate.tools]
        first, *others = template_messages([stand_in, *new], first=len(before), form=self.rendering.form)
        ending = self.calls if uses and self.calls is not None else self.answers
        return Placed(opening, len(before), first, others, template_tools(shown), ending)

    def rendered(self, placed: Placed) -> Tail:
        """Render messages and find where the answer among them ends.

        Raises:
            TemplateError: The template refuses the messages.
        """
        text = self.rendering.of_translated(placed.messages(placed.calls, placed.new), placed.tools)
        controls = self.encoder.controls(text)
        end = _end(text, controls, placed.source, placed.ending)
        return Tail(text, placed.source, end, [control for control in controls if control[0] >= end], placed.ending)

    def _check_given(self, tools: Sequence[ToolSpec] | None, history: Messages | None) -> None:
        for needed, name in ((self.candidate.tools == "own", "tool_specs"), (self.candidate.later, "history")):
            if needed and {"tool_specs": tools, "history": history}[name] is None:
                raise TemplateError(
                    f"The chat template's delta is rendered {self.candidate.name}, so it needs {name}=...: "
                    "give it, empty where there is none."
                )


def _end(text: Traced, controls: list[Control], source: int, ending: Ending) -> int:
    start = content_start(text, source)
    if ending.closing:
        run = find_run(controls, ending.closing, start)
        if run is not None:
            return run[1]
    else:
        for begin, _, token in controls:
            if begin >= start and token in ending.openers:
                return begin
    named = ending.closing or sorted(ending.openers)
    raise TemplateError(
        f"The chat template does not end an assistant turn as it ended one before (tokens {list(named)}); "
        "found no place to continue from."
    )


def _has_results(history: Messages | None) -> bool:
    return any("toolResult" in block for message in history or () for block in message["content"])


def _or_none(shown: Any, *messages: Message) -> Traced | None:
    try:
        text: Traced = shown(*messages)
    except TemplateError:
        return None
    return text
