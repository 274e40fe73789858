"""An address for any harness: each request is translated to a turn of a ledger (`run_turn`), and its events back."""

from __future__ import annotations

import asyncio
import hmac
import time
import uuid
from collections.abc import AsyncGenerator, Callable, Collection, Mapping
from contextlib import aclosing
from dataclasses import replace
from itertools import takewhile
from typing import Any, NamedTuple, Self, Unpack, cast
from urllib.parse import unquote

import msgspec
from strands.types.streaming import StreamEvent

from strands_tito.gateway import messages, reply, responses
from strands_tito.gateway.chat import Answer, ChatTurn, chat_turn
from strands_tito.gateway.messages import STOP_STRING, MessagesAnswer, messages_turn
from strands_tito.gateway.normalise import NORMALISERS, VERSION, Recognised, key_of_answer, latest_turn, recognise
from strands_tito.gateway.reply import Refusal, Reply, Request, decoded, refusal_of
from strands_tito.gateway.responses import ResponsesAnswer, responses_turn
from strands_tito.gateway.server import Server, transport_of
from strands_tito.gateway.sessions import RunningTurn, Session
from tito_core.backend.values import InvalidValueError, refuse_unknown
from tito_core.ledger.ledger import Ledger
from tito_core.ledger.turn import Adapter
from tito_core.model import Policy, TITOModel
from tito_core.settings import RolloutOptions, Settings
from tito_core.termination import Termination
from tito_core.turn.history import STATE_KEY, match_parent, with_prompt_tools
from tito_core.turn.inputs import TurnInput
from tito_core.turn.request import prepare_turn
from tito_core.turn.run import run_turn

ReadRequest = Callable[[Mapping[str, Any], Collection[str]], ChatTurn]
AnyAnswer = Answer | MessagesAnswer | ResponsesAnswer
_ERROR_LINES = {
    Answer: reply.error_line,
    MessagesAnswer: messages.error_line,
    ResponsesAnswer: responses.error_line,
}
ANNOTATION = "gateway"
"""Name of a turn's annotation that says which normalisers it needed and which keys of its request had no effect."""
_NAMES = uuid.UUID("5bd0f0f6-9d4c-4b6f-9e39-0a4d7a0c2f51")
"""Namespace of the ledgers' uuids: with a store, a session's name names its ledger after a restart too."""
_PLACES = ("tasks", "groups", "samples", "sessions")
_LOOPBACK = ("127.0.0.1", "::1", "localhost")
_KEEP_ALIVE_S = 10.0
"""Seconds without an event after which a stream gets a comment, so that no proxy or client thinks that it is dead."""


class Pinned(msgspec.Struct, forbid_unknown_fields=True):
    """What a request that begins a session may set; see `Gateway`."""

    adapter: str | None = None
    weight_version: str | None = None
    group_id: str | None = None
    task_id: str | None = None


class Ending(msgspec.Struct, forbid_unknown_fields=True):
    """What a request that ends a session may set; see `Gateway.end`."""

    reward: float | None = None
    leaf: int | None = None
    annotations: dict[str, Any] | None = None
    termination: str = Termination.COMPLETED.value


class Place(NamedTuple):
    """What an address names.

    Attributes:
        session: The session's name, or None.
        labels: Its task, group and sample, where the address has them.
        rest: The rest of the address, after the session.
    """

    session: str | None
    labels: Mapping[str, str]
    rest: str


