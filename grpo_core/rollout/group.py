"""From one prompt to one whole, scored group, as rows of a shard.

Invariants: token ids go in and out, what was generated is never tokenized again; every request has a seed derived from
(run seed, ordinal, rollout, turn). Siblings with the same prompt share their first turn as one request, for whose
answers the engine derives seeds of its own; one of them that cannot be believed is asked for again alone, and no
sibling waits for it. A rollout that fails is tried again within its budget; when one fails for good the whole group
becomes a tombstone, one row with status `failed` and the cause, never a zero reward, unless
generation.min_group_members lets the survivors be a group of their own. That no engine is to be had is not the prompt's
fault: NoEngine goes to the caller, who gives the prompt back.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from grpo_core.config import ENVIRONMENT_SOURCE, NoEnvironment, RunConfig
from grpo_core.rollout.chat import Chat, ChatError
from grpo_core.rollout.concurrency import together
from grpo_core.rollout.conversation import Conversation
from grpo_core.rollout.effort import Effort
from grpo_core.rollout.episodes import EnvironmentFailed, Episodes, open_episodes
from grpo_core.rollout.first_turns import FirstTurns
from grpo_core.rollout.pool import Pool
from grpo_core.rollout.rewards import RewardError, RewardWorkers, Scores, with_source
from grpo_core.rollout.rows import group_rows, tombstone_row
from grpo_core.rollout.tools import Toolbox
from grpo_core.rollout.turns import Request, RolloutFailed, Task, TurnAborted, TurnDiscarded, Turns
from grpo_core.seeds import derived_seed
from grpo_core.trajectory import Prompt, Rollout, Stamp, Turn


@dataclass(frozen=True, slots=True)
class Generator:
    """What is needed to turn prompts into groups. Shared by all leases of a process. Raises ValueError for tools or an
    environment that cannot be imported."""

    config: RunConfig
    chat: Chat
    pool: Pool
    rewards: RewardWorkers
    turns: Turns = field(init=False)
    toolbox: Toolbox = field(init=False)
    episodes: Episodes | None = field(init=False)

    def __post_init__(self) -> None:
        toolbox, episodes = check_rollouts(self.config)
        object.__setattr__(self, "turns", Turns(self.config, self.chat, self.pool))
        object.__setattr__(self, "toolbox", toolbox)
        object.__setattr__(self, "episodes", episodes)

    async def group(
        self, prompt: Prompt, session: aiohttp.ClientSession, *, attempt: int, lease: int
    ) -> list[dict[str, Any]]:
        """The rows of one group, scored, or its tombstone. Raise NoEngine."""
        config, size = self.config, self.config.grpo.num_generations_per_prompt
        # With the lease: requests of one that expired may still be in flight when its ordinals are leased again.
        name = f"{config.run_id}-{attempt}-{lease}-{prompt.ordinal}"
        task = Task(prompt, session, name, (config.seed, prompt.ordinal), config.sampling.temperature)
        survivors: list[Rollout] = []
        try:
            outcomes = await self.rollouts(task, size)
            survivors += [outcome for outcome in outcomes if isinstance(outcome, Rollout)]
            failures = [outcome for outcome in outcomes if isinstance(outcome, RolloutFailed)]
            note = f"{len(failures)} of {size} rollouts failed, the first with: {failures[0]}" if failures else None
            if len(survivors) < (config.generation.min_group_members or size):
                raise RolloutFailed(note)
            scores = await self.score(prompt, survivors)
        except (EnvironmentFailed, RolloutFailed, RewardError) as error:
            task.effort.discarded_tokens += sum(_tokens(rollout.turns) for rollout in survivors)
            return self.tombstone(prompt, f"{type(error).__name__}: {error}", task.effort)
        return group_rows(config, prompt, survivors, scores, task.effort, note=note)

    def tombstone(self, prompt: Prompt, cause: str, effort: Effort | None = None) -> list[dict[str, Any]]:
        """The one row of a group that failed for good, and what it had cost by then."""
        return [tombstone_row(self.config, prompt, cause, effort or Effort())]

    async def rollouts(self, task: Task, count: int) -> list[Rollout | RolloutFailed]:
        """`count` rollouts of one prompt, each or why it failed for good. Raise NoEngine, or EnvironmentFailed when
        there is no room for them."""

        async def ask(ids: Sequence[int], n: int, number: int) -> Sequence[Turn | TurnDiscarded]:
            name, seed = f"{task.name}-{number}", derived_seed(*task.seeds, number)
            return await self.turns.ask(task, Request(name, ids, n, seed, self._budget(ids), (task.name,)))

        async with AsyncExitStack() as stack:
            if self.episodes is not None:
                seconds = self.config.generation.lease_timeout_seconds
                await stack.enter_async_context(self.episodes.places(count, deadline_seconds=seconds))
            first = FirstTurns(count, ask)
            stack.push_async_callback(first.close)
            return await together(self._rollout(task, index, first) for index in range(count))

    async def score(self, prompt: Prompt, rollouts: Sequence[Rollout]) -> Scores:
        """The rewards of rollouts of one prompt, in their order. Raise RewardError."""
        scores = await asyncio.wrap_future(
            self.rewards.submit(
                prompts=[rollout.messages[: rollout.opening_messages] for rollout in rollouts],
                completions=[rollout.messages[rollout.opening_messages :] for rollout in rollouts],
                completion_ids=[[token for turn in rollout.turns for token in turn.output_ids] for rollout in rollouts],
                columns={name: [value] * len(rollouts) for name, value in prompt.columns.items()},
            )
        )
        environment = self.config.environment
        if isinstance(environment, NoEnvironment):
            return scores
        values = [rollout.environment_reward for rollout in rollouts]
        return with_source(scores, ENVIRONMENT_SOURCE, values, environment.reward_weight)

    async def close(self) -> None:
        """Close the instances of the environment."""
        if self.episodes is not None:
            await self.episodes.close()

    async def _rollout(self, task: Task, index: int, first: FirstTurns) -> Rollout | RolloutFailed:
        """One rollout, tried again within its budget when its environment fails or it was cut off from outside."""
        most = self.config.generation.max_rollout_attempts
        for tried in range(1, most + 1):
            try:
                return await self._once(task, index, tried, first if tried == 1 else None)
            except (RolloutFailed, ChatError) as error:
                return RolloutFailed(f"{type(error).__name__}: {error}" if isinstance(error, ChatError) else str(error))
            except (EnvironmentFailed, TurnAborted) as error:
                cause = error
        return RolloutFailed(f"{most} attempts failed, the last with: {cause}")

    async def _once(self, task: Task, index: int, tried: int, first: FirstTurns | None) -> Rollout:
        """Try number `tried` at a rollout. `first` is where it meets its siblings; without it, it goes alone."""
        async with AsyncExitStack() as stack:
            try:
                conversation = await self._begun(task, stack)
            except BaseException:
                if first is not None:
                    first.give_up()
                raise
            try:
                while conversation.finish_reason is None:
                    place = (index, len(conversation.turns), tried)
                    if first is not None and not conversation.turns:
                        turn = await self._with_siblings(task, conversation, place, first)
                    else:
                        turn = await self._alone(task, conversation, place)
                    await conversation.take(turn)
                episode = conversation.episode
                reward = await episode.reward() if episode is not None else None
            except (RolloutFailed, ChatError, EnvironmentFailed, TurnAborted):
                task.effort.discarded_tokens += _tokens(conversation.turns)
                raise
            return conversation.rollout(index, reward)

    async def _begun(self, task: Task, stack: AsyncExitStack) -> Conversation:
        if self.episodes is None:
            return Conversation.begin(self.config, self.chat, self.toolbox, task.prompt.messages)
        episode = await stack.enter_async_context(self.episodes.episode())
        columns = {**task.prompt.columns, "prompt": task.prompt.messages}
        # The same for all siblings, so that they are given the same task.
        opening = await episode.reset(columns, derived_seed(*task.seeds) % 2**31)
        return Conversation.begin(self.config, self.chat, self.toolbox, task.prompt.messages, episode, opening)

    async def _with_siblings(
        self, task: Task, conversation: Conversation, place: tuple[int, int, int], first: FirstTurns
    ) -> Turn:
        """The first turn, asked for together with those of the siblings."""
        try:
            return await first.turn(conversation.prompt.ids)
        except TurnDiscarded as discarded:
            return await self._alone(task, conversation, place, discarded)

    async def _alone(
        self,
        task: Task,
        conversation: Conversation,
        place: tuple[int, int, int],
        discarded: TurnDiscarded | None = None,
    ) -> Turn:
        """The next turn of one rollout, instead of one that was `discarded`. `place`: rollout, turn, try."""
        index, number, tried = place
        began = conversation.turns[0].spans[0] if conversation.turns else None
        ids = conversation.prompt.ids
        request = Request(
            f"{task.name}-{index}.{number}.{tried}",
            ids,
            1,
            derived_seed(*task.seeds, *place),
            # A conversation ends when there is no room for a further turn, but not before its first.
            conversation.budget if conversation.turns else self._budget(ids),
            (f"{task.name}-{index}", task.name),
            None if began is None else Stamp(began.attempt, began.version),
        )
        (turn,) = await self.turns.ask(task, request, discarded)
        assert isinstance(turn, Turn)  # of one answer alone, `ask` raises why it is none
        return turn

    def _budget(self, ids: Sequence[int]) -> int:
        """Tokens that the first answer to a prompt may have. Raise RolloutFailed when there is no room for one."""
        generation, context = self.config.generation, self.config.model.context_length
        whole = generation.max_rollout_length or generation.max_completion_length
        budget = min(generation.max_completion_length, whole, context - len(ids))
        if budget < 1:
            raise RolloutFailed(
                f"the prompt has {len(ids)} tokens and leaves no room in model.context_length={context}; shorten it"
            )
        return budget


def _tokens(turns: Iterable[Turn]) -> int:
    return sum(len(turn.output_ids) for turn in turns)


def check_rollouts(config: RunConfig) -> tuple[Toolbox, Episodes | None]:
    """The tools and the environment of a run. Raise ValueError, naming the one that cannot be imported."""
    toolbox = Toolbox.of(config.generation.tools, timeout_seconds=config.generation.tool_timeout_seconds)
    return toolbox, open_episodes(config.environment)
