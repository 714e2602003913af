"""Advantages, losses and log-probs: pure functions on flat vectors."""
