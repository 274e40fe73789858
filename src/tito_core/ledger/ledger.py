"""The ledger: an append-only forest of turns, each holding only its own new tokens."""

from __future__ import annotations

import threading
from collections import ChainMap
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from copy import deepcopy
from dataclasses import replace
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

import numpy as np

from tito_core.display import as_html
from tito_core.ledger import laws
from tito_core.ledger.columns import TokenIds
from tito_core.ledger.history import HistoryIndex, Match, Node, strict
from tito_core.ledger.trajectory import Trajectories, Trajectory, assemble, count
from tito_core.ledger.turn import (
    NEW_AGENT,
    REWARD,
    Annotation,
    Branch,
    Draft,
    Header,
    Image,
    MediaSpan,
    Reason,
    Sampling,
    Server,
    Turn,
    VersionSpan,
    VocabularyCheck,
    as_reward,
    changed,
    new_uuid,
)


class Sink(Protocol):
    """A receiver of a ledger's records as they are committed, such as a file.

    The ledger calls each method under its lock, before it adds the record. If the method raises, the ledger does not
    add the record.
    """

    def append(self, ledger: Ledger) -> None:
        """Write all turns and annotations that a ledger has so far."""

    def turn(self, header: Header, turn: Turn, images: Sequence[Image]) -> None:
        """Write a turn that is about to be committed, after the images that it is the first to show."""

    def annotation(self, header: Header, index: int, annotation: Annotation) -> None:
        """Write the ledger's annotation number `index`, which is about to be added."""


class CheckedDraft(NamedTuple):
    """A draft that passed a ledger's `check`: this ledger commits it without checking it again."""

    draft: Draft
    ledger: Ledger


