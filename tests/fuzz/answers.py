"""Hostile answers of an engine, on each wire, whole and streamed, while connecting and while generating.

The oracle is the conformance suite's own reader of the wire, which shares nothing with the client: a turn that is
committed holds the ids, logprobs, prompt and counts that this reader finds in the bytes of the changed answer. A turn
that is refused is refused with an error of the package, and leaves the ledger as it was and nothing running on the
engine; the next, sound turn is committed.
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
from strands_tito.conformance.wire_reading import Heard, generations
from strands_tito.testing import InProcessTransport, ScriptedEngine, find_wire
from support.backends import BACKENDS
from support.scripted import Says, engine_of, policy_of
from tito_core import TITOModel, store
from tito_core.backend import BackendError
from tito_core.backend.http.connections import HttpResponse
from tito_core.backend.id_text import Pieces
from tito_core.ledger import LawViolationError
from tito_core.ledger.forest_invariants import check_ledger

REFUSED = (BackendError, LawViolationError, ContextWindowOverflowException, ModelThrottledException)
WIRES = (("vllm", True), ("vllm", False), ("sglang", True))
"""Each wire: its engine, and whether vLLM answers at `/inference/v1/generate`."""
TURN_S = 10.0
LONGEST_WAIT_S = 3600.0
TYPES = ("application/json", "text/event-stream", "text/html", "", "application/json; charset=utf-16", "text/plain")
HEADERS = ({"retry-after": "nan"}, {"retry-after": "1e999"}, {"retry-after": "-5"}, {"location": "http://other/"}, {})


@dataclass
class Exchanged:
    """One request and the answer that the client got, as the suite's reader takes them."""

    path: str
    headers: dict[str, str]
    sent: bytes
    status: int | None
    got: bytearray
    whole: bool = True


class Changing:
    """Carries requests to an engine, and changes the answers that `change` is armed for.

    Attributes:
        armed: Whether the next answers are changed.
        changed: The answers that were changed, as they were handed out.
    """

    def __init__(self, engine: ScriptedEngine, random: Random) -> None:
        self._inner = InProcessTransport(engine)
        self._random = random
        self.armed = False
        self.changed: list[Exchanged] = []

    async def send(self, method: str, url: str, headers: Mapping[str, str], body: bytes | Pieces) -> HttpResponse:
        """See `HttpTransport.send`."""
        reply = await self._inner.send(method, url, headers, body)
        path = urlsplit(url).path
        if not self.armed or "abort" in path:
            return reply
        sent = body if isinstance(body, bytes) else b"".join(body)
        asked = {name.lower(): value for name, value in headers.items()}
        got, status, told = await reply.read(1 << 30), reply.status, dict(reply.headers)
        got = changed_answer(got, self._random)
        if self._random.random() < 0.05:
            told["content-type"] = self._random.choice(TYPES)
        if self._random.random() < 0.05:
            status = self._random.choice((201, 204, 302, 400, 401, 404, 413, 429, 500, 503))
            told |= self._random.choice(HEADERS)
        told.pop("content-length", None)
        self.changed.append(Exchanged(path, asked, sent, status, bytearray(got)))
        return HttpResponse(status, told, _whole(got), reply.aclose)

    async def aclose(self) -> None:
        """See `HttpTransport.aclose`."""


async def _whole(body: bytes) -> AsyncIterator[bytes]:
    yield body


