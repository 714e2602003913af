"""The live view of a run in the terminal; plain lines where there is no terminal."""

import sys
import time
from types import TracebackType

from rich.console import Console, Group
from rich.live import Live
from rich.markup import escape
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table

from flows.progress import Progress

SPARK = "▁▂▃▄▅▆▇█"
LINE_SECONDS = 10.0


class LiveView:
    """Shows progress while it is open. `say` prints above the view and stays."""

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console(stderr=True)
        self._live = Live(console=self._console, auto_refresh=False, transient=False)
        self._printed = 0.0
        self._phase = ""

    def show(self, progress: Progress) -> None:
        """Replace the view, or print a line now and then."""
        if self._console.is_terminal:
            self._live.update(render(progress), refresh=True)
        elif progress.phase != self._phase or time.monotonic() - self._printed > LINE_SECONDS:
            self._printed, self._phase = time.monotonic(), progress.phase
            print(line(progress), file=sys.stderr, flush=True)

    def say(self, message: str) -> None:
        """A message that stays on the screen."""
        self._console.print(escape(message), highlight=False, soft_wrap=True)

    def __enter__(self) -> "LiveView":
        if self._console.is_terminal:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._live.stop()


def render(progress: Progress) -> Panel:
    """The view of one moment."""
    numbers = Table.grid(padding=(0, 3))
    for _ in range(4):
        numbers.add_column()
    numbers.add_row("reward", _number(progress.reward), "tokens/s", f"{progress.tokens_per_second:,.0f}")
    numbers.add_row(
        "lag mean / max",
        f"{progress.lag_mean:.2f} / {progress.lag_max}",
        "trainer busy",
        f"{progress.trainer_utilisation:.0%}",
    )
    numbers.add_row("groups in flight", str(progress.in_flight), "engines busy", f"{progress.engine_utilisation:.0%}")
    numbers.add_row("groups buffered", str(progress.buffered), "left", clock(progress.eta_seconds))
    bar = Table.grid(padding=(0, 2))
    bar.add_row(
        f"step {progress.step}/{progress.steps}",
        ProgressBar(total=progress.steps, completed=progress.step, width=40),
        clock(progress.elapsed_seconds),
    )
    rewards = [value for entry in progress.history if (value := entry.get("reward_mean")) is not None]
    title = f"forebay · {escape(progress.run_id)} · {progress.phase} · attempt {progress.attempt} · version {progress.version}"
    held_out = [progress.evaluation.line()] if progress.evaluation is not None else []
    return Panel(
        Group(bar, numbers, f"reward {spark(rewards)}", *held_out), title=title, title_align="left", expand=False
    )


def line(progress: Progress) -> str:
    """The view in one line, for logs."""
    return (
        f"{progress.run_id} {progress.phase}: step {progress.step}/{progress.steps}, reward {_number(progress.reward)}, "
        f"lag {progress.lag_mean:.2f}/{progress.lag_max}, {progress.tokens_per_second:.0f} tokens/s, trainer {progress.trainer_utilisation:.0%}, "
        f"engines {progress.engine_utilisation:.0%}, left {clock(progress.eta_seconds)}"
    )


def spark(values: list[float]) -> str:
    """A curve of a few characters."""
    if not values:
        return ""
    low, high = min(values), max(values)
    return "".join(SPARK[int((value - low) / (high - low) * (len(SPARK) - 1)) if high > low else 0] for value in values)


def clock(seconds: float | None) -> str:
    """Seconds as h:mm:ss or m:ss."""
    if seconds is None:
        return "–"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.3f}"
