"""Recorded exchanges with images, with real servers of tiny random Qwen-VL models, and engines that replay them."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from support.scripted import tokenizer
from support.wire_recordings import QWEN_EOS, ROOT, Recorded, Recording
from tito_conformance.testing import ImageSettings, ScriptedEngine, scripted_engine

FOLDERS: dict[Literal["vllm", "sglang"], str] = {"vllm": "vllm-0.32.0-images", "sglang": "sglang-0.5.23-images"}
PAD = 151655


def load_images(kind: Literal["vllm", "sglang"]) -> list[Recording]:
    return [_read(path, kind) for path in sorted((ROOT / FOLDERS[kind]).glob("*.json"))]


def _read(path: Path, kind: Literal["vllm", "sglang"]) -> Recording:
    raw = json.loads(path.read_text())
    request, response = raw["request"], raw["response"]
    if "body_text" in response:
        body: Any = [json.loads(part.removeprefix("data: ")) for part in response["body_text"].split("\n\n")[:-2]]
    else:
        body = response["body"].get("_text", response["body"])
    status = response["status"] if isinstance(response["status"], int) else -1
    return Recording(kind, path.stem, request["method"], request["path"], {}, request["body"], status, body)


def engine_of(recording: Recording) -> ScriptedEngine:
    """Return an engine that reads images as the recorded server did. Its tokenizer is the server's."""
    script, qwen = Recorded(recording), tokenizer("qwen3-vl-tiny")

    def decode(ids: Sequence[int]) -> str:
        return script.known.get(tuple(ids)) or qwen.decode(ids)

    older = recording.name.startswith("qwen25")
    engine = scripted_engine(
        recording.kind, script, vocab_size=151936, eos_ids=QWEN_EOS, model="tiny", decode=decode,
        encode=lambda text, special: qwen.encode(text, add_special_tokens=special),
        images=ImageSettings(PAD, cell=28 if older else 32, decodes=older and "cache" not in recording.name),
    )  # fmt: skip
    if found := re.search(r'"weight_version": "([^"]+)"', json.dumps(recording.response)):
        engine.state.weight_version = found[1]
    if recording.name in ("content_parts_uuid_lie", "content_parts_uuid_only"):  # after content_parts_uuid
        first = next(each for each in load_images("vllm") if each.name == "content_parts_uuid")
        [part] = first.fields["content_parts"]
        engine.state.known_images[part["uuid"]] = base64.b64decode(part["url"].partition(",")[2])
    return engine
