"""The stop of an answer: a token or a string, also where the server does not report it (vLLM up to 0.31)."""

from __future__ import annotations

from typing import Any

import pytest

from support.scripted import BACKENDS, Says, model_of, tokenizer
from tito_conformance.testing import Fault, FaultPolicy, always
from tito_conformance.testing.script import ScriptedRequest
from tito_core import TITOModel
from tito_core.backend import ProtocolViolationError
from tito_core.ledger import Finish

USER: Any = [{"role": "user", "content": [{"text": "Count."}]}]


def unnamed(number: int, request: ScriptedRequest) -> Fault:
    """Answer as vLLM 0.30.0 does on `/inference/v1/generate`."""

    def edit(answer: Any) -> None:
        for event in answer if isinstance(answer, list) else [answer]:
            for choice in event["choices"]:
                choice.pop("stop_reason")

    return Fault(edit=edit)


async def ended(model: TITOModel) -> str:
    (reason,) = [e["messageStop"]["stopReason"] async for e in model.stream(USER) if "messageStop" in e]
    return str(reason)


def counting(**options: Any) -> TITOModel:
    return model_of("vllm", Says("one, two, three."), decode=lambda ids: str(tokenizer().decode(list(ids))), **options)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("fault", [None, unnamed], ids=["named", "unnamed"])
async def test_the_first_stop_string_is_reported(fault: Any, stream: bool) -> None:
    model = counting(fault=fault, stream=stream, sampling={"stop": ("three", "wo", "nowhere")})
    assert await ended(model) == "stop_sequence"
    (turn,) = model.ledger
    assert turn.draft.stop == "wo"
    assert tokenizer().decode(turn.draft.output_ids.tolist()) == "one, two"


async def test_a_reported_stop_string_must_be_in_the_text() -> None:
    """It was requested, but the answer's own tokens do not have it; blanks that a decoder drops do not matter."""

    def claims(stop: str) -> FaultPolicy:
        return always(Fault(edit=lambda answer: answer["choices"][0].update(stop_reason=stop)))

    for stop in ("nowhere", "\n\n"):  # the second holds nothing but blanks, and is no less absent
        model = counting(fault=claims(stop), sampling={"stop": ("two", stop)})
        with pytest.raises(ProtocolViolationError, match=r"Law 4: .* ended the output, but its text is 'one"):
            await ended(model)
        assert len(model.ledger) == 0
    model = counting(fault=claims("one,  two"), sampling={"stop": ("two", "one,  two")})
    assert await ended(model) == "stop_sequence"


@pytest.mark.parametrize("kind", BACKENDS)
async def test_an_unknown_finish_reason_is_kept_beside_the_nearest(kind: str) -> None:
    def edit(answer: Any) -> None:
        if kind == "vllm":
            answer["choices"][0].update(finish_reason="repetition", stop_reason="repetition_detected")
        else:
            answer["meta_info"]["finish_reason"] = {"type": "repetition"}

    model = model_of(kind, Says("again and again..."), sampling={"max_new_tokens": 40}, fault=always(Fault(edit=edit)))
    assert await ended(model) == "max_tokens"
    draft = model.ledger[0].draft
    assert (draft.finish, draft.engine.finish_word, draft.stop) == (Finish.LENGTH, "repetition", None)


@pytest.mark.parametrize("fault", [None, unnamed], ids=["named", "unnamed"])
async def test_a_stop_token_is_reported_with_stop_strings_set(fault: Any) -> None:
    model = counting(fault=fault, sampling={"stop": ("three!", "nowhere")})
    assert await ended(model) == "end_turn"
    assert model.ledger[0].draft.stop == tokenizer().eos_token_id


async def test_without_a_stop_string_the_last_token_is_the_stop() -> None:
    """The server's model configuration may have a stop that the tokenizer does not have."""

    def stopped(number: int, request: ScriptedRequest) -> Fault:
        def edit(answer: Any) -> None:
            (choice,) = answer["choices"]
            del choice["stop_reason"]
            choice["finish_reason"] = "stop"

        return Fault(edit=edit)

    model = model_of("vllm", Says("one, two..."), fault=stopped, sampling={"stop": ("nowhere",), "max_new_tokens": 3})
    assert await ended(model) == "end_turn"
    draft = model.ledger[0].draft
    assert draft.stop == draft.output_ids[-1]
