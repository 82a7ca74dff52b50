"""The weight arena: one allocation per GPU that holds the policy's weights, for the trainer and for vLLM.

The trainer's process makes it and writes it; vLLM's worker on the same GPU maps it (CUDA IPC; POSIX shared memory where
there is no GPU).  A weight update is a write in place: nothing is sent, and addresses never change, so that captured
CUDA graphs stay valid.

What it holds, under vLLM's fused names (:func:`layout_of`):

==============================  ============================================================================
entry                           bytes
==============================  ============================================================================
``*_proj.weight``               float8_e4m3fn (N, K); q, k, v and gate, up one below the other
``*_proj.weight_scale_inv``     float32, the 128x128 block scales of the parts one below the other
norms, biases, embedding, head  bfloat16; no head where it is tied to the embedding
``*.scale_shards``              float32 (T, N/128, K/128/T): scales of o and down cut along K, for a rollout on T GPUs
``rope.table``                  float32 (positions, head_dim): cosines, then sines
==============================  ============================================================================

With ``fsdp_config.arena=sharded`` the FP8 weights and scales of all layers do not lie in it: it has :data:`SLOTS` places for
those of one layer, and layer i has place ``i % SLOTS`` (:mod:`verl.jetrl.window`).

Beside it lies a small control block in shared memory: the version of the weights, and the *lease*, which says who may
use them.  The engine holds the lease while it generates, the trainer while it trains; each side checks before it acts.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import pickle
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor
from torch.multiprocessing.reductions import reduce_tensor
from transformers import PretrainedConfig

from verl.jetrl.environment import RUN_ID, make_run_tmp
from verl.jetrl.fp8.format import BLOCK, FP8, Quantized, groups
from verl.jetrl.processes import alive
from verl.jetrl.weights import FUSED

ALIGN = 256  # bytes; TMA wants 16, cuBLASLt 256 for its fastest kernels
ROPE = "rope.table"
SHARDS = "scale_shards"
ROW_PARALLEL = ("o_proj", "down_proj")
SCALE = "weight_scale_inv"
TRAINER, ENGINE = 0, 1
HOLDERS = {TRAINER: "trainer", ENGINE: "engine"}
SLOTS = 2  # layers whose FP8 weights an arena holds at a time with arena=sharded: one that runs, the next one on its way
# Longest silence of the other side during a weight update, in seconds.
DEADLINE_S = float(os.environ.get("JETRL_WEIGHT_SYNC_DEADLINE_S", "45"))
_MAGIC = 0x4A65_7452_4C32  # "JetRL2"
_SHAKE = tuple(f"{word}{slot}" for word in ("ready", "taken") for slot in range(SLOTS))
_WORDS = ("magic", "version", "holder", "trainer_pid", "engine_pid", "sharded", "loaded", *_SHAKE)


class ArenaError(RuntimeError):
    """The arena cannot be made or mapped, or does not hold what the reader expects."""


class LeaseError(RuntimeError):
    """One side used the weights while the other side held them."""


class WeightSyncError(RuntimeError):
    """A weight update did not reach the rollout."""


@dataclass(frozen=True)
class Entry:
    """One tensor.  ``parts``: the trainer's parameters in it and their rows, in order; () for what is no weight of its own."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int
    parts: tuple[tuple[str, int], ...] = ()

    @property
    def nbytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize


