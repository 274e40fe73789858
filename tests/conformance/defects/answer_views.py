"""Views to read and change a decoded response in one way on every wire."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any


class View(ABC):
    """A response: its ids, its rows of logprobs, and their metadata. Setting a field changes the response in place."""

    def __init__(self, answer: Any) -> None:
        self.answer = answer

    @property
    @abstractmethod
    def part(self) -> Any:
        """The object that holds the ids."""

    @property
    @abstractmethod
    def ids_key(self) -> str:
        """The key of the ids."""

    @property
    def ids(self) -> list[int]:
        """The output ids."""
        return list(self.part[self.ids_key])

    @ids.setter
    def ids(self, value: list[int]) -> None:
        self.part[self.ids_key] = value

    logprobs: Any
    row_ids: Any
    echo: Any
    finish: Any
    prompt_tokens: Any
    completion_tokens: Any
    cached_tokens: Any
    versions: Any
    text: Any

    @abstractmethod
    def drop_row(self, at: int) -> None:
        """Remove one row of logprobs."""

    @abstractmethod
    def repeat_row(self, at: int) -> None:
        """Repeat one row of logprobs."""


def _field(*path: str) -> Any:
    """Make a property of a value inside the response."""

    def get(view: View) -> Any:
        found = view.answer
        for name in path:
            found = found[0] if name == "0" else found[name]
        return found

    def put(view: View, value: Any) -> None:
        found = view.answer
        for name in path[:-1]:
            found = found[0] if name == "0" else found[name]
        found[path[-1]] = value

    return property(get, put)


def _spans(*path: str) -> Any:
    inner = _field(*path)

    def put(view: View, value: Any) -> None:
        inner.fset(view, [{"version": version, "start": start, "end": end} for version, start, end in value])

    return property(inner.fget, put)


class _VLLM(View):
    """The fields that both of vLLM's endpoints share."""

    finish = _field("choices", "0", "finish_reason")
    prompt_tokens = _field("usage", "prompt_tokens")
    completion_tokens = _field("usage", "completion_tokens")

    @property
    def part(self) -> Any:
        """The object that holds the ids."""
        return self.answer["choices"][0]

    @property
    def ids_key(self) -> str:
        """The key of the ids."""
        return "token_ids"

    @property
    def cached_tokens(self) -> Any:
        """Cached tokens of the prompt."""
        return (self.answer["usage"].get("prompt_tokens_details") or {}).get("cached_tokens")

    @cached_tokens.setter
    def cached_tokens(self, value: int) -> None:
        self.answer["usage"]["prompt_tokens_details"] = {"cached_tokens": value}


class VLLMGenerate(_VLLM):
    """`/inference/v1/generate`."""

    echo = _field("prompt_token_ids")
    versions = _spans("choices", "0", "weight_versions")

    @property
    def _rows(self) -> list[Any]:
        rows: list[Any] = self.part["logprobs"]["content"]
        return rows

    @property
    def logprobs(self) -> list[Any]:
        """One logprob for each row."""
        return [row["logprob"] for row in self._rows]

    @logprobs.setter
    def logprobs(self, values: list[Any]) -> None:
        for row, value in zip(self._rows, values, strict=True):
            row["logprob"] = value

    @property
    def row_ids(self) -> list[int]:
        """The token of each row."""
        return [row["token_id"] for row in self._rows]

    @row_ids.setter
    def row_ids(self, values: list[int]) -> None:
        for row, value in zip(self._rows, values, strict=True):
            row["token_id"], row["token"] = value, f"token_id:{value}"

    def drop_row(self, at: int) -> None:
        """Remove one row."""
        del self._rows[at]

    def repeat_row(self, at: int) -> None:
        """Repeat one row."""
        self._rows.append(dict(self._rows[at]))


class VLLMCompletions(_VLLM):
    """`/v1/completions`."""

    echo = _field("choices", "0", "prompt_token_ids")
    text = _field("choices", "0", "text")

    @property
    def _table(self) -> Any:
        return self.part["logprobs"]

    @property
    def logprobs(self) -> list[Any]:
        """One logprob for each row."""
        return list(self._table["token_logprobs"])

    @logprobs.setter
    def logprobs(self, values: list[Any]) -> None:
        self._table["token_logprobs"] = values

    @property
    def row_ids(self) -> list[int]:
        """The token of each row."""
        return [int(token.split(":")[1]) for token in self._table["tokens"]]

    @row_ids.setter
    def row_ids(self, values: list[int]) -> None:
        self._table["tokens"] = [f"token_id:{value}" for value in values]

    def drop_row(self, at: int) -> None:
        """Remove one row."""
        for name in ("token_logprobs", "tokens", "text_offset", "top_logprobs"):
            if self._table.get(name):
                del self._table[name][at]

    def repeat_row(self, at: int) -> None:
        """Repeat one row."""
        for name in ("token_logprobs", "tokens", "text_offset", "top_logprobs"):
            if self._table.get(name):
                self._table[name].append(self._table[name][at])


class SGLangGenerate(View):
    """SGLang's `/generate`."""

    echo = _field("prompt_token_ids")
    text = _field("text")
    finish = _field("meta_info", "finish_reason", "type")
    prompt_tokens = _field("meta_info", "prompt_tokens")
    completion_tokens = _field("meta_info", "completion_tokens")
    cached_tokens = _field("meta_info", "cached_tokens")
    versions = _spans("meta_info", "weight_versions")

    @property
    def part(self) -> Any:
        """The object that holds the ids."""
        return self.answer

    @property
    def ids_key(self) -> str:
        """The key of the ids."""
        return "output_ids"

    @property
    def _rows(self) -> list[Any]:
        rows: list[Any] = self.answer["meta_info"]["output_token_logprobs"]
        return rows

    @property
    def logprobs(self) -> list[Any]:
        """One logprob for each row."""
        return [row[0] for row in self._rows]

    @logprobs.setter
    def logprobs(self, values: list[Any]) -> None:
        for row, value in zip(self._rows, values, strict=True):
            row[0] = value

    @property
    def row_ids(self) -> list[int]:
        """The token of each row."""
        return [row[1] for row in self._rows]

    @row_ids.setter
    def row_ids(self, values: list[int]) -> None:
        for row, value in zip(self._rows, values, strict=True):
            row[1] = value

    def drop_row(self, at: int) -> None:
        """Remove one row."""
        del self._rows[at]

    def repeat_row(self, at: int) -> None:
        """Repeat one row."""
        self._rows.append(list(self._rows[at]))


_VIEWS: dict[str, type[View]] = {
    "vllm": VLLMGenerate,
    "vllm-completions": VLLMCompletions,
    "sglang": SGLangGenerate,
}


def view_of(wire: str, answer: Any) -> View:
    """Return the view of a response on a wire."""
    return _VIEWS[wire](answer)
