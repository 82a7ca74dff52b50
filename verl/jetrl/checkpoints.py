"""Checkpoints that are whole or not there, and that fit the number of processes.

verl writes ``global_step_N`` folders and a file that names the latest.  A folder counts once its ``complete`` mark exists,
written last, when all of it is on the disk, and while verl has not pruned its ``actor`` folder; :func:`repair` removes the
others before a run starts, so that a kill or a crash at any moment of a save leaves the last good checkpoint in place.

verl resumes with the number of processes that saved.  For another number:

    python -m verl.jetrl.checkpoints reshard runs/tiny/jetrl/checkpoints/global_step_10 --world-size 1

rewrites the shards in place.  Stopped half-way it leaves the checkpoint as it was; started again it finishes.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.utils._pytree import tree_map
from tqdm import tqdm

MARK = "complete"
TRACKER = "latest_checkpointed_iteration.txt"
FSDP_CONFIG = "fsdp_config.json"


class CheckpointError(RuntimeError):
    """A checkpoint is missing, unfinished, or not one of verl's FSDP engine."""


def _steps(checkpoints: Path) -> dict[int, Path]:
    folders = (p for p in checkpoints.glob("global_step_*") if p.is_dir())
    return {step_of(p): p for p in folders if p.name.removeprefix("global_step_").isdecimal()}


def step_of(folder: Path) -> int:
    """N of ``global_step_N``."""
    return int(folder.name.removeprefix("global_step_"))


def nearest(path: Path) -> Path:
    """``path``, or the first folder above it that is there."""
    return next(place for place in (path, *path.parents) if place.exists())


def writable(place: Path) -> bool:
    """Whether ``place`` is a folder that files can be made in."""
    return place.is_dir() and os.access(place, os.W_OK)


def _to_disk(path: Path) -> None:
    """Waits until a file's content, or the names in a folder, would outlive a crash of the machine."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_atomically(path: Path, text: str) -> None:
    """Replaces ``path`` by ``text``, on the disk; a reader sees the old or the new content, never a part."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    with open(temporary, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
    _to_disk(path.parent)


def unmark(checkpoints: Path, step: int) -> None:
    """To be called before ``step`` is saved, perhaps again: a save that is interrupted must not count by an older mark."""
    mark = checkpoints / f"global_step_{step}" / MARK
    if mark.is_file():
        mark.unlink()
        _to_disk(mark.parent)


def mark_complete(checkpoints: Path, step: int) -> None:
    """Declares the checkpoint of ``step`` whole, after everything of it was written, and once all that is on the disk."""
    folder = checkpoints / f"global_step_{step}"
    for path in (*folder.rglob("*"), folder, checkpoints):
        _to_disk(path)
    write_atomically(folder / MARK, f"{step}\n")


def _whole(folder: Path) -> bool:
    actor = folder / "actor"
    return (folder / MARK).is_file() and actor.is_dir() and any(actor.iterdir())


def whole(checkpoints: Path) -> dict[int, Path]:
    """The whole checkpoints below ``checkpoints``, by step, oldest first."""
    return {step: folder for step, folder in sorted(_steps(checkpoints).items()) if _whole(folder)}


def taken(checkpoints: Path, most: int) -> tuple[int, int]:
    """Bytes of the latest ``most`` whole checkpoints, and of what :func:`repair` would remove."""

    def size(folder: Path) -> int:
        return 0 if folder.is_symlink() else sum(path.lstat().st_size for path in folder.rglob("*") if path.is_file())

    kept = whole(checkpoints)
    others = (folder for step, folder in _steps(checkpoints).items() if step not in kept)
    return sum(map(size, list(kept.values())[-most:])), sum(map(size, others))


def has_marks(checkpoints: Path) -> bool:
    """Whether marks tell what is whole there: in a run's folder, even before its first mark, and wherever one is."""
    return (checkpoints.parent / "status.json").is_file() or any(checkpoints.glob(f"global_step_*/{MARK}"))


