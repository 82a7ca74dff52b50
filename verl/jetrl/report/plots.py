"""The plots of a report. Each is one PNG with title, caption and a text that says what it shows."""

import io
import math
from dataclasses import dataclass
from itertools import cycle

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import FixedFormatter, FixedLocator, MaxNLocator, NullLocator, PercentFormatter

from verl.jetrl import metric_names as names
from verl.jetrl.report.load import Arm
from verl.jetrl.report.summary import OTHER, PHASES, median, phase_times, ratio, validation_label, validation_metrics

WIDTH, HEIGHT = 5.0, 3.7  # inches; type of 11 points stays readable when a phone shows it at 0.7 times its size
DPI = 200

# Colour-blind-safe (after Okabe-Ito and Tol), each with at least 3.5:1 against white. Dashes and markers say the same
# again for those who see no colour.
KNOWN_STYLES = {
    "bf16": ("#3B3B3B", "-", "o"),
    "bf16-train-fp8-rollout": ("#D55E00", (0, (5, 1.5)), "s"),
    "bf16-train-fp8-rollout-tis": ("#AA3377", (0, (1.5, 1.2)), "^"),
    "jetrl": ("#0072B2", "-", "D"),
}
OTHER_STYLES = [("#00795C", (0, (6, 1.5, 1, 1.5)), "v"), ("#8A6D00", (0, (3, 1)), "P"), ("#5E4FA2", "-", "X")]

PHASE_COLOURS = dict(zip((*PHASES.values(), OTHER), ("#7CC4EE", "#F3E37C", "#59BF9E", "#F0AE3C", "#CFCFCF"), strict=True))

RC = {
    "font.size": 11,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#666666",
    "axes.grid": True,
    "grid.color": "#E4E4E4",
    "grid.linewidth": 0.8,
    "axes.axisbelow": True,
    "lines.linewidth": 1.9,
    "lines.markersize": 4.5,
    "legend.frameon": False,
    "legend.fontsize": 10,
    "figure.dpi": DPI,
}


@dataclass(frozen=True)
class Plot:
    """One picture: ``png`` holds the file's bytes, ``width`` and ``height`` its size in CSS pixels."""

    name: str  # file name without .png
    section: str
    title: str
    caption: str
    alt: str
    png: bytes
    width: int
    height: int


@dataclass(frozen=True)
class Lines:
    """One metric over steps, one line per arm."""

    name: str
    section: str
    title: str
    metric: str
    caption: str
    unit: str = ""
    log: bool = False
    percent: bool = False
    complement: bool = False  # draw 1 - value
    zero_label: str = "0"  # of zeros on a log axis
    share_y: tuple[str, ...] = ()  # metrics whose plots have the same vertical axis


LEARNING, MISMATCH, TIME, RESPONSES, CLIPPING = "Learning", "Mismatch", "Time", "Responses and updates", "Clipping"
SECTIONS = (LEARNING, MISMATCH, TIME, RESPONSES, CLIPPING)