class Gateway:
    """Serves a policy to harnesses that speak OpenAI's or Anthropic's wires, and records every token.

        async with Gateway(policy) as gateway:
            client = AsyncOpenAI(base_url=f"{gateway.url}/sessions/task-7/v1", api_key="EMPTY")
            ...
            await gateway.end("task-7", reward=1.0)
        gateway.ledger("task-7").trajectories

    Args:
        policy: The policy. With a store, each turn is in its file before the harness has the answer.
        host: Address to listen at. Any but a loopback address needs `api_key`.
        port: Port to listen at; 0 for a free one.
        api_key: The key that harnesses send, alone or as KEY:SESSION. None admits everyone.
        fixed_sampling: Whether the harness's sampling parameters have no effect.
        normalisers: Differences in spelling that do not make a branch; see `normalise.NORMALISERS`.
        ignored: Keys of requests that have no effect, though they would be refused.
        max_sessions: Most sessions that are held in memory.
        max_turns: Most turns at once.
        max_body_bytes: Largest request.
        idle_s: Seconds without a request after which a session ends, with the termination "limit".
        **options: Options of the rollouts; see `RolloutOptions`. `malformed_calls` is "end_turn" by default, as a
            harness cannot know our name of a malformed call.

    Raises:
        InvalidValueError: A bad value.
    """

    def __init__(
        self,
        policy: Policy,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        api_key: str | None = None,
        fixed_sampling: bool = False,
        normalisers: Collection[str] = NORMALISERS,
        ignored: Collection[str] = (),
        max_sessions: int = 100_000,
        max_turns: int = 4096,
        max_body_bytes: int = 1 << 26,
        idle_s: float = 3600.0,
        **options: Unpack[RolloutOptions],
    ) -> None:
        refuse_unknown("normaliser", dict.fromkeys(normalisers), NORMALISERS)
        if api_key is None and host not in _LOOPBACK:
            raise InvalidValueError(
                f"host={host!r} lets other machines in, and there is no api_key: give one, or listen at 127.0.0.1."
            )
        if api_key is not None and (not api_key or ":" in api_key):
            raise InvalidValueError("api_key must not be empty, and not have the colon that stands before a session.")
        self.policy = policy
        self.api_key = api_key
        self.fixed_sampling = fixed_sampling
        self.normalisers = frozenset(normalisers)
        self.ignored = frozenset(ignored)
        self.max_sessions, self.max_turns, self.idle_s = max_sessions, max_turns, idle_s
        options.setdefault("malformed_calls", "end_turn")
        self._settings = Settings.of(**options).at(policy.info)
        if self._settings.adapter is not None:
            policy._adapters.admit(self._settings.adapter)
        self._sessions: dict[str, Session] = {}  # in the order of their last use
        self._ended: dict[str, Session] = {}
        self._answers: dict[str, list[Session]] = {}
        self._turns: set[asyncio.Task[None]] = set()
        self._server = Server(self.answer, host, port, max_body_bytes)

    @property
    def url(self) -> str:
        """Its address, without a path. Harnesses take `{url}/v1` or `{url}/sessions/NAME/v1`.

        Raises:
            RuntimeError: It does not listen.
        """
        return self._server.url

    def transport(self, library: Any) -> Any:
        """Return an HTTP transport to this gateway without a port, for clients in the same event loop.

        Args:
            library: The module `httpx` or `httpx2`, whichever the client uses: `openai` 3 uses `httpx2`.
        """
        return transport_of(self.answer, library)

    async def __aenter__(self) -> Self:
        await self._server.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._turns:
            task.cancel()
        await self._server.stop()
        await asyncio.gather(*self._turns, return_exceptions=True)  # until the engine's requests are aborted

    @property
    def ledgers(self) -> list[Ledger]:
        """The ledgers of all sessions in memory: those that ended, then the others in the order of their last use."""
        return [session.ledger for session in (*self._ended.values(), *self._sessions.values())]

    def ledger(self, name: str) -> Ledger:
        """Return the ledger of a session; one without a name has its ledger's uuid.

        Raises:
            KeyError: There is no session of that name.
        """
        return (self._in_memory(name) or self._ended[name]).ledger

    async def end(
        self,
        name: str,
        *,
        reward: float | None = None,
        leaf: int | None = None,
        annotations: Mapping[str, Any] | None = None,
        termination: Termination | str = Termination.COMPLETED,
    ) -> Ledger:
        """End a session: later requests of it are refused.

        Args:
            name: The session.
            reward: Its reward.
            leaf: The turn whose path the reward belongs to; see `Session.end`.
            annotations: Further annotations of the rollout.
            termination: Why it ended.

        Raises:
            Refusal: It is not known, has ended, or has a turn at work.
            IndexError, TypeError, ValueError: A value cannot be recorded.
        """
        session = self._not_busy(await self._session(Place(name, {}, ""), make=False))
        self._end(session, Termination(termination), reward, leaf, annotations)
        return session.ledger

    def add(self, name: str, model: TITOModel) -> None:
        """Add a session that writes to a model's ledger, with the model's options."""
        session = Session(self.policy, name, model.ledger, model._settings)
        session.recording = model._recording
        self._use(session)

    def _not_busy(self, session: Session) -> Session:
        if session.is_busy:
            raise Refusal(f"Session {session.name!r} has a turn at work.", status=409, code="session_busy")
        return session

    def _end(self, session: Session, *ending: Any) -> None:
        session.end(*ending)
        self._forget(session)
        self._ended[session.name] = session

    def _forget(self, session: Session) -> None:
        self._sessions.pop(session.name, None)
        self._ended.pop(session.name, None)
        for key in session.keys:
            self._answers[key].remove(session)
            if not self._answers[key]:
                del self._answers[key]
        session.keys.clear()

    async def answer(self, request: Request) -> Reply:
        """Answer a request. Errors are replies too, in the form of the wire."""
        wire = messages if "/v1/messages" in request.path else reply
        try:
            self._end_idle()
            return await self._route(request, self._place(request))
        except Exception as error:
            refusal = refusal_of(error)
            return Reply.of(wire.error_json(refusal), refusal.status, refusal.retry_after_s)

    async def _route(self, request: Request, place: Place) -> Reply:
        match request.method, place.rest:
            case "POST", "v1/chat/completions":
                return await self._complete(request, place, chat_turn)
            case "POST", "v1/messages":
                return await self._complete(request, place, messages_turn)
            case "POST", "v1/responses":
                return await self._complete(request, place, responses_turn)
            case "POST", "v1/messages/count_tokens":
                turn = self._read(request, messages_turn)
                if place.session is None:
                    count = self.policy.template.count_tokens(turn.messages, turn.system, turn.tools)
                else:
                    count = await self._count(*await self._find(place, turn), turn)
                return Reply.of({"input_tokens": count})
            case "GET", "v1/models":
                model = {"id": self.policy.info.model, "object": "model", "created": 0, "owned_by": "strands-tito"}
                return Reply.of({"object": "list", "data": [model]})
            case ("GET", "health") | ("HEAD", _):
                return Reply.of({"status": "ok"})
            case "POST", "" if place.session is not None:
                await self._pin(place, decoded(request.body, Pinned))
                return Reply.of({"session": place.session})
            case "POST", "end" if place.session is not None:
                ledger = await self.end(place.session, **msgspec.structs.asdict(decoded(request.body, Ending)))
                return Reply.of({"session": place.session, "ledger": ledger.uuid, "turns": len(ledger)})
            case "GET", "trajectories" if place.session is not None:
                session = await self._session(place, make=False, ended=True)
                return Reply.of({"trajectories": _trajectories(session.ledger)})
            case "DELETE", "" if place.session is not None:
                self._forget(self._not_busy(await self._session(place, make=False, ended=True)))
                return Reply.of({"session": place.session})
        raise Refusal(f"{request.method} {request.path} is not served.", status=404, code="not_found")

    def _place(self, request: Request) -> Place:
        """Return the place that a request names, by its address or else by the part of its key after the colon.

        Raises:
            Refusal: The key is wrong.
        """
        door, _, by_key = request.key.partition(":")
        if self.api_key is not None and not hmac.compare_digest(door.encode(), self.api_key.encode()):
            raise Refusal("The API key is wrong.", status=401, code="invalid_api_key")
        parts = request.path.strip("/").split("/")
        named: list[str] = []
        while len(parts) > 1 and parts[0] in _PLACES:
            named += parts[:2]
            parts = parts[2:]
        names = [unquote(part, errors="strict") for part in named[1::2]]
        labels = dict(zip(named[::2], names, strict=True))
        if not all(names) or len(labels) < len(names):
            raise Refusal(f"{request.path} has an empty name, or two of a kind.", status=404, code="not_found")
        name = by_key if not named else names[0] if [*labels] == ["sessions"] else "/".join(named)
        name.encode()  # what is no text cannot name a ledger
        return Place(name or None, labels, "/".join(parts))

    async def _session(self, place: Place, *, make: bool, ended: bool = False) -> Session:
        """Return a session by its name, from memory or else from the store.

        Raises:
            Refusal: It is not known and not to be made, it has ended, or too many are in memory.
        """
        name = place.session or ""
        session = self._in_memory(name)
        if session is None and (stored := await self._stored(name)) is not None:
            session = self._in_memory(name) or Session(self.policy, name, stored, self._settings)  # or meanwhile
            (self._sessions if session.termination is None else self._ended)[name] = session
        if session is None:
            if not make:
                raise Refusal(f"Session {name!r} is not known.", status=404, code="session_not_found")
            session = self._new(place)
        if session.termination is None:
            self._use(session)
        elif not ended:
            reason = f"Session {name!r} has ended ({session.termination}): begin another one."
            raise Refusal(reason, status=410, code="session_ended")
        return session

    def _in_memory(self, name: str) -> Session | None:
        return self._sessions.get(name) or self._ended.get(name)

    def _use(self, session: Session) -> None:
        session.used = time.monotonic()
        self._sessions.pop(session.name, None)
        self._sessions[session.name] = session

    async def _stored(self, name: str) -> Ledger | None:
        """Return the ledger of an earlier process under this name, or None."""
        store, ledger = self.policy.store, self._uuid(name)
        if not name or store is None or ledger is None or ledger not in store:
            return None
        return await asyncio.to_thread(store.resume, ledger)

    def _uuid(self, name: str) -> str | None:
        store = self.policy.store
        return None if store is None else str(uuid.uuid5(_NAMES, f"{store.path.resolve()}\n{name}"))

    def _new(self, place: Place, settings: Settings | None = None, pinned: Pinned | None = None) -> Session:
        self._make_room()
        pinned, name = pinned or Pinned(), place.session
        ledger = self.policy.ledger(
            None if name is None else self._uuid(name),
            group_id=pinned.group_id or place.labels.get("groups"),
            task_id=pinned.task_id or place.labels.get("tasks"),
            user={} if name is None else {"session": name, **place.labels},
        )
        session = Session(self.policy, name or "", ledger, settings or self._settings, pinned.weight_version)
        self._use(session)
        return session

    def _make_room(self) -> None:
        if len(self._sessions) + len(self._ended) < self.max_sessions:
            return
        if not self._ended or self.policy.store is None:
            many = f"{self.max_sessions} sessions are in memory. DELETE those that are exported."
            raise Refusal(many, status=429, code="too_many_sessions")
        del self._ended[next(iter(self._ended))]

    def _end_idle(self) -> None:
        """End the sessions that were not used for a time."""
        before = time.monotonic() - self.idle_s
        for session in tuple(takewhile(lambda each: each.used <= before, self._sessions.values())):
            if not session.is_busy:
                self._end(session, Termination.LIMIT)

    async def _pin(self, place: Place, pinned: Pinned) -> None:
        """Make a session with an adapter or a weight version of its own."""
        name = place.session or ""
        if self._in_memory(name) or await self._stored(name):
            raise Refusal(f"Session {name!r} exists.", status=409, code="session_exists")
        settings = self._settings
        if pinned.adapter is not None:
            settings = replace(settings, adapter=Settings.of(adapter=pinned.adapter).adapter).at(self.policy.info)
            self.policy._adapters.admit(Adapter(pinned.adapter))
        self._new(place, settings, pinned)

    async def _complete(self, request: Request, place: Place, read: ReadRequest) -> Reply:
        turn = self._read(request, read)
        session, recognised = await self._find(place, turn, is_retry=request.is_retry)
        # Anthropic's streams begin with the prompt's tokens, by which harnesses decide to compact.
        prompt_tokens = await self._count(session, recognised, turn) if read is messages_turn and turn.stream else 0
        key = _key(turn, recognised)
        running = session.running.get(key)
        if running is None or running.failed or (running.was_read and not request.is_retry):
            session.running.pop(key, None)  # a retry of what is refused here asks for another sample too
            if len(self._turns) >= self.max_turns:
                self._settle(session)
                raise Refusal(f"{self.max_turns} turns are at work.", status=429, code="rate_limit_exceeded")
            running = self._begin(session, key, self._run(session, turn, recognised))
        identity = uuid.uuid4().hex
        if read is chat_turn:
            answer: AnyAnswer = Answer(
                turn, f"chatcmpl-{identity}", lambda token: str(self.policy.tokenizer.decode([token]))
            )
        elif read is responses_turn:
            answer = ResponsesAnswer(turn, identity)
        else:
            answer = MessagesAnswer(turn, identity, prompt_tokens)
        if turn.stream:
            return Reply(200, _read_whole(running, await _streamed(running, answer)))
        reply = Reply.of(await answer.whole(running.read()))
        return reply._replace(body=_read_whole(running, reply.body))

    def _read(self, request: Request, read: ReadRequest) -> ChatTurn:
        given = decoded(request.body, dict)
        try:
            return read(given, self.ignored)
        except (AttributeError, LookupError, TypeError) as error:  # reading does nothing else
            raise Refusal(f"The request does not have the form of this wire ({error!r}).") from error

    def _begin(self, session: Session, key: bytes, events: AsyncGenerator[StreamEvent]) -> RunningTurn:
        running = RunningTurn(events)
        session.keep(key, running)
        self._turns.add(running.task)

        def ended(task: asyncio.Task[None]) -> None:
            self._turns.discard(task)
            self._settle(session)

        running.task.add_done_callback(ended)
        return running

    def _settle(self, session: Session) -> None:
        """Forget a session without a name whose only request was refused."""
        if not (session.has_name or session.is_busy or len(session.ledger)):
            self._forget(session)

    async def _count(self, session: Session, found: Recognised, turn: ChatTurn) -> int:
        """Return the number of tokens of a turn's prompt."""
        settings, ledger, policy = self._settings_of(session, turn), session.ledger, self.policy
        turn_input = TurnInput.of(found.messages, found.system, turn.tools, turn.choice, None, None, None)
        turn_input = with_prompt_tools(policy, ledger, turn_input)
        match = match_parent(policy, ledger, turn_input, settings)
        return len((await prepare_turn(policy, ledger, turn_input, settings, match)).request.input_ids)

    async def _find(self, place: Place, turn: ChatTurn, *, is_retry: bool = False) -> tuple[Session, Recognised]:
        """Return the session of a request. Without a name, it is the one whose answer the request's history continues.

        Equal first prompts without a name are rollouts of their own.
        """
        if place.session is not None:
            session = await self._session(place, make=True)
            return session, self._recognised(session, turn)
        candidates = self._answers.get(key_of_answer(turn.messages, turn.tools), ())
        found = [(each, self._recognised(each, turn)) for each in candidates]
        continuing = [(session, recognised) for session, recognised in found if recognised.answer]
        if not continuing:
            session = self._new(place)
            return session, self._recognised(session, turn)
        # A retry's own session; else of equal sessions, one whose answer was not continued yet.
        session, recognised = min(
            continuing,
            key=lambda pair: (
                not (is_retry and _key(turn, pair[1]) in pair[0].running),
                pair[1].answer in pair[0].continued,
            ),
        )
        assert recognised.answer is not None  # or it continues nothing
        session.continued.add(recognised.answer)
        self._use(session)
        return session, recognised

    def _recognised(self, session: Session, turn: ChatTurn) -> Recognised:
        fingerprint = self.policy.template.fingerprint
        return recognise(session.ledger, turn.system, turn.tools, fingerprint, turn.messages, self.normalisers)

    async def _run(self, session: Session, turn: ChatTurn, found: Recognised) -> AsyncGenerator[StreamEvent]:
        """Run a turn in a session's ledger, and record with it what the request needed."""
        settings, ledger, latest = self._settings_of(session, turn), session.ledger, latest_turn(found.node)
        state: dict[str, Any] = {} if latest is None else {STATE_KEY: {"ledger": ledger.uuid, "turn": latest}}
        turn_input = TurnInput.of(found.messages, found.system, turn.tools, turn.choice, None, state, None)
        async with aclosing(run_turn(self.policy, session.recording, settings, turn_input, time.monotonic())) as events:
            async for event in events:
                yield event
        self._use(session)  # its turn may have been longer than a session may be idle
        committed = ledger[state[STATE_KEY]["turn"]]
        if not session.has_name and (node := ledger.node_of(committed.index)) is not None:
            key = key_of_answer([node.message], turn.tools)
            if key not in session.keys:
                session.keys.add(key)
                self._answers.setdefault(key, []).append(session)
        ignored = {*turn.ignored, *(turn.sampling if self.fixed_sampling else ())} - session.ignored
        session.ignored |= ignored
        if found.used or ignored:
            note = {"version": VERSION, "normalised": dict(found.used), "ignored": sorted(ignored)}
            ledger.annotate(ANNOTATION, note, turn=committed.index)
        if isinstance(committed.draft.stop, str):
            yield cast(StreamEvent, {STOP_STRING: committed.draft.stop})
        wanted = session.weight_version
        if wanted is not None and (seen := {span.version for span in committed.draft.engine.versions}) != {wanted}:
            self._end(session, Termination.ABORTED)
            raise Refusal(
                f"The session is pinned to weight version {wanted!r}, and the turn was sampled by "
                f"{', '.join(map(repr, sorted(map(str, seen))))}. It is on record, and the session has ended.",
                status=410,
                code="session_ended",
            )

    def _settings_of(self, session: Session, turn: ChatTurn) -> Settings:
        """Return the settings of a turn: the session's, with what the request asks for."""
        sampling = {} if self.fixed_sampling else dict(turn.sampling)
        if "extra" in sampling:
            sampling["extra"] = {**session.settings.sampling.extra, **sampling["extra"]}
        changed = session.settings.changed(self.policy.info, sampling) if sampling else session.settings
        return replace(changed, stream=turn.stream, reports_ids=turn.logprobs, runs_calls=turn.runs_calls)


