"""Checks of a finished conversation: the whole ledger, compared with the wire, the engine and the tokenizer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import numpy as np
from numpy.typing import NDArray

from strands_tito.inspect.verify import rescore
from tito_conformance import oracle
from tito_conformance.checks import COLUMN_CHECKS, NOWHERE, Tally, set_place
from tito_conformance.fixed import require_scores, require_unbiased
from tito_conformance.oracle import OracleImage, OracleTrajectory, OracleTurn
from tito_conformance.player import Player
from tito_conformance.target import ConnectedServer
from tito_conformance.wire import WireGeneration
from tito_core.backend import OptionalOutputs
from tito_core.backend.errors import ContextLengthError
from tito_core.backend.sampling import SamplingParams
from tito_core.ledger import Ledger, Provenance, Turn

RESPONSE_CHECKS = ("answers", "prompt", "logprobs", "cached", "finish", "versions", "text")
"""Checks of the ledger against the server's responses, on its wire or in its backend."""
NEEDED_FIELDS = {"answers": {"echoed"}, "images": {"media"}}
"""Response fields of a check that a backend may declare as unreported (`EngineInfo.unreported`)."""
REPORTED: Mapping[str, Callable[[WireGeneration], bool]] = {
    "cached": lambda answer: answer.cached_tokens is not None,
    "versions": lambda answer: any(version is not None for _, _, version in answer.versions or ()),
}
"""Whether an answer reports what a check is about; if not, only the ledger's None was compared."""
NOT_REPORTED = "The answer does not report it."
UNREPORTED = "The backend declares that its server does not report it."
LEAST_FOR_BIAS = 8
"""Tokens of an answer below which their mean difference says little."""
ANSWER_BIAS = 0.3
"""Share of the tolerance that the mean and the median of one answer's differences may reach."""
LEAST_SHARED = 0.5
"""Share of a row's experts that must be equal at least: a near-tie of a router exchanges one or two of them."""
MOST_CHANGED = {"float32": 0.001, "float16": 0.01}
"""Share of all experts that may be others on a second read, by the server's dtype: how often a near-tie falls."""
OTHERWISE_CHANGED = 0.05
"""The same share for any other dtype, such as bfloat16: an allowance, since no rate of near-ties was measured."""
ALWAYS_ALLOWED = 4
"""Experts of a path that may be others, however short it is."""
_MISSING = -1


async def close(player: Player) -> None:
    """Check a finished conversation, and drop its part of the logs."""
    ledger, tally, server = player.model.ledger, player.tally, player.server
    set_place()
    if len(ledger):
        turns = _oracle_turns(ledger, player.optional_outputs)
        _check_responses(player, turns)
        problems = oracle.check_trajectories(turns, list(_oracle_trajectories(ledger)))
        for check, problem, index in problems:
            tally.require(check, False, problem, where=player.where(index))
        tally.require("mask", True, "", len(turns))
        _check_control_tokens(player)
        await _check_scores(player)
        if player.optional_outputs.routed_experts:
            await _check_second_read(ledger, player.optional_outputs, server, tally)
    server.recorder.clear()


def _check_responses(player: Player, turns: list[OracleTurn]) -> None:
    server, tally = player.server, player.tally
    generations = server.recorder.generations()
    unreported = server.policy.info.unreported
    skipped = {check for check, fields in NEEDED_FIELDS.items() if fields <= unreported}
    for check in skipped:
        tally.skip(check, UNREPORTED, len(turns))
    stop_ids = server.policy.stop_token_ids
    columns = [check for check, output in COLUMN_CHECKS.items() if getattr(player.optional_outputs, output)]
    if "images" not in skipped and any(turn.images for turn in turns):
        columns.append("images")
    checks = [*(check for check in RESPONSE_CHECKS if check not in ("text", *skipped)), *columns]
    for check, problem, *place in oracle.compare(turns, generations, stop_ids, echoes="answers" not in skipped):
        if check != "images" or "images" not in skipped:
            tally.require(check, False, problem, where=player.where(*place))
    for check in checks:
        reports = sum(map(REPORTED.get(check, lambda _: True), generations))
        count = min(reports, len(turns))  # cancelled answers are in no turn
        tally.require(check, True, "", count)
        if count < len(turns):
            tally.skip(check, NOT_REPORTED, len(turns) - count)
    index_of = {turn.request_id: turn.index for turn in turns}
    for each in generations:
        index = index_of.get(each.request_id)
        server.compare_text(each, NOWHERE if index is None else player.where(index))
    if all(each.text is None for each in generations):
        tally.skip("text", "The server returns no text with the ids.", len(turns))
    # The client's own measurements, as after seconds without a request, are on the wire and not in the recorder.
    known = server.recorder.answers.keys() - index_of.keys()
    lost = [each.request_id for each in generations if each.request_id in known]
    problem = f"{len(lost)} answers are in no turn ({lost[:3]}), but only {player.abandoned} were cancelled."
    tally.require("lost", len(lost) <= player.abandoned, problem)


