"""Whether a planted defect changes what a scripted server sends: the same requests to it and to a sound server."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

from conformance.defects.defect import SOUND, Defect, plant
from conformance.defects.stranger_hooks import TOUCHED
from tito_conformance.fixed import ABORTED_TOKENS
from tito_conformance.testing import ScriptedEngine

_VOLATILE = ("id", "request_id", "created", "response_sent_to_client_ts", "e2e_latency", "seconds")
_TEXTS = (
    "Tell me about trees.",
    "naïve café 日本語 😀",
    "  blanks \n\n",
    "One, two, three. " * 24,
    "A long prompt. " * 300,
)
_VARIANTS: tuple[dict[str, Any], ...] = (
    {},
    {"seed": 5},
    {"seed": 13},
    {"temperature": 0.0},
    {"temperature": 0.4, "top_p": 0.8},
    {"temperature": 0.4},
    {"temperature": 1.7, "top_k": 3},
    {"top_p": 0.5, "seed": 3},
    {"top_p": 0.8, "top_k": 3, "seed": 3},
    {"min_p": 0.3, "seed": 7},
    {"presence_penalty": 1.5},
    {},
    {"frequency_penalty": 1.9, "temperature": 0.0},
    {"logit_bias": {"40": 9.0}},
    {"min": 24},
    {"min": 24, "stop_own": True},
    {"stop_own": True},
    {"stop": ["e"]},
    {"ignore_eos": True},
    {"grammar": True},
    {"max": 300, "temperature": 0.7},
)


def _bodies(wire: str, tokenizer: Any) -> Iterator[tuple[str, dict[str, Any], bool]]:
    """Yield path and body of every request, and whether it is a scoring one."""
    common = tokenizer.encode("".join(map(chr, range(60, 127))), add_special_tokens=False)[:20]
    for number, text in enumerate(text + "x" * n for text in _TEXTS for n in (0, 1, 5)):
        ids = tokenizer.encode(text, add_special_tokens=False)
        for variant in _VARIANTS if number % 3 == 0 else _VARIANTS[:: 4 + number % 5]:
            for stream in (False, True):
                yield _body(wire, ids, variant, common, stream)
        yield _scoring(wire, ids)


def _body(
    wire: str, ids: list[int], variant: dict[str, Any], common: list[int], stream: bool
) -> tuple[str, dict[str, Any], bool]:
    special = ("min", "max", "stop_own", "grammar")
    params = {"temperature": 1.0, **{name: value for name, value in variant.items() if name not in special}}
    most, least = variant.get("max", 40), variant.get("min", 0)
    if variant.get("stop_own"):
        params["stop_token_ids"] = common
    schema = json.dumps({"type": "object", "properties": {"n": {"type": "integer"}, "s": {"type": "string"}}})
    if wire == "sglang":
        if "seed" in params:
            params["sampling_seed"] = params.pop("seed")
        if variant.get("grammar"):
            params["json_schema"] = schema
        params |= {"max_new_tokens": most, "min_new_tokens": least}
        body = {"input_ids": ids, "sampling_params": params, "return_logprob": True, "stream": stream}
        return (
            "/generate",
            {**body, "top_logprobs_num": 2, "return_prompt_token_ids": True, "return_routed_experts": True},
            False,
        )
    if variant.get("grammar"):
        params["structured_outputs"] = {"json": schema}
    params |= {"max_tokens": most, "min_tokens": least, "logprobs": 2}
    options = {"return_token_ids": True, "stream": stream}
    if stream:
        options["stream_options"] = {"include_usage": True}
    if wire == "vllm":
        return "/inference/v1/generate", {"token_ids": ids, "sampling_params": params, **options}, False
    return "/v1/completions", {"prompt": ids, "return_tokens_as_token_ids": True, **params, **options}, False


def _scoring(wire: str, ids: list[int]) -> tuple[str, dict[str, Any], bool]:
    if wire == "sglang":
        params = {"max_new_tokens": 0, "temperature": 0.0}
        return (
            "/generate",
            {"input_ids": ids, "sampling_params": params, "return_logprob": True, "logprob_start_len": 0},
            True,
        )
    params = {"max_tokens": 1, "prompt_logprobs": 1, "temperature": 0.0}
    if wire == "vllm":
        return "/inference/v1/generate", {"token_ids": ids, "sampling_params": params}, True
    return "/v1/completions", {"prompt": ids, **params}, True


def _plain(value: Any) -> Any:
    """Return a response without what differs between two runs of a sound server."""
    if isinstance(value, dict):
        return {name: _plain(each) for name, each in value.items() if name not in _VOLATILE}
    return [_plain(each) for each in value] if isinstance(value, list) else value


def _read(body: bytes) -> Any:
    if not body.startswith(b"data:"):
        return _plain(json.loads(body)) if body[:1] in b"{[" else body.decode()
    pieces = [piece.removeprefix(b"data: ") for piece in body.split(b"\n\n")]
    return [_plain(json.loads(piece)) for piece in pieces if piece and piece != b"[DONE]"]


async def _send(engine: ScriptedEngine, path: str, body: dict[str, Any]) -> Any:
    response = await engine.handle("POST", path, {"content-type": "application/json"}, json.dumps(body).encode())
    try:
        return _read(b"".join([piece async for piece in response.pieces()]))
    except ValueError as error:
        return str(error)


async def _answers(engine: ScriptedEngine, wire: str, tokenizer: Any) -> list[Any]:
    found = []
    for path, body, _ in _bodies(wire, tokenizer):
        found.append(await _send(engine, path, body))
    found.append(await _send(engine, "/tokenize", {"prompt": "ﬁne ①"}))
    path, body, _ = _body(wire, [5, 6, 7, 8], {"max": ABORTED_TOKENS, "ignore_eos": True}, [], stream=False)
    many = [asyncio.create_task(_send(engine, path, body)) for _ in range(8)]
    await asyncio.sleep(0.1)
    await _send(engine, "/update_weight_version", {"new_version": "two", "abort_all_requests": False})
    await _send(engine, "/update_weights_from_disk", {"model_path": "x", "weight_version": "two"})
    await _send(engine, "/reset_prefix_cache", {})
    await asyncio.sleep(0.1)
    found += await asyncio.gather(*many)
    found.append(await _send(engine, path, body))
    one, other = (asyncio.create_task(_send(engine, path, {**body, "rid": name, "request_id": name})) for name in "ab")
    await asyncio.sleep(0.1)
    await _send(engine, "/abort_request", {"rid": "a"})
    await _send(engine, "/inference/v1/abort_requests", {"request_ids": ["generate-tokens-a"]})
    await _send(engine, "/abort_requests", {"request_ids": ["cmpl-a-0"]})
    found += await asyncio.gather(one, other)
    return found


def answers(defect: Defect, wire: str, tokenizer: Any, end: int) -> list[Any]:
    """Return what a server with a defect answers to the requests."""
    with defect.client():
        engine = plant(defect, wire, tokenizer, end)().engine  # type: ignore[attr-defined]
        return asyncio.run(_answers(engine, wire, tokenizer))


_sound: dict[str, tuple[list[Any], list[Any]]] = {}


def differs(defect: Defect, wire: str, tokenizer: Any, end: int) -> tuple[int, int]:
    """Return how many answers differ from a sound server's, and how many were compared.

    Answers that differ between two sound servers, such as those during which weights change, count only where a hook
    says that it changed them.
    """
    if wire not in _sound:
        _sound[wire] = answers(SOUND, wire, tokenizer, end), answers(SOUND, wire, tokenizer, end)
    touched = TOUCHED[defect.name.replace("-", "_")]
    found = answers(defect, wire, tokenizer, end)
    triples = list(zip(found, *_sound[wire], strict=True))
    changed = sum(one != sound for one, sound, again in triples if sound == again)
    return changed or TOUCHED[defect.name.replace("-", "_")] - touched, len(found)
