"""Terminal tools: summaries of rollouts, coloured tokens, law checks, re-scoring and template certificates."""
