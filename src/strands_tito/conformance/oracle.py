"""An independent judge of ledgers: slow, obvious, and without any code of `tito_core`.

It rebuilds every path of a rollout from the requests and responses, as `wire_reading` reads them, and compares the
result with the ledger, which it gets as plain lists.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from strands_tito.conformance.column_oracle import compare_columns
from strands_tito.conformance.image_oracle import collapsed, compare_images
from strands_tito.conformance.oracle_turn import OracleImage, OracleTurn, Problem, float32
from strands_tito.conformance.wire_reading import WireGeneration


@dataclass
class OracleTrajectory:
    """One trajectory as a trainer gets it.

    Attributes:
        ids: All token ids.
        mask: The loss mask.
        logprobs: One for each token, NaN on prompt tokens.
        turns: Indices of the turns on the path, root first.
    """

    ids: list[int]
    mask: list[int]
    logprobs: list[float]
    turns: list[int]


def compare(
    turns: Sequence[OracleTurn], generations: Sequence[WireGeneration], stop_ids: Sequence[int]
) -> Iterator[tuple[str, str, *tuple[int, ...]]]:
    """Compare each turn with its generation on the wire. Yield the check, the problem, and the turn's index.

    The index of the output token comes last, if the problem is about one.

    Args:
        turns: The ledger's turns, in commit order.
        generations: The generations on the wire.
        stop_ids: Ids that end a turn of the model.
    """
    by_id: dict[str, list[WireGeneration]] = {}
    for generation in generations:
        by_id.setdefault(generation.request_id, []).append(generation)
    paths: list[list[int]] = []
    live, replaced = None, set[str]()
    images: list[list[OracleImage]] = []
    for turn in turns:
        answers = by_id.get(turn.request_id, [])
        before = [] if turn.parent is None else paths[turn.parent]
        paths.append(before + turn.delta_ids + turn.output_ids)
        images.append(([] if turn.parent is None else images[turn.parent]) + turn.images)
        if len(answers) != 1:
            yield (
                "answers",
                f"the request id {turn.request_id!r} was answered {len(answers)} times.",
                turn.index,
            )
            continue
        problems: Iterator[Problem] = itertools.chain(
            compare_images(before + turn.delta_ids, images[-1], answers[0]),
            _compare_turn(turn, before, images[-1], answers[0], set(stop_ids)),
        )
        for problem in problems:
            yield (problem[0], problem[1], turn.index, *problem[2:])
        for _, _, version in turn.versions:
            if version in replaced:
                yield "versions", f"the weight version {version!r} comes back after {live!r}.", turn.index
            if version is not None and version != live:
                replaced |= set() if live is None else {live}
                live = version


def _compare_turn(
    turn: OracleTurn, before: list[int], images: list[OracleImage], answer: WireGeneration, stop_ids: set[int]
) -> Iterator[Problem]:
    prompt, output = before + turn.delta_ids, answer.output_ids
    if answer.answered_id is not None and not answer.answered_id.endswith(answer.request_id):
        yield "answers", f"the answer to {answer.request_id!r} names the request {answer.answered_id!r}."
    sent = collapsed(prompt, images)
    if sent != answer.prompt_ids:
        at = _first_difference(sent, answer.prompt_ids)
        yield "prompt", f"the parent's path and the delta differ from the sent prompt at token {at}."
    if answer.echoed_ids is None:
        yield "echo", "the server did not echo the prompt."
    elif answer.echoed_ids != prompt:
        at = _first_difference(answer.echoed_ids, prompt)
        yield "echo", f"the echoed prompt differs from the ledger's at token {at}."
    if turn.output_ids != output:
        at = _first_difference(turn.output_ids, output)
        yield "output", f"the ledger's output differs from the response at token {at}.", at
    if answer.logprob_ids != output:
        at = _first_difference(answer.logprob_ids, output)
        yield "logprobs", "the response's logprobs belong to other tokens than its output.", at
    reported = [float32(value) for value in answer.logprobs]
    if reported != turn.logprobs:
        at = _first_difference(reported, turn.logprobs)
        yield "logprobs", "the ledger's logprobs differ from the response's.", at
    for at, value in enumerate(turn.logprobs):
        if not math.isfinite(value) or value > 1e-4 or value <= -9999:
            yield "logprobs", f"the logprob {value} is not finite, positive, or a sentinel.", at
    if answer.prompt_tokens is not None and answer.prompt_tokens != len(prompt):
        yield "usage", f"the server counted {answer.prompt_tokens} prompt tokens, the ledger has {len(prompt)}."
    if answer.completion_tokens is not None and answer.completion_tokens != len(output):
        yield "usage", f"the server counted {answer.completion_tokens} completion tokens, the output has {len(output)}."
    yield from compare_columns(turn, answer, prompt, len(before))
    if turn.cached_tokens != answer.cached_tokens or not 0 <= (answer.cached_tokens or 0) < len(prompt):
        yield (
            "cached",
            f"the server has {answer.cached_tokens} cached tokens of {len(prompt)}, the ledger {turn.cached_tokens}.",
        )
    yield from _compare_finish(turn, answer, stop_ids)
    yield from _compare_versions(turn, answer)


def _compare_versions(turn: OracleTurn, answer: WireGeneration) -> Iterator[Problem]:
    count = len(answer.output_ids)
    unknown: list[tuple[int, int, str | None]] = [(0, count, None)]
    spans = list(answer.versions or ()) or unknown
    if [tuple(span) for span in spans] != [tuple(span) for span in turn.versions]:
        yield "versions", f"the response's weight versions are {spans}, the ledger's {turn.versions}."
    ends = [0, *(stop for _, stop, _ in spans)]
    if [start for start, _, _ in spans] != ends[:-1] or ends[-1] != count:
        yield "versions", f"the spans {spans} do not tile {count} tokens."


def _compare_finish(turn: OracleTurn, answer: WireGeneration, stop_ids: set[int]) -> Iterator[Problem]:
    output, sampling = answer.output_ids, answer.sampling
    ends = stop_ids | set(sampling.get("stop_token_ids") or ())
    limit = sampling.get("max_tokens", sampling.get("max_new_tokens"))
    least = sampling.get("min_tokens") or sampling.get("min_new_tokens") or 0
    if turn.finish != answer.finish:
        yield "finish", f"the response's finish reason is {answer.finish!r}, the ledger's {turn.finish!r}."
    last = output[-1] if output else None
    if answer.finish == "length" and len(output) != limit:
        yield "finish", f"the finish reason is length after {len(output)} tokens, but the limit was {limit}."
    if answer.finish == "length" and last in ends and not sampling.get("ignore_eos") and len(output) > least:
        yield "finish", f"the finish reason is length, but the last token {last} is a stop id.", len(output) - 1
    if answer.finish == "stop" and not isinstance(turn.stop, str) and last not in ends and not turn.constrained:
        yield "finish", f"the finish reason is stop, but the last token {last} is not a stop id.", len(output) - 1
    if answer.finish == "stop" and last in ends and turn.stop is None:
        yield "finish", f"the last token {last} is a stop id, but the ledger records no stop."
    if isinstance(turn.stop, int) and turn.stop != last:
        yield "finish", f"the stop token is {turn.stop}, but the last token is {last}."
    if limit is not None and len(output) > limit:
        yield "finish", f"the response has {len(output)} tokens, the limit was {limit}."
    early = [at for at, token in enumerate(output[:-1]) if token in ends]
    if early and not sampling.get("ignore_eos") and early[0] >= least:
        yield "finish", f"the generation continued after the stop token at {early[0]}.", early[0]


def check_trajectories(
    turns: Sequence[OracleTurn], trajectories: Sequence[OracleTrajectory]
) -> Iterator[tuple[str, str, int]]:
    """Compare trajectories with the turns: each path is complete, and each sampled token is trained once.

    Yield the check, the problem, and the turn's index.
    """
    paths: dict[int, list[int]] = {}
    trained = {turn.index: 0 for turn in turns}
    by_index = {turn.index: turn for turn in turns}
    for turn in turns:
        before = [] if turn.parent is None else paths[turn.parent]
        paths[turn.index] = before + turn.delta_ids + turn.output_ids
    for trajectory in trajectories:
        leaf = trajectory.turns[-1]
        if trajectory.ids != paths[leaf]:
            at = _first_difference(trajectory.ids, paths[leaf])
            yield "trajectory", f"the trajectory that ends in turn {leaf} differs at token {at}.", leaf
            continue
        start = 0
        for index in trajectory.turns:
            turn = by_index[index]
            output, end = start + len(turn.delta_ids), start + len(turn.delta_ids) + len(turn.output_ids)
            if any(trajectory.mask[start:output]):
                yield "mask", f"a prompt token of turn {index} has loss mask 1.", index
            if turn.constrained and any(trajectory.mask[output:end]):
                yield "mask", f"a token of turn {index} has loss mask 1, but was sampled under a grammar.", index
            if not all(math.isnan(value) for value in trajectory.logprobs[start:output]):
                yield "alignment", f"a prompt token of turn {index} has a logprob.", index
            if trajectory.logprobs[output:end] != turn.logprobs:
                yield "alignment", f"the logprobs of turn {index} are not aligned with its tokens.", index
            trained[index] += sum(trajectory.mask[output:end])
            start = end
    for index, count in trained.items():
        expected = 0 if by_index[index].constrained else len(by_index[index].output_ids)
        if count != expected:
            yield "mask", f"{count} tokens of turn {index} are trained, expected {expected}, once each.", index


def check_text(
    generations: Sequence[WireGeneration], decode: Callable[[list[int]], str]
) -> Iterator[tuple[str, str, str]]:
    """Compare the text that a server reports with its decoded ids. Yield the check, the problem, and the request."""
    for generation in generations:
        if generation.text is None:
            continue
        text, decoded = generation.text, decode(generation.output_ids)
        # An aborted answer may end before its last tokens were decoded.
        cut = generation.finish == "abort" and decoded.startswith(text.rstrip(INCOMPLETE))
        if not cut and _shown(text) not in set(map(_shown, _texts(generation, decoded, decode))):
            yield (
                "text",
                f"the ids decode to {decoded[-60:]!r}, the response's text is {text[-60:]!r}.",
                generation.request_id,
            )


INCOMPLETE = "\N{REPLACEMENT CHARACTER}"
"""What decoders write for the bytes of an incomplete character, unless they withhold it."""


def _shown(text: str) -> str:
    return text.lstrip().rstrip(INCOMPLETE)


def _texts(generation: WireGeneration, decoded: str, decode: Callable[[list[int]], str]) -> Iterator[str]:
    """Yield the texts that an answer may have: whole, or without the stop token or stop string that ended it."""
    yield decoded
    if generation.finish == "stop":
        yield decode(generation.output_ids[:-1])
        for stop in generation.sampling.get("stop") or ():
            before, found, _ = decoded.partition(stop)
            yield before
            yield before + found


def _first_difference(one: Sequence[Any], other: Sequence[Any]) -> int:
    pairs = enumerate(zip(one, other, strict=False))
    return next((at for at, (a, b) in pairs if a != b), min(len(one), len(other)))


@dataclass
class ParentOracle:
    """Finds the parent that a turn must have.

    Attributes:
        histories: For each turn in commit order, its whole history with the answer last, one JSON text a message.
    """

    histories: list[list[str]] = field(default_factory=list)

    def candidates(self, history: list[str], messages: list[Any]) -> list[int]:
        """Return the turns that may be the parent of `history`.

        These are the turns whose own history is the longest prefix of it, with no answer after that prefix.
        """
        matches: list[tuple[int, int]] = []
        for index, own in enumerate(self.histories):
            depth = len(own)
            rest = messages[depth - 1 :]
            if history[:depth] == own and all(message["role"] != "assistant" for message in rest):
                matches.append((depth, index))
        deepest = max(matches, default=(0, 0))[0]
        return [index for depth, index in matches if depth == deepest]

    def add(self, index: int, history: list[str]) -> None:
        """Add a turn's history, its answer included. Turns are added in commit order."""
        assert index == len(self.histories)
        self.histories.append(history)
