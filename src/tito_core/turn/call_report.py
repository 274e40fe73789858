"""How well a policy forms its tool calls over a rollout, by tool."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from tito_core.ledger.turn import CallRecord, Turn
from tito_core.parsing.parsed import CallStatus

_VALUES = re.compile(r"""(?<!\w)'(?:[^'\\]|\\.)*'|"[^"]*'[^"]*"|\d+""")


def kind_of(reason: str) -> str:
    """Give what kind of fault a reason tells of: its sentence without the values, cut at the first colon."""
    return _VALUES.sub("…", reason).split(":")[0].rstrip(". ")


@dataclass(frozen=True, slots=True)
class CallCounts:
    """Calls of one tool.

    Attributes:
        ok: Sound ones, whether or not there is such a tool.
        truncated: Those that the token limit cut off.
        malformed: The others, by the kind of fault, the commonest first.
    """

    ok: int = 0
    truncated: int = 0
    malformed: Mapping[str, int] = field(default_factory=dict)

    @classmethod
    def of(cls, calls: Iterable[CallRecord]) -> CallCounts:
        """Count."""
        statuses: Counter[str] = Counter()
        kinds: Counter[str] = Counter()
        for call in calls:
            statuses[call.status] += 1
            if call.status == CallStatus.MALFORMED:
                kinds[kind_of(call.reason)] += 1
        return cls(statuses[CallStatus.OK], statuses[CallStatus.TRUNCATED], dict(kinds.most_common()))

    @property
    def total(self) -> int:
        """All of them."""
        return self.ok + self.truncated + sum(self.malformed.values())


@dataclass(frozen=True, slots=True)
class ParseReport:
    """The calls of a rollout. It does not change when the rollout goes on; ask the model again.

    Attributes:
        tools: Counts by the tool's name; under None those whose name the tokens do not say for certain.
        all: Counts of all calls together.
    """

    tools: Mapping[str | None, CallCounts]
    all: CallCounts

    @classmethod
    def of(cls, turns: Iterable[Turn]) -> ParseReport:
        """Count the calls of a ledger, or of some of its turns."""
        by_name: dict[str | None, list[CallRecord]] = {}
        for turn in turns:
            for call in turn.draft.calls:
                by_name.setdefault(call.name, []).append(call)
        every = CallCounts.of(call for calls in by_name.values() for call in calls)
        return cls({name: CallCounts.of(calls) for name, calls in by_name.items()}, every)

    def __str__(self) -> str:
        lines = [f"{self.all.ok} of {self.all.total} calls are sound"]
        for name, counts in self.tools.items():
            faults = [f"{number} malformed ({kind})" for kind, number in counts.malformed.items()]
            faults += [f"{counts.truncated} truncated"] if counts.truncated else []
            lines.append(f"{'unknown tool' if name is None else name}: {', '.join([f'{counts.ok} ok', *faults])}")
        return "\n".join(lines)
