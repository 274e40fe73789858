"""Compares the parameters that an agent requested with the wire and the ledger, and its calls with the sampled text.

This uses no code of the client: parameters are compared by their names on the wire, and calls are parsed again.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from strands_tito.conformance.oracle_turn import Problem
from strands_tito.conformance.rendering import to_template_messages

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
    """Compare sampling parameters.

    Args:
        requested: Parameters of the agent, under our names.
        sent: Parameters on the wire.
        recorded: Parameters in the ledger.
        limit: The recorded limit of new tokens.
    """
    for name, default in DEFAULTS.items():
        value = requested.get(name, default)
        on_wire = next((sent[alias] for alias in ALIASES.get(name, (name,)) if sent.get(alias) is not None), default)
        if not _same(name, value, on_wire):
            yield "requested", f"{name}={value} was requested, but {on_wire} was sent."
        if not _same(name, value, recorded.get(name, default)):
            yield "requested", f"{name}={value} was requested, but the ledger has {recorded.get(name, default)}."
    stops = set(sent.get("stop") or ())
    if not set(requested.get("stop") or ()) <= stops:
        yield "requested", f"the stop strings {requested.get('stop')} were requested, but {sorted(stops)} were sent."
    most = next((sent[name] for name in LIMITS if sent.get(name) is not None), None)
    if most != limit or limit > requested["max_new_tokens"]:
        yield (
            "requested",
            f"max_new_tokens={requested['max_new_tokens']} was requested, but {most} was sent and {limit} recorded.",
        )


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


class CallReader:
    """Reads calls of a format that writes a JSON object between two tags.

    Args:
        tokenizer: The model's tokenizer, whose template shows the format.

    Attributes:
        tags: The tags; None if the template does not write calls in this way.
    """

    def __init__(self, tokenizer: Any) -> None:
        self.tags = _tags(tokenizer)

    def read(self, text: str) -> list[Any] | None:
        """Return one JSON value for each call, in order; None for one that is not valid, or not closed.

        Return None if the text's reasoning makes it unclear where calls may be.
        """
        if self.tags is None or text.count("<think>") > text.count("</think>"):
            return None
        begin, end = self.tags
        *_, rest = text.split("</think>")
        if "<think>" in text and begin in text[: len(text) - len(rest)]:
            return None
        parts = rest.split(begin)[1:]
        return [_strict(part.partition(end)[0]) if end in part else None for part in parts]

    def misplaced(self, records: Sequence[Any], decode: Callable[[int, int], str]) -> Iterator[Problem]:
        """Check that the tokens that the ledger records of each executed call hold the format's first tag.

        Where tags are not single tokens, a token may also contain the end of the text before the tag.

        Args:
            records: The turn's calls (`CallRecord`).
            decode: Returns the text of the output's tokens from an offset to another.
        """
        begin, _ = self.tags or ("", "")
        for call in records:
            text = decode(call.start, call.stop)
            if call.status == "ok" and begin not in text:
                yield "calls", f"the ledger has the call of {call.name!r} at tokens that spell {text[:60]!r}."


def _tags(tokenizer: Any) -> tuple[str, str] | None:
    use = {"toolUseId": "call00000", "name": "weather_at", "input": {"at": "noon"}}
    question = {"role": "user", "content": [{"text": "Why?"}]}
    messages = to_template_messages([question, {"role": "assistant", "content": [{"toolUse": use}]}], None)
    try:
        text = str(tokenizer.apply_chat_template(messages, tokenize=False))
    except Exception:  # a template is a program and may raise anything
        return None
    for start in [at for at, letter in enumerate(text) if letter == "{"]:
        try:
            value, stop = json.JSONDecoder().raw_decode(text, start)
        except ValueError:
            continue
        before, after = text[:start].split(), text[stop:].split()
        if _call(value) == ("weather_at", {"at": "noon"}) and before and after:
            begin, end = before[-1], after[0]
            ends = end.partition(">")[0] + ">"
            begin = "<" + begin.rpartition("<")[2]
            return (begin, ends) if begin.endswith(">") and ends.startswith("<") else None
    return None


def _strict(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return None


def _call(value: Any) -> tuple[str, Any] | None:
    """Return the name and the arguments of a call; None if the value is not a call."""
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return None
    arguments = value.get("arguments", value.get("parameters"))
    return (value["name"], arguments) if isinstance(arguments, dict) else None


def compare_calls(read: Sequence[Any], uses: Sequence[Any], malformed: str, *, whole: bool) -> Iterator[Problem]:
    """Compare the calls that were sampled with those that the agent executes.

    Args:
        read: What `CallReader.read` returned.
        uses: The message's calls.
        malformed: Name of the calls that tell the policy what was wrong.
        whole: Whether the answer ended by itself. No call of a truncated answer is executed.
    """
    expected = [call for call in map(_call, read) if call is not None]
    executed = [(use["name"], use["input"]) for use in uses if use["name"] != malformed]
    invented = [call for call in executed if call not in expected]
    if invented:
        yield "calls", f"the agent executes {invented[0]}, which the policy did not sample: its calls are {expected}."
    if whole and len(uses) < len(expected):
        yield "calls", f"the policy sampled {len(expected)} calls, {expected}, but the agent gets {len(uses)}."
    if len(read) > len(expected) and len(executed) > len(expected):
        yield "calls", f"the agent executes {len(executed)} calls, but only {len(expected)} are valid."
    if whole and [call for call in expected if call in executed] != [call for call in executed if call in expected]:
        yield "calls", f"the agent executes {executed}, in another order than sampled: {expected}."
