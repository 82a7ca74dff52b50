"""The numerics benchmark: its FP64 network, its noise band, the reward curves of finished runs, and its committed results."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from decoder_cases import MODELS, TOKENS, loss_of, make
from torch.nn.functional import cosine_similarity

from benchmarks import numerics, reference
from verl.jetrl import metric_names as names

STEPS = 60


# --- FP64 ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MODELS)
def test_the_fp64_network_is_the_hugging_face_model(name):
    """Its loss and every gradient, to FP32's accuracy."""
    model = make(name, attn="eager")
    _, wanted = loss_of(model)
    wanted.backward()
    masks = torch.ones_like(TOKENS)
    masks[:, 0] = 0
    weights = dict(model.named_parameters())
    loss, gradients, states = reference.loss_and_gradients(model.config, weights, list(TOKENS), list(masks))
    assert loss == pytest.approx(wanted.item(), rel=1e-6)
    assert gradients.keys() == weights.keys()
    for key, gradient in gradients.items():
        assert gradient.dtype == torch.float64 and gradient.any(), key
        assert numerics.relative([(weights[key].grad, gradient)]) < 1e-4, key
    assert [s.shape for s in states] == [(TOKENS.numel(), model.config.hidden_size)] * (model.config.num_hidden_layers + 1)


def test_masked_tokens_are_not_learned():
    model = make("qwen3")
    masks = torch.zeros_like(TOKENS)
    masks[1, 7:9] = 1
    loss, _, states = reference.loss_and_gradients(model.config, dict(model.named_parameters()), list(TOKENS), list(masks))
    logits, _ = loss_of(model)
    log_p = logits.log_softmax(-1)[1, [6, 7], TOKENS[1, [7, 8]]]
    assert loss == pytest.approx(-log_p.mean().item(), rel=1e-5)
    final = states[-1].view(*TOKENS.shape, -1)
    assert not final[0].any() and not final[1, 8:].any() and final[1, 6:8].any(-1).all()


def test_the_engines_hidden_states_are_the_references(mesh, owned, tmp_path):
    """Hooks on both arms see the gradients of the same tensors, in the same order."""
    model, masks = make("qwen3", tie_word_embeddings=False), torch.ones_like(TOKENS)
    masks[:, 0] = 0
    batch = list(zip(TOKENS, masks, strict=True))
    _, _, exact = reference.loss_and_gradients(model.config, dict(model.named_parameters()), *zip(*batch, strict=True))
    numerics.save(model, tmp_path)
    for arm, bound in (("bf16", 1e-3), ("fp8", 0.02)):
        _, _, found = numerics.arm_gradients(tmp_path, arm, batch)
        assert len(found) == len(exact)
        for index, (ours, theirs) in enumerate(zip(found, exact, strict=True)):
            assert cosine_similarity(ours.double().flatten(), theirs.flatten(), 0) > 1 - bound, (arm, index)


def test_kinds():
    kinds = [numerics.kind_of(f"model.{x}") for x in ("layers.3.self_attn.q_proj.weight", "layers.0.self_attn.q_proj.bias")]
    assert kinds == ["q_proj", "q_proj bias"]
    assert numerics.kind_of("lm_head.weight") == "lm_head" and numerics.kind_of("model.norm.weight") == "norm"
    assert numerics.kind_of(f"{numerics.HIDDEN} of layer 3") == numerics.HIDDEN
    assert numerics.kind_of(numerics.FINAL) == numerics.FINAL


# --- the band -----------------------------------------------------------------------------------------------------------


def test_the_band_is_what_it_says():
    curves = [[0.0, 1.0, 2.0, 3.0], [2.0, 3.0, 4.0, 5.0], [1.0, 1.0, 1.0, 9.0]]
    band = numerics.Band.of(curves, window=2)
    # smoothed: 0.5 1.5 2.5, 2.5 3.5 4.5, 1 1 5; ranges 2, 2.5, 2.5
    np.testing.assert_allclose(band.lower, [0.5 - 1.0, 1.0 - 1.25, 2.5 - 1.25])
    np.testing.assert_allclose(band.upper, [2.5 + 1.0, 3.5 + 1.25, 5.0 + 1.25])
    assert band.share_inside([3.5, 3.5, 6.0, 6.5]) == 1.0, "its edge is inside"
    assert band.share_inside([3.6, 3.6, 6.0, 6.5]) == pytest.approx(1 / 3)
    assert band.share_inside([1.0, 1.0, math.nan, 1.0]) == pytest.approx(1 / 3), "what is no number is outside"
    with pytest.raises(ValueError, match="band has 3"):
        band.share_inside([1.0, 2.0])
    for bad in ([curves[0]], [curves[0], [1.0]], [[1.0], [2.0]]):
        with pytest.raises(ValueError, match="two curves"):
            numerics.Band.of(bad, window=2)


