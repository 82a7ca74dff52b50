"""Numerics of FP8 training against BF16's: gradient errors, and loss or reward curves inside the noise band of three seeds.

    python -m benchmarks.numerics                          # gradients and SFT curves on what this machine has
    python -m benchmarks.numerics --parts gradients        # one of them
    python -m benchmarks.numerics --parts seeds            # FP8's SFT curve with the other seeds too, after the part sft
    python -m benchmarks.numerics --parts band             # a band of eight BF16 seeds, after the parts sft and seeds
    python -m benchmarks.numerics --grpo runs-0/tiny/jetrl --bf16 runs-0/tiny/bf16 runs-1/tiny/bf16 runs-2/tiny/bf16

The last reads finished runs of the same number of steps, 20 at least (``recipes/tiny`` has 15), made by
``python -m verl.jetrl.run recipes/tiny --arms bf16,jetrl --runs runs-0 trainer.total_training_steps=60`` and, for N = 1, 2 and
more, ``python -m verl.jetrl.run recipes/tiny --arms bf16 --runs runs-N trainer.total_training_steps=60 data.seed=N
actor_rollout_ref.rollout.seed=N``.  Three seeds make a narrow band, which a fourth BF16 run leaves more often than not; with
eight it seldom does.

``benchmarks/results/numerics.json`` holds ``parts``: each with ``command``, ``device``, ``versions``, ``notes``, ``samples``,
``tables`` and ``figures``.  A run replaces the parts that it measured, on a CPU ``*_cpu`` and on a GPU ``*_gpu``.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import re
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks import reference, trainers
from verl.jetrl.parity import shake

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks/results/numerics.json"

# --- the noise band ---------------------------------------------------------------------------------------------------

WINDOW = 20  # steps of the trailing mean that smooths a curve
WIDEN = 0.5  # the band reaches this share of its seeds' range beyond their smallest and largest
ENOUGH = 0.95  # a curve counts as inside the band when this share of its steps is


def smoothed(curve: Sequence[float], window: int) -> np.ndarray:
    """Trailing mean; the first ``window`` - 1 points have none."""
    return np.convolve(np.asarray(curve, dtype=float), np.ones(window) / window, "valid")


@dataclass(frozen=True)
class Band:
    """The noise band of several seeds' curves: from their smallest to their largest value, widened by WIDEN of that range."""

    lower: np.ndarray
    upper: np.ndarray
    window: int

    @classmethod
    def of(cls, curves: Sequence[Sequence[float]], window: int = WINDOW) -> Band:
        if len(curves) < 2 or len({len(curve) for curve in curves}) != 1 or len(curves[0]) < window:
            raise ValueError(f"a band needs two curves or more of one length, {window} points at least")
        smooth = np.stack([smoothed(curve, window) for curve in curves])
        low, high = smooth.min(0), smooth.max(0)
        return cls(low - WIDEN * (high - low), high + WIDEN * (high - low), window)

    def share_inside(self, curve: Sequence[float]) -> float:
        """Share of the steps at which the smoothed curve lies in the band.  What is no number lies outside."""
        smooth = smoothed(curve, self.window)
        if smooth.shape != self.lower.shape:
            raise ValueError(f"the band has {len(self.lower)} smoothed points, the curve {len(smooth)}")
        return float(((smooth >= self.lower) & (smooth <= self.upper)).mean())


