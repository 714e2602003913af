"""`forebay trace`: the life of one prompt, from its first lease to its last decision, token by token.

Contract: every lease of the ordinal in every attempt, the rows of its group in each part, and every decision of a
trainer about that group, dead branches included and marked. Works for an ordinal in any state. Reads all lease
records, but of the ledger only the files from the version of a lease's stamp on, until the decision is found.
"""

import json
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

import pyarrow.compute as pc

from flows.views.standing import RecordedRun, recorded_run, standing
from grpo_core.trajectory import Stamp
from storage import layout, schema
from storage.attempts import attempt_numbers, living_chain, read_attempt
from storage.leases import LeaseRecord, lease_numbers, read_lease
from storage.ledger import TRAINED
from storage.objects import ObjectStore
from storage.trajectories import TrajectoryStore

PARALLEL_READS = 8
DECISION = (
    "attempt",
    "step",
    "state",
    "reason",
    "lag_mean",
    "lag_max",
    "reward_mean",
    "tokens_generated",
    "tokens_trained",
    "tokens_masked",
)
ROW = (
    "rollout",
    "sequence",
    "status",
    "error",
    "finish_reason",
    "turns",
    "tool_calls",
    "tool_failures",
    "engine",
    "seed",
    "reward",
    "prompt_length",
)

Record = dict[str, Any]


class Chat(Protocol):
    """Names tokens; `grpo_core.rollout.chat.Chat` is one."""

    def pieces(self, ids: Sequence[int]) -> list[str]:
        """The text of each token."""


def trace(store: ObjectStore, ordinal: int, chat: Chat | None = None) -> Record:
    """The life of `ordinal` as plain JSON values; token texts are None without `chat`.

    leases[]: attempt, lease, living, dispatched_at, stamp, target_step, failures, and
      parts[]: part, last, returned, and rows[] with the columns ROW, reward_components, version_spans, messages,
        seconds, advantage and tokens[]: position, id, text, engine, trainer, difference (nats), stamp, lag, masked;
      decisions[]: the columns DECISION and living.
    Advantage, trainer log-probs, lag and mask are those of the step that trained the group; None if none did.
    """
    run = recorded_run(store)
    leases = [_lease(store, run, record, ordinal, chat) for record in _leases(store, ordinal)]
    decisions = [decision for lease in leases for decision in lease["decisions"] if decision["living"]]
    found = standing(store, run).open.get(ordinal)
    state = str(found.state) if found is not None else decisions[-1]["state"] if decisions else "new"
    return {"ordinal": ordinal, "state": state, "leases": leases}


def _leases(store: ObjectStore, ordinal: int) -> list[LeaseRecord]:
    """Every lease of the ordinal, oldest first."""
    names = [(attempt, lease) for attempt in attempt_numbers(store) for lease in lease_numbers(store, attempt)]
    with ThreadPoolExecutor(PARALLEL_READS) as readers:
        return [
            record for record in readers.map(lambda name: read_lease(store, *name), names) if ordinal in record.ordinals
        ]


def _lease(store: ObjectStore, run: RecordedRun, record: LeaseRecord, ordinal: int, chat: Chat | None) -> Record:
    trajectories = TrajectoryStore(store, record.attempt)
    parts, decisions = [], []
    for name in trajectories.open_parts([record.lease]):
        footer = trajectories.read_footer(name)
        if ordinal not in footer.settled:
            continue
        rows: list[Record] = []
        if ordinal in footer.ordinals:
            table = trajectories.read_part(name)[1]
            rows = table.filter(pc.field("ordinal") == ordinal).to_pylist()
            newest = max((row["max_version"] or 0 for row in rows), default=0)
            decisions = list(_decisions(store, run, record, name.part, ordinal, newest))
        trained = next((each for each in reversed(decisions) if each["state"] == TRAINED), None)
        shown = [_row(row, number, trained, run, chat) for number, row in enumerate(rows)]
        parts.append({"part": name.part, "last": footer.last, "returned": ordinal in footer.returned, "rows": shown})
    chain = living_chain(store)
    return {
        "attempt": record.attempt,
        "lease": record.lease,
        "living": any(link.attempt == record.attempt for link in chain),
        "dispatched_at": record.dispatched_at,
        "stamp": record.stamp,
        "target_step": record.target_step,
        "failures": record.failure_counts.get(ordinal, 0),
        "parts": parts,
        "decisions": [
            {
                **{name: each[name] for name in DECISION},
                "living": any(link.contains(each["attempt"], each["step"]) for link in chain),
            }
            for each in decisions
        ],
    }


