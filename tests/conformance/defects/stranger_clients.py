"""The stranger's defects in the client: monkeypatches of tito_core."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any
from unittest import mock

import numpy as np

from conformance.defects.stranger_hooks import on_client
from tito_core import policy as policy_parts
from tito_core.backend import resume
from tito_core.backend.optional_columns import ColumnValidation
from tito_core.backend.sampling import SamplingParams
from tito_core.chat.encoder import EncodedText
from tito_core.ledger import ledger as ledgers
from tito_core.ledger.columns import Column, Columns
from tito_core.ledger.turn import Finish
from tito_core.turn import answer as read
from tito_core.turn import history as parent
from tito_core.turn import request

Patch = AbstractContextManager[Any]
_WIRES = ("vllm", "sglang")


def _packed(change: Any) -> Patch:
    """Patch what a turn's columns are packed of: `change(logprobs)`."""
    pack = Columns.pack.__func__  # type: ignore[attr-defined]

    def changed(cls: Any, ids: Any, provenance: Any, output: Any, logprobs: Any) -> Any:
        return pack(cls, ids, provenance, output, change(np.asarray(logprobs)))

    return mock.patch.object(Columns, "pack", classmethod(changed))


@on_client(4, "columns stored in half precision", wires=_WIRES)
def client_rounds_logprobs() -> Patch:
    """Logprobs are stored in half precision."""
    return _packed(lambda values: values.astype(np.float16).astype(np.float32))


@on_client(4, "zeros for what a trainer cannot align: rllm #816's downstream workaround", wires=_WIRES)
def client_pads_the_last_logprob() -> Patch:
    """In answers of over 32 tokens the last logprob is a padding of zero."""
    return _packed(lambda values: np.append(values[:-1], np.float32(0)) if len(values) > 32 else values)


@on_client(9, "arguments coerced to strings", wires=_WIRES)
def client_turns_numbers_to_text() -> Patch:
    """Whole numbers in a call's arguments become strings."""
    use = read._tool_use

    def changed(call: Any, call_id: str) -> Any:
        block = use(call, call_id)
        given = block["toolUse"]["input"]
        block["toolUse"]["input"] = {k: str(v) if type(v) is int else v for k, v in given.items()}
        return block

    return mock.patch.object(read, "_tool_use", changed)


def _drafted(change: Any) -> Patch:
    draft = read.draft
    return mock.patch.object(read, "draft", lambda *arguments: change(draft(*arguments)))


@on_client(4, "finish reasons mapped to a framework's two", wires=_WIRES)
def client_calls_long_cut_offs_complete() -> Patch:
    """A turn that was cut off after more than 24 tokens is recorded as complete."""
    return _drafted(
        lambda made: (
            replace(made, finish=Finish.STOP) if made.finish == Finish.LENGTH and made.columns.output > 24 else made
        )
    )


@on_client(4, "max_new_tokens before the clamp", wires=_WIRES)
def client_records_another_limit() -> Patch:
    """A turn records a limit of tokens one above the one that was sent."""
    return _drafted(lambda made: replace(made, max_new_tokens=made.max_new_tokens + 1))


@on_client(3, "content and scaffold told apart by position", wires=_WIRES)
def client_shifts_provenance() -> Patch:
    """The provenance of a turn's prompt tokens is one token late."""
    plain = read.read_delta

    def changed(*arguments: Any) -> Any:
        found = plain(*arguments)
        marks = np.asarray(found[1])
        return (found[0], np.concatenate([marks[:1], marks[:-1]]) if len(marks) else marks, found[2])

    return mock.patch.object(read, "read_delta", changed)


@on_client(3, "prefixes trained once for each branch", wires=_WIRES)
def client_trains_branches_twice() -> Patch:
    """Turns that two trajectories share are trained in both."""
    assemble = ledgers.assemble

    def changed(path: Any, **settings: Any) -> Any:
        return assemble(path, **{**settings, "context": frozenset()})

    return mock.patch.object(ledgers, "assemble", changed)


def _fields(change: Any) -> Patch:
    plain = SamplingParams.shared_fields
    return mock.patch.object(SamplingParams, "shared_fields", lambda self: change(plain(self)))


