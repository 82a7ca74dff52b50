"""Resuming: the same bits on as many processes as saved, on another number after resharding, and after a kill at any moment."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from checkpoint_cases import STEP, ranks
from decoder_cases import MODELS, same_bytes
from omegaconf import OmegaConf
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.utils._pytree import tree_flatten

from verl.jetrl import checkpoints, run
from verl.jetrl.checkpoints import CheckpointError
from verl.jetrl.precision import PrecisionFlow


def held(folder: Path, case: str, rank: int = 0) -> dict:
    return torch.load(folder / f"{case}-{rank}.pt")


def differences(a: object, b: object) -> list[str]:
    """Paths at which two trees of dictionaries, sequences and tensors differ by a bit."""
    (left, spec), (right, other) = (tree_flatten(tree) for tree in (a, b))
    assert spec == other and len(left) > 10
    pairs = enumerate(zip(left, right, strict=True))
    return [f"leaf {i}" for i, (x, y) in pairs if not (same_bytes(x, y) if isinstance(x, torch.Tensor) else x == y)]


def copied(saved: dict, world_size: int, tmp_path: Path) -> Path:
    folder = tmp_path / "checkpoints"
    shutil.copytree(saved[world_size][0], folder)
    return folder


def actor(folder: Path, case: str) -> Path:
    return folder / case / f"global_step_{STEP}" / "actor"


# --- resuming ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def resumed(saved, tmp_path_factory) -> dict[int, Path]:
    """What one and two processes hold that loaded the checkpoint of as many ("same") and of the other number ("other")."""
    made = {}
    for world_size in (1, 2):
        folder = tmp_path_factory.mktemp(f"resumed-{world_size}")
        shutil.copytree(saved[world_size][0], folder / "checkpoints" / "same")
        shutil.copytree(saved[3 - world_size][0], folder / "checkpoints" / "other")
        for case in MODELS:
            step = folder / "checkpoints" / "other" / case / f"global_step_{STEP}"
            assert checkpoints.main(["reshard", str(step), "--world-size", str(world_size)]) == 0
        ranks(world_size, "load", folder / "checkpoints", folder / "held")
        made[world_size] = folder / "held"
    return made


@pytest.mark.parametrize("case", MODELS)
@pytest.mark.parametrize("world_size", [1, 2])
def test_as_many_processes_go_on_to_the_bit(saved, resumed, world_size, case):
    """Masters, moments, learning rate, random generators, arena; loss, gradients and arena of the next two steps."""
    for rank in range(world_size):
        before, after = (held(folder, case, rank) for folder in (saved[world_size][1], resumed[world_size] / "same"))
        assert differences(before, after) == [], f"rank {rank}"
    assert not torch.equal(before["arena"], before["last"]), "nothing happened in those steps"


@pytest.mark.parametrize("case", MODELS)
@pytest.mark.parametrize(("saved_by", "resumed_by"), [(2, 1), (1, 2)])
def test_another_number_of_processes_goes_on_after_resharding(saved, resumed, saved_by, resumed_by, case):
    """The same masters, moments and arena, and the same loss of the same tokens; gradients are means over other ranks."""
    wanted = held(saved[saved_by][1], case)
    kept = ("masters", "moments", "arena", "rate")
    for rank in range(resumed_by):
        found = held(resumed[resumed_by] / "other", case, rank)
        assert differences([wanted[part] for part in kept], [found[part] for part in kept]) == [], f"rank {rank}"
    found = held(resumed[resumed_by] / "other", case)
    assert torch.equal(found["next"][0][0], wanted["next"][0][0]) and same_bytes(found["random"][0], wanted["random"][0])
    assert not torch.equal(found["last"], wanted["last"]), "the case cannot tell one process's batch from two's"


def test_resharding_moves_rows_and_nothing_else(saved, tmp_path, capsys):
    """There and back, over a number that divides no size."""
    folder = actor(copied(saved, 2, tmp_path), "llama")
    names = sorted(path.name for path in folder.iterdir())
    before = {kind: checkpoints.load_shards(folder, kind) for kind in ("model", "optim")}
    before = {kind: [tree_flatten(one) for one in shards] for kind, shards in before.items()}
    assert checkpoints.reshard(folder.parent, 3) == [folder]
    assert checkpoints.world_size_of(folder) == 3 and len(list(folder.glob("*.pt"))) == 9
    third = [one["lm_head.weight"].to_local() for one in checkpoints.load_shards(folder, "model")]
    assert [len(local) for local in third] == [128, 128, 128]
    heads = [one["model.norm.weight"].to_local() for one in checkpoints.load_shards(folder, "model")]
    assert [len(local) for local in heads] == [192, 192, 192]
    assert checkpoints.main(["reshard", str(folder), "--world-size", "2"]) == 0  # the folder of shards itself
    assert f"{folder}: 2 shards" in capsys.readouterr().out
    assert sorted(path.name for path in folder.iterdir()) == names
    for kind, shards in before.items():
        for (leaves, spec), after in zip(shards, checkpoints.load_shards(folder, kind), strict=True):
            leaves_after, spec_after = tree_flatten(after)
            assert spec == spec_after
            for x, y in zip(leaves, leaves_after, strict=True):
                if isinstance(x, DTensor):
                    assert x.device_mesh == y.device_mesh and x.placements == y.placements and x.shape == y.shape
                    assert x.stride() == y.stride() and same_bytes(x.to_local(), y.to_local())
                else:
                    assert same_bytes(x, y) if isinstance(x, torch.Tensor) else x == y
    assert checkpoints.main(["reshard", str(folder), "--world-size", "2"]) == 0
    assert "has 2 shards already" in capsys.readouterr().out


def dtensor(local: torch.Tensor, mesh: DeviceMesh, placements: tuple, shape: tuple[int, ...]) -> DTensor:
    meta = TensorMeta(torch.Size(shape), torch.empty(shape).stride(), local.dtype)
    return DTensor(local, DTensorSpec(mesh, placements, tensor_meta=meta), requires_grad=False)


def mesh_of(ranks: list, device: str, names: tuple[str, ...], rank: int) -> DeviceMesh:
    return DeviceMesh(device, torch.tensor(ranks), mesh_dim_names=names, _init_backend=False, _rank=rank)


def test_shards_of_gpus_are_read_and_written_without_one():
    """7 rows over 4 ranks, two replicas of two shards; the mesh says cuda, as a GPU run's does."""
    full = torch.arange(21.0).view(7, 3)
    names, placements = ("ddp", "fsdp"), (Replicate(), Shard(0))
    shards = [
        dtensor(local, mesh_of([[0, 1], [2, 3]], "cuda", names, rank), placements, (7, 3))
        for rank, local in enumerate((full[:4], full[4:], full[:4] + 100, full[4:] + 100))
    ]
    assert torch.equal(checkpoints.rows(shards), full)
    assert torch.equal(checkpoints.rows(shards, 3, 6, torch.bfloat16), full[3:6].bfloat16())
    assert checkpoints.rows(shards, 4, 4).shape == (0, 3)
    made = [checkpoints._reshard_leaf(rank, 5, shards) for rank in range(5)]
    assert [len(one.to_local()) for one in made] == [2, 2, 2, 1, 0]
    assert all(one.device_mesh == mesh_of([0, 1, 2, 3, 4], "cuda", ("fsdp",), 0) for one in made)
    assert torch.equal(checkpoints.rows(made), full) and made[4].shape == (7, 3)
    columns = dtensor(full, mesh_of([0], "cpu", ("fsdp",), 0), (Shard(1),), (7, 3))
    with pytest.raises(CheckpointError, match="placed as .*Shard.dim=1.* are not supported"):
        checkpoints.rows([columns])
    with pytest.raises(CheckpointError, match="not sharded differs between ranks"):
        checkpoints.rows([torch.ones(2), torch.zeros(2)])


