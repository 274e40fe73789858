"""An independent judge of ledgers: slow, obvious, and without any code of `tito_core`.

It rebuilds every path of a rollout from the requests and responses, as `wire` reads them, and compares the
result with the ledger, which it gets as plain lists.
"""

from __future__ import annotations

import ast
import base64
import itertools
import math
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any

from tito_conformance.wire import WireGeneration

Problem = tuple[str, str, *tuple[int, ...]]
"""Name of a check, a sentence that says what is wrong, and the index of the output token, if it is about one."""


@dataclass(frozen=True)
class OracleImage:
    """An image of a path: the offset and number of its placeholders, counted from the path's start, and its digest."""

    offset: int
    length: int
    sha256: str


@dataclass
class OracleTurn:
    """One turn of the ledger.

    Attributes:
        index: Place in commit order.
        parent: Index of the parent, or None.
        delta_ids: Prompt ids that the turn adds after its parent's last token.
        provenance: One value for each delta id.
        output_ids: Sampled ids.
        logprobs: One for each output id.
        finish: Why the generation ended.
        stop: The stop id or stop string that ended it, or None.
        request_id: The request's id.
        cached_tokens: The server's count, or None.
        versions: Weight versions as (start, end, version) over the output ids.
        constrained: Whether the turn was sampled under a grammar.
        max_new_tokens: Limit of the request.
        optional_outputs: Names of the columns that were requested.
        columns: Optional columns by name: the position of the first row, and the rows.
        images: The images of the delta.
    """

    index: int
    parent: int | None
    delta_ids: list[int]
    provenance: list[int]
    output_ids: list[int]
    logprobs: list[float]
    finish: str
    stop: int | str | None
    request_id: str
    cached_tokens: int | None
    versions: list[tuple[int, int, str | None]]
    constrained: bool
    max_new_tokens: int
    optional_outputs: list[str] = field(default_factory=list)
    columns: dict[str, tuple[int, list[Any]]] = field(default_factory=dict)
    images: list[OracleImage] = field(default_factory=list)


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
    turns: Sequence[OracleTurn],
    generations: Sequence[WireGeneration],
    stop_ids: Sequence[int],
    *,
    echoes: bool = True,
) -> Iterator[tuple[str, str, *tuple[int, ...]]]:
    """Compare each turn with its generation on the wire. Yield the check, the problem, and the turn's index.

    The index of the output token comes last, if the problem is about one.

    Args:
        turns: In commit order.
        generations: Those on the wire.
        stop_ids: Ids that end a turn of the model.
        echoes: Whether the server echoes prompts.
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
            _compare_turn(turn, before, images[-1], answers[0], set(stop_ids), echoes=echoes),
        )
        for problem in problems:
            yield (problem[0], problem[1], turn.index, *problem[2:])
        for _, _, version in turn.versions:
            if version in replaced:
                yield "versions", f"the weight version {version!r} comes back after {live!r}.", turn.index
            if version is not None and version != live:
                replaced |= set() if live is None else {live}
                live = version


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
            yield "mask", f"the trajectory that ends in turn {leaf} differs at token {at}.", leaf
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
                yield "mask", f"a prompt token of turn {index} has a logprob.", index
            if trajectory.logprobs[output:end] != turn.logprobs:
                yield "mask", f"the logprobs of turn {index} are not aligned with its tokens.", index
            trained[index] += sum(trajectory.mask[output:end])
            start = end
    for index, count in trained.items():
        expected = 0 if by_index[index].constrained else len(by_index[index].output_ids)
        if count != expected:
            yield "mask", f"{count} tokens of turn {index} are trained, expected {expected}, once each.", index


def check_text(answer: WireGeneration, decode: Callable[[list[int]], str], *, strips: bool) -> Iterator[Problem]:
    """Compare the text that a server reports with its decoded ids.

    `strips` says whether the tokenizer takes a first blank off a text, so that a server may or may not report it.
    """
    text, decoded = answer.text, decode(answer.output_ids)
    # An aborted answer may end before its last tokens were decoded.
    if text is None or (answer.finish == "abort" and decoded.startswith(text.rstrip(INCOMPLETE))):
        return
    if _shown(text, strips) not in {_shown(each, strips) for each in _texts(answer, decoded, decode)}:
        yield "text", f"the ids decode to {decoded[-60:]!r}, the response's text is {text[-60:]!r}."


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


ALIASES = {
    "seed": ("seed", "sampling_seed"),
    "min_new_tokens": ("min_tokens", "min_new_tokens"),
}
"""Names on the wires, of parameters whose names differ from ours."""
DEFAULTS: Mapping[str, Any] = {
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": -1,
    "min_p": 0.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "repetition_penalty": 1.0,
    "seed": None,
    "min_new_tokens": 0,
    "ignore_eos": False,
}
"""Parameters that are compared, each with its default."""
LIMITS = ("max_tokens", "max_new_tokens")


def compare_sampling(
    requested: Mapping[str, Any], sent: Mapping[str, Any], recorded: Mapping[str, Any], limit: int
) -> Iterator[Problem]:
    """Compare the agent's sampling parameters with those on the wire and in the ledger, with its limit of tokens."""
    for name, default in DEFAULTS.items():
        value = requested.get(name, default)
        on_wire = next((sent[alias] for alias in ALIASES.get(name, (name,)) if sent.get(alias) is not None), default)
        if not _same(name, value, on_wire):
            yield "requested", f"{name}={value} was requested, but {on_wire} was sent."
        if not _same(name, value, recorded.get(name, default)):
            yield "requested", f"{name}={value} was requested, but the ledger has {recorded.get(name, default)}."
    for name in ("stop", "stop_token_ids"):
        own, others = (set(each.get(name) or ()) for each in (requested, sent))
        if not own <= others:
            yield "requested", f"{name}={sorted(own)} was requested, but {sorted(others)} was sent."
    for name, value in (requested.get("extra") or {}).items():
        if sent.get(name) != value:
            yield "requested", f"{name}={value} was requested, but {sent.get(name)} was sent."
    most = next((sent[name] for name in LIMITS if sent.get(name) is not None), None)
    if most != limit or limit > requested["max_new_tokens"]:
        yield (
            "requested",
            f"max_new_tokens={requested['max_new_tokens']} was requested, but {most} was sent and {limit} recorded.",
        )