def compare(fp8: Sequence[float], bf16: Sequence[Sequence[float]], window: int = WINDOW) -> dict[str, float]:
    """FP8's curve against the BF16 seeds', the first of which saw the same data in the same order."""
    last = lambda curve: float(np.mean(curve[-window:]))  # noqa: E731
    band, ends = Band.of(bf16, window), [last(curve) for curve in bf16]
    share = band.share_inside(fp8)
    others = [Band.of([*bf16[:i], *bf16[i + 1 :]], window).share_inside(bf16[i]) for i in range(len(bf16)) if len(bf16) > 2]
    return {
        "inside_share": share,
        "inside": float(share >= ENOUGH),
        # What the definition says of BF16 itself: each seed against the band of the others.
        "inside_share_bf16_seed_of_others": float(np.mean(others)) if others else float("nan"),
        "band_width": float((band.upper - band.lower).mean()),
        "abs_difference_same_data": float(np.abs(smoothed(fp8, window) - smoothed(bf16[0], window)).mean()),
        "final_fp8": last(fp8),
        "final_bf16": float(np.mean(ends)),
        "final_difference": last(fp8) - float(np.mean(ends)),
        "final_difference_same_data": last(fp8) - ends[0],
        "final_bf16_range": max(ends) - min(ends),
    }


BAND_NOTE = (
    f"band: at each step from the smallest to the largest of the BF16 seeds' curves (trailing mean over {WINDOW} steps; "
    f"held-out losses as they are), widened on each side by {WIDEN} of that range. inside: at least {ENOUGH:.0%} of the steps. "
    "inside_share_bf16_seed_of_others: the same of each BF16 seed against the band of the others, averaged. same_data: "
    "against the BF16 seed with FP8's order of the data. final: mean over the last window."
)

# --- models -------------------------------------------------------------------------------------------------------------

SIZES = dict(
    vocab_size=384, hidden_size=256, intermediate_size=512, num_attention_heads=4, num_key_value_heads=2,
    num_hidden_layers=4, max_position_embeddings=512,
)  # fmt: skip


def whole_tokenizer():
    """The demo's tokenizer with a token for every id of the model: there is no padding, which only the FP8 arm would mask."""
    from recipes.tiny.train_model import VOCAB_SIZE, make_tokenizer

    tokenizer = make_tokenizer()
    tokenizer.add_tokens([f"<|unused{i}|>" for i in range(VOCAB_SIZE - len(tokenizer))])
    return tokenizer


def random_model(seed: int = 0, **config: object) -> nn.Module:
    """A model whose norms and biases are not the ones and zeros that Hugging Face starts with."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(seed)
    values = SIZES | config
    made = AutoConfig.for_model(values.pop("model_type"), initializer_range=SIZES["hidden_size"] ** -0.5, **values)
    return shake(AutoModelForCausalLM.from_config(made, dtype=torch.float32))


def trained_model() -> nn.Module:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(ROOT / "recipes/tiny/model", dtype=torch.float32)


def examples(seed: int, split: str, count: int) -> list[tuple[Tensor, Tensor]]:
    """Token ids and loss masks of the demo's problems with their correct solutions."""
    from recipes.tiny import task
    from recipes.tiny.train_model import IGNORE, batch_of, make_tokenizer

    tokenizer, found = make_tokenizer(), []
    for problem in itertools.islice(task.generate(seed, split), count):
        ids, labels = batch_of([problem], 0.0, random.Random(0), tokenizer)
        found.append((ids[0], (labels[0] != IGNORE).long()))
    return found


def random_tokens(sequences: int = 4, length: int = 200) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, SIZES["vocab_size"], (sequences, length), generator=generator)
    masks = torch.ones_like(ids)
    masks[:, 0] = 0  # nothing predicts a sequence's first token
    return list(zip(ids, masks, strict=True))


def save(model: nn.Module, folder: Path) -> Path:
    model.save_pretrained(folder)
    whole_tokenizer().save_pretrained(folder)
    return folder


# --- gradients against FP64 ---------------------------------------------------------------------------------------------

CASES = {  # model, its batch
    "qwen3": (lambda: random_model(model_type="qwen3", head_dim=64, tie_word_embeddings=False), random_tokens),
    "qwen2.5": (lambda: random_model(model_type="qwen2", tie_word_embeddings=True), random_tokens),
    "tiny-trained": (trained_model, lambda: examples(1, "validation", 16)),
}
HIDDEN, FINAL = "hidden states", "final norm's output"
GRADIENT_NOTE = (
    "bf16 and fp8: ||g - g64|| / ||g64|| of the gradient of the mean next-token loss, all layers of a kind together. g64: the "
    "same network in FP64 on the same FP32 weights (benchmarks/reference.py). Both arms are verl's FSDP2 engine as a recipe "
    "builds it: bf16 the Hugging Face model with BF16 parameters under autocast, fp8 the fork's decoder. fp8 to bf16: "
    "||g_fp8 - g_bf16|| / ||g_bf16||. qwen3 and qwen2.5: random weights, the latter with biases and a tied head; tiny-trained: "
    "the demo's trained model on its own task. samples: per parameter, and per layer of the hidden states."
)