def _decisions(
    store: ObjectStore, run: RecordedRun, record: LeaseRecord, part: int, ordinal: int, newest: int
) -> Iterator[Record]:
    """The ledger rows about the group in this part: at most one in the attempt that leased it, and one in each later
    attempt that resumed with it buffered. `newest` is the newest version in the group."""
    window = run.window
    first = Stamp.parse(record.stamp).version * window.every_steps + 1
    # Whoever resumes with the group decides about it before it is stale, or at once.
    stale = (newest + window.max_age + 1) * window.every_steps + 1
    for attempt in attempt_numbers(store):
        if attempt < record.attempt:
            continue
        parent = read_attempt(store, attempt).parent
        last = None if attempt == record.attempt else max(stale, 1 if parent is None else parent[1] + 1)
        directories = [
            each
            for each in store.directories(layout.ledger_prefix(attempt))
            if each >= layout.ledger_directory(attempt, first)
        ]
        names = (layout.parse_ledger(key) for directory in directories for key in store.list(directory))
        chosen = [name for name in names if name and name.step >= first and (last is None or name.step <= last)]
        for name in sorted(chosen, key=lambda name: name.written_order):
            key = layout.ledger(name)
            data = store.get(key)
            origins = schema.decode(data, ["ordinal", "lease_attempt", "lease", "part"], name=key)[0].to_pylist()
            origin = {"ordinal": ordinal, "lease_attempt": record.attempt, "lease": record.lease, "part": part}
            if origin in origins:
                yield schema.decode(data, name=key)[0].slice(origins.index(origin), 1).to_pylist()[0]
                break


def _row(row: Record, number: int, decision: Record | None, run: RecordedRun, chat: Chat | None) -> Record:
    """One sequence of the group; `number` is its place among them."""
    advantages = (decision or {}).get("advantages") or []
    logprobs = (decision or {}).get("trainer_logprobs") or []
    started, finished = row["submitted_at"], row["finished_at"]
    return {
        **{name: row[name] for name in ROW},
        "reward_components": dict(row["reward_components"] or ()),
        "version_spans": [
            {"stamp": f"{s['attempt']}.{s['version']}", "start": s["start"], "end": s["end"]}
            for s in row["version_spans"]
        ],
        "messages": json.loads(row["messages"]),
        "seconds": finished - started if started is not None and finished is not None else None,
        "advantage": advantages[row["rollout"]] if row["rollout"] < len(advantages) else None,
        "tokens": _tokens(row, logprobs[number] if number < len(logprobs) else [], decision, run, chat),
    }


def _tokens(
    row: Record, trainer: Sequence[float], decision: Record | None, run: RecordedRun, chat: Chat | None
) -> list[Record]:
    """The generated tokens. The trainer predicts all of them but a sequence's first token, which has no predecessor."""
    generated = [position for position, made in enumerate(row["loss_mask"]) if made]
    known = dict(zip((position for position in generated if position > 0), trainer, strict=False))
    texts = (
        chat.pieces([row["token_ids"][position] for position in generated])
        if chat is not None
        else [None] * len(generated)
    )
    stamps = {p: Stamp(s["attempt"], s["version"]) for s in row["version_spans"] for p in range(s["start"], s["end"])}
    current = run.window.training_version(decision["step"]) if decision is not None else None
    tokens = []
    for position, text in zip(generated, texts, strict=True):
        engine, own, stamp = row["logprobs"][position], known.get(position), stamps.get(position)
        lag = current - stamp.version if current is not None and stamp is not None else None
        tokens.append(
            {
                "position": position,
                "id": row["token_ids"][position],
                "text": text,
                "engine": engine,
                "trainer": own,
                "difference": own - engine if own is not None else None,
                "stamp": str(stamp) if stamp is not None else None,
                "lag": lag,
                "masked": lag > run.window.max_age if lag is not None else None,
            }
        )
    return tokens