def compare_request(
    prompt: Sequence[int], requested: Mapping[str, Any], response: Any, answer: WireGeneration, stop_ids: Sequence[int]
) -> Iterator[Problem]:
    """Compare a request of the suite's own, under our names, and the client's response with the wire."""
    output, logprobs = response.output_ids.tolist(), response.logprobs.tolist()
    limit = requested["max_new_tokens"]
    sent = next((answer.sampling[name] for name in LIMITS if answer.sampling.get(name) is not None), limit)
    yield from compare_sampling(requested, answer.sampling, requested, sent)
    for check, what, own, wire in (
        ("prompt", "the prompt that was sent", prompt, answer.prompt_ids),
        ("answers", "the client's output", output, answer.output_ids),
        ("logprobs", "the client's logprobs", logprobs, list(map(float32, answer.logprobs))),
    ):
        if list(own) != list(wire):
            at = () if check == "prompt" else (_first_difference(own, wire),)
            yield check, f"{what} and the wire's differ at {differing(own, wire)}.", *at
    constrained = requested.get("grammar") is not None
    yield from _compare_finish(str(response.finish), response.stop, constrained, answer, set(stop_ids))
    for place, row in enumerate(answer.top_logprobs or ()):
        if len(twice := [token for token, _ in row]) > len(set(twice)):
            yield "top", f"output token {place} lists a token twice among its likeliest ones: {row}.", place


def check_stop_strings(
    answer: WireGeneration, decode: Callable[[list[int]], str], stop_ids: Sequence[int]
) -> Iterator[Problem]:
    """Check that an answer ends at its first stop string, and holds the one that is said to have ended it."""
    stops, output = answer.sampling.get("stop") or (), answer.output_ids
    least = answer.sampling.get("min_tokens") or answer.sampling.get("min_new_tokens")
    before, text = (decode(output[:-1]), decode(output)) if stops else ("", "")
    for stop in stops:
        if stop in before and not least:  # servers may or may not look for it in the first tokens
            yield "finish", f"the answer continued after the stop string {stop!r}: {before[-60:]!r}."
    ends = {*stop_ids, *(answer.sampling.get("stop_token_ids") or ())}
    if stops and output and answer.finish == "stop" and output[-1] not in ends:
        named = [answer.stop] if isinstance(answer.stop, str) else stops
        if not any(_holds(text, stop) for stop in named):
            yield "finish", f"the answer ended by {named}, but its text is {text[-60:]!r}."


