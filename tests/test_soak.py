"""The soak's judgement on synthetic samples, and its sampling of real processes.  The run itself is `make bench-soak`."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import psutil
import pytest

from benchmarks import soak

STEPS = 60


def samples(leak_mib: float = 0.0, leak_fds: float = 0.0, leak_role: str = "ray::Worker", warm_up: float = 0.0) -> list[dict]:
    """Three samples of each step: two processes that swing by 500 MiB with the step's phase, and a leak."""
    rng, found = np.random.default_rng(0), []
    for step in range(1, STEPS + 1):
        for phase in (0.0, 500.0, 250.0):
            running = {}
            for pid, name in enumerate(("ray::Worker", "raylet")):
                leaks = name == leak_role
                running[pid] = {
                    "role": name,
                    "memory_mib": 1000 + phase + rng.normal(0, 1) + warm_up * min(step, 20) + leaks * leak_mib * step,
                    "rss_mib": 2000.0,
                    "fds": 50 + int(leaks * leak_fds * step),
                    "threads": 10,
                }
            gpu = 4000 + 8000 * (phase > 0)
            found.append({"step": step, "time": 0.0, "processes": running, "shm_mib": 30.0, "shm_files": 4, "gpu_mib": gpu})
    return found


def judged(found: list[dict], left=()) -> tuple[dict, dict, dict]:
    figures, rows, roles = soak.judge(soak.per_step(found), list(left))
    return figures, {row["quantity"]: row for row in rows}, {row["role"]: row for row in roles}


def test_theil_sen():
    x = np.arange(20.0)
    y = 3 - 0.5 * x
    assert soak.theil_sen(x, y) == pytest.approx(-0.5)
    y[[2, 7, 11, 19]] = 1000
    assert soak.theil_sen(x, y) == pytest.approx(-0.5), "a few wild values do not move it"
    assert math.isnan(soak.theil_sen([1.0], [2.0]))


def test_a_steady_run_passes():
    figures, rows, _ = judged(samples(warm_up=20.0))
    assert rows.keys() == soak.BOUNDS.keys() and all(row["passed"] for row in rows.values())
    assert figures["passed"] == 1.0 and figures["left_behind"] == 0
    assert abs(figures["growth_memory_mib_per_step"]) < 0.1, "growth in the first third is warming up"
    assert rows["gpu_mib"]["late"] == 4000 and rows["gpu_peak_mib"]["late"] == 12000
    assert rows["processes"]["late"] == 2 and rows["fds"]["late"] == 100


def test_a_leak_fails_and_is_placed():
    figures, rows, roles = judged(samples(leak_mib=0.5, leak_fds=0.1, leak_role="raylet"))
    assert figures["growth_memory_mib_per_step"] == pytest.approx(0.5, abs=0.1)
    assert figures["growth_fds_per_step"] == pytest.approx(0.1, abs=0.02)
    assert [name for name, row in rows.items() if not row["passed"]] == ["memory_mib", "fds"] and figures["passed"] == 0.0
    assert roles["raylet"]["memory_mib per step"] > 0.4 and abs(roles["ray::Worker"]["memory_mib per step"]) < 0.1


@pytest.mark.parametrize("name", ["shm_mib", "shm_files", "gpu_mib"])
def test_growth_of_the_machine_fails(name):
    found = samples()
    for sample in found:
        sample[name] += sample["step"]
    figures, rows, _ = judged(found)
    assert figures[f"growth_{name}_per_step"] == pytest.approx(1.0) and not rows[name]["passed"] and figures["passed"] == 0.0


def test_without_samples_or_with_remains_it_does_not_pass():
    assert judged(samples(), left=["process 7"])[0]["passed"] == 0.0
    one = judged(samples()[:3])[0]
    assert one["passed"] == 0.0, "one step has no slope"


