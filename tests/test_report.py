"""verl.jetrl.report: joining segments, the table's numbers, and the page as a person sees it in a browser.

The runs are made up here, in temporary folders, in the layout that the launcher writes.
"""

import base64
import json
import math
import os
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
from matplotlib.figure import Figure

from verl.jetrl import metric_names as names
from verl.jetrl.report import ReportError, load_arms, write_report
from verl.jetrl.report.__main__ import main
from verl.jetrl.report.load import Arm, Status, join_segments, load_arm, read_segment
from verl.jetrl.report.plots import KNOWN_STYLES, OTHER_STYLES, PHASE_COLOURS, arm_styles, log_axis, on_log_axis
from verl.jetrl.report.render import format_number, format_ratio
from verl.jetrl.report.summary import ratio, summarize, validation_label

VALIDATION = "val-core/tiny/arithmetic/acc/mean@1"

# What sets the arms apart: mean |Δ log p| at the start, its growth per step, seconds of rollout and of update.
CHARACTER = {
    "bf16": (1.5e-3, 0.0, 20.0, 15.0),
    "bf16-train-fp8-rollout": (2.2e-2, 0.02, 16.0, 15.2),
    "bf16-train-fp8-rollout-tis": (2.2e-2, 0.01, 16.2, 15.4),
    "jetrl": (6e-3, 0.0, 15.3, 10.8),
}


def make_record(arm: str, step: int, steps: int, validate: bool = True, exact: bool = False) -> dict[str, float]:
    """Metrics of one step as a run of this arm could have them."""
    noise = np.random.default_rng([step, len(arm)])
    level, growth, rollout, update = CHARACTER.get(arm, CHARACTER["jetrl"])
    mismatch = 0.0 if exact else level * math.exp(growth * step) * noise.uniform(0.85, 1.2)
    harm = 0.25 * max(0.0, step / steps - 0.5) if arm == "bf16-train-fp8-rollout" else 0.0
    progress = 1 - math.exp(-3 * step / steps)
    warm = 8.0 if step == 1 else 1.0
    phases = [rollout * warm, 4.0, update * warm, 0.6 if arm == "jetrl" else 2.1]
    phases = [seconds * noise.uniform(0.95, 1.06) for seconds in phases]
    record = {
        names.REWARD: 0.35 + 0.45 * progress - harm + noise.normal(0, 0.015),
        names.ABS_DLOGP_MEAN: mismatch,
        names.ABS_DLOGP_MAX: mismatch * noise.uniform(25, 60),
        names.K3_KL: 8 * mismatch**2,
        names.PEARSON: 1.0 if exact else 1 - 3 * mismatch**2,
        names.CLIP_FRAC_POS_ADV: abs(noise.normal(0.004 + mismatch / 4, 0.0007)),
        names.CLIP_FRAC_NEG_ADV: abs(noise.normal(0.005 + mismatch / 2, 0.001)),
        names.RESPONSE_LENGTH: 180 + 60 * progress + noise.normal(0, 4),
        names.ENTROPY: 1.1 * math.exp(-1.2 * step / steps) + 0.2 + noise.normal(0, 0.01),
        names.GRAD_NORM: abs(noise.normal(0.8 + harm * 4, 0.08)),
        **dict(zip(names.TIME_PHASES, phases, strict=True)),
        names.TIME_STEP: sum(phases) + 1.3,
        names.TOKENS_PER_S: 64 * 220 / sum(phases),
        names.PEAK_MEMORY_GB: 61.2 if arm == "jetrl" else 68.9,
        "training/epoch": 0,
    }
    if validate and step % 4 == 0:
        record[VALIDATION] = 0.33 + 0.45 * progress - harm
    return record


def write_arm(folder: Path, arm: str, segments: list[dict[int, dict]], state="finished", **status) -> Path:
    """Write an arm's folder: its segments as given ({step: metrics} each), status and configuration."""
    path = folder / arm
    (path / "segments").mkdir(parents=True)
    for number, segment in enumerate(segments, start=1):
        lines = (json.dumps({"step": step, "data": data}) + "\n" for step, data in segment.items())
        (path / "segments" / f"{number:03}.jsonl").write_text("".join(lines))
    defaults = {"total_steps": 24, "started": 1.79e9, "ended": 1.79e9 + 1234, "error": None, "device": "NVIDIA H200"}
    defaults["versions"] = {"torch": "2.11.0", "verl": "0.9.1", "vllm": "0.24.0"}
    (path / "status.json").write_text(json.dumps({"state": state} | defaults | status))
    (path / "config.yaml").write_text(f"trainer: {{total_training_steps: 24}}\njetrl: {{arm: {arm}}}\n")
    return path


