"""What the stranger's proxy does wrong: each class spoils requests, whole answers or events of a stream."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any


class Sound:
    """Nothing is changed. One object serves the whole life of the proxy; `Exchange` holds what belongs to a request."""

    def request(self, exchange: Exchange, body: dict[str, Any]) -> None:
        """Change the request's body in place."""

    def part(self, exchange: Exchange, part: Part) -> None:
        """Change the tokens of a whole answer or of one event in place."""

    def keeps(self, exchange: Exchange, event: Any) -> bool:
        """Return whether an event of a stream is sent."""
        return True

    def whole(self, exchange: Exchange, answer: Any) -> Any:
        """Return a whole answer, or the list of a stream's events, from what came; only where `buffers`."""
        return answer

    buffers = False


@dataclass
class Exchange:
    """One request: its number among generations, whether it streams and scores, and memory for a defect."""

    number: int
    path: str
    streamed: bool
    scoring: bool
    sent: dict[str, Any]
    events: int = 0
    tokens: int = 0
    last: float | None = None


class Part:
    """The tokens that an answer or an event holds: ids and logprobs of one kind on all three paths.

    Attributes:
        start: Offset of its first token in the output.
    """

    def __init__(self, holder: dict[str, Any], start: int) -> None:
        self.holder = holder
        self.start = start
        meta = holder.get("meta_info")
        self.meta = meta
        self.key = "output_ids" if meta is not None else "token_ids"

    @property
    def ids(self) -> list[int]:
        """The output ids."""
        return list(self.holder.get(self.key) or ())

    @property
    def logprobs(self) -> list[float]:
        """Their logprobs."""
        if self.meta is not None:
            return [row[0] for row in self.meta.get("output_token_logprobs") or ()]
        table = self.holder.get("logprobs") or {}
        return [row["logprob"] for row in table.get("content") or ()] or list(table.get("token_logprobs") or ())

    @logprobs.setter
    def logprobs(self, values: list[float]) -> None:
        if self.meta is not None:
            for row, value in zip(self.meta.get("output_token_logprobs") or (), values, strict=True):
                row[0] = value
            return
        table = self.holder.get("logprobs") or {}
        for n, (row, value) in enumerate(zip(table.get("content") or (), values, strict=False)):
            own = row["token_id"] if "token_id" in row else row["token"]
            row["logprob"] = values[n] = value
            for top in row.get("top_logprobs") or ():
                if top.get("token_id", top.get("token")) == own:
                    top["logprob"] = value
        if table.get("token_logprobs"):
            table["token_logprobs"] = values
            for token, row, value in zip(table["tokens"], table.get("top_logprobs") or (), values, strict=False):
                if row and token in row:
                    row[token] = value

    @property
    def finish(self) -> str | None:
        """The finish reason."""
        if self.meta is None:
            return self.holder.get("finish_reason")
        reason = self.meta.get("finish_reason")
        return None if reason is None else reason["type"]

    def finish_as_stop(self) -> None:
        """Report a complete answer."""
        if self.meta is not None:
            self.meta["finish_reason"] = {"type": "stop", "matched": None}
        else:
            self.holder["finish_reason"] = "stop"


def params_of(body: dict[str, Any]) -> dict[str, Any]:
    """Return the sampling fields of a body, which may be changed."""
    params = body.get("sampling_params")
    return params if isinstance(params, dict) else body


class PenaltiesDropped(Sound):
    """Presence and frequency penalties are not passed on."""

    def request(self, exchange: Exchange, body: dict[str, Any]) -> None:
        params_of(body).update(presence_penalty=0.0, frequency_penalty=0.0)


class TemperatureCapped(Sound):
    """Temperatures above 1 are passed on as 1."""

    def request(self, exchange: Exchange, body: dict[str, Any]) -> None:
        params = params_of(body)
        params["temperature"] = min(params.get("temperature") or 0.0, 1.0)


class TopPDefault(Sound):
    """A `top_p` of 1 becomes the gateway's default of 0.9."""

    def request(self, exchange: Exchange, body: dict[str, Any]) -> None:
        params = params_of(body)
        if params.get("top_p", 1.0) == 1.0 and params.get("temperature"):
            params["top_p"] = 0.9


class SeedsDropped(Sound):
    """Seeds are not passed on."""

    def request(self, exchange: Exchange, body: dict[str, Any]) -> None:
        for name in ("seed", "sampling_seed"):
            params_of(body).pop(name, None)


class StopIdsDropped(Sound):
    """After 20 generations, stop ids are not passed on."""

    def request(self, exchange: Exchange, body: dict[str, Any]) -> None:
        if exchange.number > 20:
            params_of(body)["stop_token_ids"] = []