def kind_of(parameter: str) -> str:
    """``model.layers.3.self_attn.q_proj.weight`` to ``q_proj``; biases keep their word, hidden states lose their layer."""
    if parameter.startswith((HIDDEN, FINAL)):
        return parameter.partition(" of layer")[0]
    *_, owner, what = parameter.split(".")
    return owner if what == "weight" else f"{owner} {what}"


def named(of_weights: Mapping[str, Tensor], of_states: Sequence[Tensor]) -> dict[str, Tensor]:
    """All gradients in one dictionary."""
    *layers, final = of_states
    return {**of_weights, **{f"{HIDDEN} of layer {i}": gradient for i, gradient in enumerate(layers)}, FINAL: final}


def relative(pairs: Sequence[tuple[Tensor, Tensor]]) -> float:
    """||a - b|| / ||b|| over all pairs (a, b) together, in FP64."""
    pairs = [(a.double().cpu(), b.double().cpu()) for a, b in pairs]
    error, size = (sum(t.square().sum() for t in ts) for ts in ([a - b for a, b in pairs], [b for _, b in pairs]))
    return (error / size).sqrt().item()


def arm_gradients(
    model: Path, arm: str, batch: Sequence[tuple[Tensor, Tensor]]
) -> tuple[float, dict[str, Tensor], list[Tensor]]:
    """What :func:`benchmarks.reference.loss_and_gradients` gives, by verl's engine."""
    with trainers.trainer(model, arm) as engine, engine.train_mode():
        layers = engine.decoder.model.layers if engine.flow.fp8 else engine.module.model.layers
        found: dict[int, Tensor] = {}

        def watch(index: int, x: Tensor) -> None:
            x.register_hook(lambda grad: found.update({index: grad.reshape(-1, grad.shape[-1]).float()}))

        for index, layer in enumerate(layers):
            # FP8: the residual stream is a pair whose sum is taken in the next norm; the gradient of either is the sum's.
            layer.register_forward_hook(lambda _, __, out, i=index: watch(i, out[0] if isinstance(out, tuple) else out))
        engine.module.lm_head.register_forward_pre_hook(lambda _, args: watch(len(layers), args[0]))
        engine.optimizer_zero_grad()
        outputs = engine.forward_backward_batch(trainers.batch_of(*zip(*batch, strict=True)), trainers.sft_loss())
        return sum(outputs["loss"]), trainers.gradients(engine), [found[i] for i in range(len(layers) + 1)]


