"""One warm tool turn, counted exactly: calls and opcodes by stage, files and frames to the HTTP client.

    python benchmarks/warm_turn.py            # the table
    python benchmarks/warm_turn.py --check    # and exit with 1 above budget.toml; what is below it is written there
    python benchmarks/warm_turn.py --files vllm plain      # the files and functions of one turn, in the order they run

`plain`, `streamed` and `picture` are the third turn of the second rollout at `Model.stream`, against a scripted server
in another process; `ten` is the mean of the first ten plain ones, and `agent` that of ten through Strands' `Agent`,
without its tools' threads. Calls are those of Python and C functions that `sys.setprofile` sees, opcodes those of
Python functions, with Python 3.11 and the locked packages; libraries' calls are about 900. Opcodes show the loops that
a comprehension hides from calls; a loop inside C, such as `map(attrgetter(...))`, shows in neither, only in
milliseconds (benchmarks/turn_cost.py). Counts do not depend on the machine.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import multiprocessing
import re
import sys
import tomllib
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from types import FrameType
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "benchmarks" / "clients"))

from conversation import TOOLS, opening, turn  # noqa: E402

FILE = ROOT / "benchmarks" / "budget.toml"
BUDGET = tomllib.loads(FILE.read_text(encoding="utf-8"))
SLACK, NOISE = 1.01, 20
"""How much more than the budget a turn may count, as a factor and in counts that differ between runs."""
STREAM_SLACK = 1.25
"""The factor of a streamed turn: its counts depend on how many events one read brings."""
TRIES = 4
ENGINES = ("sglang", "vllm")
SAMPLED = 100
WARM = 2
TURNS = 10
STAGES = {
    "count": "other",
    "run_turn": "other",
    "Recording.begin": "find",
    "with_prompt_tools": "find",
    "match_parent": "find",
    "prepare_turn": "delta",
    "within_limits": "http",
    "BaseEventLoop._run_once": "http",
    "validated": "check",
    "check_sampled_ids": "check",
    "with_stop": "check",
    "read_answer": "parse",
    "events": "parse",
    "Ledger.check": "commit",
    "Prompt.checked_path": "commit",
    "Recording.commit": "commit",
    "PromptCache.keep": "commit",
}
"""The functions at which a stage of a plain turn begins; it lasts while they run."""


@dataclass
class Counted:
    """What one turn does, as the function of `sys.setprofile`.

    Attributes:
        figures: Calls of Python and C functions, opcodes, and the calls of each stage.
        functions: Our files and functions, in the order of their first call.
        frames: Our frames from `run_turn` to the HTTP client.
        names: Qualified names of all functions.
        stages: The stages of the frames that run now.
    """

    figures: Counter[str] = field(default_factory=Counter)
    functions: dict[tuple[str, str], None] = field(default_factory=dict)
    frames: list[str] = field(default_factory=list)
    names: set[str] = field(default_factory=set)
    stages: list[str] = field(default_factory=lambda: ["other"])

    @property
    def files(self) -> list[str]:
        """Our files, in the order of their first call."""
        return list(dict.fromkeys(file for file, _ in self.functions))

    def __enter__(self) -> None:
        gc.disable()  # what it finalizes would be counted
        sys.settrace(self.trace)
        sys.setprofile(self)

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)
        sys.settrace(None)
        gc.enable()

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        """Count one event of `sys.setprofile`."""
        code = frame.f_code
        if event == "return":
            if len(self.stages) > 1:
                self.stages.pop()
        elif event == "call":
            self.names.add(code.co_qualname)
            self.stages.append(STAGES.get(code.co_qualname, self.stages[-1]))
            if "/src/tito_" in code.co_filename:
                self.functions[code.co_filename.partition("/src/")[2], code.co_qualname] = None
            elif code.co_name == "_request" and code.co_filename.endswith("aiohttp/client.py"):
                self.frames = self.frames or _ours(frame)
        if event in ("call", "c_call"):
            self.figures.update(("calls", self.stages[-1]))

    def trace(self, frame: FrameType, event: str, argument: Any) -> Any:
        """Count one opcode, as a function of `sys.settrace`."""
        if event == "opcode":
            self.figures["opcodes"] += 1
        elif event == "call":
            frame.f_trace_lines, frame.f_trace_opcodes = False, True
        return self.trace


def _ours(frame: FrameType | None) -> list[str]:
    """Return our functions that wait for a frame, from `run_turn` on."""
    found: list[str] = []
    while frame is not None and "run_turn" not in found:
        if "/src/tito_" in frame.f_code.co_filename:
            found.append(frame.f_code.co_qualname)
        frame = frame.f_back
    return found[::-1]


def serve(port: Any) -> None:
    """Serve scripted tool calls, with and without pictures on each wire, until the process is ended."""
    with ExitStack() as servers:
        port.send({key: servers.enter_context(scripted(*key)).base_url for key in product(ENGINES, (False, True))})
        port.recv()


def scripted(engine: str, picture: bool) -> Any:
    """Return a server that answers each request with the same tool call."""
    from tito_conformance.testing import Completion, ImageSettings, scripted_server
    from tito_engines import models

    tokenizer: Any = models.load_tokenizer("qwen3-vl-tiny" if picture else "smollm2")
    call = tokenizer.encode('<tool_call>\n{"name": "look", "arguments": {"n": 1}}\n</tool_call>')
    end = int(tokenizer.eos_token_id)
    words = tokenizer.encode(" word") * (SAMPLED - len(call) - 1)

    def script(request: Any) -> Completion:
        return Completion([*words, *call, end])

    pad = tokenizer.convert_tokens_to_ids("<|image_pad|>")
    images = ImageSettings(pad) if picture else None
    options: Any = {"vocab_size": len(tokenizer), "max_model_len": 8192, "eos_ids": [end], "images": images}
    return scripted_server(engine, script, decode=tokenizer.decode, record=False, **options)


async def count(engine: str, kind: str, url: str) -> Counted:
    """Count turns of the second rollout: the first compares what is new in a process (law 7)."""
    from tito_conformance.testing.pictures import picture
    from tito_core import Policy
    from tito_engines import models

    tokenizer = models.load_tokenizer("qwen3-vl-tiny" if kind == "picture" else "smollm2")
    policy = await Policy.connect_async(backend=engine, base_url=url, tokenizer=tokenizer)
    for rollout in range(2):
        model: Any = policy.model(sampling={"max_new_tokens": SAMPLED}, stream=kind == "streamed")
        counted, messages = Counted(), opening(500)
        gc.collect()
        if kind == "agent":
            from crowd import agent_of, through_agent

            await turn(model, messages, TOOLS)
            agent = agent_of((model, messages), TURNS)
            with counted:
                await through_agent(agent, TURNS)
        elif kind == "ten":
            for _ in range(TURNS):
                with counted:
                    await turn(model, messages)
        else:
            for _ in range(WARM):
                await turn(model, messages)
            if kind == "picture":
                image = {"format": "png", "source": {"bytes": picture(rollout)}}
                messages[-1]["content"].append({"image": image})
            with counted:
                await turn(model, messages)
    await policy.backend.aclose()
    turns = TURNS if kind in ("ten", "agent") else 1
    counted.figures = Counter({name: number // turns for name, number in counted.figures.items()})
    return counted


@contextmanager
def servers() -> Iterator[dict[tuple[str, bool], str]]:
    """Run the servers in another process; yield their addresses, by engine and whether they take pictures."""
    spawn = multiprocessing.get_context("spawn")
    ours, theirs = spawn.Pipe()
    process = spawn.Process(target=serve, args=(theirs,), daemon=True)
    process.start()
    try:
        yield ours.recv()
    finally:
        ours.send("end")
        process.join()


def counted(engine: str, kind: str, urls: Mapping[tuple[str, bool], str]) -> Counted:
    """Count one kind of turn."""
    return asyncio.run(count(engine, kind, urls[engine, kind == "picture"]))


def main() -> int:
    """Print the table; with --check return 1 if a turn is above its budget."""
    parser = argparse.ArgumentParser(description=str(__doc__).split("\n", 1)[0])
    parser.add_argument("--check", action="store_true", help="exit with 1 if a turn is above its budget")
    parser.add_argument("--files", nargs=2, metavar=("ENGINE", "KIND"), help="print the functions of one turn")
    arguments = parser.parse_args()
    with servers() as urls:
        return measure(arguments, urls)


def measure(arguments: argparse.Namespace, urls: Mapping[tuple[str, bool], str]) -> int:
    """Print what the options ask for; return the exit status."""
    if arguments.files:
        engine, kind = arguments.files
        of = counted(engine, kind, urls)
        print("\n".join(f"{file:45} {name}" for file, name in of.functions))
        print("from run_turn to the HTTP client:", *of.frames, sep="\n  ")
        return 0
    above = 0
    for engine, kind in ((name, kind) for name in ENGINES for kind in BUDGET[name]):
        of, most = counted(engine, kind, urls), BUDGET[engine][kind]
        for _ in range(TRIES):  # a busy machine splits a read, 15 calls more each time, or makes it connect again
            if too_much(of, kind, most):
                of = min(of, counted(engine, kind, urls), key=lambda one: one.figures["calls"])
        wrong = too_much(of, kind, most)
        above += bool(wrong)
        if arguments.check and kind != "streamed":
            write_down(engine, kind, {name: of.figures[name] for name in most if of.figures[name] < most[name] - NOISE})
        sizes = f"{len(of.files)} files, {len(of.functions)} functions, {len(of.frames)} frames"
        print(f"{engine} {kind}:", *(f"{name} {of.figures[name]:,}/{most[name]:,}" for name in most), sizes, sep="  ")
        for name in wrong:
            print(f"  ABOVE ITS BUDGET: {name}")
    return int(arguments.check and above > 0)


def too_much(of: Counted, kind: str, most: Mapping[str, int]) -> list[str]:
    """Return the figures of a turn that are above its budget."""
    slack = STREAM_SLACK if kind == "streamed" else SLACK
    wrong = [name for name in most if of.figures[name] > slack * most[name] + NOISE]
    if kind == "plain":
        wrong += [f"no call of {name}, which STAGES names" for name in STAGES.keys() - of.names]
    sizes = {"frames": of.frames} | ({"files": of.files} if kind == "plain" else {})
    return wrong + [name for name, found in sizes.items() if len(found) > BUDGET[name]]


def write_down(engine: str, kind: str, lower: Mapping[str, int]) -> None:
    """Lower figures of a turn in the file."""
    text = FILE.read_text(encoding="utf-8")
    for name, number in lower.items():
        text = re.sub(rf"(\[{engine}\.{kind}\][^\[]*?\b{name} = )\d+", rf"\g<1>{number}", text)
    FILE.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
