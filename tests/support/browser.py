"""A headless Chromium, driven over its DevTools protocol."""

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

_SETTLED = """new Promise((drawn) => requestAnimationFrame(() => requestAnimationFrame(drawn)))
  .then(() => Promise.allSettled(document.getAnimations().map((each) => each.finished))).then(() => true)"""


class NavigatedError(RuntimeError):
    """The page that a script was evaluated on is gone."""


class Tab:
    """One page. It records network requests, errors and dialogs."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self._ids = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._session: str | None = None
        self.requests: list[str] = []
        self.errors: list[str] = []
        self.dialogs: list[str] = []
        self.loaded = asyncio.Event()

    async def listen(self) -> None:
        async for message in self._socket:
            data = json.loads(message.data)
            if "id" in data:
                self._waiting.pop(data["id"]).set_result(data)
            else:
                self._record(data["method"], data["params"])

    def _record(self, method: str, params: Mapping[str, Any]) -> None:
        if method == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])
        elif method == "Page.loadEventFired":
            self.loaded.set()
        elif method == "Page.javascriptDialogOpening":
            self.dialogs.append(params["message"])
        elif method == "Runtime.exceptionThrown":
            details = params["exceptionDetails"]
            self.errors.append(details.get("exception", {}).get("description", details["text"]))
        elif method == "Log.entryAdded" and params["entry"]["level"] == "error":
            self.errors.append(params["entry"]["text"])

    async def send(self, method: str, **params: Any) -> dict[str, Any]:
        number = next(self._ids)
        self._waiting[number] = asyncio.get_running_loop().create_future()
        session = {"sessionId": self._session} if self._session else {}
        await self._socket.send_str(json.dumps({"id": number, "method": method, "params": params, **session}))
        answer = await asyncio.wait_for(self._waiting[number], 60)
        if "error" in answer:
            message = answer["error"]["message"]
            raise (NavigatedError if "navigated" in message else RuntimeError)(f"{method}: {message}")
        return dict(answer["result"])

    async def attach(self) -> None:
        target = (await self.send("Target.createTarget", url="about:blank"))["targetId"]
        self._session = (await self.send("Target.attachToTarget", targetId=target, flatten=True))["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            await self.send(f"{domain}.enable")

    async def look(self, *, width: int = 1440, height: int = 900, dark: bool = False) -> None:
        """Set the window's size and the system's theme."""
        await self.send(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False
        )
        theme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        await self.send("Emulation.setEmulatedMedia", features=theme)

    async def open(self, url: str) -> None:
        self.loaded.clear()
        await self.send("Page.navigate", url=url)
        await asyncio.wait_for(self.loaded.wait(), 60)

    async def run(self, script: str) -> Any:
        """Evaluate an expression, await a promise, and raise what it throws."""
        answer = await self.send("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        if "exceptionDetails" in answer:
            details = answer["exceptionDetails"]
            raise RuntimeError(details.get("exception", {}).get("description", details["text"]))
        return answer["result"].get("value")

    async def until(self, script: str) -> Any:
        """Wait until an expression is true. One that a navigation ended is evaluated again on the new page."""
        async with asyncio.timeout(60):
            while True:
                with suppress(NavigatedError):
                    if value := await self.run(script):
                        return value
                await asyncio.sleep(0.05)

    async def settle(self) -> None:
        """Wait until what was changed is drawn and its transitions have ended."""
        await self.run(_SETTLED)

    async def click(self, selector: str) -> None:
        """Click the first element of a selector."""
        with suppress(NavigatedError):
            await self.run(f"document.querySelector({json.dumps(selector)}).click()")
            await self.settle()

    async def press(self, key: str) -> None:
        code = _KEYS.get(key, ord(key[0].upper()))
        text = {"text": "\r" if key == "Enter" else key} if len(key) == 1 or key == "Enter" else {}
        await self.send("Input.dispatchKeyEvent", type="keyDown", key=key, windowsVirtualKeyCode=code, **text)
        await self.send("Input.dispatchKeyEvent", type="keyUp", key=key, windowsVirtualKeyCode=code)
        with suppress(NavigatedError):
            await self.settle()

    async def frame_text(self) -> str:
        """Read the text of the first frame of the page, whatever its origin."""
        tree = (await self.send("Page.getFrameTree"))["frameTree"]
        world = await self.send("Page.createIsolatedWorld", frameId=tree["childFrames"][0]["frame"]["id"])
        answer = await self.send(
            "Runtime.evaluate", expression="document.body.textContent", contextId=world["executionContextId"]
        )
        return str(answer["result"]["value"])

    async def picture(self, path: Path) -> None:
        data = (await self.send("Page.captureScreenshot", format="png"))["data"]
        path.write_bytes(base64.b64decode(data))


@asynccontextmanager
async def tab() -> AsyncIterator[Tab]:
    """Start a Chromium and stop it afterwards."""
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