class Ledger:
    """The record of one rollout. Thread-safe: every change holds one lock.

    Args:
        uuid: Identity of the rollout; random by default.
        group_id: Shared by the rollouts of one prompt.
        task_id: The task of the rollout.
        tokenizer: Name of the policy's tokenizer.
        user: The user's own JSON values.
        certificate: Certificate of the chat template; see `Header`.
        vocabulary: How the tokenizer was compared with the server's; see `Header`.
    """

    def __init__(
        self,
        uuid: str | None = None,
        *,
        group_id: str | None = None,
        task_id: str | None = None,
        tokenizer: str | None = None,
        user: Mapping[str, Any] | None = None,
        certificate: Mapping[str, Any] | None = None,
        vocabulary: VocabularyCheck | None = None,
    ) -> None:
        self.header = Header(
            uuid or new_uuid(), group_id, task_id, tokenizer, dict(user or {}), certificate, vocabulary
        )
        self.sink: Sink | None = None
        self._turns: list[Turn] = []
        self._annotations: list[Annotation] = []
        self._parents: set[int] = set()
        self._images: dict[bytes, Image] = {}
        self._histories = HistoryIndex()
        self._interner = Interner()
        self._lock = threading.Lock()
        self.call_ids = CallIds(self.uuid)

    @classmethod
    def load(
        cls, header: Header, drafts: Iterable[Draft], annotations: Iterable[Annotation], images: Iterable[Image] = ()
    ) -> Ledger:
        """Rebuild a ledger from its parts. Of the laws, only its images are checked; call `check_ledger`.

        Args:
            header: Its header.
            drafts: Its turns' content in commit order. Equal sampling parameters are one object whose `first` is the
                first turn that has them; the same holds for servers.
            annotations: Its annotations, in order.
            images: The images that its turns show.

        Raises:
            IndexError: A parent does not come before its turn.
            LawViolationError: A turn shows an image that is not among `images` (law 4).
        """
        ledger = cls(header.uuid)
        ledger.header = header
        for index, draft in enumerate(drafts):
            turn = ledger._turn_of(draft)
            ledger._append(turn)
            if draft.sampling.first == index or draft.engine.server.first == index:
                ledger._interner.register(turn)
        ledger._histories.load(ledger._turns)
        ledger.call_ids = CallIds(header.uuid, max((turn.draft.call_ids for turn in ledger._turns), default=0))
        ledger._annotations = list(annotations)
        ledger._images = {image.sha256: image for image in images}
        for turn in ledger._turns:
            if turn.draft.media:
                laws.check_stored(turn.draft.media, ledger._images, turn=turn.index)
        return ledger

    def __reduce__(self) -> tuple[Any, ...]:
        """Support pickle and `copy.deepcopy`.

        A copy has the turns and annotations so far, but no sink and no messages. It finds parents by digest, as a
        loaded ledger does.
        """
        with self._lock:
            drafts = [turn.draft for turn in self._turns]
            return Ledger.load, (self.header, drafts, list(self._annotations), list(self._images.values()))

    def __copy__(self) -> Ledger:
        """Return a deep copy: a shallow one would share sampling parameters and columns with this ledger."""
        return deepcopy(self)

    @property
    def uuid(self) -> str:
        """Identity of the rollout."""
        return self.header.uuid

    def __len__(self) -> int:
        return len(self._turns)

    def __iter__(self) -> Iterator[Turn]:
        return iter(tuple(self._turns))

    def __getitem__(self, index: int) -> Turn:
        return self._turns[index]

    def check(self, draft: Draft) -> CheckedDraft:
        """Check the laws of a turn without committing it, and return it as checked.

        What is checked does not change while other turns are committed.

        Raises:
            LawViolationError: The draft breaks law 1, 2, 3, 4, 9 or 10.
            IndexError: `draft.parent` is not a turn of this ledger.
        """
        laws.check_draft(draft, path_length=self.path_length(draft.parent), turn=len(self._turns))
        return CheckedDraft(draft, self)

    def commit(
        self, draft: Draft | CheckedDraft, match: Match | None = None, answer: Any = None, images: Iterable[Image] = ()
    ) -> Turn:
        """Append a turn, whole or not at all.

        Args:
            draft: The turn's content. Its laws are checked before anything changes, unless this ledger's `check` has
                done so.
            match: The history that it answers. Without it, the turn is found by its fingerprint only.
            answer: The message that follows that history.
            images: The images of its media. Those that the ledger holds already are not stored again.

        Raises:
            LawViolationError: The draft breaks law 1, 2, 3, 4, 8, 9 or 10.
            IndexError: `draft.parent` is not a turn of this ledger.
            RecursionError: The answer is nested too deeply.
        """
        kept = strict(answer)  # may raise, so it comes before any change
        checked = isinstance(draft, CheckedDraft) and draft.ledger is self
        draft = draft.draft if isinstance(draft, CheckedDraft) else draft
        with self._lock:
            turn = self._turn_of(self._interner.intern(self._with_branch(draft), len(self._turns), self.call_ids.given))
            if not checked:
                laws.check_draft(turn.draft, path_length=turn.path_length - turn.own_length, turn=turn.index)
            laws.check_branch(turn, first=not self._has_child(draft.parent))
            new = {image.sha256: image for image in images if image.sha256 not in self._images}
            if draft.media:
                laws.check_stored(draft.media, ChainMap(new, self._images), turn=turn.index)
            if self.sink is not None:
                self.sink.turn(self.header, turn, tuple(new.values()))
            self._images.update(new)
            self._append(turn)
            self._interner.register(turn)
            if match is None:
                self._histories.load([turn])
            else:
                self._histories.add(match, kept, turn)
            return turn

    def match(self, history: Sequence[Any], after: int | None = None) -> Match:
        """Find the longest beginning of a history that this ledger knows.

        Args:
            history: The opening and the messages.
            after: The turn that it probably continues. It changes the speed, not the result.
        """
        with self._lock:
            return self._histories.match(history, after)

    def adopt(self, turn: int, answer: Any) -> None:
        """Replace the stored answer of a turn by an equal one: the caller's own strings."""
        with self._lock:
            self._histories.adopt(turn, answer)

    def node_of(self, turn: int) -> Node | None:
        """Return the node of a turn's answer, or None where only the digest of its history is known."""
        return self._histories.node_of(turn)

    def retained(self) -> list[Any]:
        """Return the messages that the ledger holds by reference to find the parents of later turns."""
        with self._lock:
            return [node.message for node in self._histories.nodes()]

    def seal(self) -> Ledger:
        """Drop the messages held by reference, and return the ledger. Later turns find their parents by digest."""
        with self._lock:
            self._histories.forget()
        return self

    def stream_to(self, sink: Sink) -> None:
        """Write everything so far to a sink, and from now on every new turn and annotation."""
        with self._lock:
            if self._turns or self._annotations:
                sink.append(self)
            self.sink = sink

    def annotate(self, name: str, value: Any, *, turn: int | None = None, call: int | str | None = None) -> Annotation:
        """Add an annotation, such as a reward or the termination reason.

        Args:
            name: Its name.
            value: A JSON value. A "reward" is a finite number, also of NumPy, or a bool; it is kept as a float.
            turn: The turn that it describes, or None for the whole rollout.
            call: The tool call that it describes: its number in `Draft.calls` of `turn`, or Strands' `toolUseId`, which
                names the turn too. None for the whole turn or rollout.

        Raises:
            IndexError: `turn` is not a turn of this ledger, or `call` is not a call of it.
            LookupError: No turn has a call of this `toolUseId`, or the messages are gone; see `seal`.
            TypeError, ValueError: The name is not a string, the value is not JSON, or the reward is not a number, or of
                a turn without sampled tokens, or `turn` is not the turn of this `toolUseId`.
        """
        if name == REWARD and value is not None:
            value = as_reward(value)
        with self._lock:
            if isinstance(call, str):
                named, of, call = call, *self._call_of(call)
                if turn not in (None, of):
                    raise ValueError(f"Tool call {named!r} is of turn {of}, not of turn {turn}: leave turn= out.")
                turn = of
            if turn is not None and not 0 <= turn < len(self._turns):
                raise IndexError(f"Cannot annotate turn {turn}: the ledger holds {len(self._turns)} turns.")
            calls = () if turn is None else self._turns[turn].draft.calls
            if call is not None and not 0 <= call < len(calls):
                raise IndexError(f"Cannot annotate call {call} of turn {turn}: it has {len(calls)} calls.")
            if name == REWARD and turn is not None and not self._turns[turn].draft.columns.output:
                raise ValueError(f"Turn {turn} sampled no token, so that no token can have its reward.")
            annotation = Annotation(name, value, turn, call)
            if self.sink is not None:
                self.sink.annotation(self.header, len(self._annotations), annotation)
            self._annotations.append(annotation)
            return annotation

    @property
    def images(self) -> Mapping[bytes, Image]:
        """The images that its turns show, each once, by the digest of its bytes, in the order of their commits."""
        return MappingProxyType(self._images)

    def media(self, index: int | None) -> tuple[MediaSpan, ...]:
        """Return the media of the path from the root to turn `index`, in order; empty for None."""
        return tuple(span for turn in self.path(index) if turn.draft.media for span in turn.draft.media)

    @property
    def annotations(self) -> tuple[Annotation, ...]:
        """All annotations, in the order they were added."""
        return tuple(self._annotations)

    def annotation(self, name: str, *, turn: int | None = None, call: int | None = None, default: Any = None) -> Any:
        """Return the latest value of an annotation, or `default`."""
        for annotation in reversed(self._annotations):
            if (annotation.name, annotation.turn, annotation.call) == (name, turn, call):
                return annotation.value
        return default

    def _call_of(self, tool_use_id: str) -> tuple[int, int]:
        """Return the latest turn whose message has a tool call, and the call's number in `Draft.calls`."""
        for turn in reversed(self._turns):
            node = self._histories.node_of(turn.index)
            blocks = node.message["content"] if node is not None and turn.draft.calls else ()
            uses = [block["toolUse"]["toolUseId"] for block in blocks if "toolUse" in block]
            if tool_use_id in uses:
                ran = [number for number, call in enumerate(turn.draft.calls) if call.status != "suspect"]
                return turn.index, ran[uses.index(tool_use_id)]
        raise LookupError(
            f"No turn of ledger {self.uuid} has a tool call {tool_use_id!r}. Name it by turn=... and call=..., its "
            "number in turn.draft.calls: a ledger that was sealed or loaded holds no messages. A restored session's "
            "ledger becomes the model's at its agent's first turn: for a tool that runs before it, make the model with "
            "policy.model(ledger=policy.store.resume(UUID))."
        )

    def path(self, index: int | None) -> list[Turn]:
        """Return the turns from the root to `index`, both included; empty for None."""
        turns: list[Turn] = []
        while index is not None:
            turn = self._turns[index]
            turns.append(turn)
            index = turn.draft.parent
        return turns[::-1]

    def lineage(self, index: int | None) -> Iterator[int]:
        """Yield a turn and its ancestors, nearest first: its path, and past each root the turn that the root left."""
        while index is not None:
            yield index
            draft = self._turns[index].draft
            index = draft.parent if draft.parent is not None or draft.branch is None else draft.branch.turn

    def path_length(self, index: int | None) -> int:
        """Return the number of tokens from the root to the end of turn `index`; 0 for None.

        Raises:
            IndexError: There is no such turn.
        """
        if index is None:
            return 0
        if index < 0:  # Python would count from the end
            raise IndexError(f"Turn {index} does not exist. The turns are 0 to {len(self._turns) - 1}.")
        return self._turns[index].path_length

    def path_ids(self, index: int | None, *more: TokenIds) -> TokenIds:
        """Return the token ids from the root to the end of turn `index`, and `more`: int32, shape (n,), read-only."""
        parts: list[bytes | memoryview] = []
        while index is not None:  # no call for each turn (law 14)
            draft = self._turns[index].draft
            columns, index = draft.columns, draft.parent
            parts += (columns.buffer[: 4 * (columns.prompt + columns.output)],)
        parts.reverse()
        for ids in more:
            parts += (np.ascontiguousarray(ids, "<i4").data,)
        return np.frombuffer(b"".join(parts), "<i4")

    def is_extended(self, index: int) -> bool:
        """Return whether another turn has this one as its parent."""
        return index in self._parents

    def leaves(self) -> list[int]:
        """Return the turns that no turn extends, in commit order. Each ends one trajectory."""
        turns = list(self)  # one snapshot: another thread may commit meanwhile
        parents = {turn.parent for turn in turns}
        return [turn.index for turn in turns if turn.index not in parents]

    @property
    def agents(self) -> tuple[str, ...]:
        """The agents that made turns, in the order of their first turns; see `Draft.agent`."""
        return tuple(dict.fromkeys(turn.draft.agent for turn in self if turn.draft.agent is not None))

    def last_turn(self, agent: str | None = None) -> int:
        """Return the latest turn of an agent; of the first agent when `agent` is None.

        Where no turn names an agent, as in ledgers of schema 1, it is the latest turn.

        Raises:
            LookupError: The agent made no turn, or there are no turns.
        """
        turns, agents = list(self), self.agents
        wanted = agent if agent is not None else next(iter(agents), None)
        found = [turn.index for turn in turns if turn.draft.agent == wanted]
        if not found:
            raise LookupError(
                f"Agent {agent!r} made no turn of ledger {self.uuid}. Its agents: {', '.join(agents) or 'none named'}."
            )
        return found[-1]

    def iter_trajectories(self, *, train_constrained: bool = False) -> Iterator[Trajectory]:
        """Yield the trajectory of each root-to-leaf path. A shared turn is trained in the first one only (law 3)."""
        for path, context in self.iter_paths():
            yield assemble(
                path,
                context=context,
                train_constrained=train_constrained,
                images=self._images,
                tokenizer=self.header.tokenizer,
            )

    def iter_paths(self) -> Iterator[tuple[list[Turn], Set[int]]]:
        """Yield the turns of each root-to-leaf path, and the indices of turns that earlier paths have."""
        seen: set[int] = set()
        for leaf in self.leaves():
            path = self.path(leaf)
            yield path, seen
            seen.update([turn.index for turn in path])

    @property
    def trajectories(self) -> Trajectories:
        """The trajectories of all root-to-leaf paths; see `iter_trajectories`."""
        return Trajectories(self.iter_trajectories)

    def tree(self) -> str:
        """Draw the forest as text, one line per turn."""
        return draw(self)

    def __repr__(self) -> str:
        turns = list(self)
        sampled = sum(turn.draft.columns.output for turn in turns)
        task = "" if self.header.task_id is None else f", task {self.header.task_id!r}"
        return (
            f"<Ledger {self.uuid}{task}: {count(len(turns), 'turn')}, {count(len(self.leaves()), 'leaf', 'leaves')}, "
            f"{count(sum(turn.own_length for turn in turns), 'token')}, {sampled} sampled>"
        )

    def _repr_html_(self) -> str | None:
        """Return the HTML that a notebook shows."""
        return as_html(self)

    def _turn_of(self, draft: Draft) -> Turn:
        """Return the turn that a draft would become, without adding it."""
        index, parent, columns = len(self._turns), draft.parent, draft.columns
        if parent is not None and not 0 <= parent < index:
            raise IndexError(f"Turn {index} cannot follow turn {parent}: the ledger holds {index} turns.")
        before = 0 if parent is None else self._turns[parent].path_length
        return Turn(index, draft, before + columns.prompt + columns.output)

    def _with_branch(self, draft: Draft) -> Draft:
        """Add a branch record if another thread committed a turn in the draft's place meanwhile (law 8)."""
        if draft.branch is not None or not self._has_child(draft.parent):
            return draft
        return replace(draft, branch=Branch(Reason.SEPARATE, draft.parent))

    def _has_child(self, parent: int | None) -> bool:
        """Return whether a turn already follows `parent`; for None, whether a root exists."""
        return bool(self._turns) if parent is None else parent in self._parents

    def _append(self, turn: Turn) -> None:
        self._turns.append(turn)
        if turn.draft.parent is not None:
            self._parents.add(turn.draft.parent)