def make_arm(folder: Path, arm: str, steps: int = 24, total: int = 24, **how) -> Path:
    record_how = {key: how.pop(key) for key in ("validate", "exact") if key in how}
    segment = {step: make_record(arm, step, total, **record_how) for step in range(1, steps + 1)}
    if record_how.get("validate", True):
        segment = {0: {VALIDATION: 0.33}} | segment
    return write_arm(folder, arm, [segment], total_steps=total, **how)


def arm_of(records: dict[int, dict[str, float]], name: str = "bf16", warmup: int = 1, **status) -> Arm:
    return Arm(name=name, records=records, warmup=frozenset([warmup]), status=Status(**status))


# Reading segments


def test_later_segments_override_replayed_steps(tmp_path):
    first = {step: {names.REWARD: 0.1, names.TIME_STEP: 5.0} for step in (1, 2, 3, 4)}
    second = {step: {names.REWARD: 0.9, names.TIME_STEP: 6.0} for step in (3, 4, 5)}
    arm = load_arm(write_arm(tmp_path, "bf16", [first, second]))
    assert arm.series(names.REWARD)[0].tolist() == [1, 2, 3, 4, 5]
    assert arm.series(names.REWARD)[1].tolist() == [0.1, 0.1, 0.9, 0.9, 0.9]
    assert arm.warmup == {1, 3}


def test_steps_after_the_point_of_resumption_are_dropped():
    first = [(step, {names.REWARD: 0.1}) for step in (1, 2, 3, 4, 5)]
    records, _ = join_segments([first, [(3, {names.REWARD: 0.9})]])
    assert {step: record[names.REWARD] for step, record in records.items()} == {1: 0.1, 2: 0.1, 3: 0.9}


def test_validation_at_resumption_keeps_the_training_metrics_of_that_step():
    first = [(1, {names.REWARD: 0.1}), (2, {names.REWARD: 0.2}), (3, {names.REWARD: 0.3})]
    records, warmup = join_segments([first, [], [(2, {VALIDATION: 0.5}), (3, {names.REWARD: 0.4})]])
    assert records == {1: {names.REWARD: 0.1}, 2: {names.REWARD: 0.2, VALIDATION: 0.5}, 3: {names.REWARD: 0.4}}
    assert warmup == {1, 3}


@pytest.mark.parametrize("cut", [1, 9, 20, 33])
def test_a_last_line_that_was_cut_off_is_ignored(tmp_path, cut):
    line = b'{"step": 2, "data": {"critic/score/mean": 0.5}}'
    path = tmp_path / "001.jsonl"
    path.write_bytes(b'{"step": 1, "data": {}}\n' + line[:cut])
    assert [step for step, _ in read_segment(path)] == [1]
    path.write_bytes(b'{"step": 1, "data": {}}\n' + line)  # whole but for its newline
    assert [step for step, _ in read_segment(path)] == [1, 2]
    path.write_bytes(b"")
    assert read_segment(path) == []


@pytest.mark.parametrize("bad", ['{"step": 2, "da', "", "[1]", '{"step": "2", "data": {}}', '{"step": 2}', "\x00\x00"])
def test_any_other_malformed_line_is_an_error_with_file_and_line(tmp_path, bad):
    path = write_arm(tmp_path, "bf16", [{}])
    path.joinpath("segments/001.jsonl").write_text(f'{{"step": 1, "data": {{}}}}\n{bad}\n{{"step": 3, "data": {{}}}}\n')
    with pytest.raises(ReportError, match=r"bf16/segments/001\.jsonl:2: not a record"):
        load_arms(tmp_path)


def test_null_is_a_number_that_was_not_finite_and_is_reported(tmp_path):
    records = {step: {names.GRAD_NORM: None if step > 2 else 1.0, names.REWARD: 0.5, "note": "x"} for step in (1, 2, 3)}
    arms = [load_arm(write_arm(tmp_path, "bf16", [records]))]
    assert math.isnan(arms[0].records[3][names.GRAD_NORM])
    assert [n for n in summarize(arms).notices if "actor/grad_norm was not a finite number at step 3" in n]


