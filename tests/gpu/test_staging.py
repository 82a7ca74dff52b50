"""The FP8 engine's forward against verl's on the same weights: the same bits, and the host never waits for the GPU.

``python tests/gpu/test_staging.py FOLDER`` runs it without a GPU too, where nothing is copied.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

PROMPT = 17
TESTS = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(TESTS), str(TESTS.parent)]  # as a script, there is no conftest
from decoder_cases import make  # noqa: E402

from benchmarks import numerics, trainers  # noqa: E402


@contextmanager
def no_waiting() -> Iterator[None]:
    """A call that makes the host wait raises where torch knows it, and the GPU is busy long enough to tell of any other."""
    if not torch.cuda.is_available():
        yield
        return
    torch.cuda.synchronize()
    torch.cuda._sleep(4 * 10**9)  # cycles: two seconds
    slept = torch.cuda.Event()
    slept.record()
    torch.cuda.set_sync_debug_mode("error")
    yield
    torch.cuda.set_sync_debug_mode("default")
    assert not slept.query(), "the host waited for the GPU"


def compare(folder: Path) -> None:
    from verl.utils import tensordict_utils as tu
    from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead

    from verl.jetrl.trainer.staging import response_rows

    model = numerics.save(make("qwen2", tie_word_embeddings=False, hidden_size=256, intermediate_size=512), folder / "model")
    torch.manual_seed(0)
    lengths = (40, 1, 30, 57)
    sequences = [torch.randint(0, 384, (n,)) for n in lengths]
    batch = trainers.batch_of(sequences, [torch.ones(n, dtype=torch.long) for n in lengths])
    tu.assign_non_tensor(batch, dp_size=1, batch_num_tokens=sum(lengths))
    # Learned after PROMPT tokens; the same as prompts and responses, of which only these have logits.
    learned = trainers.batch_of(sequences, [(torch.arange(n) >= PROMPT).long() for n in lengths])
    tu.assign_non_tensor(learned, dp_size=1, batch_num_tokens=sum(lengths))
    sampled = learned.copy()
    for name, part in (("prompts", slice(None, PROMPT)), ("responses", slice(PROMPT, None))):
        sampled[name] = torch.nested.as_nested_tensor([ids[part] for ids in sequences], layout=torch.jagged)
    loss = trainers.sft_loss()
    with trainers.alone(), trainers.trainer(model, "fp8") as engine:

        def log_probs(step, batch=batch) -> Tensor:
            with torch.no_grad():
                value, kept = step(batch, loss_function=None, forward_only=True)
            assert value is None or kept["loss"] == 1.0
            return kept["model_output"]["log_probs"]

        def trained(step, batch=batch) -> tuple[float, dict[str, Tensor]]:
            engine.masters.allocate_grads()
            value, kept = step(batch, loss_function=loss, forward_only=False)
            value.backward()
            assert kept["loss"] == value.item()
            found = trainers.gradients(engine)
            engine.masters.drop_grads()
            return kept["loss"], found

        def upstream(*arguments, **named):
            return FSDPEngineWithLMHead.forward_step(engine, *arguments, **named)

        with engine.eval_mode():
            wanted = log_probs(upstream)
            log_probs(engine.forward_step)  # compiles kernels
            with no_waiting():
                got = log_probs(engine.forward_step)
            log_probs(engine.forward_step, sampled)
            with no_waiting():
                of_responses = log_probs(engine.forward_step, sampled).values()
        assert got.offsets().tolist() == wanted.offsets().tolist() and torch.equal(got.values(), wanted.values())
        rows = response_rows(sampled).to(of_responses.device)
        others = torch.ones_like(of_responses, dtype=torch.bool).index_fill_(0, rows, False)
        assert len(rows) == sum(max(n - PROMPT, 0) for n in lengths) and of_responses[others].abs().max() == 0
        assert torch.equal(of_responses[rows], wanted.values()[rows]), "a token's bits do not depend on the others"
        with engine.train_mode():
            (loss_1, gradients_1), (loss_2, gradients_2) = trained(upstream), trained(engine.forward_step)
        assert loss_1 == loss_2 and gradients_1.keys() == gradients_2.keys()
        assert [name for name in gradients_1 if not torch.equal(gradients_1[name], gradients_2[name])] == []
        assert all(gradient.abs().max() > 0 for gradient in gradients_1.values())
        with engine.train_mode():
            (loss_1, gradients_1), (loss_2, gradients_2) = (trained(engine.forward_step, b) for b in (learned, sampled))
        assert loss_1 == loss_2
        for name, gradient in gradients_1.items():  # the head's GEMM has other rows, whose sums go on in another order
            error = (gradient.double() - gradients_2[name].double()).norm() / gradient.double().norm()
            assert error < 3e-2, f"{name}: {error}"


def test_the_same_bits_and_no_waiting(tmp_path):
    """In a process of its own: the engine reads its environment when it is imported."""
    done = subprocess.run([sys.executable, __file__, str(tmp_path)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]


if __name__ == "__main__":
    trainers.restart_as_run()
    compare(Path(sys.argv[1]))
