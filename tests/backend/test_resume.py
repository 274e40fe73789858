"""Aborted generations are resumed, committed or an error."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from support.aborting import Aborting
from support.backends import EOS, PROMPT, WIRES, Kind, engine_name, engine_of, in_process_backend, request_of, reserved
from tito_core.backend import GenerationAbortedError, OnAbort, TokenChunk, TokenResponse, generate_resuming, resume
from tito_core.ledger.laws import check_versions
from tito_core.ledger.turn import Finish

WHOLE = (*range(20, 30), EOS)


@pytest.fixture(autouse=True)
def no_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resume, "_FIRST_WAIT_S", 0.0)


def ask(kind: Kind, script: Any, on_abort: OnAbort = "resume", **sampling: Any) -> TokenResponse:
    settings = {"max_new_tokens": 32, **sampling}
    engine = engine_of(kind, script)
    return asyncio.run(generate_resuming(in_process_backend(engine), request_of(**settings), on_abort))


@pytest.mark.parametrize("kind", WIRES)
def test_an_abort_at_the_limit_is_a_length_finish(kind: Kind) -> None:
    script = Aborting(WHOLE, [8])
    response = ask(kind, script, max_new_tokens=8)
    assert (response.finish, response.message, len(response.output_ids)) == (Finish.LENGTH, None, 8)
    assert len(script.requests) == 1


@pytest.mark.parametrize(
    ("on_abort", "cuts"),
    [("commit", [8]), ("discard", [8]), *(("resume", cuts) for cuts in ([8], [3, 5], [0, 8], [3, 0, 5], [7, 1]))],
)
@pytest.mark.parametrize("kind", WIRES)
def test_an_abort_where_the_context_ends_is_a_length_finish(
    kind: Kind, on_abort: Any, cuts: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    script = Aborting(WHOLE, cuts)
    backend = in_process_backend(engine_of(kind, script, max_model_len=len(PROMPT) + 8 + reserved(kind)))
    monkeypatch.setattr(resume, "MAX_RESUMES", len(cuts) - 1)
    response = asyncio.run(generate_resuming(backend, request_of(max_new_tokens=32), on_abort))
    assert len(script.requests) == len(cuts)
    assert response.output_ids.tolist() == list(WHOLE[:8])
    assert (response.finish, response.stop, response.message) == (Finish.LENGTH, None, None)
    runs = [run for run, cut in enumerate(cuts) for _ in range(cut)]
    assert response.logprobs.tolist() == [-0.25 - 0.5 * run for run in runs]
    check_versions(response.versions, 8)
    assert len(response.responses) == (len(set(runs)) if len(set(runs)) > 1 else 0)


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("on_abort", ["resume", "commit", "discard"])
@pytest.mark.parametrize("kind", WIRES)
def test_an_abort_in_the_step_that_sampled_the_stop_leaves_the_answer_whole(
    kind: Kind, on_abort: OnAbort, streamed: bool
) -> None:
    for cuts in ([len(WHOLE)], *([[3, len(WHOLE) - 3]] if on_abort == "resume" else [])):
        script, seen = Aborting(WHOLE, cuts), list[int]()
        backend = in_process_backend(engine_of(kind, script))

        def show(chunk: TokenChunk, seen: list[int] = seen) -> None:
            seen.extend(chunk.output_ids.tolist())

        sent = request_of(max_new_tokens=32, min_new_tokens=len(WHOLE) - 1)
        response = asyncio.run(generate_resuming(backend, sent, on_abort, show if streamed else None))
        assert (response.finish, response.stop, response.message) == (Finish.STOP, EOS, None)
        assert response.output_ids.tolist() == list(WHOLE)
        assert seen == (list(WHOLE) if streamed else [])
        assert len(script.requests) == len(cuts), "nothing was sampled behind the end"


@pytest.mark.parametrize("sampling", [{"ignore_eos": True}, {"min_new_tokens": len(WHOLE)}, {"stop_token_ids": ()}])
@pytest.mark.parametrize("kind", WIRES)
def test_an_abort_after_an_id_that_ends_nothing_is_one(kind: Kind, sampling: Any) -> None:
    response = ask(kind, Aborting(WHOLE, [len(WHOLE)]), "commit", **sampling)
    assert (response.finish, response.stop, response.output_ids.tolist()) == (Finish.ABORT, None, list(WHOLE))


@pytest.mark.parametrize("sampling", [{"stop": ("xyz",)}, {"grammar": {"kind": "regex", "value": "a+"}}])
@pytest.mark.parametrize("kind", WIRES)
def test_a_generation_that_cannot_be_resumed_is_sampled_again(kind: Kind, sampling: Any) -> None:
    script = Aborting(WHOLE, [3, 2])
    response = ask(kind, script, **sampling)
    assert [request.prompt_ids for request in script.requests] == [PROMPT] * 3
    assert response.output_ids.tolist() == list(WHOLE)
    assert response.logprobs.tolist() == [-1.25] * len(WHOLE)
    assert (response.responses, response.request_id) == ((), "r-part2")


@pytest.mark.parametrize("kind", WIRES)
def test_a_streamed_part_that_cannot_be_resumed_is_an_error(kind: Kind) -> None:
    backend = in_process_backend(engine_of(kind, Aborting(WHOLE, [1])))
    reason = r"\(Aborted\)" if kind == "sglang" else "generation;"
    with pytest.raises(GenerationAbortedError, match=f"{reason}.*stop strings.*streamed") as caught:
        asyncio.run(generate_resuming(backend, request_of(stop=("xyz",)), on_chunk=lambda _: None))
    assert (caught.value.backend, caught.value.request_id) == (engine_name(kind), "r")


@pytest.mark.parametrize("emitted", [0, 3])
@pytest.mark.parametrize("kind", WIRES)
def test_discard_is_an_error(kind: Kind, emitted: int) -> None:
    script = Aborting(WHOLE, [emitted])
    with pytest.raises(GenerationAbortedError, match=r"partial tokens were discarded.*on_abort='resume'") as caught:
        ask(kind, script, "discard")
    assert (caught.value.request_id, len(script.requests)) == ("r", 1)


@pytest.mark.parametrize("kind", WIRES)
def test_commit_returns_the_partial_answer(kind: Kind) -> None:
    response = ask(kind, Aborting(WHOLE, [3]), "commit")
    assert (response.finish, response.output_ids.tolist()) == (Finish.ABORT, list(WHOLE[:3]))
    with pytest.raises(GenerationAbortedError, match="no tokens to commit"):
        ask(kind, Aborting(WHOLE, [0]), "commit")


@pytest.mark.parametrize("cut", [0, 1])
@pytest.mark.parametrize("kind", WIRES)
def test_a_server_that_aborts_everything_is_not_retried_forever(
    kind: Kind, cut: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resume, "MAX_RESUMES", 4)
    script = Aborting(WHOLE, [cut] * 9)
    with pytest.raises(GenerationAbortedError, match=r"resumed 4 times, the most that is tried"):
        ask(kind, script)
    assert len(script.requests) == 5
