"""What a version of the policy scored on the held-out split, from the stored completions of its evaluation.

Contract: figures are computed from the stored rewards whenever they are asked for, so another threshold needs no new
completions. An evaluation counts only in the living history: its attempt made its version, or its version is 0, which
is the same in every attempt. `due` is the first of the due versions that it serves (see `schedule.agenda`), which is
older than its own where that passed before it could be evaluated; None where none was due.

An evaluation is keyed by the version that was live when it began. Engines move on while it runs, and its requests move
with them: waiting for them would hold training up, and to leave out those that crossed a refit would leave out the long
ones. So the figures are those of all completions, and `purity` says which share of the tokens the version sampled.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from statistics import median_low
from typing import Any

import pyarrow as pa

from grpo_core.config import RunConfig
from grpo_core.metrics import EVALUATION_PREFIX
from storage import layout, schema
from storage.attempts import Link, living_chain
from storage.checkpoints import Manifest
from storage.layout import EvaluationName
from storage.objects import PARALLEL_REQUESTS, ObjectStore

# What the figures are made of; a file written before a column existed lacks it.
COLUMNS = ("due_version", "dataset_index", "mode", "reward", "tokens", "version_tokens")


@dataclass(frozen=True, slots=True)
class Score:
    """The mean over `samples` completions, or over prompts for pass@k; `error` is the standard error of the mean."""

    mean: float
    error: float
    samples: int

    @property
    def interval(self) -> float:
        """Half the width of the 95 % interval."""
        return 1.96 * self.error


@dataclass(frozen=True, slots=True)
class Evaluation:
    """The scores of one version by metric: `sampled`, `greedy`, `pass@1`, `pass@2`, … `step` made the version, `tokens`
    is the mean of a completion, `seconds` the time it took. `unscored_prompts` have a completion without a reward."""

    attempt: int
    version: int
    step: int
    scores: Mapping[str, Score]
    purity: float | None = None
    tokens: float | None = None
    seconds: float | None = None
    due: int | None = None
    unscored_prompts: int = 0

    def line(self) -> str:
        """The scores in one line for people, each with half its 95 % interval and what it is the mean of."""
        parts = [
            f"{metric} {score.mean:.3f} ± {score.interval:.3f} ({score.samples})"
            for metric, score in self.scores.items()
        ]
        due = "" if self.due in (None, self.version) else f", due at version {self.due}"
        notes = ""
        if self.purity is not None and self.purity < 1:
            notes += f"; {self.purity:.0%} of its tokens are of this version"
        if self.unscored_prompts:
            notes += f"; {self.unscored_prompts} of its prompts have completions without a score"
        scores = ", ".join(parts) or "no completion could be scored"
        return f"held-out reward of version {self.version} (step {self.step}{due}): {scores}{notes}"

    def metrics(self) -> dict[str, float]:
        """What is known of it, by the names of the registry."""
        means = {f"evaluation/{metric}": score.mean for metric, score in self.scores.items()}
        errors = {f"evaluation_error/{metric}": score.error for metric, score in self.scores.items()}
        whole = {
            "evaluation_tokens_mean": self.tokens,
            "evaluation_purity": self.purity,
            "evaluation_seconds": self.seconds,
        }
        return means | errors | {name: value for name, value in whole.items() if value is not None}


def pass_at_k(samples: int, correct: int, k: int) -> float:
    """The chance that at least one of `k` completions is right, estimated without bias from `samples` of which
    `correct` are (Chen et al. 2021, equation 1): 1 − C(n − c, k) / C(n, k).
    Raise ValueError unless 1 ≤ k ≤ n, 0 ≤ c ≤ n."""
    if not (1 <= k <= samples and 0 <= correct <= samples):
        raise ValueError(
            f"pass@{k} of {correct} right among {samples} is not defined: it needs 1 ≤ k ≤ n and 0 ≤ c ≤ n"
        )
    return 1.0 - math.comb(samples - correct, k) / math.comb(samples, k)


def scores_of(records: Iterable[Mapping[str, Any]], *, pass_threshold: float) -> dict[str, Score]:
    """The scores by metric of an evaluation's records; those without a reward enter none.

    pass@k is given for k = 1, 2, 4, … up to what half of the prompts have; it is the mean over those with at least k.
    """
    rewards: dict[str, dict[int, list[float]]] = {"sampled": {}, "greedy": {}}
    for record in records:
        if record["reward"] is not None:
            rewards[record["mode"]].setdefault(record["dataset_index"], []).append(record["reward"])
    scores = {
        mode: _mean([value for each in found.values() for value in each]) for mode, found in rewards.items() if found
    }
    counts = [
        (len(values), sum(_reaches(value, pass_threshold) for value in values))
        for values in rewards["sampled"].values()
    ]
    most, k = median_low(total for total, _ in counts) if counts else 0, 1
    while k <= most:
        scores[f"pass@{k}"] = _mean([pass_at_k(total, correct, k) for total, correct in counts if total >= k])
        k *= 2
    return scores


def purity_of(records: Iterable[Mapping[str, Any]]) -> float | None:
    """The share of the tokens that the evaluated version itself sampled; None where no record says."""
    known = [
        (record["tokens"], record["version_tokens"]) for record in records if record.get("version_tokens") is not None
    ]
    tokens = sum(total for total, _ in known)
    return sum(own for _, own in known) / tokens if tokens else None


def living_evaluations(store: ObjectStore, chain: Sequence[Link], *, every_steps: int) -> list[EvaluationName]:
    """The evaluations of the history `chain` by version, the newest attempt's of each; of the held-out split alone."""
    parsed = (layout.parse_evaluation(key) for key in store.list(layout.evaluations_prefix(), recursive=True))
    found = [name for name in parsed if name is not None and name.name is None]
    living = [n for n in found if n.version == 0 or _contains(chain, n.attempt, n.version * every_steps)]
    newest = {name.version: name for name in sorted(living, key=lambda name: name.attempt)}
    return [newest[version] for version in sorted(newest)]


