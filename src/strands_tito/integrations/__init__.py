"""Loops that run inside a trainer: slime's generate function, verl's agent loop, TRL's rollout function."""
