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


SENT, DRAFT, PARSED, BRANCH = (calls, "sendable"), (read, "draft"), (read, "parse"), (parent, "branch_of")
MASK, DELTA = (ledger_module, "assemble"), (_template(), "delta")
MEANING = (policy_parts, "semantics_of")


def _at(
    place: tuple[Any, str], name: str, law: int, what: str, change: Callable[[Any], Any],
    wires: tuple[str, ...] = BOTH, weights: int = 0,
) -> Defect:  # fmt: skip
    """Return the defect of a client in which the function at a place is replaced by a changed one."""
    return Defect(f"client-{name}", law, what, client=_patched(*place, change), wires=wires, weights=weights)


CLIENT = (
    _at(SENT, "sends-no-temperature", 4, "The temperature is not sent.", _sends(temperature=1.0)),
    _at(SENT, "sends-no-top-p", 4, "top_p is not sent.", _sends(top_p=1.0)),
    _at(SENT, "sends-no-seed", 4, "The seed is not sent.", _sends(seed=None)),
    _at(SENT, "sends-no-penalty", 4, "The presence penalty is not sent.", _sends(presence_penalty=0.0)),
    _at(SENT, "sends-another-prompt", 1, "The first token of a prompt is sent as the second one.", _prompts),
    _at((calls, "validated"), "repeats-tokens", 4, "The second token of an answer is the first one again.", _repeats),
    _at(DRAFT, "records-other-temperature", 4, "The recorded temperature is always 1.", _records(temperature=1.0)),
    _at(DRAFT, "records-no-seed", 4, "The seed is not recorded.", _records(seed=None)),
    _at(MEANING, "calls-all-raw", 11, "Logprobs are always called raw.",
        _semantics(lambda found: replace(found, processed=False, temperature=1.0)), wires=("sglang",)),
    _at(MEANING, "forgets-grammars-in-semantics", 11, "Logprobs under a grammar are called plain.",
        _semantics(lambda found: replace(found, adjusted=False))),
    _at(PARSED, "adds-arguments", 9, "A call gets an argument that the policy did not write.", _calls(_defaults)),
    _at(BRANCH, "calls-edits-openings", 8, "An edit or a trim is called a new system prompt.", _opening),
    _at(BRANCH, "calls-all-edits", 8, "Every branch is called an edit.", _reason),
    _at(MASK, "trains-prompts", 3, "The loss mask is 1 on prompt tokens.", _mask(_trains_prompts)),
    _at(MASK, "trains-grammars", 3, "Constrained tokens have loss mask 1.", _mask(_trains_grammars)),
    _at(MASK, "trains-shared-twice", 3, "A turn that two trajectories share has loss mask 1 in both.",
        _mask(_trains_shared)),
    _at(MASK, "mask-shifted", 3, "The loss mask is shifted by one token.", _mask(_trains_one_on)),
    _at(DRAFT, "encodes-again", 4, "Answers are decoded and encoded again.", _output(_encoded_again)),
    _at(DRAFT, "drops-stop", 4, "The stop token is dropped.", _output(_without_stop)),
    _at(DRAFT, "samples-closers", 4, "An inserted closer is recorded as sampled.", _output(_closers)),
    _at(DRAFT, "shifts-logprobs", 4, "Logprobs are shifted by one token.", _output(_shifted)),
    _at(DRAFT, "rounds-logprobs", 4, "Logprobs are rounded to 16 bits.", _output(_rounded)),
    _at(DRAFT, "fills-logprobs", 4, "Logprobs are replaced by 0.0.", _output(_zeros)),
    _at((parent, "find_parent"), "cursor", 8, "The latest turn is always the parent.", _cursor),
    _at((parent, "find_parent"), "forgets-history", 8, "Every turn is a new root.", _never_branches),
    Defect("client-spells-controls", 6, "Message content is encoded with control tokens.",
        client=_content_spells, wires=BOTH),
    _at(DELTA, "calls-scaffold-content", 6, "Template tokens are marked as message content.", _marks_content),
    _at(DELTA, "loses-separator", 7, "The first token of a delta is missing.", _delta(lambda ids: ids[1:])),
    _at(DELTA, "loses-opener", 7, "The last token of a delta is missing.", _delta(lambda ids: ids[:-1])),
    _at(DELTA, "doubles-closer", 7, "The first token of a delta is repeated.", _delta(lambda ids: [ids[0], *ids])),
    _at(DELTA, "reorders-results", 7, "Tool results are in another order.", _results_in_order_of_arrival),
    _at((Recording, "commit"), "commits-twice", 5, "A turn is committed twice.", _twice),
    _at((Recording, "commit"), "loses-turns", 5, "Some turns are not committed.", _not_at_all),
    _at(DRAFT, "unmarks-grammars", 9, "Constrained turns are not marked.", _unmarked),
    _at(DRAFT, "loses-columns", 4, "Optional outputs are lost.", _columns(lambda name, column: None)),
    _at(DRAFT, "shifts-experts", 4, "Routed experts are shifted by one row.", _columns(_rolled("routed_experts"))),
    _at(DRAFT, "shifts-prompt-logprobs", 4, "Prompt logprobs are shifted by one token.",
        _columns(_rolled("prompt_logprobs"))),
    _at(DRAFT, "shifts-top", 4, "Top logprobs are those of the previous token.",
        _columns(_rolled("top_ids", "top_logprobs"))),
    _at(DRAFT, "keeps-one-version", 10, "Of several versions, only the last is kept.", _last_version, weights=1),
    _at(PARSED, "drops-second-call", 9, "Of several calls only the first is executed.",
        _calls(lambda found: found[:1])),
    _at(PARSED, "repairs-calls", 9, "A malformed call is repaired and executed.", _calls(_repaired)),
    _at(PARSED, "reverses-calls", 9, "Several calls are executed in reverse order.", _calls(lambda found: found[::-1])),
    _at(DRAFT, "records-no-stop", 4, "The stop is not recorded.", _without_recorded_stop),
    _at(DRAFT, "shifts-calls", 9, "Recorded calls start one token late.", _with_late_calls),
    _at((HttpBackend, "abort"), "sends-no-abort", 5, "An abort is not sent.", lambda _: _no_abort),
)  # fmt: skip
"""Defects of the client."""
