"""Hostile answers of an engine, on each wire, whole and streamed, while connecting and while generating.

The oracle is the conformance suite's own wire reader, which shares nothing with the client. A committed turn holds the
ids, logprobs, prompt and counts that this reader finds in the bytes of the changed answer. A refused turn raises an
error of the package, leaves the ledger unchanged and nothing running on the engine, and the next sound turn is
committed.
"""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any
from urllib.parse import urlsplit

import numpy as np
from strands.types.exceptions import ContextWindowOverflowException, ModelThrottledException

from fuzz.mutation import changed_bytes, changed_value, dumped
from fuzz.target import Finding, Outcome, require
from support.backends import BACKENDS
from support.scripted import Says, engine_of, policy_of
from tito_conformance.testing import InProcessTransport, ScriptedEngine, find_wire
from tito_conformance.wire import WireGeneration, generations
from tito_core import TITOModel, store
from tito_core.backend import BackendError
from tito_core.backend.http.client import HttpResponse
from tito_core.backend.id_text import Pieces
from tito_core.ledger import LawViolationError
from tito_core.ledger.laws import check_ledger

REFUSED = (BackendError, LawViolationError, ContextWindowOverflowException, ModelThrottledException)
WIRES = (("vllm", True), ("vllm", False), ("sglang", True))
"""The wires: engine, and whether vLLM uses `/inference/v1/generate`."""
TURN_S = 10.0
TYPES = ("application/json", "text/event-stream", "text/html", "", "application/json; charset=utf-16", "text/plain")
HEADERS = ({"retry-after": "nan"}, {"retry-after": "1e999"}, {"retry-after": "-5"}, {"location": "http://other/"}, {})


@dataclass
class Exchanged:
    """A request and the answer that the client received, in the form that the suite's reader takes."""

    path: str
    headers: dict[str, str]
    sent: bytes
    status: int | None
    got: bytearray
    whole: bool = True


class Changing:
    """A transport to an engine that changes answers while it is armed.

    Attributes:
        armed: Whether answers are changed.
        changed: The changed answers.
    """

    def __init__(self, engine: ScriptedEngine, random: Random) -> None:
        self._inner = InProcessTransport(engine)
        self._random = random
        self.armed = False
        self.changed: list[Exchanged] = []

    async def send(self, method: str, url: str, headers: Mapping[str, str], body: bytes | Pieces) -> HttpResponse:
        """See the transport protocol."""
        reply = await self._inner.send(method, url, headers, body)
        path = urlsplit(url).path
        if not self.armed or "abort" in path:
            return reply
        sent = body if isinstance(body, bytes) else b"".join(body)
        request_headers = {name.lower(): value for name, value in headers.items()}
        answer, status, reply_headers = await reply.read(1 << 30), reply.status, dict(reply.headers)
        answer = changed_answer(answer, self._random)
        if self._random.random() < 0.05:
            reply_headers["content-type"] = self._random.choice(TYPES)
        if self._random.random() < 0.05:
            status = self._random.choice((201, 204, 302, 400, 401, 404, 413, 429, 500, 503))
            reply_headers |= self._random.choice(HEADERS)
        reply_headers.pop("content-length", None)
        self.changed.append(Exchanged(path, request_headers, sent, status, bytearray(answer)))
        return HttpResponse(status, reply_headers, _one_chunk(answer), reply.aclose)

    async def aclose(self) -> None:
        """See the transport protocol."""


async def _one_chunk(body: bytes) -> AsyncIterator[bytes]:
    yield body


def changed_answer(body: bytes, random: Random) -> bytes:
    """Return an answer with hostile changes of its JSON, its events or its bytes."""
    if random.random() < 0.1:
        return changed_bytes(body, random)
    events = body.startswith(b"data:")
    parts = [part.removeprefix(b"data: ") for part in body.split(b"\n\n") if part] if events else [body]
    index = random.randrange(len(parts))
    try:
        value = json.loads(parts[index])
    except ValueError:  # [DONE], or an empty event
        return changed_bytes(body, random)
    kind = random.randrange(12)
    if events and kind < 3:
        parts[index : index + 1] = [parts[index]] * random.choice((0, 2))
    elif events and kind == 3:
        random.shuffle(parts)
    elif kind == 4 and isinstance(value, dict):  # a duplicate field
        key = random.choice(list(value) or ["a"])
        again = dumped({key: changed_value(value.get(key), random, raw=True)})[1:-1]
        text = json.dumps(value)
        both = f"{{{again},{text[1:]}" if random.random() < 0.5 else f"{text[:-1]},{again}}}"
        parts[index] = both.encode(errors="replace")
    elif kind == 5 and isinstance(value, dict) and value.get("choices"):
        value["choices"].append(changed_value(value["choices"][0], random))
        parts[index] = dumped(value).encode(errors="replace")
    else:
        parts[index] = dumped(changed_value(value, random, raw=True)).encode(errors="replace")
    if not events:
        return parts[0]
    lead, end = (
        random.choice((b"data: ", b"data: ", b"data: ", b"data:", b": a comment\ndata: ")),
        random.choice((b"\n\n", b"\n\n", b"\r\n\r\n")),
    )
    return b"".join(lead + part + end for part in parts)


