"""A tiny policy directory, made on the spot."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from grpo_core.training import tiny_policy

TEXTS = [f"What is {a} plus {b}?" for a in range(10) for b in range(10)]


def make(directory: Path, **changes: Any) -> Path:
    sizes = {
        "hidden_size": 64,
        "layers": 2,
        "heads": 4,
        "kv_heads": 2,
        "intermediate_size": 96,
        "vocabulary_size": 300,
        "tie_word_embeddings": False,
        "seed": 3,
        "max_position_embeddings": 128,
    }
    tiny_policy.make(directory, TEXTS, **(sizes | changes))
    return directory
