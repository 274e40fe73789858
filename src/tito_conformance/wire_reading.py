"""What went over the wire, read by code of its own: the JSON of vLLM's and SGLang's answers, whole or streamed."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Protocol


class Seen(Protocol):
    """What the oracle reads of an exchange."""

    path: str
    headers: dict[str, str]
    sent: bytes
    status: int | None
    got: bytearray
    whole: bool


@dataclass
class Heard:
    """One generation as the wire tells it. What an engine does not say is None.

    Beside each token of the output: `top`, the likeliest as (id, logprob), and `masks`, the ids that were left to
    choose from. `scored` are (id, logprob) of the prompt, up to its end; `experts` is base64.
    """

    name: str
    prompt: list[int]
    wanted: dict[str, Any]
    echoed: list[int] | None = None
    output: list[int] = field(default_factory=list)
    logprobs: list[float | None] = field(default_factory=list)
    logprob_ids: list[int] = field(default_factory=list)
    finish: str | None = None
    stop: int | str | None = None
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    cached_tokens: int | None = None
    versions: list[tuple[int, int, str]] | None = None
    text: str | None = None
    top: list[list[tuple[int, float | None]]] | None = None
    scored: list[tuple[int, float | None]] = field(default_factory=list)
    experts: str | None = None
    masks: list[list[int]] | None = None


def generations(kind: str, exchanges: Iterable[Seen]) -> list[Heard]:
    """Read every whole, successful generation; scores and what the server was asked about itself are left out.

    Args:
        kind: "vllm" or "sglang"; of another wire nothing is known.
        exchanges: What went over it.
    """
    read = {"vllm": _vllm, "sglang": _sglang}.get(kind)
    if read is None:
        return []
    found = []
    for exchange in exchanges:
        if exchange.status == 200 and exchange.whole and exchange.sent:
            heard = read(exchange, json.loads(exchange.sent))
            if heard is not None:
                found.append(heard)
    return found


def _answers(exchange: Seen) -> list[Any]:
    """Give the answer's JSON documents: one, or one an event of a stream."""
    text = exchange.got.decode()
    if not text.lstrip().startswith("data:"):
        return [json.loads(text)]
    lines = (line[5:].strip() for line in text.splitlines() if line.startswith("data:"))
    return [json.loads(line) for line in lines if line != "[DONE]"]


def _vllm(exchange: Seen, sent: dict[str, Any]) -> Heard | None:
    whole = exchange.path.endswith("/inference/v1/generate")
    if not whole and not exchange.path.endswith("/v1/completions"):
        return None
    wanted = sent.get("sampling_params", sent) if whole else sent
    if wanted.get("logprobs") is None:  # a score
        return None
    heard = Heard(exchange.headers["x-request-id"], list(sent["token_ids" if whole else "prompt"]), wanted)
    for answer in _answers(exchange):
        if answer.get("usage"):
            heard.prompt_tokens = answer["usage"]["prompt_tokens"]
            heard.completion_tokens = answer["usage"]["completion_tokens"]
            heard.cached_tokens = (answer["usage"].get("prompt_tokens_details") or {}).get("cached_tokens")
        for choice in answer.get("choices", ()):
            heard.output += choice.get("token_ids") or []
            heard.scored += _vllm_scored(answer.get("prompt_logprobs") or choice.get("prompt_logprobs"))
            heard.experts = choice.get("routed_experts") or heard.experts
            heard.masks = choice.get("sampling_mask") or heard.masks
            _vllm_logprobs(heard, choice.get("logprobs"))
            heard.echoed = heard.echoed or choice.get("prompt_token_ids") or answer.get("prompt_token_ids")
            heard.finish = choice.get("finish_reason") or heard.finish
            heard.stop = heard.stop if choice.get("stop_reason") is None else choice["stop_reason"]
            if choice.get("weight_versions") is not None:
                heard.versions = [(v["start"], v["end"], v["version"]) for v in choice["weight_versions"]]
            if choice.get("text") is not None:
                heard.text = (heard.text or "") + choice["text"]
    return heard


def _vllm_logprobs(heard: Heard, logprobs: Any) -> None:
    if logprobs is None:
        return
    if "content" in logprobs:
        for entry in logprobs["content"]:
            heard.logprobs.append(entry["logprob"])
            heard.logprob_ids.append(_vllm_id(entry))
            rows = [(_vllm_id(each), each["logprob"]) for each in entry.get("top_logprobs") or ()]
            heard.top = [*(heard.top or ()), rows]
        return
    heard.logprobs += logprobs["token_logprobs"]
    heard.logprob_ids += [int(token.split(":")[1]) for token in logprobs["tokens"]]
    for entry in logprobs.get("top_logprobs") or ():
        row = [(int(token.split(":")[1]), value) for token, value in (entry or {}).items()]
        heard.top = [*(heard.top or ()), row]


def _vllm_id(entry: dict[str, Any]) -> int:
    """Give a token's id, which up to 0.31 stands in its name alone."""
    token = entry.get("token_id")
    return int(entry["token"].split(":")[1]) if token is None else int(token)


def _vllm_scored(entries: list[Any] | None) -> list[tuple[int, float | None]]:
    """Give the prompt's own tokens: each entry names its own first, and then others."""
    found: list[tuple[int, float | None]] = []
    for entry in entries or ():
        if entry is not None:
            [token, *_] = entry
            found.append((int(token), entry[token]["logprob"]))
    return found


def _sglang(exchange: Seen, sent: dict[str, Any]) -> Heard | None:
    wanted = sent.get("sampling_params") or {}
    if not exchange.path.endswith("/generate") or not sent.get("rid") or wanted.get("max_new_tokens") == 0:
        return None
    heard = Heard(sent["rid"], list(sent["input_ids"]), wanted)
    answers = _answers(exchange)
    meta = answers[-1]["meta_info"]
    heard.completion_tokens = meta.get("completion_tokens")
    heard.output = _whole([answer["output_ids"] for answer in answers], heard.completion_tokens)
    tables = [answer["meta_info"].get("output_token_logprobs") or [] for answer in answers]
    rows = _whole(tables, heard.completion_tokens)
    heard.logprobs, heard.logprob_ids = [row[0] for row in rows], [row[1] for row in rows]
    heard.echoed = next((found for answer in answers if (found := answer.get("prompt_token_ids"))), None)
    reason = meta.get("finish_reason") or {}
    heard.finish, heard.stop = reason.get("type"), reason.get("matched")
    heard.prompt_tokens, heard.cached_tokens = meta.get("prompt_tokens"), meta.get("cached_tokens")
    heard.versions = [(v["start"], v["end"], v["version"]) for v in meta.get("weight_versions") or []] or None
    heard.text = answers[0].get("text") if len(answers) == 1 else None
    heard.experts, heard.masks = meta.get("routed_experts"), meta.get("output_token_sampling_mask")
    heard.scored = [(row[1], row[0]) for row in (meta.get("input_token_logprobs") or [])[1:]]
    if sent.get("top_logprobs_num"):
        tables = [answer["meta_info"].get("output_top_logprobs") or [] for answer in answers]
        heard.top = [[(token, value) for value, token, _ in row] for row in _whole(tables, heard.completion_tokens)]
    return heard


def _whole(parts: list[list[Any]], count: int | None) -> list[Any]:
    """Put the parts of a stream together: each event repeats what came before, unless the server was told not to."""
    if len(parts) == 1 or len(parts[-1]) == count:
        return list(parts[-1])
    return [item for part in parts for item in part]
