"""How a gateway is started, addressed and exported."""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import aiohttp

from tito_conformance.gateway.audit import Row
from tito_conformance.gateway.dialects import DIALECTS

ADAPTERS = Path(__file__).with_name("adapters")
START_S = 300.0
"""Seconds that a gateway may take to start, or an adapter to answer."""
END_S = 30.0


class GatewayError(Exception):
    """The gateway or its adapter cannot be started or asked."""


@dataclass(frozen=True, slots=True)
class Facts:
    """What an adapter declares of its gateway.

    Attributes:
        name: The gateway's name.
        version: The installed version.
        variant: The mode that runs.
        pip: Arguments of `pip install` that make its environment, a string for each run; none if it is ours.
        python: Versions of Python that it installs on.
        speaks: Wires on which harnesses call it, of `DIALECTS`.
        wires: Engines that it is judged with, the default first: "vllm", "sglang".
        token_in: Whether it claims that the engine is sent the recorded ids again, instead of a new rendering.
        renders: Who renders messages to ids: "gateway" or "engine".
        streams: Whether it answers `stream: true` with a stream.
        tools: Whether it runs tools in this environment.
        aborts: Whether a request can be aborted behind it; False where the engine stands in for a service.
        release: The vLLM release whose answers it reads.
        note: What differs from its defaults, and why.
    """

    name: str
    version: str = ""
    variant: str = ""
    pip: Sequence[str] = ()
    python: str = ""
    speaks: Sequence[str] = ("chat",)
    wires: Sequence[str] = ("vllm", "sglang")
    token_in: bool = True
    renders: str = "gateway"
    streams: bool = True
    tools: bool = True
    aborts: bool = True
    release: str = "0.32.0"
    note: str = ""
    variants: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    package: str = ""

    @classmethod
    def of(cls, value: Mapping[str, Any], variant: str = "") -> Facts:
        """Return the facts of an adapter, with what its variant changes.

        Raises:
            GatewayError: The adapter has no such variant, or declares what is not known here.
        """
        variants = value.get("variants") or {}
        chosen = variant or next(iter(variants), "")
        if chosen and chosen not in variants:
            raise GatewayError(
                f"{value['name']} has no variant {chosen!r}. Available: {', '.join(variants) or 'none'}."
            )
        try:
            return cls(**{**value, "variant": chosen, **variants.get(chosen, {})})
        except TypeError as error:
            raise GatewayError(f"The adapter's FACTS: {error}.") from error


class Gateway(Protocol):
    """A gateway under test."""

    facts: Facts

    async def open(self) -> None:
        """Find out its facts."""

    async def start(self, engine: str, wire: str, tokenizer: str, model: str) -> None:
        """Start it before an engine, or wait until it answers."""

    async def session(self, name: str) -> Mapping[str, Any]:
        """Return `base_url`, which ends in `/v1`, `api_key` and `headers` of a new session."""

    async def export(self, name: str) -> list[Row]:
        """Return a session's rows; asked once a session."""

    async def stop(self) -> None:
        """End what was started."""


