"""Measurements anyone can repeat. `make bench` runs the short ones; see each module for the long ones."""
