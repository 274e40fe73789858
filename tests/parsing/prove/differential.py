"""Our parsers beside those inside a real engine's package: do they agree on sound turns, and who reports damage?

Runs in the engine's own environment. On sound turns both must give the same names and arguments; each difference is
printed with its turn. On damaged turns it counts what each makes of the damage: "reported" (a malformed call, which no
engine has), "no call" (it became text), "as it was" (a sound call comes out that equals one of the turn's), and
"invented" (a call comes out that the turn never held, and it would run).

    ENGINE_ENVIRONMENT/bin/python tests/parsing/prove/differential.py vllm|sglang [--turns 5000] [--formats NAME ...]
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import logging
import math
import signal
from collections import Counter
from collections.abc import Callable
from typing import Any

import parsing_only  # noqa: F401  # before all of ours
from generated import Turn, damaged, sound

from parsing.families import FAMILIES, Call, Family, ids_of, schema_of
from tito_core.parsing import CallStatus, get_tool_parser

LONGEST_S = 2.0
"""A parser that takes longer for one turn hangs."""
Theirs = Callable[[Turn, list[int]], list[Call]]
VLLM = {
    "gpt_oss": "openai",
    "phi4_mini": "phi4_mini_json",
}
SGLANG = {
    "deepseek_v3": "deepseekv3",
    "deepseek_v31": "deepseekv31",
    "deepseek_v32": "deepseekv32",
    "deepseek_v4": "deepseekv4",
    "gpt_oss": "gpt-oss",
    "llama3_json": "llama3",
    "llama4_pythonic": "pythonic",
    "minimax_m2": "minimax-m2",
    "granite": "",
    "phi4_mini": "",
    "xlam": "",
}


def tools_of(turn: Turn) -> list[dict[str, Any]]:
    return [
        {"type": "function", "function": {"name": name, "description": "", "parameters": schema_of(given)}}
        for name, given in turn.calls
    ]


def vllm(family: Family) -> Theirs:
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.tool_parsers import ToolParserManager

    made = ToolParserManager.get_tool_parser(VLLM.get(family.name, family.name))
    tokenizer = family.tokenizer(True)

    def parse(turn: Turn, ids: list[int]) -> list[Call]:
        request = ChatCompletionRequest(
            model="m", messages=[{"role": "user", "content": "a"}], tools=tools_of(turn), tool_choice="auto",
            chat_template_kwargs={"enable_thinking": False, "thinking": False},
        )  # fmt: skip
        parser = made(tokenizer, request.tools)
        found = parser.extract_tool_calls(turn.text, request)
        return [(call.function.name, json.loads(call.function.arguments)) for call in found.tool_calls]

    return parse


def sglang(family: Family) -> Theirs:
    from sglang.srt.entrypoints.openai.protocol import Tool
    from sglang.srt.function_call.function_call_parser import FunctionCallParser

    name = SGLANG.get(family.name, family.name)
    if name not in FunctionCallParser.ToolCallParserEnum:
        raise LookupError("it has no such parser")

    def parse(turn: Turn, ids: list[int]) -> list[Call]:
        parser = FunctionCallParser([Tool(**tool) for tool in tools_of(turn)], name)
        text = "<|start|>assistant" + turn.text if family.name == "gpt_oss" else turn.text
        _, found = parser.parse_non_stream(text)
        return [(call.name or "", json.loads(call.parameters)) for call in found]

    return parse


def ours(family: Family) -> Callable[[Turn, list[int]], tuple[list[Call], bool]]:
    parser = get_tool_parser(family.name, family.tokenizer(True))

    def parse(turn: Turn, ids: list[int]) -> tuple[list[Call], bool]:
        session = parser.start((), {name: schema_of(given) for name, given in turn.calls})
        session.feed(ids)
        read = session.finish(truncated=False)
        good = [(c.name or "", dict(c.arguments or {})) for c in read.calls if c.status == CallStatus.OK]
        return good, len(good) < len(read.calls)

    return parse


def same(one: Any, other: Any) -> bool:
    """Compare values; 1 and 1.0 are one number, true and 1 are not."""
    if isinstance(one, bool) or isinstance(other, bool):
        return one is other
    if isinstance(one, int | float) and isinstance(other, int | float):
        return one == other or math.isclose(one, other, rel_tol=1e-15)
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    return type(one) is type(other) and one == other


def how(one: Any, other: Any) -> str:
    """Name the first difference between two values that are not the same."""
    if isinstance(one, str) and isinstance(other, str):
        return "blanks lost" if one.strip() == other.strip() else "another string"
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        if len(one) != len(other):
            return "items lost"
        return next(how(a, b) for a, b in zip(one, other, strict=True) if not same(a, b))
    if isinstance(one, dict) and isinstance(other, dict):
        if one.keys() != other.keys():
            return "other keys"
        return next(how(one[key], other[key]) for key in one if not same(one[key], other[key]))
    shown = repr(one) if one in ("null", None) else type(one).__name__
    return f"{shown} read as {type(other).__name__}"


def attempted(theirs: Theirs, turn: Turn, ids: list[int]) -> list[Call] | str:
    signal.signal(signal.SIGALRM, _too_long)
    signal.setitimer(signal.ITIMER_REAL, LONGEST_S)
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            return theirs(turn, ids)
    except json.JSONDecodeError:
        return "broken arguments"
    except Exception as error:
        return f"raised {type(error).__name__}"
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def _too_long(*_: object) -> None:
    raise TimeoutError


def fate(found: list[Call] | str, turn: Turn, reported: bool = False) -> str:
    """Classify what a parser made of a damaged turn."""
    if isinstance(found, str):
        return found
    if any(not any(same(call, one) for one in turn.calls) for call in found):
        return "invented"
    if reported:
        return "reported"
    return "as it was" if len(found) == len(turn.calls) else "no call"


def compare(engine: Callable[[Family], Theirs], family: Family, count: int, show: int) -> None:
    """Run one format and print its rows."""
    try:
        theirs = engine(family)
    except Exception as error:
        print(f"{family.name:16} not compared: {type(error).__name__}: {str(error)[:150]}", flush=True)
        return
    mine = ours(family)
    agree, wrong, examples = 0, 0, []
    differ: Counter[str] = Counter()
    for turn in sound(family, count):
        ids = ids_of(family, turn.text)
        good, bad = mine(turn, ids)
        wrong += bad or not same(good, turn.calls)
        found = attempted(theirs, turn, ids)
        if not isinstance(found, str) and same(found, good):
            agree += 1
        else:
            differ[found if isinstance(found, str) else how(good, found)] += 1
            examples.append((turn.text, found))
    print(
        f"{family.name:16} sound {count}: agree {agree}, ours wrong {wrong}, theirs differ {dict(differ)}", flush=True
    )
    for text, found in examples[:show]:
        print(f"    {text!r}\n      theirs: {found!r}")
    fates: dict[str, Counter[str]] = {"ours": Counter(), "theirs": Counter()}
    invented = []
    for turn in damaged(family, count):
        ids = ids_of(family, turn.text)
        good, bad = mine(turn, ids)
        fates["ours"][fate(good, turn, bad)] += 1
        fates["theirs"][fate(attempted(theirs, turn, ids), turn)] += 1
        if fate(good, turn, bad) in ("invented", "as it was"):
            invented.append((turn, good))
    for who, counted in fates.items():
        print(f"{'':16} damaged, {who:6}: {dict(counted.most_common())}", flush=True)
    for turn, good in invented[:show]:
        print(f"    ours, {turn.damage}: {turn.text!r}\n      {good!r}")


def main() -> None:
    """Compare and print."""
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("engine", choices=("vllm", "sglang"))
    arguments.add_argument("--turns", type=int, default=5000)
    arguments.add_argument("--show", type=int, default=0, help="examples of each difference")
    arguments.add_argument("--formats", nargs="+", default=sorted(FAMILIES))
    options = arguments.parse_args()
    logging.disable(logging.CRITICAL)
    for name in options.formats:
        compare({"vllm": vllm, "sglang": sglang}[options.engine], FAMILIES[name], options.turns, options.show)


if __name__ == "__main__":
    main()