# --- saving -----------------------------------------------------------------------------------------------------------


def made(folder: Path, step: int) -> Path:
    """A whole checkpoint, as far as its folder tells."""
    actor = folder / f"global_step_{step}" / "actor"
    actor.mkdir(parents=True)
    (actor / "model.pt").write_text("weights")
    checkpoints.mark_complete(folder, step)
    return actor.parent


@pytest.fixture
def engine(monkeypatch):
    """Function that gives the engine of one start: of verl's saving, what removes and counts, on rank 0."""
    from verl.utils.checkpoint.checkpoint_manager import BaseCheckpointManager

    from verl.jetrl.trainer.engine import JetRLEngine

    def save(self, local_path, hdfs_path, global_step, max_ckpt_to_keep):
        self.checkpoint_manager.ensure_checkpoint_capacity(max_ckpt_to_keep)
        made(Path(local_path).parent.parent, global_step)
        self.checkpoint_manager.register_checkpoint(local_path, max_ckpt_to_keep)

    monkeypatch.setattr(JetRLEngine.__mro__[1], "save_checkpoint", save)

    def start(flow: PrecisionFlow) -> JetRLEngine:
        one = object.__new__(JetRLEngine)
        one.engine_config = SimpleNamespace(precision_flow=flow)
        one.checkpoint_manager = object.__new__(BaseCheckpointManager)
        one.checkpoint_manager.previous_saved_paths = []
        return one

    return start


