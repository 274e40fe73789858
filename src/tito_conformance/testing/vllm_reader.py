"""Read vLLM's wire for the conformance suite, with code that shares nothing with the backend."""

from __future__ import annotations

import json
from typing import Any

from tito_conformance.wire import WireExchange, WireGeneration, data_of, documents


def read(exchange: WireExchange) -> WireGeneration | None:
    """Read a generation of `/inference/v1/generate` or `/v1/completions`, whole or streamed; None for anything else."""
    sent = json.loads(exchange.sent)
    generates = exchange.path.endswith("/inference/v1/generate")
    if not generates and not exchange.path.endswith("/v1/completions"):
        return None
    sampling = sent.get("sampling_params", sent) if generates else sent
    if sampling.get("logprobs") is None:  # a score
        return None
    generation = WireGeneration(
        exchange.headers["x-request-id"], list(sent["token_ids" if generates else "prompt"]), sampling
    )
    parts = [part for part in sent.get("content_parts") or () if part["type"] == "image_url"]
    generation.images = [data_of(part.get("url")) for part in parts]
    generation.image_names = [part.get("uuid") for part in parts]
    for answer in documents(exchange):
        generation.answered_id = answer.get("request_id") or answer.get("id") or generation.answered_id
        if placed := (answer.get("mm_placeholders") or {}).get("image"):
            generation.image_spans = [(span["offset"], span["length"]) for span in placed]
        if answer.get("usage"):
            generation.prompt_tokens = answer["usage"]["prompt_tokens"]
            generation.completion_tokens = answer["usage"]["completion_tokens"]
            if details := answer["usage"].get("prompt_tokens_details"):
                generation.cached_tokens = details.get("cached_tokens")
        for choice in answer.get("choices", ()):
            generation.output_ids += choice.get("token_ids") or []
            generation.prompt_logprobs += _scored(answer.get("prompt_logprobs") or choice.get("prompt_logprobs"))
            generation.routed_experts = choice.get("routed_experts") or generation.routed_experts
            generation.sampling_masks = choice.get("sampling_mask") or generation.sampling_masks
            _logprobs(generation, choice.get("logprobs"))
            generation.echoed_ids = (
                generation.echoed_ids or choice.get("prompt_token_ids") or answer.get("prompt_token_ids")
            )
            generation.finish = choice.get("finish_reason") or generation.finish
            generation.stop = generation.stop if choice.get("stop_reason") is None else choice["stop_reason"]
            if choice.get("weight_versions") is not None:
                generation.versions = [(v["start"], v["end"], v["version"]) for v in choice["weight_versions"]]
            if choice.get("text") is not None:
                generation.text = (generation.text or "") + choice["text"]
    return generation


def _logprobs(generation: WireGeneration, logprobs: Any) -> None:
    if logprobs is None:
        return
    if "content" in logprobs:
        for entry in logprobs["content"]:
            generation.logprobs.append(entry["logprob"])
            generation.logprob_ids.append(_id(entry))
            rows = [(_id(each), each["logprob"]) for each in entry.get("top_logprobs") or ()]
            generation.top_logprobs = [*(generation.top_logprobs or ()), rows]
        return
    generation.logprobs += logprobs["token_logprobs"]
    generation.logprob_ids += [int(token.split(":")[1]) for token in logprobs["tokens"]]
    for entry in logprobs.get("top_logprobs") or ():
        row = [(int(token.split(":")[1]), value) for token, value in (entry or {}).items()]
        generation.top_logprobs = [*(generation.top_logprobs or ()), row]


def _id(entry: dict[str, Any]) -> int:
    """Return a token's id; up to 0.31 it is only in `token`, "token_id:N"."""
    token = entry.get("token_id")
    return int(entry["token"].split(":")[1]) if token is None else int(token)


def _scored(entries: list[Any] | None) -> list[tuple[int, float | None]]:
    """Return (id, logprob) of the prompt's own tokens, which are the first of each entry."""
    scored: list[tuple[int, float | None]] = []
    for entry in entries or ():
        if entry is not None:
            [token, *_] = entry
            scored.append((int(token), entry[token]["logprob"]))
    return scored