def test_real_processes_are_sampled(tmp_path):
    """A child that holds memory and files, under Ray's kind of title."""
    code = "import time; x = b'x' * 80_000_000; f = [open('/dev/null') for i in range(30)]; print(1, flush=True); time.sleep(9)"
    child = subprocess.Popen(["ray::Worker.update(step=3)", "-c", code], executable=sys.executable, stdout=subprocess.PIPE)
    try:
        child.stdout.readline()
        process = psutil.Process(child.pid)
        sample = soak.of_processes([process])[child.pid]
        assert sample["role"] == "ray::Worker"
        assert 76 < sample["memory_mib"] <= sample["rss_mib"] and sample["fds"] >= 33 and sample["threads"] >= 1
    finally:
        child.kill()
        child.wait()
    assert soak.of_processes([process]) == {}, "one that has ended is left out"


def test_gpu_memory_is_the_runs_own_beside_another_job(tmp_path, monkeypatch):
    now = {"total": 10.0, "by": {}}
    monkeypatch.setattr(soak.device_memory, "meter_by_process", lambda: lambda: (now["total"], now["by"]))
    watch = soak.Watch(tmp_path, psutil.Process(), 1.0)
    for other in (10.0, 90.0):
        now.update(total=other + 5.0, by={7: 3.0, 8: 2.0, 99: other})
        assert watch.gpu_gib([7, 8, 9]) == 5.0
    assert watch.gpu_of == "the run's processes"
    now.update(by={})  # as in a container that hides the processes
    assert watch.gpu_gib([7, 8, 9]) == 85.0 and watch.gpu_of == "the GPUs"
    now.update(by={7: 3.0})
    assert watch.gpu_gib([7]) == 85.0, "one measure must not follow another"


def test_without_a_driver_there_is_no_gpu(monkeypatch):
    def fails():
        raise RuntimeError("NVML Shared Library Not Found")

    monkeypatch.setattr(soak.device_memory, "meter_by_process", fails)
    assert soak.gpu_meter() is None


def test_what_is_left_is_found(tmp_path, monkeypatch):
    from verl.jetrl import processes
    from verl.jetrl.environment import RUN_ID

    run_id = f"soak-test-{os.getpid()}"
    monkeypatch.setattr(processes, "ray_dir", lambda _: tmp_path / "ray")
    before = soak.shared_memory()[1]
    segment, other = Path(f"/dev/shm/jetrl-{run_id}-data"), Path(f"/dev/shm/psm_{os.getpid()}")
    (tmp_path / "status.json").write_text(json.dumps({"run_id": run_id, "shared_memory": []}))

    def mine() -> list[str]:  # others may use the machine too
        marks = ("process", str(os.getpid()), str(tmp_path))
        return [x for x in soak.left_behind(tmp_path, before) if any(mark in x for mark in marks)]

    assert mine() == []
    child = subprocess.Popen(["sleep", "60"], env={**os.environ, RUN_ID: run_id})
    try:
        time.sleep(0.2)
        (tmp_path / "ray").mkdir()
        for path in (segment, other):
            path.write_bytes(b"x")
        assert mine() == [f"process {child.pid} sleep", str(segment), str(tmp_path / "ray"), str(other)]
    finally:
        child.kill()
        child.wait()
        for path in (segment, other):
            path.unlink(missing_ok=True)


def test_the_committed_figures_are_those_of_the_samples():
    if not soak.RESULTS.is_file():
        pytest.skip("not run yet")
    result = json.loads(soak.RESULTS.read_text())
    series = {owner: found for owner, found in result["samples"].items() if owner != "count"}
    assert soak.judge(series, result["left_behind"])[0] == pytest.approx(result["figures"])


@pytest.mark.parametrize("arguments", [["--steps", "1"], ["--every", "0"], ["--arm", "nope"], ["--out", "/dev/null/soak.json"]])
def test_what_would_lose_the_result_is_refused_before_the_run(monkeypatch, tmp_path, arguments, capsys):
    monkeypatch.setattr(soak, "soak", lambda *_: pytest.fail("a run was started"))
    monkeypatch.setattr(soak.tempfile, "mkdtemp", lambda **_: pytest.fail("a folder was made"))
    monkeypatch.setattr(soak.sys, "argv", ["soak", "--out", str(tmp_path / "soak.json"), *arguments])
    with pytest.raises(SystemExit) as ended:
        soak.main()
    assert ended.value.code == 2 and arguments[0] in capsys.readouterr().err.replace("no arm", "--arm")
