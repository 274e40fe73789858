"""Rollouts in processes of this machine, one event loop each.

The processes are started, not forked: a fork would copy locks and connections that other threads are using. Each has
one socket to this process, on which both send pickled values, each after its length. The end of the socket ends the
process, so that none outlives the collection, however that ends.
"""

from __future__ import annotations

import asyncio
import os
import pickle
import select
import signal
import socket
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, Self, Unpack

from strands_tito.collect.actors import CLOSE_S, ActorLostError, ActorResult, Actors, Connection, RolloutActor
from strands_tito.collect.rollout import AgentCode, CollectError, Rollout, exit_error
from strands_tito.collect.run import failure_of
from tito_core.settings import RolloutOptions, Settings

GRACE_S = 5.0
"""Seconds that an actor may take to end when the process that started it is gone."""
_START = "import sys; sys.path[:] = sys.argv[2:]; from strands_tito.collect.processes import main; main(sys.argv[1])"
_LENGTH = 8


class Processes(Actors):
    """Runs rollouts in processes of this machine. Create one with `Processes.start`."""

    def __init__(self, agent: AgentCode, *arguments: Any) -> None:
        super().__init__(agent)
        try:
            self._arguments = _packed(arguments)
        except Exception as error:  # pickle raises errors of several types
            raise CollectError(
                f"The options cannot be sent to another process ({error}): give plain values, or use one process."
            ) from error
        self._actors: list[_Process] = []
        self._restarting = asyncio.Lock()

    @classmethod
    async def start(
        cls,
        connection: Connection,
        agent: str,
        *,
        workers: int,
        folder: Path | None = None,
        **options: Unpack[RolloutOptions],
    ) -> Self:
        """Start the processes.

        Args:
            connection: How each process connects its policy.
            agent: The agent as `module:function`.
            workers: Number of processes. Each uses up to one CPU.
            folder: Put in front of `sys.path` for the agent's module.
            **options: Options of each rollout's model; see `RolloutOptions`.

        Raises:
            AgentError: The agent was not found.
            CollectError: `workers` is below 1, an option cannot be pickled, or a process ended before it was connected.
            BackendError, TokenizerError, TemplateError: A process could not connect its policy.
        """
        if workers < 1:
            raise CollectError(f"workers={workers} must be at least 1.")
        Settings.of(**options)
        started = cls(AgentCode.of(agent, folder), connection, agent, folder, dict(options))
        started._expect(workers)
        try:
            for _ in range(workers):
                started._actors.append(await _Process.start(started._arguments))
            await asyncio.gather(*(actor.call("connect") for actor in started._actors))
        except ActorLostError as error:
            await started.aclose()
            raise CollectError(f"A process of the collection could not start: {error}") from error
        except BaseException:
            await started.aclose()
            raise
        return started

    async def _run_on(self, number: int, rollout: Rollout) -> ActorResult:
        async with self._restarting:
            if self._actors[number].ended:
                await self._actors[number].aclose()
                self._actors[number] = await _Process.start(self._arguments)
        answer: ActorResult = await self._actors[number].call("run", rollout)
        return answer

    async def aclose(self) -> None:
        """End the processes."""
        await asyncio.gather(*(actor.aclose() for actor in self._actors))


