"""Bytes at rest: object store, Parquet schemas, shards, ledger, checkpoints and weights."""
