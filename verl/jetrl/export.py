"""Writes a checkpoint of a run as an ordinary Hugging Face model: BF16, or the FP8 bytes that the rollout used.

    python -m verl.jetrl.export runs/tiny/jetrl/checkpoints/global_step_10 exported --format fp8

==========  ==========================================================================================================
format      tensors
==========  ==========================================================================================================
``bf16``    every parameter, the FP32 master rounded
``fp8``     ``*_proj.weight`` float8_e4m3fn (N, K) with ``*_proj.weight_scale_inv`` float32 (N/128, K/128), rounded up;
            the rest in BF16.  The bytes of the weight arena: what trainer and rollout computed with
==========  ==========================================================================================================

The output appears under its name when it is whole.  Without a GPU it takes longer and gives the same bytes.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import split_torch_state_dict_into_shards
from safetensors.torch import save_file
from torch import Tensor
from tqdm import tqdm
from transformers import AutoConfig, PretrainedConfig

from verl.jetrl import checkpoints
from verl.jetrl.arena import SCALE, Layout, layout_of
from verl.jetrl.checkpoints import CheckpointError
from verl.jetrl.fp8 import ops
from verl.jetrl.fp8.format import BLOCK, FP8, groups
from verl.jetrl.precision import SUPPORTED_MODELS

FORMATS = ("bf16", "fp8")
HEAD = "lm_head.weight"
# As vLLM and transformers read it; vLLM makes a layer of its own of the head, transformers needs it named.
QUANTIZATION = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "activation_scheme": "dynamic",
    "weight_block_size": [BLOCK, BLOCK],
    "modules_to_not_convert": ["lm_head"],
}
WEIGHT_FILES = (".safetensors", ".bin", ".safetensors.index.json", ".bin.index.json")

Make = Callable[[str], dict[str, Tensor]]


def export(checkpoint: Path, out: Path, format: str, max_shard_size: int | str = "5GB") -> None:
    """Writes the model of ``checkpoint`` (``global_step_N`` or its ``actor`` folder) to the new folder ``out``.

    Raises :class:`verl.jetrl.checkpoints.CheckpointError` for a checkpoint that is not whole, not of a full fine-tuning, or
    (``fp8``) not of a model that the fork knows, for an ``out`` that holds something already, and for a size that is none.
    """
    try:
        split_torch_state_dict_into_shards({}, max_shard_size=max_shard_size)
    except ValueError as error:
        raise CheckpointError(f"--max-shard-size {max_shard_size}: {error}") from error
    checkpoints.require_whole(checkpoint)
    actor = checkpoint / "actor" if (checkpoint / "actor").is_dir() else checkpoint
    if out.exists() and not (out.is_dir() and not any(out.iterdir())):
        raise CheckpointError(f"{out} exists already: name a new folder, or remove it")
    shards = checkpoints.load_shards(actor, "model")
    if not (actor / "huggingface" / "config.json").is_file():
        raise CheckpointError(f"{actor} has no huggingface/config.json")
    config = AutoConfig.from_pretrained(actor / "huggingface")
    tensors, make = plan(shards, config, format)

    partial = out.with_name(out.name + ".partial")
    if partial.exists():
        shutil.rmtree(partial)  # of an export that was killed
    shutil.copytree(actor / "huggingface", partial, ignore=_weights)
    _write_config(partial / "config.json", format)
    _write_tensors(partial, tensors, make, max_shard_size)
    os.replace(partial, out)


def plan(shards: list[dict[str, Tensor]], config: PretrainedConfig, format: str) -> tuple[dict[str, Tensor], Make]:
    """What will be written: every tensor's shape and dtype (on the meta device), and a function that makes the tensors of a
    parameter: BF16 (N, K) or (N,), or FP8 bytes (N, K) and FP32 scales."""
    names = sorted(shards[0])
    if any("lora_" in name for name in names):
        raise CheckpointError("the checkpoint has LoRA adapters: merge it with python -m verl.model_merger")
    if config.tie_word_embeddings:
        names = [name for name in names if name != HEAD]
    quantized = _quantized(config, names) if format == "fp8" else set()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    tensors: dict[str, Tensor] = {}
    for name in names:
        shape, dtype = shards[0][name].shape, FP8 if name in quantized else torch.bfloat16
        tensors[name] = torch.empty(shape, dtype=dtype, device="meta")
        if name in quantized:
            tensors[_scale(name)] = torch.empty([groups(n) for n in shape], dtype=torch.float32, device="meta")

    def make(name: str) -> dict[str, Tensor]:
        weight = checkpoints.rows([shard[name] for shard in shards], dtype=torch.bfloat16)
        if name not in quantized:
            return {name: weight}
        q, s = ops.quantize_blocks(weight.to(device))
        return {name: q.cpu(), _scale(name): s.cpu()}

    return tensors, make


def _scale(weight: str) -> str:
    return f"{weight.removesuffix('.weight')}.{SCALE}"


def _quantized(config: PretrainedConfig, names: list[str]) -> set[str]:
    """The parameters that the arena holds in FP8."""
    if config.model_type not in SUPPORTED_MODELS:
        raise CheckpointError(f"--format fp8: model_type {config.model_type!r} is not one of {', '.join(SUPPORTED_MODELS)}")
    layout: Layout = layout_of(config)
    expected = {part for entry in layout.weights for part, _ in entry.parts}
    if expected != set(names):
        raise CheckpointError(f"the checkpoint's parameters are not the model's: {sorted(expected ^ set(names))}")
    _warn(layout)
    return {part for e in layout.entries if e.dtype == FP8 for part, _ in e.parts}


def _warn(layout: Layout) -> None:
    """Says which readers do not take the model; the bytes are as defined in any case."""
    linears = [e for e in layout.entries if e.dtype == FP8]
    ragged = sorted(part for e in linears for part, n in e.parts if n % BLOCK or e.shape[1] % BLOCK)
    fused = sorted(part for e in linears for part, n in e.parts[:-1] if n % BLOCK)
    if ragged:
        print(
            f"warning: {len(ragged)} weights, {ragged[0]} first, have sizes that are no multiples of {BLOCK}: transformers "
            "without a GPU misreads their scales" + (f"; so does vLLM those of {fused[0]}, which it fuses" if fused else ""),
            file=sys.stderr,
        )


def _weights(folder: str, names: list[str]) -> list[str]:
    return [name for name in names if name.endswith(WEIGHT_FILES)]


def _write_config(path: Path, format: str) -> None:
    config: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    config.pop("torch_dtype", None)
    config["dtype"] = "bfloat16"
    if format == "fp8":
        config["quantization_config"] = QUANTIZATION
    path.write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _write_tensors(folder: Path, tensors: dict[str, Tensor], make: Make, max_shard_size: int | str) -> None:
    """Writes safetensors files, one after the other; a file's tensors are in memory, and a few more."""
    split = split_torch_state_dict_into_shards(tensors, max_shard_size=max_shard_size)
    made: dict[str, Tensor] = {}
    with tqdm(total=sum(t.nbytes for t in tensors.values()), desc="exporting", unit="B", unit_scale=True) as bar:
        for file, names in split.filename_to_tensors.items():
            for name in names:
                if name not in made:  # scales are made with their weights, which come first
                    made |= make(name)
                bar.update(made[name].nbytes)
            save_file({name: made.pop(name).contiguous() for name in names}, folder / file, metadata={"format": "pt"})
    if split.is_sharded:
        index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m verl.jetrl.export", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("checkpoint", type=Path, help="a global_step_N folder, or its actor folder")
    parser.add_argument("out", type=Path, help="folder to make; must not exist, or be empty")
    parser.add_argument("--format", choices=FORMATS, required=True, help="bf16, or fp8 in 128x128 blocks")
    parser.add_argument("--max-shard-size", default="5GB", help="largest safetensors file (default: 5GB)")
    args = parser.parse_args(argv)
    try:
        export(args.checkpoint, args.out, args.format, args.max_shard_size)
    except CheckpointError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"{args.out}: {args.format} model")
    return 0


if __name__ == "__main__":
    sys.exit(main())