def _holds(text: str, stop: str) -> bool:
    """Return whether a text holds a stop string, but for blanks, which servers decode differently."""
    bare = "".join(stop.split())
    return bare in "".join(text.split()) if bare else stop in text or not text.strip()


def _same(name: str, one: Any, other: Any) -> bool:
    if name == "top_k":  # 0 and -1 both mean all tokens
        one, other = (value if value and value > 0 else -1 for value in (one, other))
    return bool(one == other)


def compare_semantics(
    requested: Mapping[str, Any], semantics: Any, processed: bool | None, grammar: bool
) -> Iterator[Problem]:
    """Compare the semantics of logprobs in the ledger with the measured ones and the requested parameters."""
    temperature = requested.get("temperature", 1.0) or 1.0
    if semantics.processed != processed:
        yield "semantics", f"the ledger says processed={semantics.processed}, but {processed} was measured."
    expected = {True: (temperature,), False: (1.0,), None: (None, 1.0)}[processed]
    if semantics.temperature not in expected or (processed is None and temperature != 1.0 and semantics.temperature):
        yield "semantics", f"the ledger says temperature={semantics.temperature}, expected {expected[0]}."
    changes = bool(requested.get("presence_penalty") or requested.get("frequency_penalty"))
    if (grammar or (changes and processed)) and not semantics.adjusted:
        yield "semantics", "the ledger says that nothing else changed the distribution, but a grammar or penalty did."


def _compare_turn(
    turn: OracleTurn,
    before: list[int],
    images: list[OracleImage],
    answer: WireGeneration,
    stop_ids: set[int],
    *,
    echoes: bool,
) -> Iterator[Problem]:
    prompt, output = before + turn.delta_ids, answer.output_ids
    if answer.answered_id is not None and not answer.answered_id.endswith(answer.request_id):
        yield "answers", f"the answer to {answer.request_id!r} names the request {answer.answered_id!r}."
    sent = collapsed(prompt, images)
    if sent != answer.prompt_ids:
        at = _first_difference(sent, answer.prompt_ids)
        yield "prompt", f"the parent's path and the delta differ from the sent prompt at token {at}."
    if answer.echoed_ids is None and echoes:
        yield "answers", "the server did not echo the prompt."
    elif answer.echoed_ids not in (None, prompt):
        at = _first_difference(answer.echoed_ids or (), prompt)
        yield "answers", f"the echoed prompt differs from the ledger's at token {at}."
    if turn.output_ids != output:
        at = _first_difference(turn.output_ids, output)
        yield "answers", f"the ledger's output differs from the response at {differing(turn.output_ids, output)}.", at
    if answer.logprob_ids != output:
        at = _first_difference(answer.logprob_ids, output)
        yield "logprobs", "the response's logprobs belong to other tokens than its output.", at
    reported = [float32(value) for value in answer.logprobs]
    if reported != turn.logprobs:
        at = _first_difference(reported, turn.logprobs)
        yield (
            "logprobs",
            f"the ledger's logprobs differ from the response's at {differing(reported, turn.logprobs)}.",
            at,
        )
    for at, value in enumerate(turn.logprobs):
        if not math.isfinite(value) or value > 1e-4 or value <= -9999:
            yield "logprobs", f"the logprob {value} is not finite, positive, or a sentinel.", at
    yield from compare_columns(turn, answer, prompt, len(before))
    if turn.cached_tokens != answer.cached_tokens or not 0 <= (answer.cached_tokens or 0) < len(prompt):
        yield (
            "cached",
            f"the server has {answer.cached_tokens} cached tokens of {len(prompt)}, the ledger {turn.cached_tokens}.",
        )
    yield from _compare_finish(turn.finish, turn.stop, turn.constrained, answer, stop_ids)
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