@pytest.mark.parametrize("flow", [PrecisionFlow(), PrecisionFlow(linear="fp8")], ids=["bf16", "fp8"])
def test_a_run_keeps_so_many_checkpoints_however_often_it_starts(engine, flow, tmp_path):
    def saved_by_a_start(*steps: int, keep: int | None) -> list[int]:
        one = engine(flow)
        for step in steps:
            one.save_checkpoint(f"{tmp_path}/global_step_{step}/actor", None, step, keep)
        return list(checkpoints.whole(tmp_path))

    assert saved_by_a_start(2, 4, 6, keep=None) == [2, 4, 6]
    shutil.rmtree(tmp_path / "global_step_4/actor")  # pruned: nothing to count
    assert saved_by_a_start(8, keep=2) == [6, 8]
    assert saved_by_a_start(10, keep=2) == [8, 10]
    assert saved_by_a_start(100, keep=3) == [8, 10, 100], "numbers, not text"
    assert saved_by_a_start(20, 30, keep=2) == [20, 30, 100], "a run that went back leaves what is later"


@pytest.fixture
def trainer(tmp_path):
    """A JetRLTrainer that can save and fetch prompts, at step 8."""
    from verl.jetrl.trainer.ppo import JetRLTrainer

    one = object.__new__(JetRLTrainer)
    settings = {"trainer": {"default_local_dir": str(tmp_path)}, "data": {"train_batch_size": 6, "gen_batch_size": None}}
    one.config, one.global_steps = OmegaConf.create(settings), 8
    return one


@pytest.fixture
def events(monkeypatch) -> list[str]:
    """What happens to files, in order: "name" is brought to the disk, "> name" replaced, "- name" removed."""
    found: list[str] = []
    fsync, replace, unlink = os.fsync, os.replace, Path.unlink

    def note(event: str, action, *args, **kwargs) -> None:
        found.append(event)
        action(*args, **kwargs)

    monkeypatch.setattr(os, "fsync", lambda fd: note(Path(os.readlink(f"/proc/self/fd/{fd}")).name, fsync, fd))
    monkeypatch.setattr(os, "replace", lambda old, new: note(f"> {Path(new).name}", replace, old, new))
    monkeypatch.setattr(Path, "unlink", lambda self, *args, **kwargs: note(f"- {self.name}", unlink, self, *args, **kwargs))
    return found


def test_the_mark_comes_when_all_is_on_the_disk(trainer, monkeypatch, tmp_path, events):
    """And an older one goes before anything is written."""
    made(tmp_path, 8)
    events.clear()

    def save(self) -> None:
        events.append("verl saves")
        (tmp_path / "global_step_8/actor/huggingface").mkdir()
        for name in ("data.pt", "actor/optim.pt", "actor/huggingface/config.json"):
            (tmp_path / "global_step_8" / name).write_text(name)

    monkeypatch.setattr(type(trainer).__mro__[1], "_save_checkpoint", save)
    trainer._save_checkpoint()
    assert events[:3] == [f"- {checkpoints.MARK}", "global_step_8", "verl saves"]
    saved, marked = events[3:-3], events[-3:]
    files = ["data.pt", "actor", "model.pt", "optim.pt", "huggingface", "config.json"]
    assert sorted(saved) == sorted([*files, "global_step_8", tmp_path.name])
    assert marked[0].startswith(f".{checkpoints.MARK}.") and marked[1:] == [f"> {checkpoints.MARK}", "global_step_8"]


def test_a_save_over_a_whole_checkpoint_that_is_killed_leaves_none(trainer, monkeypatch, tmp_path):
    """A run that began anew, or went back, reaches a step that was saved before; or one of which verl left the mark."""
    made(tmp_path, 4)
    made(tmp_path, 8)

    def killed_while_saving(self) -> None:
        (tmp_path / "global_step_8/actor/model.pt").write_text("half")
        raise KeyboardInterrupt

    monkeypatch.setattr(type(trainer).__mro__[1], "_save_checkpoint", killed_while_saving)
    with pytest.raises(KeyboardInterrupt):
        trainer._save_checkpoint()
    assert list(checkpoints.whole(tmp_path)) == [4] and checkpoints.repair(tmp_path) == 4