LINES = (
    Lines(
        "reward",
        LEARNING,
        "Reward of the sampled responses",
        names.REWARD,
        "Mean reward of the responses sampled for training. An arm that learns as BF16 does stays on its line; one "
        "that falls away from it is harmed by its precision.",
    ),
    Lines(
        "mismatch-mean",
        MISMATCH,
        "Mean |Δ log p|, rollout against trainer",
        names.ABS_DLOGP_MEAN,
        "How far apart rollout and trainer are, on average, about the same sampled token. Lower is better, and a flat "
        "line is as important: a rising one means that the arm trains a policy it no longer samples from.",
        unit="nats",
        log=True,
        zero_label="0 (exact)",
    ),
    Lines(
        "mismatch-k3",
        MISMATCH,
        "k3 KL, rollout against trainer",
        names.K3_KL,
        "Estimated KL divergence between the policy that samples and the policy that is trained. Lower is better. k3 "
        "grows with the square of Δ log p: a factor of ten in the plot before is a factor of a hundred here.",
        unit="nats",
        log=True,
    ),
    Lines(
        "mismatch-max",
        MISMATCH,
        "Largest |Δ log p| of a step",
        names.ABS_DLOGP_MAX,
        "The token on which the two sides disagree most. Values near 1 and above mean that single tokens are weighted "
        "wrongly by a factor of e or more.",
        unit="nats",
        log=True,
        zero_label="0 (exact)",
    ),
    Lines(
        "mismatch-pearson",
        MISMATCH,
        "1 − Pearson correlation",
        names.PEARSON,
        "How much the correlation between the two sides' probabilities falls short of 1. Lower is better.",
        log=True,
        complement=True,
    ),
    Lines(
        "tokens-per-second",
        TIME,
        "Tokens per second",
        names.TOKENS_PER_S,
        "Throughput of each step, warm-up included. Higher is better; a line that sinks while responses keep their "
        "length is a run that slows down.",
    ),
    Lines(
        "response-length",
        RESPONSES,
        "Response length",
        names.RESPONSE_LENGTH,
        "Mean length of the sampled responses. Mismatch and rollout time grow with it, so compare arms at like length.",
        unit="tokens",
    ),
    Lines(
        "entropy",
        RESPONSES,
        "Entropy of the policy",
        names.ENTROPY,
        "Mean entropy per sampled token. It should fall slowly; a sudden fall or rise that BF16 does not show comes "
        "before a collapse.",
        unit="nats",
    ),
    Lines(
        "grad-norm",
        RESPONSES,
        "Gradient norm",
        names.GRAD_NORM,
        "Norm of the gradient before clipping. Spikes that BF16 does not show are steps taken on noise.",
    ),
    Lines(
        "clip-positive",
        CLIPPING,
        "Clipped tokens, advantage > 0",
        names.CLIP_FRAC_POS_ADV,
        "Share of the tokens with positive advantage whose update PPO's clipping cuts off. "
        "Compare it with the next plot, which has the same axis.",
        percent=True,
        share_y=names.CLIP,
    ),
    Lines(
        "clip-negative",
        CLIPPING,
        "Clipped tokens, advantage < 0",
        names.CLIP_FRAC_NEG_ADV,
        "The same for tokens with negative advantage. An arm well above BF16 here, but not in the plot before, ignores "
        "bad responses more than good ones.",
        percent=True,
        share_y=names.CLIP,
    ),
)


def draw_plots(arms: list[Arm], all_names: list[str] | None = None) -> list[Plot]:
    """Every plot that the arms have data for, section by section.

    ``all_names``: all arms of the recipe, when only some are shown, so that each keeps its colour.
    """
    styles = arm_styles(all_names or [arm.name for arm in arms])
    validation = validation_metrics(arms)
    plots = []
    with matplotlib.rc_context(RC):
        plots.append(_draw_times(arms, styles))
        for line in (*LINES[:1], *(_validation_lines(m, len(validation) > 1) for m in validation), *LINES[1:]):
            plots.append(_draw_lines(line, arms, styles))
    plots = [plot for plot in plots if plot is not None]
    return sorted(plots, key=lambda plot: SECTIONS.index(plot.section))


def arm_styles(arm_names: list[str]) -> dict[str, tuple]:
    """Colour, dashes and marker of each arm: fixed for the known ones, by position for others."""
    others = cycle(OTHER_STYLES)
    return {name: KNOWN_STYLES[name] if name in KNOWN_STYLES else next(others) for name in arm_names}


def _validation_lines(metric: str, several: bool) -> Lines:
    label = validation_label(metric)
    slug = "-".join("".join(c if c.isalnum() else " " for c in label.lower()).split())
    return Lines(
        f"validation-{slug}" if several else "validation",
        LEARNING,
        f"Validation accuracy: {label}" if several else "Validation accuracy",
        metric,
        f"Accuracy on prompts that are not trained on ({label}). Step 0, where there is one, is the model before training.",
        percent=True,
    )


