"""The same run with its store on S3: everything that crosses processes crosses the wire."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from uuid import uuid4

import boto3
import pytest
from moto.server import ThreadedMotoServer

from tests.scenarios.conftest import MakeDriver
from tests.scenarios.run_driver import checkpoint_committed
from tests.scenarios.soundness import assert_sound, attempts
from tests.scenarios.store_faults import Fault

WRITES = {
    "flow": ["create leases/", "create trajectories/", "create pool/"],
    "trainer rank": ["create ledger/", "create refits/", "upload checkpoints/", "create checkpoints/.*MANIFEST"],
}
REGION = "us-east-1"


@pytest.fixture
def storage() -> Iterator[dict[str, Any]]:
    """A bucket of this test's own: all servers of one process have the same contents."""
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    access = {"key": "test", "secret": "test", "endpoint_url": f"http://{host}:{port}"}
    client = boto3.client(
        "s3",
        aws_access_key_id="test",
        aws_secret_access_key="test",
        endpoint_url=access["endpoint_url"],
        region_name=REGION,
    )
    bucket = f"forebay-{uuid4().hex}"
    client.create_bucket(Bucket=bucket)
    yield {"root": f"s3://{bucket}/runs", "options": {**access, "client_kwargs": {"region_name": REGION}}}
    server.stop()


def test_a_run_on_s3_survives_a_kill_of_its_flow(make_driver: MakeDriver, storage: dict[str, Any]) -> None:
    driver = make_driver(settings={"storage": storage})
    driver.start()
    driver.wait_for(checkpoint_committed(2))
    driver.kill("flow")
    assert driver.orphans() == []
    assert driver.run() == 0, driver.errors
    assert_sound(driver)
    assert attempts(driver.store) == 2


def test_requests_that_fail_and_answers_that_are_lost_go_unnoticed(
    make_driver: MakeDriver, storage: dict[str, Any]
) -> None:
    driver = make_driver(settings={"storage": storage})
    driver.arm(
        *(
            Fault(part, write, moment, "fail", occurrence)
            for part, writes in WRITES.items()
            for write in writes
            for moment, occurrence in (("before", 1), ("after", 1))
        )
    )
    assert driver.run() == 0, driver.errors
    assert driver.armed() == []
    assert attempts(driver.store) == 1
    assert_sound(driver)
