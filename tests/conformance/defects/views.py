"""Views to read and change a decoded response in one way on every wire: setting a field changes it in place."""

from __future__ import annotations

import base64
import io
from typing import Any

import numpy as np

EXPERTS = (2, 2)
"""Layers, and experts a token, of the scripted models."""
Pairs = list[tuple[int, Any]]
"""(id, logprob)."""


def _field(*path: str | int) -> Any:
    """Make a property of a value inside the response."""

    def holder(view: View) -> Any:
        found = view.answer
        for name in path[:-1]:
            found = found[name]
        return found

    def put(view: View, value: Any) -> None:
        holder(view)[path[-1]] = value

    return property(lambda view: holder(view)[path[-1]], put)


def _spans(*path: str | int) -> Any:
    inner = _field(*path)

    def put(view: View, value: Any) -> None:
        inner.fset(view, [{"version": version, "start": start, "end": end} for version, start, end in value])

    return property(inner.fget, put)


class View:
    """A response: its ids, its rows of logprobs, their metadata, and its optional outputs, empty or None without any.

    `scored` are (id, logprob) of the prompt's tokens, `top` those of each output token, and `experts` an array of shape
    (rows, layers, experts a token).
    """

    part: Any
    ids: Any
    logprobs: Any
    row_ids: Any
    echo: Any
    finish: Any
    prompt_tokens: Any
    completion_tokens: Any
    cached_tokens: Any
    versions: Any
    text: Any
    top: Any
    scored: Any
    experts: Any

    def __init__(self, answer: Any) -> None:
        self.answer = answer

    @property
    def tables(self) -> list[list[Any]]:
        """Return the lists that have an entry for each row."""
        raise NotImplementedError

    def drop_row(self, at: int) -> None:
        for table in self.tables:
            del table[at]


class _Rows(View):
    """A response with one table of rows, whose logprob and id have keys."""

    keys: tuple[Any, Any]

    def _column(self, key: Any) -> list[Any]:
        return [row[key] for row in self.tables[0]]

    def _set(self, key: Any, values: list[Any]) -> None:
        for row, value in zip(self.tables[0], values, strict=True):
            row[key] = value

    logprobs = property(lambda self: self._column(self.keys[0]), lambda self, values: self._set(self.keys[0], values))
    row_ids = property(lambda self: self._column(self.keys[1]), lambda self, values: self._set(self.keys[1], values))


class _VLLM(View):
    """What both of vLLM's endpoints share."""

    part = _field("choices", 0)
    ids = _field("choices", 0, "token_ids")
    finish = _field("choices", 0, "finish_reason")
    prompt_tokens = _field("usage", "prompt_tokens")
    completion_tokens = _field("usage", "completion_tokens")

    @property
    def cached_tokens(self) -> Any:
        return (self.answer["usage"].get("prompt_tokens_details") or {}).get("cached_tokens")

    @cached_tokens.setter
    def cached_tokens(self, value: Any) -> None:
        self.answer["usage"]["prompt_tokens_details"] = {"cached_tokens": value}

    @property
    def _scored_in(self) -> Any:
        return self.answer

    @property
    def scored(self) -> Pairs:
        entries = self._scored_in.get("prompt_logprobs") or []
        return [(int(token), each["logprob"]) for entry in entries if entry for token, each in [*entry.items()][:1]]

    @scored.setter
    def scored(self, pairs: Pairs) -> None:
        written = [{str(token): {"logprob": value, "rank": 1, "decoded_token": ""}} for token, value in pairs]
        self._scored_in["prompt_logprobs"] = [None, *written]

    @property
    def experts(self) -> Any:
        text = self.part.get("routed_experts")
        return None if text is None else np.load(io.BytesIO(base64.b64decode(text)))

    @experts.setter
    def experts(self, array: Any) -> None:
        stream = io.BytesIO()
        np.save(stream, array)
        self.part["routed_experts"] = base64.b64encode(stream.getvalue()).decode()