def gradients(cases: Sequence[str] = tuple(CASES)) -> dict:
    """The part "gradients"."""
    rows, figures, samples = [], {}, {}
    for case in cases:
        make_model, make_batch = CASES[case]
        model, batch = make_model(), make_batch()
        sequences, masks = zip(*batch, strict=True)
        losses, found = {}, {}
        losses["fp64"], *exact = reference.loss_and_gradients(model.config, dict(model.named_parameters()), sequences, masks)
        found["fp64"] = named(*exact)
        with tempfile.TemporaryDirectory() as folder:
            save(model, Path(folder))
            for arm in trainers.ARMS:
                losses[arm], *gradient = arm_gradients(Path(folder), arm, batch)
                found[arm] = named(*gradient)
        kinds: dict[str, list[str]] = {}
        for name in found["fp64"]:
            kinds.setdefault(kind_of(name), []).append(name)

        def error(names: Sequence[str], of: str, to: str = "fp64", found: dict = found) -> float:
            return relative([(found[of][name], found[to][name]) for name in names])

        for kind, names in kinds.items():
            errors = {arm: error(names, arm) for arm in trainers.ARMS}
            ratio = errors["fp8"] / errors["bf16"]
            rows.append(
                {"model": case, "gradient of": kind, **errors, "ratio": ratio, "fp8 to bf16": error(names, "fp8", "bf16")}
            )
        linears = [name for kind, names in kinds.items() if kind.endswith("_proj") for name in names]
        for arm in trainers.ARMS:
            figures[f"gradient_error_{arm}_{case}"] = error(linears, arm)
            figures[f"loss_error_{arm}_{case}"] = abs(losses[arm] - losses["fp64"]) / losses["fp64"]
            samples[f"{case}_{arm}"] = {name: float(f"{error([name], arm):.4g}") for name in found["fp64"]}
    notes = {"gradients": GRADIENT_NOTE, "gradient_error": "the seven kinds of linear layers' weights together."}
    return {"notes": notes, "figures": figures, "tables": {"gradients": rows}, "samples": samples}


# --- loss curves --------------------------------------------------------------------------------------------------------

STEPS, BATCH, EVERY, HELD_OUT = (
    300,
    12,
    10,
    64,
)  # optimizer steps, problems a step, steps between held-out losses, problems there
SEEDS = (0, 1, 2)  # of the data's order; FP8 runs the first
MORE_SEEDS = (3, 4, 5, 6, 7)  # of BF16, for a band that a BF16 run seldom leaves
OPTIMIZER = dict(
    lr=2e-3, weight_decay=0.1, clip_grad=1.0, lr_scheduler_type="cosine", lr_warmup_steps_ratio=0.1, min_lr_ratio=0.1
)
SFT_NOTE = (
    f"next-token loss (nats) of a 2.6M-parameter Qwen3 from random weights, the same in all runs, on the demo's problems with "
    f"correct solutions: {STEPS} steps of {BATCH} problems by verl's FSDP2 engine and sft_loss. A seed is an order of the same "
    f"problems. held_out: on {HELD_OUT} other problems every {EVERY} steps, where no order adds noise."
)


def sft_curve(model: Path, arm: str, problems: Sequence, held_out: Sequence, seed: int, steps: int, batch: int) -> dict:
    """Losses and gradient norms of one run."""
    order = torch.randperm(len(problems), generator=torch.Generator().manual_seed(seed)).tolist()
    loss = trainers.sft_loss()
    found: dict[str, list[float]] = {"loss": [], "held_out": [], "grad_norm": []}
    started = time.perf_counter()
    with trainers.trainer(model, arm, total_training_steps=steps, **OPTIMIZER) as engine:
        for step in range(steps):
            chosen = [problems[i] for i in order[step * batch : (step + 1) * batch]]
            with engine.train_mode():
                out = engine.train_batch(trainers.batch_of(*zip(*chosen, strict=True)), loss)
                engine.lr_scheduler_step()
            found["loss"].append(sum(out["loss"]))
            found["grad_norm"].append(out["metrics"]["grad_norm"])
            if (step + 1) % EVERY == 0:
                with engine.eval_mode():
                    out = engine.infer_batch(trainers.batch_of(*zip(*held_out, strict=True)), loss)
                found["held_out"].append(sum(out["loss"]))
                print(f"{arm}, seed {seed}, step {step + 1}: held out {found['held_out'][-1]:.4f}", flush=True)
    return {name: [round(x, 6) for x in values] for name, values in found.items()} | {"seconds": time.perf_counter() - started}


def sft_runs(runs: Sequence[tuple[str, int]], steps: int, batch: int = BATCH) -> dict[str, dict]:
    """The curves of (arm, seed) pairs, by name."""
    from recipes.tiny.train_model import make_model

    problems, held_out = examples(0, "train", steps * batch), examples(0, "validation", HELD_OUT)
    with tempfile.TemporaryDirectory() as folder:
        model = save(make_model(whole_tokenizer(), seed=0), Path(folder))
        return {f"{arm}_seed{seed}": sft_curve(model, arm, problems, held_out, seed, steps, batch) for arm, seed in runs}


