"""The scripted engine that a gateway is judged with, and its log.

It is a scripted vLLM or SGLang (`tito_conformance.testing`) with a chat route, which these lack because they have no
tokenizer. Its answers follow the last mark in the prompt, `with:NAME`; see `Answers`.
"""

from __future__ import annotations

import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any

from transformers import AutoTokenizer

from tito_conformance.testing import Completion, Fault, ScriptedEngine, ScriptedRequest, Settled, scripted_engine
from tito_conformance.testing.chat import ChatWire
from tito_conformance.testing.script import FinishReason, float32

MARK = re.compile(r"with:(\w+)")
NONCE = re.compile(r"nonce-\w+")
MARKUP = re.compile(r"(</?tool_call>)")
END = "<|im_end|>"
CONTEXT = 2048
"""Context length in tokens."""
CUT = 12
"""Tokens of an answer that ends inside its call."""
TRIES = 64
"""How often an answer is cut at random before it is taken as it is."""
WORDS = ("amber", "birch", "cedar", "delta", "ember", "fjord", "grove", "heron", "inlet", "jetty", "kelp", "larch")


@dataclass(frozen=True, slots=True)
class Call:
    """One generation in the engine's log.

    Attributes:
        number: Position among all generation requests.
        prompt_ids: The ids that the engine was sent, or that its chat route rendered.
        output_ids: The sampled ids.
        logprobs: One for each sampled id, None where the engine did not report it.
        body: The request's JSON body.
    """

    number: int
    prompt_ids: list[int]
    output_ids: list[int]
    logprobs: list[float | None]
    body: Mapping[str, Any]

    @property
    def ids(self) -> list[int]:
        """Prompt and output."""
        return self.prompt_ids + self.output_ids


class Answers:
    """The engine's script.

    `text` and `call` and `calls` (two in one answer) are sampled in ids that encoding their text does not give, and
    calls are spaced as no template spaces them; `canonical` is a text in the ids that encoding gives. `cut` is a call
    that ends at the request's token limit, or after `CUT` tokens as at the context's end. `json` is an object. `same`
    and `samecall` are the same sample in every request. `bare` comes without logprobs, `short` with one too few.
    `aborted` is ended by the engine early, once a session. `broken` is a 500. Every request has logprobs of its own.
    """

    def __init__(self, tokenizer: Any, seed: int) -> None:
        self._tokenizer = tokenizer
        self._seed = seed
        self._aborted: set[str] = set()
        self._decode = lru_cache(4096)(tokenizer.decode)  # asked again while a request is held

    def __call__(self, request: ScriptedRequest) -> Completion:
        """Return the answer to a prompt."""
        kind = self.kind(request)
        same = kind.startswith("same")
        rng = random.Random(f"{self._seed}/{'same' if same else request.number}")
        ids = self._ids(kind, rng, CUT if kind == "cut" else request.max_new_tokens)
        finish: FinishReason | None = None
        if kind == "cut":
            ids, finish = ids[: min(CUT, request.max_new_tokens)], "length"
        if kind == "aborted" and (nonce := NONCE.search(self.text(request))) and nonce[0] not in self._aborted:
            ids, finish = ids[:4], "abort"
            self._aborted.add(nonce[0])
        return self.sampled(request, ids, finish)

    def sampled(self, request: ScriptedRequest, ids: Sequence[int], finish: FinishReason | None = None) -> Completion:
        """Return an answer with the request's own logprobs."""
        own = random.Random(f"{self._seed}/{request.number}/logprobs")
        return Completion(ids, [float32(-0.001 - own.expovariate(1.0)) for _ in ids], finish=finish)

    def kind(self, request: ScriptedRequest) -> str:
        """Return the name in the prompt's last mark, "text" without one."""
        marks: list[str] = MARK.findall(self.text(request))
        return marks[-1] if marks else "text"

    def text(self, request: ScriptedRequest) -> str:
        """Return a prompt's text."""
        return str(self._decode(request.prompt_ids))

    def fault(self, number: int, request: ScriptedRequest) -> Fault | None:
        """Return the fault of a request. See `tito_conformance.testing.FaultPolicy`."""
        kind = self.kind(request)
        if kind == "broken":
            return Fault(status=500, content_type="application/json", body=b'{"error": {"message": "broken"}}')
        if kind in ("bare", "short"):
            return Fault(edit=lambda answer: _without_logprobs(answer, whole=kind == "bare"))
        return None

    def _ids(self, kind: str, rng: random.Random, limit: int) -> list[int]:
        first, second = rng.sample(WORDS, 2)
        number = rng.randrange(1000, 9999)
        if kind in ("call", "calls", "cut", "samecall"):
            calls = [_call(rng, "lookup", "q", f"{first} {number}")]
            if kind == "calls":
                calls.append(_call(rng, "weigh", "item", f"{second} {number + 1}"))
            return self.drifted("\n".join(calls), rng, limit)
        text = f"The {first} {second} counts {number} leaves."
        if kind == "json":
            text = f'{{"{first}": "{second}",  "leaves":{number}}}'
        return self._encode(text + END) if kind == "canonical" else self.drifted(text, rng, limit)

    def _encode(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False))

    def drifted(self, text: str, rng: random.Random, limit: int) -> list[int]:
        """Return ids that decode to the text, and the end of the turn; encoding gives other ids within `limit`.

        Within a few tokens it may not: a client that asks whether the engine is alive wants one.
        """
        ids: list[int] = []
        for _ in range(TRIES):
            ids = []
            for part in MARKUP.split(text):
                cuts = sorted(rng.sample(range(1, len(part)), min(6, len(part) - 1))) if len(part) > 12 else []
                for start, end in zip([0, *cuts], [*cuts, len(part)], strict=True):
                    ids += self._encode(part[start:end])
            if ids[:limit] != self._encode(self._tokenizer.decode(ids[:limit])):
                break
        return ids + self._encode(END)