def _compare_finish(
    finish: str, stop: int | str | None, constrained: bool, answer: WireGeneration, stop_ids: set[int]
) -> Iterator[Problem]:
    output, sampling = answer.output_ids, answer.sampling
    ends = stop_ids | set(sampling.get("stop_token_ids") or ())
    limit = sampling.get("max_tokens", sampling.get("max_new_tokens"))
    least = sampling.get("min_tokens") or sampling.get("min_new_tokens") or 0
    last = output[-1] if output else None
    aborted_at_stop = (answer.finish, finish) == ("abort", "stop") and last in ends  # such an answer is whole
    if finish != answer.finish and not aborted_at_stop:
        yield "finish", f"the response's finish reason is {answer.finish!r}, the ledger's {finish!r}."
    if answer.finish == "length" and len(output) != limit:
        yield "finish", f"the finish reason is length after {len(output)} tokens, but the limit was {limit}."
    if answer.finish == "length" and last in ends and not sampling.get("ignore_eos") and len(output) > least:
        yield "finish", f"the finish reason is length, but the last token {last} is a stop id.", len(output) - 1
    if answer.finish == "stop" and not isinstance(stop, str) and last not in ends and not constrained:
        yield "finish", f"the finish reason is stop, but the last token {last} is not a stop id.", len(output) - 1
    if answer.finish == "stop" and last in ends and stop is None:
        yield "finish", f"the last token {last} is a stop id, but the ledger records no stop."
    if isinstance(stop, int) and stop != last:
        yield "finish", f"the stop token is {stop}, but the last token is {last}."
    if limit is not None and len(output) > limit:
        yield "finish", f"the response has {len(output)} tokens, the limit was {limit}."
    early = [at for at, token in enumerate(output[:-1]) if token in ends]
    if early and not sampling.get("ignore_eos") and early[0] >= least:
        yield "finish", f"the generation continued after the stop token at {early[0]}.", early[0]


def collapsed(ids: Sequence[int], images: Sequence[OracleImage]) -> list[int]:
    """Return a path with each image's placeholders replaced by the first one, as a prompt is sent."""
    inside = {at for image in images for at in range(image.offset + 1, image.offset + image.length)}
    return [token for at, token in enumerate(ids) if at not in inside]


def compare_images(ids: Sequence[int], images: Sequence[OracleImage], answer: WireGeneration) -> Iterator[Problem]:
    """Compare the images of a path, expanded up to the end of its prompt, with the request's and the server's own."""
    sent = [None if data is None else sha256(data).hexdigest() for data in answer.images]
    digests = [image.sha256 for image in images]
    if len(sent) != len(digests):
        yield "images", f"{len(sent)} pictures were sent, the path has {len(digests)}."
    for place, (found, name, digest) in enumerate(zip(sent, answer.image_names, digests, strict=False)):
        if found is not None and found != digest:
            yield "images", f"picture {place} has the digest {found[:12]}, the ledger has {digest[:12]}."
        if (found is None or name is not None) and not str(name).endswith(digest):
            yield "images", f"picture {place} was sent under the name {name!r}, its digest is {digest[:12]}."
    spans = [(image.offset, image.length) for image in images]
    if answer.image_spans is not None and answer.image_spans != spans:
        yield "images", f"the server reports the placeholders {answer.image_spans}, the ledger has {spans}."
    if answer.image_tokens is not None and answer.image_tokens != sum(length for _, length in spans):
        yield "images", f"the server counted {answer.image_tokens} image tokens, the ledger has {spans}."
    if not images:
        return
    if answer.image_spans is None and answer.image_tokens is None:
        yield "images", "the server reports nothing about the pictures."
    inside = {at for image in images for at in range(image.offset, image.offset + image.length)}
    held = {ids[at] if at < len(ids) else None for at in inside}
    if len(held) != 1 or not all(image.length > 0 for image in images):
        yield "images", f"the spans {spans} of pictures hold the tokens {sorted(map(str, held))}, not one placeholder."
    outside = [at for at, token in enumerate(ids) if token in held and at not in inside]
    if outside:
        yield "images", f"token {outside[0]} is a placeholder, but belongs to no picture."


