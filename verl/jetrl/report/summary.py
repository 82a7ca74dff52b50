"""The headline numbers of a report: one value per arm and row, ratios to BF16, and notices a reader must know."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from verl.jetrl import metric_names as names
from verl.jetrl.report.load import Arm

MAX_LAST_K = 5  # steps that the first and the last reward are averaged over, in runs long enough

PHASES = {  # metric -> what a reader calls it, in the order of a step
    names.TIME_ROLLOUT: "rollout",
    names.TIME_LOG_PROB: "log-prob",
    names.TIME_UPDATE: "update",
    names.TIME_WEIGHT_SYNC: "weight sync",
}
OTHER = "other"


@dataclass(frozen=True)
class Row:
    """One row of the table. ``value`` maps an arm to a number, or None where the run has no such metric."""

    key: str  # name in summary.json
    group: str
    label: str
    value: Callable[[Arm], float | None]
    kind: str = "number"  # number | seconds | percent | exact: how it is written
    better: str | None = None  # "lower" | "higher"
    ratio: bool = True


@dataclass(frozen=True)
class Summary:
    """``values[arm][row key]`` and ``ratios[arm][row key]`` (value / baseline's; None where there is none)."""

    arms: list[Arm]
    rows: list[Row]
    last_k: int
    values: dict[str, dict[str, float | None]]
    ratios: dict[str, dict[str, float | None]]
    notices: list[str]

    @property
    def has_baseline(self) -> bool:
        return any(arm.name == names.BASELINE_ARM for arm in self.arms)


def summarize(arms: list[Arm]) -> Summary:
    """Compute the table of all arms. Rows for which no arm has a value are left out."""
    longest = max(len(arm.series(names.REWARD)[0]) for arm in arms)
    last_k = min(MAX_LAST_K, max(1, longest // 4))
    rows = _rows(arms, last_k)
    values = {arm.name: {row.key: row.value(arm) for row in rows} for arm in arms}
    rows = [row for row in rows if any(values[arm.name][row.key] is not None for arm in arms)]
    values = {name: {row.key: of_arm[row.key] for row in rows} for name, of_arm in values.items()}
    baseline = values.get(names.BASELINE_ARM, {})
    ratios = {
        name: {row.key: ratio(of_arm[row.key], baseline.get(row.key)) if row.ratio else None for row in rows}
        for name, of_arm in values.items()
    }
    return Summary(arms, rows, last_k, values, ratios, _notices(arms))


def ratio(value: float | None, baseline: float | None) -> float | None:
    """value / baseline; None unless both are there, none is negative, and the baseline is above zero."""
    if value is None or baseline is None or value < 0 or baseline <= 0:
        return None
    return value / baseline


def phase_times(arm: Arm) -> dict[str, float]:
    """Median seconds per phase of a step, and of what is left ("other"), without warm-up steps. Empty: no times."""
    times = {label: median(arm, metric) for metric, label in PHASES.items()} | {OTHER: _other_time(arm)}
    return {label: seconds for label, seconds in times.items() if seconds is not None}


def validation_label(metric: str) -> str:
    """``val-core/openai/gsm8k/acc/mean@1`` -> ``openai/gsm8k acc mean@1``."""
    *source, variable, statistic = metric.removeprefix(names.VALIDATION_PREFIX).split("/")
    return " ".join(part for part in ("/".join(source), variable, statistic) if part)


def validation_metrics(arms: list[Arm]) -> list[str]:
    return sorted({metric for arm in arms for metric in arm.validation_metrics})


def _rows(arms: list[Arm], k: int) -> list[Row]:
    steps = f"{k} steps" if k > 1 else "step"
    validation = validation_metrics(arms)
    rows = [
        Row("reward_first", "Reward", f"reward, first {steps}", lambda arm: _mean(_finite(arm, names.REWARD)[:k])),
        Row(
            "reward_last",
            "Reward",
            f"reward, last {steps}",
            lambda arm: _mean(_finite(arm, names.REWARD)[-k:]),
            better="higher",
        ),
    ]
    for metric in validation:
        suffix, what = (f"/{metric}", f" ({validation_label(metric)})") if len(validation) > 1 else ("", "")
        rows += [
            Row(
                f"validation_best{suffix}",
                "Reward",
                f"best validation accuracy{what}",
                lambda arm, metric=metric: max(_finite(arm, metric), default=None),
                kind="percent",
                better="higher",
            ),
            Row(
                f"validation_last{suffix}",
                "Reward",
                f"last validation accuracy{what}",
                lambda arm, metric=metric: next(reversed(_finite(arm, metric)), None),
                kind="percent",
                better="higher",
            ),
        ]
    mismatch, clipping, time = "Rollout against trainer", "Clipped tokens", "Time per step"
    rows += [
        _mean_row("abs_dlogp_mean", mismatch, "mean |Δ log p|", names.ABS_DLOGP_MEAN, "exact", "lower"),
        _mean_row("padding_abs_dlogp", mismatch, "of it, padded vocabulary", names.PADDING_ABS_DLOGP, ratio=False),
        _mean_row("k3_kl", mismatch, "k3 KL", names.K3_KL, "number", "lower"),
        Row(
            "abs_dlogp_max",
            mismatch,
            "max |Δ log p|",
            lambda arm: max(_finite(arm, names.ABS_DLOGP_MAX), default=None),
            kind="exact",
            better="lower",
        ),
        _mean_row("pearson", mismatch, "Pearson correlation", names.PEARSON, "correlation", "higher", ratio=False),
        _mean_row("clip_frac_pos_adv", clipping, "advantage > 0", names.CLIP_FRAC_POS_ADV, "percent"),
        _mean_row("clip_frac_neg_adv", clipping, "advantage < 0", names.CLIP_FRAC_NEG_ADV, "percent"),
        _median_row("step_s", time, "whole step", names.TIME_STEP, "seconds", "lower"),
    ]
    for metric, label in PHASES.items():
        rows.append(_median_row(metric.removeprefix("time/"), time, label, metric, "seconds", "lower"))
    rows += [
        Row("other_s", time, OTHER, _other_time, kind="seconds", better="lower"),
        _median_row("tokens_per_s", "Throughput and memory", "tokens per second", names.TOKENS_PER_S, better="higher"),
        Row(
            "peak_memory_gb",
            "Throughput and memory",
            "peak memory of the trainer, GB",
            lambda arm: max(_finite(arm, names.PEAK_MEMORY_GB), default=None),
            better="lower",
        ),
        Row(
            "peak_device_gb",
            "Throughput and memory",
            "peak memory of a GPU, all processes, GB",
            lambda arm: arm.status.peak_device_gb,
            better="lower",
        ),
    ]
    return rows


def _mean_row(
    key: str,
    group: str,
    label: str,
    metric: str,
    kind: str = "number",
    better: str | None = None,
    ratio: bool = True,
) -> Row:
    return Row(key, group, label, lambda arm: _mean(_finite(arm, metric)), kind, better, ratio)


def _median_row(key: str, group: str, label: str, metric: str, kind: str = "number", better: str | None = None) -> Row:
    return Row(key, group, label, lambda arm: median(arm, metric), kind, better)


def _finite(arm: Arm, metric: str) -> list[float]:
    _, values = arm.series(metric)
    return values[np.isfinite(values)].tolist()


def _mean(values: list[float]) -> float | None:
    return math.fsum(values) / len(values) if values else None


def median(arm: Arm, metric: str) -> float | None:
    """Median of a metric over the steps that are no warm-up; None without such a step.

    The first step after a start compiles, allocates and fills caches.
    """
    steps, values = arm.series(metric)
    values = values[np.isfinite(values) & ~np.isin(steps, list(arm.warmup))]
    return float(np.median(values)) if values.size else None


def _other_time(arm: Arm) -> float | None:
    """Median over steps of what the phases leave of the whole step. A phase that was not run counts as nothing."""
    left = [
        record[names.TIME_STEP] - sum(record.get(phase, 0.0) for phase in names.TIME_PHASES)
        for step, record in arm.records.items()
        if names.TIME_STEP in record and step not in arm.warmup
    ]
    left = [seconds for seconds in left if math.isfinite(seconds)]
    return max(0.0, float(np.median(left))) if left else None


def _notices(arms: list[Arm]) -> list[str]:
    """What a reader has to know before comparing: no baseline, different lengths or machines, numbers that are NaN."""
    notices = []
    if not any(arm.name == names.BASELINE_ARM for arm in arms):
        notices.append(f"There is no {names.BASELINE_ARM} arm here, so no ratios are given.")
    lengths = {arm.name: len(arm.train_steps) for arm in arms}
    if len(set(lengths.values())) > 1:
        each = ", ".join(f"{name} {n}" for name, n in lengths.items())
        notices.append(
            f"The arms have different numbers of training steps ({each}). Every number is over an arm's own steps, "
            "so ratios between them compare different stretches of training."
        )
    devices = {arm.status.device for arm in arms if arm.status.device}
    if len(devices) > 1:
        notices.append(f"The arms ran on different devices ({'; '.join(sorted(devices))}): do not compare their times.")
    packages = sorted({package for arm in arms for package in arm.status.versions})
    with_versions = [arm for arm in arms if arm.status.versions]
    differ = [p for p in packages if len({arm.status.versions.get(p) for arm in with_versions}) > 1]
    if differ:
        notices.append(f"The arms ran with different versions of {', '.join(differ)}.")
    for arm in arms:
        broken = {metric: _broken_steps(arm, metric) for metric in sorted(arm.metrics & _SHOWN)}
        for metric, steps in broken.items():
            if steps:
                notices.append(
                    f"{arm.name}: {metric} was not a finite number at {_enumerate(steps)}. "
                    "Those steps are gaps in the plots and are left out of the table."
                )
    return notices


_SHOWN = {
    value
    for key, value in vars(names).items()
    if key.isupper() and isinstance(value, str) and not key.startswith(("VALIDATION", "BASELINE"))
}


def _broken_steps(arm: Arm, metric: str) -> list[int]:
    steps, values = arm.series(metric)
    return steps[~np.isfinite(values)].tolist()


def _enumerate(steps: list[int], most: int = 6) -> str:
    more = f" and {len(steps) - most} more" if len(steps) > most else ""
    return f"step{'s' if len(steps) > 1 else ''} {', '.join(map(str, steps[:most]))}{more}"
