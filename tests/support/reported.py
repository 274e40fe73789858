"""Build raw responses of one generation, and check that validation refuses them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest

from support.backends import EOS, PROMPT
from tito_core.backend import OptionalOutputs, ProtocolViolationError, RawResponse, SamplingParams, TokenRequest
from tito_core.backend.id_text import IdText
from tito_core.backend.values import RawReader

READER = RawReader("sglang", "r7")
OUTPUT = (21, 22, EOS)


def raw(value: Any) -> msgspec.Raw:
    return msgspec.Raw(msgspec.json.encode(value))


def reported(**changes: Any) -> RawResponse:
    given = {
        "finish": "stop",
        "response_id": "cmpl-r7",
        "stop": EOS,
        "output_ids": list(OUTPUT),
        "logprobs": [-1.0, -2.0, -3.0],
        "logprob_ids": list(OUTPUT),
        "echoed": raw(list(PROMPT)),
        "prompt_tokens": len(PROMPT),
        "completion_tokens": 3,
        "cached_tokens": 4,
    }
    return RawResponse(**{**given, **changes})


def request(
    optional_outputs: Any = None, *, kept: bool = False, echo: bool = True, delta_start: int = 0, **sampling: Any
) -> TokenRequest:
    """Return a request; `kept` adds the prompt's text, as a rollout caches it."""
    ids = np.array(PROMPT, np.int32)
    settings = SamplingParams(**{"max_new_tokens": 8, "stop_token_ids": (EOS,), **sampling})
    text = IdText.of(ids) if kept else None
    return TokenRequest(
        ids,
        settings,
        "r7",
        id_text=text,
        optional_outputs=OptionalOutputs.of(optional_outputs),
        delta_start=delta_start,
        echo=echo,
    )


def refused(pattern: str, act: Callable[[], Any]) -> None:
    """Check that `act` raises a violation whose message matches, for this backend and request."""
    with pytest.raises(ProtocolViolationError, match=pattern) as caught:
        act()
    assert (caught.value.backend, caught.value.request_id) == ("sglang", "r7")
