"""A drawn rollout sent through the model's own turns, up to the engine, which says what the drawing says."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np

from support import peers
from support.drafts import make_draft
from support.rollouts import Rollout, Turn, expected
from tito_core.chat.ending import Opened
from tito_core.chat.template import ChatTemplate
from tito_core.ledger import CallRecord, Finish, Ledger
from tito_core.ledger.history import extended
from tito_core.model import Policy
from tito_core.settings import Settings
from tito_core.turn.history import as_stored, match_parent
from tito_core.turn.inputs import TurnInput
from tito_core.turn.request import Prepared, prepare


def broken_prefixes(template: ChatTemplate, tokenizer: Any, drawn: Rollout) -> int:
    """Count the turns whose request does not begin with the request and the completion of the turn before (law 1).

    What a request holds is computed by the model's own code from the whole history, each time again.
    """
    nothing: Any = None  # what no request needs before it is sent
    backend: Any = SimpleNamespace(name="drawn")
    policy = Policy(backend, nothing, tokenizer, template, nothing, nothing, stop_token_ids=())
    ledger, state = Ledger(), dict[str, Any]()
    before: list[int] = []
    broken = 0
    for turn in [*drawn.turns, None]:
        last = drawn.turns[-1]
        history = [*last.before, last.answered, *last.new] if turn is None else turn.before
        turn_input, settings = TurnInput(history, drawn.system, drawn.tools, model_state=state), Settings()
        prepared = prepare(policy, ledger, turn_input, settings, match_parent(policy, ledger, turn_input, settings))
        sent = prepared.request.input_ids.tolist()
        broken += sent[: len(before)] != before
        if turn is not None:
            completion = _sampled(template, tokenizer, drawn, turn)
            _commit(ledger, prepared, turn, completion, state)
            before = [*sent, *completion]
    return broken


def _sampled(template: ChatTemplate, tokenizer: Any, drawn: Rollout, turn: Turn) -> list[int]:
    return peers.sampled(template, tokenizer, drawn, turn, expected(template, tokenizer, drawn, turn).last)[1]


def _commit(ledger: Ledger, prepared: Prepared, turn: Turn, completion: list[int], state: dict[str, Any]) -> None:
    place = prepared.match
    calls = (CallRecord("look", "truncated", 0, 1),) if turn.opened == Opened.CALL else ()
    draft = make_draft(
        place.parent,
        ledger.path_length(place.parent),
        prepared.delta.ids.tolist(),
        completion,
        prompt_provenance=prepared.delta.provenance,
        logprobs=-np.ones(len(completion), np.float32),
        finish=Finish.STOP if turn.opened is None else Finish.LENGTH,
        stop=completion[-1] if turn.opened is None else None,
        reasoning_closed=turn.opened != Opened.REASONING,
        calls=calls,
        branch=place.branch,
        fingerprint=extended(place.history.digest, as_stored(turn.answered)),
    )
    committed = ledger.commit(draft, place.history, as_stored(turn.answered))
    state["tito"] = {"ledger": ledger.uuid, "turn": committed.index}
