"""Law 7 on each turn: the delta is the template's own rendering of the history."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from strands_tito.conformance.agents import SimulatedAgent
from strands_tito.conformance.image_oracle import collapsed
from strands_tito.conformance.laws import Tally, Where
from strands_tito.conformance.oracle_turn import OracleImage
from strands_tito.conformance.rendering import differing_excerpts
from tito_core.chat.messages import MALFORMED_CALL
from tito_core.ledger import Draft, Turn
from tito_core.ledger.turn import Finish
from tito_core.parsing.parsed import CallStatus

if TYPE_CHECKING:
    from strands_tito.conformance.player import Player


def check_rendering(player: Player, agent: SimulatedAgent, turn: Turn) -> None:
    """Compare a turn's delta with the template's own rendering of the whole history."""
    tally, renderer = player.tally, player.renderer
    if any(use["name"] == MALFORMED_CALL for use in agent.all_calls()):
        tally.skip("rendering", "The history holds a malformed call, whose feedback the client writes.")
        return
    whole = renderer.text(agent.messages, agent.system, player.server.tools)
    if whole is None:
        tally.skip("rendering", "The template refuses the history.")
        return
    spans = [OracleImage(span.offset, span.length, "") for span in turn.draft.media]
    start = turn.path_length - turn.own_length
    ids = collapsed(turn.draft.prompt_ids.tolist(), [replace(span, offset=span.offset - start) for span in spans])
    parent = turn.parent
    delta = renderer.decode(ids)
    before = None if parent is None else player.model.ledger[parent].draft
    if not whole.endswith(delta) and not renderer.survives(agent.messages, agent.system):
        tally.skip("rendering", "The tokenizer does not decode what it encodes.")
        return
    place = player.where(turn.index)
    where = f"the delta {delta[-200:]!r}"
    closer_id = player.server.policy.template.closer_id
    if before is not None and (part := _truncated_part(before)) is not None:
        closer = renderer.decode([closer_id])
        tags = renderer.reasoning_tags(closer) if part == "reasoning" else renderer.call_tags(closer)
        if tags is None:
            tally.skip("rendering", f"The template does not show how it closes truncated {part}.")
            return
        if tags[2]:
            tag_ids = [renderer.encode(tag) for tag in tags[:2]]
            _check_still_open(before.output_ids.tolist(), tag_ids, f"{where} closes {part}", tally, place)
        tally.require(
            "rendering", delta.startswith(tags[2]), f"{where} does not close {part} with {tags[2]!r}.", 1, place
        )
        delta = delta.removeprefix(tags[2])  # the closed part belongs to the answer, which a template may hide
    end = whole if before is None else whole[-len(delta) :]
    own, expected = differing_excerpts(delta, end)
    tally.require("rendering", end == delta, f"{where} has {own!r} where the template writes {expected!r}.", 1, place)
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
        tally.require("tokens", expected_ids == ids, problem, 1, place)
    else:
        tally.skip("tokens", "Messages spell a control token or a bracket, or the answer was truncated.")


def check_order_of_pictures(player: Player, agent: SimulatedAgent, turn: Turn) -> None:
    """Compare the pictures of a turn's path with those of the whole history, in the template's order."""
    found = [span.sha256.hex() for each in player.model.ledger.path(turn.index) for span in each.draft.media]
    expected = player.renderer.pictures(agent.messages, agent.system)
    if found or expected:
        short = [[digest[:12] for digest in digests] for digests in (found, expected)]
        problem = f"the path has the pictures {short[0]}, the history {short[1]}."
        player.tally.require("images", found == expected, problem, where=player.where(turn.index))


def ended_in_reasoning(draft: Draft) -> bool:
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
