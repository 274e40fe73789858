"""What the names that users of other providers know share: models that connect late, and rollouts as lists."""