# Which arms


def test_arms_come_in_canonical_order_then_by_name(tmp_path):
    for arm in ("zebra", "jetrl", "ant", "bf16"):
        write_arm(tmp_path, arm, [{}])
    (tmp_path / "plots").mkdir()
    assert [arm.name for arm in load_arms(tmp_path)] == ["bf16", "jetrl", "ant", "zebra"]
    assert [arm.name for arm in load_arms(tmp_path, ["ant", "bf16"])] == ["bf16", "ant"]


def test_clear_errors_without_arms(tmp_path):
    for arguments, message in (
        ([str(tmp_path)], "no arms here"),
        ([str(tmp_path / "none")], "no such folder"),
    ):
        with pytest.raises(SystemExit, match=message):
            main(arguments)
    write_arm(tmp_path, "jetrl", [{}])
    with pytest.raises(SystemExit, match="no arm bf17.*There are: jetrl"):
        main([str(tmp_path), "--arms", "jetrl,bf17"])


@pytest.mark.parametrize("name, text", [("status.json", '{"state": "runn'), ("status.json", "{}"), ("config.yaml", "a: [")])
def test_a_damaged_status_or_configuration_is_named(tmp_path, name, text):
    write_arm(tmp_path, "bf16", [{}]).joinpath(name).write_text(text)
    with pytest.raises(ReportError, match=f"bf16/{name}"):
        load_arms(tmp_path)


# Numbers of the table


def test_ratios_and_medians_without_warmup():
    def run(name: str, seconds: float, mismatch: float) -> Arm:
        times = {1: 90.0, 2: seconds, 3: seconds * 1.5, 4: seconds * 0.5}
        return arm_of(
            {
                step: {
                    names.TIME_STEP: time,
                    names.TIME_ROLLOUT: time / 2,
                    names.ABS_DLOGP_MEAN: mismatch * step,
                    names.ABS_DLOGP_MAX: mismatch * step,
                    names.PEARSON: 0.99,
                }
                for step, time in times.items()
            },
            name,
        )

    summary = summarize([run("bf16", 10.0, 0.001), run("jetrl", 8.7, 0.004)])
    assert summary.values["bf16"]["step_s"] == 10.0 and summary.values["bf16"]["other_s"] == 5.0
    assert summary.ratios["jetrl"]["step_s"] == pytest.approx(0.87)
    assert summary.ratios["jetrl"]["abs_dlogp_mean"] == pytest.approx(4.0)
    assert summary.values["jetrl"]["abs_dlogp_mean"] == pytest.approx(0.01)  # mean of 0.004 .. 0.016
    assert summary.values["jetrl"]["abs_dlogp_max"] == pytest.approx(0.016)
    assert summary.ratios["jetrl"]["pearson"] is None
    assert [format_ratio(r) for r in (0.0, 0.00111, 0.012)] == ["0.00x", "0.001x", "0.01x"]
    assert format_ratio(summary.ratios["jetrl"]["step_s"]) == "0.87x"
    assert "tokens_per_s" not in summary.values["bf16"], "rows that no arm has are left out"


def test_no_ratio_to_nothing_zero_or_less():
    assert ratio(1.0, 0.0) is None and ratio(-1.0, 2.0) is None and ratio(1.0, -2.0) is None
    assert ratio(None, 1.0) is None and ratio(1.0, None) is None
    assert ratio(0.0, 2.0) == 0.0


def test_reward_is_averaged_over_first_and_last_steps():
    summary = summarize([arm_of({step: {names.REWARD: step / 100} for step in range(1, 41)})])
    assert summary.last_k == 5
    assert summary.values["bf16"]["reward_first"] == pytest.approx(0.03)
    assert summary.values["bf16"]["reward_last"] == pytest.approx(0.38)
    assert summarize([arm_of({1: {names.REWARD: 0.5}})]).last_k == 1


