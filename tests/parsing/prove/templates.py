"""Round trip through real chat templates: a rendered, encoded and parsed call must be the same call.

The templates are those of `support/zoo.py`, which downloads them once and checks their hashes.

    python tests/parsing/prove/templates.py [--turns 2000] [--seed 0]
"""

from __future__ import annotations

import argparse
import json
import random
import re
from typing import Any

import parsing_only  # noqa: F401  # finds tests and sources
from generated import calls, value

from parsing.families import CALL_FAMILIES, GUARD, Call, Family, ids_of, parse, schema_of, unguarded
from support.byte_level import byte_level
from support.zoo import NAMES, source
from tito_core.parsing import CallStatus, DetectionError, detect_tool_parser

END = re.compile(r"(<\|im_end\|>|<｜end▁of▁sentence｜>|<turn\|>|<\|eot_id\|>|<\|tool_response>)\s*$")

UNESCAPED = ("lfm2_2_5", "lfm2_2_5_v2")
"""Templates that write strings between quotes as they are; one with a quote or backslash cannot be read back."""


def assistant(sampled: list[Call], as_text: bool) -> dict[str, Any]:
    given = [{"name": name, "arguments": json.dumps(a, ensure_ascii=False) if as_text else a} for name, a in sampled]
    tool_calls = [{"type": "function", "id": f"call_{i}", "function": call} for i, call in enumerate(given)]
    return {"role": "assistant", "content": "", "tool_calls": tool_calls}


def completion(tokenizer: Any, sampled: list[Call], as_text: bool) -> str:
    """Render a turn, and return the part that the policy would have sampled."""
    user = {"role": "user", "content": "Go."}
    tools = [
        {"type": "function", "function": {"name": name, "description": "", "parameters": schema_of(unguarded(given))}}
        for name, given in sampled
    ]
    render = {"tools": tools, "tokenize": False, "enable_thinking": False}
    prompt = tokenizer.apply_chat_template([user], add_generation_prompt=True, **render)
    whole = tokenizer.apply_chat_template([user, assistant(sampled, as_text)], **render)
    begun = 0
    while begun < min(len(prompt), len(whole)) and prompt[begun] == whole[begun]:
        begun += 1
    while whole[begun - 1] == "<":  # the generation prompt ends in part of another tag
        begun -= 1
    return END.sub("", whole[begun:])


def prove(name: str, template: str, family: Family, count: int, seed: int) -> tuple[int, list[str]]:
    """Return how many turns parsed back to their calls, and those that did not."""
    tokenizer = byte_level((), template)
    rng = random.Random(f"{name} {seed}")
    came_back, lost = 0, []
    single = family.name in ("gpt_oss", "llama3_json")
    for _ in range(count):
        sampled = calls(rng, family)[: 1 if single else 3]
        if family.control and rng.random() < 0.3:  # a string that spells the format's own markup
            tag = rng.choice(family.control)
            sampled[0][1]["deep"] = f"{value(rng)}{tag[0]}{GUARD}{tag[1:]} "
        if name in UNESCAPED:
            sampled = [(tool, {k: _readable(v) for k, v in given.items()}) for tool, given in sampled]
        text = completion(tokenizer, sampled, name == "deepseekv3")
        if not any(tool in text for tool, _ in sampled):
            raise LookupError("the template leaves calls out")
        turn = parse(family, ids_of(family, text), sampled)
        read = [(call.status, call.name, call.arguments) for call in turn.calls]
        if read == [(CallStatus.OK, tool, unguarded(given)) for tool, given in sampled]:
            came_back += 1
        else:
            lost.append(f"{text!r}\n      {[(call.reason or call.arguments) for call in turn.calls]}")
    return came_back, lost


def _readable(value: Any) -> Any:
    return "x" if isinstance(value, str) and set(value) & set("'\\") else value


def main() -> None:
    """Run the proof and print its result."""
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--turns", type=int, default=2000)
    arguments.add_argument("--seed", type=int, default=0)
    options = arguments.parse_args()
    proven, failed = 0, False
    for name in NAMES:
        try:
            family = CALL_FAMILIES[detect_tool_parser(source(name)).name]
        except DetectionError as none:
            print(f"{name:34} {'several formats' if 'several' in str(none) else 'no known format'}")
            continue
        try:
            came_back, lost = prove(name, source(name), family, options.turns, options.seed)
        except LookupError as error:
            print(f"{name:34} {family.name:12} cannot be rendered: {error}")
            continue
        print(f"{name:34} {family.name:12} {came_back} of {options.turns}", *lost[:1], sep="\n    ", flush=True)
        proven, failed = proven + 1, failed or bool(lost)
    print(f"{options.turns} turns of each of {proven} templates")
    raise SystemExit(failed)


if __name__ == "__main__":
    main()
