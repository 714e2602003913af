"""A checkpoint as a Hugging Face directory: `python -m grpo_core.training.export … -o DIRECTORY`.

The result loads with transformers and is served by vLLM; it holds the float32 master weights, adapters merged into
them, and the tokenizer.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import HuggingFaceStorageReader
from transformers import AutoModelForCausalLM, AutoTokenizer

from grpo_core.config import RunConfig
from grpo_core.training.lora import add_adapters, merge_adapters
from storage import layout
from storage.checkpoints import verify
from storage.objects import ObjectStore
from storage.records import read_record

# Where the trainer's module tree holds the language model, see `training.model.Policy` and `training.checkpoint`.
PREFIX = "model.language_model."


def export(store: ObjectStore, attempt: int, step: int, policy: Path, output: Path) -> None:
    """Write the weights of a verified checkpoint, in the shape and with the tokenizer of `policy`, into `output`."""
    verify(store, attempt, step)
    config = RunConfig.model_validate(read_record(store, layout.run())["config"])
    model = AutoModelForCausalLM.from_pretrained(policy, dtype=torch.float32, local_files_only=True)
    if config.model.lora is not None:
        add_adapters(model, config.model.lora, seed=config.seed)
    # What is not trained is that of version 0.
    tensors = {f"{PREFIX}{name}": value.detach() for name, value in model.named_parameters() if value.requires_grad}
    prefix = layout.checkpoint(attempt, step)
    with tempfile.TemporaryDirectory(prefix="forebay-export-") as scratch:
        directory = store.local_path(prefix)
        if directory is None:
            directory = Path(scratch)
            store.download(prefix, directory)
        dcp.load(tensors, storage_reader=HuggingFaceStorageReader(str(directory)), no_dist=True)
    if config.model.lora is not None:
        merge_adapters(model)
    model.save_pretrained(output)
    AutoTokenizer.from_pretrained(policy, local_files_only=True).save_pretrained(output)


def main() -> None:
    """Read the command line and export."""
    parser = argparse.ArgumentParser(prog="python -m grpo_core.training.export", description=__doc__)
    parser.add_argument("--root", required=True, help="root of the run in the store")
    parser.add_argument("--storage-options", default="{}", help="JSON")
    parser.add_argument("--storage-client", default="fsspec")
    parser.add_argument("--attempt", required=True, type=int)
    parser.add_argument("--step", required=True, type=int)
    parser.add_argument("--policy", required=True, type=Path, help="directory of version 0")
    parser.add_argument("-o", "--output", required=True, type=Path)
    arguments = parser.parse_args()
    options, client = json.loads(arguments.storage_options), arguments.storage_client
    store = ObjectStore.open(arguments.root, options, client=client, read_only=True)
    export(store, arguments.attempt, arguments.step, arguments.policy, arguments.output)


if __name__ == "__main__":
    main()
