"""The arguments of `Policy.connect_async`, as plain values that can be sent to another process."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tito_core.model import Policy


@dataclass(frozen=True, slots=True)
class Connection:
    """The arguments of `Policy.connect_async`.

    Attributes:
        backend: Name of the backend.
        base_url: Address of the server, or addresses of several equal ones.
        tokenizer: Name or folder of the tokenizer, valid on every machine.
        parser: Name of the tool-call format.
        options: More arguments, such as `model` and `template_arguments`.
    """

    backend: str
    base_url: str | tuple[str, ...]
    tokenizer: str
    parser: str = "auto"
    options: Mapping[str, Any] = field(default_factory=dict, repr=False)  # it may hold the API key

    async def connect(self) -> Policy:
        """Connect in this process.

        Raises:
            TokenizerError, TemplateError, UnknownBackendError, UnknownParserError, DetectionError, BackendError: As
                `Policy.connect_async`.
        """
        url = self.base_url if isinstance(self.base_url, str) else list(self.base_url)
        return await Policy.connect_async(
            backend=self.backend, base_url=url, tokenizer=self.tokenizer, parser=self.parser, **self.options
        )