class ChildGateway:
    """A gateway that an adapter runs in a Python of its own. See `child.py` for the commands."""

    def __init__(self, adapter: Path, python: str, variant: str = "") -> None:
        self.facts = Facts(adapter.stem, variant=variant)
        self._adapter = adapter
        self._python = python
        self._process: asyncio.subprocess.Process | None = None
        self._log = tempfile.TemporaryFile()  # noqa: SIM115  (closed by stop)

    async def open(self) -> None:
        """Start the process, and read the facts."""
        program, pipe = Path(__file__).with_name("child.py"), asyncio.subprocess.PIPE
        command = self._python, str(program), str(self._adapter)
        try:
            self._process = await asyncio.create_subprocess_exec(
                *command, stdin=pipe, stdout=pipe, stderr=self._log, limit=1 << 28
            )
        except OSError as error:
            raise GatewayError(f"--python: cannot run {self._python}: {error.strerror}.") from error
        self.facts = Facts.of(await self._do("facts"), self.facts.variant)

    async def start(self, engine: str, wire: str, tokenizer: str, model: str) -> None:
        """See `Gateway`."""
        given = {"engine": engine, "wire": wire, "tokenizer": tokenizer, "model": model}
        await self._do("start", **given, variant=self.facts.variant)

    async def session(self, name: str) -> Mapping[str, Any]:
        """See `Gateway`."""
        found: Mapping[str, Any] = await self._do("session", name=name)
        return found

    async def export(self, name: str) -> list[Row]:
        """See `Gateway`."""
        return [Row.of(each) for each in await self._do("export", name=name)]

    async def stop(self) -> None:
        """See `Gateway`."""
        self._log.close()
        process, self._process = self._process, None
        if process is None or process.stdin is None:
            return
        process.stdin.close()  # the child ends, and with it what it started
        try:
            await asyncio.wait_for(process.wait(), END_S)
        except TimeoutError:
            process.kill()
            await process.wait()

    async def _do(self, do: str, **fields: str) -> Any:
        process = self._process
        assert process is not None  # set by open
        assert process.stdin is not None  # pipes
        assert process.stdout is not None
        process.stdin.write(json.dumps({"do": do, **fields}).encode() + b"\n")
        line = await asyncio.wait_for(process.stdout.readline(), START_S)
        if not line:
            status = await process.wait()
            raise GatewayError(f"The adapter {self._adapter.name} ended at `{do}` with {status}. {self._last_lines()}")
        answer = json.loads(line)
        if "error" in answer:
            raise GatewayError(f"The adapter {self._adapter.name} cannot {do}: {answer['error']} {self._last_lines()}")
        return answer["ok"]

    def _last_lines(self) -> str:
        """Return what the gateway wrote last; it is kept from the terminal."""
        self._log.seek(max(0, self._log.seek(0, 2) - 800))
        lines = self._log.read().decode(errors="replace").splitlines()[-4:]
        return f"Its last lines: {' / '.join(lines)}" if lines else ""


class HttpGateway:
    """A gateway that runs already: sessions at `URL/sessions/NAME/v1`, rows at `URL/sessions/NAME/trajectories`.

    The rows are `{"trajectories": [{"token_ids": [...], "loss_mask": [...], "logprobs": [...]}]}`, with null for
    logprobs off the mask.
    """

    def __init__(self, url: str, api_key: str = "EMPTY", wires: Sequence[str] = ("vllm", "sglang")) -> None:
        self.facts = Facts(url, speaks=(*DIALECTS,), wires=wires)
        self._url = url.rstrip("/")
        self._key = api_key
        self._headers = {"Authorization": f"Bearer {api_key}"}

    async def open(self) -> None:
        """Return: its facts are what was given."""

    async def start(self, engine: str, wire: str, tokenizer: str, model: str) -> None:
        """Wait until it answers at all: it may connect to the engine first."""
        deadline = asyncio.get_running_loop().time() + START_S
        while True:
            try:
                async with aiohttp.ClientSession() as http, http.get(self._url):
                    return
            except aiohttp.ClientError as error:
                if asyncio.get_running_loop().time() > deadline:
                    raise GatewayError(f"No gateway answers at {self._url}: {error}") from error
                await asyncio.sleep(0.1)

    async def session(self, name: str) -> Mapping[str, Any]:
        """See `Gateway`."""
        return {"base_url": f"{self._url}/sessions/{name}/v1", "api_key": self._key, "headers": {}}

    async def export(self, name: str) -> list[Row]:
        """See `Gateway`. A session of which nothing is known has no rows."""
        url = f"{self._url}/sessions/{name}/trajectories"
        async with aiohttp.ClientSession() as http, http.get(url, headers=self._headers) as answer:
            if answer.status == 404:
                return []
            if answer.status != 200:
                raise GatewayError(f"{url} answered {answer.status}: {(await answer.text())[:300]}")
            found = (await answer.json())["trajectories"]
        return [Row(each["token_ids"], each["loss_mask"], each["logprobs"]) for each in found]

    async def stop(self) -> None:
        """Return: somebody else runs it."""


def find(named: str, python: str = "", api_key: str = "") -> ChildGateway | HttpGateway:
    """Return the gateway of an address, of an adapter's file or of a shipped one; `NAME:VARIANT` chooses a mode.

    Raises:
        GatewayError: There is no such adapter.
    """
    if named.startswith(("http://", "https://")):
        return HttpGateway(named, api_key or "EMPTY")
    name, _, variant = named.partition(":")
    path = Path(name) if name.endswith(".py") else ADAPTERS / f"{name.replace('-', '_')}.py"
    if not path.is_file():
        available = sorted(each.stem.replace("_", "-") for each in ADAPTERS.glob("[a-z]*.py"))
        raise GatewayError(f"Unknown gateway {named!r}. Available: {', '.join(available)}, a file, or an address.")
    return ChildGateway(path.resolve(), python or sys.executable, variant)