def _draw_lines(spec: Lines, arms: list[Arm], styles: dict[str, tuple]) -> Plot | None:
    data = {arm.name: arm.series(spec.metric) for arm in arms}
    data = {name: (steps, values) for name, (steps, values) in data.items() if np.isfinite(values).any()}
    if not data:
        return None
    if spec.complement:
        data = {name: (steps, 1 - values) for name, (steps, values) in data.items()}
    figure = Figure(figsize=(WIDTH, HEIGHT), layout="constrained")
    axes = figure.add_subplot()
    caption = spec.caption
    drawn = data
    if spec.log:
        with np.errstate(invalid="ignore"):
            below = sum(int((values < 0).sum()) for _, values in data.values())
        floor = log_axis(axes, np.concatenate([values for _, values in data.values()]), spec.zero_label)
        drawn = {name: (steps, on_log_axis(values, floor)) for name, (steps, values) in data.items()}
        if floor:
            caption += " Points on the dashed line are exactly zero."
        if below:
            caption += f" {below} value{'s' if below > 1 else ''} below zero (rounding) cannot be drawn here."
    window = _window(max(len(steps) for steps, _ in data.values()))
    for name, (steps, values) in drawn.items():
        colour, dashes, marker = styles[name]
        marker = marker if len(steps) <= 40 else None
        if window > 1:
            axes.plot(steps, values, color=colour, alpha=0.22, linewidth=1)
            values = _rolling_median(values, window)
        # The baseline is wider, so that it still shows where another arm lies exactly on it.
        wide = {"linewidth": 3.2, "markersize": 6.5} if name == names.BASELINE_ARM else {}
        axes.plot(steps, values, color=colour, linestyle=dashes, marker=marker, label=name, **wide)
    if window > 1:
        caption += f" Thick lines: median over {window} steps; faint lines: each step."
    axes.set_xlabel("step")
    axes.set_ylabel(spec.unit)
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    if spec.percent:
        axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=None))
    if spec.share_y:
        top = max((np.nanmax(v) for arm in arms for m in spec.share_y if (v := _finite(arm, m)).size), default=0)
        axes.set_ylim(0, max(top * 1.08, 1e-4))
    elif not spec.log:
        axes.margins(y=0.08)
    _legend(figure, axes)
    return _finish(figure, spec.name, spec.section, spec.title, caption, _describe_lines(spec, data))


def log_axis(axes: Axes, values: np.ndarray, zero_label: str = "0") -> float | None:
    """Make the vertical axis logarithmic over whole decades of the values above zero.

    Returns where zeros go: on a line one decade below the smallest value, marked with ``zero_label``; None when there
    are no zeros. Exact mode makes mismatches of exactly 0, which must be seen, not dropped as logarithms are.
    """
    above = values[np.isfinite(values) & (values > 0)]
    low, high = (math.floor(np.log10(above.min())), math.ceil(np.log10(above.max()))) if above.size else (-6, -2)
    high = max(high, low + 1)
    every = max(1, math.ceil((high - low) / 6))
    decades = list(range(low, high + 1, every))
    ticks, labels = [10.0**e for e in decades], [f"$10^{{{e}}}$" for e in decades]
    axes.set_yscale("log")
    floor = 10.0 ** (low - 1) if (values == 0).any() else None
    axes.set_ylim(10.0 ** (low - (1.35 if floor else 0.05)), 10.0 ** (high + 0.05))
    if floor:
        ticks, labels = [floor, *ticks], [zero_label, *labels]
        axes.axhline(floor, color="#666666", linewidth=1, linestyle=(0, (2, 2)), zorder=0)
    axes.yaxis.set_major_locator(FixedLocator(ticks))
    axes.yaxis.set_major_formatter(FixedFormatter(labels))
    axes.yaxis.set_minor_locator(NullLocator())
    return floor


def on_log_axis(values: np.ndarray, floor: float | None) -> np.ndarray:
    """Values as they are drawn: zeros at the floor; negative ones (rounding) and NaN are gaps."""
    drawn = np.where(values > 0, values, np.nan)
    return drawn if floor is None else np.where(values == 0, floor, drawn)