def sft_table(samples: Mapping[str, dict]) -> list[dict]:
    return [
        {"run": name, "first loss": run["loss"][0], "last losses": float(np.mean(run["loss"][-WINDOW:]))}
        | {"held out": run["held_out"][-1], "mean gradient norm": float(np.mean(run["grad_norm"])), "s": run["seconds"]}
        for name, run in samples.items()
    ]


CURVES = (("loss", WINDOW), ("held_out", 1))  # and what smooths them


def sft(steps: int = STEPS) -> dict:
    """The part "sft"."""
    samples = sft_runs([*(("bf16", seed) for seed in SEEDS), ("fp8", SEEDS[0])], steps)
    *bf16, fp8 = samples.values()
    figures = {
        f"sft_{curve}_{figure}": value
        for curve, window in CURVES
        for figure, value in compare(fp8[curve], [run[curve] for run in bf16], window).items()
    }
    notes = {"sft": SFT_NOTE, "band": BAND_NOTE}
    return {"notes": notes, "figures": figures, "tables": {"sft": sft_table(samples)}, "samples": samples}


def by_seed(fp8: Sequence[dict], bf16: Sequence[dict]) -> dict[str, float]:
    """Final FP8 against final BF16 losses of the same seeds: mean difference and its standard error."""
    figures = {}
    for curve, window in CURVES:
        ends = [np.array([np.mean(run[curve][-window:]) for run in runs]) for runs in (fp8, bf16)]
        difference = ends[0] - ends[1]
        figures[f"seeds_{curve}_final_difference"] = float(difference.mean())
        figures[f"seeds_{curve}_final_difference_error"] = float(difference.std(ddof=1) / len(difference) ** 0.5)
        figures[f"seeds_{curve}_final_fp8_range"] = float(ends[0].max() - ends[0].min())
    return figures


def seeds(earlier: Mapping[str, dict], steps: int = STEPS) -> dict:
    """The part "seeds": FP8 with the other seeds too; ``earlier``: the samples of the part "sft"."""
    samples = sft_runs([("fp8", seed) for seed in SEEDS[1:]], steps)
    all_runs = {**earlier, **samples}
    figures = by_seed(*([all_runs[f"{arm}_seed{seed}"] for seed in SEEDS] for arm in ("fp8", "bf16")))
    note = (
        "is a difference between FP8 and BF16 one of the arithmetic, or of one run? FP8 with every seed of BF16's: mean "
        "difference of the final losses of the same seeds, and its standard error over the seeds. BF16's curves, and FP8's of "
        "the first seed, are the part sft's."
    )
    return {"notes": {"seeds": note}, "figures": figures, "tables": {"seeds": sft_table(samples)}, "samples": samples}


def band(earlier: Mapping[str, dict], steps: int = STEPS) -> dict:
    """The part "band": more BF16 seeds; ``earlier``: the samples of the parts "sft" and "seeds"."""
    samples = sft_runs([("bf16", seed) for seed in MORE_SEEDS], steps)
    figures = in_band_of_all({**earlier, **samples})
    note = (
        f"every FP8 curve and every BF16 curve in the band of the {len(SEEDS + MORE_SEEDS) - 1} BF16 seeds with other orders "
        f"of the data; inside_*: the share of the curves that are inside. Seeds {SEEDS} are of the parts sft and seeds."
    )
    notes = {"band": f"{note} {BAND_NOTE}"}
    return {"notes": notes, "figures": figures, "tables": {"band": sft_table(samples)}, "samples": samples}


