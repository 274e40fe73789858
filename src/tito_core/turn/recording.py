"""The ledgers that a model's turns are recorded in: which one a turn belongs to, whose turn it is, and its commit."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Mapping, Sequence
from weakref import WeakKeyDictionary, WeakSet

from strands.types.content import Message

from tito_core.backend.values import InvalidValueError, short_repr
from tito_core.ledger.errors import TITOError
from tito_core.ledger.history import Match
from tito_core.ledger.ledger import CheckedDraft, Ledger
from tito_core.ledger.turn import NEW_AGENT, Draft, Image, Turn
from tito_core.policy import PolicyParts
from tito_core.settings import Settings
from tito_core.store.file import LOCK_WAIT_S, FileLockedError, LockWait, wait_s
from tito_core.turn.history import last_turn_of, ledger_of, match_parent, with_prompt_tools
from tito_core.turn.inputs import NO_CALLER, Caller, TurnInput

_log = logging.getLogger(__name__)
_recorded: WeakSet[threading.Event] = WeakSet()
"""The signals of the agents that made turns in this process. A restored agent that calls first is not among them."""
_GIVE_STORE = "Connect the policy with store=PATH, the file that the earlier turns were written to"
_GIVE_LEDGER = "To have both in one, give that ledger to the model: policy.model(ledger=policy.store.resume(UUID))"
_GIVE_AGENT = "Clear agent.messages, or make a new agent, to begin a rollout without them"


class TurnNotStoredError(TITOError, OSError):
    """The store could not write a turn. Neither the file nor the ledger holds it (law 5)."""


def lock_wait_s(turn_timeout_s: float | None, elapsed_s: float) -> float:
    """Return how long a turn may wait for the store's lock: the rest of its timeout, and at least a second.

    The second is for stores that several processes append to: each holds the lock for a moment.
    """
    return LOCK_WAIT_S if turn_timeout_s is None else min(LOCK_WAIT_S, max(1.0, turn_timeout_s - elapsed_s))


class Recording:
    """The ledgers of one rollout after another. Threads may share it.

    Args:
        policy: Makes new ledgers, and holds the store that they write to.
        ledger: The first ledger. When None, a restored session's or a new one.

    Raises:
        InvalidValueError: The ledger is of another tokenizer, or of inert content and the policy's is not.
    """

    def __init__(self, policy: PolicyParts, ledger: Ledger | None) -> None:
        self._policy = policy
        self._lock = threading.Lock()
        self._untouched = ledger is None
        self._agents: WeakKeyDictionary[threading.Event, tuple[str, str]] = WeakKeyDictionary()
        self._sealed: set[str] = set()
        self._warned: set[str] = set()
        # An empty ledger is falsy.
        self._ledger = policy.ledger() if ledger is None else self._attached(self._checked(ledger))

    @property
    def ledger(self) -> Ledger:
        """The current ledger."""
        return self._ledger

    async def begin(self, turn_input: TurnInput) -> Ledger:
        """Return the ledger that a turn belongs to, even if the model is reset before the turn ends.

        Only the first agent's first turn can load a restored agent's ledger, which its key names, from the store:
        later, other turns may be using the current one. Calls outside any agent may come before. It is read in a
        thread.

        Raises:
            InvalidValueError: The restored ledger is of another tokenizer, or of inert content and the policy's is not.
            TurnNotStoredError: The store was closed, or its file removed.
        """
        reads = self._policy.store is not None and self._untouched and ledger_of(turn_input.model_state) is not None
        if reads or self._lock.locked():
            return await asyncio.to_thread(self._begin, turn_input)
        return self._begin(turn_input)

    def _begin(self, turn_input: TurnInput) -> Ledger:
        with self._lock:
            try:
                if self._policy.store is not None:
                    self._policy.store.check_open()
                if self._untouched and turn_input.model_state is not None:
                    if (restored := self._restored(turn_input)) is not None:
                        self._replace(restored)
                    self._untouched = False
            except OSError as error:
                raise self._not_stored(self._ledger, error) from error
            return self._ledger

    def agent(self, ledger: Ledger, turn_input: TurnInput, parent: int | None) -> str | None:
        """Return the agent of a turn, as `Draft.agent` names it; `NEW_AGENT` for a new one without a name.

        It is, in this order: the agent that this caller was before; the caller's own name; the agent that a restored
        agent's key names; the agent whose history an agent without a name continues.

        Args:
            ledger: The turn's ledger.
            turn_input: The input of the turn.
            parent: The turn that it extends, or None.
        """
        state, caller = turn_input.model_state, turn_input.caller
        if state is None:
            return None
        if caller.signal is not None:
            with self._lock:
                uuid, agent = self._agents.get(caller.signal, ("", ""))
            if uuid == ledger.uuid:
                return agent
        last_turn = last_turn_of(ledger, state)
        if last_turn is None and (other := self._other(turn_input, ledger)) is not None:
            self._warn_once(other, ledger, "but this model had begun its own", _GIVE_LEDGER)
        if caller.name is not None:
            return caller.name
        earlier = [turn for turn in (last_turn, parent) if turn is not None]
        return next((name for turn in earlier if (name := ledger[turn].draft.agent) is not None), NEW_AGENT)

    async def commit(
        self,
        ledger: Ledger,
        draft: Draft | CheckedDraft,
        history: Match,
        answer: Message,
        images: Sequence[Image] = (),
        caller: Caller = NO_CALLER,
        *,
        within_s: float = LOCK_WAIT_S,
    ) -> Turn:
        """Append a turn to its ledger and to the store, or to neither.

        The event loop runs on while another process holds the store's lock. If this task is cancelled meanwhile, or the
        time is up, nothing of the turn remains (law 5).

        Args:
            ledger: The ledger.
            draft: The turn.
            history: The history that it answers.
            answer: The message that follows that history.
            images: The images of its media.
            caller: The agent that made the turn.
            within_s: Longest wait for the store's lock, in seconds.

        Raises:
            TurnNotStoredError: The store cannot write, or another process holds its lock.
            LawViolationError: The draft breaks a law.
        """
        wait: LockWait | None = None
        try:
            while True:
                before = wait_s.set(0.0)  # an event loop must not block
                try:
                    turn = ledger.commit(draft, history, answer, images)
                    break
                except FileLockedError as error:
                    wait = wait or LockWait(error.filename, within_s)
                finally:
                    wait_s.reset(before)
                await asyncio.sleep(wait.pause_s())
        except OSError as error:
            raise self._not_stored(ledger, error) from error
        if caller.signal is not None and turn.draft.agent is not None:
            known = (ledger.uuid, turn.draft.agent)
            with self._lock:
                if self._agents.get(caller.signal) != known:
                    self._agents[caller.signal] = known
                    _recorded.add(caller.signal)
        return turn

    def _not_stored(self, ledger: Ledger, error: OSError) -> TurnNotStoredError:
        where = "the store" if self._policy.store is None else self._policy.store.path
        return TurnNotStoredError(
            error.errno,
            f"Law 5: {where} could not write turn {len(ledger)} of ledger {ledger.uuid} ({error}). The turn was not "
            "committed; model.ledger keeps its earlier turns. Free disk space, or fix the file, its lock or its "
            "folder, and call the agent again; or write the ledger to another file: "
            "tito_core.store.append(path, [model.ledger]).",
        )

    def next(self) -> Ledger:
        """Start the next ledger and return the previous one, sealed."""
        if self._policy.store is not None:
            self._policy.store.sync()  # first: when the disk fails, the ledger stays current
        with self._lock:
            sealed, self._ledger, self._untouched = self._ledger, self._policy.ledger(), True
            self._sealed.add(sealed.uuid)  # an agent that continues must not restore it
            self._warned.clear()
        return sealed.seal()

    def _restored(self, turn_input: TurnInput) -> Ledger | None:
        """Return the ledger that a restored agent's key names, or None.

        An agent that made turns in this process is not a restored one: its key names the ledger of its last rollout. It
        continues that ledger only where its history continues a turn of it.
        """
        store, uuid = self._policy.store, self._other(turn_input, self._ledger)
        if uuid is None:
            return None
        if store is None or uuid not in store:
            which = "and this policy has no store" if store is None else f"which {store.path} does not hold"
            self._warn_once(uuid, self._ledger, which, _GIVE_STORE)
            return None
        ledger = store.resume(uuid)
        if turn_input.caller.signal in _recorded:
            tools = with_prompt_tools(self._policy, ledger, turn_input)
            if match_parent(self._policy, ledger, tools, Settings()).parent is None:
                self._warn_once(uuid, self._ledger, "and its history continues no turn of that ledger", _GIVE_AGENT)
                return None
        return self._checked(ledger)

    def _other(self, turn_input: TurnInput, ledger: Ledger) -> str | None:
        """Return the uuid of another ledger whose conversation an agent continues, as its key says, or None.

        An agent that made turns in this process, and whose history holds no answer now, began a new conversation.
        """
        uuid = ledger_of(turn_input.model_state)
        if uuid is None or uuid == ledger.uuid or uuid in self._sealed:
            return None
        answered = any(isinstance(each, Mapping) and each.get("role") == "assistant" for each in turn_input.messages)
        return uuid if answered or turn_input.caller.signal not in _recorded else None

    def _replace(self, restored: Ledger) -> None:
        """Go on in a restored ledger, with the rollout's annotations so far, as those of a hook before the first turn.

        Raises:
            OSError: The store cannot write an annotation.
        """
        begun = self._ledger
        for annotation in begun.annotations:
            if annotation.turn is None:
                restored.annotate(annotation.name, annotation.value)
        if len(begun):
            _log.warning(
                "ledger=<%s>, restored=<%s>, turns=<%d> | Calls outside any agent, such as that of a conversation "
                "manager that summarises, came before the first turn of a restored agent. The model goes on in the "
                "agent's ledger, and they stay in one of their own. %s.",
                begun.uuid,
                restored.uuid,
                len(begun),
                _GIVE_LEDGER,
            )
        self._ledger = restored

    def _warn_once(self, uuid: str, ledger: Ledger, why: str, remedy: str) -> None:
        """Log, once for each ledger, that answers of an earlier one are not trained in the current one."""
        if uuid not in self._warned:
            self._warned.add(uuid)
            _log.warning(
                "ledger=<%s>, new_ledger=<%s> | The agent continues a conversation that was recorded in another "
                "ledger, %s. It goes on in the new ledger: earlier answers are prompt tokens in it, and are not "
                "trained. %s.",
                uuid,
                ledger.uuid,
                why,
                remedy,
            )

    def _checked(self, ledger: Ledger) -> Ledger:
        """Return a ledger whose header stays true with this policy: its tokenizer, and whether content is inert."""
        if (recorded := ledger.header.certificate) is None:
            return ledger
        certificate = self._policy.template.certificate
        if recorded.get("tokenizer", certificate.tokenizer) != certificate.tokenizer:
            raise InvalidValueError(
                f"Law 15: ledger {ledger.header.uuid} is of another tokenizer ({short_repr(ledger.header.tokenizer)}) "
                "than this policy, so no turn can be added: its ids would mean other texts. Continue it with a policy "
                "of that tokenizer, or start a new ledger."
            )
        if recorded.get("content_tokens") == "inert" and certificate.content_tokens != "inert":
            raise InvalidValueError(
                f"Law 6: ledger {ledger.header.uuid} records content_tokens='inert', but this policy has "
                f"{certificate.content_tokens!r}, so no turn can be added. Continue it with an inert policy, or start "
                "a new ledger."
            )
        return ledger

    def _attached(self, ledger: Ledger) -> Ledger:
        return ledger if self._policy.store is None or ledger.sink is not None else self._policy.store.attach(ledger)