def test_validation_takes_the_plain_mean_of_each_source():
    a, b = "val-core/openai/gsm8k/acc/mean@4", "val-core/math/acc/mean@4"
    records = {0: {a: 0.2, b: 0.1, "val-core/math/acc/best@4/mean": 0.9}, 5: {a: 0.6, b: 0.3}, 10: {a: 0.5, b: 0.4}}
    values = summarize([arm_of(records)]).values["bf16"]
    assert values[f"validation_best/{a}"] == 0.6 and values[f"validation_last/{a}"] == 0.5
    assert values[f"validation_best/{b}"] == 0.4
    assert not any("best@4" in key for key in values)
    assert validation_label(a) == "openai/gsm8k acc mean@4"


def test_one_recorded_step_has_no_times():
    values = summarize([arm_of({1: {names.TIME_STEP: 90.0, names.REWARD: 0.5}})]).values["bf16"]
    assert "step_s" not in values and values["reward_last"] == 0.5


def test_a_phase_that_was_skipped_is_not_other_time():
    step = {names.TIME_STEP: 10.0, names.TIME_ROLLOUT: 6.0, names.TIME_UPDATE: 3.0}
    values = summarize([arm_of({1: step, 2: step, 3: step})]).values["bf16"]
    assert values["other_s"] == pytest.approx(1.0) and "log_prob_s" not in values


def test_notices_say_what_forbids_a_comparison():
    reward = {names.REWARD: 0.5}
    jetrl = arm_of({1: reward, 2: reward}, "jetrl", device="NVIDIA H200", versions={"torch": "2.11.0"})
    assert any("no bf16 arm" in notice for notice in summarize([jetrl]).notices)
    bf16 = arm_of({1: reward}, "bf16", device="CPU", versions={"torch": "2.12.0"})
    text = " ".join(summarize([bf16, jetrl]).notices)
    assert "different numbers of training steps (bf16 1, jetrl 2)" in text
    assert "different devices (CPU; NVIDIA H200)" in text and "different versions of torch" in text


@pytest.mark.parametrize(
    "value, kind, text",
    [
        (0.0, "exact", "0 (exact)"),
        (0.0, "number", "0"),
        (0.71234, "number", "0.712"),
        (3.612e-4, "number", "3.6e-4"),
        (8236.4, "number", "8,236"),
        (0.41234, "percent", "41.2%"),
        (12.345, "seconds", "12.3 s"),
        (-0.5, "number", "-0.500"),
        (0.99997312, "correlation", "0.999973"),
    ],
)
def test_numbers_as_people_read_them(value, kind, text):
    assert format_number(value, kind) == text


# Plots


def test_zeros_are_drawn_on_a_labelled_floor():
    axes = Figure().add_subplot()
    values = np.array([0.0, 3e-4, 2e-2, 0.0, np.nan, -1e-9])
    floor = log_axis(axes, values, "0 (exact)")
    assert floor == pytest.approx(1e-5), "one decade below the smallest value"
    drawn = on_log_axis(values, floor)
    assert drawn[[0, 1, 2, 3]].tolist() == [floor, 3e-4, 2e-2, floor]
    assert np.isnan(drawn[4:]).all(), "NaN and rounding below zero are gaps, not zeros"
    axes.figure.canvas.draw()
    labels = [label.get_text() for label in axes.get_yticklabels()]
    assert labels[0] == "0 (exact)" and "$10^{-4}$" in labels
    bottom, top = axes.get_ylim()
    assert bottom < floor and top > 2e-2


def test_the_fullest_gpu_stands_beside_the_trainers_peak():
    arms = [arm_of({1: {names.REWARD: 0.5, names.PEAK_MEMORY_GB: 60.0}}, name, peak_device_gb=gb)
            for name, gb in (("bf16", 100.0), ("jetrl", 90.0))]  # fmt: skip
    found = summarize(arms)
    assert [found.values[arm.name]["peak_device_gb"] for arm in arms] == [100.0, 90.0]
    assert found.ratios["jetrl"]["peak_device_gb"] == 0.9 and found.values["jetrl"]["peak_memory_gb"] == 60.0


def test_log_axis_of_nothing_but_zeros():
    axes = Figure().add_subplot()
    floor = log_axis(axes, np.zeros(3), "0 (exact)")
    assert axes.get_ylim()[0] < floor
    assert log_axis(Figure().add_subplot(), np.array([1e-3, 2e-3])) is None, "no floor without zeros"


