"""Tables of the documentation are those of the result files, and figures those of their samples: nothing is typed."""

import json
import shutil
from pathlib import Path

import pytest

from benchmarks import exact, numerics, ops, rollout, runs, soak, train
from benchmarks.tables import fill, markdown

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"


def test_a_table_and_its_place(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("a\n<!-- table x -->\nold\n<!-- end -->\nb\n<!-- table y -->\nkept\n<!-- end -->\n")
    fill(page, {"x": markdown(["k", "v"], [["one", 1.23456], ["none", None], ["many", 12345.6]]), "absent": "z"})
    fill(page, {"x": markdown(["k", "v"], [["one", 1.23456], ["none", None], ["many", 12345.6]])})
    table = "| k | v |\n|---|---|\n| one | 1.23 |\n| none | - |\n| many | 12346 |"
    assert page.read_text() == f"a\n<!-- table x -->\n\n{table}\n\n<!-- end -->\nb\n<!-- table y -->\nkept\n<!-- end -->\n"


@pytest.mark.parametrize(
    "name", ("docs/exact.md", "docs/fp8.md", "docs/rollout.md", "docs/smollm2.md", "docs/training.md", "README.md")
)
def test_pages_show_the_results(name, tmp_path):
    page = tmp_path / "page.md"
    shutil.copy(ROOT / name, page)
    fill(page, ops.report(json.loads((RESULTS / "ops.json").read_text())))
    fill(page, rollout.report(RESULTS))
    trained = json.loads((RESULTS / "train.json").read_text())
    fill(page, {"train": train.report(trained), "train_summary": train.headlines(trained)})
    fill(page, numerics.report(json.loads((RESULTS / "numerics.json").read_text())))
    fill(page, {"soak": soak.report([json.loads(path.read_text()) for path in soak.stored()])})
    fill(page, exact.report(rollout.stored(RESULTS / "exact.json")))
    for shown in runs.PAGES.values():
        fill(page, {shown.table: runs.table(json.loads((RESULTS / f"{shown.table}.json").read_text()))})
    assert page.read_text() == (ROOT / name).read_text()


def test_figures_of_the_rollout_are_those_of_its_samples():
    files = {
        name: json.loads((RESULTS / f"{name}.json").read_text()) for name in rollout.KEPT if (RESULTS / f"{name}.json").exists()
    }
    samples = {}
    for result in files.values():
        samples |= result.get("samples", {})  # exact.json may be of benchmarks.exact alone
    for name, figures in rollout.figures_of(samples).items():
        if name in files:
            for model, part in files[name].get("models", {}).items():
                figures |= rollout.figures_of_model(model, part["samples"])[name]
            figures |= rollout.figures_of_parts(files[name])
            assert figures == pytest.approx(files[name]["figures"], nan_ok=True), name


def test_runs_without_figures_overwrite_nothing(tmp_path, monkeypatch):
    """A finished run that recorded no step: the result of before stays."""
    shown = next(iter(runs.PAGES))
    arm = {"total_steps": 0, "device": "CPU", "metrics": {}}
    monkeypatch.setattr(runs, "collect", lambda _: {"arms": {"bf16": arm}, "reward_steps": 1})
    monkeypatch.setattr(runs, "RESULTS", tmp_path / "results")  # not there: a write would say so
    monkeypatch.setattr(runs.sys, "argv", ["runs", str(tmp_path / shown)])
    with pytest.raises(SystemExit, match="no step"):
        runs.main()