async def _streamed(running: RunningTurn, answer: AnyAnswer) -> AsyncGenerator[bytes]:
    """Return the pieces of a stream, after the turn's first event: what fails before it is an error with a status."""
    events = running.read(_KEEP_ALIVE_S)
    first = await anext(events)

    async def from_first() -> AsyncGenerator[StreamEvent | None]:
        yield first
        async for event in events:
            yield event

    async def pieces() -> AsyncGenerator[bytes]:
        try:
            async with aclosing(events), aclosing(answer.chunks(from_first())) as lines:
                async for line in lines:
                    yield line
        except Exception as error:
            yield _ERROR_LINES[type(answer)](refusal_of(error))

    return pieces()


async def _read_whole(running: RunningTurn, pieces: AsyncGenerator[bytes]) -> AsyncGenerator[bytes]:
    """Yield the pieces of an answer, and note when the last one was written."""
    async with aclosing(pieces):
        async for piece in pieces:
            yield piece
    running.was_read = True


def _key(turn: ChatTurn, found: Recognised) -> bytes:
    """Return what equal requests to a session have in common: their history, and what they ask for."""
    about = [turn.sampling, turn.choice, turn.runs_calls, turn.stream, turn.usage, turn.logprobs, turn.model]
    return found.digest + repr(about).encode()  # JSON of any size: it is not checked yet


def _trajectories(ledger: Ledger) -> list[dict[str, Any]]:
    """Return a ledger's trajectories as JSON values; `logprobs` is null off the sampled tokens."""
    return [
        {
            "token_ids": each.token_ids.tolist(),
            "loss_mask": each.loss_mask.tolist(),
            "logprobs": [None if value != value else value for value in each.logprobs.tolist()],
            "turns": list(each.turns),
        }
        for each in ledger.trajectories
    ]
