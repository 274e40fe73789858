"""A harness in the place of a Strands agent: in `tito collect`, and in the loops that run inside trainers."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

from strands.types.content import Messages

from strands_tito.gateway.gateway import Gateway
from tito_core.model import TITOModel

_NAME = "rollout"


@asynccontextmanager
async def serving(model: TITOModel, **options: Any) -> AsyncIterator[str]:
    """Serve the model of one rollout at an address. Each request is a turn of the model's ledger.

        async def run(model, task):  # tito collect --agent my_project:run
            async with serving(model) as url:
                await run_my_harness(base_url=f"{url}/v1", question=task["question"])

    Args:
        model: The model; its options hold, as `sampling`.
        **options: Those of `Gateway` that are not of a rollout, such as `fixed_sampling` and `ignored`.

    Yields:
        The address, without `/v1`.
    """
    gateway = Gateway(model.policy, **options)
    gateway.add(_NAME, model)
    async with gateway:
        yield f"{gateway.url}/sessions/{_NAME}"


class HarnessAgent:
    """What a trainer's loop takes for an agent, and what runs a harness. Return it where an agent is made.

    Args:
        model: The rollout's model.
        run: Runs the harness to its end, of the address without `/v1` and the prompt: a text, or messages as Strands
            writes them.
        **options: See `serving`.

    Attributes:
        messages: The prompt's messages. What followed is in the ledger.
        system_prompt: The system message of the prompt, for `run` to read.
    """

    name = "harness"

    def __init__(self, model: TITOModel, run: Callable[[str, str | Messages], Awaitable[Any]], **options: Any) -> None:
        self.model, self._run, self._options = model, run, options
        self.messages: Messages = []
        self.system_prompt: str | None = None

    async def invoke_async(self, prompt: str | Messages | None = None, **_: Any) -> None:
        """Run the harness. How the rollout ended follows from its last answer."""
        given = prompt if prompt is not None else ""
        self.messages = [{"role": "user", "content": [{"text": given}]}] if isinstance(given, str) else given
        async with serving(self.model, **self._options) as url:
            await self._run(url, given)

    def cleanup(self) -> None:
        """Do nothing: the harness has ended."""