def repair(checkpoints: Path) -> int | None:
    """Removes unfinished checkpoints and points verl at the latest whole one; returns its step, None if there is none."""
    if not checkpoints.is_dir():
        return None
    kept = whole(checkpoints)
    for folder in (folder for step, folder in _steps(checkpoints).items() if step not in kept):
        if folder.is_symlink():
            folder.unlink()
        else:
            shutil.rmtree(folder)
    latest = max(kept, default=None)
    if latest is None:
        (checkpoints / TRACKER).unlink(missing_ok=True)
    else:
        write_atomically(checkpoints / TRACKER, str(latest))
    return latest


# --- the shards of a checkpoint ---------------------------------------------------------------------------------------


def require_whole(folder: Path) -> None:
    """Raises :class:`CheckpointError` when ``folder`` is not there, or is (in) a ``global_step_N`` that was never finished, or
    pruned."""
    if not folder.is_dir():
        raise CheckpointError(f"{folder}: no such folder")
    for step in (folder, folder.absolute().parent):
        if step.name.startswith("global_step_") and not _whole(step):
            pruned = (step / MARK).is_file()
            why = "its folder actor was removed" if pruned else f"its save was interrupted (no file {MARK!r} in it)"
            raise CheckpointError(f"{step} is not a whole checkpoint: {why}")


def world_size_of(folder: Path) -> int | None:
    """The number of processes whose shards ``folder`` (``global_step_N/actor``) holds; None where verl left no word of it."""
    path = folder / FSDP_CONFIG
    if not path.is_file():
        return None
    try:
        return int(json.loads(path.read_text())["world_size"])
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path} is damaged ({type(error).__name__}): delete {folder.parent} or copy it anew") from error


def shard_path(folder: Path, kind: str, world_size: int, rank: int) -> Path:
    """verl's name for a rank's file; ``kind``: model, optim or extra_state."""
    return folder / f"{kind}_world_size_{world_size}_rank_{rank}.pt"


def load_shards(folder: Path, kind: str) -> list[Any]:
    """What every rank saved, in order of rank; tensors are mapped from the files, so that little memory is used.

    Raises :class:`CheckpointError` where a file is missing.
    """
    world_size = world_size_of(folder)
    if world_size is None:
        raise CheckpointError(f"{folder} is no checkpoint of verl's FSDP engine: it has no {FSDP_CONFIG}")
    paths = [shard_path(folder, kind, world_size, rank) for rank in range(world_size)]
    missing = [path.name for path in paths if not path.is_file()]
    if missing:
        raise CheckpointError(f"{folder} lacks {', '.join(missing)}: with several nodes, bring all files to one folder first")
    return [torch.load(path, map_location="cpu", mmap=True, weights_only=False) for path in paths]


def rows(shards: Sequence[Tensor], start: int = 0, stop: int | None = None, dtype: torch.dtype | None = None) -> Tensor:
    """Rows ``start`` to ``stop`` (default: all) of the tensor whose shards, one per rank, are given; cast to ``dtype``.

    A tensor that is no DTensor must be the same on every rank, and is returned whole.  Raises :class:`CheckpointError` for
    ranks that differ, and for other placements than verl's FSDP: sharded by rows, perhaps replicated over nodes.
    """
    first = shards[0]
    if not isinstance(first, DTensor):
        if not all(torch.equal(first, other) for other in shards[1:]):
            raise CheckpointError("a tensor that is not sharded differs between ranks")
        return first.to(dtype)
    if first.placements[-1] != Shard(0) or not all(placement.is_replicate() for placement in first.placements[:-1]):
        raise CheckpointError(f"tensors placed as {first.placements} are not supported")
    stop = first.shape[0] if stop is None else stop
    pieces, offset = [], 0
    for shard in shards[: first.device_mesh.mesh.shape[-1]]:  # the first replica
        local = shard.to_local()
        pieces.append(local[max(start - offset, 0) : max(stop - offset, 0)].to(dtype))
        offset += local.shape[0]
    return torch.cat(pieces)


