"""What tests of several packages share, and which of them stay together when several processes run them."""

import pytest

from tests.vllm_engine import vllm_engine

__all__ = ["vllm_engine"]

# Fixtures that take a minute to start, once in each process that needs them.
DEAR = ("server", "vllm_engine")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """`--dist loadgroup` keeps a group in one process: the tests of a file, and those that share what is dear."""
    for item in items:
        shared = [name for name in DEAR if name in getattr(item, "fixturenames", ())]
        item.add_marker(pytest.mark.xdist_group(shared[0] if shared else item.nodeid.partition("::")[0]))
