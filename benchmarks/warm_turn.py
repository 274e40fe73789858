"""One warm tool turn, counted exactly: calls, files and frames to the HTTP client, by engine and kind of turn.

    python benchmarks/warm_turn.py            # the table
    python benchmarks/warm_turn.py --check    # and exit with 1 above budget.toml; what is below it is written there
    python benchmarks/warm_turn.py --files vllm plain      # the files and functions of one turn, in the order they run

The turn is the third of the second rollout at `Model.stream`, against a scripted server in another process. Calls are
those of Python and C functions that `sys.setprofile` sees, with Python 3.11 and the locked packages; libraries' calls
are about 900 of them. They do not depend on the machine, unlike milliseconds (benchmarks/turn_cost.py).
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import re
import sys
import tomllib
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
"""How much more than the budget a turn may call, as a factor and in calls that differ between runs."""
STREAM_SLACK = 1.25
"""The same of a streamed turn: its calls depend on how many events one read brings."""
ENGINES = ("sglang", "vllm")
KINDS = ("plain", "streamed", "picture")
SAMPLED = 100
WARM = 2


@dataclass
class Counted:
    """What one turn does.

    Attributes:
        calls: Calls of Python and C functions.
        functions: Our files and functions, in the order of their first call.
        frames: Our frames from `run_turn` to the HTTP client.
    """

    calls: int = 0
    functions: dict[tuple[str, str], None] = field(default_factory=dict)
    frames: list[str] = field(default_factory=list)

    @property
    def files(self) -> list[str]:
        """Our files, in the order of their first call."""
        return list(dict.fromkeys(file for file, _ in self.functions))

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        """Count one event of `sys.setprofile`."""
        if event in ("call", "c_call"):
            self.calls += 1
        file = frame.f_code.co_filename
        if event == "call" and "/src/tito_" in file:
            self.functions[file.partition("/src/")[2], frame.f_code.co_qualname] = None
        if event == "call" and file.endswith("aiohttp/client.py") and frame.f_code.co_name == "_request":
            self.frames = self.frames or _ours(frame)


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
    """Run two rollouts and count the last turn of the second: the first compares what is new in a process (law 7)."""
    from tito_conformance.testing.pictures import picture
    from tito_core import Policy
    from tito_engines import models

    tokenizer = models.load_tokenizer("qwen3-vl-tiny" if kind == "picture" else "smollm2")
    policy = await Policy.connect_async(backend=engine, base_url=url, tokenizer=tokenizer)
    counted = Counted()
    for rollout in range(2):
        model: Any = policy.model(sampling={"max_new_tokens": SAMPLED}, stream=kind == "streamed")
        messages = opening(500)
        for _ in range(WARM):
            await turn(model, messages)
        if kind == "picture":
            messages[-1]["content"].append({"image": {"format": "png", "source": {"bytes": picture(rollout)}}})
        sys.setprofile(counted if rollout else None)
        await turn(model, messages, TOOLS)
        sys.setprofile(None)
    await policy.backend.aclose()
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
    print(f"{'turn':20} {'calls':>6} {'budget':>7} {'files':>6} {'functions':>10} {'frames':>7}")
    for engine in ENGINES:
        for kind in KINDS:
            of, most = counted(engine, kind, urls), BUDGET[engine][kind]
            limit = STREAM_SLACK * most if kind == "streamed" else SLACK * most + NOISE
            if of.calls > limit:  # a busy machine may have made it connect again
                of = min(of, counted(engine, kind, urls), key=lambda one: one.calls)
            over = of.calls > limit or len(of.frames) > BUDGET["frames"]
            over |= kind == "plain" and len(of.files) > BUDGET["files"]
            above += over
            if arguments.check and kind != "streamed" and of.calls < most - NOISE:
                write_down(engine, kind, of.calls)
            print(
                f"{engine + ' ' + kind:20} {of.calls:6,} {most:7,} {len(of.files):6} {len(of.functions):10} "
                f"{len(of.frames):7}{'  ABOVE ITS BUDGET' if over else ''}"
            )
    return int(arguments.check and above > 0)


def write_down(engine: str, kind: str, calls: int) -> None:
    """Lower a turn's budget in the file."""
    text = FILE.read_text(encoding="utf-8")
    FILE.write_text(re.sub(rf"(\[{engine}\][^\[]*?{kind} = )\d+", rf"\g<1>{calls}", text), encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
