"""Runs one adapter in the gateway's own Python: `python child.py ADAPTER.py`. Standard library only.

It reads one JSON line for each command from standard input, and answers each with one on standard output:

    {"do": "facts"}                                        -> the adapter's FACTS, with the installed version
    {"do": "start", "engine": URL, "wire": "vllm", "tokenizer": FOLDER, "model": NAME, "variant": ""}
    {"do": "session", "name": NAME}                        -> {"base_url": ..., "api_key": ..., "headers": {...}}
    {"do": "export", "name": NAME}                         -> [{"ids": [...], "mask": [...], "logprobs": [...]}]

An answer is `{"ok": value}` or `{"error": text}`. An adapter is a file with `FACTS` and the functions `start`,
`session` and `export`, and `stop` if `spawn` did not start it; it may use what stands here.
"""

from __future__ import annotations

import ast
import importlib.metadata
import json
import os
import runpy
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

FIELDS: dict[str, tuple[str, ...]] = {
    "facts": (),
    "start": ("engine", "wire", "tokenizer", "model", "variant"),
    "session": ("name",),
    "export": ("name",),
}
_started: list[subprocess.Popen[bytes]] = []
_loops: list[Any] = []
"""The event loop of `in_loop`, once it runs."""


def request(url: str, body: Any = None, key: str = "EMPTY", method: str | None = None) -> Any:
    """Return the decoded JSON answer to a GET, or to a POST if there is a body."""
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {key}"}
    data = None if body is None else json.dumps(body).encode()
    sent = urllib.request.Request(url, data, headers, method=method)
    try:
        with urllib.request.urlopen(sent, timeout=60) as answer:
            return json.loads(answer.read() or b"null")
    except urllib.error.HTTPError as error:
        raise RuntimeError(f"{url}: {error.code} {error.read().decode()[:300]}") from None


def free_port() -> int:
    """Return a port that is free now."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
    return port


def spawn(command: Sequence[str], health: str, seconds: float = 180.0) -> None:
    """Start a server, and wait until its health address answers; it ends with this process."""
    server = subprocess.Popen(command, stdout=sys.stderr, stderr=sys.stderr)
    _started.append(server)
    deadline = time.monotonic() + seconds
    while True:
        try:
            urllib.request.urlopen(health, timeout=5).close()
            return
        except OSError as error:
            if server.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"{command[0]} does not answer at {health}: {error}") from None
            time.sleep(0.1)


def in_loop(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """Run a coroutine on this process's one event loop, which a thread runs, and return its result."""
    import asyncio

    if not _loops:
        _loops.append(asyncio.new_event_loop())
        threading.Thread(target=_loops[0].run_forever, daemon=True).start()
    return asyncio.run_coroutine_threadsafe(coroutine, _loops[0]).result()


def settled(read: Callable[[], list[Any]], seconds: float = 0.3) -> list[Any]:
    """Return a list once it stopped growing for some seconds, for a gateway that writes after it answered."""
    found = read()
    while True:
        time.sleep(seconds)
        before, found = found, read()
        if len(before) == len(found):
            return found


def row(prompt: Sequence[int], output: Sequence[int], logprobs: Sequence[float | None] | None) -> dict[str, Any]:
    """Return the row of one recorded call; logprobs of another number than its samples stay so."""
    reported = [None] * len(output) if logprobs is None else [*logprobs]
    mask = [0] * len(prompt) + [1] * len(output)
    return {"ids": [*prompt, *output], "mask": mask, "logprobs": [None] * len(prompt) + reported}


def facts_in(path: str) -> dict[str, Any]:
    """Return the FACTS of an adapter's file, a literal."""
    with open(path, encoding="utf-8") as file:
        body = ast.parse(file.read()).body
    [value] = [each.value for each in body if isinstance(each, ast.Assign) and ast.unparse(each.targets[0]) == "FACTS"]
    facts: dict[str, Any] = ast.literal_eval(value)
    return facts


def facts_of(path: str) -> dict[str, Any]:
    """Return the facts of an adapter, with the version of the package that is installed.

    Raises:
        RuntimeError: It is not.
    """
    facts = facts_in(path)
    try:
        return {**facts, "version": importlib.metadata.version(facts["package"])} if "package" in facts else facts
    except importlib.metadata.PackageNotFoundError:
        runs = " and ".join(f"`pip install {arguments}`" for arguments in facts["pip"])
        raise RuntimeError(
            f"{sys.executable} has no {facts['package']}. Make an environment with Python {facts['python']}, run "
            f"{runs} in it, and pass its interpreter with --python."
        ) from None


def main(path: str) -> None:
    """Answer commands until standard input ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a gateway prints is no answer
    sys.modules["tito_conformance.gateway.child"] = sys.modules["__main__"]  # importable without this package
    sys.path.pop(0)  # the folder of this file, whose modules are not the gateway's
    adapter: dict[str, Any] = {"facts": lambda: facts_of(path)}
    for line in sys.stdin:
        command = json.loads(line)
        try:
            if command["do"] == "start":
                adapter = runpy.run_path(path)
            fields = [command[name] for name in FIELDS[command["do"]]]
            answers.write(json.dumps({"ok": adapter[command["do"]](*fields)}) + "\n")
        except Exception as error:
            answers.write(json.dumps({"error": f"{type(error).__name__}: {error}"}) + "\n")
        answers.flush()
    adapter.get("stop", lambda: None)()
    for server in _started:
        server.terminate()
        server.wait()


if __name__ == "__main__":
    main(sys.argv[1])