class CallIds:
    """Generates tool-call ids, unique within a ledger. Thread-safe.

    Args:
        uuid: Identity of the ledger. Every id contains its first eight characters.
        given: Number of ids that were generated before.
    """

    def __init__(self, uuid: str, given: int = 0) -> None:
        self._prefix = f"call_{uuid[:8]}_"
        self._given = given
        self._lock = threading.Lock()

    @property
    def given(self) -> int:
        """Number of ids that were generated."""
        return self._given

    def next(self, taken: list[str]) -> str:
        """Return the next id, and append it to `taken`, the ids of its turn."""
        taken.append(f"{self._prefix}{self._take()}")
        return taken[-1]

    def give_back(self, taken: list[str]) -> None:
        """Make the ids of a turn that failed, in order, available again (law 5).

        If another turn took a later id meanwhile, the earlier ids stay unused, since no id may be used twice.
        """
        with self._lock:
            while taken and taken.pop() == f"{self._prefix}{self._given}":
                self._given -= 1

    def _take(self) -> int:
        with self._lock:
            self._given += 1
            return self._given


class Interner:
    """Interns the sampling parameters, servers, version names and agents of one ledger, under the ledger's lock."""

    def __init__(self) -> None:
        self._samplings: list[tuple[Any, Sampling]] = []
        self._servers: dict[tuple[Any, ...], Server] = {}
        self._versions: dict[str | None, str | None] = {}
        self._agents: dict[str, str] = {}

    def intern(self, draft: Draft, index: int, call_ids: int) -> Draft:
        """Return a draft as turn `index` will hold it, with interned values. `register` adds its new ones."""
        parameters = draft.sampling.parameters
        known = next((sampling for value, sampling in reversed(self._samplings) if value == parameters), None)
        reported = draft.engine.server
        server = self._servers.get(_server_key(reported))
        if server is None:
            server = Server(reported.backend, reported.model, reported.semantics, index)
        record, version = draft.engine, self._versions.setdefault
        spans = [VersionSpan(span.start, span.stop, version(span.version, span.version)) for span in record.versions]
        engine = changed(record, server=server, versions=tuple(spans), responses=tuple(record.responses))
        sampling = Sampling(_copied(parameters), index) if known is None else known
        extras = dict(draft.extras)  # the caller may change its own dict
        agent = f"agent-{index}" if draft.agent == NEW_AGENT else draft.agent
        agent = None if agent is None else self._agents.setdefault(agent, agent)
        return changed(draft, sampling=sampling, engine=engine, call_ids=call_ids, extras=extras, agent=agent)

    def register(self, turn: Turn) -> None:
        """Register the values that this turn is the first to have, so that later turns share them."""
        sampling, server = turn.draft.sampling, turn.draft.engine.server
        if sampling.first == turn.index:
            self._samplings.append((strict(sampling.parameters), sampling))
        if server.first == turn.index:
            self._servers[_server_key(server)] = server


