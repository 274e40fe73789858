"""A Strands agent that solves mathematics with a Python tool, and its reward. tito.yaml names `make_agent`."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import shlex
import signal
import sys
from asyncio.subprocess import PIPE, STDOUT
from typing import Any

from strands import Agent, tool
from strands.hooks import AfterInvocationEvent
from strands.types.content import Messages

from strands_tito import TITOModel
from tito_core.hooks import LoopLimiter

SYSTEM_PROMPT = (
    "Solve the problem. Compute with the tool run_python, not in your head; it returns what your code prints. When you "
    "are sure, write the final answer once, as \\boxed{answer}."
)
MAX_TOOL_ITERS = 8
SECONDS, MEMORY, MOST_BYTES = 30, 4 << 30, 4000
"""Limits of one run of code: time, address space in bytes, and bytes of output that the policy sees."""
START = f"""
import resource, sys
for limit, most in (("CPU", {SECONDS}), ("AS", {MEMORY}), ("FSIZE", 0), ("CORE", 0)):
    resource.setrlimit(getattr(resource, "RLIMIT_" + limit), (most, most))
exec(compile(sys.stdin.read(), "<code>", "exec"), {{"__name__": "__main__"}})
"""
ENVIRONMENT = {"PATH": os.defpath, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
"""All that the code finds in its environment: no keys."""


@tool
async def run_python(code: str) -> str:
    """Run a Python program and return what it prints.

    Args:
        code: The program. Print what you want to see.
    """
    return await run_code(code)


async def run_code(code: str) -> str:
    """Run code in a process of its own, below the command in RETOOL_SANDBOX; return its output, errors included.

    The limits protect the machine from accidents, not from intent: only RETOOL_SANDBOX isolates.
    """
    sandbox = shlex.split(os.environ.get("RETOOL_SANDBOX", ""))
    process = await asyncio.create_subprocess_exec(
        *sandbox, sys.executable, "-I", "-c", START,
        stdin=PIPE, stdout=PIPE, stderr=STDOUT, cwd="/", env=ENVIRONMENT, start_new_session=True,
    )  # fmt: skip
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        process.stdin.write(code.encode())
        process.stdin.close()
        async with asyncio.timeout(SECONDS):
            output = await process.stdout.readexactly(MOST_BYTES)
    except asyncio.IncompleteReadError as ended:  # it printed less
        return ended.partial.decode(errors="replace").strip() or "The code printed nothing."
    except TimeoutError:
        return f"Error: the code did not end within {SECONDS} seconds."
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        await process.wait()
    return output.decode(errors="replace") + "\n(the rest is cut)"


def make_agent(model: TITOModel, sample: Any) -> Agent:
    """Make the agent of one rollout; `sample` is slime's, with the answer as `label`."""
    limiter = LoopLimiter(max_tool_iters=MAX_TOOL_ITERS, max_parallel_tool_calls=1)
    agent = Agent(model=model, tools=[run_python], hooks=[limiter], system_prompt=SYSTEM_PROMPT, callback_handler=None)

    def score(event: AfterInvocationEvent) -> None:
        model.ledger.annotate("reward", reward_of(agent.messages, str(sample.label), limiter.tool_iter_count))

    agent.hooks.add_callback(AfterInvocationEvent, score)
    return agent


def reward_of(messages: Messages, label: str, tool_iters: int) -> float:
    """Return 1 for the right answer, else at most -0.6: -1.1 without tools, and 0.05 more for each use of them.

    These are the values of slime's own example: a failure that used the tool is less bad, never as good as an answer.
    """
    last = messages[-1]
    words = "".join(block.get("text", "") for block in last["content"]) if last["role"] == "assistant" else ""
    if (answer := answer_of(words)) is not None and _plain(answer) == _plain(label):
        return 1.0
    return min(-0.6, -1.0 + 0.05 * (tool_iters - 2))


def answer_of(text: str) -> str | None:
    r"""Return the content of the last \boxed{...}, or what follows the last "Answer:"; None without either."""
    start = text.rfind("\\boxed{") + len("\\boxed{")
    depth = 1
    for at in range(start, len(text) if "\\boxed{" in text else 0):
        depth += {"{": 1, "}": -1}.get(text[at], 0)
        if depth == 0:
            return text[start:at]
    said = re.findall(r"Answer:\s*([^\n]+)", text)
    return said[-1] if said else None


def _plain(answer: str) -> str:
    """Return an answer without spaces, dollars, thousands' commas and leading zeros: labels are whole numbers."""
    plain = re.sub(r"[\s$,]|\\!", "", answer).rstrip(".")
    return str(int(plain)) if re.fullmatch(r"-?\d+", plain) else plain
