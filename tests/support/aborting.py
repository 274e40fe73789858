"""Scripts whose answers are cut off by the engine, as a trainer's abort does, and go on where a resumed prompt ends."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from tito_conformance.testing import Completion, ScriptedRequest


@dataclass
class Aborting:
    """One policy that says `whole`, and an engine that aborts it after so many tokens, each time it runs.

    Attributes:
        whole: Ids of the whole answer, its stop token included.
        cuts: Tokens that each run gets to; the run after them ends by itself.
        versions: Weight versions, one a run; None for the server's own.
        requests: What was asked, without the measurement at connect.
        prompt: Length of the first request's prompt.
    """

    whole: Sequence[int]
    cuts: Sequence[int] = ()
    versions: Sequence[str] | None = None
    requests: list[ScriptedRequest] = field(default_factory=list)
    prompt: int = 0

    def __call__(self, request: ScriptedRequest) -> Completion:
        run = len(self.requests)
        self.requests.append(request)
        self.prompt = self.prompt or len(request.prompt_ids)
        left = list(self.whole[len(request.prompt_ids) - self.prompt :])
        logprobs = [-0.25 - 0.5 * run] * len(left)
        spans = None if self.versions is None else [(self.versions[run], 0, len(left))]
        if run < len(self.cuts):
            cut = self.cuts[run]
            return Completion(left[:cut], logprobs[:cut], "abort", weight_versions=spans)
        return Completion(left, logprobs, weight_versions=spans)
