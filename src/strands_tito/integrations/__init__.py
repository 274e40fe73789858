"""Trainer integrations: Strands agents in slime (generate function), verl (agent loop) and TRL (rollout function)."""
