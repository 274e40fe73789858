"""strands-tito: the tokens a policy samples are the tokens it is trained on, on SGLang and vLLM alike."""

from tito_core.backend import SamplingParams
from tito_core.ledger import Ledger, Provenance, Trajectory
from tito_core.model import TITOModel
from tito_core.policy import Policy

__all__ = ["Ledger", "Policy", "Provenance", "SamplingParams", "TITOModel", "Trajectory"]
