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
        yield plain(f"part {part['part']}: {outcome}{' · last part' if part['last'] else ''}")
        for row in part["rows"]:
            yield Padding(_row(row), (0, 0, 1, 2))
    if not lease["parts"]:
        yield plain("no part holds it: none has come, or gc collected it", "dim")
    for decision in lease["decisions"]:
        yield _decision(decision)


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
    if row["tool_calls"]:
        head.append(f"{row['tool_calls']} tool calls, {row['tool_failures']} failed")
    spans = ", ".join(f"{span['stamp']} [{span['start']}, {span['end']})" for span in row["version_spans"])
    origin = f"engine {row['engine'] or '–'} · seed {row['seed']} · versions {spans or '–'}"
    lines: list[RenderableType] = [plain(" · ".join(head), "cyan"), plain(origin, "dim")]
    if row["error"]:
        lines.append(plain(row["error"], "red"))
    lines += [_message(message) for message in row["messages"]]
    if row["tokens"]:
        lines.append(_tokens(row["tokens"]))
    return Group(*lines)


def _message(message: Record) -> Text:
    return Text.assemble(plain(f"{message.get('role', '?')}: ", "bold"), plain(message.get("content")))


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
