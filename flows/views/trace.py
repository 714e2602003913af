"""`forebay trace`: the life of one prompt, from its first lease to its last decision, token by token.

Contract: every lease of the ordinal in every attempt, the rows of its group in each part that is still there, and every
decision of a trainer about that group, dead branches included and marked. Works for an ordinal in any state. Reads of
leases and ledger only the stretch in which the ordinal was open (`flows.views.search`).
"""

import json
from collections.abc import Sequence
from typing import Any, Protocol

import pyarrow.compute as pc

from flows.views.search import decisions, first_step, leases
from flows.views.standing import RecordedRun, recorded_run, standing
from grpo_core.trajectory import Stamp
from storage.attempts import Link, attempt_numbers, chain_of, living_chain, read_attempt
from storage.errors import ObjectMissing
from storage.leases import LeaseRecord
from storage.ledger import DROPPED, TRAINED
from storage.objects import ObjectStore
from storage.trajectories import TrajectoryStore

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
    "tool_seconds",
    "tool_usage",
    "environment_usage",
    "joins_realign",
    "joins_fork",
    "drift_tokens",
    "engine",
    "seed",
    "reward",
    "prompt_length",
)
# Of a whole group, and the same in each of its rows.
COST = ("failed_requests", "aborted_requests", "discarded_tokens", "scoring_wait_seconds", "scoring_seconds")

Record = dict[str, Any]


class Chat(Protocol):
    """Names tokens; `grpo_core.rollout.chat.Chat` is one."""

    def pieces(self, ids: Sequence[int]) -> list[str]:
        """The text of each token."""


def trace(store: ObjectStore, ordinal: int, chat: Chat | None = None) -> Record:
    """The life of `ordinal` as plain JSON values; token texts are None without `chat`.

    leases[]: attempt, lease, living, dispatched_at, stamp, target_step, failures, and
      parts[]: part, last, returned, collected, cost with the columns COST, and
        rows[] with the columns ROW, reward_components, version_spans, messages, seconds, advantage and
          tokens[]: position, id, text, engine, trainer, difference (nats), stamp, lag, masked;
        a part that gc collected has no rows, and is known from a decision about its group;
      decisions[]: the columns DECISION and living.
    Advantage, trainer log-probs, lag and mask are those of the step that trained the group; None if none did.
    """
    run = recorded_run(store)
    chain = living_chain(store)
    decided: list[Record] = []
    records: list[LeaseRecord] = []
    for attempt in attempt_numbers(store):
        history = chain_of(store, read_attempt(store, attempt))
        if any(_settles(each) and _within(history, each) for each in decided):
            continue  # it came to its end before this attempt began
        first = first_step(store, attempt, ordinal, run.window)
        decided += (own := decisions(store, attempt, ordinal, first))
        ended = own[-1] if own and _settles(own[-1]) else None
        if ended is None or ended["lease_attempt"] == attempt:
            last = None if ended is None else ended["lease"]
            records += leases(store, attempt, ordinal, first, run.window, last=last)
    told = [_lease(store, run, record, ordinal, decided, chain, chat) for record in records]
    living = [each for each in decided if _within(chain, each)]
    found = standing(store, run).open.get(ordinal)
    state = str(found.state) if found is not None else living[-1]["state"] if living else "new"
    return {"ordinal": ordinal, "state": state, "leases": told}


def _settles(decision: Record) -> bool:
    return decision["state"] in (TRAINED, DROPPED)


def _within(chain: Sequence[Link], decision: Record) -> bool:
    """Whether a decision belongs to a history."""
    return any(link.contains(decision["attempt"], decision["step"]) for link in chain)


def _lease(
    store: ObjectStore,
    run: RecordedRun,
    record: LeaseRecord,
    ordinal: int,
    decided: Sequence[Record],
    chain: Sequence[Link],
    chat: Chat | None,
) -> Record:
    own = [each for each in decided if (each["lease_attempt"], each["lease"]) == (record.attempt, record.lease)]
    parts = _parts(store, run, record, ordinal, own, chat)
    there = {part["part"] for part in parts}
    parts += [
        {"part": part, "last": False, "returned": False, "collected": True, "cost": None, "rows": []}
        for part in sorted({each["part"] for each in own} - there)
    ]
    return {
        "attempt": record.attempt,
        "lease": record.lease,
        "living": any(link.attempt == record.attempt for link in chain),
        "dispatched_at": record.dispatched_at,
        "stamp": record.stamp,
        "target_step": record.target_step,
        "failures": record.failure_counts.get(ordinal, 0),
        "parts": parts,
        "decisions": [{**{name: each[name] for name in DECISION}, "living": _within(chain, each)} for each in own],
    }


def _parts(
    store: ObjectStore,
    run: RecordedRun,
    record: LeaseRecord,
    ordinal: int,
    decided: Sequence[Record],
    chat: Chat | None,
) -> list[Record]:
    """The parts of a lease that are there and say something about the ordinal."""
    trajectories = TrajectoryStore(store, record.attempt)
    parts: list[Record] = []
    for name in trajectories.open_parts([record.lease]):
        try:
            footer = trajectories.read_footer(name)
            if ordinal not in footer.settled:
                continue
            table = trajectories.read_part(name)[1] if ordinal in footer.ordinals else None
        except ObjectMissing:
            continue  # collected between listing and reading
        rows = [] if table is None else table.filter(pc.field("ordinal") == ordinal).to_pylist()
        trained = next((each for each in reversed(decided) if each["state"] == TRAINED), None)
        shown = [_row(row, number, trained, run, chat) for number, row in enumerate(rows)]
        parts.append(
            {
                "part": name.part,
                "last": footer.last,
                "returned": ordinal in footer.returned,
                "collected": False,
                "cost": {column: rows[0][column] for column in COST} if rows else None,
                "rows": shown,
            }
        )
    return parts


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
