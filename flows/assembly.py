"""A run put together: store, data, policy, engines, reward workers and the supervisor, and taken apart again.

Invariant: whatever goes wrong, every process started here has ended when `run_to_end` returns or raises. What can be
refused is refused before anything is started.
"""

import asyncio
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path

from flows.control import Control
from flows.engines import Engines
from flows.pipeline import Pipeline
from flows.policy import PolicyPreparation
from flows.run import Run, RunRefused, check_owner, finished_at, open_run, open_store
from flows.sinks.publisher import check_sinks, publisher_of
from grpo_core.config import RunConfig, StreamData
from grpo_core.evaluation import Evaluation, goal_of, read_evaluations
from grpo_core.prompts import Prompts, PromptStream, load_splits
from grpo_core.refit.canary import canary_tokens
from grpo_core.rollout.chat import Chat
from grpo_core.rollout.group import Generator
from grpo_core.rollout.pool import Pool
from grpo_core.rollout.rewards import RewardWorkers
from grpo_core.streaming import StreamedPrompts
from storage.ledger import Totals, newest_footer
from storage.objects import ObjectStore


@dataclass(frozen=True, slots=True)
class Summary:
    """How a run ended; `goal` is the evaluation that ended it, if one did."""

    run_id: str
    steps: int
    trained: int
    dropped: int
    evaluations: tuple[Evaluation, ...]
    goal: Evaluation | None = None

    def text(self) -> str:
        lines = [
            f"run {self.run_id} finished: {self.steps} steps, {self.trained} groups trained, {self.dropped} dropped"
        ]
        if self.goal is not None:
            lines.append(f"version {self.goal.version} reached the goal, evaluation.stop_threshold")
        return "\n".join(lines + [evaluation.line() for evaluation in self.evaluations])


def run_to_end(config: RunConfig, control: Control, *, take_over: bool = False) -> Summary:
    """Run or continue a run. Raise Stopped when asked to stop, and a typed error with one sentence otherwise."""
    check_sinks(config)
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
        router = Pool()
        generator = stack.enter_context(rollout_generator(config, chat, router, rewards))
        run = open_run(config, store, splits, tokenizer_digest=chat.digest(), canary=canary)
        if finished_at(run.config, store, run.window) is not None:
            return summarise(run.config, store)
        engines = stack.enter_context(Engines(config, policy.skeleton(), logs, router, control))
        engines.heed_wishes(store)
        prompts = stack.enter_context(prompt_stream(run))
        publisher = stack.enter_context(publisher_of(config, store, control.warn))
        Pipeline(run, prompts, generator, engines, router, control, logs, publisher).finish(
            policy.initial, after=newest
        )
    return summarise(run.config, store)


@contextmanager
def rollout_generator(config: RunConfig, chat: Chat, router: Pool, rewards: RewardWorkers) -> Iterator[Generator]:
    """What makes rollouts, with its tools and environment. Raise RunRefused when one of them cannot be imported."""
    try:
        generator = Generator(config, chat, router, rewards)
    except ValueError as error:
        raise RunRefused(f"the rollouts of run {config.run_id} cannot be made: {error}") from error
    try:
        yield generator
    finally:
        asyncio.run(generator.close())


def prompt_stream(run: Run) -> AbstractContextManager[Prompts]:
    """The prompts of the run, as long as this context is open."""
    data = run.config.data
    if isinstance(data.source, StreamData):
        return StreamedPrompts(run.store, data, data.source)
    return nullcontext(PromptStream(run.splits.train, seed=data.seed, shuffle=data.shuffle))


def summarise(config: RunConfig, store: ObjectStore) -> Summary:
    """Read how a run ended."""
    footer = newest_footer(store)
    totals = Totals() if footer is None else footer.totals
    steps = 0 if footer is None else footer.step_done
    evaluations = tuple(read_evaluations(store, config))
    dropped = sum(totals.dropped.values())
    return Summary(config.run_id, steps, totals.trained, dropped, evaluations, goal_of(evaluations, config))


def log_directory(config: RunConfig, store: ObjectStore) -> Path:
    """Where child processes log: beside the run if its store is a local directory, else under ./forebay-runs."""
    return (store.local_path("logs") or Path("forebay-runs") / config.run_id / "logs").absolute()
