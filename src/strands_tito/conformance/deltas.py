"""Law 7 on each turn: what it added to the prompt is the template's own rendering of the history."""

from __future__ import annotations

from typing import TYPE_CHECKING

from strands_tito.conformance.agents import TOOLS, Life
from strands_tito.conformance.laws import Tally
from strands_tito.conformance.rendering import apart
from tito_core.chat.messages import MALFORMED_CALL
from tito_core.ledger import Draft, Turn
from tito_core.ledger.turn import Finish
from tito_core.parsing.parsed import CallStatus

if TYPE_CHECKING:
    from strands_tito.conformance.player import Player


def rendered(player: Player, life: Life, turn: Turn) -> None:
    """Hold what a turn added to the prompt to the template's own rendering of the whole history."""
    tally, renderer = player.tally, player.renderer
    if any(use["name"] == MALFORMED_CALL for use in life.uses()):
        tally.skip("rendering", "The history holds a malformed call, whose feedback is the client's.")
        return
    whole = renderer.text(life.messages, life.system, TOOLS)
    if whole is None:
        tally.skip("rendering", "The template refuses the history.")
        return
    ids, parent = turn.draft.prompt_ids.tolist(), turn.parent
    spelled = renderer.spell(ids)
    before = None if parent is None else player.model.ledger[parent].draft
    if not whole.endswith(spelled) and not renderer.survives(life.messages, life.system):
        tally.skip("rendering", "The tokenizer does not decode what it encodes.")
        return
    where = f"turn {turn.index}: the prompt's new part {spelled[-200:]!r}"
    closer = player.connected.policy.template.closer_id
    if before is not None and (what := _cut_off_in(before)) is not None:
        spell_closer = renderer.spell([closer])
        tags = renderer.reasoning(spell_closer) if what == "reasoning" else renderer.call(spell_closer)
        if tags is None:
            tally.skip("rendering", f"The template does not show how it closes {what} that was cut off.")
            return
        if tags[2]:
            ids_of_tags = [renderer.ids(tag) for tag in tags[:2]]
            _still_open(before.output_ids.tolist(), ids_of_tags, f"{where} closes {what}", tally)
        tally.hold("rendering", spelled.startswith(tags[2]), f"{where} does not close {what} with {tags[2]!r}.")
        spelled = spelled.removeprefix(tags[2])  # what is closed stands in the answer, where a template may hide it
    end = whole if before is None else whole[-len(spelled) :]
    mine, others = apart(spelled, end)
    tally.hold("rendering", end == spelled, f"{where} says {mine!r} where the template says {others!r}.")
    stem = whole[: len(whole) - len(spelled)]
    closed = ""
    if before is not None and len(before.output_ids) and int(before.output_ids[-1]) == closer:
        closed = renderer.spell([closer])
        tally.hold("rendering", stem.endswith(closed), f"{where} does not go on where the answer ended.")
    if renderer.is_plain(life.messages, life.system) and (closed or before is None):
        own = renderer.ids(closed + spelled)[-len(ids) :]
        tally.hold("tokens", own == ids, f"{where} is encoded as {ids}, by the tokenizer as {own}.")
    else:
        tally.skip("tokens", "Messages spell a control token or a bracket, or the answer was cut off.")


def ended_in_reasoning(draft: Draft) -> bool:
    """Return whether a stop token ended an answer in its reasoning; a stop string, which is no token, cuts it off."""
    return draft.finish == Finish.STOP and not isinstance(draft.stop, str) and not draft.reasoning_closed


def _cut_off_in(draft: Draft) -> str | None:
    """Return what the ledger says that an answer was cut off in, where the client has to close that."""
    if not (draft.finish.cut_off or isinstance(draft.stop, str)):
        return None
    if not draft.reasoning_closed:
        return "reasoning"
    return "a call" if draft.calls and draft.calls[-1].status == CallStatus.TRUNCATED else None


def _still_open(output: list[int], tags: list[list[int]], closes: str, tally: Tally) -> None:
    """Look whether it was, where tags are tokens."""
    if all(len(tag) == 1 for tag in tags):
        (begin,), (end,) = tags
        last = next((token for token in reversed(output) if token in (begin, end)), begin)
        tally.hold("rendering", last == begin, f"{closes} that the answer had closed.")
