"""One turn: `run` is the outline, and each other module is one of its steps."""
