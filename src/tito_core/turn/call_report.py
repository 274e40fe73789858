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
    """Return what kind of fault a reason tells of: its sentence without the values, cut at the first colon."""
    return _VALUES.sub("…", reason).split(":")[0].rstrip(". ")


@dataclass(frozen=True, slots=True)
class CallCounts:
    """Calls of one tool.

    Attributes:
        ok: Sound ones, whether or not there is such a tool.
        truncated: Those that the token limit cut off.
        malformed: Those that are damaged, or loose where `tool_calls` is "strict", by the kind of fault, the commonest
            first.
        lenient: Loose ones that ran, since `tool_calls` is "lenient", by how they were loose, the commonest first.
        suspect: Texts that look like calls; they are none, and do not count among them.
    """

    ok: int = 0
    truncated: int = 0
    malformed: Mapping[str, int] = field(default_factory=dict)
    lenient: Mapping[str, int] = field(default_factory=dict)
    suspect: int = 0

    @classmethod
    def of(cls, calls: Iterable[CallRecord]) -> CallCounts:
        """Count."""
        statuses: Counter[str] = Counter()
        kinds: dict[str, Counter[str]] = {CallStatus.MALFORMED: Counter(), CallStatus.LENIENT: Counter()}
        for call in calls:
            statuses[call.status] += 1
            if call.status in kinds:
                kinds[call.status][kind_of(call.reason)] += 1
        malformed, lenient = (dict(found.most_common()) for found in kinds.values())
        return cls(
            statuses[CallStatus.OK],
            statuses[CallStatus.TRUNCATED],
            malformed,
            lenient,
            statuses[CallStatus.SUSPECT],
        )

    @property
    def total(self) -> int:
        """All of them, without the suspect."""
        return self.ran + self.truncated + sum(self.malformed.values())

    @property
    def ran(self) -> int:
        """Those that ran."""
        return self.ok + sum(self.lenient.values())


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
        lines = [f"{self.all.ran} of {self.all.total} calls are sound"]
        for name, counts in self.tools.items():
            faults = [f"{number} lenient ({kind})" for kind, number in counts.lenient.items()]
            faults += [f"{number} malformed ({kind})" for kind, number in counts.malformed.items()]
            faults += [f"{counts.truncated} truncated"] if counts.truncated else []
            faults += [f"{counts.suspect} suspect"] if counts.suspect else []
            lines.append(f"{'unknown tool' if name is None else name}: {', '.join([f'{counts.ok} ok', *faults])}")
        return "\n".join(lines)
