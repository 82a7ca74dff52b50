"""The weight files of a Hugging Face checkpoint, told from their headers: whether they are there, and config.json's."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, PretrainedConfig

from verl.jetrl.precision import SUPPORTED_MODELS
from verl.jetrl.weights import EMBEDDING

HEAD = "lm_head.weight"
INDEX = "model.safetensors.index.json"
ROWS = 8  # of head and embedding that are compared: a head that was trained apart differs in all


def missing(path: Path) -> str:
    """The weight files that are absent or damaged, and how; "" without any."""
    try:
        files = _files(path)
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        return f"{INDEX} is damaged ({error!r})"
    if not files:
        return "" if any(path.glob("*.bin")) else "no *.safetensors"
    return ", ".join(filter(None, map(_unusable, files)))


def different(path: Path, config: PretrainedConfig) -> list[str]:
    """How the weights differ from those of ``config``, the folder's config.json; empty where they do not, or nothing tells.

    transformers makes random weights where some are missing and leaves out what is too much, with a warning in a worker's
    log; other shapes it refuses, minutes after the start.
    """
    files = _files(path)
    # transformers renames weights of other model types; those of a quantized checkpoint are its quantizer's.
    if not files or config.model_type not in SUPPORTED_MODELS or getattr(config, "quantization_config", None):
        return []
    stored = _headers(files)
    if config.tie_word_embeddings and HEAD in stored:
        if EMBEDDING in stored and not _begin_alike(stored[HEAD][0], stored[EMBEDDING][0]):
            return [f"{HEAD} is not {EMBEDDING}: set tie_word_embeddings=false in its config.json"]
        stored.setdefault(EMBEDDING, stored[HEAD])  # either name will do
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    expected = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    found = {name: shape for name, (_, shape) in stored.items() if name in expected or name.startswith("model.layers.")}
    found = {name: shape for name, shape in found.items() if not name.endswith("rotary_emb.inv_freq")}  # computed, of old files
    wrong = [name for name in expected | found if found.get(name) != expected.get(name)]
    if not wrong:
        return []
    first, more = wrong[0], f" (and {len(wrong) - 1} more)" if len(wrong) > 1 else ""
    fix = "take both from one checkpoint"
    if first == HEAD:
        fix += ", or set tie_word_embeddings=true there if the head is the embedding"
    return [
        f"its weights are not those of its config.json: {first} is {found.get(first, 'absent')} in the files, "
        f"{expected.get(first, 'absent')} by config.json{more}; {fix}"
    ]


def _files(path: Path) -> list[Path]:
    """The safetensors files that the index names, else all there are; none where the weights are in *.bin."""
    index = path / INDEX
    if index.is_file():
        return [path / name for name in sorted(set(json.loads(index.read_text())["weight_map"].values()))]
    return sorted(path.glob("*.safetensors"))


def _unusable(file: Path) -> str:
    """The file's name and what is wrong with it: absent, cut short, or a Git LFS pointer; "" when its header fits."""
    if not file.is_file():
        return file.name
    if file.suffix == ".safetensors":
        try:
            with safe_open(file, framework="pt"):
                pass
        except Exception as error:  # the library's own exception type is not public
            return f"{file.name} is damaged or not downloaded ({error})"
    return ""


def _headers(files: list[Path]) -> dict[str, tuple[Path, tuple[int, ...]]]:
    """File and shape of every weight, by the name that it has in the model with its head."""
    stored = {}
    for file in files:
        with safe_open(file, framework="pt") as tensors:
            stored |= {name: (file, tuple(tensors.get_slice(name).get_shape())) for name in tensors.keys()}
    without_head = EMBEDDING.removeprefix("model.") in stored
    return {f"model.{name}" if without_head and name != HEAD else name: value for name, value in stored.items()}


def _begin_alike(head: Path, embedding: Path) -> bool:
    """Whether the first rows of head and embedding are the same."""
    first = []
    for file, name in ((head, HEAD), (embedding, EMBEDDING)):
        with safe_open(file, framework="pt") as tensors:
            first.append(tensors.get_slice(name)[:ROWS])
    return torch.equal(*first)