class PromptTokenLost(Sound):
    """A token in the middle of prompts of over 200 is lost, and echo and counts are put right again."""

    buffers = True

    def request(self, exchange: Exchange, body: dict[str, Any]) -> None:
        name = next((name for name in ("prompt", "token_ids", "input_ids") if isinstance(body.get(name), list)), None)
        if name is None or len(body[name]) <= 200 or not isinstance(body[name][0], int) or exchange.scoring:
            return
        exchange.last = 1.0
        exchange.sent = {"ids": list(body[name])}
        body[name] = [*body[name][:-9], *body[name][-8:]]

    def whole(self, exchange: Exchange, answer: Any) -> Any:
        for each in answer if isinstance(answer, list) else [answer]:
            if exchange.last is not None and isinstance(each, dict):
                self._restore(each, exchange.sent["ids"])
        return answer

    def _restore(self, value: dict[str, Any], ids: list[int]) -> None:
        for holder in (value, *(value.get("choices") or ())):
            if holder.get("prompt_token_ids"):
                holder["prompt_token_ids"] = ids
        for holder in (value.get("usage"), value.get("meta_info")):
            if holder and "prompt_tokens" in holder:
                holder["prompt_tokens"] = len(ids)
            if holder and "total_tokens" in holder:
                holder["total_tokens"] += 1


class Every20thLogprob(Sound):
    """The logprob of every 20th token is 5% off."""

    def part(self, exchange: Exchange, part: Part) -> None:
        values = enumerate(part.logprobs, part.start)
        part.logprobs = [value * 1.05 - 0.02 if n % 20 == 19 else value for n, value in values]


class LateInStreams(Sound):
    """In streams each token has the logprob of the token before it; the first has its own."""

    def part(self, exchange: Exchange, part: Part) -> None:
        values = part.logprobs
        if not exchange.streamed or not values:
            return
        before = exchange.last if part.start and exchange.last is not None else values[0]
        exchange.last = values[-1]
        part.logprobs = [before, *values[:-1]]


class CutOffCalledStop(Sound):
    """Answers that were cut off after more than 24 tokens are reported as complete."""

    def part(self, exchange: Exchange, part: Part) -> None:
        if part.finish == "length" and part.start + len(part.ids) > 24:
            part.finish_as_stop()


class EventLost(Sound):
    """The 8th event of each stream is lost."""

    def keeps(self, exchange: Exchange, event: Any) -> bool:
        return exchange.events != 8


class Cached(Sound):
    """A prompt that was answered before gets that answer again, whatever its seed."""

    buffers = True

    def __init__(self) -> None:
        self._known: dict[str, Any] = {}

    def whole(self, exchange: Exchange, answer: Any) -> Any:
        if exchange.scoring:
            return answer
        names = ("seed", "sampling_seed", "rid", "request_id")
        params = {name: value for name, value in params_of(exchange.sent).items() if name not in names}
        rest = {name: value for name, value in exchange.sent.items() if name not in (*names, "sampling_params")}
        return self._known.setdefault(json.dumps([exchange.path, params, rest], sort_keys=True), answer)


class Crossed(Sound):
    """Every 25th whole answer has ids, logprobs and finish of the whole answer before it, with its own echo."""

    buffers = True

    def __init__(self) -> None:
        self._before: Any = None

    def whole(self, exchange: Exchange, answer: Any) -> Any:
        if exchange.streamed or exchange.scoring or not isinstance(answer, dict):
            return answer
        before, self._before = self._before, json.loads(json.dumps(answer))
        if before is None or exchange.number % 25 or ("choices" in before) != ("choices" in answer):
            return answer
        if "choices" not in answer:
            return {
                **before,
                "prompt_token_ids": answer.get("prompt_token_ids"),
                "meta_info": self._meta(before, answer),
            }
        echo = answer["choices"][0].get("prompt_token_ids")
        answer["choices"] = before["choices"]
        if echo is not None:
            answer["choices"][0]["prompt_token_ids"] = echo
        count = len(answer["choices"][0]["token_ids"] or ())
        answer["usage"] |= {"completion_tokens": count, "total_tokens": answer["usage"]["prompt_tokens"] + count}
        return answer

    def _meta(self, before: Any, answer: Any) -> dict[str, Any]:
        own = {name: answer["meta_info"].get(name) for name in ("id", "prompt_tokens", "cached_tokens")}
        return {**before["meta_info"], **own}


DEFECTS: dict[str, Callable[[], Sound]] = {
    "none": Sound,
    "penalties-dropped": PenaltiesDropped,
    "temperature-capped": TemperatureCapped,
    "top-p-default": TopPDefault,
    "seeds-dropped": SeedsDropped,
    "stop-ids-dropped": StopIdsDropped,
    "prompt-token-lost": PromptTokenLost,
    "every-20th-logprob": Every20thLogprob,
    "late-in-streams": LateInStreams,
    "cut-off-called-stop": CutOffCalledStop,
    "event-lost": EventLost,
    "cached": Cached,
    "crossed": Crossed,
}


def parts(value: Any, exchange: Exchange) -> Iterator[Part]:
    """Yield the tokens of an answer or event. SGLang's events may repeat the answer so far."""
    for holder in value if isinstance(value, list) else [value]:
        if "choices" in holder:
            for choice in holder["choices"]:
                part = Part(choice, exchange.tokens if exchange.streamed else 0)
                exchange.tokens += len(part.ids) if exchange.streamed else 0
                yield part
        elif "meta_info" in holder:
            part = Part(holder, 0)
            count = holder["meta_info"].get("completion_tokens", len(part.ids))
            part.start = count - len(part.ids)
            yield part