@dataclass
class RecordedSleep:
    """A sleep that takes no time and records its durations."""

    seconds: list[float] = field(default_factory=list)

    async def __call__(self, seconds: float) -> None:
        """Record a duration."""
        self.seconds.append(seconds)

    def clock(self) -> float:
        """Return the seconds slept so far."""
        return sum(self.seconds)


class Answers:
    """The target `answers`."""

    def __init__(self, seed: int) -> None:
        self._loop = asyncio.new_event_loop()
        for kind, _ in WIRES:
            policy_of(kind)

    def case(self, random: Random) -> Outcome:
        """Change a server's answers while a model runs a turn."""
        try:
            return self._loop.run_until_complete(asyncio.wait_for(self._case(random), TURN_S))
        except TimeoutError as error:
            raise Finding(f"a turn did not end within {TURN_S} s") from error

    async def _case(self, random: Random) -> Outcome:
        kind, scale_out = random.choice(WIRES)
        engine = engine_of(kind, Says("One, then.", "Two.", "Three of them."), scale_out=scale_out)
        transport, sleep = Changing(engine, random), RecordedSleep()
        backend = BACKENDS[kind](
            "http://scripted", patience_s=1, sleep=sleep, clock=sleep.clock, http_transport=lambda: transport
        )
        try:
            if random.random() < 0.15:
                return await self._connect(backend, transport)
            await backend.connect()
            policy = policy_of(kind)
            versions = policy.info.reports_versions and scale_out  # vLLM's OpenAI endpoint reports none
            model = replace(policy, backend=backend, info=replace(policy.info, reports_versions=versions)).model(
                stream=random.random() < 0.5, on_abort=random.choice(("commit", "discard", "resume"))
            )
            return await self._turn(model, transport, engine, kind)
        finally:
            # A generation waits its patience at most; a probe that came damaged its backoff, whatever the patience:
            # two seconds, lengthened by up to two.
            longest = 4 if transport.armed else 1
            require(all(0 <= wait <= longest for wait in sleep.seconds), f"the client would sleep {sleep.seconds} s")
            await backend.aclose()

    async def _connect(self, backend: Any, transport: Changing) -> Outcome:
        transport.armed = True
        try:
            info = await backend.connect()
        except REFUSED:
            return "refused"
        for size in (info.max_model_len, info.vocab_size):  # None if the change removed the field
            require(size is None or (type(size) is int and size > 0), f"max_model_len or vocab_size is {size!r}")
        return "accepted"

    async def _turn(self, model: TITOModel, transport: Changing, engine: ScriptedEngine, kind: str) -> Outcome:
        messages: Any = [{"role": "user", "content": [{"text": "Hello?"}]}]
        await _run_turn(model, messages)
        before = store.encode(model.ledger)
        messages = [
            *messages,
            {"role": "assistant", "content": [{"text": "One, then."}]},
            {"role": "user", "content": [{"text": "And?"}]},
        ]
        transport.armed, refused = True, False
        try:
            await _run_turn(model, messages)
        except REFUSED:
            refused = True
        transport.armed = False
        check_ledger(model.ledger)
        require(engine.running == 0, "a request is left on the engine")
        if refused:
            require(store.encode(model.ledger) == before, "a refused turn changed the ledger")
        else:
            require(len(model.ledger) == 2, f"the ledger has {len(model.ledger)} turns")
            expect_answer(model, [each for each in transport.changed if each.status == 200], kind)
            require(
                store.encode(store.from_record(store.to_record(model.ledger))) == store.encode(model.ledger),
                "no round trip",
            )
        turns = len(model.ledger)
        await _run_turn(model, [{"role": "user", "content": [{"text": "A new one?"}]}])
        require(len(model.ledger) == turns + 1, "the next turn is not committed")
        return "refused" if refused else "accepted"