@dataclass(frozen=True)
class Layout:
    """Where each tensor lies; the same on both sides, made from the model's configuration alone.

    ``slots``: layers whose FP8 weights and scales have memory at a time, so that others share their offsets; 0: all.
    """

    entries: tuple[Entry, ...]
    slots: int = 0

    @property
    def nbytes(self) -> int:
        last = self.entries[-1]
        return last.offset + last.nbytes

    @property
    def digest(self) -> str:
        """Hash of all names, types, shapes and offsets."""
        return hashlib.sha256(repr((self.entries, self.slots)).encode()).hexdigest()[:16]

    def __getitem__(self, name: str) -> Entry:
        return self._by_name[name]

    def __contains__(self, name: str) -> bool:
        return name in self._by_name

    @cached_property
    def _by_name(self) -> dict[str, Entry]:
        return {entry.name: entry for entry in self.entries}

    @property
    def weights(self) -> Iterator[Entry]:
        """The entries that the trainer has parameters for: no scales, no RoPE table."""
        return (entry for entry in self.entries if entry.parts and not entry.name.endswith(SCALE))

    @property
    def linears(self) -> Iterator[Entry]:
        """The FP8 weights and their scales."""
        return (entry for entry in self.entries if entry.dtype == FP8 or entry.name.endswith(SCALE))

    def bytes_of(self, kind: str) -> int:
        """Bytes of the ``"fp8"`` weights with their scales, or of the ``"bf16"`` tensors (the RoPE table counted there)."""
        fp8 = sum(e.nbytes for e in self.linears)
        return fp8 if kind == "fp8" else sum(e.nbytes for e in self.entries) - fp8


