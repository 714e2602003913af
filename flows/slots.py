"""The place of one engine in the pool, as plain state; processes come and go in it."""

from dataclasses import dataclass
from pathlib import Path

from flows.probe import Look
from flows.supervise import Child
from grpo_core.config import LocalPool, RunConfig
from grpo_core.rollout.launch import EngineSpec
from grpo_core.rollout.load import EngineLoad
from grpo_core.trajectory import Stamp

CPU_KV_CACHE_BYTES = 256 << 20
# vLLM on CPU takes whole pages of 32 tokens; a larger page would never be shared by short prompts.
CPU_KV_BLOCK_TOKENS = 32
# An engine that served for so long before it was lost has its budget of restarts back.
SERVICE_SECONDS = 3600.0
LONGEST_DELAY = 60.0
# Looks in a row at which an external engine that was lost before must answer to be believed, and at which one without a
# version of its own must not answer to be taken for one that is being restarted.
LOOKS_TO_RETURN, LOOKS_AWAY = 3, 3
# What vLLM calls weights that were never updated.
UNSTAMPED = "default"


@dataclass(slots=True)
class Slot:
    """`name` is of the process that is in it now, `lives` counts those before. Times are on the monotonic clock.

    An external slot never has a `child`; a local one has none while its restart is due. `answered` and `missed` count
    the looks in a row that it answered and that it did not. `overdue`: it did not answer in time, and that was said.
    `refused`: why an external engine cannot serve as it was started.
    """

    number: int
    url: str
    name: str
    local: bool = False
    child: Child | None = None
    started_at: float = 0.0
    ready_at: float = 0.0
    heard_at: float = 0.0
    restart_at: float = 0.0
    ready: bool = False
    lives: int = 0
    losses: int = 0
    broken: str | None = None
    stamp: str | None = None
    answered: int = 0
    missed: int = 0
    overdue: bool = False
    refused: str | None = None
    unwanted: bool = False
    load: EngineLoad | None = None
    load_before: EngineLoad | None = None

    @property
    def serves(self) -> bool:
        """Whether it can be given weights and requests."""
        return self.ready and self.broken is None and not self.unwanted

    @property
    def may_serve(self) -> bool:
        """Whether it serves or there is reason to wait for it."""
        faulty = self.broken is not None or self.refused is not None
        return self.serves or self.local or not (faulty or self.unwanted or self.overdue)

    def hear(self, look: Look, now: float) -> None:
        """It answered."""
        self.answered, self.missed = self.answered + 1, 0
        self.heard_at, self.refused = now, None
        if not self.ready and self.returns(now):
            self.ready, self.ready_at = True, now
        self.stamp = look.stamp or self.stamp
        if look.load is not None:
            self.load_before, self.load = self.load, look.load

    def miss(self) -> None:
        """It did not answer a look."""
        self.answered, self.missed = 0, self.missed + 1

    def returns(self, now: float) -> bool:
        """Whether an engine that answers is believed to be back. A local one is another process, and its restart was
        late enough; an external one may be neither."""
        return self.local or is_back(self.losses, answered=self.answered, seconds=now - self.started_at)

    def was_restarted(self, stamp: str | None) -> bool:
        """Whether what answers with this stamp is another process than before, by all that can be known."""
        if stamp == UNSTAMPED and self.stamp not in (None, UNSTAMPED):
            return True
        # One that broke in its first refit had no version that it could have lost.
        return self.broken is not None and self.stamp in (None, UNSTAMPED) and self.missed >= LOOKS_AWAY

    def is_of_another_run(self, attempt: int) -> bool:
        """Whether an external engine that this run has never refitted carries a stamp that the run cannot have left
        there: one of this attempt or of a later one."""
        if self.local or self.lives > 0 or self.stamp in (None, UNSTAMPED):
            return False
        try:
            return Stamp.parse(self.stamp or "").attempt >= attempt
        except ValueError:
            return True

    def losses_by(self, now: float) -> int:
        """Losses that count against its budget."""
        return 0 if self.ready and now - self.ready_at >= SERVICE_SECONDS else self.losses

    def renew(self, url: str, *, losses: int = 0, restart_at: float = 0.0, started_at: float = 0.0) -> None:
        """The next process takes its place, under a name of its own."""
        lives = self.lives + 1
        fresh = Slot(
            self.number,
            url,
            f"engine-{self.number}-{lives}",
            local=self.local,
            started_at=started_at,
            restart_at=restart_at,
            lives=lives,
            losses=losses,
            unwanted=self.unwanted,
        )
        for name in self.__dataclass_fields__:
            setattr(self, name, getattr(fresh, name))


def restart_delay(losses: int) -> float:
    """Seconds before an engine is started again, or believed again, after so many losses in a row: 1, 2, 4, … 60."""
    return min(LONGEST_DELAY, 2.0 ** (losses - 1))


def is_back(losses: int, *, answered: int, seconds: float) -> bool:
    """Whether an engine that nobody here started may serve: at its first answer, but after `losses` only when it has
    `answered` several looks in a row and so many `seconds` have gone by since the last loss that one which comes and
    goes does so ever more rarely. Pure."""
    return losses == 0 or (answered >= LOOKS_TO_RETURN and seconds >= restart_delay(losses))


def engine_spec(config: RunConfig, pool: LocalPool, policy: Path, number: int, port: int) -> EngineSpec:
    """What to start for engine `number`. Pure."""
    on_cpu = pool.device == "cpu"
    return EngineSpec(
        model=str(policy),
        host=pool.host,
        port=port,
        device=pool.device,
        dtype=config.model.dtype,
        # Engines with one seed would draw the same noise for requests without their own.
        seed=1000 * config.seed + number,
        max_model_len=config.model.context_length,
        max_num_seqs=pool.max_num_seqs,
        max_num_batched_tokens=max(pool.max_num_batched_tokens, config.model.context_length),
        tensor_parallel_size=pool.tensor_parallel_size,
        transfer=config.refit.backend,
        lora_rank=config.model.lora.rank if config.model.lora is not None and config.refit.adapter_only else None,
        block_size=CPU_KV_BLOCK_TOKENS if on_cpu else None,
        kv_cache_bytes=pool.kv_cache_bytes or (CPU_KV_CACHE_BYTES if on_cpu else None),
        gpu_memory_utilization=None if on_cpu else pool.gpu_memory_utilization,
        gpus=pool.gpus[number] if pool.gpus else (),
        enforce_eager=pool.enforce_eager,
        extra_arguments=pool.extra_arguments,
        extra_environment=(("OMP_NUM_THREADS", str(pool.threads)), ("HF_HUB_OFFLINE", "1")) if on_cpu else (),
    )
