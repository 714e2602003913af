"""Stores of every kind, and shard rows, for the storage tests."""

from __future__ import annotations

import socketserver
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import boto3
import pyarrow as pa
import pytest
from moto.server import ThreadedMotoServer

from storage import schema
from storage.objects import Client, ObjectStore

BUCKET = "forebay-tests"
KINDS = ("local", "memory", "s3", "s3-obstore")


@pytest.fixture(scope="session")
def s3_options() -> Iterator[dict[str, Any]]:
    """A real S3 API on a free port. With Nagle's algorithm on, every small answer would wait 40 ms."""
    before = getattr(socketserver.StreamRequestHandler, "disable_nagle_algorithm", False)
    socketserver.StreamRequestHandler.disable_nagle_algorithm = True
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    region = "us-east-1"
    options = {
        "key": "test",
        "secret": "test",
        "endpoint_url": f"http://{host}:{port}",
        "client_kwargs": {"region_name": region},
    }
    boto3.client(
        "s3",
        endpoint_url=options["endpoint_url"],
        region_name=region,
        aws_access_key_id="test",
        aws_secret_access_key="test",
    ).create_bucket(Bucket=BUCKET)
    yield options
    server.stop()
    socketserver.StreamRequestHandler.disable_nagle_algorithm = before


@pytest.fixture
def open_store(tmp_path: Path, request: pytest.FixtureRequest) -> Callable[[str], ObjectStore]:
    """Opens a new, empty store of a kind."""

    def open_kind(kind: str) -> ObjectStore:
        name = uuid.uuid4().hex
        if kind == "local":
            return ObjectStore.open(str(tmp_path / name))
        if kind == "memory":
            return ObjectStore.open(f"memory://{name}")
        options = request.getfixturevalue("s3_options")
        client: Client = "obstore" if kind == "s3-obstore" else "fsspec"
        return ObjectStore.open(f"s3://{BUCKET}/{name}", options, client=client)

    return open_kind


@pytest.fixture(params=KINDS)
def store(request: pytest.FixtureRequest, open_store: Callable[[str], ObjectStore]) -> ObjectStore:
    return open_store(request.param)


@pytest.fixture
def local_store(open_store: Callable[[str], ObjectStore]) -> ObjectStore:
    return open_store("local")


def _shard_row(ordinal: int, rollout: int = 0, **changes: Any) -> dict[str, Any]:
    tokens = [ordinal, 5, 150_000, 7]
    row = {
        "run_id": "run",
        "attempt": 0,
        "lease": 0,
        "part": 0,
        "ordinal": ordinal,
        "group_id": f"group-{ordinal}",
        "rollout": rollout,
        "sequence": 0,
        "epoch": 0,
        "dataset_index": ordinal % 3,
        "environment": "arithmetic",
        "prompt_length": 2,
        "token_ids": tokens,
        "loss_mask": [False, False, True, True],
        "logprobs": [0.0, 0.0, -0.5, -1.25],
        "version_spans": [{"attempt": 1, "version": 3, "start": 2, "end": 4}],
        "min_version": 3,
        "max_version": 3,
        "engine": "http://engine-0",
        "reward": 0.5,
        "reward_components": [("correct", 0.5), ("format", 0.0)],
        "finish_reason": "stop",
        "status": "complete",
        "temperature": 1.0,
        "seed": 2**62 + rollout,
        "messages": '[{"role": "user", "content": "2 + 2 = ? ✓"}]',
        "turns": 1,
        "tool_calls": 0,
        "tool_failures": 0,
    }
    return row | changes


@pytest.fixture
def shard_table() -> Callable[..., pa.Table]:
    """Makes a shard of the groups of some ordinals, two rollouts each; keywords change columns."""

    def make(*ordinals: int, **changes: Any) -> pa.Table:
        rows = [_shard_row(ordinal, rollout, **changes) for ordinal in ordinals for rollout in range(2)]
        return schema.table(rows, schema.SHARD)

    return make