def changed_answer(body: bytes, random: Random) -> bytes:
    """Return an answer with hostile changes: of its JSON, its events or its bytes."""
    if random.random() < 0.1:
        return changed_bytes(body, random)
    events = body.startswith(b"data:")
    parts = [part.removeprefix(b"data: ") for part in body.split(b"\n\n") if part] if events else [body]
    which = random.randrange(len(parts))
    try:
        value = json.loads(parts[which])
    except ValueError:  # such as [DONE], or nothing
        return changed_bytes(body, random)
    kind = random.randrange(12)
    if events and kind < 3:
        parts[which : which + 1] = [parts[which]] * random.choice((0, 2))
    elif events and kind == 3:
        random.shuffle(parts)
    elif kind == 4 and isinstance(value, dict):  # a field twice
        key = random.choice(list(value) or ["a"])
        again = dumped({key: changed_value(value.get(key), random, raw=True)})[1:-1]
        text = json.dumps(value)
        both = f"{{{again},{text[1:]}" if random.random() < 0.5 else f"{text[:-1]},{again}}}"
        parts[which] = both.encode(errors="replace")
    elif kind == 5 and isinstance(value, dict) and value.get("choices"):
        value["choices"].append(changed_value(value["choices"][0], random))
        parts[which] = dumped(value).encode(errors="replace")
    else:
        parts[which] = dumped(changed_value(value, random, raw=True)).encode(errors="replace")
    if not events:
        return parts[0]
    lead, end = (
        random.choice((b"data: ", b"data: ", b"data: ", b"data:", b": a comment\ndata: ")),
        random.choice((b"\n\n", b"\n\n", b"\r\n\r\n")),
    )
    return b"".join(lead + part + end for part in parts)


@dataclass
class Waits:
    """A sleep that takes no time."""

    seconds: list[float] = field(default_factory=list)

    async def __call__(self, seconds: float) -> None:
        """Write down how long it would have been."""
        self.seconds.append(seconds)


class Answers:
    """The class `answers`."""

    def __init__(self, seed: int) -> None:
        self._loop = asyncio.new_event_loop()
        for kind, _ in WIRES:
            policy_of(kind)

    def case(self, random: Random) -> Outcome:
        """Change what a server answers, and let a model take a turn."""
        try:
            return self._loop.run_until_complete(asyncio.wait_for(self._case(random), TURN_S))
        except TimeoutError as error:
            raise Finding(f"a turn did not end within {TURN_S} s") from error

    async def _case(self, random: Random) -> Outcome:
        kind, scale_out = random.choice(WIRES)
        engine = engine_of(kind, Says("One, then.", "Two.", "Three of them."), scale_out=scale_out)
        transport, waits = Changing(engine, random), Waits()
        backend = BACKENDS[kind]("http://scripted", max_attempts=2, sleep=waits, http_transport=lambda: transport)
        try:
            if random.random() < 0.15:
                return await self._connect(backend, transport)
            await backend.connect()
            model = replace(policy_of(kind), backend=backend).model(
                stream=random.random() < 0.5, on_abort=random.choice(("commit", "discard", "resume"))
            )
            return await self._turn(model, transport, engine, kind)
        finally:
            require(all(0 <= wait <= LONGEST_WAIT_S for wait in waits.seconds), f"it would wait {waits.seconds} s")
            await backend.aclose()

    async def _connect(self, backend: Any, transport: Changing) -> Outcome:
        transport.armed = True
        try:
            info = await backend.connect()
        except REFUSED:
            return "refused"
        for size in (info.max_model_len, info.vocab_size):  # None where the answer that says it was changed away
            require(size is None or (type(size) is int and size > 0), f"max_model_len or vocab_size is {size!r}")
        return "accepted"

    async def _turn(self, model: TITOModel, transport: Changing, engine: ScriptedEngine, kind: str) -> Outcome:
        messages: Any = [{"role": "user", "content": [{"text": "Hello?"}]}]
        await _taken(model, messages)
        before = store.encode(model.ledger)
        messages = [
            *messages,
            {"role": "assistant", "content": [{"text": "One, then."}]},
            {"role": "user", "content": [{"text": "And?"}]},
        ]
        transport.armed, refused = True, False
        try:
            await _taken(model, messages)
        except REFUSED:
            refused = True
        transport.armed = False
        check_ledger(model.ledger)
        require(engine.running == 0, "a request is left on the engine")
        if refused:
            require(store.encode(model.ledger) == before, "a turn that was refused left something in the ledger")
        else:
            require(len(model.ledger) == 2, f"the ledger has {len(model.ledger)} turns")
            expect_heard(model, [each for each in transport.changed if each.status == 200], kind)
            require(
                store.encode(store.from_record(store.to_record(model.ledger))) == store.encode(model.ledger),
                "no round trip",
            )
        turns = len(model.ledger)
        await _taken(model, [{"role": "user", "content": [{"text": "A new one?"}]}])
        require(len(model.ledger) == turns + 1, "the next turn is not committed")
        return "refused" if refused else "accepted"