def _check_control_tokens(player: Player) -> None:
    """Check that no control token has provenance PROMPT. The set of control tokens is worked out here independently."""
    server, tokenizer = player.server, player.server.policy.tokenizer
    template = str(tokenizer.chat_template)
    added = tokenizer.added_tokens_decoder.items()
    controls = {index for index, token in added if token.special or str(token) in template}
    controls |= set(tokenizer.all_special_ids) | set(server.policy.stop_token_ids)
    for turn in player.model.ledger:
        ids, provenance = turn.draft.prompt_ids, turn.draft.prompt_provenance.copy()
        start = turn.draft.prompt_length - len(ids)
        for span in turn.draft.media:  # a picture is content, and its placeholders are its tokens
            provenance[span.offset - start :][: span.length] = Provenance.SCAFFOLD
        found = sorted(controls.intersection(ids[provenance == Provenance.PROMPT].tolist()))
        problem = f"the control ids {found} come from message content."
        player.tally.require("inert", not found, problem, where=player.where(turn.index))


async def _check_scores(player: Player) -> None:
    ledger, server, tally = player.model.ledger, player.server, player.tally
    result = await rescore(ledger, server.policy.backend, version=server.live_version)
    tolerance = server.tolerance_nats
    for index, positions, signed in result.by_turn:
        if not len(signed):
            continue
        at = int(positions[int(np.argmax(np.abs(signed)))])
        own, where = ledger[index].draft.logprobs[positions], player.where(index, at)
        require_scores(server, tally, "rescored", own, signed, where, places=positions.tolist())
        if len(signed) >= LEAST_FOR_BIAS:
            require_unbiased(server, tally, signed, ANSWER_BIAS, player.where(index))
    if len(result.prompt_differences):
        worst = float(np.max(result.prompt_differences))
        problem = (
            f"the logprob of a prompt token differs by {worst:.4g} nats from the server's score, over {tolerance:g}."
        )
        tally.require("scored", worst <= tolerance, problem, len(result.prompt_differences))
        server.recorder.compared("prompt scores", "score", *(turn.draft.engine.request_id for turn in ledger))
    if result.not_comparable:
        reason = "Sampled at a temperature, under penalties or a grammar, or on a path with a sampled placeholder."
        if server.live_version is not None:
            reason = reason.replace("Sampled", "Sampled by older weights,", 1)
        tally.skip("rescored", reason, result.not_comparable)