MASKED = -9999.0
"""A logprob at or below it is a sentinel: vLLM's of a masked token, and SGLang's, which is float32's lowest value."""
MASS_SLACK = 1e-3
"""How far probabilities may sum to more than 1, from float32 rounding."""
_CHECKS = {
    "top_ids": "top",
    "top_logprobs": "top",
    "prompt_logprobs": "scored",
    "routed_experts": "routed",
    "sampling_mask": "left",
}


def compare_columns(
    turn: OracleTurn, answer: WireGeneration, prompt: Sequence[int], path_length: int
) -> Iterator[Problem]:
    """Compare a turn's optional columns with the wire; `path_length` are the tokens before the turn's delta."""
    for name in turn.optional_outputs:
        if name not in turn.columns and answer.output_ids:
            yield _CHECKS[name], f"{name} was requested, but the turn does not have it."
    if "top_ids" in turn.columns and "top_logprobs" in turn.columns:
        yield from _compare_top(turn, answer, len(prompt))
    if "prompt_logprobs" in turn.columns:
        yield from _compare_prompt(turn, answer, prompt, path_length)
    if "routed_experts" in turn.columns:
        yield from _compare_experts(turn, answer, len(prompt), path_length)
    if "sampling_mask" in turn.columns:
        yield from _compare_masks(turn, answer, len(prompt))


def _compare_top(turn: OracleTurn, answer: WireGeneration, first: int) -> Iterator[Problem]:
    ids_start, ids = turn.columns["top_ids"]
    values_start, values = turn.columns["top_logprobs"]
    count = len(answer.output_ids)
    if (ids_start, values_start, len(ids)) != (first, first, count):
        yield "top", f"top_logprobs cover {len(ids)} tokens from {ids_start}, expected {count} from {first}."
        return
    for place, (row, logprobs) in enumerate(zip(ids, values, strict=True)):
        reported = (answer.top_logprobs or [])[place] if place < len(answer.top_logprobs or ()) else []
        real = {token: value for token, value in reported if value is not None and value > MASKED}
        best = sorted(real.items(), key=lambda pair: (-pair[1], pair[0]))[: len(row)]
        expected = [(token, float32(value)) for token, value in best]
        found = [pair for pair in zip(row, logprobs, strict=True) if pair[0] != -1]
        if found != expected:
            yield "top", f"output token {place} has the top logprobs {found}, the response has {expected}.", place
        mass = sum(math.exp(value) for value in real.values())
        if mass > 1 + MASS_SLACK:
            yield "top", f"the top tokens of output token {place} have a total probability of {mass:.4g}.", place
        sampled, own = answer.output_ids[place], answer.logprobs[place]
        least = min((value for _, value in best), default=math.inf)
        if sampled not in dict(best) and (own is None or own > least + 1e-4):
            yield (
                "top",
                f"output token {place} has logprob {own}, but is missing in its top logprobs {expected}.",
                place,
            )


def _compare_prompt(
    turn: OracleTurn, answer: WireGeneration, prompt: Sequence[int], path_length: int
) -> Iterator[Problem]:
    """Compare prompt logprobs. Inside an image there are none: what a server writes there has no meaning."""
    start, values = turn.columns["prompt_logprobs"]
    first, end = max(path_length, 1), len(prompt)
    if (start, len(values)) != (first, end - first):
        yield "scored", f"prompt logprobs cover tokens {start} to {start + len(values)}, expected {first} to {end}."
        return
    inside = {at for image in turn.images for at in range(image.offset, image.offset + image.length)}
    reported = answer.prompt_logprobs[len(answer.prompt_logprobs) - len(values) :] if values else []
    places = [place for place in range(len(values)) if first + place not in inside]
    if [reported[place][0] for place in places] != [prompt[first + place] for place in places]:
        yield "scored", "the response's prompt logprobs belong to other tokens than the sent prompt."
    if [float32(reported[place][1]) for place in places] != [values[place] for place in places]:
        yield "scored", "the ledger's prompt logprobs differ from the response's."
    if any(not math.isnan(values[place - first]) for place in inside if first <= place < end):
        yield "scored", "a token of an image has a prompt logprob."


