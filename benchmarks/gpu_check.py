"""What one GPU makes of the trainer's own arithmetic.

    python -m benchmarks.gpu_check [-o FILE] [--tiny] [--seconds N]

Needs torch and transformers, no engine, no weights, no network and no other package. Random models of the shapes of
Qwen3-0.6B and Qwen3-4B take packed training steps at 8k and 32k tokens, with shared prefixes and without; the fused
log-probs are held against the plain way, for time and memory, and both against float64, for their errors.

Prints one table and writes one JSON object: `device`, `torch`, `seconds`, `logprobs` (seconds and peak bytes of both
ways), `errors` (largest difference from float64 over the largest value) and `steps` (tokens per second, model FLOPs
utilisation, peak memory of a step). A case that fails says so in `failed`, and the others go on; the file is written
after every case. What has not ended after `--seconds` is given up: the case at its next Python instruction, the
others before they begin. `--tiny` takes models and rows that a CPU manages in seconds.
"""

from __future__ import annotations

import argparse
import json
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks import gpu_cases
from benchmarks.gpu_cases import FULL, TINY, WAYS, Case, Size

SECONDS = 480.0


class OutOfTime(RuntimeError):
    """The seconds that were given are over."""


@dataclass(slots=True)
class Check:
    """Cases as they are measured, each under its own guard. `ends` is on the monotonic clock."""

    device: torch.device
    ends: float
    output: Path | None
    found: dict[str, Any]

    def run(self, part: str, case: Case, work: Callable[[], Case]) -> None:
        """Add what `work` measures to `case`, or why it did not, and write what there is so far."""
        gpu_cases.free(self.device)
        began = time.monotonic()
        try:
            with alarm(self.ends - began):
                case |= work()
        except Exception as error:  # noqa: BLE001 - whatever a device may raise is the case's result
            case["failed"] = f"{type(error).__name__}: {error}".splitlines()[0]
        self.found["seconds"] += time.monotonic() - began
        self.found[part].append(case)
        if self.output is not None:
            self.output.write_text(json.dumps(self.found, indent=1) + "\n", encoding="utf-8")


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    """Measure everything, write it and return it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-o", "--output", type=Path, help="where to write the JSON; default: standard output")
    parser.add_argument("--tiny", action="store_true", help="small models and rows, for a CPU")
    parser.add_argument("--models", nargs="*", help="only these models")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="when to give up; default: %(default)g")
    chosen = parser.parse_args(arguments)
    size = TINY if chosen.tiny else FULL
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    name = torch.cuda.get_device_name() if device.type == "cuda" else "CPU"
    found = {"device": name, "torch": torch.__version__, "seconds": 0.0, "logprobs": [], "errors": [], "steps": []}
    check = Check(device, time.monotonic() + chosen.seconds, chosen.output, found)
    for sizes in size.logprobs:
        check.run(
            "logprobs", gpu_cases.shape(sizes), lambda sizes=sizes: gpu_cases.time_logprobs(sizes, device, size.repeats)
        )
    for dtype in gpu_cases.dtypes(device):
        case = gpu_cases.shape(size.errors) | {"dtype": str(dtype).removeprefix("torch.")}
        check.run("errors", case, lambda dtype=dtype: gpu_cases.errors_of_logprobs(size.errors, dtype, device))
    for model in chosen.models or size.models:
        check_model(check, model, size)
    print(table(check.found))
    if chosen.output is None:
        print(json.dumps(check.found, indent=1))
    return check.found


@contextmanager
def alarm(seconds: float) -> Iterator[None]:
    """Raise OutOfTime here after so many seconds, or at once where none are left."""

    def ring(*_: object) -> None:
        raise OutOfTime("the time that was given is over")

    if seconds <= 0:
        ring()
    handler, timer = signal.signal(signal.SIGALRM, ring), signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, handler)
        signal.setitimer(signal.ITIMER_REAL, *timer)


def check_model(check: Check, name: str, size: Size) -> None:
    """Steps of one model at every row length, with shared prefixes and without."""
    made: list[gpu_cases.Trainee] = []
    with ExitStack() as stack:

        def measured(tokens: int, share: bool) -> Case:
            if not made:
                stack.enter_context(gpu_cases.alone_in_a_group(check.device))
                made.append(gpu_cases.make_trainee(size.models[name], max(size.rows), check.device))
            return gpu_cases.measure_step(made[0], tokens, share, check.device, size.repeats)

        for tokens in size.rows:
            for share in (False, True):
                case = {"model": name, "row_tokens": tokens, "share_prefixes": share}
                check.run("steps", case, lambda tokens=tokens, share=share: measured(tokens, share))
                if "failed" in case:
                    # What a step leaves behind when it breaks off is nothing to start from.
                    made.clear()


def table(found: dict[str, Any]) -> str:
    """All cases, one a line."""
    lines = [f"{found['device']}, torch {found['torch']}, {found['seconds']:.0f} s"]
    for case in found["logprobs"]:
        name = f"log-probs {case['tokens']} × {case['width']} × {case['vocabulary']}"
        lines += [f"{name:44} {way:6} {_figures(case.get(way, case))}" for way in WAYS]
    for case in found["errors"]:
        name = f"errors {case['tokens']} × {case['width']} × {case['vocabulary']}, {case['dtype']}"
        for way in WAYS:
            errors = "  ".join(f"{key} {value:.1e}" for key, value in case.get(way, {}).items())
            lines.append(f"{name:44} {way:6} {case.get('failed', errors)}")
    for case in found["steps"]:
        name = f"step of {case['model']}, rows of {case['row_tokens']}"
        lines.append(f"{name:44} {'shared' if case['share_prefixes'] else 'apart':6} {_figures(case)}")
    return "\n".join(lines)


def _figures(case: Case) -> str:
    if "failed" in case:
        return str(case["failed"])
    parts = [f"{case['seconds']:8.3f} s"]
    if "tokens_per_second" in case:
        parts.append(f"{case['tokens_per_second']:9.0f} tokens/s")
    if "mfu" in case:
        parts.append(f"MFU {case['mfu']:6.1%}")
    if "peak_bytes" in case:
        parts.append(f"peak {case['peak_bytes'] / 2**30:6.1f} GiB, {case['held_bytes'] / 2**30:5.1f} held before")
    return "  ".join(parts)


if __name__ == "__main__":
    main()
