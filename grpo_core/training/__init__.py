"""The trainer: model, packing, optimizer step and checkpoints."""