class VLLMGenerate(_Rows, _VLLM):
    """`/inference/v1/generate`."""

    keys = ("logprob", "token_id")
    echo = _field("prompt_token_ids")
    versions = _spans("choices", 0, "weight_versions")

    @property
    def tables(self) -> list[list[Any]]:
        return [self.part["logprobs"]["content"]]

    @property
    def top(self) -> list[Pairs]:
        found = [[(each["token_id"], each["logprob"]) for each in row["top_logprobs"]] for row in self.tables[0]]
        return found if any(len(row) > 1 for row in found) else []

    @top.setter
    def top(self, rows: list[Pairs]) -> None:
        for row, pairs in zip(self.tables[0], rows, strict=True):
            row["top_logprobs"] = [{"token_id": t, "logprob": v, "rank": n} for n, (t, v) in enumerate(pairs, 1)]


class VLLMCompletions(_VLLM):
    """`/v1/completions`."""

    echo = _field("choices", 0, "prompt_token_ids")
    text = _field("choices", 0, "text")
    logprobs = _field("choices", 0, "logprobs", "token_logprobs")

    @property
    def tables(self) -> list[list[Any]]:
        return [table for table in self.part["logprobs"].values() if table]

    @property
    def _scored_in(self) -> Any:
        return self.part

    @property
    def row_ids(self) -> list[int]:
        return [int(token.split(":")[1]) for token in self.part["logprobs"]["tokens"]]

    @row_ids.setter
    def row_ids(self, values: list[int]) -> None:
        self.part["logprobs"]["tokens"] = [f"token_id:{value}" for value in values]

    @property
    def top(self) -> list[Pairs]:
        rows = self.part["logprobs"]["top_logprobs"]
        found = [[(int(name.split(":")[1]), value) for name, value in row.items()] for row in rows]
        return found if any(len(row) > 1 for row in found) else []

    @top.setter
    def top(self, rows: list[Pairs]) -> None:
        named = [{f"token_id:{token}": value for token, value in pairs} for pairs in rows]
        self.part["logprobs"]["top_logprobs"] = named


class SGLangGenerate(_Rows):
    """SGLang's `/generate`."""

    keys = (0, 1)
    part = property(lambda self: self.answer)
    ids = _field("output_ids")
    echo = _field("prompt_token_ids")
    text = _field("text")
    finish = _field("meta_info", "finish_reason", "type")
    prompt_tokens = _field("meta_info", "prompt_tokens")
    completion_tokens = _field("meta_info", "completion_tokens")
    cached_tokens = _field("meta_info", "cached_tokens")
    versions = _spans("meta_info", "weight_versions")

    @property
    def _meta(self) -> Any:
        return self.answer["meta_info"]

    @property
    def tables(self) -> list[list[Any]]:
        return [self._meta["output_token_logprobs"]]

    @property
    def top(self) -> list[Pairs]:
        return [[(token, value) for value, token, _ in row] for row in self._meta.get("output_top_logprobs") or []]

    @top.setter
    def top(self, rows: list[Pairs]) -> None:
        self._meta["output_top_logprobs"] = [[[value, token, None] for token, value in pairs] for pairs in rows]

    @property
    def scored(self) -> Pairs:
        return [(token, value) for value, token, _ in (self._meta.get("input_token_logprobs") or [])[1:]]

    @scored.setter
    def scored(self, pairs: Pairs) -> None:
        first = self._meta["input_token_logprobs"][:1]
        self._meta["input_token_logprobs"] = first + [[value, token, None] for token, value in pairs]

    @property
    def experts(self) -> Any:
        text = self._meta.get("routed_experts")
        return None if text is None else np.frombuffer(base64.b64decode(text), "<i4").reshape(-1, *EXPERTS)

    @experts.setter
    def experts(self, array: Any) -> None:
        self._meta["routed_experts"] = base64.b64encode(np.ascontiguousarray(array, "<i4").tobytes()).decode()


VIEWS: dict[str, type[View]] = {
    "vllm": VLLMGenerate,
    "vllm-completions": VLLMCompletions,
    "sglang": SGLangGenerate,
}
"""The view of a response, by wire."""
