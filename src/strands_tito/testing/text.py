"""The text of a completion: which tokens the servers show, and how streams split it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from strands_tito.testing.settle import Settled
from strands_tito.testing.wire import EngineState

_PARTIAL = "\N{REPLACEMENT CHARACTER}"


def completion_text(state: EngineState, answer: Settled, params: Mapping[str, Any]) -> str:
    """Return a completion's text, without the stop token or stop string at its end and without eos ids.

    `params` are vLLM's or SGLang's sampling fields: `skip_special_tokens` false keeps eos ids; vLLM's
    `include_stop_str_in_output` and SGLang's `no_stop_trim` keep the stop.
    """
    if answer.completion.text is not None:
        return answer.completion.text
    return _visible(state, answer, answer.output_ids, params, len(answer.output_ids))


def deltas(state: EngineState, answer: Settled, params: Mapping[str, Any]) -> list[str]:
    """Return the text that each token adds to a stream. A token that ends inside a character adds nothing yet."""
    texts = ["", *prefixes(state, answer, params)]
    return [text[len(before) :] for before, text in pairwise(texts)]


def prefixes(state: EngineState, answer: Settled, params: Mapping[str, Any]) -> list[str]:
    """Return the text after each token of a cumulative stream. It waits for whole characters too."""
    texts: list[str] = []
    total = len(answer.output_ids)
    for n in range(1, total + 1):
        text = _visible(state, answer, answer.output_ids[:n], params, total)
        if text.endswith(_PARTIAL) and n < total:
            text = texts[-1] if texts else ""
        texts.append(text)
    return texts


def _visible(state: EngineState, answer: Settled, ids: Sequence[int], params: Mapping[str, Any], total: int) -> str:
    keep = bool(params.get("include_stop_str_in_output") or params.get("no_stop_trim"))
    stopped_at_token = answer.finish == "stop" and not isinstance(answer.stop, str)
    if stopped_at_token and not keep and len(ids) == total:
        ids = ids[:-1]
    if params.get("skip_special_tokens", True):
        special = answer.request.eos_ids
        ids = [i for i in ids if i not in special]
    text = state.decode(ids)
    if isinstance(answer.stop, str) and not keep and (at := text.find(answer.stop)) >= 0:
        return text[:at]
    return text
