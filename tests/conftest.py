"""What tests of several packages share."""

from tests.vllm_engine import vllm_engine

__all__ = ["vllm_engine"]