async def _check_second_read(
    ledger: Ledger, optional_outputs: OptionalOutputs, server: ConnectedServer, tally: Tally
) -> None:
    """Send every path as one prompt, and compare its experts with the rows that arrived turn by turn."""
    if server.live_version is not None:
        tally.skip("routed", "The weights changed, and rows do not say which weights routed them.")
        return
    requested = OptionalOutputs(routed_experts=optional_outputs.routed_experts)
    sampling = SamplingParams(max_new_tokens=1, temperature=1.0, top_k=1, ignore_eos=True)
    for trajectory in ledger.trajectories:
        ids = trajectory.token_ids
        set_place(turn=trajectory.path[-1].index)
        columns = [turn.draft.extras["routed_experts"] for turn in trajectory.path if turn.draft.extras]
        by_turn = np.full((len(ids), *columns[0].shape[1:]), _MISSING, np.int64)
        for column in columns:
            by_turn[column.start : column.start + column.rows] = column.values
        try:
            response = await server.answer(ids, sampling, outputs=requested)
        except ContextLengthError:
            tally.skip("routed", "The path leaves no room for one more token.")
            continue
        at_once = response.columns["routed_experts"].values[: len(ids)].astype(np.int64)
        rows = slice(0, len(ids) - 1)  # the last token was not routed yet
        missing = np.flatnonzero((by_turn[rows] == _MISSING).any(axis=(1, 2)))
        problem = f"token {missing[0] if len(missing) else 0} of a path has no experts."
        tally.require("routed", by_turn.shape == at_once.shape and not len(missing), problem)
        _check_rows(by_turn[rows], at_once[rows], server, tally)
        server.recorder.compared("experts", "second read", *(turn.draft.engine.request_id for turn in trajectory.path))


def _check_rows(by_turn: NDArray[np.int64], at_once: NDArray[np.int64], server: ConnectedServer, tally: Tally) -> None:
    """Compare the experts of each token, shape (n, layers, experts)."""
    if not len(by_turn):
        return
    ordered = np.sort(by_turn, -1)
    twice = np.flatnonzero((ordered[..., 1:] == ordered[..., :-1]).any(axis=(1, 2)))
    problem = f"token {int(twice[0]) if len(twice) else 0} of a path lists an expert twice in one layer."
    tally.require("routed", not len(twice), problem)
    shared = (by_turn[..., :, None] == at_once[..., None, :]).any(-1).mean(axis=(1, 2))
    worst = int(np.argmin(shared))
    problem = (
        f"token {worst} of {len(shared)} of a path shares {shared[worst]:.0%} of its experts with those that it has "
        f"when the path is sent as one prompt, less than {LEAST_SHARED:.0%}."
    )
    tally.require("routed", bool(shared[worst] >= LEAST_SHARED), problem, len(shared))
    changed, most = 1 - float(shared.mean()), MOST_CHANGED.get(server.dtype, OTHERWISE_CHANGED)
    problem = (
        f"{changed:.2%} of the experts of {len(shared)} tokens of a path are others when the path is sent as one "
        f"prompt, more than {most:.2%}: near-ties of a router are rarer."
    )
    tally.require("routed", changed * by_turn.size <= max(ALWAYS_ALLOWED, most * by_turn.size), problem)


def _oracle_turns(ledger: Ledger, outputs: OptionalOutputs) -> list[OracleTurn]:
    """Convert every turn, in commit order, to what the oracle reads."""
    names = ["top_ids", "top_logprobs"] if outputs.top_logprobs else []
    names += [name for name in ("prompt_logprobs", "routed_experts", "sampling_mask") if getattr(outputs, name)]
    return [_oracle_turn(turn, names) for turn in ledger]


def _oracle_turn(turn: Turn, outputs: list[str]) -> OracleTurn:
    draft = turn.draft
    return OracleTurn(
        index=turn.index,
        parent=turn.parent,
        delta_ids=draft.prompt_ids.tolist(),
        provenance=draft.prompt_provenance.tolist(),
        output_ids=draft.output_ids.tolist(),
        logprobs=draft.logprobs.tolist(),
        finish=str(draft.finish),
        stop=draft.stop,
        request_id=draft.engine.request_id,
        cached_tokens=draft.engine.cached_tokens,
        versions=[(span.start, span.stop, span.version) for span in draft.engine.versions],
        constrained=draft.constrained,
        max_new_tokens=draft.max_new_tokens,
        optional_outputs=outputs,
        columns={name: (column.start, column.values.tolist()) for name, column in draft.extras.items()},
        images=[OracleImage(span.offset, span.length, span.sha256.hex()) for span in draft.media],
    )


def _oracle_trajectories(ledger: Ledger) -> Iterable[OracleTrajectory]:
    """Convert every trajectory to what the oracle reads."""
    for path in ledger.iter_trajectories():
        yield OracleTrajectory(
            path.token_ids.tolist(),
            path.loss_mask.tolist(),
            path.logprobs.tolist(),
            [turn.index for turn in path.path],
        )
