"""Masters and optimizer states on the CPU while nobody needs them: the same bits as without, and on a GPU the memory back.

``python tests/gpu/test_offload.py FOLDER`` runs it without a GPU too, where nothing moves.
"""

from __future__ import annotations

import gc
import subprocess
import sys
from pathlib import Path

import torch

TESTS = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(TESTS), str(TESTS.parent)]  # as a script, there is no conftest
from decoder_cases import make  # noqa: E402

from benchmarks import numerics, trainers  # noqa: E402
from verl.jetrl.trainer.engine import JetRLEngine  # noqa: E402
from verl.jetrl.weights import combined  # noqa: E402

OFFLOAD = {"param_offload": True, "optimizer_offload": True}
STEPS = 3
MODEL = {"tie_word_embeddings": False, "hidden_size": 256, "intermediate_size": 512}


def devices(engine: JetRLEngine) -> set[str]:
    """Where masters and moments are."""
    found = [p.device for p in engine.module.parameters()]
    found += [v.device for state in engine.optimizer.state.values() for k, v in state.items() if k.startswith("exp_avg")]
    return {device.type for device in found}


def run(model: Path, settings: dict, checkpoints: Path) -> dict:
    """Three steps, a log-prob pass, a checkpoint loaded back; what came out, and where the FP32 tensors were in between."""
    torch.manual_seed(0)
    batch = trainers.batch_of(
        [torch.randint(0, 384, (40,)) for _ in range(4)], [torch.ones(40, dtype=torch.long) for _ in range(4)]
    )
    loss, seen = trainers.sft_loss(), {"losses": [], "resting": set(), "arenas": []}
    gc.collect()  # the engine of before holds itself in cycles
    before = torch.cuda.memory_allocated() if torch.cuda.is_available() else 0
    with trainers.trainer(model, "fp8", settings, lr=1e-3, total_training_steps=STEPS) as engine:

        def rest() -> None:
            seen["resting"] |= devices(engine)
            seen["arenas"].append(combined(engine.weight_digests().values()))
            held = {name: tensor.cpu() for name, tensor in engine.masters.arena}
            seen["bytes"] = [tensor.reshape(-1).view(torch.uint8).clone() for tensor in held.values()]

        rest()
        for step in range(STEPS):
            with engine.train_mode():
                seen["losses"].append(engine.train_batch(batch, loss)["loss"])
            rest()
            if step == 1:
                engine.save_checkpoint(str(checkpoints), global_step=2)
        with engine.eval_mode():
            seen["losses"].append(engine.infer_batch(batch, loss)["loss"])
        engine.load_checkpoint(str(checkpoints))
        rest()
        assert seen["arenas"][-1] == seen["arenas"][2] != seen["arenas"][3]
        if torch.cuda.is_available():
            seen["allocated"] = torch.cuda.memory_allocated() - before
    return seen


def compare(folder: Path) -> None:
    model = numerics.save(make("qwen2", **MODEL), folder / "model")
    with trainers.alone():
        kept, moved = (run(model, settings, folder / f"saved-{len(settings)}") for settings in ({}, OFFLOAD))
    assert moved["losses"] == kept["losses"] and len(set(map(tuple, kept["losses"]))) > STEPS
    assert moved["arenas"] == kept["arenas"]
    assert all(torch.equal(a, b) for a, b in zip(moved["bytes"], kept["bytes"], strict=True))
    assert moved["resting"] == {"cpu"}
    if torch.cuda.is_available():
        assert kept["resting"] == {"cuda"}
        parameters = sum(p.numel() for p in make("qwen2", **MODEL).parameters())
        held = kept["allocated"], moved["allocated"]
        assert held[0] - held[1] > 0.9 * 12 * parameters, f"{held} bytes with {parameters} parameters"


def test_offloading_changes_nothing_but_where_tensors_are(tmp_path):
    """In a process of its own: the engine reads its environment when it is imported."""
    done = subprocess.run([sys.executable, __file__, str(tmp_path)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]


if __name__ == "__main__":
    trainers.restart_as_run()
    compare(Path(sys.argv[1]))