def in_band_of_all(runs: Mapping[str, dict]) -> dict[str, float]:
    """Every FP8 curve against the band of all BF16 seeds but the one with its order of the data, as each BF16 seed against the
    others: the band of all would be wider for FP8 than for BF16."""
    figures = {}
    for curve, window in CURVES:
        shares: dict[str, list[float]] = {"fp8": [], "bf16": []}
        for name, run in runs.items():
            arm, seed = name.split("_seed")
            others = [other[curve] for key, other in runs.items() if key.startswith("bf16") and key != f"bf16_seed{seed}"]
            shares[arm].append(Band.of(others, window).share_inside(run[curve]))
        figures |= {f"band_{curve}_inside_share_{arm}": float(np.mean(found)) for arm, found in shares.items()}
        figures[f"band_{curve}_inside_fp8"] = float(np.mean([share >= ENOUGH for share in shares["fp8"]]))
        figures[f"band_{curve}_inside_bf16"] = float(np.mean([share >= ENOUGH for share in shares["bf16"]]))
        figures |= {f"band_{curve}_inside_share_fp8_seed{i}": share for i, share in enumerate(shares["fp8"])}
        ends = {arm: [np.mean(run[curve][-window:]) for name, run in runs.items() if name.startswith(arm)] for arm in shares}
        figures |= {f"band_{curve}_final_{arm}": float(np.mean(values)) for arm, values in ends.items()}
        figures[f"band_{curve}_final_bf16_deviation"] = float(np.std(ends["bf16"], ddof=1))
    return figures


# --- reward curves of finished runs ---------------------------------------------------------------------------------------


def grpo(fp8: Path, bf16: Sequence[Path]) -> dict:
    """The part "grpo", from the folders of finished runs; the first of ``bf16`` has the seeds of ``fp8``."""
    from verl.jetrl import metric_names as names
    from verl.jetrl.report.load import load_arm

    arms = [load_arm(folder) for folder in (*bf16, fp8)]
    curves, seeds = [], []
    for folder, arm in zip((*bf16, fp8), arms, strict=True):
        if arm.status.state != "finished" or arm.config is None:
            raise SystemExit(f"{folder} is no finished run (state: {arm.status.state})")
        steps, reward = arm.series(names.REWARD)
        if steps.tolist() != list(range(1, arm.status.total_steps + 1)):
            raise SystemExit(f"{folder}: {names.REWARD} is not recorded at every step from 1 to {arm.status.total_steps}")
        linear = arm.config.actor_rollout_ref.actor.fsdp_config.precision_flow.linear
        if linear != ("fp8" if folder == fp8 else "bf16"):
            raise SystemExit(f"{folder} trains in {linear}")
        curves.append(reward.tolist())
        seeds.append((arm.config.data.seed, arm.config.actor_rollout_ref.rollout.seed))
    if len(set(seeds[:-1])) < len(bf16) or seeds[-1] != seeds[0]:
        raise SystemExit(
            f"seeds (data, rollout) {seeds[:-1]} of BF16 must differ, and FP8's {seeds[-1]} must be the first of them"
        )
    if len({len(curve) for curve in curves}) != 1 or len(curves[0]) < WINDOW:
        raise SystemExit(f"runs of {[len(curve) for curve in curves]} steps: want the same number, {WINDOW} at least")
    samples = {}
    for arm, (data, rollout), curve in zip([*["bf16"] * len(bf16), arms[-1].name], seeds, curves, strict=True):
        samples[f"{arm}_seed{data}" if data == rollout else f"{arm}_seed{data}-{rollout}"] = curve
    rows = [
        {"run": name, "first rewards": float(np.mean(curve[:WINDOW])), "last rewards": float(np.mean(curve[-WINDOW:]))}
        for name, curve in samples.items()
    ]
    return {
        "notes": {"grpo": f"mean reward of a step's responses, {len(curves[0])} GRPO steps.", "band": BAND_NOTE},
        "figures": {f"grpo_reward_{name}": value for name, value in compare(curves[-1], curves[:-1]).items()},
        "tables": {"grpo": rows},
        "samples": samples,
        "device": {"type": "gpu" if "CPU" not in (arms[-1].status.device or "") else "cpu", "name": arms[-1].status.device},
        "versions": arms[-1].status.versions,
        "runs": {str(folder): json.loads((folder / "status.json").read_text()).get("command") for folder in (*bf16, fp8)},
    }