def read_evaluation(store: ObjectStore, name: EvaluationName, config: RunConfig) -> Evaluation:
    """Raise ObjectMissing or DamagedShard."""
    key = layout.evaluation(name.attempt, name.version, name.name)
    table, written = schema.decode(store.get(key), name=key)
    seconds = float(written["seconds"]) if "seconds" in written else None
    return evaluation_of(table, config, attempt=name.attempt, version=name.version, seconds=seconds)


def evaluation_of(
    table: pa.Table, config: RunConfig, *, attempt: int, version: int, seconds: float | None
) -> Evaluation:
    """The evaluation whose records, as they are stored, `table` holds, and which took so many seconds."""
    records = table.select([column for column in COLUMNS if column in table.column_names]).to_pylist()
    scores = scores_of(records, pass_threshold=config.evaluation.pass_threshold)
    # One that could not be made has no token.
    lengths = [record["tokens"] for record in records if record["tokens"]]
    return Evaluation(
        attempt,
        version,
        version * config.refit.every_steps,
        scores,
        purity=purity_of(records),
        tokens=math.fsum(lengths) / len(lengths) if lengths else None,
        seconds=seconds,
        due=next((record.get("due_version") for record in records), None),
        unscored_prompts=len({record["dataset_index"] for record in records if record["reward"] is None}),
    )


def read_evaluations(
    store: ObjectStore, config: RunConfig, names: Sequence[EvaluationName] | None = None
) -> list[Evaluation]:
    """These evaluations, by default all of the living history, by version."""
    if names is None:
        names = living_evaluations(store, living_chain(store), every_steps=config.refit.every_steps)
    with ThreadPoolExecutor(PARALLEL_REQUESTS) as readers:
        return list(readers.map(lambda name: read_evaluation(store, name, config), names))


def goal_of(evaluations: Iterable[Evaluation], config: RunConfig) -> Evaluation | None:
    """The first evaluation that reached evaluation.stop_threshold. Version 0 ends no run: nothing has been trained."""
    metric, threshold = config.evaluation.stop_metric, config.evaluation.stop_threshold
    if metric is None or threshold is None:
        return None
    return next(
        (e for e in evaluations if e.version > 0 and metric in e.scores and _reaches(e.scores[metric].mean, threshold)),
        None,
    )


def goal_reached(store: ObjectStore, config: RunConfig) -> Evaluation | None:
    """The evaluation of the living history with which the run reached its goal."""
    return None if config.evaluation.stop_metric is None else goal_of(read_evaluations(store, config), config)


def with_evaluation_metric(store: ObjectStore, manifests: Sequence[Manifest], config: RunConfig) -> list[Manifest]:
    """`manifests` with checkpointing.metric_name among their metrics if it names a metric of evaluations: the newest
    evaluation at or before the step says it. A checkpoint off the living history has none,
    nor has one before the first.

    Reads one evaluation for each checkpoint at most, whatever the length of the run.
    """
    metric = config.checkpointing.metric_name
    if not metric.startswith(EVALUATION_PREFIX):
        return list(manifests)
    every, chain = config.refit.every_steps, living_chain(store)
    names = living_evaluations(store, chain, every_steps=every)
    living = [manifest for manifest in manifests if _contains(chain, manifest.attempt, manifest.step)]
    last = {m.name: max((n.version for n in names if n.version * every <= m.step), default=None) for m in living}
    wanted = [name for name in names if name.version in last.values()]
    found = {evaluation.version: evaluation for evaluation in read_evaluations(store, config, wanted)}

    def ranked(manifest: Manifest) -> Manifest:
        version = last.get(manifest.name)
        score = None if version is None else found[version].scores.get(metric.removeprefix(EVALUATION_PREFIX))
        return manifest if score is None else replace(manifest, metrics={**manifest.metrics, metric: score.mean})

    return [ranked(manifest) for manifest in manifests]


def _reaches(value: float, threshold: float) -> bool:
    """Rewards are stored in single precision, so a reward of 0.7 is a little less than a threshold of 0.7."""
    return value >= threshold or math.isclose(value, threshold, rel_tol=1e-6)


def _contains(chain: Iterable[Link], attempt: int, step: int) -> bool:
    return any(link.contains(attempt, step) for link in chain)


def _mean(values: Sequence[float]) -> Score:
    mean = math.fsum(values) / len(values)
    variance = math.fsum((value - mean) ** 2 for value in values) / max(1, len(values) - 1)
    return Score(mean, math.sqrt(variance / len(values)), len(values))