def layout_of(config: PretrainedConfig, tensor_parallel: int = 1, slots: int = 0) -> Layout:
    """The layout for a Qwen3, Qwen2.5 or Llama configuration whose linear layers are all FP8.

    ``tensor_parallel``: over how many GPUs the rollout cuts each layer; every GPU holds the whole arena all the same.
    ``slots``: see :class:`Layout`.
    """
    T = tensor_parallel
    _check_tensor_parallel(config, T)
    H, V, I = config.hidden_size, config.vocab_size, config.intermediate_size
    D = head_dim(config)
    q, kv = config.num_attention_heads * D, config.num_key_value_heads * D
    qkv_bias, o_bias = biases(config)
    specs: list[tuple[str, torch.dtype, tuple[int, ...], tuple[tuple[str, int], ...]]] = []

    def bf16(name: str, *shape: int, parts: tuple[tuple[str, int], ...] = ()) -> None:
        specs.append((name, torch.bfloat16, shape, parts or ((name, shape[0]),)))

    def linear(prefix: str, fused: str, rows: tuple[int, ...], K: int, bias: bool) -> None:
        names = [f"{prefix}.{part}" for part in FUSED.get(fused, (fused,))]
        of = lambda kind: tuple((f"{name}.{kind}", n) for name, n in zip(names, rows, strict=True))  # noqa: E731
        specs.append((f"{prefix}.{fused}.weight", FP8, (sum(rows), K), of("weight")))
        blocks = tuple(groups(n) for n in rows)
        scale_parts = tuple((f"{name}.{SCALE}", n) for name, n in zip(names, blocks, strict=True))
        specs.append((f"{prefix}.{fused}.{SCALE}", torch.float32, (sum(blocks), groups(K)), scale_parts))
        if T > 1 and fused in ROW_PARALLEL:
            specs.append((f"{prefix}.{fused}.{SHARDS}", torch.float32, (T, sum(blocks), groups(K) // T), ()))
        if bias:
            bf16(f"{prefix}.{fused}.bias", sum(rows), parts=of("bias"))

    bf16("model.embed_tokens.weight", V, H)
    for i in range(config.num_hidden_layers):
        layer = f"model.layers.{i}"
        bf16(f"{layer}.input_layernorm.weight", H)
        linear(f"{layer}.self_attn", "qkv_proj", (q, kv, kv), H, qkv_bias)
        if has_qk_norm(config):
            bf16(f"{layer}.self_attn.q_norm.weight", D)
            bf16(f"{layer}.self_attn.k_norm.weight", D)
        linear(f"{layer}.self_attn", "o_proj", (H,), q, o_bias)
        bf16(f"{layer}.post_attention_layernorm.weight", H)
        linear(f"{layer}.mlp", "gate_up_proj", (I, I), H, False)
        linear(f"{layer}.mlp", "down_proj", (H,), I, False)
    bf16("model.norm.weight", H)
    if not config.tie_word_embeddings:
        bf16("lm_head.weight", V, H)
    specs.append((ROPE, torch.float32, (config.max_position_embeddings, D), ()))
    return _packed((Entry(name, dtype, shape, 0, parts) for name, dtype, shape, parts in specs), slots)


def _packed(entries: Iterable[Entry], slots: int = 0) -> Layout:
    """One tensor behind the other; with ``slots`` the linears of layer i where those of layer ``i % slots`` lie."""
    placed, offset = [], 0
    shared: dict[str, int] = {}
    for entry in entries:
        place = entry.name
        if slots and (entry.dtype == FP8 or entry.name.endswith(SCALE)):
            layer = layer_of(entry.name)
            place = entry.name.replace(f".{layer}.", f".{layer % slots}.", 1)
        at = shared.setdefault(place, offset)
        placed.append(replace(entry, offset=at))
        if at == offset:
            offset += -(-entry.nbytes // ALIGN) * ALIGN
    return Layout(tuple(placed), slots)


def scale_of(entry: Entry) -> str:
    """Name of the entry with the scales of an FP8 weight."""
    return f"{entry.name.rpartition('.')[0]}.{SCALE}"


def layer_of(name: str) -> int:
    """The decoder layer that an entry called ``model.layers.3...`` belongs to."""
    return int(name.split(".")[2])


def linears_of(layout: Layout) -> Layout:
    """The FP8 weights of all layers with their scales (those cut along K too) alone: what an engine owns with arena=sharded."""
    shards = {entry.name for entry in layout.entries if entry.name.endswith(SHARDS)}
    kept = {entry.name for entry in layout.linears} | shards
    return _packed(entry for entry in layout.entries if entry.name in kept)


def rows_of(layout: Layout, ranks: int) -> Layout:
    """The FP8 weights and scales of all layers, of each part the rows that one of ``ranks`` ranks has.

    Raises ValueError where those are not whole blocks of rows: the bytes of a block need the whole block.
    """
    parts = [part for entry in layout.linears if entry.dtype == FP8 for part in entry.parts]
    wrong = dict.fromkeys(f"{name.split('.')[-2]} has {n} rows" for name, n in parts if ranks > 1 and n % (ranks * BLOCK))
    if wrong:
        raise ValueError(
            f"actor_rollout_ref.actor.fsdp_config.arena=sharded: {ranks} ranks cannot each have whole blocks of {BLOCK} rows "
            f"of every FP8 weight ({', '.join(wrong)}). Use arena=replicated, or another number of GPUs (fsdp_size)."
        )

    def share(entry: Entry) -> Entry:
        parts = tuple((name, n // ranks) for name, n in entry.parts)
        return replace(entry, shape=(entry.shape[0] // ranks, *entry.shape[1:]), parts=parts)

    return _packed(map(share, layout.linears))


def _check_tensor_parallel(config: PretrainedConfig, T: int) -> None:
    """A rank's rows and columns must be whole 128-blocks, so that it has scales of its own."""
    D = head_dim(config)
    sizes = {"query heads x head_dim": config.num_attention_heads * D, "key heads x head_dim": config.num_key_value_heads * D}
    sizes["intermediate_size"] = config.intermediate_size
    wrong = [f"{name}={size}" for name, size in sizes.items() if T > 1 and size % (T * BLOCK)]
    if wrong or config.num_key_value_heads % T:
        raise ValueError(
            f"actor_rollout_ref.rollout.tensor_model_parallel_size={T}: the FP8 weights cannot be cut into {T} parts of whole "
            f"{BLOCK}x{BLOCK} blocks ({', '.join(wrong) or f'{config.num_key_value_heads} key heads'}). Use "
            "tensor_model_parallel_size=1 for this model."
        )


def head_dim(config: PretrainedConfig) -> int:
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def has_qk_norm(config: PretrainedConfig) -> bool:
    return config.model_type == "qwen3"


def biases(config: PretrainedConfig) -> tuple[bool, bool]:
    """Whether (q, k, v) and o have biases."""
    if config.model_type == "qwen2":
        return True, False
    return bool(config.attention_bias), bool(config.attention_bias)


class Control:
    """The control block: int64 words in shared memory, mapped by the trainer, the server and vLLM's workers.

    With arena=sharded the engine has weights of its own, which come layer by layer through the slots: ``loaded`` is their
    version (0: none), ``ready`` and ``taken`` of a slot say how far the trainer and the engine are.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self._words = torch.from_file(path, shared=True, size=len(_WORDS), dtype=torch.int64)

    @classmethod
    def create(cls, path: str, sharded: bool = False) -> Control:
        _reserve(path, 8 * len(_WORDS))
        control = cls(path)
        values = {"magic": _MAGIC, "holder": TRAINER, "trainer_pid": os.getpid(), "sharded": sharded}
        for word in _WORDS:
            control._set(word, int(values.get(word, 0)))
        return control

    @classmethod
    def attach(cls, path: str) -> Control:
        if not os.path.exists(path):
            raise ArenaError(f"the weight arena's control block {path} is gone: the trainer that made it has ended")
        control = cls(path)
        if control._get("magic") != _MAGIC:
            raise ArenaError(f"{path} is not the control block of a weight arena")
        return control

    def _get(self, word: str) -> int:
        return int(self._words[_WORDS.index(word)])

    def _set(self, word: str, value: int) -> None:
        self._words[_WORDS.index(word)] = value

    @property
    def version(self) -> int:
        """Number of writes so far."""
        return self._get("version")

    @property
    def holder(self) -> int:
        return self._get("holder")

    def require(self, holder: int, what: str) -> None:
        """Raises :class:`LeaseError` when the weights are in the other side's hands."""
        if self.holder != holder:
            raise LeaseError(
                f"{what} while the {HOLDERS[self.holder]} holds the weights (version {self.version}); it must hand them "
                f"to the {HOLDERS[holder]} first"
            )

    def hand_over(self, to: int) -> None:
        """The current holder gives the weights to the other side."""
        self.require(1 - to, f"handing the weights to the {HOLDERS[to]}")
        self._set("holder", to)

    def wrote(self) -> None:
        self.require(TRAINER, "a weight update")
        self._set("version", self.version + 1)

    # --- the engine's own weights, with arena=sharded ---------------------------------------------------------------

    @property
    def served(self) -> int:
        """Version of the weights that the engine computes with: the arena's, or that of its own; 0: none."""
        return self._get("loaded") if self._get("sharded") else self.version

    def serve(self, version: int) -> None:
        """The engine's own weights are those of ``version``; 0: they are gone."""
        self._set("loaded", version)

    def enter(self) -> None:
        """This process is the engine's worker."""
        self._set("engine_pid", os.getpid())

    def signal(self, word: str, layer: int, update: int) -> None:
        """Says that ``layer`` is "ready" in its slot, or was "taken" from there, in weight update number ``update``."""
        self._set(f"{word}{layer % SLOTS}", _ticket(layer, update))

    def wait(self, word: str, layer: int, update: int, watch: Callable[[], None] | None = None) -> None:
        """Returns once the other side has signalled so.  ``watch`` is called meanwhile, and may raise.

        Raises :class:`WeightSyncError` when the other side's process has ended, or is silent for ``DEADLINE_S``.
        """
        side, what = ("trainer", "sent") if word == "ready" else ("engine", "taken")
        started = looked = time.monotonic()
        while self._get(f"{word}{layer % SLOTS}") != _ticket(layer, update):
            now = time.monotonic()
            if now - looked > 0.2:
                looked, pid = now, self._get(f"{side}_pid")
                if watch is not None:
                    watch()
                if pid and not alive(pid):
                    raise WeightSyncError(f"the {side}'s process {pid} ended before it had {what} the weights of layer {layer}")
            if now - started > DEADLINE_S:
                raise WeightSyncError(
                    f"the {side} had not {what} the weights of layer {layer} within {DEADLINE_S:.0f} s of a weight update "
                    "(JETRL_WEIGHT_SYNC_DEADLINE_S sets the limit)"
                )
            time.sleep(0.0002)


def _ticket(layer: int, update: int) -> int:
    """No word of an earlier update is taken for one of this."""
    return (update << 16) + layer + 1


class Arena:
    """The tensors of one arena.  :meth:`create` in the trainer, :meth:`attach` in vLLM's worker."""

    def __init__(self, layout: Layout, data: Tensor, control: Control | None, owned: tuple[str, ...] = ()) -> None:
        self.layout, self.data, self.control, self._owned = layout, data, control, owned

    @classmethod
    def private(cls, layout: Layout, device: torch.device) -> Arena:
        """An arena that nobody else maps (a reference policy's)."""
        return cls(layout, torch.zeros(layout.nbytes, dtype=torch.uint8, device=device), None)

    @classmethod
    def create(cls, layout: Layout, device: torch.device, rank: int, beside: int = 0) -> Arena:
        """Allocates the arena of trainer process ``rank`` and leaves its handle for vLLM's worker on the same GPU.

        ``beside``: bytes of weights that the trainer holds beside it, which count as the rollout's too.
        """
        folder = _folder()
        name = f"jetrl-{folder.name}-{os.getpid()}-{rank}"
        control_path, data_path = f"/dev/shm/{name}-control", f"/dev/shm/{name}-data"
        if os.path.exists(control_path):
            raise ArenaError(f"this process already has a weight arena of rank {rank} ({control_path}): close it first")
        handle = {"layout": layout.digest, "nbytes": layout.nbytes, "control": control_path, "device": _device_id(device)}
        handle["slots"] = layout.slots
        handle["rollout_nbytes"] = layout.nbytes + beside
        path = handle_path(rank)
        partial = path.with_suffix(".partial")
        owned = (control_path, data_path, str(path))
        try:
            if device.type == "cuda":
                data = _own_segment(layout.nbytes, device)
                handle["gpu_nbytes"] = torch.cuda.get_device_properties(device).total_memory
                handle["ipc"] = base64.b64encode(pickle.dumps(reduce_tensor(data))).decode()
            else:
                _reserve(data_path, layout.nbytes)
                data = _map(data_path, layout.nbytes)
                handle["shm"] = data_path
            control = Control.create(control_path, sharded=layout.slots > 0)
            partial.write_text(json.dumps(handle))
            partial.chmod(0o600)
            os.replace(partial, path)
        except BaseException:
            for name in (control_path, data_path, partial):
                Path(name).unlink(missing_ok=True)
            raise
        return cls(layout, data, control, owned)

    @classmethod
    def attach(cls, layout: Layout, device: torch.device, rank: int) -> Arena:
        """Maps the arena of trainer process ``rank``."""
        handle = read_handle(rank)
        if handle["layout"] != layout.digest:
            raise ArenaError(
                f"the trainer's weight arena has layout {handle['layout']}, the rollout expects {layout.digest}: both sides "
                "must load the same model configuration"
            )
        if handle["device"] != _device_id(device):
            raise ArenaError(
                f"the weight arena of rank {rank} lies on {handle['device']}, this worker runs on {_device_id(device)}: "
                "trainer and rollout of a rank must use the same GPU"
            )
        if "shm" in handle:
            data = _map(handle["shm"], handle["nbytes"])
        else:
            rebuild, arguments = pickle.loads(base64.b64decode(handle["ipc"]))
            arguments = list(arguments)
            arguments[6] = device.index if device.index is not None else torch.cuda.current_device()
            data = rebuild(*arguments)
        return cls(layout, data, Control.attach(handle["control"]))

    def __getitem__(self, name: str) -> Tensor:
        """The tensor called ``name``; a view."""
        entry = self.layout[name]
        return self.data[entry.offset : entry.offset + entry.nbytes].view(entry.dtype).view(entry.shape)

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        """Every tensor that is a weight, with its name."""
        for entry in self.layout.entries:
            if entry.parts:
                yield entry.name, self[entry.name]

    def parts(self, name: str) -> list[tuple[str, Tensor]]:
        """The tensor ``name`` as the trainer's parameters in it: names and row slices."""
        entry = self.layout[name]
        return list(zip([part for part, _ in entry.parts], self[name].split([n for _, n in entry.parts]), strict=True))

    def cut_scales(self) -> None:
        """Writes the scales of o and down once more, cut along K for a rollout on several GPUs."""
        for entry in self.layout.entries:
            owner, _, kind = entry.name.rpartition(".")
            if kind == SHARDS:
                T, N, _ = entry.shape
                self[entry.name].copy_(self[f"{owner}.{SCALE}"].view(N, T, -1).transpose(0, 1))

    def close(self) -> None:
        """Removes the owner's files; mappings stay valid until they are dropped."""
        for path in self._owned:
            Path(path).unlink(missing_ok=True)
        self._owned = ()


def quantized_parts(weight_NK: Tensor, scale_BG: Tensor, rows: list[int]) -> list[Quantized]:
    """A fused weight as its separately quantized parts; one part where the blocks line up."""
    if len(rows) == 1 or all(n % BLOCK == 0 for n in rows):
        return [Quantized(weight_NK, scale_BG)]
    scales = scale_BG.split([groups(n) for n in rows])
    return [Quantized(w, s) for w, s in zip(weight_NK.split(rows), scales, strict=True)]


def handle_path(rank: int) -> Path:
    """Where trainer process ``rank`` of this run leaves the handle of its arena."""
    return _folder() / f"arena-{rank}.json"


def read_handle(rank: int) -> dict:
    path = handle_path(rank)
    if not path.is_file():
        raise ArenaError(f"no weight arena of trainer rank {rank}: {path} is missing (the trainer starts before the rollout)")
    return json.loads(path.read_text())


def share_of_gpu(rank: int) -> float:
    """The share of a GPU's memory that the rollout's weights in the arena on it take; 0 without a GPU."""
    handle = read_handle(rank)
    return handle["rollout_nbytes"] / handle["gpu_nbytes"] if "gpu_nbytes" in handle else 0.0


def control_of(rank: int) -> Control:
    """The control block of the arena of trainer process ``rank``."""
    return Control.attach(read_handle(rank)["control"])


def _folder() -> Path:
    if not os.environ.get(RUN_ID):
        raise ArenaError(f"{RUN_ID} is not set: the weight arena belongs to a run (python -m verl.jetrl.run sets it)")
    return make_run_tmp()


def _device_id(device: torch.device) -> str:
    """Names a device the same in every process, whatever CUDA_VISIBLE_DEVICES says."""
    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else device.type


def _reserve(path: str, nbytes: int) -> None:
    """Makes a file of shared memory; without room for it, an error here and not a bus error at the first write."""
    fd = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
    try:
        os.posix_fallocate(fd, 0, nbytes)
    except OSError as error:
        os.unlink(path)
        raise ArenaError(f"no room for {nbytes / 2**30:.2f} GiB of weights in /dev/shm: {error.strerror}") from error
    finally:
        os.close(fd)


def _map(path: str, nbytes: int) -> Tensor:
    if not os.path.exists(path):
        raise ArenaError(f"the weight arena {path} is gone: the trainer that made it has ended")
    return torch.from_file(path, shared=True, size=nbytes, dtype=torch.uint8)


def _own_segment(nbytes: int, device: torch.device) -> Tensor:
    """A zeroed CUDA tensor in a cudaMalloc segment of its own, as CUDA IPC needs it.

    Expandable segments are made of other memory: they are off from here on, until verl turns them on after the first weight
    update.
    """
    torch.cuda.empty_cache()  # else a cached segment that other tensors share could be handed out
    torch._C._accelerator_setAllocatorSettings("expandable_segments:False")
    nbytes = max(nbytes, 2**25)  # small allocations share segments
    data = torch.zeros(nbytes, dtype=torch.uint8, device=device)
    segments = [s for s in torch.cuda.memory_snapshot() if s["address"] <= data.data_ptr() < s["address"] + s["total_size"]]
    if len(segments) != 1 or segments[0].get("is_expandable") or len(segments[0]["blocks"]) > 2:
        raise ArenaError(
            f"the weight arena needs a CUDA allocation of its own; the allocator gave {segments}. Unset "
            "PYTORCH_CUDA_ALLOC_CONF (expandable_segments cannot be shared with vLLM's process)"
        )
    return data