# --- results --------------------------------------------------------------------------------------------------------------


def merge(path: Path, parts: Mapping[str, dict]) -> dict:
    """The results of ``path`` with ``parts`` in place of their earlier selves; written and returned."""
    from verl.jetrl.checkpoints import write_atomically

    result = json.loads(path.read_text()) if path.is_file() else {"parts": {}}
    for name, part in parts.items():
        result["parts"][f"{name}_{part['device']['type']}"] = part
    # A figure's name says where it was measured: a CPU's and a GPU's arithmetic differ.
    result["figures"] = {
        f"{figure}_{part['device']['type']}": value
        for part in result["parts"].values()
        for figure, value in part["figures"].items()
    }
    write_atomically(path, re.sub(r"\n {6,}", " ", json.dumps(result, indent=1)) + "\n")
    return result


def tables(part: dict) -> str:
    """A part's tables and figures in Markdown."""
    from benchmarks.tables import markdown

    found = [markdown(list(rows[0]), [list(row.values()) for row in rows]) for rows in part["tables"].values()]
    return "\n\n".join([*found, markdown(["figure", "value"], [list(item) for item in part["figures"].items()])])


def report(result: dict) -> dict[str, str]:
    """The tables of docs/training.md by name."""
    return {
        f"numerics {name}": f"`{part['command']}`, {part['device']['name']}:\n\n{tables(part)}"
        for name, part in result["parts"].items()
    }


def samples_of(path: Path, *names: str) -> dict[str, dict]:
    """The samples of earlier parts of this kind of machine, together."""
    found, samples = json.loads(path.read_text())["parts"] if path.is_file() else {}, {}
    for name in names:
        part = f"{name}_{trainers.machine()}"
        if part not in found:
            raise SystemExit(f"{path} has no part {part}: run --parts {name} first")
        samples |= found[part]["samples"]
    return samples


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.numerics", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--parts", nargs="+", default=["gradients", "sft"], choices=["gradients", "sft", "seeds", "band"])
    parser.add_argument("--docs", action="store_true", help="only write the tables of --out into docs/training.md")
    parser.add_argument("--steps", type=int, default=STEPS, help="steps of the SFT runs (default %(default)s)")
    parser.add_argument("--grpo", type=Path, metavar="RUN", help="folder of the FP8 run; nothing else is measured")
    parser.add_argument("--bf16", type=Path, nargs="*", default=[], metavar="RUN", help="folders of the BF16 runs for --grpo")
    args = parser.parse_args()
    if args.docs:
        from benchmarks.tables import fill, result_of

        return fill(ROOT / "docs" / "training.md", report(result_of(args.out)))
    if args.bf16 and not args.grpo:
        parser.error("--bf16 needs --grpo with the FP8 run")
    if args.steps < WINDOW:
        parser.error(f"--steps {args.steps}: it must be {WINDOW} or more")
    if args.grpo:
        parts = {"grpo": grpo(args.grpo, args.bf16)}
    else:
        trainers.restart_as_run()
        with trainers.alone():
            measure = {
                "gradients": gradients,
                "sft": lambda: sft(args.steps),
                "seeds": lambda: seeds(samples_of(args.out, "sft"), args.steps),
                "band": lambda: band(samples_of(args.out, "sft", "seeds"), args.steps),
            }
            parts = {name: measure[name]() for name in args.parts}
    from benchmarks.ops import versions
    from verl.jetrl.run import device_name

    machine = {"type": trainers.machine(), "name": device_name()}
    installed = versions() | {name: version(name) for name in ("verl", "transformers")}
    for name, part in parts.items():
        command = " ".join(["python", *sys.orig_argv[1:]])
        parts[name] = {"command": command, "device": machine, "versions": installed, **part}
    merge(args.out, parts)
    for name, part in parts.items():
        print(f"\n{name}\n\n{tables(part)}")


if __name__ == "__main__":
    main()