def test_every_arm_keeps_its_colour_and_can_be_told_from_white():
    styles = arm_styles(["bf16", "jetrl", "mine", "other"])
    assert styles["jetrl"] == arm_styles(["jetrl"])["jetrl"] == KNOWN_STYLES["jetrl"]
    assert len({style[0] for style in styles.values()}) == 4
    lines = [style[0] for style in (*KNOWN_STYLES.values(), *OTHER_STYLES)]
    assert min(contrast(colour, "#FFFFFF") for colour in lines) >= 3, "WCAG 2.2, 1.4.11"
    assert min(contrast(colour, "#111111") for colour in PHASE_COLOURS.values()) >= 4.5, "figures inside the bars"


def contrast(a: str, b: str) -> float:
    """WCAG's contrast ratio of two colours ``#rrggbb``."""

    def luminance(colour: str) -> float:
        parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    high, low = sorted((luminance(a), luminance(b)), reverse=True)
    return (high + 0.05) / (low + 0.05)


# The files


@pytest.fixture(scope="module")
def recipe(tmp_path_factory) -> Path:
    """A recipe with everything: one arm finished, one running, one failed, one resumed and exact from step 7 on."""
    folder = tmp_path_factory.mktemp("runs") / "tiny"
    make_arm(folder, "bf16")
    make_arm(folder, "bf16-train-fp8-rollout", steps=15, state="running", ended=None)
    make_arm(
        folder,
        "bf16-train-fp8-rollout-tis",
        steps=6,
        state="failed",
        error="RuntimeError: weight sync of step 7 failed in the rollout worker:\n  <scales of layer 3> hold NaN",
    )
    exact = {step: make_record("jetrl", step, 24, exact=step > 6) for step in range(1, 25)}
    resumed = {step: exact[step] for step in range(10, 25)}
    jetrl = write_arm(folder, "jetrl", [{step: exact[step] for step in range(1, 13)}, resumed])
    with (jetrl / "segments" / "001.jsonl").open("a") as file:
        file.write('{"step": 13, "data": {"critic/sc')
    main([str(folder)])
    return folder


