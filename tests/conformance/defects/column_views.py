"""Views to read and change the optional outputs of a decoded response in one way on every wire."""

from __future__ import annotations

import base64
import io
from abc import ABC, abstractmethod
from typing import Any

import numpy as np

from conformance.defects.answer_views import SGLangGenerate, View, VLLMCompletions, VLLMGenerate

EXPERTS = (2, 2)
"""Layers, and experts a token, of the scripted models."""
Pairs = list[tuple[int, Any]]
"""(id, logprob)."""


class Columns(ABC):
    """The optional outputs of a response, empty or None if not requested. Setting one changes the response."""

    def __init__(self, view: View) -> None:
        self.view = view

    @property
    @abstractmethod
    def top(self) -> list[Pairs]:
        """Top logprobs of each output token."""

    @top.setter
    @abstractmethod
    def top(self, rows: list[Pairs]) -> None: ...

    @property
    @abstractmethod
    def scored(self) -> Pairs:
        """Logprobs of the prompt's tokens."""

    @scored.setter
    @abstractmethod
    def scored(self, pairs: Pairs) -> None: ...

    @property
    @abstractmethod
    def experts(self) -> Any:
        """Experts, an array of shape (rows, layers, experts a token), or None."""

    @experts.setter
    @abstractmethod
    def experts(self, array: Any) -> None: ...


class _VLLM(Columns):
    @property
    def _scored_in(self) -> Any:
        return self.view.answer

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
        text = self.view.part.get("routed_experts")
        return None if text is None else np.load(io.BytesIO(base64.b64decode(text)))

    @experts.setter
    def experts(self, array: Any) -> None:
        stream = io.BytesIO()
        np.save(stream, array)
        self.view.part["routed_experts"] = base64.b64encode(stream.getvalue()).decode()


class _Generate(_VLLM):
    @property
    def top(self) -> list[Pairs]:
        rows = self.view.part["logprobs"]["content"]
        found = [[(each["token_id"], each["logprob"]) for each in row["top_logprobs"]] for row in rows]
        return found if any(len(row) > 1 for row in found) else []

    @top.setter
    def top(self, rows: list[Pairs]) -> None:
        for row, pairs in zip(self.view.part["logprobs"]["content"], rows, strict=True):
            row["top_logprobs"] = [{"token_id": t, "logprob": v, "rank": n} for n, (t, v) in enumerate(pairs, 1)]


class _Completions(_VLLM):
    @property
    def _scored_in(self) -> Any:
        return self.view.part

    @property
    def top(self) -> list[Pairs]:
        rows = self.view.part["logprobs"]["top_logprobs"]
        found = [[(int(name.split(":")[1]), value) for name, value in row.items()] for row in rows]
        return found if any(len(row) > 1 for row in found) else []

    @top.setter
    def top(self, rows: list[Pairs]) -> None:
        named = [{f"token_id:{token}": value for token, value in pairs} for pairs in rows]
        self.view.part["logprobs"]["top_logprobs"] = named


class _SGLang(Columns):
    @property
    def _meta(self) -> Any:
        return self.view.answer["meta_info"]

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


_COLUMNS: dict[type[View], type[Columns]] = {
    VLLMGenerate: _Generate,
    VLLMCompletions: _Completions,
    SGLangGenerate: _SGLang,
}


def columns_of(view: View) -> Columns:
    """Return the optional outputs of a response."""
    return _COLUMNS[type(view)](view)
