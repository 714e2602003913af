"""Shards at rest: size and speed of the encoding, against pyarrow's defaults for the same table."""

from __future__ import annotations

import io
import time

import numpy as np
import pyarrow.parquet as pq

from storage import schema

SEQUENCES, TOKENS = 512, 1024


def example() -> object:
    """A shard of random rollouts: token ids with a long tail, log-probs of which half are near zero."""
    draw = np.random.default_rng(0)
    rows = []
    for number in range(SEQUENCES):
        ids = (draw.zipf(1.3, TOKENS) % 150000).astype(np.int32)
        logprobs = np.where(draw.random(TOKENS) < 0.5, -1e-3, -1.0) * draw.random(TOKENS)
        rows.append(
            {
                **{name: 0 for name in ("attempt", "lease", "part", "sequence", "epoch", "tool_calls", "tool_failures")},
                **{name: "" for name in ("run_id", "group_id", "environment", "engine", "messages")},
                "ordinal": number // 8, "rollout": number % 8, "dataset_index": number // 8, "prompt_length": 64,
                "token_ids": ids, "loss_mask": np.arange(TOKENS) >= 64, "logprobs": logprobs.astype(np.float32),
                "version_spans": [{"attempt": 1, "version": 3, "start": 64, "end": TOKENS}],
                "finish_reason": "stop", "status": "ok", "turns": 1,
            }
        )  # fmt: skip
    return schema.table(rows, schema.SHARD)


def measure() -> list[dict[str, float | str]]:
    """Bytes, and seconds of one encode and one verified decode, beside plain pyarrow."""
    table = example()
    began = time.process_time()
    ours = schema.encode(table, schema.SHARD, {})
    encoded = time.process_time()
    schema.decode(ours)
    decoded = time.process_time()
    sink = io.BytesIO()
    pq.write_table(table, sink)
    written = time.process_time()
    pq.read_table(io.BytesIO(sink.getvalue()))
    read = time.process_time()
    million = SEQUENCES * TOKENS / 1e6
    return [
        {
            "case": f"shard of {million:.1f}M tokens, size",
            "ours": len(ours) / 2**20,
            "theirs": sink.tell() / 2**20,
            "unit": "MiB",
        },
        {"case": "encode, digests included", "ours": encoded - began, "theirs": written - decoded, "unit": "s"},
        {"case": "decode, verified", "ours": decoded - encoded, "theirs": read - written, "unit": "s"},
    ]
