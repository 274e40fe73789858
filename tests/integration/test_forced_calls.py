"""A forced tool choice on real engines: a sound call of the forced tool, with constrained tokens."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

import tito_engines as engines
from support.forced_calls import force
from support.real import Served
from tito_core import Policy
from tito_core.backend import UnsupportedByServerError
from tito_engines import models

pytestmark = pytest.mark.engine


async def test_forced_calls_with_tags_as_text(served: Served) -> None:
    outcome = await force(served.policy, 10, seed=1)
    assert outcome.found == {"right": 10}, outcome.faults


async def test_forced_calls_with_tags_as_tokens(tagged: Served) -> None:
    outcome = await force(tagged.policy, 10, seed=1)
    assert outcome.found == {"right": 10}, outcome.faults


@pytest.fixture(scope="module", params=[True, False], ids=["generate", "completions"])
def behind_parser(request: pytest.FixtureRequest) -> Iterator[tuple[Policy, bool]]:
    """A vLLM with a reasoning parser, as thinking models are usually served, with and without its token endpoint."""
    closed = [] if request.param else ["--no-enable-scale-out"]
    arguments = ["--reasoning-parser", "qwen3", *closed]
    with engines.running_sync("vllm", model="qwen3-tiny", server_args=arguments) as url:
        yield Policy.connect(backend="vllm", base_url=url, tokenizer=models.load_tokenizer("qwen3-tiny")), request.param


@pytest.mark.long
async def test_a_server_with_a_reasoning_parser_constrains_all_or_is_refused(
    behind_parser: tuple[Policy, bool],
) -> None:
    policy, is_open = behind_parser
    model = policy.model(sampling={"max_new_tokens": 60, "seed": 1})
    asked: Any = [{"role": "user", "content": [{"text": "Hi."}]}]
    schema = {
        "type": "object",
        "properties": {"b": {"type": "boolean"}},
        "required": ["b"],
        "additionalProperties": False,
    }
    specs: Any = [{"name": "f", "description": "d", "inputSchema": {"json": schema}}]
    turn = model.stream(asked, specs, tool_choice={"tool": {"name": "f"}})
    if not is_open:
        with pytest.raises(UnsupportedByServerError, match="--enable-scale-out"):
            _ = [event async for event in turn]
        assert len(model.ledger) == 0
        return
    _ = [event async for event in turn]
    [committed] = model.ledger
    assert committed.draft.constrained
    assert [(call.name, call.status) for call in committed.draft.calls] == [("f", "ok")]
