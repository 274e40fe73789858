"""A headless Chromium, driven over its DevTools protocol with the websocket client that we depend on anyway."""

from __future__ import annotations

import asyncio
import base64
import itertools
import json
import os
import shutil
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import aiohttp

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
_KEYS = {"ArrowRight": 39, "ArrowLeft": 37, "Tab": 9, "Home": 36, "End": 35, "Enter": 13, "Escape": 27}


class Tab:
    """One page. What it asked the network for, complained of and was refused is kept."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self._ids = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._session: str | None = None
        self.requests: list[str] = []
        self.complaints: list[str] = []
        self.dialogs: list[str] = []
        self.loaded = asyncio.Event()

    async def listen(self) -> None:
        async for message in self._socket:
            said = json.loads(message.data)
            if "id" in said:
                self._waiting.pop(said["id"]).set_result(said)
            else:
                self._note(said["method"], said["params"])

    def _note(self, method: str, params: Mapping[str, Any]) -> None:
        if method == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])
        elif method == "Page.loadEventFired":
            self.loaded.set()
        elif method == "Page.javascriptDialogOpening":
            self.dialogs.append(params["message"])
        elif method == "Runtime.exceptionThrown":
            details = params["exceptionDetails"]
            self.complaints.append(details.get("exception", {}).get("description", details["text"]))
        elif method == "Log.entryAdded" and params["entry"]["level"] == "error":
            self.complaints.append(params["entry"]["text"])

    async def ask(self, method: str, **params: Any) -> dict[str, Any]:
        number = next(self._ids)
        self._waiting[number] = asyncio.get_running_loop().create_future()
        session = {"sessionId": self._session} if self._session else {}
        await self._socket.send_str(json.dumps({"id": number, "method": method, "params": params, **session}))
        answer = await asyncio.wait_for(self._waiting[number], 60)
        if "error" in answer:
            raise RuntimeError(f"{method}: {answer['error']['message']}")
        return dict(answer["result"])

    async def attach(self) -> None:
        target = (await self.ask("Target.createTarget", url="about:blank"))["targetId"]
        self._session = (await self.ask("Target.attachToTarget", targetId=target, flatten=True))["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            await self.ask(f"{domain}.enable")

    async def look(self, *, width: int = 1440, height: int = 900, dark: bool = False) -> None:
        """Set the window's size and the system's theme."""
        await self.ask(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False
        )
        theme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        await self.ask("Emulation.setEmulatedMedia", features=theme)

    async def open(self, url: str) -> None:
        self.loaded.clear()
        await self.ask("Page.navigate", url=url)
        await asyncio.wait_for(self.loaded.wait(), 60)

    async def run(self, script: str) -> Any:
        """Evaluate an expression; a promise is waited for. What it throws is raised."""
        answer = await self.ask("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        if "exceptionDetails" in answer:
            details = answer["exceptionDetails"]
            raise RuntimeError(details.get("exception", {}).get("description", details["text"]))
        return answer["result"].get("value")

    async def until(self, script: str) -> Any:
        """Wait until an expression is true."""
        async with asyncio.timeout(60):
            while not (found := await self.run(script)):
                await asyncio.sleep(0.05)
        return found

    async def press(self, key: str) -> None:
        code = _KEYS.get(key, ord(key[0].upper()))
        text = {"text": key} if len(key) == 1 else {}
        await self.ask("Input.dispatchKeyEvent", type="keyDown", key=key, windowsVirtualKeyCode=code, **text)
        await self.ask("Input.dispatchKeyEvent", type="keyUp", key=key, windowsVirtualKeyCode=code)

    async def frame_text(self) -> str:
        """Read the text of the first frame of the page, whatever its origin."""
        tree = (await self.ask("Page.getFrameTree"))["frameTree"]
        world = await self.ask("Page.createIsolatedWorld", frameId=tree["childFrames"][0]["frame"]["id"])
        answer = await self.ask(
            "Runtime.evaluate", expression="document.body.textContent", contextId=world["executionContextId"]
        )
        return str(answer["result"]["value"])

    async def picture(self, path: Path) -> None:
        data = (await self.ask("Page.captureScreenshot", format="png"))["data"]
        path.write_bytes(base64.b64decode(data))


@asynccontextmanager
async def tab() -> AsyncIterator[Tab]:
    """Start a Chromium, and end it afterwards."""
    assert CHROMIUM is not None, "Install a Chromium first: apt-get install chromium."
    with TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        process = await asyncio.create_subprocess_exec(
            CHROMIUM, "--headless=new", "--no-sandbox", "--disable-gpu", "--remote-debugging-port=0",
            f"--user-data-dir={profile}", "--no-first-run", "--disable-background-networking",
            "--disable-features=IsolateSandboxedIframes", "about:blank",
            stderr=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip
        try:
            async with asyncio.timeout(60):
                address = await _address(process)
            async with (
                aiohttp.ClientSession() as session,
                session.ws_connect(address, max_msg_size=0) as socket,
            ):
                opened = Tab(socket)
                listening = asyncio.create_task(opened.listen())
                await opened.attach()
                yield opened
                listening.cancel()
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, 9)
            await process.wait()


async def _address(process: asyncio.subprocess.Process) -> str:
    assert process.stderr is not None
    async for line in process.stderr:
        if line.startswith(b"DevTools listening on "):
            return line.decode().removeprefix("DevTools listening on ").strip()
    raise RuntimeError(f"Chromium ended with status {await process.wait()} before it listened.")
