"""Recorded exchanges with real servers, and a script that replays them on a scripted engine."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from tito_conformance.testing import Completion, ScriptedRequest
from tito_conformance.testing.script import PositionScorer

ROOT = Path(__file__).parents[1] / "wire"
FOLDERS: dict[str, Literal["vllm", "sglang"]] = {"vllm-0.32.0": "vllm", "sglang-0.5.23": "sglang"}
QWEN_EOS, SMOLLM_EOS = (151645, 151643), (2,)

PROMPT = [785, 3974, 13876, 38835]
GENERATE = {"token_ids": PROMPT, "sampling_params": {"max_tokens": 500, "logprobs": 0}}
UNRECORDED: dict[str, dict[str, Any]] = {
    "aborted_completions_response": {
        "method": "POST",
        "path": "/v1/completions",
        "body": {"prompt": PROMPT, "max_tokens": 500, "logprobs": 0, "return_token_ids": True},
        "headers": {"X-Request-Id": "abort-c"},
    },
    "aborted_generate_response": {
        "method": "POST",
        "path": "/inference/v1/generate",
        "body": {**GENERATE, "request_id": "abort-me"},
    },
    "inflight_weight_update_response": {"method": "POST", "path": "/inference/v1/generate", "body": GENERATE},
}
"""Requests of responses that were recorded without them, reconstructed from the responses."""


@dataclass(frozen=True)
class Recording:
    kind: Literal["vllm", "sglang"]
    name: str
    method: str
    path: str
    headers: dict[str, str]
    body: Any
    """Decoded JSON, other bytes, or None."""
    status: int
    """-1 when the connection ended without a response."""
    response: Any
    """Decoded JSON, a list of events (of a stream), or text."""

    @property
    def sent(self) -> bytes:
        if self.body is None:
            return b""
        return self.body if isinstance(self.body, bytes) else json.dumps(self.body).encode()

    @property
    def fields(self) -> dict[str, Any]:
        return self.body if isinstance(self.body, dict) else {}

    @property
    def params(self) -> dict[str, Any]:
        nested = self.fields.get("sampling_params")
        return nested if isinstance(nested, dict) else self.fields

    @property
    def eos_ids(self) -> tuple[int, ...]:
        return SMOLLM_EOS if '"weight_version": "w0"' in json.dumps(self.response) else QWEN_EOS


def load(kind: str) -> list[Recording]:
    folder = next(name for name, of in FOLDERS.items() if of == kind)
    return [_read(path, kind) for path in sorted((ROOT / folder).glob("*.json"))]


def _read(path: Path, kind: str) -> Recording:
    raw = json.loads(path.read_text())
    request = raw.get("request") or UNRECORDED[path.stem]
    if kind == "vllm":
        body, response = expanded(request["body"]), raw.get("response", raw)
        body = body.encode() if isinstance(body, str) else body
        response = response["_sse"][:-1] if isinstance(response, dict) and "_sse" in response else response
    else:
        body = request["json"] if request["raw"] is None else request["raw"].encode()
        response = raw.get("response_json", raw.get("response_text"))
        if isinstance(response, str) and response.startswith("data: "):
            response = [json.loads(part.removeprefix("data: ")) for part in response.split("\n\n")[:-2]]
    headers = {name.lower(): value for name, value in (request.get("headers") or {}).items()}
    return Recording(
        FOLDERS[path.parent.name],
        path.stem,
        request["method"],
        request["path"],
        headers,
        body,
        raw.get("status", 200),
        response,
    )


def expanded(value: Any) -> Any:
    """Extend lists that were trimmed in the recording ("...trimmed 12 more") with their last element."""
    if isinstance(value, dict):
        return {key: expanded(item) for key, item in value.items()}
    if not isinstance(value, list):
        return value
    shown, more = trimmed(value)
    return [*shown, *[shown[-1]] * more] if more else [expanded(item) for item in shown]


def trimmed(value: list[Any]) -> tuple[list[Any], int]:
    """Return the recorded part of a list, and the number of elements that were trimmed."""
    found = re.fullmatch(r"\.\.\.trimmed (\d+) more", value[-1]) if value and isinstance(value[-1], str) else None
    return (value[:-1], int(found[1])) if found else (value, 0)


class Recorded:
    """A script (and `Scorer`) that returns the recorded response."""

    def __init__(self, recording: Recording) -> None:
        self.recording = recording
        self.texts: dict[int, str] = {}
        self.known: dict[tuple[int, ...], str] = {}
        self.prompt_scores: list[float | None] = []
        self.prompt_tops: list[Sequence[tuple[int, float]]] = []
        self.given: dict[tuple[int, int], float] = {}
        """Logprobs of given ids by (place, id)."""
        self._derived = PositionScorer()
        read = self._vllm if recording.kind == "vllm" else self._sglang
        self.answers = list(read()) if recording.status == 200 else []
        self._next = 0

    def decode(self, ids: Sequence[int]) -> str:
        return self.known.get(tuple(ids), "".join(self.texts.get(i, f"<{i}>") for i in ids))

    def __call__(self, request: ScriptedRequest) -> Completion:
        self._next += 1
        return self.answers[self._next - 1]

    def score(self, ids: Sequence[int], start: int, temperature: float) -> list[float]:
        if len(ids) == start + 1 and (start, ids[-1]) in self.given:
            return [self.given[start, ids[-1]]]
        if self.prompt_scores and len(ids) == len(self.prompt_scores):
            return [score for score in self.prompt_scores[start:] if score is not None]
        return self._derived.score(ids, start, temperature)

    def top(self, ids: Sequence[int], position: int, k: int, temperature: float) -> list[tuple[int, float]]:
        return list(self.prompt_tops[position])

    def _id_of(self, text: str) -> int:
        """Return the id of a token that the recording has as text; an invented one if the recording has no id."""
        if found := re.fullmatch(r"token_id:(\d+)", text):
            return int(found[1])
        number = next((i for i, known in self.texts.items() if known == text), 140000 + len(self.texts))
        self.texts[number] = text
        return number

    def _vllm(self) -> Iterator[Completion]:
        response = self.recording.response
        events = response if isinstance(response, list) else [response]
        if not isinstance(events[0], dict) or "choices" not in events[0]:
            return
        self._read_prompt(events[0].get("prompt_logprobs") or events[0]["choices"][0].get("prompt_logprobs"))
        whole: dict[int, dict[str, Any]] = {}
        for choice in (c for event in events for c in event["choices"]):
            seen = whole.setdefault(choice["index"], {"ids": [], "logprobs": [], "tops": [], "text": ""})
            tokens = expanded((choice.get("logprobs") or {}).get("tokens") or [])
            ids = choice.get("token_ids") or [self._id_of(text) for text in tokens]
            seen["ids"] += expanded(ids)
            seen["text"] += choice.get("text") or ""
            if len(events) > 1:
                self.known[tuple(seen["ids"])] = seen["text"]
            seen |= {key: choice[key] for key in ("finish_reason", "stop_reason")}
            seen |= {key: choice[key] for key in ("routed_experts", "weight_versions") if choice.get(key)}
            self._read_logprobs(choice, seen)
        for seen in whole.values():
            count = events[-1]["usage"]["completion_tokens"] if events[-1].get("usage") else len(seen["ids"])
            ids = seen["ids"] or [17] * (count // len(whole))
            stop = seen["stop_reason"]
            if seen["finish_reason"] == "stop" and stop is None:
                stop = ids[-1]
            self._know(ids, seen["text"], isinstance(stop, int))
            spans = seen.get("weight_versions")
            yield Completion(
                ids,
                seen["logprobs"] or None,
                seen["finish_reason"],
                stop,
                seen["tops"] or None,
                [(s["version"], s["start"], s["end"]) for s in spans] if spans else None,
                ((events[-1].get("usage") or {}).get("prompt_tokens_details") or {}).get("cached_tokens"),
                seen.get("routed_experts"),
            )

    def _read_logprobs(self, choice: dict[str, Any], seen: dict[str, Any]) -> None:
        found = choice.get("logprobs") or {}
        ids = expanded(choice.get("token_ids") or [])
        if "content" in found:
            content = expanded(found["content"])
            seen["logprobs"] += [entry["logprob"] for entry in content]
            seen["tops"] += [[(t["token_id"], t["logprob"]) for t in e["top_logprobs"]] for e in content]
        elif found:
            for token, text in zip(ids, expanded(found["tokens"]), strict=False):
                self.texts[token] = text
            seen["logprobs"] += expanded(found["token_logprobs"])
            for top in expanded(found["top_logprobs"]):
                pairs = [(self._id_of(text), value) for text, value in top.items()]
                seen["tops"].append(pairs[len(pairs) - self.recording.fields["logprobs"] :])

    def _read_prompt(self, entries: list[Any] | None) -> None:
        for entry in entries or ():
            ranked = sorted(entry.items(), key=lambda item: item[1]["rank"]) if entry else []
            for number, top in ranked:
                self.texts[int(number)] = top["decoded_token"]
            own = next(iter(entry)) if entry else None
            self.prompt_scores.append(entry[own]["logprob"] if own else None)
            self.prompt_tops.append([(int(i), top["logprob"]) for i, top in ranked])

    def _know(self, ids: Sequence[int], text: str, stopped_at_token: bool) -> None:
        """Return the text of a completion whose token texts do not add up to it."""
        shown = tuple(ids[:-1] if stopped_at_token else ids)
        if self.recording.params.get("stop") is None:
            self.known[shown] = text
        else:
            self.known.clear()  # the recorded text is cut at the stop string; token texts have the whole

    def _sglang(self) -> Iterator[Completion]:
        response, stream = self.recording.response, self.recording.fields.get("stream")
        answers = [response[-1]] if stream else response if isinstance(response, list) else [response]
        for answer in answers:
            if not isinstance(answer, dict) or "meta_info" not in answer:
                return
            meta, ids = answer["meta_info"], answer["output_ids"]
            reason = meta["finish_reason"]
            for lp, token, text in meta.get("output_token_logprobs", []):
                del lp
                if text is not None:
                    self.texts[token] = text
            for entry, top in zip(
                meta.get("input_token_logprobs", []), meta.get("input_top_logprobs") or [()] * 10**4, strict=False
            ):
                self.prompt_scores.append(entry[0])
                self.prompt_tops.append([(token, lp) for lp, token, _ in top or ()])
            rows = [*meta.get("input_token_ids_logprobs", ()), *meta.get("output_token_ids_logprobs", ())]
            self.given |= {(at, token): lp for at, row in enumerate(rows) for lp, token, _ in row or ()}
            missing = meta.get("prompt_tokens", 0) - len(self.prompt_scores)  # the expanded prompt, if it has images
            if self.prompt_scores:
                self.prompt_scores[:0] = [None] * missing
                self.prompt_tops[:0] = [()] * missing
            matched, text = reason.get("matched"), answer.get("text", "")
            keep = self.recording.params.get("no_stop_trim")
            self.known[tuple(ids)] = text + matched if isinstance(matched, str) and not keep else text
            if isinstance(matched, int) and not keep:
                self.known[tuple(ids[:-1])] = text
            for event in response if stream else ():
                self.known[tuple(event["output_ids"])] = event.get("text", "")
            yield Completion(
                ids,
                [entry[0] for entry in meta["output_token_logprobs"]] if "output_token_logprobs" in meta else None,
                reason["type"],
                matched,
                [[(token, lp) for lp, token, _ in top] for top in meta.get("output_top_logprobs", [])] or None,
                [(s["version"], s["start"], s["end"]) for s in meta["weight_versions"]],
                meta.get("cached_tokens"),
                meta.get("routed_experts"),
                support=_support(meta),
            )


def _support(meta: dict[str, Any]) -> list[list[tuple[int, float]]] | None:
    """Return the ids of the sampling mask, with logprobs of all or of the sampled one."""
    if "output_token_sampling_mask" not in meta:
        return None
    rows = zip(meta["output_token_sampling_mask"], meta["output_token_sampling_logprobs"], strict=True)
    return [list(zip(ids, of if isinstance(of, list) else [of] * len(ids), strict=True)) for ids, of in rows]
