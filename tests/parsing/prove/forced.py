"""Whatever XGrammar allows under our grammars must parse as a valid call of the forced tool.

Runs in an engine's own environment, which has XGrammar. The policy is random: at each step it samples any token that
the grammar allows and that is not in `avoided_ids`, with a bias towards tokens that end the call.

    ENGINE_ENVIRONMENT/bin/python tests/parsing/prove/forced.py [--calls 500] [--formats NAME ...]
"""

from __future__ import annotations

import argparse
import random
from collections import Counter

import parsing_only  # noqa: F401  # before all of ours
import xgrammar

from parsing.families import CALL_FAMILIES, Family
from tito_core.parsing import CallStatus, NoCallGrammarError, get_tool_parser

STEPS = 400
TOOLS = {
    "look": {
        "type": "object",
        "properties": {
            "at": {"type": "string"},
            "far": {"type": "integer"},
            "deep": {"type": "object", "properties": {"all": {"type": "array", "items": {"type": "boolean"}}}},
            "kind": {"type": "string", "enum": ["red", "dark blue"]},
            "maybe": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        },
        "required": ["at", "far"],
    },
    "count": {"type": "object", "properties": {"of": {"type": "string"}}},
}


def sampled(
    compiled: xgrammar.CompiledGrammar, avoided: set[int], size: int, end: int, rng: random.Random
) -> list[int] | None:
    """Sample until the grammar is complete; None if that takes more than STEPS."""
    matcher = xgrammar.GrammarMatcher(compiled)
    mask = xgrammar.allocate_token_bitmask(1, size)
    ids: list[int] = []
    for _ in range(STEPS):
        matcher.fill_next_token_bitmask(mask)
        words = mask[0].numpy().view("uint32")
        allowed = [token for token in range(size) if words[token // 32] >> (token % 32) & 1]
        if end in allowed:
            return ids
        allowed = [token for token in allowed if token not in avoided] or allowed
        likely = [token for token in allowed if token in LIKELY] or allowed
        token = rng.choice(likely if rng.random() < 0.9 else allowed)
        assert matcher.accept_token(token)
        ids.append(token)
    return None


LIKELY: set[int] = set()


def prove(family: Family, calls: int, by_token: bool) -> tuple[Counter[str], list[str]]:
    """Force calls of one format; return how they parse, and the reasons of the invalid ones."""
    tokenizer = family.tokenizer(by_token)
    parser = get_tool_parser(family.name, tokenizer)
    info = xgrammar.TokenizerInfo.from_huggingface(tokenizer, stop_token_ids=[tokenizer.eos_token_id])
    compiler = xgrammar.GrammarCompiler(info)
    LIKELY.clear()
    LIKELY.update(tokenizer.encode('ab"}]1<>/pramet\n', add_special_tokens=False))
    found: Counter[str] = Counter()
    reasons = []
    rng = random.Random(0)
    grammars = {name: parser.call_grammar(TOOLS, name) for name in (None, *TOOLS)}
    compiled = {name: compiler.compile_structural_tag(grammar.value) for name, grammar in grammars.items()}
    while found.total() < calls:
        name = rng.choice(list(compiled))
        ids = sampled(compiled[name], set(grammars[name].avoided_ids), info.vocab_size, tokenizer.eos_token_id, rng)
        if ids is None:
            continue
        session = parser.start((), TOOLS)
        session.feed([*ids, tokenizer.eos_token_id])
        turn = session.finish(truncated=False)
        sound = len(turn.calls) == 1 and turn.calls[0].status == CallStatus.OK and turn.calls[0].name in TOOLS
        sound = sound and (name is None or turn.calls[0].name == name) and not turn.text
        found["sound" if sound else "not sound"] += 1
        if not sound:
            reasons.append(f"{turn.calls[0].reason if turn.calls else 'no call'} {tokenizer.decode(ids)[:300]!r}")
    return found, reasons


def main() -> None:
    """Run the proof and print its result."""
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--calls", type=int, default=500)
    arguments.add_argument("--formats", nargs="+", default=sorted(CALL_FAMILIES))
    options = arguments.parse_args()
    for name in options.formats:
        for by_token in (True, False):
            try:
                found, reasons = prove(CALL_FAMILIES[name], options.calls, by_token)
            except NoCallGrammarError as refusal:
                print(f"{name:16} refused: {refusal}", flush=True)
                break
            print(f"{name:16} {'tokens' if by_token else 'text':7} {dict(found)}", *reasons[:3], sep="\n  ", flush=True)


if __name__ == "__main__":
    main()