def reward_curves(seeds: int = 4, steps: int = STEPS) -> np.ndarray:
    """Noisy rewards that rise from 0.3 to 0.8."""
    rng = np.random.default_rng(0)
    trend = 0.3 + 0.5 * np.linspace(0, 1, steps)
    return trend + 0.02 * rng.standard_normal((seeds, 1)) + 0.05 * rng.standard_normal((seeds, steps))


def test_one_more_seed_is_inside_and_a_collapse_is_outside():
    *bf16, other = reward_curves()
    found = numerics.compare(bf16[0] + 0.003, bf16)
    # Not all of it: where the seeds cross, the band has no width.
    assert numerics.ENOUGH < found["inside_share"] < 1.0 and found["inside"] == 1.0
    assert found["final_difference_same_data"] == pytest.approx(0.003)
    assert found["abs_difference_same_data"] == pytest.approx(0.003)
    collapsed = other.copy()
    collapsed[STEPS // 2 :] = 0.1
    worse = numerics.compare(collapsed, bf16)
    assert worse["inside_share"] < 0.7 and worse["inside"] == 0.0
    assert worse["final_difference"] == pytest.approx(0.1 - np.mean([c[-numerics.WINDOW :].mean() for c in bf16]))
    ends = [c[-numerics.WINDOW :].mean() for c in bf16]
    assert worse["final_bf16_range"] == pytest.approx(max(ends) - min(ends))


def test_differences_seed_by_seed():
    ends = {"fp8": (1.0, 2.0, 6.0), "bf16": (2.0, 2.0, 5.0)}
    runs = {arm: [{"loss": [9.0] * 30 + [x] * numerics.WINDOW, "held_out": [9.0, x]} for x in xs] for arm, xs in ends.items()}
    found = numerics.by_seed(runs["fp8"], runs["bf16"])
    for curve in ("loss", "held_out"):
        assert found[f"seeds_{curve}_final_difference"] == pytest.approx(0.0)
        assert found[f"seeds_{curve}_final_difference_error"] == pytest.approx(1 / 3**0.5)
        assert found[f"seeds_{curve}_final_fp8_range"] == pytest.approx(5.0)


def test_fp8_and_bf16_are_held_against_the_same_band():
    """Every curve against the BF16 seeds with other orders of the data, its own left out."""
    curves = reward_curves(seeds=9).tolist()
    made = lambda curve: {"loss": curve, "held_out": curve[::10]}  # noqa: E731
    runs = {f"bf16_seed{i}": made(curve) for i, curve in enumerate(curves[:8])}
    same = numerics.in_band_of_all({**runs, **{f"fp8_seed{i}": made(curves[i]) for i in range(8)}})
    for curve in ("loss", "held_out"):
        assert same[f"band_{curve}_inside_share_fp8"] == same[f"band_{curve}_inside_share_bf16"]
    assert same["band_loss_final_fp8"] == same["band_loss_final_bf16"]
    found = numerics.in_band_of_all({**runs, "fp8_seed0": made(curves[8]), "fp8_seed1": made([x + 1 for x in curves[1]])})
    assert found["band_loss_inside_share_fp8_seed1"] == 0 < found["band_loss_inside_share_fp8_seed0"]
    assert found["band_loss_inside_fp8"] <= 0.5


# --- finished runs --------------------------------------------------------------------------------------------------------


@pytest.fixture
def finished(tmp_path) -> Callable[..., Path]:
    """Writes the folder of a run as the launcher and verl do."""

    def write(name: str, curve, seed: int, linear: str = "bf16", state: str = "finished", rollout_seed=None) -> Path:
        folder = tmp_path / name
        (folder / "segments").mkdir(parents=True)
        lines = [{"step": 0, "data": {"val-core/sums/reward/mean@1": 0.5}}]
        lines += [{"step": i + 1, "data": {names.REWARD: x, names.TIME_STEP: 1.0}} for i, x in enumerate(map(float, curve))]
        (folder / "segments/001.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        status = {"state": state, "total_steps": len(curve), "device": "CPU X, 2 cores", "versions": {"verl": "0.9.1"}}
        (folder / "status.json").write_text(json.dumps(status | {"command": f"run {name}"}))
        flow = {"fsdp_config": {"precision_flow": {"linear": linear}}}
        config = {"data": {"seed": seed}, "actor_rollout_ref": {"rollout": {"seed": rollout_seed or seed}, "actor": flow}}
        (folder / "config.yaml").write_text(yaml.dump(config))
        return folder

    return write


def test_reward_curves_of_finished_runs(finished, tmp_path):
    *bf16, _ = reward_curves()
    runs = [finished(f"runs-{i}/tiny/bf16", curve, 42 + i) for i, curve in enumerate(bf16)]
    part = numerics.grpo(finished("runs-0/tiny/jetrl", bf16[0] + 0.002, 42, "fp8"), runs)
    assert part["figures"]["grpo_reward_inside"] == 1.0 and part["device"]["type"] == "cpu"
    assert list(part["samples"]) == ["bf16_seed42", "bf16_seed43", "bf16_seed44", "jetrl_seed42"]
    assert list(part["runs"].values()) == ["run runs-0/tiny/bf16", "run runs-1/tiny/bf16", "run runs-2/tiny/bf16"] + [
        "run runs-0/tiny/jetrl"
    ]
    worse = numerics.grpo(finished("runs-0/tiny/worse", bf16[0] * np.linspace(1, 0.2, STEPS), 42, "fp8"), runs)
    assert worse["figures"]["grpo_reward_inside"] == 0.0
    # Results: a part replaces its earlier self, and no other.
    path = tmp_path / "numerics.json"
    gpu = {**part, "device": {"type": "gpu"}, "figures": {"grpo_reward_inside": 0.5}}
    for written in (worse, gpu, part):
        numerics.merge(path, {"grpo": written})
    result = json.loads(path.read_text())
    assert list(result["parts"]) == ["grpo_cpu", "grpo_gpu"] and result["parts"]["grpo_cpu"]["samples"] == part["samples"]
    assert result["figures"]["grpo_reward_inside_cpu"] == 1.0 and result["figures"]["grpo_reward_inside_gpu"] == 0.5
    assert "jetrl_seed42" in numerics.tables(part)


def test_runs_that_differ_in_the_rollouts_seed_alone_are_all_kept(finished):
    *curves, _ = reward_curves()
    runs = [finished(f"runs-{i}/tiny/bf16", curve, 42, rollout_seed=42 + i) for i, curve in enumerate(curves)]
    part = numerics.grpo(finished("runs-0/tiny/jetrl", curves[0], 42, "fp8"), runs)
    assert list(part["samples"]) == ["bf16_seed42", "bf16_seed42-43", "bf16_seed42-44", "jetrl_seed42"]


def test_runs_that_cannot_be_compared_are_refused(finished):
    curve = reward_curves()[0]
    bf16 = [finished(f"bf16-{seed}", curve, seed) for seed in (1, 2, 3)]
    fp8 = finished("jetrl", curve, 1, "fp8")
    cases = {
        "state: failed": (finished("failed", curve, 1, "fp8", "failed"), bf16),
        "trains in bf16": (finished("bf16-as-fp8", curve, 1), bf16),
        "trains in fp8": (fp8, [bf16[0], finished("other", curve, 2, "fp8")]),
        "must differ": (fp8, [bf16[0], finished("again", curve, 1)]),
        "must be the first": (finished("seed-2", curve, 2, "fp8"), bf16),
        "the same number": (finished("short", curve[:40], 1, "fp8"), bf16),
    }
    for message, (run, others) in cases.items():
        with pytest.raises(SystemExit, match=message):
            numerics.grpo(run, others)


# --- the committed results ------------------------------------------------------------------------------------------------


def test_the_committed_figures_are_those_of_the_samples():
    parts = json.loads(numerics.RESULTS.read_text())["parts"]
    assert "sft_cpu" in parts or "sft_gpu" in parts
    for name, part in parts.items():
        assert part["command"] and part["versions"]["torch"], name
        curves = list(part["samples"].values())
        if name.startswith("sft"):
            *bf16, fp8 = curves
            for curve, window in (("loss", numerics.WINDOW), ("held_out", 1)):
                for figure, value in numerics.compare(fp8[curve], [run[curve] for run in bf16], window).items():
                    assert part["figures"][f"sft_{curve}_{figure}"] == pytest.approx(value), (name, curve, figure)
        elif name.startswith("seeds"):
            runs = parts[name.replace("seeds", "sft")]["samples"] | part["samples"]
            pairs = [[runs[f"{arm}_seed{seed}"] for seed in numerics.SEEDS] for arm in ("fp8", "bf16")]
            assert part["figures"] == pytest.approx(numerics.by_seed(*pairs)), name
        elif name.startswith("band"):
            runs = [parts[name.replace("band", other)]["samples"] for other in ("sft", "seeds")]
            assert part["figures"] == pytest.approx(numerics.in_band_of_all({**runs[0], **runs[1], **part["samples"]})), name
        elif name.startswith("grpo"):
            for figure, value in numerics.compare(curves[-1], curves[:-1]).items():
                assert part["figures"][f"grpo_reward_{figure}"] == pytest.approx(value), (name, figure)