@on_client(11, "numbers formatted for a log and sent", wires=_WIRES)
def client_rounds_the_temperature() -> Patch:
    """The temperature is sent with one decimal."""
    return _fields(lambda sent: {**sent, "temperature": round(sent["temperature"], 1)})


@on_client(11, "one penalty overwrites another", wires=_WIRES)
def client_loses_a_penalty() -> Patch:
    """The frequency penalty is not sent where there is a presence penalty as well, nor below zero."""
    return _fields(
        lambda sent: (
            {**sent, "frequency_penalty": 0.0} if sent["presence_penalty"] or sent["frequency_penalty"] < 0 else sent
        )
    )


@on_client(11, "the record of one request for all", wires=_WIRES)
def client_records_the_first_sampling() -> Patch:
    """Every turn of a policy records the sampling parameters of its first turn."""
    plain = policy_parts.SamplingCache.recorded
    first: dict[int, Any] = {}

    def changed(self: Any, *arguments: Any) -> Any:
        return first.setdefault(id(self), plain(self, *arguments))

    return mock.patch.object(policy_parts.SamplingCache, "recorded", changed)


@on_client(11, "logprobs taken for raw", wires=_WIRES)
def client_claims_unadjusted() -> Patch:
    """The semantics of logprobs never say that a penalty, a grammar or a truncation changed them."""
    plain = policy_parts.semantics_of
    return mock.patch.object(policy_parts, "semantics_of", lambda *a: replace(plain(*a), adjusted=False))


@on_client(5, "the prompt of a resumed request", wires=_WIRES)
def client_resumes_one_token_back() -> Patch:
    """A resumed request leaves out the last sampled token, which is recorded all the same."""
    plain = resume.continuing

    def changed(*arguments: Any) -> Any:
        made = plain(*arguments)
        sampled = sum(len(part.output_ids) for part in arguments[1])
        return replace(made, input_ids=made.input_ids[:-1], id_text=None) if sampled else made

    return mock.patch.object(resume, "continuing", changed)


@on_client(10, "versions of a resumed answer", wires=_WIRES)
def client_forgets_the_second_version() -> Patch:
    """An answer in several parts is recorded as wholly of the first part's weights."""
    plain = resume._versions

    def changed(spans: Any) -> Any:
        found = plain(spans)
        return (found[0]._replace(stop=found[-1].stop),) if found else found

    return mock.patch.object(resume, "_versions", changed)


@on_client(7, "a newline after the stop token, lost", wires=_WIRES)
def client_loses_the_first_delta_token() -> Patch:
    """The delta of a later turn lacks its first token, the newline after the stop token."""
    plain = request._delta

    def changed(policy: Any, ledger: Any, match: Any, turn_input: Any) -> Any:
        made = plain(policy, ledger, match, turn_input)
        if match.parent is None or len(made.ids) < 8:
            return made
        return EncodedText(made.ids[1:], made.provenance[1:])

    return mock.patch.object(request, "_delta", changed)


@on_client(8, "a cursor instead of content", wires=_WIRES)
def client_prefers_the_latest_turn() -> Patch:
    """Among several turns that fit, the latest is the parent, whatever the agent's own key says."""
    return mock.patch.object(parent, "_choose", lambda ledger, fitting, own: max(fitting))


@on_client(2, "optional columns one row late", wires=_WIRES)
def client_shifts_columns() -> Patch:
    """The rows of optional columns are one token late, where there are more than four."""
    plain = ColumnValidation.columns

    def late(column: Column) -> Column:
        values = column.values
        return column if len(values) < 5 else Column.of(column.start, np.concatenate([values[:1], values[:-1]]))

    def changed(self: Any, raw: Any) -> Any:
        return {name: late(column) for name, column in plain(self, raw).items()}

    return mock.patch.object(ColumnValidation, "columns", changed)


CLIENTS = [
    *(client_rounds_logprobs, client_pads_the_last_logprob, client_turns_numbers_to_text),
    *(client_calls_long_cut_offs_complete, client_records_another_limit, client_shifts_provenance),
    *(client_trains_branches_twice, client_rounds_the_temperature, client_loses_a_penalty),
    *(client_records_the_first_sampling, client_claims_unadjusted, client_resumes_one_token_back),
    *(client_forgets_the_second_version, client_loses_the_first_delta_token, client_prefers_the_latest_turn),
    client_shifts_columns,
]
