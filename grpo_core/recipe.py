"""Reading recipes: YAML and overrides in, a validated `RunConfig` out, every fault as one sentence.

Also the rule of what may change when a run is continued: how long it goes on and where, never what is learnt.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError

from grpo_core.config import RunConfig

CONTINUABLE = ("grpo.max_num_steps", "grpo.max_num_epochs", "pool", "storage", "logging", "evaluation", "checkpointing")


class ConfigError(ValueError):
    """A recipe that cannot be run; the message names the key, the value and what to do."""


# pydantic's own words for these would not tell a person what to do.
SAID_PLAINLY = {
    "extra_forbidden": "is not a known key; check its spelling and its section",
    "union_tag_not_found": "needs a `kind` that says which of its forms it is",
}


def load(path: Path, overrides: tuple[str, ...] = ()) -> RunConfig:
    """Read a YAML recipe, apply `dotted.key=value` overrides (values in YAML) and validate. Raise ConfigError."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8"
        raise ConfigError(f"recipe {path} cannot be read ({reason}); give the path of a YAML file") from error
    try:
        values = yaml.safe_load(text) or {}
    except yaml.YAMLError as error:
        raise ConfigError(f"recipe {path} is not YAML: {error}") from error
    if not isinstance(values, dict):
        raise ConfigError(
            f"recipe {path} holds a {type(values).__name__}, not sections; start it with `grpo:` or another section"
        )
    for override in overrides:
        values = overridden(values, override)
    return parse(values, where=str(path))


def overridden(values: dict[str, Any], override: str) -> dict[str, Any]:
    """A copy of `values` in which one `dotted.key=value` is set."""
    key, separator, text = override.partition("=")
    if not separator or not all(key.split(".")):
        raise ConfigError(f"--set {override!r} is not of the form dotted.key=value")
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"--set {override!r}: the value is not YAML: {error}") from error
    head, _, rest = key.partition(".")
    if not rest:
        return {**values, head: value}
    below = values.get(head) or {}
    if not isinstance(below, dict):
        raise ConfigError(f"--set {override!r}: {head} is {below!r}, not a section")
    return {**values, head: overridden(below, f"{rest}={text}")}


def parse(values: dict[str, Any], *, where: str) -> RunConfig:
    """Validate plain values; the first fault becomes one sentence with its key."""
    try:
        return RunConfig.model_validate(values)
    except ValidationError as error:
        faults = error.errors()
        first = faults[0]
        key = ".".join(str(part) for part in first["loc"]) or "recipe"
        more = f" (and {len(faults) - 1} more)" if len(faults) > 1 else ""
        given = first.get("input")
        shown = "" if isinstance(given, dict | BaseModel) else f", got {given!r}"
        reason = SAID_PLAINLY.get(first["type"], first["msg"])
        raise ConfigError(f"{where}: {key}: {reason.removeprefix('Value error, ')}{shown}{more}") from error


def with_changes(config: RunConfig, changes: Mapping[str, Any]) -> RunConfig:
    """The config with some dotted keys set to other plain values, as an attempt's claim records them.

    None takes a key away: it is the default of every key that may be None, and stands for the keys that another kind
    of pool does not have.
    """
    values = config.model_dump(mode="json")
    for key, value in changes.items():
        *sections, name = key.split(".")
        below = values
        for section in sections:
            below = below.setdefault(section, {})
        if value is None:
            below.pop(name, None)
        else:
            below[name] = value
    return RunConfig.model_validate(values)


def leaves(config: RunConfig) -> dict[str, Any]:
    """Dotted key → plain value, for every leaf of a config."""

    def walk(values: Any, prefix: str) -> dict[str, Any]:
        if isinstance(values, dict) and values:
            return {
                key: leaf
                for name, value in values.items()
                for key, leaf in walk(value, f"{prefix}.{name}" if prefix else name).items()
            }
        return {prefix: values}

    return walk(config.model_dump(mode="json"), "")


def changed_keys(before: RunConfig, after: RunConfig) -> list[str]:
    """Dotted keys that differ or that only one of the two has, leaves only."""
    old, new, absent = leaves(before), leaves(after), object()
    return sorted(key for key in old.keys() | new.keys() if old.get(key, absent) != new.get(key, absent))


def continuable(key: str) -> bool:
    """Whether a dotted key may differ when a run is continued."""
    return any(key == allowed or key.startswith(allowed + ".") for allowed in CONTINUABLE)


def digest(config: RunConfig) -> str:
    """Content key of everything that may not change when the run is continued."""
    kept = [(key, value) for key, value in sorted(leaves(config).items()) if not continuable(key)]
    return hashlib.sha256(json.dumps(kept).encode()).hexdigest()
