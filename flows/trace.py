"""`forebay trace`: the life of one prompt, from its first lease to its last decision, token by token.

Contract: every lease of the ordinal in every attempt, the rows of its group in each part, and every decision of a
trainer about that group, dead branches included and marked. Works for an ordinal in any state. Reads the lease
records, and of the ledger only the files from the version of a lease's stamp on, until the decision is found.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

import pyarrow.compute as pc
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from flows.history import ledger_lines
from flows.standing import RecordedRun, recorded_run
from flows.terminal import figure, plain
from grpo_core.trajectory import Stamp
from storage import layout, schema
from storage.attempts import Link, attempt_numbers, living_chain
from storage.errors import ObjectMissing
from storage.layout import LedgerName, PartName
from storage.leases import LeaseRecord, lease_numbers, read_lease
from storage.objects import ObjectStore
from storage.trajectories import PartFooter, TrajectoryStore

PARALLEL_READS = 8


class Chat(Protocol):
    """Names tokens; `grpo_core.rollout.chat.Chat` is one."""

    def pieces(self, ids: Sequence[int]) -> list[str]: ...
