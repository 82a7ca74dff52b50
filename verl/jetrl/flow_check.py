"""The precision-flow check: trainer's and rollout's module trees, operator by operator.

``describe_trainer`` and ``describe_rollout`` walk the two trees where they live; :func:`compare` joins the rows by
operator; :func:`table` prints them.  A run whose sides differ is refused unless it is a mixed baseline and says so
(``jetrl.mixed_precision=true``).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import nn

from verl.jetrl.model.decoder import Fp8Linear
from verl.jetrl.weights import PART_OF

BF16 = "bf16"
FP8_BLOCK = "fp8 e4m3, w 128x128, x 1x128, fp32 scales"


class PrecisionMismatch(RuntimeError):
    """Trainer and rollout would compute the policy in different precisions."""


@dataclass(frozen=True)
class Row:
    """One kind of operator: its name in the rollout's layout, how many there are, precision on both sides."""

    operator: str
    count: int
    trainer: str
    rollout: str

    @property
    def equal(self) -> bool:
        return self.trainer == self.rollout


def _row(name: str, precision: str) -> dict[str, str]:
    return {"name": name, "precision": precision}


def describe_trainer(model: nn.Module) -> list[dict[str, str]]:
    """Rows ``{"name", "precision"}`` of the trainer's weight-bearing operators, under the rollout's fused names.

    ``model``: the shared decoder, or a Hugging Face model, where BF16 means FP32 masters computed in BF16 (FSDP2's mixed
    precision).
    """
    rows: dict[str, str] = {}
    for name, module in model.named_modules():
        if not isinstance(getattr(module, "weight", None), nn.Parameter):
            continue
        parent, _, last = name.rpartition(".")
        name = f"{parent}.{PART_OF[last][0]}" if last in PART_OF else name
        precision = FP8_BLOCK if isinstance(module, Fp8Linear) else BF16
        if rows.setdefault(name, precision) != precision:
            rows[name] = f"{rows[name]} / {precision}"
    return [_row(name, precision) for name, precision in rows.items()]


def describe_rollout(model: nn.Module) -> list[dict[str, str]]:
    """Rows ``{"name", "precision"}`` of vLLM's weight-bearing operators."""
    rows = []
    for name, module in model.named_modules():
        weight = getattr(module, "weight", None)
        if not isinstance(weight, nn.Parameter):
            continue
        if isinstance(module, Fp8Linear):
            precision = FP8_BLOCK
        elif weight.dtype == torch.float8_e4m3fn:
            precision = f"fp8 e4m3, {type(module.quant_method).__name__} of vLLM, quantized again by the rollout"
        else:
            precision = BF16 if weight.dtype == torch.bfloat16 else str(weight.dtype)
        rows.append(_row(name, precision))
    return rows


def compare(trainer: Iterable[dict[str, str]], rollout: Iterable[dict[str, str]]) -> list[Row]:
    """Rows joined by operator name and counted by kind (layer numbers folded into "*")."""
    sides = [{r["name"]: r["precision"] for r in rows} for rows in (trainer, rollout)]
    if "lm_head" not in sides[1]:  # tied: vLLM has one module for both
        sides[0].pop("lm_head", None)
    counted: dict[tuple[str, str, str], int] = {}
    for name in dict.fromkeys([*sides[0], *sides[1]]):
        kind = ".".join("*" if part.isdigit() else part for part in name.split("."))
        key = (kind, sides[0].get(name, "absent"), sides[1].get(name, "absent"))
        counted[key] = counted.get(key, 0) + 1
    return [Row(kind, count, t, r) for (kind, t, r), count in counted.items()]


def table(rows: list[Row]) -> str:
    """The rows as an aligned text table."""
    cells = [("operator", "count", "trainer", "rollout", "equal")]
    cells += [(r.operator, str(r.count), r.trainer, r.rollout, "yes" if r.equal else "NO") for r in rows]
    widths = [max(len(row[i]) for row in cells) for i in range(5)]
    return "\n".join("  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip() for row in cells)


def require_equal(rows: list[Row], mixed_baseline: bool) -> None:
    """Raises :class:`PrecisionMismatch` when the sides differ and the run is not a mixed baseline, or the reverse."""
    if not rows:
        raise PrecisionMismatch("neither trainer nor rollout has a weight-bearing operator: nothing was compared")
    different = [r for r in rows if not r.equal]
    if different and not mixed_baseline:
        raise PrecisionMismatch(
            "trainer and rollout differ in precision:\n" + table(different) + "\nSet the same precision on both sides "
            "(actor_rollout_ref.actor.fsdp_config.precision_flow), or declare a mixed baseline: jetrl.mixed_precision=true"
        )
    if mixed_baseline and not different:
        raise PrecisionMismatch(
            "jetrl.mixed_precision=true, but trainer and rollout run in the same precision: the mixed baseline's FP8 "
            "rollout is off. Set actor_rollout_ref.rollout.quantization=fp8, or jetrl.mixed_precision=false"
        )
