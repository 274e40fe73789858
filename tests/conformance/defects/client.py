"""Defects of our own client, each a mistake that was found in a real adapter."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

import msgspec
import numpy as np

from conformance.defects.defect import Defect
from tito_core import policy as policy_parts
from tito_core.backend import generate as calls
from tito_core.backend.http.backend import HttpBackend
from tito_core.chat.encoder import EncodedText
from tito_core.ledger import Ledger
from tito_core.ledger import ledger as ledger_module
from tito_core.ledger.columns import Column, Columns
from tito_core.ledger.provenance import Provenance
from tito_core.ledger.turn import Sampling
from tito_core.model import Policy
from tito_core.parsing.completion import CallStatus
from tito_core.turn import answer as read
from tito_core.turn import history as parent
from tito_core.turn.recording import Recording

BOTH = ("vllm", "sglang")


def _patched(owner: Any, name: str, change: Callable[[Any], Any]) -> Callable[[], AbstractContextManager[Any]]:
    """Make a context in which a function is replaced by a changed one."""
    return lambda: mock.patch.object(owner, name, change(getattr(owner, name)))


def _mask(change: Callable[[Any], Any]) -> Any:
    """Change the loss mask of every trajectory."""

    def of(original: Any) -> Any:
        def assembled(*arguments: Any, **options: Any) -> Any:
            path = original(*arguments, **options)
            return replace(path, loss_mask=np.asarray(change(path), np.uint8))

        return assembled

    return of


def _trains_prompts(path: Any) -> Any:
    return path.provenance != Provenance.SCAFFOLD


def _trains_grammars(path: Any) -> Any:
    return path.loss_mask | (path.provenance == Provenance.CONSTRAINED)


def _trains_shared(path: Any) -> Any:
    return path.provenance == Provenance.SAMPLED


def _trains_one_on(path: Any) -> Any:
    return np.roll(path.loss_mask, 1)


def _output(change: Callable[[Any, list[int], list[float]], tuple[list[int], list[float]]]) -> Any:
    """Change the output of a draft before it is committed."""

    def of(original: Any) -> Any:
        def drafted(policy: Any, prepared: Any, response: Any, *rest: Any) -> Any:
            draft = original(policy, prepared, response, *rest)
            ids, logprobs = change(policy, draft.output_ids.tolist(), draft.logprobs.tolist())
            columns = Columns.pack(
                draft.prompt_ids, draft.prompt_provenance, np.array(ids, np.int32), np.array(logprobs, np.float32)
            )
            [span, *_] = draft.engine.versions
            engine = replace(draft.engine, versions=(span._replace(start=0, stop=len(ids)),))
            return replace(draft, columns=columns, engine=engine)

        return drafted

    return of


def _encoded_again(policy: Any, ids: list[int], logprobs: list[float]) -> tuple[list[int], list[float]]:
    again = policy.tokenizer.encode(policy.tokenizer.decode(ids), add_special_tokens=False)
    return again, (logprobs + [-1.0] * len(again))[: len(again)]


def _without_stop(policy: Any, ids: list[int], logprobs: list[float]) -> tuple[list[int], list[float]]:
    return (ids[:-1], logprobs[:-1]) if len(ids) > 1 and ids[-1] in policy.stop_token_ids else (ids, logprobs)


def _shifted(policy: Any, ids: list[int], logprobs: list[float]) -> tuple[list[int], list[float]]:
    return ids, logprobs[1:] + logprobs[:1]


def _rounded(policy: Any, ids: list[int], logprobs: list[float]) -> tuple[list[int], list[float]]:
    return ids, [float(np.float16(value)) for value in logprobs]


def _zeros(policy: Any, ids: list[int], logprobs: list[float]) -> tuple[list[int], list[float]]:
    return ids, [0.0 for _ in logprobs]


def _closers(policy: Any, ids: list[int], logprobs: list[float]) -> tuple[list[int], list[float]]:
    """Write the closer of a truncated answer as if it had been sampled."""
    return (ids, logprobs) if ids[-1] in policy.stop_token_ids else ([*ids, policy.stop_token_ids[0]], [*logprobs, 0.0])


def _cursor(original: Any) -> Any:
    """Use the latest turn as parent, whatever the history is."""

    def find_parent(ledger: Ledger, opening: Any, messages: Any, state: Any, **options: Any) -> Any:
        place = original(ledger, opening, messages, state, **options)
        if not len(ledger) or place.parent == len(ledger) - 1:
            return place
        return msgspec.structs.replace(place, parent=len(ledger) - 1, branch=None)

    return find_parent


def _never_branches(original: Any) -> Any:
    """Treat every history as new."""

    def find_parent(ledger: Ledger, opening: Any, messages: Any, state: Any, **options: Any) -> Any:
        from tito_core.ledger.turn import Branch, Reason

        place = original(ledger, opening, messages, state, **options)
        branch = Branch(Reason.SEPARATE, None) if len(ledger) else None
        return msgspec.structs.replace(place, parent=None, path_messages=0, branch=branch)

    return find_parent


@contextmanager
def _content_spells() -> Iterator[None]:
    """Encode control tokens in message content."""
    original = Policy.connect_async.__func__  # type: ignore[attr-defined]

    async def connect(cls: Any, /, **settings: Any) -> Any:
        return await original(cls, **{**settings, "content_tokens": "as-template"})

    with mock.patch.object(Policy, "connect_async", classmethod(connect)):
        yield


def _marks_content(original: Any) -> Any:
    """Mark all tokens as message content."""

    def rendered(self: Any, *arguments: Any, **options: Any) -> EncodedText:
        encoded = original(self, *arguments, **options)
        return EncodedText(encoded.ids, np.zeros_like(encoded.provenance))

    return rendered


def _delta(change: Callable[[list[int]], list[int]]) -> Any:
    """Change the ids of every delta but the first prompt."""

    def of(original: Any) -> Any:
        def delta(self: Any, *arguments: Any, **options: Any) -> EncodedText:
            encoded = original(self, *arguments, **options)
            ids = np.array(change(encoded.ids.tolist()), np.int32)
            provenance = np.resize(encoded.provenance, len(ids))
            return EncodedText(ids, provenance)

        return delta

    return of


def _twice(original: Any) -> Any:
    """Commit a turn twice, the second time as a retry."""

    async def commit(self: Any, ledger: Ledger, draft: Any, *rest: Any, **options: Any) -> Any:
        from tito_core.ledger.turn import Branch, Reason

        turn = await original(self, ledger, draft, *rest, **options)
        ledger.commit(replace(turn.draft, branch=Branch(Reason.RETRY, turn.index)))
        return turn

    return commit


def _not_at_all(original: Any) -> Any:
    """Skip every third commit."""

    async def commit(self: Any, ledger: Ledger, draft: Any, *rest: Any, **options: Any) -> Any:
        if len(ledger) % 3 == 2:
            return ledger[-1]
        return await original(self, ledger, draft, *rest, **options)

    return commit


def _unmarked(original: Any) -> Any:
    """Drop the mark of constrained turns."""
    return lambda *arguments: replace(original(*arguments), constrained=False)


def _columns(change: Callable[[str, Column], Column | None]) -> Any:
    """Change the optional columns of a draft."""

    def of(original: Any) -> Any:
        def drafted(*arguments: Any) -> Any:
            draft = original(*arguments)
            changed = {name: change(name, column) for name, column in draft.extras.items()}
            return replace(draft, extras={name: column for name, column in changed.items() if column is not None})

        return drafted

    return of


def _rolled(*names: str) -> Callable[[str, Column], Column | None]:
    return lambda name, column: Column.of(column.start, np.roll(column.values, 1, axis=0)) if name in names else column


def _last_version(original: Any) -> Any:
    """Keep the last version for the whole answer."""

    def drafted(*arguments: Any) -> Any:
        draft = original(*arguments)
        spans = draft.engine.versions
        whole = (spans[-1]._replace(start=0),) if spans else spans
        return replace(draft, engine=replace(draft.engine, versions=whole))

    return drafted


def _results_in_order_of_arrival(original: Any) -> Any:
    def rendered(self: Any, answered: Any, new: Any, *rest: Any, **options: Any) -> Any:
        swapped = [{**message, "content": message["content"][::-1]} for message in new]
        return original(self, answered, swapped, *rest, **options)

    return rendered


def _sends(**changes: Any) -> Any:
    """Send other sampling parameters than the requested ones."""

    def of(original: Any) -> Any:
        def sendable(request: Any, *arguments: Any, **options: Any) -> Any:
            sent = original(request, *arguments, **options)
            measured = sent.sampling.ignore_eos and sent.sampling.temperature == 2.0
            return sent if measured else replace(sent, sampling=sent.sampling.model_copy(update=changes))

        return sendable

    return of


def _prompts(original: Any) -> Any:
    """Send the second token of a prompt in place of the first."""

    def sendable(request: Any, *arguments: Any, **options: Any) -> Any:
        measured = request.sampling.ignore_eos and request.sampling.temperature == 2.0
        ids = np.concatenate([request.input_ids[1:2], request.input_ids[1:]])
        sent = request if measured or len(ids) < 2 else replace(request, input_ids=ids, id_text=None)
        return original(sent, *arguments, **options)

    return sendable


def _repeats(original: Any) -> Any:
    """Return the first token of an answer in place of the second."""

    def validated(raw: Any, request: Any, info: Any) -> Any:
        found: Any = original(raw, request, info)
        ids = found.output_ids.tolist()
        measured = request.sampling.ignore_eos and request.sampling.temperature == 2.0
        return found if measured else replace(found, output_ids=np.array([*ids[:1], *ids[:1], *ids[2:]][: len(ids)]))

    return validated


def _records(**changes: Any) -> Any:
    """Record other sampling parameters than were sent."""

    def of(original: Any) -> Any:
        def drafted(*arguments: Any) -> Any:
            draft = original(*arguments)
            return replace(draft, sampling=Sampling({**draft.sampling, **changes}))

        return drafted

    return of


def _semantics(change: Callable[[Any], Any]) -> Any:
    return lambda original: lambda *arguments: change(original(*arguments))


def _calls(change: Callable[[tuple[Any, ...]], tuple[Any, ...]]) -> Any:
    """Change the calls of an answer."""

    def of(original: Any) -> Any:
        def parsed(*arguments: Any) -> Any:
            turn = original(*arguments)
            return replace(turn, calls=change(turn.calls))

        return parsed

    return of


def _repaired(calls: tuple[Any, ...]) -> tuple[Any, ...]:
    """Execute a malformed call with the arguments that were probably meant."""
    return tuple(
        replace(call, status=CallStatus.OK, name=call.name or "add", arguments={"a": 1}, reason="", arguments_text=None)
        if call.status == CallStatus.MALFORMED
        else call
        for call in calls
    )


def _defaults(calls: tuple[Any, ...]) -> tuple[Any, ...]:
    """Add an argument that the policy did not write."""
    return tuple(
        replace(call, arguments={**call.arguments, "exact": False}, arguments_text=None) if call.status.runs else call
        for call in calls
    )


def _with_late_calls(original: Any) -> Any:
    """Record calls that start one token late."""

    def draft(*arguments: Any) -> Any:
        found = original(*arguments)
        return replace(found, calls=tuple(call._replace(start=call.start + 1) for call in found.calls))

    return draft


async def _no_abort(self: HttpBackend, request_id: str) -> None:
    """Send nothing."""


def _without_recorded_stop(original: Any) -> Any:
    """Record no stop."""
    return lambda *arguments: replace(original(*arguments), stop=None)


def _opening(original: Any) -> Any:
    """Call an edit or a trim a new system prompt."""

    def branch_of(*arguments: Any, **may_branch: Any) -> Any:
        from tito_core.ledger.turn import Reason

        branch = original(*arguments, **may_branch)
        wrong = branch is not None and branch.reason in (Reason.EDIT, Reason.TRIM)
        return replace(branch, reason=Reason.OPENING) if wrong else branch

    return branch_of


def _reason(original: Any) -> Any:
    """Call every branch an edit."""

    def branch_of(*arguments: Any, **may_branch: Any) -> Any:
        from tito_core.ledger.turn import Reason

        branch = original(*arguments, **may_branch)
        return branch if branch is None else replace(branch, reason=Reason.EDIT)

    return branch_of


def _template() -> Any:
    from tito_core.chat.template import ChatTemplate

    return ChatTemplate


CLIENT = (
    Defect("client-sends-no-temperature", 4, "The temperature is not sent.",
           client=_patched(calls, "sendable", _sends(temperature=1.0)), wires=BOTH),
    Defect("client-sends-no-top-p", 4, "top_p is not sent.",
           client=_patched(calls, "sendable", _sends(top_p=1.0)), wires=BOTH),
    Defect("client-sends-no-seed", 4, "The seed is not sent.",
           client=_patched(calls, "sendable", _sends(seed=None)), wires=BOTH),
    Defect("client-sends-no-penalty", 4, "The presence penalty is not sent.",
           client=_patched(calls, "sendable", _sends(presence_penalty=0.0)), wires=BOTH),
    Defect("client-sends-another-prompt", 1, "The first token of a prompt is sent as the second one.",
           client=_patched(calls, "sendable", _prompts), wires=BOTH),
    Defect("client-repeats-tokens", 4, "The second token of an answer is the first one again.",
           client=_patched(calls, "validated", _repeats), wires=BOTH),
    Defect("client-records-other-temperature", 4, "The recorded temperature is always 1.",
           client=_patched(read, "draft", _records(temperature=1.0)), wires=BOTH),
    Defect("client-records-no-seed", 4, "The seed is not recorded.",
           client=_patched(read, "draft", _records(seed=None)), wires=BOTH),
    Defect("client-calls-all-raw", 11, "Logprobs are always called raw.",
           client=_patched(policy_parts, "semantics_of", _semantics(
               lambda found: replace(found, processed=False, temperature=1.0))), wires=("sglang",)),
    Defect("client-forgets-grammars-in-semantics", 11, "Logprobs under a grammar are called plain.",
           client=_patched(policy_parts, "semantics_of", _semantics(
               lambda found: replace(found, adjusted=False))), wires=BOTH),
    Defect("client-adds-arguments", 9, "A call gets an argument that the policy did not write.",
           client=_patched(read, "parse", _calls(_defaults)), wires=BOTH),
    Defect("client-calls-edits-openings", 8, "An edit or a trim is called a new system prompt.",
           client=_patched(parent, "branch_of", _opening), wires=BOTH),
    Defect("client-calls-all-edits", 8, "Every branch is called an edit.",
           client=_patched(parent, "branch_of", _reason), wires=BOTH),
    Defect("client-trains-prompts", 3, "The loss mask is 1 on prompt tokens.",
           client=_patched(ledger_module, "assemble", _mask(_trains_prompts)), wires=BOTH),
    Defect("client-trains-grammars", 3, "Constrained tokens have loss mask 1.",
           client=_patched(ledger_module, "assemble", _mask(_trains_grammars)), wires=BOTH),
    Defect("client-trains-shared-twice", 3, "A turn that two trajectories share has loss mask 1 in both.",
           client=_patched(ledger_module, "assemble", _mask(_trains_shared)), wires=BOTH),
    Defect("client-mask-shifted", 3, "The loss mask is shifted by one token.",
           client=_patched(ledger_module, "assemble", _mask(_trains_one_on)), wires=BOTH),
    Defect("client-encodes-again", 4, "Answers are decoded and encoded again.",
           client=_patched(read, "draft", _output(_encoded_again)), wires=BOTH),
    Defect("client-drops-stop", 4, "The stop token is dropped.",
           client=_patched(read, "draft", _output(_without_stop)), wires=BOTH),
    Defect("client-samples-closers", 4, "An inserted closer is recorded as sampled.",
           client=_patched(read, "draft", _output(_closers)), wires=BOTH),
    Defect("client-shifts-logprobs", 4, "Logprobs are shifted by one token.",
           client=_patched(read, "draft", _output(_shifted)), wires=BOTH),
    Defect("client-rounds-logprobs", 4, "Logprobs are rounded to 16 bits.",
           client=_patched(read, "draft", _output(_rounded)), wires=BOTH),
    Defect("client-fills-logprobs", 4, "Logprobs are replaced by 0.0.",
           client=_patched(read, "draft", _output(_zeros)), wires=BOTH),
    Defect("client-cursor", 8, "The latest turn is always the parent.",
           client=_patched(parent, "find_parent", _cursor), wires=BOTH),
    Defect("client-forgets-history", 8, "Every turn is a new root.",
           client=_patched(parent, "find_parent", _never_branches), wires=BOTH),
    Defect("client-spells-controls", 6, "Message content is encoded with control tokens.",
           client=_content_spells, wires=BOTH),
    Defect("client-calls-scaffold-content", 6, "Template tokens are marked as message content.",
           client=_patched(_template(), "delta", _marks_content), wires=BOTH),
    Defect("client-loses-separator", 7, "The first token of a delta is missing.",
           client=_patched(_template(), "delta", _delta(lambda ids: ids[1:])), wires=BOTH),
    Defect("client-loses-opener", 7, "The last token of a delta is missing.",
           client=_patched(_template(), "delta", _delta(lambda ids: ids[:-1])), wires=BOTH),
    Defect("client-doubles-closer", 7, "The first token of a delta is repeated.",
           client=_patched(_template(), "delta", _delta(lambda ids: [ids[0], *ids])), wires=BOTH),
    Defect("client-reorders-results", 7, "Tool results are in another order.",
           client=_patched(_template(), "delta", _results_in_order_of_arrival), wires=BOTH),
    Defect("client-commits-twice", 5, "A turn is committed twice.",
           client=_patched(Recording, "commit", _twice), wires=BOTH),
    Defect("client-loses-turns", 5, "Some turns are not committed.",
           client=_patched(Recording, "commit", _not_at_all), wires=BOTH),
    Defect("client-unmarks-grammars", 9, "Constrained turns are not marked.",
           client=_patched(read, "draft", _unmarked), wires=BOTH),
    Defect("client-loses-columns", 4, "Optional outputs are lost.",
           client=_patched(read, "draft", _columns(lambda name, column: None)), wires=BOTH),
    Defect("client-shifts-experts", 4, "Routed experts are shifted by one row.",
           client=_patched(read, "draft", _columns(_rolled("routed_experts"))), wires=BOTH),
    Defect("client-shifts-prompt-logprobs", 4, "Prompt logprobs are shifted by one token.",
           client=_patched(read, "draft", _columns(_rolled("prompt_logprobs"))), wires=BOTH),
    Defect("client-shifts-top", 4, "Top logprobs are those of the previous token.",
           client=_patched(read, "draft", _columns(_rolled("top_ids", "top_logprobs"))), wires=BOTH),
    Defect("client-keeps-one-version", 10, "Of several versions, only the last is kept.",
           client=_patched(read, "draft", _last_version), wires=BOTH, weights=1),
    Defect("client-drops-second-call", 9, "Of several calls only the first is executed.",
           client=_patched(read, "parse", _calls(lambda found: found[:1])), wires=BOTH),
    Defect("client-repairs-calls", 9, "A malformed call is repaired and executed.",
           client=_patched(read, "parse", _calls(_repaired)), wires=BOTH),
    Defect("client-reverses-calls", 9, "Several calls are executed in reverse order.",
           client=_patched(read, "parse", _calls(lambda found: found[::-1])), wires=BOTH),
    Defect("client-records-no-stop", 4, "The stop is not recorded.",
           client=_patched(read, "draft", _without_recorded_stop), wires=BOTH),
    Defect("client-shifts-calls", 9, "Recorded calls start one token late.",
           client=_patched(read, "draft", _with_late_calls), wires=BOTH),
    Defect("client-sends-no-abort", 5, "An abort is not sent.",
           client=_patched(HttpBackend, "abort", lambda _: _no_abort), wires=BOTH),
)  # fmt: skip
"""Defects of the client."""
