"""How to connect a policy, as plain values that another process can do the same with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tito_core.model import Policy


@dataclass(frozen=True, slots=True)
class Connection:
    """What `Policy.connect_async` is called with.

    Attributes:
        backend: Name of the backend.
        base_url: Address of the server, or of several.
        tokenizer: Name or folder of the tokenizer, which every machine must find.
        parser: Name of the tool-call format.
        options: Further ones, such as `model` and `template_arguments`.
    """

    backend: str
    base_url: str | tuple[str, ...]
    tokenizer: str
    parser: str = "auto"
    options: Mapping[str, Any] = field(default_factory=dict)

    async def connect(self) -> Policy:
        """Connect, in this process.

        Raises:
            TokenizerError, TemplateError, UnknownBackendError, UnknownParserError, DetectionError, BackendError: Each a
                sentence.
        """
        url = self.base_url if isinstance(self.base_url, str) else list(self.base_url)
        return await Policy.connect_async(
            backend=self.backend, base_url=url, tokenizer=self.tokenizer, parser=self.parser, **self.options
        )