async def _run_turn(model: TITOModel, messages: Any) -> None:
    async for _ in model.stream(messages):
        pass


def expect_answer(model: TITOModel, exchanged: list[Exchanged], kind: str) -> None:
    """Compare a committed turn with the answer, as the suite's reader parses it."""
    turn = model.ledger[1]
    generation = _read(exchanged[-1], kind)
    ids, prompt = (
        turn.draft.output_ids.tolist(),
        [*model.ledger.path_ids(turn.parent).tolist(), *turn.draft.prompt_ids.tolist()],
    )
    require(generation.output_ids == ids, f"the ledger has {ids}, the answer says {generation.output_ids}")
    require(generation.logprob_ids == ids, f"the logprobs are of {generation.logprob_ids}, the output is {ids}")
    logprobs = np.array(generation.logprobs, np.float32)
    ledger = turn.draft.logprobs
    require(np.array_equal(logprobs, ledger), f"the ledger has {ledger}, the answer says {logprobs}")
    require(generation.prompt_ids == prompt, "the ledger has another prompt than was sent")
    require(generation.echoed_ids in (None, prompt), "the answer echoes another prompt")
    require(
        generation.prompt_tokens in (None, len(prompt)),
        f"the answer counts {generation.prompt_tokens} prompt tokens of {len(prompt)}",
    )
    require(
        generation.completion_tokens in (None, len(ids)),
        f"the answer counts {generation.completion_tokens} tokens of {len(ids)}",
    )
    word = turn.draft.engine.finish_word
    at_stop = (generation.finish, turn.draft.finish, turn.draft.stop) == ("abort", "stop", ids[-1])
    require(
        (at_stop or generation.finish == (word or turn.draft.finish)) and word not in ("stop", "length", "abort"),
        f"the ledger has finish {turn.draft.finish} (the server's word is {word}), the answer says {generation.finish}",
    )
    require(
        generation.answered_id is None or generation.answered_id.endswith(generation.request_id),
        f"the answer to {generation.request_id} names {generation.answered_id}",
    )
    require(
        generation.cached_tokens == turn.draft.engine.cached_tokens,
        f"the ledger has {turn.draft.engine.cached_tokens} cached tokens, not {generation.cached_tokens}",
    )
    if generation.versions:  # an empty list says as little as none (law 10)
        found = [(span.start, span.stop, span.version) for span in turn.draft.engine.versions]
        require(found == generation.versions, f"the ledger has versions {found}, the answer says {generation.versions}")


def _read(exchanged: Exchanged, kind: str) -> WireGeneration:
    """Read an answer as the client says that it does.

    Fields that the request did not ask for are left out, since the client skips them; so are events after [DONE], and a
    prompt echo that a later event replaces.
    """
    text = exchanged.got.decode(errors="replace").replace("\r\n", "\n")
    try:
        if "\ndata:" in f"\n{text}":
            data = [line[5:].strip() for line in text.split("\n") if line.startswith("data:")]
            events = [_without_extras(event) for event in data[: data.index("[DONE]")]]
            for event in events[:-1]:
                _drop_echo(event)
            body = "".join(f"data: {json.dumps(event)}\n\n" for event in events)
        else:
            body = json.dumps(_without_extras(text))
        [generation] = generations(
            find_wire(kind).read, [replace(exchanged, got=bytearray(body.encode(errors="replace")))]
        )
    except Exception as error:
        raise Finding(f"a turn is committed whose answer cannot be read: {type(error).__name__}") from error
    return generation


NOT_REQUESTED = ("top_logprobs", "prompt_logprobs", "routed_experts", "sampling_mask", "text", "input_token_logprobs")


def _without_extras(text: str) -> Any:
    def kept(fields: dict[str, Any]) -> dict[str, Any]:
        return {name: value for name, value in fields.items() if name not in NOT_REQUESTED}

    def number(digits: str) -> float:
        return int(digits) if len(digits) < 400 else math.inf

    return json.loads(text, strict=False, object_hook=kept, parse_int=number)


def _drop_echo(event: Any) -> None:
    for holder in (event, *(event.get("choices") or ())):
        holder.pop("prompt_token_ids", None)
