"""Find the words of earlier content that switch a template, such as `/no_think`.

A candidate's small conversation holds no content of the rollout, so its delta is wrong where a template looks for a
word in earlier messages or in the system prompt. The words that a template can look for are literals in its source.
Each is placed in earlier content. Where that changes what the template writes later, the word is a switch, and deltas
of a rollout that holds it are rendered with its system prompt or history (`delta.Switches`).

What has no literal, such as a count of earlier results, is left to the comparison in use (`comparison.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from jinja2 import nodes
from strands.types.content import Message, Messages
from strands.types.tools import ToolSpec

from tito_core.chat.delta import DeltaSource, Switches
from tito_core.chat.probes import TOOLS, assistant_message, call_message, result_message, user_message
from tito_core.chat.referee import Difference, Referee, RefusedError
from tito_core.chat.rendering import TemplateError, tracing_environment


def find_switches(
    source: DeltaSource, referee: Referee, literals: Sequence[str], *, tools: bool
) -> tuple[DeltaSource, tuple[str, ...]]:
    """Find a template's switch words, and check the deltas that are rendered because of them.

    Args:
        source: Renders the deltas, right on all other probes.
        referee: Renders the same conversations as transformers does.
        literals: The words to try; see `compared_literals`.
        tools: Whether the template shows calls and results.

    Returns:
        `source` with the switch words, and the names of the probes that hold one.

    Raises:
        TemplateError: A delta after a switch word is wrong even with the rollout's own system prompt and history.
    """
    sound = {trial.shape for trial in _trials(_NEUTRAL, tools) if _difference(source, referee, trial) is None}
    system: dict[str, None] = {}
    messages: dict[str, None] = {}
    made, count, probes = source, -1, list[_Trial]()
    while count < (count := len(system) + len(messages)):  # a word may matter only after another one
        contexts = [("", ""), *((word, "") for word in system), *(("", word) for word in messages)]
        neutral = [
            trial for context in contexts for trial in _trials(_NEUTRAL, tools, *context) if trial.shape in sound
        ]
        for whole_history in (False, True):
            made = replace(source, switches=Switches([*system], [*messages], whole_history))
            if all(_difference(made, referee, trial) is None for trial in neutral):
                break
        words = ((word, context) for word in literals for context in contexts)
        probes = [trial for word, context in words for trial in _trials(word, tools, *context) if trial.shape in sound]
        for trial in probes:
            if _difference(made, referee, trial) is not None:
                (system if trial.place == _SYSTEM else messages)[trial.word] = None
    if not count:
        return source, ()
    words_found = {**system, **messages}
    checked = [*neutral, *(trial for trial in probes if trial.word in words_found)]
    compared = ((trial.name, _difference(made, referee, trial)) for trial in checked)
    difference = next(((name, found) for name, found in compared if found is not None), None)
    if difference is None:
        return made, tuple(trial.name for trial in checked)
    raise TemplateError(
        "The chat template writes later messages differently where earlier content holds a word, and the delta is "
        f"wrong even with the rollout's own content. On the probe {difference[0]!r}, it differs {difference[1]}\n"
        "Use another template, and report this one."
    )


def compared_literals(source: str, variables: Mapping[str, Any]) -> list[str]:
    """Return the strings that a template may compare with content: its literals, except those that it only writes.

    Literals reach a comparison through variables, loops, macros and filters, so their place in the source does not
    matter. The template's arguments count as literals.
    """
    tree = tracing_environment().parse(source)
    skipped = {id(node) for out in tree.find_all(nodes.Output) for each in out.nodes for node in _written(each)}
    skipped |= {id(item.arg) for item in tree.find_all(nodes.Getitem)}
    for call in tree.find_all(nodes.Call):
        if isinstance(call.node, nodes.Name) and call.node.name == "raise_exception":
            skipped |= {id(node) for arg in call.args for node in _written(arg)}
    constants = tree.find_all((nodes.Const, nodes.Add, nodes.Concat))
    found = [_constant(node) for node in constants if id(node) not in skipped]
    return list(dict.fromkeys(text for text in (*found, *variables.values()) if isinstance(text, str) and text.strip()))


def _written(node: nodes.Node) -> Iterator[nodes.Node]:
    """Yield a printed expression and the parts of it that are written as they are."""
    yield node
    parts: list[nodes.Node | None] = []
    if isinstance(node, nodes.Add):
        parts = [node.left, node.right]
    elif isinstance(node, nodes.Concat):
        parts = [*node.nodes]
    elif isinstance(node, nodes.CondExpr):
        parts = [node.expr1, node.expr2]
    for part in parts:
        if part is not None:
            yield from _written(part)


def _constant(node: nodes.Expr) -> object:
    try:
        return node.as_const()
    except nodes.Impossible:
        return None


_SYSTEM = "the system prompt"
_WHY, _SEEN = user_message("Why?"), assistant_message("Seen.")
_LOOK = ("look", {"at": "it"})
_NEUTRAL = "Fine"
"""A text that no template looks for."""
_FORMS: Mapping[str, str] = {"alone": "{}", "within a text": "So {} it is."}


def _rounds(text: str, tools: bool) -> Messages:
    """Return two rounds in a row whose calls and results hold a text, so that a template that counts notices too."""
    if not tools:
        return []
    call, result = call_message(("look", {"at": text}), thought=text), result_message([{"text": text}])
    return [call, result, call, result]


_PLACES: Mapping[str, Callable[[str, bool], Messages]] = {
    _SYSTEM: lambda text, tools: [_WHY],
    "the first question": lambda text, tools: [user_message(text)],
    "an early question": lambda text, tools: [user_message(text), _SEEN, _WHY, *_rounds(_NEUTRAL, tools)],
    "the last question": lambda text, tools: [_WHY, _SEEN, user_message(text)],
    "earlier answers": lambda text, tools: [_WHY, assistant_message(text, thought=text), _WHY],
    "earlier results": lambda text, tools: [_WHY, *_rounds(text, tools)],
    "early results": lambda text, tools: [_WHY, *_rounds(text, tools), _SEEN, _WHY],
    "the answer": lambda text, tools: [_WHY],
}
"""For each place of a text, the messages before an answer; with rounds of tools if the template shows them."""


@dataclass(frozen=True, slots=True)
class _Trial:
    """A conversation that holds a word in one place of its earlier content.

    Attributes:
        shape: The place and whether a result follows: what does not depend on the word.
    """

    word: str
    place: str
    name: str
    shape: tuple[str, bool]
    system: str | None
    before: Messages
    answer: Message
    new: Messages
    tools: list[ToolSpec] | None


def _trials(word: str, tools: bool, system: str = "", first: str = "") -> Iterator[_Trial]:
    """Yield the trials of a word: each form in each place, followed by a question and, with tools, by a result.

    The word comes after another one in the system prompt (`system`) or in the first question (`first`), if given.
    """
    after = f" after {system!r} in the system prompt" if system else f" after {first!r}" if first else ""
    for form, layout in _FORMS.items():
        text = layout.format(word)
        for place, build in _PLACES.items():
            if (system or first) and place == _SYSTEM:
                continue
            before = build(text, tools)
            if first:
                before = [user_message(f"Well {first} so."), _SEEN, *before]
            for calls in (False, True) if tools else (False,):
                spoken = text if place == "the answer" else "Seen."
                answer = call_message(_LOOK) if calls else assistant_message(spoken)
                new = result_message([{"text": "It is open."}]) if calls else user_message("And then?")
                name = f"{'result' if calls else 'question'} after {word!r} {form} in {place}{after}"
                prompt = text if place == _SYSTEM else f"Well {system} so." if system else None
                specs = TOOLS if tools else None
                yield _Trial(word, place, name, (place, calls), prompt, before, answer, [new], specs)


def _difference(source: DeltaSource, referee: Referee, trial: _Trial) -> Difference | None:
    """Return how a delta differs from the end of the plain rendering; None if it is equal or the template refuses."""
    try:
        whole = referee.render([*trial.before, trial.answer, *trial.new], trial.system, trial.tools)
        tail = source.tail(trial.answer, trial.new, trial.tools or (), trial.before, trial.system)
    except (RefusedError, TemplateError):
        return None
    found = str.__getitem__(tail.text, slice(tail.start, None))
    expected = whole[len(whole) - len(found) :]
    return None if expected == found else Difference(expected, found)
