"""One turn, in the order it runs: `run` is its outline, and each step is a module that it names."""
