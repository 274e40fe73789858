"""Read SGLang's wire for the conformance suite, with code that shares nothing with the backend."""

from __future__ import annotations

import json
from typing import Any

from tito_conformance.wire import WireExchange, WireGeneration, data_of, documents


def read(exchange: WireExchange) -> WireGeneration | None:
    """Read a generation of `/generate`, whole or streamed; None for a score or anything else."""
    sent = json.loads(exchange.sent)
    sampling = sent.get("sampling_params") or {}
    if not exchange.path.endswith("/generate") or not sent.get("rid") or sampling.get("max_new_tokens") == 0:
        return None
    generation = WireGeneration(sent["rid"], list(sent["input_ids"]), sampling)
    answers = documents(exchange)
    meta = answers[-1]["meta_info"]
    generation.answered_id = meta.get("id")
    generation.images = [data_of(url["url"] if isinstance(url, dict) else url) for url in sent.get("image_data") or ()]
    generation.image_names = sent.get("mm_content_hashes") or [None] * len(generation.images)
    generation.image_tokens = meta.get("image_tokens")
    generation.completion_tokens = meta.get("completion_tokens")
    generation.output_ids = _whole([answer["output_ids"] for answer in answers], generation.completion_tokens)
    tables = [answer["meta_info"].get("output_token_logprobs") or [] for answer in answers]
    rows = _whole(tables, generation.completion_tokens)
    generation.logprobs, generation.logprob_ids = [row[0] for row in rows], [row[1] for row in rows]
    generation.echoed_ids = next((found for answer in answers if (found := answer.get("prompt_token_ids"))), None)
    reason = meta.get("finish_reason") or {}
    generation.finish, generation.stop = reason.get("type"), reason.get("matched")
    generation.prompt_tokens, generation.cached_tokens = meta.get("prompt_tokens"), meta.get("cached_tokens")
    generation.versions = [(v["start"], v["end"], v["version"]) for v in meta.get("weight_versions") or []] or None
    generation.text = answers[0].get("text") if len(answers) == 1 else None
    generation.routed_experts, generation.sampling_masks = (
        meta.get("routed_experts"),
        meta.get("output_token_sampling_mask"),
    )
    generation.prompt_logprobs = [(row[1], row[0]) for row in (meta.get("input_token_logprobs") or [])[1:]]
    if sent.get("top_logprobs_num"):
        tables = [answer["meta_info"].get("output_top_logprobs") or [] for answer in answers]
        generation.top_logprobs = [
            [(token, value) for value, token, _ in row] for row in _whole(tables, generation.completion_tokens)
        ]
    return generation


def _whole(parts: list[list[Any]], count: int | None) -> list[Any]:
    """Join the parts of a stream: each event repeats the ones before, except with `--incremental-streaming-output`."""
    if len(parts) == 1 or len(parts[-1]) == count:
        return list(parts[-1])
    return [item for part in parts for item in part]
