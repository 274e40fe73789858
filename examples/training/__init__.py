"""Parts of `examples/train_tiny.py`: the task, the batch, the learner, the curves."""
