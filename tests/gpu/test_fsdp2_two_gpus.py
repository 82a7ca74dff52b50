"""Two GPUs with NCCL: the same arena on both ranks, the gradients of one GPU with the same batch, the same bits run to run
and with the FP8 weights sharded.

``python tests/gpu/test_fsdp2_two_gpus.py cpu`` runs the same check on two processes with gloo.
"""

from __future__ import annotations

import sys
import tempfile
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from verl.jetrl.arena import SLOTS, Arena, layout_of
from verl.jetrl.model.decoder import Decoder
from verl.jetrl.trainer import attention, flash
from verl.jetrl.trainer.decoder import share_decoder
from verl.jetrl.trainer.log_probs import log_probs
from verl.jetrl.trainer.masters import Masters, shard_parameters

VOCABULARY, TOKENS, STEPS = 4096, 512, 3
CONFIG = dict(
    hidden_size=512,
    intermediate_size=1536,
    num_hidden_layers=3,
    num_attention_heads=8,
    num_key_value_heads=4,
    head_dim=64,
    vocab_size=VOCABULARY,
    max_position_embeddings=2048,
    tie_word_embeddings=False,
)
RANKS = 2


class Trainer:
    """The model as the engine builds it."""

    def __init__(self, mesh, device: torch.device, slots: int = 0) -> None:
        attention.register()
        flash.register()
        name = flash.NAME if device.type == "cuda" else attention.NAME
        torch.manual_seed(0)
        config = AutoConfig.for_model("qwen3", **CONFIG)
        self.model = AutoModelForCausalLM.from_config(config, attn_implementation=name, dtype=torch.float32)
        self.decoder = Decoder(config)
        share_decoder(self.model, self.decoder, with_head=False)
        shard_parameters(self.model, mesh, device)
        self.arena, self.device = Arena.private(layout_of(config, slots=slots), device), device
        self.decoder.bind(self.arena)
        self.masters = Masters(self.model, self.decoder, self.arena)
        self.masters.write()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)

    def backward(self, batches: list[Tensor]) -> None:
        for ids in batches:
            ids = ids.to(self.device)
            positions = torch.arange(len(ids), device=self.device)[None]
            with torch.autocast(self.device.type, dtype=torch.bfloat16):
                hidden = self.model(ids[None], position_ids=positions, use_cache=False).logits[0]
            temperature = torch.ones(len(ids), device=self.device)
            chosen, _ = log_probs(hidden, self.decoder.lm_head, ids.roll(-1), temperature, VOCABULARY)
            (-chosen.mean()).backward()

    def step(self, batches: list[Tensor], average: int = 1) -> dict[str, Tensor]:
        """One optimizer step; the gradients, whole, on the CPU.  ``average``: the sum of so many ranks' batches is here."""
        self.masters.zero_grad()
        self.backward(batches)
        self.masters.assign_grads()
        for parameter in self.model.parameters():
            parameter.grad.div_(average)
        gradients = {name: p.grad.full_tensor().cpu() for name, p in self.model.named_parameters()}
        self.optimizer.step()
        self.masters.drop_grads()
        self.masters.write()
        return gradients


def batches_of(rank: int, step: int) -> list[Tensor]:
    """Two micro-batches; each rank has another number of tokens."""
    torch.manual_seed(100 * step + rank)
    return [torch.randint(0, VOCABULARY, (TOKENS - 37 * rank - 11 * i,)) for i in range(2)]


def start(rank: int, ranks: int, folder: str, device: str) -> tuple[dist.DeviceMesh, torch.device]:
    backend = "nccl" if device == "cuda" else "gloo"
    if device == "cuda":
        torch.cuda.set_device(rank)
    where = torch.device(device, rank) if device == "cuda" else torch.device("cpu")
    dist.init_process_group(
        backend, init_method=f"file://{folder}/rendezvous-{ranks}", rank=rank, world_size=ranks, timeout=timedelta(seconds=240)
    )
    return dist.init_device_mesh(device, (ranks,)), where


def two_ranks(rank: int, folder: str, device: str) -> None:
    mesh, where = start(rank, RANKS, folder, device)
    for run in range(2):
        trainer = Trainer(mesh, where)
        gradients, arenas = [], [trainer.arena.data.to("cpu", copy=True)]
        for step in range(STEPS):
            gradients.append(trainer.step(batches_of(rank, step)))
            arenas.append(trainer.arena.data.to("cpu", copy=True))
        weights = {name: p.full_tensor().detach().cpu() for name, p in trainer.model.named_parameters()}
        torch.save((gradients, arenas, weights), f"{folder}/run-{run}-rank-{rank}.pt")
    for checkpointing in (False, True):
        trainer = Trainer(mesh, where, SLOTS)
        trainer.model.train()
        if checkpointing:
            trainer.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        for step in range(STEPS):
            for name, gradient in trainer.step(batches_of(rank, step)).items():
                assert torch.equal(gradient, gradients[step][name]), f"sharded weights, rank {rank}, step {step}: {name}"
    dist.destroy_process_group()


def one_rank(_: int, folder: str, device: str) -> None:
    """The first step with the batches of both; and the arena that it writes from the masters of the two after the last."""
    mesh, where = start(0, 1, folder, device)
    trainer = Trainer(mesh, where)
    begin = trainer.arena.data.to("cpu", copy=True)
    gradients = trainer.step([ids for rank in range(RANKS) for ids in batches_of(rank, 0)], average=RANKS)
    _, _, weights = torch.load(f"{folder}/run-0-rank-0.pt")
    with torch.no_grad():
        for name, parameter in trainer.model.named_parameters():
            parameter.to_local().copy_(weights[name])
    trainer.masters.write()
    torch.save((begin, gradients, trainer.arena.data.to("cpu", copy=True)), f"{folder}/alone.pt")
    dist.destroy_process_group()


def compare(folder: str, device: str) -> None:
    mp.spawn(two_ranks, (folder, device), RANKS)
    mp.spawn(one_rank, (folder, device), 1)
    runs = [[torch.load(f"{folder}/run-{run}-rank-{rank}.pt") for rank in range(RANKS)] for run in range(2)]
    begin, alone, written = torch.load(f"{folder}/alone.pt")
    gradients, arenas, _ = runs[0][0]
    assert torch.equal(begin, arenas[0]) and not any(torch.equal(a, b) for a, b in zip(arenas, arenas[1:], strict=False))
    for run in range(2):
        for rank in range(RANKS):
            other_gradients, other_arenas, _ = runs[run][rank]
            for step in range(STEPS + 1):
                assert torch.equal(arenas[step], other_arenas[step]), f"run {run}, rank {rank}: another arena after step {step}"
            for step in range(STEPS):
                for name, gradient in gradients[step].items():
                    assert torch.equal(gradient, other_gradients[step][name]), f"run {run}, rank {rank}, step {step}: {name}"
    for name, gradient in gradients[0].items():
        error = ((gradient - alone[name]).double().norm() / alone[name].double().norm()).item()
        assert error < 1e-5, f"{name}: {error:.1e} from one rank's gradient"
    assert torch.equal(written, arenas[-1]), "one rank writes other bytes from the same masters"


@pytest.mark.skipif(torch.cuda.device_count() < RANKS, reason=f"needs {RANKS} GPUs")
def test_two_gpus(tmp_path):
    compare(str(tmp_path), "cuda")


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    with tempfile.TemporaryDirectory() as folder:
        compare(folder, sys.argv[1])
    print("equal")
