"""What is checked once a conversation is over: the whole ledger, against the wire, the engine and the tokenizer."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from strands_tito.conformance import oracle, routing, wire_reading
from strands_tito.conformance.laws import OF_COLUMNS, Tally
from strands_tito.conformance.oracle import Trained
from strands_tito.conformance.oracle_turn import OracleTurn, Problem
from strands_tito.conformance.player import Player
from strands_tito.conformance.target import Connected
from strands_tito.inspect.verify import rescore
from tito_core import store
from tito_core.backend import OptionalOutputs
from tito_core.ledger import LawViolationError, Ledger, Provenance, Turn, check_ledger

OF_ANSWERS = ("answers", "prompt", "echo", "output", "logprobs", "usage", "cached", "finish", "versions", "text")
"""Checks of the ledger against what the server said, on its wire or to its backend."""
UNREPORTED = {"echo": {"echoed"}, "usage": {"prompt_tokens", "completion_tokens"}}
"""Checks that need fields which a backend may say that its server does not report (`EngineInfo.unreported`)."""
NOT_REPORTED = "The backend says that its server does not report it."
OF_TRAINING = ("trajectory", "mask", "alignment")
"""Checks of what a trainer gets."""
UNSPELLED = "An id that no token has was sampled: the tokenizer does not say how it is spelled."


async def close(player: Player) -> None:
    """Check a finished conversation, and forget its part of the logs."""
    ledger, tally, connected = player.model.ledger, player.tally, player.connected
    if len(ledger):
        try:
            check_ledger(ledger)
        except LawViolationError as error:
            tally.hold("ledger", False, str(error))
        tally.hold("ledger", True, "", len(ledger))
        turns = _told_turns(ledger, player.optional_outputs)
        _against_answers(player, turns)
        _count(tally, OF_TRAINING, oracle.trained(turns, list(_told_trajectories(ledger))), len(turns))
        _inert(ledger, connected, tally)
        _saved(ledger, tally)
        await _rescored(ledger, connected, tally)
        if player.optional_outputs.routed_experts:
            await routing.again(ledger, player.optional_outputs, connected, tally)
    connected.forget(player.first)


def _count(tally: Tally, names: Iterable[str], problems: Iterable[Problem], cases: int) -> None:
    for name, problem in problems:
        tally.hold(name, False, problem)
    for name in names:
        tally.hold(name, True, "", cases)


def _against_answers(player: Player, turns: list[OracleTurn]) -> None:
    connected, tally = player.connected, player.tally
    heard = connected.heard(player.first)
    unreported = connected.policy.info.unreported
    left_out = {name for name, needs in UNREPORTED.items() if needs <= unreported}
    for name in left_out:
        tally.skip(name, NOT_REPORTED, len(turns))
    stops = connected.policy.stop_token_ids
    columns = [name for name, column in OF_COLUMNS.items() if getattr(player.optional_outputs, column)]
    made = [*(name for name in OF_ANSWERS if name not in ("text", *left_out)), *columns]
    problems = (problem for problem in oracle.compare(turns, heard, stops) if problem[0] not in left_out)
    _count(tally, made, problems, len(turns))
    decode = connected.policy.tokenizer.decode
    _spelled(connected, tally, heard, len(turns))
    for one in heard:
        for stop in one.sampling.get("stop") or ():
            before = str(decode(one.output[:-1]))
            tally.hold("stopped", stop not in before, f"request {one.name!r} went on after {stop!r}: {before[-60:]!r}.")
    for turn in turns:
        if isinstance(turn.stop, str):
            problem = f"turn {turn.index} is said to have ended by {turn.stop!r}, which its ids do not spell."
            tally.hold("stopped", turn.stop in str(decode(turn.output)), problem)
    names = {turn.request for turn in turns}
    lost = [one.name for one in heard if one.name not in names]
    problem = f"{len(lost)} answers are in no turn ({lost[:3]}), and {player.given_up} were given up."
    tally.hold("lost", len(lost) <= player.given_up, problem)


def _spelled(connected: Connected, tally: Tally, heard: list[wire_reading.Heard], turns: int) -> None:
    tokenizer = connected.policy.tokenizer
    spoken = [one for one in heard if one.text is not None]
    if not spoken:
        tally.skip("text", "The server gives no text beside the ids.", turns)
    known = [one for one in spoken if None not in tokenizer.convert_ids_to_tokens(one.output)]
    if len(known) < len(spoken):  # a model may have more rows than its tokenizer has tokens
        tally.skip("text", UNSPELLED, len(spoken) - len(known))
    decode = tokenizer.decode
    _count(tally, ("text",) if known else (), oracle.spelled(known, lambda ids: str(decode(ids))), len(known))


def _inert(ledger: Ledger, connected: Connected, tally: Tally) -> None:
    """Look for control tokens among those that come from messages; which those are is worked out here anew."""
    tokenizer = connected.policy.tokenizer
    template = str(tokenizer.chat_template)
    added = tokenizer.added_tokens_decoder.items()
    controls = {index for index, token in added if token.special or str(token) in template}
    controls |= set(tokenizer.all_special_ids) | set(connected.policy.stop_token_ids)
    for turn in ledger:
        ids, provenance = turn.draft.prompt_ids, turn.draft.prompt_provenance
        found = sorted(controls.intersection(ids[provenance == Provenance.PROMPT].tolist()))
        tally.hold("inert", not found, f"turn {turn.index}: the control ids {found} come from what messages say.")


def _saved(ledger: Ledger, tally: Tally) -> None:
    as_json = store.to_json(ledger)
    same = store.to_json(store.from_json(as_json)) == as_json
    tally.hold("saved", same, "the ledger came back from JSON as another.")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rollout.tito"
        store.append(path, [ledger])
        [again] = store.read(path)
    tally.hold("saved", store.to_json(again) == as_json, "the ledger came back from a file as another.")


async def _rescored(ledger: Ledger, connected: Connected, tally: Tally) -> None:
    found = await rescore(ledger, connected.policy.backend, version=connected.live)
    tolerance = connected.target.tolerance_nats
    for check, differences, what in (
        ("rescored", found.differences, "a sampled token's"),
        ("scored", found.prompt_differences, "a prompt token's"),
    ):
        if len(differences):
            worst = float(np.max(differences))
            problem = f"{what} logprob lies {worst:.4g} nats from the server's own score, more than {tolerance:g}."
            tally.hold(check, worst <= tolerance, problem, len(differences))
    if found.not_comparable:
        why = "Sampled at a temperature, or under penalties or a grammar, that a score does not have."
        if connected.live is not None:
            why = "Sampled by weights that are gone, or at a temperature, under penalties or a grammar."
        tally.skip("rescored", why, found.not_comparable)


def controls_of(tokenizer: Any) -> tuple[str, ...]:
    """List the tokenizer's control strings that messages try to spell."""
    special = [str(token) for token in tokenizer.added_tokens_decoder.values()]
    return tuple(special[:64])


