"""Ids parsed per second on one core, by format: a turn of prose, and a turn of calls only.

    python benchmarks/parsing.py [--json] [--quick | --smallest]

The tokenizer is that of `qwen3-tiny` plus each format's control tokens. A turn arrives in chunks of 16 ids. Its CPU
time includes starting the session and is the best of several repeats. `text_ids_per_s` and `call_ids_per_s` are those
of the slowest format.
"""

from __future__ import annotations

import copy
import time
from typing import Any

from bench import SMALLEST, options, report
from rich.table import Table

from tito_core.parsing import CallStatus, get_tool_parser
from tito_engines import models

PROSE = (
    "The river rises early in spring, and whoever lives beside it learns to read its colour: grey for meltwater, brown "
    "for rain in the hills, green when nothing has happened for a week. Übrigens führt er 1,250 m³ pro Sekunde "
    "— 水位は高い。\n"
)
ARGUMENTS = '{"city": "Nürnberg", "days": 5, "units": ["celsius", "mm"], "note": "two \\"quoted\\" words"}'
CALLS = {
    "hermes": (
        ["<tool_call>", "</tool_call>"],
        f'<tool_call>\n{{"name": "look", "arguments": {ARGUMENTS}}}\n</tool_call>',
    ),
    "qwen3_coder": (
        ["<tool_call>", "</tool_call>"],
        "<tool_call>\n<function=look>\n<parameter=city>\nNürnberg\n</parameter>\n<parameter=days>\n5\n</parameter>\n"
        "<parameter=note>\nA line of text,\nand another.\n</parameter>\n</function>\n</tool_call>",
    ),
    "glm47": (
        ["<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"],
        "<tool_call>look<arg_key>city</arg_key><arg_value>Nürnberg</arg_value><arg_key>days</arg_key><arg_value>5"
        "</arg_value><arg_key>note</arg_key><arg_value>A line of text,\nand another.</arg_value></tool_call>",
    ),
    "deepseek_v31": (
        [
            "<｜tool▁calls▁begin｜>",
            "<｜tool▁calls▁end｜>",
            "<｜tool▁call▁begin｜>",
            "<｜tool▁call▁end｜>",
            "<｜tool▁sep｜>",
        ],
        f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>look<｜tool▁sep｜>{ARGUMENTS}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    ),
    "kimi_k2": (
        [
            "<|tool_calls_section_begin|>",
            "<|tool_calls_section_end|>",
            "<|tool_call_begin|>",
            "<|tool_call_end|>",
            "<|tool_call_argument_begin|>",
        ],
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.look:0<|tool_call_argument_begin|>"
        f"{ARGUMENTS}<|tool_call_end|><|tool_calls_section_end|>",
    ),
    "deepseek_v4": (
        ["｜DSML｜"],
        '<｜DSML｜tool_calls>\n<｜DSML｜invoke name="look">\n<｜DSML｜parameter name="city" string="true">Nürnberg'
        '</｜DSML｜parameter>\n<｜DSML｜parameter name="days" string="false">5</｜DSML｜parameter>\n'
        "</｜DSML｜invoke>\n</｜DSML｜tool_calls>",
    ),
    "minimax_m2": (
        ["<minimax:tool_call>", "</minimax:tool_call>"],
        '<minimax:tool_call>\n<invoke name="look">\n<parameter name="city">Nürnberg</parameter>\n'
        '<parameter name="days">5</parameter>\n</invoke>\n</minimax:tool_call>',
    ),
    "gpt_oss": (
        ["<|start|>", "<|channel|>", "<|message|>", "<|constrain|>", "<|end|>", "<|call|>", "<|return|>"],
        f"<|start|>assistant<|channel|>commentary to=functions.look <|constrain|>json<|message|>{ARGUMENTS}<|call|>",
    ),
    "gemma4": (
        ["<|tool_call>", "<tool_call|>", '<|"|>', "<|channel>", "<channel|>"],
        '<|tool_call>call:look{city:<|"|>Nürnberg<|"|>,days:5,units:[<|"|>celsius<|"|>,<|"|>mm<|"|>]}<tool_call|>',
    ),
    "mistral": (["[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"], f"[TOOL_CALLS]look[ARGS]{ARGUMENTS}"),
}
OBJECT = f'{{"name": "look", "arguments": {ARGUMENTS}}}'
LITERALS = """look(city='Nürnberg', days=5, units=['celsius', 'mm'], note='two "quoted" words')"""
COUNT = 40
"""Number of calls in a turn."""
TURNS = {
    **{name: (tags, call * COUNT) for name, (tags, call) in CALLS.items()},
    "llama3_json": (["<|python_tag|>"], "; ".join([OBJECT.replace("arguments", "parameters")] * COUNT)),
    "pythonic": ([], f"[{', '.join([LITERALS] * COUNT)}]"),
    "granite": (["<|tool_call|>"], f"<|tool_call|>[{', '.join([OBJECT] * COUNT)}]"),
    "phi4_mini": ([], f"functools[{', '.join([OBJECT] * COUNT)}]"),
    "xlam": ([], f"[{', '.join([OBJECT] * COUNT)}]"),
}
"""One format for each parser; `glm45`, `deepseek_v3`, `deepseek_v32` and `llama4_pythonic` share parsers with these."""
TOOLS = {"look": {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}}}
CHUNK = 16


def measure(name: str, ids: list[int], tokenizer: Any, repeats: int, calls: int) -> float:
    """Check that the turn parses correctly, and return ids per second."""
    parser = get_tool_parser(name, tokenizer)
    best = float("inf")
    for _ in range(repeats):
        started = time.process_time()
        session = parser.start((), TOOLS)
        for at in range(0, len(ids), CHUNK):
            session.feed(ids[at : at + CHUNK])
        turn = session.finish(truncated=False)
        best = min(best, time.process_time() - started)
        assert [call.status for call in turn.calls] == [CallStatus.OK] * calls
    return len(ids) / best


def main() -> None:
    """Measure and print."""
    arguments = options(__doc__).parse_args()
    repeats = (25, 5, 1)[arguments.size]
    plain = models.load_tokenizer("qwen3-tiny")
    table = Table("format", "prose ids/s", "calls ids/s", title="Ids parsed a second, one core")
    formats: dict[str, dict[str, float]] = {}
    for name in ("hermes", "mistral") if arguments.size == SMALLEST else TURNS:
        tags, calls = TURNS[name]
        tokenizer = copy.deepcopy(plain)
        tokenizer.add_tokens([tag for tag in tags if tag not in tokenizer.get_vocab()])
        prose = tokenizer.encode(PROSE * 60, add_special_tokens=False)
        called = tokenizer.encode(calls, add_special_tokens=False)
        text_rate = measure(name, prose, tokenizer, repeats, 0)
        call_rate = measure(name, called, tokenizer, repeats, COUNT)
        formats[name] = {"text_ids_per_s": text_rate, "call_ids_per_s": call_rate}
        table.add_row(name, f"{text_rate:,.0f}", f"{call_rate:,.0f}")
    slowest = {key: min(rates[key] for rates in formats.values()) for key in ("text_ids_per_s", "call_ids_per_s")}
    report(arguments, {**slowest, "formats": formats}, table)


if __name__ == "__main__":
    main()
