"""Version 0 of the policy, found or made by a child process, so that the flow itself never loads torch."""

import json
import os
import sys
import tempfile
import time
from pathlib import Path

from flows.control import Control, Stopped
from flows.supervise import Child, Command
from grpo_core.config import RunConfig

POLL_SECONDS = 0.1


class PolicyFailed(RuntimeError):
    """Version 0 could not be found or made; the message shows the process's last lines."""


class PolicyPreparation:
    """The preparation of version 0, running while this context is open.
    `skeleton` comes early, `initial` at its end."""

    def __init__(self, config: RunConfig, logs: Path, control: Control) -> None:
        self._config = config
        self._logs = logs
        self._control = control

    def skeleton(self) -> Path:
        """A directory with the policy's shapes and tokenizer; waits for it. Raise PolicyFailed."""
        return self._wait("skeleton")

    def initial(self) -> Path:
        """The directory with the weights of version 0; waits for it. Raise PolicyFailed."""
        return self._wait("initial")

    def _wait(self, name: str) -> Path:
        while True:
            # Asked before reading: a process that ends right after its last word has still said it.
            ended = self._child.poll() is not None
            state = json.loads(self._state.read_text(encoding="utf-8")) if self._state.exists() else {}
            if name in state:
                return Path(state[name])
            if "refused" in state:
                raise PolicyFailed(state["refused"])
            if ended:
                raise PolicyFailed(f"the policy could not be prepared: {self._child.failure()}")
            if (wish := self._control.wish()) != "run":
                raise Stopped(wish, 0)
            time.sleep(POLL_SECONDS)

    def __enter__(self) -> "PolicyPreparation":
        self._scratch = tempfile.TemporaryDirectory(prefix="forebay-policy-")
        scratch = Path(self._scratch.name)
        self._state = scratch / "state.json"
        config_file = scratch / "config.json"
        config_file.write_text(self._config.model_dump_json(), encoding="utf-8")
        threads = self._config.model.warm_start.threads if self._config.model.warm_start else 1
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": str(threads),
            "HF_HUB_OFFLINE": "1",
            "TOKENIZERS_PARALLELISM": "false",
        }
        python = str(self._config.training.python or sys.executable)
        arguments = [python, "-W", "ignore", "-m", "grpo_core.training.prepare", str(config_file), str(self._state)]
        self._child = Child(Command("policy", arguments, environment, self._logs / "policy.log", grace_seconds=2))
        self._control.watch("prepare-policy", self._child.poll)
        return self

    def __exit__(self, *exception: object) -> None:
        self._child.stop()
        self._scratch.cleanup()