def _copied(parameters: Any) -> Any:
    try:
        return deepcopy(parameters)
    except RecursionError:
        raise ValueError("The sampling parameters are nested too deeply to be stored; flatten the schema.") from None


def _server_key(server: Server) -> tuple[Any, ...]:
    semantics = server.semantics
    values = (semantics.processed, semantics.temperature, semantics.adjusted)
    # The types are part of the key, since 1 == 1.0 == True.
    return server.backend, server.model, semantics.source, *values, *map(type, values)


def draw(ledger: Ledger) -> str:
    """Draw each turn under its parent: its agent if there are several, tokens, finish reason, calls and branch."""
    turns = list(ledger)
    sampled = sum(turn.draft.columns.output for turn in turns)
    total = sum(turn.own_length for turn in turns)
    title = (
        f"ledger {ledger.uuid}: {count(len(turns), 'turn')}, "
        f"{count(len(ledger.leaves()), 'trajectory', 'trajectories')}, {total} tokens, {sampled} of them sampled"
    )
    return "\n".join([title, *_lines(turns, names_agents=len({turn.draft.agent for turn in turns}) > 1)])


def _lines(turns: list[Turn], *, names_agents: bool) -> Iterator[str]:
    """Yield one line per turn, depth first. Siblings are indented; an only child stays below its parent."""
    children_of: dict[int | None, list[Turn]] = {}
    for turn in turns:
        children_of.setdefault(turn.parent, []).append(turn)
    stack = _siblings(children_of.get(None, []), "")
    while stack:
        turn, lead, indent = stack.pop()
        yield f"{lead}{_turn_line(turn, names_agents=names_agents)}"
        children = children_of.get(turn.index, [])
        stack += _siblings(children, indent) if len(children) > 1 else [(child, indent, indent) for child in children]


def _siblings(turns: list[Turn], indent: str) -> list[tuple[Turn, str, str]]:
    """Return sibling turns, last first, each with the prefix of its own line and that of its descendants."""
    return [
        (turn, indent + ("└─ " if turn is turns[-1] else "├─ "), indent + ("   " if turn is turns[-1] else "│  "))
        for turn in reversed(turns)
    ]


def _turn_line(turn: Turn, *, names_agents: bool) -> str:
    draft = turn.draft
    by = f" by {_one_line(draft.agent or 'no agent')}" if names_agents else ""
    parts = [f"turn {turn.index}{by}", f"{draft.columns.prompt}+{draft.columns.output} tokens", str(draft.finish)]
    if draft.calls:
        calls = [_one_line(call.name or "?") + f" ({call.status})" * (call.status != "ok") for call in draft.calls]
        parts.append("calls " + ", ".join(calls))
    if not draft.reasoning_closed:
        parts.append("reasoning left open")
    if draft.constrained:
        parts.append("constrained")
    if draft.branch is not None:
        parts.append(f"← {draft.branch}")
    return "  ".join(parts)


def _one_line(name: str) -> str:
    """Escape a name that would break the line: a malformed call has any text for a name."""
    return name if name.isprintable() else repr(name)