def test_every_file_is_written_whole(recipe):
    written = {path.relative_to(recipe).as_posix() for path in recipe.rglob("*") if path.is_file()}
    assert {"report.html", "report.md", "summary.json", "plots/reward.png", "jetrl/metrics.jsonl"} <= written
    assert not [path for path in written if path.endswith(".tmp")]
    lines = (recipe / "jetrl" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == list(range(1, 25))
    for path in (recipe / "plots").glob("*.png"):
        assert path.read_bytes().startswith(b"\x89PNG")


def test_summary_json(recipe):
    summary = json.loads((recipe / "summary.json").read_text())
    assert summary["baseline"] == "bf16" and list(summary["arms"]) == list(names.ARMS)
    jetrl, tis = summary["arms"]["jetrl"], summary["arms"]["bf16-train-fp8-rollout-tis"]
    bf16 = summary["arms"]["bf16"]["metrics"]
    assert jetrl["ratios"]["step_s"] == pytest.approx(jetrl["metrics"]["step_s"] / bf16["step_s"])
    assert 0.6 < jetrl["ratios"]["step_s"] < 0.85 and jetrl["ratios"]["tokens_per_s"] > 1.1
    assert tis["state"] == "failed" and tis["step"] == 6 and "weight sync of step 7" in tis["error"]
    assert summary["arms"]["bf16-train-fp8-rollout"]["state"] == "running"


def test_markdown(recipe):
    text = (recipe / "report.md").read_text()
    header = next(line for line in text.splitlines() if line.startswith("| metric |"))
    assert [cell.strip() for cell in header.strip("|").split("|")] == ["metric", *names.ARMS]
    rows = [line for line in text.splitlines() if line.startswith("| ")]
    columns = {len(re.split(r"(?<!\\)\|", row)) for row in rows}
    assert columns == {len(names.ARMS) + 3}, "every row has a cell per arm"
    for image in re.findall(r"\]\((plots/[^)]+)\)", text):
        assert (recipe / image).is_file()
    assert "<scales of layer 3> hold NaN" in text


def test_one_unfinished_arm_without_validation_or_status(tmp_path):
    make_arm(tmp_path / "tiny", "jetrl", steps=3, validate=False).joinpath("status.json").unlink()
    (tmp_path / "tiny" / "plots").mkdir()
    (tmp_path / "tiny" / "plots" / "validation.png").write_bytes(b"of an earlier report")
    page = write_report(tmp_path / "tiny", load_arms(tmp_path / "tiny")).read_text()
    assert "There is no bf16 arm here" in page and "step 3" in page and "unknown" in page
    assert '<span class="ratio">' not in page
    assert not (tmp_path / "tiny" / "plots" / "validation.png").exists()


def test_arms_without_any_step(tmp_path):
    write_arm(tmp_path / "tiny", "bf16", [], state="failed", error="FileNotFoundError: no model at /models/none")
    write_arm(tmp_path / "tiny", "jetrl", [{}], state="running", total_steps=None, versions=None)
    page = write_report(tmp_path / "tiny", load_arms(tmp_path / "tiny")).read_text()
    assert "no model at /models/none" in page and "No step has been recorded yet" in page
    assert "<img" not in page


# What a person sees


@pytest.fixture(scope="module")
def browser():
    """Headless Chromium. Not there: skipped, but on CI, where the page must be looked at, an error."""
    chromium = shutil.which("chromium")
    if chromium is None:
        message = "no chromium to look at the report with: apt-get update && apt-get install -y chromium"
        (pytest.fail if os.environ.get("CI") == "true" else pytest.skip)(message)
    from playwright.sync_api import sync_playwright

    quiet = ("--disable-background-networking", "--disable-component-update", "--disable-sync", "--no-first-run")
    with sync_playwright() as playwright:
        chrome = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox", "--disable-gpu", *quiet])
        yield chrome
        chrome.close()


@pytest.mark.parametrize("width, height", [(1280, 900), (360, 740)], ids=["desktop", "phone"])
def test_page_in_a_browser(recipe, browser, width, height):
    page = browser.new_page(viewport={"width": width, "height": height})
    problems, requests = [], []
    page.on("console", lambda message: problems.append(message.text) if message.type in ("error", "warning") else None)
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on("request", lambda request: requests.append(request.url))
    page.goto((recipe / "report.html").as_uri())
    page.wait_for_load_state("networkidle")

    assert problems == []
    assert [url for url in requests if not url.startswith(("file:", "data:"))] == []
    assert len([url for url in requests if url.startswith("file:")]) == 1, "the page is one file"
    assert not page.get_by_role("cell", name="jetrl.arm").first.is_visible()
    for details in page.locator("summary").all():
        details.click()
    assert page.get_by_role("cell", name="jetrl.arm").count() == 3, "what each arm changes of the baseline"
    assert page.get_by_role("cell", name="jetrl.arm").first.is_visible()
    overflow = page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")
    assert overflow == 0, f"{overflow} pixels to scroll sideways"

    for heading in ("Arms", "Results", "Learning", "Mismatch", "Time", "Clipping", "How the numbers are made"):
        assert page.get_by_role("heading", name=heading, exact=True).is_visible()
    for arm in names.ARMS:
        assert page.get_by_role("heading", name=arm, exact=True).is_visible()
    assert page.get_by_text("hold NaN").is_visible(), "the failed arm's message"

    rows = page.get_by_role("row")
    step = rows.filter(has_text="whole step")
    summary = json.loads((recipe / "summary.json").read_text())["arms"]["jetrl"]
    cells = step.get_by_role("cell")
    assert cells.count() == len(names.ARMS)
    seen = cells.nth(3).inner_text()
    assert f"{summary['metrics']['step_s']:.1f} s" in seen and f"{summary['ratios']['step_s']:.2f}x" in seen
    for cell in cells.all():
        box = cell.locator(".value").bounding_box()
        assert box["width"] > 20 and box["x"] >= 0 and box["x"] + box["width"] <= width

    images = page.locator("img")
    pngs = {path.read_bytes() for path in (recipe / "plots").glob("*.png")}
    assert images.count() == len(pngs) >= 11
    for image in images.all():
        image.scroll_into_view_if_needed()
        assert image.is_visible() and image.evaluate("i => i.complete && i.naturalWidth") > 0
        assert len(image.get_attribute("alt")) > 40
        assert base64.b64decode(image.get_attribute("src").partition(",")[2]) in pngs
        assert image.bounding_box()["width"] >= min(280, width - 32)
    if os.environ.get("JETRL_SCREENSHOTS"):
        page.screenshot(path=Path(os.environ["JETRL_SCREENSHOTS"]) / f"report-{width}.png", full_page=True)
    page.close()
