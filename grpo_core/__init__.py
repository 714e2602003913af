"""The algorithm: prompts, scheduling, rollouts, objective, training and refit. Never imports prefect."""