def _draw_times(arms: list[Arm], styles: dict[str, tuple]) -> Plot | None:
    times = {arm.name: phase_times(arm) for arm in arms}
    times = {name: phases for name, phases in times.items() if phases}
    if not times:
        return None
    figure = Figure(figsize=(WIDTH, 1.5 + 0.72 * len(times)), layout="constrained")
    axes = figure.add_subplot()
    steps = {arm.name: median(arm, names.TIME_STEP) for arm in arms}  # the table's number, and its ratio
    longest = max(sum(phases.values()) for phases in times.values()) or 1.0
    for row, (name, phases) in enumerate(times.items()):
        left = 0.0
        for phase, colour in PHASE_COLOURS.items():
            seconds = phases.get(phase, 0.0)
            axes.barh(row, seconds, left=left, height=0.46, color=colour, edgecolor="white", linewidth=1)
            if seconds > 0.09 * longest:
                text = _seconds(seconds)
                axes.text(left + seconds / 2, row, text, ha="center", va="center", fontsize=9.5, color="#111111")
            left += seconds
        if steps[name] is not None:
            against = ratio(steps[name], steps.get(names.BASELINE_ARM)) if name != names.BASELINE_ARM else None
            total = f"{_seconds(steps[name])} s" + (f"\n{against:.2f}x" if against is not None else "")
            axes.text(left + 0.012 * longest, row, total, va="center", fontsize=10, color="#111111")
        axes.text(0, row - 0.29, name, va="bottom", fontsize=10.5, fontweight="bold", color=styles[name][0])
    axes.set_ylim(len(times) - 0.62, -0.72)
    axes.set_xlim(0, longest * 1.17)
    axes.set_yticks([])
    axes.grid(False, axis="y")
    axes.spines["left"].set_visible(False)
    axes.set_xlabel("seconds")
    shown = [phase for phase in PHASE_COLOURS if any(phases.get(phase) for phases in times.values())]
    patches = [Patch(color=PHASE_COLOURS[phase], label=phase) for phase in shown]
    figure.legend(handles=patches, loc="outside lower center", ncols=3, handlelength=1.1, columnspacing=1.2)
    caption = (
        "Where a step's time goes: median seconds of each phase, without the first step after each start (warm-up). "
        "Shorter is better. The figure beside a bar is the median of the whole step and its ratio to BF16; "
        "medians of phases need not add up to it."
    )
    each = (f"{n}: " + ", ".join(f"{p} {_seconds(s)} s" for p, s in phases.items()) for n, phases in times.items())
    alt = f"Stacked bars, median seconds per step. {'; '.join(each)}."
    return _finish(figure, "time-per-step", TIME, "Time per step", caption, alt)


def _describe_lines(spec: Lines, data: dict[str, tuple[np.ndarray, np.ndarray]]) -> str:
    """The picture in words: where each line starts and ends."""
    parts = []
    for name, (steps, values) in data.items():
        steps, values = steps[np.isfinite(values)], values[np.isfinite(values)]
        ends = f"{values[0]:.3g} at step {steps[0]}"
        parts.append(f"{name}: {ends}" + (f" to {values[-1]:.3g} at step {steps[-1]}" if len(steps) > 1 else ""))
    axis = ", logarithmic axis" if spec.log else ""
    return f"Line chart of {spec.title} over steps{axis}. {'; '.join(parts)}."


def _legend(figure: Figure, axes: Axes) -> None:
    handles, labels = axes.get_legend_handles_labels()
    if len(handles) > 0:
        figure.legend(
            handles, labels, loc="outside lower center", ncols=min(2, len(labels)), handlelength=2.2, columnspacing=1.2
        )


def _finish(figure: Figure, name: str, section: str, title: str, caption: str, alt: str) -> Plot:
    figure.suptitle(title, fontsize=12.5, fontweight="bold", color="#111111")
    png = io.BytesIO()
    # No software or date in the file: the same runs give the same bytes.
    figure.savefig(png, format="png", dpi=DPI, metadata={"Software": None})
    width, height = figure.get_size_inches()
    return Plot(name, section, title, caption, alt, png.getvalue(), round(width * 96), round(height * 96))


def _window(steps: int) -> int:
    """Steps that a thick line is smoothed over: none in short runs, a thirtieth of long ones, always odd."""
    return 1 if steps <= 60 else (steps // 30) | 1


def _rolling_median(values: np.ndarray, window: int) -> np.ndarray:
    """Centred, over fewer values at the ends; NaN stays NaN, so that gaps stay visible."""
    half = window // 2
    smooth = [
        np.nan if np.isnan(values[i]) else np.nanmedian(values[max(0, i - half) : i + half + 1]) for i in range(len(values))
    ]
    return np.array(smooth)


def _finite(arm: Arm, metric: str) -> np.ndarray:
    _, values = arm.series(metric)
    return values[np.isfinite(values)]


def _seconds(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 1 else f"{value:.2f}"
