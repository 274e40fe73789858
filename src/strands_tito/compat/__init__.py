"""What the borrowed names of both engines share: models that connect late, and rollouts as lists."""