def test_resharded_files_are_on_the_disk_before_the_old_ones_go(tmp_path, events):
    actor = made(tmp_path, 8) / "actor"
    (actor / "model.pt").unlink()
    for rank in range(2):
        torch.save({"weight": torch.ones(3)}, checkpoints.shard_path(actor, "model", 2, rank))
    (actor / checkpoints.FSDP_CONFIG).write_text('{"world_size": 2}')
    events.clear()
    assert checkpoints.reshard(actor, 1) == [actor]
    new, (old, other) = "model_world_size_1_rank_0.pt", (f"- model_world_size_2_rank_{rank}.pt" for rank in range(2))
    assert events[:3] == [f"{new}.partial", f"> {new}", "actor"]
    assert events[3].startswith(f".{checkpoints.FSDP_CONFIG}.") and events[4:6] == [f"> {checkpoints.FSDP_CONFIG}", "actor"]
    assert sorted(events[6:]) == [old, other]


@pytest.mark.parametrize("chunk", [None, 6, 3, 1])
def test_the_prompts_of_a_step_have_names_of_their_own(trainer, monkeypatch, chunk):
    """However many fetches they come in: the queue keeps one of two prompts of one name, and a step would wait for both."""
    from verl.utils import tensordict_utils as tu

    trainer.config.data.gen_batch_size = chunk
    left = iter(range(100))

    def fetch(self):
        indices = [next(left) for _ in range(chunk or 6)]
        uids = np.array([f"random {index}" for index in indices], dtype=object)
        return tu.get_tensordict({"index": np.array(indices, dtype=object), "uid": uids, "ids": torch.tensor(indices)})

    monkeypatch.setattr(type(trainer).__mro__[1], "_fetch_one_gen_batch", fetch)
    batch = trainer._next_train_batch()
    assert list(batch["uid"]) == [f"s8p{i}" for i in range(6)] and batch["ids"].tolist() == list(range(6))
    assert trainer._prompts == list(range(6)) and batch["global_steps"] == 8


# --- what is refused --------------------------------------------------------------------------------------------------


def test_a_run_of_another_size_names_the_command(saved, tmp_path):
    """verl would look for files of its own number of processes, and say that one of them is missing."""
    config = OmegaConf.create({"trainer": {"total_training_steps": STEP + 1, "nnodes": 1, "n_gpus_per_node": 1}})
    arm = run.Arm(tmp_path, "jetrl", tmp_path / "my runs" / "jetrl", config, [])
    shutil.copytree(saved[2][0] / "qwen3", arm.folder / "checkpoints")
    with pytest.raises(SystemExit, match="was saved by 2 processes, this run has 1.*\n.*reshard .* --world-size 1") as stop:
        arm.run()
    words = shlex.split(str(stop.value).splitlines()[1])
    assert words[:3] == ["python", "-m", "verl.jetrl.checkpoints"] and checkpoints.main(words[3:]) == 0
    arm._require_shards(arm.folder / "checkpoints" / f"global_step_{STEP}")
    config.trainer.nnodes = 2
    with pytest.raises(SystemExit, match="was saved by 1 processes, this run has 2"):
        arm._require_shards(arm.folder / "checkpoints" / f"global_step_{STEP}")


def unfinished(folder: Path) -> None:
    (folder.parent / checkpoints.MARK).unlink()


def incomplete(folder: Path) -> None:
    (folder / "optim_world_size_2_rank_1.pt").unlink()


def foreign(folder: Path) -> None:
    (folder / checkpoints.FSDP_CONFIG).unlink()


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (unfinished, "is not a whole checkpoint: its save was interrupted"),
        (incomplete, "lacks optim_world_size_2_rank_1.pt: with several nodes, bring all files to one folder"),
        (foreign, "no checkpoint of verl's FSDP engine: there is no fsdp_config.json"),
        (lambda folder: shutil.rmtree(folder.parent), "no such folder"),
    ],
)
def test_what_cannot_be_resharded(saved, damage, message, tmp_path, capsys):
    folder = actor(copied(saved, 2, tmp_path), "qwen3")
    damage(folder)
    before = sorted(tmp_path.rglob("*.pt"))
    for one in (folder, folder.parent) if folder.is_dir() else (folder.parent,):
        assert checkpoints.main(["reshard", str(one), "--world-size", "1"]) == 2
        assert message in capsys.readouterr().err
    assert [path for path in before if not path.is_file()] == []