def _reshard_leaf(rank: int, world_size: int, shards: Sequence[Any]) -> Any:
    """What ``rank`` of ``world_size`` saves of one value: its rows of a DTensor, the rest as it was on the first rank."""
    first = shards[0]
    if not isinstance(first, Tensor):
        return first
    if not isinstance(first, DTensor):
        return rows(shards)
    each = -(-first.shape[0] // world_size)  # as torch.chunk, which FSDP2 and distribute_tensor follow
    local = rows(shards, rank * each, min((rank + 1) * each, first.shape[0]))
    # A mesh as verl's run would have it, which here cannot exist: equal by ranks and names, over the default process group.
    mesh = DeviceMesh(
        first.device_mesh.device_type, torch.arange(world_size), mesh_dim_names=("fsdp",), _init_backend=False, _rank=rank
    )
    mesh._dim_group_names = ["0"]
    meta = TensorMeta(first.shape, first.stride(), first.dtype)
    # Not from_local, which moves the rows to the mesh's device: there may be no GPU here.
    return DTensor(local, DTensorSpec(mesh, (Shard(0),), tensor_meta=meta), requires_grad=False)


def reshard(folder: Path, world_size: int) -> list[Path]:
    """Rewrites a checkpoint, in place, for another number of processes; returns the folders that it changed.

    ``folder``: ``global_step_N``, or one folder of shards in it.  Masters and optimizer states keep their bits.  A rank's
    random generators are those of the old rank of its number, counted round.  The new files are written beside the old
    ones; ``fsdp_config.json`` says which count, and is replaced in between, each once the one before is on the disk.
    """
    if world_size < 1:
        raise CheckpointError(f"--world-size {world_size}: at least 1 process")
    require_whole(folder)
    found = [folder] if (folder / FSDP_CONFIG).is_file() else sorted(path.parent for path in folder.glob(f"*/{FSDP_CONFIG}"))
    if not found:
        raise CheckpointError(f"{folder} is no checkpoint of verl's FSDP engine: there is no {FSDP_CONFIG} in it")
    changed = [one for one in found if world_size_of(one) != world_size]
    for one in changed:
        _write_shards(one, world_size)
        config = json.loads((one / FSDP_CONFIG).read_text())
        write_atomically(one / FSDP_CONFIG, json.dumps(config | {"world_size": world_size}, indent=4))
    for one in found:
        for path in one.glob("*_world_size_*_rank_*.pt*"):
            if f"_world_size_{world_size}_" not in path.name or path.suffix != ".pt":
                path.unlink()
    return changed


def _write_shards(folder: Path, world_size: int) -> None:
    old = world_size_of(folder)
    kinds = [kind for kind in ("model", "optim", "extra_state") if shard_path(folder, kind, old, 0).is_file()]
    with tqdm(total=len(kinds) * world_size, desc=f"{folder.name}: {old} to {world_size}", unit="file") as bar:
        for kind in kinds:
            shards = load_shards(folder, kind)
            for rank in range(world_size):
                if kind == "extra_state":
                    mine = shards[rank % old]
                else:
                    mine = tree_map(lambda *leaf, rank=rank: _reshard_leaf(rank, world_size, leaf), *shards)
                path = shard_path(folder, kind, world_size, rank)
                partial = path.with_suffix(".pt.partial")
                torch.save(mine, partial)
                _to_disk(partial)
                os.replace(partial, path)
                bar.update()
    _to_disk(folder)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m verl.jetrl.checkpoints", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    command = commands.add_parser("reshard", help="rewrite a checkpoint for another number of processes, in place")
    command.add_argument("folder", type=Path, help="a global_step_N folder, or the folder of shards in it")
    command.add_argument("--world-size", type=int, required=True, metavar="N", help="processes (GPUs) of the run to resume")
    args = parser.parse_args(argv)
    try:
        changed = reshard(args.folder, args.world_size)
    except CheckpointError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    for folder in changed:
        print(f"{folder}: {args.world_size} shards")
    if not changed:
        print(f"{args.folder} has {args.world_size} shards already")
    return 0


if __name__ == "__main__":
    sys.exit(main())
