"""What a run looks like to people and programs: read from its store alone, never changing it."""