async def _taken(model: TITOModel, messages: Any) -> None:
    async for _ in model.stream(messages):
        pass


def expect_heard(model: TITOModel, exchanged: list[Exchanged], kind: str) -> None:
    """Compare a committed turn with what the suite's reader finds in the answer."""
    turn = model.ledger[1]
    heard = _read(exchanged[-1], kind)
    ids, prompt = (
        turn.draft.output_ids.tolist(),
        [*model.ledger.path_ids(turn.parent).tolist(), *turn.draft.prompt_ids.tolist()],
    )
    require(heard.output == ids, f"the ledger has {ids}, the answer says {heard.output}")
    require(heard.logprob_ids == ids, f"the logprobs are of {heard.logprob_ids}, the output is {ids}")
    said = np.array(heard.logprobs, np.float32)
    require(np.array_equal(said, turn.draft.logprobs), f"the ledger has {turn.draft.logprobs}, the answer says {said}")
    require(heard.prompt == prompt, "the ledger has another prompt than was sent")
    require(heard.echoed in (None, prompt), "the answer echoes another prompt")
    require(
        heard.prompt_tokens in (None, len(prompt)),
        f"the answer counts {heard.prompt_tokens} prompt tokens of {len(prompt)}",
    )
    require(
        heard.completion_tokens in (None, len(ids)), f"the answer counts {heard.completion_tokens} tokens of {len(ids)}"
    )
    require(
        heard.finish == turn.draft.finish, f"the ledger has finish {turn.draft.finish}, the answer says {heard.finish}"
    )
    require(
        heard.cached_tokens == turn.draft.engine.cached_tokens,
        f"the ledger has {turn.draft.engine.cached_tokens} cached tokens, not {heard.cached_tokens}",
    )
    if heard.versions:  # an empty list says as little as none (law 10)
        found = [(span.start, span.stop, span.version) for span in turn.draft.engine.versions]
        require(found == heard.versions, f"the ledger has versions {found}, the answer says {heard.versions}")


def _read(exchanged: Exchanged, kind: str) -> Heard:
    """Read an answer as the client says that it does.

    What was not asked for is left out, since the client skips it; so are events after [DONE], and an echo of the prompt
    that a later event takes back.
    """
    text = exchanged.got.decode(errors="replace").replace("\r\n", "\n")
    try:
        if "\ndata:" in f"\n{text}":
            said = [line[5:].strip() for line in text.split("\n") if line.startswith("data:")]
            said = said[: said.index("[DONE]")]
            events = [_without_extras(event) for event in said]
            for event in events[:-1]:
                _forget_echo(event)
            body = "".join(f"data: {json.dumps(event)}\n\n" for event in events)
        else:
            body = json.dumps(_without_extras(text))
        [heard] = generations(find_wire(kind).read, [replace(exchanged, got=bytearray(body.encode(errors="replace")))])
    except Exception as error:
        raise Finding(f"a turn is committed whose answer cannot be read: {type(error).__name__}") from error
    return heard


NOT_ASKED = ("top_logprobs", "prompt_logprobs", "routed_experts", "sampling_mask", "text", "input_token_logprobs")


def _without_extras(text: str) -> Any:
    def kept(fields: dict[str, Any]) -> dict[str, Any]:
        return {name: value for name, value in fields.items() if name not in NOT_ASKED}

    def number(digits: str) -> float:
        return int(digits) if len(digits) < 400 else math.inf

    return json.loads(text, strict=False, object_hook=kept, parse_int=number)


def _forget_echo(event: Any) -> None:
    for holder in (event, *(event.get("choices") or ())):
        holder.pop("prompt_token_ids", None)