def _compare_experts(
    turn: OracleTurn, answer: WireGeneration, prompt_length: int, path_length: int
) -> Iterator[Problem]:
    start, rows = turn.columns["routed_experts"]
    first = max(path_length - 1, 0)
    end = prompt_length + len(answer.output_ids) - 1
    if (start, start + len(rows)) != (first, end):
        yield "routed", f"experts cover tokens {start} to {start + len(rows)}, expected {first} to {end}."
        return
    reported = _integers(answer.routed_experts or "")
    own = [value for row in rows for layer in row for value in layer]
    if len(own) == 0 or reported[len(reported) - len(own) :] != own:
        yield "routed", "the ledger's experts differ from the response's."


def _compare_masks(turn: OracleTurn, answer: WireGeneration, first: int) -> Iterator[Problem]:
    start, rows = turn.columns["sampling_mask"]
    masks = [[token for token in row if token != -1] for row in rows]
    if start != first or masks != (answer.sampling_masks or []):
        yield "left", "the ledger's sampling mask differs from the response's."
    for place, (token, mask) in enumerate(zip(answer.output_ids, masks, strict=False)):
        if token not in mask:
            yield "left", f"output token {place} is not in its sampling mask of {len(mask)} tokens.", place
    top_k = int(answer.sampling.get("top_k") or 0)
    largest = max(map(len, masks), default=0)
    if 0 < top_k < largest:
        yield "left", f"a sampling mask has {largest} tokens, but top_k was {top_k}."


_KINDS = {"u1": "B", "i1": "b", "u2": "H", "i2": "h", "u4": "I", "i4": "i", "u8": "Q", "i8": "q"}


def _integers(text: str) -> list[int]:
    """Decode base64 of a `.npy` file of integers, or of bare int32."""
    raw = base64.b64decode(text)
    kind = "i"
    if raw.startswith(b"\x93NUMPY"):
        size, begin = (2, 10) if raw[6] == 1 else (4, 12)
        end = begin + int.from_bytes(raw[8 : 8 + size], "little")
        kind = _KINDS[ast.literal_eval(raw[begin:end].decode().strip())["descr"][-2:]]
        raw = raw[end:]
    return [number for (number,) in struct.iter_unpack(f"<{kind}", raw)]


def float32(value: float | None) -> float | None:
    """Round to float32, the precision of the ledger."""
    return None if value is None else struct.unpack("f", struct.pack("f", value))[0]


INCOMPLETE = "\N{REPLACEMENT CHARACTER}"
"""What decoders write for the bytes of an incomplete character, unless they withhold it."""


def _shown(text: str, strips: bool) -> str:
    return (text.lstrip() if strips else text).rstrip(INCOMPLETE)


def _texts(generation: WireGeneration, decoded: str, decode: Callable[[list[int]], str]) -> Iterator[str]:
    """Yield the texts that an answer may have: whole, or without the stop token or stop string that ended it."""
    yield decoded
    if generation.finish == "stop":
        yield decode(generation.output_ids[:-1])
        for stop in generation.sampling.get("stop") or ():
            before, found, _ = decoded.partition(stop)
            yield before
            yield before + found


def differing(one: Sequence[Any], other: Sequence[Any]) -> str:
    """Return the offsets at which two sequences differ, as they stand in a sentence."""
    pairs = itertools.zip_longest(one, other)
    return offsets([at for at, (a, b) in enumerate(pairs) if a != b], max(len(one), len(other)))


def offsets(positions: Sequence[int], count: int) -> str:
    """Return positions as they stand in a sentence: the first few, and how many tokens there are."""
    shown = ", ".join(map(str, positions[:MOST_SHOWN]))
    more = f" and {len(positions) - MOST_SHOWN} more" if len(positions) > MOST_SHOWN else ""
    others = "; all others agree" if len(positions) < count else ""
    return f"offset{'s' if len(positions) > 1 else ''} {shown}{more} of {count}{others}"


MOST_SHOWN = 8
"""Positions that a sentence lists."""


def _first_difference(one: Sequence[Any], other: Sequence[Any]) -> int:
    pairs = enumerate(zip(one, other, strict=False))
    return next((at for at, (a, b) in pairs if a != b), min(len(one), len(other)))
