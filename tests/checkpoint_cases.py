"""Checkpoints of small models by verl's own manager, saved and loaded by one or two processes.

As a script: one process of ``ranks``.
"""

from __future__ import annotations

import os
import subprocess
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import fully_shard

sys.path.insert(0, str(Path(__file__).parent))  # as a script, there is no conftest
from decoder_cases import MODELS, TOKENS, VOCABULARY, Trainer, loss_of, make, trainer_of  # noqa: E402

from verl.jetrl import checkpoints  # noqa: E402

# Sizes that vLLM's own block FP8 takes: whole blocks, and ragged ones where nothing is fused.
ALIGNED, RAGGED = "aligned", "ragged"
_SIZES = dict(hidden_size=256, intermediate_size=256, head_dim=64, num_attention_heads=4, num_key_value_heads=2)
CASES = {name: (name, {}) for name in MODELS} | {ALIGNED: ("qwen3", _SIZES), RAGGED: ("llama", _SIZES | {"hidden_size": 192})}
STEP = 3


class Run:
    """A trainer with optimizer and schedule, and verl's checkpoint manager over them, as the engine has them."""

    def __init__(self, case: str, mesh, seed: int = 0) -> None:
        from verl.utils.checkpoint.fsdp_checkpoint_manager import FSDPCheckpointManager

        name, changes = CASES[case]
        model = make(name, **changes)
        model.config.architectures = [type(model).__name__]  # as from_pretrained has it
        torch.manual_seed(seed)
        if seed:
            for parameter in model.parameters():
                parameter.data.normal_()
        self.trainer: Trainer = trainer_of(model, mesh)
        fully_shard(self.trainer.model, mesh=mesh, ignored_params=set(self.trainer.model.parameters()))
        self.optimizer = torch.optim.AdamW(self.trainer.model.parameters(), lr=0.02, weight_decay=0.1)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda step: 1 / (1 + step))
        self.manager = FSDPCheckpointManager(self.trainer.model, self.optimizer, self.schedule, tokenizer())
        self.tokens = (TOKENS + 5 * dist.get_rank()) % VOCABULARY

    def step(self) -> tuple[Tensor, dict[str, Tensor]]:
        """One optimizer step; loss and gradients before it."""
        self.trainer.masters.zero_grad()
        loss = loss_of(self.trainer.model, self.tokens)[1]
        loss.backward()
        gradients = self.trainer.gradients()
        self.optimizer.step()
        self.schedule.step()
        self.trainer.masters.write()
        return loss.detach(), gradients

    def save(self, folder: Path, step: int = STEP) -> None:
        """As the trainer does: verl's manager, then the mark."""
        self.manager.save_checkpoint(str(folder / f"global_step_{step}" / "actor"), global_step=step)
        if dist.get_rank() == 0:
            checkpoints.mark_complete(folder, step)
        dist.barrier()

    def load(self, folder: Path, step: int = STEP) -> None:
        """As the engine does: verl's manager, then the arena."""
        self.manager.load_checkpoint(str(folder / f"global_step_{step}" / "actor"))
        self.trainer.masters.write()

    def state(self) -> dict:
        """Everything that a resumed run must have again, whole, and what its next two steps give."""
        masters = {name: p.full_tensor().detach().clone() for name, p in self.trainer.model.named_parameters()}
        moments = [
            {key: getattr(value, "full_tensor", value.clone)().clone() for key, value in self.optimizer.state[p].items()}
            for p in self.trainer.model.parameters()
        ]
        state = dict(masters=masters, moments=moments, arena=self.trainer.arena.data.clone(), rate=self.schedule.get_last_lr())
        random = torch.get_rng_state(), torch.rand(3)
        return state | dict(random=random, next=[self.step() for _ in range(2)], last=self.trainer.arena.data.clone())


def tokenizer():
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = {f"w{i}": i for i in range(VOCABULARY)}
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="w0")), unk_token="w0")


def ranks(world_size: int, command: str, folder: Path, out: Path) -> None:
    """Saves every case below ``folder / case``, or loads every model from each ``folder / kind / case``, on ``world_size``
    processes.

    What each process holds then is in ``out / f"{case}-{rank}.pt"``, or in ``out / kind`` under that name.
    """
    out.mkdir(parents=True)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "VERL_PLATFORM": "cpu"}
    arguments = [sys.executable, __file__, str(world_size), command, str(folder), str(out)]
    started = [subprocess.Popen([*arguments, str(rank)], env=environment) for rank in range(world_size)]
    assert [process.wait(240) for process in started] == [0] * world_size


def main(world_size: int, command: str, folder: Path, out: Path, rank: int) -> None:
    dist.init_process_group(
        "gloo", init_method=f"file://{out}/rendezvous", rank=rank, world_size=world_size, timeout=timedelta(seconds=60)
    )
    mesh = dist.init_device_mesh("cpu", (world_size,), mesh_dim_names=("fsdp",))  # as verl names it
    if command == "save":
        for case in CASES:
            run = Run(case, mesh)
            for _ in range(2):
                run.step()
            run.save(folder / case)
            torch.save(run.state(), out / f"{case}-{rank}.pt")
    else:
        for kind in sorted(path.name for path in folder.iterdir()):
            (out / kind).mkdir(exist_ok=True)
            for case in MODELS:
                run = Run(case, mesh, seed=7)
                run.load(folder / kind / case)
                torch.save(run.state(), out / kind / f"{case}-{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], Path(sys.argv[3]), Path(sys.argv[4]), int(sys.argv[5]))
