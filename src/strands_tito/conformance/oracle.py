"""An independent judge of ledgers: slow, obvious, and sharing no code with `tito_core`.

It rebuilds every path of a rollout out of what was sent and what came back, as `wire_reading` reads it, and compares
that with what the ledger says. A ledger comes to it as plain lists."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from strands_tito.conformance.column_oracle import beside
from strands_tito.conformance.oracle_turn import OracleTurn, Problem, float32
from strands_tito.conformance.wire_reading import Heard


@dataclass
class Trained:
    """One trajectory as a trainer gets it."""

    ids: list[int]
    mask: list[int]
    logprobs: list[float]
    turns: list[int]


def compare(turns: Sequence[OracleTurn], heard: Sequence[Heard], stop_ids: Sequence[int]) -> Iterator[Problem]:
    """Compare each turn with what went over the wire.

    Args:
        turns: The ledger's turns, in commit order.
        heard: The wire's generations.
        stop_ids: Ids that end a turn of the model.
    """
    by_name: dict[str, list[Heard]] = {}
    for one in heard:
        by_name.setdefault(one.name, []).append(one)
    paths: list[list[int]] = []
    for turn in turns:
        said = by_name.get(turn.request, [])
        before = [] if turn.parent is None else paths[turn.parent]
        paths.append(before + turn.prompt + turn.output)
        if len(said) != 1:
            yield (
                "answers",
                f"turn {turn.index} names the request {turn.request!r}, which was answered {len(said)} times.",
            )
            continue
        for name, problem in _one(turn, before, said[0], set(stop_ids)):
            yield name, f"turn {turn.index}: {problem}"


def _one(turn: OracleTurn, before: list[int], said: Heard, stop_ids: set[int]) -> Iterator[Problem]:
    if before + turn.prompt != said.prompt:
        at = _apart(before + turn.prompt, said.prompt)
        yield "prompt", f"the path and the delta differ from what was sent at token {at}."
    if said.echoed is None:
        yield "echo", "the server echoed no prompt."
    elif said.echoed != said.prompt:
        yield "echo", f"the server read another prompt than was sent, from token {_apart(said.echoed, said.prompt)} on."
    if turn.output != said.output:
        yield "output", f"the ledger's output differs from the answer at token {_apart(turn.output, said.output)}."
    if said.logprob_ids != said.output:
        yield "logprobs", "the answer's logprobs are those of other tokens."
    if [float32(value) for value in said.logprobs] != turn.logprobs:
        yield "logprobs", "the ledger's logprobs differ from the answer's."
    if any(not math.isfinite(value) or value > 1e-4 or value <= -9999 for value in turn.logprobs):
        yield "logprobs", "a logprob is none."
    if said.prompt_tokens is not None and said.prompt_tokens != len(said.prompt):
        yield "usage", f"the server counted {said.prompt_tokens} prompt tokens of {len(said.prompt)}."
    if said.completion_tokens is not None and said.completion_tokens != len(said.output):
        yield "usage", f"the server counted {said.completion_tokens} completion tokens of {len(said.output)}."
    yield from beside(turn, said, len(before))
    if turn.cached_tokens != said.cached_tokens or not 0 <= (said.cached_tokens or 0) <= len(said.prompt):
        yield (
            "cached",
            f"{said.cached_tokens} tokens of {len(said.prompt)} were cached; the ledger has {turn.cached_tokens}.",
        )
    yield from _finish(turn, said, stop_ids)
    unsaid: list[tuple[int, int, str | None]] = [(0, len(said.output), None)]
    spans = list(said.versions or ()) or unsaid
    if [tuple(span) for span in spans] != [tuple(span) for span in turn.versions]:
        yield "versions", f"the answer's weight versions are {spans}, the ledger's {turn.versions}."
    ends = [0, *(stop for _, stop, _ in spans)]
    if [start for start, _, _ in spans] != ends[:-1] or ends[-1] != len(said.output):
        yield "versions", f"the spans {spans} do not tile {len(said.output)} tokens."


def _finish(turn: OracleTurn, said: Heard, stop_ids: set[int]) -> Iterator[Problem]:
    ends = stop_ids | set(said.sampling.get("stop_token_ids") or ())
    limit = said.sampling.get("max_tokens", said.sampling.get("max_new_tokens"))
    least = said.sampling.get("min_tokens") or said.sampling.get("min_new_tokens") or 0
    if turn.finish != said.finish:
        yield "finish", f"the answer ended by {said.finish!r}, the ledger says {turn.finish!r}."
    last = said.output[-1] if said.output else None
    if said.finish == "length" and len(said.output) != limit:
        yield "finish", f"cut off for length after {len(said.output)} tokens, though {limit} were asked for."
    if said.finish == "length" and last in ends and not said.sampling.get("ignore_eos") and len(said.output) > least:
        yield "finish", f"it ended by length, though its last token {last} is one that stops."
    if said.finish == "stop" and not isinstance(turn.stop, str) and last not in ends and not turn.constrained:
        yield "finish", f"it ended by stop, but its last token {last} stops nothing."
    if isinstance(turn.stop, int) and turn.stop != last:
        yield "finish", f"the stop token is {turn.stop}, the last one {last}."
    if limit is not None and len(said.output) > limit:
        yield "finish", f"{len(said.output)} tokens came where at most {limit} were asked for."
    early = [at for at, token in enumerate(said.output[:-1]) if token in ends]
    if early and not said.sampling.get("ignore_eos") and early[0] >= least:
        yield "finish", f"it went on after the stop token at {early[0]}."


def trained(turns: Sequence[OracleTurn], trajectories: Sequence[Trained]) -> Iterator[Problem]:
    """Compare what a trainer gets with the turns: each path whole, each sampled token trained once."""
    paths: dict[int, list[int]] = {}
    masks = {turn.index: 0 for turn in turns}
    by_index = {turn.index: turn for turn in turns}
    for turn in turns:
        paths[turn.index] = ([] if turn.parent is None else paths[turn.parent]) + turn.prompt + turn.output
    for trajectory in trajectories:
        leaf = trajectory.turns[-1]
        if trajectory.ids != paths[leaf]:
            yield (
                "trajectory",
                f"the trajectory that ends in turn {leaf} differs at token {_apart(trajectory.ids, paths[leaf])}.",
            )
            continue
        at = 0
        for index in trajectory.turns:
            turn = by_index[index]
            prompt, end = at + len(turn.prompt), at + len(turn.prompt) + len(turn.output)
            if any(trajectory.mask[at:prompt]):
                yield "mask", f"a prompt token of turn {index} has loss mask 1."
            if turn.constrained and any(trajectory.mask[prompt:end]):
                yield "mask", f"a token of turn {index} is trained that a grammar chose."
            if not all(math.isnan(value) for value in trajectory.logprobs[at:prompt]):
                yield "alignment", f"a prompt token of turn {index} has a logprob."
            if trajectory.logprobs[prompt:end] != turn.logprobs:
                yield "alignment", f"the logprobs of turn {index} are not beside its tokens."
            masks[index] += sum(trajectory.mask[prompt:end])
            at = end
    for index, count in masks.items():
        expected = 0 if by_index[index].constrained else len(by_index[index].output)
        if count != expected:
            yield "mask", f"{count} tokens of turn {index} are trained, expected {expected}, once each."


def spelled(heard: Sequence[Heard], decode: Callable[[list[int]], str]) -> Iterator[Problem]:
    """Compare the text that a server gives beside the ids with the ids' own, up to what it cuts off the end."""
    for one in heard:
        if one.text is None:
            continue
        own = decode(one.output)
        said = one.text.rstrip("\N{REPLACEMENT CHARACTER}")
        if not own.startswith(said) and not own.lstrip().startswith(said.lstrip()):
            yield "text", f"request {one.name!r}: the ids spell {own[-60:]!r}, the answer says {one.text[-60:]!r}."


def _apart(one: Sequence[int], other: Sequence[int]) -> int:
    pairs = enumerate(zip(one, other, strict=False))
    return next((at for at, (a, b) in pairs if a != b), min(len(one), len(other)))


@dataclass
class Parents:
    """The histories of all turns so far, as JSON a message, the answer last."""

    histories: list[list[str]] = field(default_factory=list)

    def fitting(self, history: list[str], messages: list[Any]) -> list[int]:
        """List the turns that a history may follow: the deepest whose own it begins with, and no answer after it."""
        fits: list[tuple[int, int]] = []
        for index, own in enumerate(self.histories):
            depth = len(own)
            rest = messages[depth - 1 :]
            if history[:depth] == own and all(message["role"] != "assistant" for message in rest):
                fits.append((depth, index))
        deepest = max(fits, default=(0, 0))[0]
        return [index for depth, index in fits if depth == deepest]

    def add(self, index: int, history: list[str]) -> None:
        """Keep what a turn answered, with its answer; turns come in commit order."""
        assert index == len(self.histories)
        self.histories.append(history)