def _told_turns(ledger: Ledger, wanted: OptionalOutputs) -> list[OracleTurn]:
    """Return every turn, in commit order, with the names of the columns that were wanted."""
    names = ["top_ids", "top_logprobs"] if wanted.top_logprobs else []
    names += [name for name in ("prompt_logprobs", "routed_experts", "sampling_mask") if getattr(wanted, name)]
    return [_told(turn, names) for turn in ledger]


def _told_trajectories(ledger: Ledger) -> Iterable[Trained]:
    """Return every trajectory, as a trainer gets it."""
    for path in ledger.iter_trajectories():
        yield Trained(
            path.token_ids.tolist(),
            path.loss_mask.tolist(),
            path.logprobs.tolist(),
            [turn.index for turn in path.path],
        )


def _told(turn: Turn, wanted: list[str]) -> OracleTurn:
    draft = turn.draft
    return OracleTurn(
        index=turn.index,
        parent=turn.parent,
        prompt=draft.prompt_ids.tolist(),
        provenance=draft.prompt_provenance.tolist(),
        output=draft.output_ids.tolist(),
        logprobs=draft.logprobs.tolist(),
        finish=str(draft.finish),
        stop=draft.stop,
        request=draft.engine.request_id,
        cached_tokens=draft.engine.cached_tokens,
        versions=[(span.start, span.stop, span.version) for span in draft.engine.versions],
        constrained=draft.constrained,
        max_new_tokens=draft.max_new_tokens,
        optional_outputs=wanted,
        columns={name: (column.start, column.values.tolist()) for name, column in draft.extras.items()},
    )