def _call(rng: random.Random, name: str, key: str, value: str) -> str:
    """Return a call in Hermes' form, spaced as a model may and a template does not."""
    blank = rng.choice(["", "  "])
    return f'<tool_call>\n{{"name":{blank}"{name}",{blank}"arguments":{{"{key}":{blank}"{value}"}}}}\n</tool_call>'


def _without_logprobs(value: Any, *, whole: bool) -> Any:
    """Remove the logprobs of every choice or event in an answer, or only the last one of each list."""
    if isinstance(value, list):
        for each in value:
            _without_logprobs(each, whole=whole)
    elif isinstance(value, dict):
        for name in ("content", "token_logprobs", "tokens", "top_logprobs", "text_offset"):
            found = value.get("logprobs")
            if not whole and isinstance(found, dict) and isinstance(found.get(name), list):
                del found[name][-1:]
        if whole and "logprobs" in value:
            value["logprobs"] = None
        if "output_token_logprobs" in value:
            value["output_token_logprobs"] = [] if whole else value["output_token_logprobs"][:-1]
        for each in value.values():
            _without_logprobs(each, whole=whole)
    return value


@cache
def load(folder: str) -> Any:
    """Return the tokenizer of a folder."""
    return AutoTokenizer.from_pretrained(folder, local_files_only=True)


class Engine:
    """The scripted engine and its log.

    Attributes:
        answers: Its script, whose class a caller may choose.
        scripted: The engine; serve it with `tito_conformance.testing.ScriptedServer`.
        held: While set, every request whose prompt has it waits before it is answered.
    """

    def __init__(
        self,
        wire: str,
        tokenizer: str,
        seed: int,
        release: str = "0.32.0",
        answers: type[Answers] = Answers,
        context: int = CONTEXT,
    ) -> None:
        self.tokenizer: Any = load(tokenizer)
        self.answers = answers(self.tokenizer, seed)
        self.held = ""
        self.scripted: ScriptedEngine = scripted_engine(
            wire,
            self.answers,
            vocab_size=len(self.tokenizer),
            max_model_len=context,
            eos_ids=self.tokenizer.encode(END),
            decode=self.tokenizer.decode,
            encode=lambda text, special: self.tokenizer.encode(text, add_special_tokens=special),
            release=release,
            fault=self.answers.fault,
        )
        self.scripted.wire = ChatWire(self.scripted.wire, self.tokenizer)
        self.scripted.hold = lambda request: bool(self.held) and self._has(request, self.held)

    def arrived(self, text: str) -> list[ScriptedRequest]:
        """Return the generation requests whose prompt has the text, answered or not."""
        return [request for request in self.scripted.requests if self._has(request, text)]

    def ended(self, text: str) -> int:
        """Return the number of those that the client aborted or disconnected."""
        gone = {*self.scripted.disconnected, *self.scripted.aborted}
        return sum(request.server_id in gone for request in self.arrived(text))

    def calls(self, text: str) -> list[Call]:
        """Return the answered generations whose prompt has the text, in order of arrival."""
        found: list[Call] = []
        for exchange in self.scripted.exchanges:
            if exchange.response.status == 200:
                found += [self._call(answer) for answer in exchange.answers if self._has(answer.request, text)]
        return sorted(found, key=lambda call: call.number)

    def _has(self, request: ScriptedRequest, text: str) -> bool:
        return text in self.answers.text(request)

    def _call(self, answer: Settled) -> Call:
        request, count = answer.request, len(answer.output_ids)
        reported = {"bare": 0, "short": count - 1}.get(self.answers.kind(request), count)
        logprobs = [*answer.logprobs[:reported], *[None] * (count - reported)]
        return Call(request.number, list(request.prompt_ids), list(answer.output_ids), logprobs, request.body)
