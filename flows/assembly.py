"""A run put together: store, data, policy, engines, reward workers and the supervisor, and taken apart again.

Invariant: whatever goes wrong, every process started here has ended when `run_to_end` returns or raises. What can be
refused is refused before anything is started.
"""

from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from flows.control import Control
from flows.engines import Engines
from flows.evaluate import Evaluation, read_evaluations
from flows.pipeline import Pipeline
from flows.policy import PolicyPreparation
from flows.run import check_owner, is_finished, open_run, open_store
from grpo_core.config import RunConfig
from grpo_core.prompts import load_splits
from grpo_core.refit.canary import canary_tokens
from grpo_core.rollout.chat import Chat
from grpo_core.rollout.pool import Pool
from grpo_core.rollout.rewards import RewardWorkers
from storage.ledger import newest_footer
from storage.objects import ObjectStore


@dataclass(frozen=True, slots=True)
class Summary:
    """How a run ended."""

    run_id: str
    steps: int
    trained: int
    dropped: int
    evaluations: tuple[Evaluation, ...]

    def text(self) -> str:
        lines = [
            f"run {self.run_id} finished: {self.steps} steps, {self.trained} groups trained, {self.dropped} dropped"
        ]
        return "\n".join(lines + [evaluation.line() for evaluation in self.evaluations])


def run_to_end(config: RunConfig, control: Control, *, take_over: bool = False) -> Summary:
    """Run or continue a run. Raise Stopped when asked to stop, and a typed error with one sentence otherwise."""
    store = open_store(config)
    newest = check_owner(store, take_over=take_over)
    splits = load_splits(config.data)
    logs = log_directory(config, store)
    with ExitStack() as stack:
        policy = stack.enter_context(PolicyPreparation(config, logs, control))
        rewards = stack.enter_context(RewardWorkers(config.rewards))
        chat = Chat(policy.skeleton(), config.generation.chat_template_kwargs)
        canary = canary_tokens((chat.render(row.messages) for row in splits.train), config.model.context_length)
        # Before the run is recorded, because a recorded run could not be continued with another function.
        rewards.check()
        run = open_run(config, store, splits, tokenizer_digest=chat.digest(), canary=canary)
        if is_finished(run.config, run.store, run.steps):
            return summarise(run.config, store, run.steps)
        router = Pool()
        engines = stack.enter_context(Engines(config, policy.skeleton(), logs, router, control))
        engines.heed_wishes(store)
        Pipeline(run, chat, engines, router, rewards, control, logs).finish(policy.initial, after=newest)
    return summarise(run.config, store, run.steps)


def summarise(config: RunConfig, store: ObjectStore, steps: int) -> Summary:
    """Read how a run ended."""
    footer = newest_footer(store)
    trained = footer.totals.trained if footer is not None else 0
    dropped = sum(footer.totals.dropped.values()) if footer is not None else 0
    return Summary(config.run_id, steps, trained, dropped, tuple(read_evaluations(store)))


def log_directory(config: RunConfig, store: ObjectStore) -> Path:
    """Where child processes log: beside the run if its store is a local directory, else under ./forebay-runs."""
    return (store.local_path("logs") or Path("forebay-runs") / config.run_id / "logs").absolute()
