"""Sampled answers with the likeliest tokens of each place."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from strands_tito.conformance.bets import Floats, Places
from tito_core.backend.protocol import TokenResponse


class Offsets(Protocol):
    """Whatever knows what penalties add to logits."""

    def offsets(self, output: Sequence[int]) -> dict[int, float]:
        """Return what they add after some output tokens, by id."""


@dataclass(frozen=True)
class Draw:
    """One sampled answer with the likeliest tokens in each place.

    Attributes:
        ids: int64, shape (n,).
        logprobs: Reported for the ids, float64, shape (n,).
        top_ids: int64, shape (n, k), likeliest first, -1 where there are fewer.
        top_logprobs: float64, shape (n, k), -inf where there are fewer.
        mass: Total probability of all tokens that the server listed, shape (n,).
        streamed: Whether the answer was streamed.
    """

    ids: NDArray[np.int64]
    logprobs: Floats
    top_ids: NDArray[np.int64]
    top_logprobs: Floats
    mass: Floats
    streamed: bool = False

    def moved(self, logs: Floats, penalties: Offsets) -> Floats:
        """Return the logarithms with penalties on the tokens before each place."""
        found, output = logs.copy(), self.ids.tolist()
        for at in range(len(output)):
            for token, offset in penalties.offsets(output[:at]).items():
                found[at][self.top_ids[at] == token] += offset
        return found

    def places(
        self, logs: Floats, name: str, more: Sequence[str], ends: Sequence[int], *, alone: bool = False
    ) -> Places:
        """Return the answer as places to bet on.

        Args:
            logs: Logarithms of weights of the likeliest tokens, shape (n, k).
            name: Subset of all tokens.
            more: Further such subsets.
            ends: Ids that end a turn.
            alone: Whether to judge among the listed tokens alone. Places in which another token was sampled are left
                out then, and so are all others that say nothing.
        """
        own = (self.top_ids == self.ids[:, None]) & np.isfinite(logs)
        listed = own.any(axis=1)
        n, stated = len(self.ids), np.exp(logs)
        seen, counts = np.zeros(logs.shape), Counter[int]()
        for at, token in enumerate(self.ids.tolist()):
            seen[at] = [counts[other] for other in self.top_ids[at].tolist()]
            counts[token] += 1
        keep = np.ones(n, bool)
        if alone:
            mass = stated.sum(axis=1, keepdims=True)
            stated = stated / np.where(mass > 0, mass, 1)
            keep = listed
        whole, first = np.ones(n, bool), np.arange(n) == 0
        subsets = {f"At {name}": whole, "All samples": whole, "First tokens of answers": first}
        subsets |= {f"At {name}, {each}": whole for each in more}
        return Places(
            stated[keep],
            np.where(listed, own.argmax(axis=1), -1)[keep],
            np.isin(self.top_ids, list(ends))[keep],
            seen[keep],
            (np.zeros(n) if alone else -self.logprobs)[keep],
            {key: mask[keep] for key, mask in subsets.items()},
        )


def draw_of(response: TokenResponse, *, streamed: bool = False) -> Draw:
    """Return an answer with its likeliest tokens.

    Servers add the sampled token to the k likeliest, or put it in the place of the last one, and choose freely among
    tokens that are tied. So only tokens that are likelier than the one before the last are used: which these are does
    not depend on the sampled one.
    """
    top_ids, top = (response.columns[name].values for name in ("top_ids", "top_logprobs"))
    logs = np.where(top_ids == -1, -math.inf, np.nan_to_num(top.astype(np.float64), nan=-math.inf))
    mass = np.exp(logs).sum(axis=1)
    edge = logs[:, -2:-1]
    logs = np.where(logs > edge, logs, -math.inf)
    ids = response.output_ids.astype(np.int64)
    return Draw(ids, response.logprobs.astype(np.float64), top_ids.astype(np.int64), logs, mass, streamed)
