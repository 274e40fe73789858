"""A pytest plugin that replaces `strands_sglang` and `strands_vllm` by our packages, for tools/peers_tests.py.

Private names that the peers' tests use are replaced by adapters with the same visible behaviour: a message added to a
limiter goes through Strands' own events, and our transport sends to the mocked HTTP session.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from collections.abc import AsyncIterator, Mapping
from types import ModuleType, SimpleNamespace
from typing import Any
from urllib.parse import urlsplit

import aiohttp
from strands.hooks import BeforeModelCallEvent, BeforeToolCallEvent, HookRegistry, MessageAddedEvent

import tito_compat
from tito_core.backend.http.client import HttpResponse
from tito_core.backend.id_text import Pieces

ALIASES = {"strands_sglang": "tito_sglang", "strands_vllm": "tito_vllm"}


def _install() -> None:
    """Register our modules under the peers' names."""
    for theirs, ours in ALIASES.items():
        package = importlib.import_module(ours)
        sys.modules[theirs] = package
        for alias in tito_compat.ALIASES:
            if alias.startswith(f"{ours}."):
                sys.modules[alias.replace(ours, theirs, 1)] = importlib.import_module(alias)
    if os.environ.get("TITO_PEERS_ALONE") != "1":
        _stand_in("limiter", LoopLimiter=_limiter())
        _stand_in("client", SGLangClient=_client())


def _stand_in(name: str, **instead: Any) -> None:
    """Register a copy of one of our modules with some names replaced."""
    real = sys.modules[f"strands_sglang.{name}"]
    module = ModuleType(real.__name__)
    module.__dict__.update({**real.__dict__, **instead})
    sys.modules[f"strands_sglang.{name}"] = module


def _limiter() -> type:
    from tito_sglang import LoopLimiter

    class Driven(LoopLimiter):
        """Gets messages and calls through Strands' events; a model call follows each user message."""

        def __init__(self, *args: Any, **limits: Any) -> None:
            super().__init__(*args, **limits)
            self._registry = HookRegistry()
            self.register_hooks(self._registry)
            self._agent: Any = SimpleNamespace(messages=[])

        def _on_message_added(self, event: MessageAddedEvent) -> None:
            self._agent.messages.append(event.message)
            self._registry.invoke_callbacks(MessageAddedEvent(agent=self._agent, message=event.message))
            if event.message["role"] == "user":
                self._registry.invoke_callbacks(BeforeModelCallEvent(agent=self._agent, invocation_state={}))

        def _on_before_tool_call(self, event: BeforeToolCallEvent) -> None:
            forwarded = BeforeToolCallEvent(
                agent=self._agent, selected_tool=None, tool_use=event.tool_use, invocation_state={}
            )
            self._registry.invoke_callbacks(forwarded)
            event.cancel_tool = forwarded.cancel_tool

    return Driven


def _client() -> type:
    from tito_compat.sglang_client import as_sglang_error
    from tito_core.backend.errors import BackendError
    from tito_core.backend.http.errors import error_from_status
    from tito_core.backend.retries import is_transient
    from tito_sglang import SGLangClient, SGLangHTTPError

    class Sent(SGLangClient):
        """Sends through a session that a test puts in the place of `_get_session`."""

        def __init__(self, base_url: str, **options: Any) -> None:
            super().__init__(base_url, **options, http_transport=lambda: _ThroughSession(self))

        @staticmethod
        def _classify_http_error(status: int, body: str) -> BackendError:
            return as_sglang_error(error_from_status("sglang", status, body, {}, url="", request_id=None))

        def _is_retryable_error(self, error: BaseException) -> bool:
            if type(error) is SGLangHTTPError:
                error = self._classify_http_error(error.status or 0, error.body)
            return isinstance(error, BackendError) and is_transient(error)

    return Sent


class _ThroughSession:
    def __init__(self, client: Any) -> None:
        self._client = client

    async def send(self, method: str, url: str, headers: Mapping[str, str], body: bytes | Pieces) -> HttpResponse:
        session = self._client._get_session()
        send = session.get if method == "GET" else session.post
        try:
            sent = send(urlsplit(url).path, data=body if isinstance(body, bytes) else b"".join(body))
        except (TimeoutError, aiohttp.ClientError):
            raise
        except Exception as refused:  # a mock raises any exception for a refused connection
            where: Any = SimpleNamespace(host="mocked", port=80, ssl=True)
            raise aiohttp.ClientConnectorError(where, ConnectionRefusedError(str(refused))) from refused
        async with sent as answer:
            if answer.status >= 400:
                return HttpResponse(answer.status, {}, _whole(await answer.text()), self.aclose)
            try:
                text = json.dumps(await answer.json(content_type=None))
            except Exception:  # a mock raises any exception for a body that is not JSON
                text = "<html>"
            return HttpResponse(answer.status, {"content-type": "application/json"}, _whole(text), self.aclose)

    async def aclose(self) -> None:
        """See `HttpTransport`."""


async def _whole(text: str) -> AsyncIterator[bytes]:
    yield text.encode()


_install()  # now: the tests' own conftest.py imports them before pytest is configured