class _Process:
    """One process, and the calls that it has not answered."""

    def __init__(
        self, process: asyncio.subprocess.Process, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self._process, self._writer = process, writer
        self._calls: dict[int, asyncio.Future[Any]] = {}
        self._count = 0
        self.ended = False
        self._listening = asyncio.create_task(self._listen(reader))
        self._watching = asyncio.create_task(self._watch())

    @classmethod
    async def start(cls, arguments: bytes) -> Self:
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                process = await asyncio.create_subprocess_exec(
                    *(sys.executable, "-c", _START, str(theirs.fileno()), *sys.path),
                    stdin=asyncio.subprocess.DEVNULL,
                    pass_fds=(theirs.fileno(),),
                    process_group=0,  # a terminal sends Ctrl-C to this process only, which then cancels the rollouts
                )
            except OSError as error:
                ours.close()
                raise ActorLostError(f"no process could be started: {error}") from error
        started = cls(process, *await asyncio.open_connection(sock=ours))
        started._writer.write(arguments)
        return started

    async def call(self, what: str, rollout: Rollout | None = None) -> Any:
        """Let the process "connect" its policy or "run" a rollout, and return its answer.

        Raises:
            ActorLostError: The process ended before it answered.
            Exception: What the process raised.
        """
        if self.ended:
            raise ActorLostError(self._end())
        self._count += 1
        number, answer = self._count, asyncio.get_running_loop().create_future()
        self._calls[number] = answer
        self._send((number, what, rollout))
        try:
            return await answer
        except asyncio.CancelledError:
            self._send((number, "cancel", None))
            raise
        finally:
            self._calls.pop(number, None)

    async def aclose(self) -> None:
        """Let the process abort its requests and end; after `CLOSE_S` seconds kill it."""
        with suppress(OSError):
            self._writer.write_eof()
        try:
            await asyncio.wait_for(asyncio.shield(self._watching), CLOSE_S)
        except TimeoutError:
            with suppress(ProcessLookupError):
                self._process.kill()
            await self._watching
        finally:
            self._listening.cancel()
            self._writer.close()

    def _send(self, value: Any) -> None:
        if not self._writer.is_closing():
            self._writer.write(_packed(value))

    async def _listen(self, reader: asyncio.StreamReader) -> None:
        with suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                number, answer, error = await _received(reader)
                calls = [self._calls.get(number)] if number else [*self._calls.values()]
                for call in calls:
                    if call is None or call.done():
                        continue  # it was cancelled
                    if error is None:
                        call.set_result(answer)
                    else:
                        call.set_exception(error)
        self._lose()

    async def _watch(self) -> None:
        await self._process.wait()
        if not self._listening.done():  # it may have answered before it ended
            await asyncio.wait([self._listening], timeout=1.0)  # a child of its own may hold the socket open
        self._lose()

    def _lose(self) -> None:
        self.ended = True
        for call in self._calls.values():
            if not call.done():
                call.set_exception(ActorLostError(self._end()))

    def _end(self) -> str:
        status = self._process.returncode  # None where its socket ended first
        return f"process {self._process.pid} ended" + ("" if status is None else f" with status {status}")


def _packed(value: Any) -> bytes:
    data = pickle.dumps(value)
    return len(data).to_bytes(_LENGTH, "big") + data


async def _received(reader: asyncio.StreamReader) -> Any:
    length = int.from_bytes(await reader.readexactly(_LENGTH), "big")
    return pickle.loads(await reader.readexactly(length))  # from a process that we started


def main(descriptor: str) -> None:
    """Run an actor in this process until the other end of the socket is closed."""
    # The collection decides when to end. Not SIG_IGN: a tool's process would inherit it, as its forks do handlers.
    before = [(each, signal.signal(each, lambda *_: None)) for each in (signal.SIGINT, signal.SIGTERM)]
    os.register_at_fork(after_in_child=lambda: [signal.signal(*handler) for handler in before])
    own = socket.socket(fileno=int(descriptor))
    own.set_inheritable(False)
    last = own.dup()
    threading.Thread(target=_end_with, args=(last,), daemon=True).start()
    with asyncio.Runner() as runner:
        try:
            runner.run(_serve(own))
        except asyncio.CancelledError:
            pass  # the agent's code cancelled every task: without an answer, the rollouts run again elsewhere
        except BaseException as error:  # SystemExit in a task of the agent's code ends the event loop
            final = exit_error(error) if isinstance(error, SystemExit) else error
            last.setblocking(True)
            with suppress(OSError):
                last.sendall(_packed((0, None, _sendable(final))))


def _end_with(connection: socket.socket) -> None:
    """End this process soon after the one that started it, even if the agent's code blocks the event loop."""
    waiting = select.poll()
    waiting.register(connection, 0)  # reports only that the other end is gone
    waiting.poll()
    time.sleep(GRACE_S)
    os._exit(1)


async def _serve(own: socket.socket) -> None:
    reader, writer = await asyncio.open_connection(sock=own)
    actor = RolloutActor(*await _received(reader))
    running: dict[int, asyncio.Task[None]] = {}

    async def answer(number: int, rollout: Rollout | None) -> None:
        value, error = None, None
        try:
            value = await (actor.connect() if rollout is None else actor.run(rollout))
        except Exception as raised:
            error = _sendable(raised)
        finally:
            del running[number]
        writer.write(_packed((number, value, error)))

    with suppress(asyncio.IncompleteReadError, ConnectionError):
        while True:
            number, what, rollout = await _received(reader)
            if what != "cancel":
                running[number] = asyncio.create_task(answer(number, rollout))
            elif task := running.get(number):
                task.cancel()
    for task in (ending := list(running.values())):
        task.cancel()
    await asyncio.gather(*ending, return_exceptions=True)
    await actor.aclose()


def _sendable(error: BaseException) -> BaseException:
    """Return an error, or its text if it cannot be sent to another process."""
    try:
        pickle.loads(pickle.dumps(error))  # our own
    except Exception:
        return CollectError(failure_of(error).error)
    return error
