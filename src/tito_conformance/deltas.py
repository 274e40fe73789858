"""Law 7 on each turn: what it added to the prompt is the template's own rendering of the history."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tito_conformance.agents import TOOLS, Life
from tito_conformance.rendering import apart
from tito_core.chat.messages import MALFORMED_CALL
from tito_core.ledger import Turn

if TYPE_CHECKING:
    from tito_conformance.player import Player


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
    end = whole if before is None else whole[-len(spelled) :]
    mine, others = apart(spelled, end)
    tally.hold("rendering", end == spelled, f"{where} says {mine!r} where the template says {others!r}.")
    stem = whole[: len(whole) - len(spelled)]
    closer = player.connected.policy.template.closer_id
    closed = ""
    if before is not None and len(before.output_ids) and int(before.output_ids[-1]) == closer:
        closed = renderer.spell([closer])
        tally.hold("rendering", stem.endswith(closed), f"{where} does not go on where the answer ended.")
    if renderer.is_plain(life.messages, life.system) and (closed or before is None):
        own = renderer.ids(closed + spelled)[-len(ids) :]
        tally.hold("tokens", own == ids, f"{where} is encoded as {ids}, by the tokenizer as {own}.")
    else:
        tally.skip("tokens", "Messages spell a control token or a bracket, or the answer was cut off.")
