"""The trainer: model, packing, optimizer step and checkpoints."""

import os

# Who started this process, noted before the imports that take seconds: it may be gone when they are done.
PARENT = os.getppid()
