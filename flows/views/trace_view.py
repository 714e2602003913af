"""`forebay trace` for people: what `flows.views.trace.trace` found, in the terminal.

Every text of a rollout is shown literally (`flows.views.terminal`): it may hold markup or escape sequences.
"""

from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from flows.views.messages import message_text
from flows.views.terminal import figure, plain
from storage.ledger import TRAINED

Record = Mapping[str, Any]


def render_trace(found: Record) -> RenderableType:
    """The whole life, oldest lease first."""
    count = len(found["leases"])
    title = plain(
        f"ordinal {found['ordinal']} · {found['state'].replace('_', ' ')} · {count} lease{'' if count == 1 else 's'}",
        "bold",
    )
    return Group(title, *(part for lease in found["leases"] for part in _lease(lease)))


def _lease(lease: Record) -> Iterator[RenderableType]:
    dead = "" if lease["living"] else " · dead branch"
    yield Rule(plain(f"lease {lease['attempt']}/{lease['lease']}{dead}"), align="left", style="dim")
    at = datetime.fromtimestamp(lease["dispatched_at"], tz=UTC).isoformat(sep=" ", timespec="seconds")
    bound = "" if lease["target_step"] is None else f" · for step {lease['target_step']}"
    yield plain(f"dispatched {at} under version {lease['stamp']}{bound} · failed {lease['failures']} times before")
    for part in lease["parts"]:
        if part["collected"]:
            yield plain(f"part {part['part']}: collected by gc, rollouts and tokens with it", "dim")
            continue
        outcome = (
            "returned: no group arrived"
            if part["returned"]
            else f"{len({row['rollout'] for row in part['rows']})} rollouts"
        )
        facts = [outcome, *(["last part"] if part["last"] else []), *_cost(part["cost"] or {})]
        yield plain(f"part {part['part']}: {' · '.join(facts)}")
        for row in part["rows"]:
            yield Padding(_row(row), (0, 0, 1, 2))
    if not lease["parts"]:
        yield plain("no part holds it: none has come, or gc collected it", "dim")
    for decision in lease["decisions"]:
        yield _decision(decision)


def _cost(cost: Record) -> Iterator[str]:
    """What the group cost beside its rollouts, where it cost anything."""
    if cost.get("scoring_seconds") is not None:
        yield f"scored in {figure(cost['scoring_seconds'], 2)} s after {figure(cost['scoring_wait_seconds'], 2)} s"
    told = {"failed_requests": "requests failed", "aborted_requests": "cut off", "discarded_tokens": "tokens discarded"}
    yield from (f"{cost[name]} {what}" for name, what in told.items() if cost.get(name))


def _decision(decision: Record) -> Text:
    where = f"attempt {decision['attempt']}, step {decision['step']}"
    if not decision["living"]:
        where += ", dead branch"
    if decision["state"] != TRAINED:
        return plain(f"{decision['state']} ({where}): {decision['reason']}", "yellow")
    lags = f"lag mean {figure(decision['lag_mean'], 2)}, max {figure(decision['lag_max'], 0)}"
    tokens = f"{figure(decision['tokens_trained'], 0)} of {figure(decision['tokens_generated'], 0)} tokens"
    return plain(f"trained ({where}): {tokens}, {lags}, mean reward {figure(decision['reward_mean'])}", "green")


def _row(row: Record) -> RenderableType:
    head = [
        f"rollout {row['rollout']}",
        f"sequence {row['sequence']}",
        f"{row['turns']} turns",
        row["finish_reason"],
        f"reward {figure(row['reward'])}",
    ]
    head += [f"{name} {figure(value)}" for name, value in row["reward_components"].items()]
    head.append(f"advantage {figure(row['advantage'])}")
    spans = ", ".join(f"{span['stamp']} [{span['start']}, {span['end']})" for span in row["version_spans"])
    origin = f"engine {row['engine'] or '–'} · seed {row['seed']} · versions {spans or '–'}"
    lines: list[RenderableType] = [plain(" · ".join(head), "cyan"), plain(origin, "dim")]
    if work := " · ".join(_work(row)):
        lines.append(plain(work, "dim"))
    if row["error"]:
        lines.append(plain(row["error"], "red"))
    lines += [_message(message) for message in row["messages"]]
    if row["tokens"]:
        lines.append(_tokens(row["tokens"]))
    return Group(*lines)


def _work(row: Record) -> Iterator[str]:
    """How long it took, what it called, and where its turns did not join."""
    if row["seconds"] is not None:
        yield f"{figure(row['seconds'], 2)} s"
    if row["tool_calls"]:
        yield f"{row['tool_calls']} tool calls, {row['tool_failures']} failed"
    for use in (*(row["tool_usage"] or ()), *(row["environment_usage"] or ())):
        failed = f", {use['failures']} failed" if use["failures"] else ""
        yield f"{use['name']} {use['calls']}×{failed}, {figure(use['seconds'], 2)} s"
    if row["joins_realign"] or row["joins_fork"]:
        yield f"{row['joins_realign']} realigned, {row['joins_fork']} forked, {row['drift_tokens']} tokens of drift"


def _message(message: Record) -> Text:
    return Text.assemble(plain(f"{message.get('role', '?')}: ", "bold"), plain(message_text(message)))


def _tokens(tokens: Sequence[Record]) -> Table:
    table = Table(box=None, header_style="dim", pad_edge=False)
    for name in ("position", "id", "text", "engine", "trainer", "difference", "version", "lag"):
        table.add_column(name, justify="left" if name == "text" else "right", no_wrap=True)
    for token in tokens:
        text = None if token["text"] is None else token["text"].replace("\n", "⏎").replace("\t", "⇥")
        lag = None if token["lag"] is None else f"{token['lag']}{' masked' if token['masked'] else ''}"
        logprobs = (figure(token["engine"], 4), figure(token["trainer"], 4), figure(token["difference"], 5))
        cells = (token["position"], token["id"], text, *logprobs, token["stamp"], lag)
        table.add_row(*(plain(cell, "dim" if token["masked"] else "") for cell in cells))
    return table