def test_a_number_of_processes_is_positive(saved, capsys):
    assert checkpoints.main(["reshard", str(saved[2][0] / "qwen3" / f"global_step_{STEP}"), "--world-size", "0"]) == 2
    assert "--world-size 0: at least 1 process" in capsys.readouterr().err


# --- kills ------------------------------------------------------------------------------------------------------------

KILL = """
import os, signal, sys, torch
save, left = torch.save, [int(sys.argv.pop(1))]
def killed(value, path):
    save(value, path)
    left[0] -= 1
    if left[0] < 0:
        os.truncate(path, os.path.getsize(path) // 2)
        os.kill(os.getpid(), signal.SIGKILL)
torch.save = killed
"""


def killed(code: str, after: int, *arguments: object) -> None:
    """Runs ``code``, killed while it writes its file number ``after``, half of which stays."""
    command = [sys.executable, "-c", KILL + code, str(after), *map(str, arguments)]
    assert subprocess.run(command).returncode == -signal.SIGKILL


def test_a_kill_while_resharding_leaves_the_checkpoint(saved, tmp_path):
    folder = copied(saved, 2, tmp_path)
    code = "from verl.jetrl import checkpoints\ncheckpoints.main(sys.argv[1:])"
    killed(code, 1, "reshard", actor(folder, "qwen2"), "--world-size", 1)
    assert checkpoints.world_size_of(actor(folder, "qwen2")) == 2
    for path in actor(saved[2][0], "qwen2").glob("*.pt"):
        assert path.read_bytes() == (actor(folder, "qwen2") / path.name).read_bytes()
    assert checkpoints.reshard(actor(folder, "qwen2"), 1)
    assert sorted(path.name for path in actor(folder, "qwen2").iterdir()) == sorted(
        path.name for path in actor(saved[1][0], "qwen2").iterdir()
    )


def test_a_kill_between_the_new_files_and_the_old_ones_end(saved, tmp_path, monkeypatch):
    folder = actor(copied(saved, 2, tmp_path), "qwen2")

    def stop(_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", stop)
        with pytest.raises(KeyboardInterrupt):
            checkpoints.reshard(folder, 1)
    assert checkpoints.world_size_of(folder) == 1 and len(checkpoints.load_shards(folder, "optim")) == 1
    assert checkpoints.reshard(folder, 1) == []
    assert sorted(path.name for path in folder.glob("*.pt")) == [
        f"{kind}_world_size_1_rank_0.pt" for kind in ("extra_state", "model", "optim")
    ]


SAVE = """
import torch.distributed as dist
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from checkpoint_cases import Run
folder = Path(sys.argv[2])
dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=0, world_size=1)
run = Run("qwen2", dist.init_device_mesh("cpu", (1,), mesh_dim_names=("fsdp",)))
for step in (1, 2):
    run.step()
    run.save(folder / "qwen2", step)
    if step == 1:
        (folder / "qwen2" / "latest_checkpointed_iteration.txt").write_text("1")
        save((run.trainer.masters.arena.data, run.optimizer.state_dict()), folder / "good.pt")
"""


def test_a_kill_while_saving_leaves_the_last_good_one(root, tmp_path):
    """While verl's manager writes the optimizer of the second checkpoint."""
    killed(SAVE, 4, root / "tests", tmp_path)
    folder = tmp_path / "qwen2"
    assert (folder / "global_step_2").is_dir() and checkpoints.repair(folder) == 1
    assert (folder / checkpoints.TRACKER).read_text() == "1"
    assert sorted(path.name for path in folder.glob("global*")) == ["global_step_1"]
    assert json.loads((folder / "global_step_1" / "actor" / checkpoints.FSDP_CONFIG).read_text())["world_size"] == 1
    _, optimizer = torch.load(tmp_path / "good.pt", weights_only=False)
    (found,) = checkpoints.load_shards(folder / "global_step_1" / "actor", "optim")
    for x, y in zip(tree_flatten(optimizer)[0], tree_flatten(found)[0], strict=True):
        local = [getattr(value, "_local_tensor", value) for value in (x, y)]
        assert same_bytes(*local) if isinstance(local[0], torch.Tensor) else x == y
