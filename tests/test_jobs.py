"""Real runs of recipes/tiny at small size: verl, Ray and vLLM, nothing mocked.

Seven jobs, each of a few steps: the three arms; the jetrl arm killed with SIGKILL and resumed; one whose weight updates are
dropped; and one in a Ray that runs already.  An eighth is stopped with SIGTERM while it starts.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from verl.jetrl import checkpoints, processes
from verl.jetrl import metric_names as names

pytestmark = [pytest.mark.job, pytest.mark.timeout(1800)]

STEPS = 4
SMALL = (
    f"trainer.total_training_steps={STEPS}",
    "trainer.save_freq=2",
    "trainer.test_freq=-1",  # but validated before the first step: more prompts at once than a training batch has
    "data.train_batch_size=8",
    "actor_rollout_ref.actor.ppo_mini_batch_size=4",
    "actor_rollout_ref.rollout.n=4",
    "actor_rollout_ref.rollout.max_num_seqs=32",
    "jetrl.record_state=true",
    "jetrl.verify_log_probs_every=2",
)


def command(root: Path, runs: Path, arms: str, *overrides: str) -> list[str]:
    return [
        sys.executable,
        "-m",
        "verl.jetrl.run",
        str(root / "recipes/tiny"),
        "--arms",
        arms,
        "--runs",
        str(runs),
        *SMALL,
        *overrides,
    ]


def recorded(runs: Path) -> tuple[str, ...]:
    """verl's rollout cache for steps 3 and 4: the first run records its responses, a later one replays them."""
    return ("skip.rollout_tq.enable=true", "skip.rollout_tq.steps=[3,4]", f"skip.rollout_tq.dump_dir={runs}/recorded")


def records(run: Path) -> dict[int, dict[str, float]]:
    """Training step to its metrics; a later start's win."""
    found: dict[int, dict[str, float]] = {}
    for segment in sorted((run / "segments").glob("*.jsonl")):
        for line in segment.read_text().splitlines():
            record = json.loads(line)
            if names.REWARD not in record["data"]:
                continue  # validation before the first step
            found.setdefault(record["step"], {}).update(record["data"])
    return found


def status(run: Path) -> dict:
    return json.loads((run / "status.json").read_text())


def left_behind(run: Path) -> list[str]:
    """Living processes, shared memory and folders of the run."""
    state = status(run)
    found = [str(p) for p in processes.of_run(state["run_id"])]
    found += [path for path in state.get("shared_memory", ()) if os.path.exists(path)]
    found += [str(path) for path in Path("/dev/shm").glob(f"*{state['run_id']}*")]  # the weight arena
    return found + [str(p) for p in [processes.ray_dir(state["run_id"])] if p.exists()]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def arms(root: Path, runs: Path) -> dict[str, Path]:
    """The three main arms and exact mode, run to the end."""
    chosen = ("bf16", "bf16-train-fp8-rollout", "jetrl", "jetrl-exact")
    result = subprocess.run(command(root, runs, ",".join(chosen), *recorded(runs)), capture_output=True, text=True)
    assert result.returncode == 0, result.stderr[-3000:]
    return {arm: runs / "tiny" / arm for arm in chosen}


def mean(run: Path, name: str) -> float:
    values = [data[name] for step, data in records(run).items() if step > 0]
    assert len(values) == STEPS
    return sum(values) / len(values)


def test_arms_finish_and_leave_nothing(arms: dict[str, Path]) -> None:
    for arm, run in arms.items():
        assert status(run)["state"] == "finished", arm
        assert sorted(records(run)) == list(range(1, STEPS + 1)), arm
        assert left_behind(run) == [], arm


def test_every_metric_is_reported_in_every_arm(arms: dict[str, Path]) -> None:
    wanted = {names.REWARD, *names.MISMATCH, *names.CLIP, names.RESPONSE_LENGTH, names.ENTROPY, names.GRAD_NORM}
    wanted |= {*names.TIME_PHASES, names.TIME_STEP, names.TOKENS_PER_S, names.PEAK_MEMORY_GB, names.PADDING_ABS_DLOGP}
    of_the_pass = {*names.MISMATCH, names.ENTROPY, names.PADDING_ABS_DLOGP}
    for arm, run in arms.items():
        for step, data in records(run).items():
            here = wanted - of_the_pass if arm == "jetrl-exact" and step % 2 == 0 else wanted
            assert here <= data.keys(), (arm, step, here - data.keys())
            assert all(math.isfinite(data[name]) for name in here), (arm, step)


def test_mismatch_tells_the_arms_apart(arms: dict[str, Path]) -> None:
    """Jet-RL < BF16 < mixed, with room to spare: the jetrl arm's sides run one decoder on one copy of the weights, and only
    attention's additions are in another order.  FP8 silently off on one of its sides, or in the mixed arm's rollout, breaks
    the order."""
    bf16, mixed, jetrl = (mean(arms[a], names.ABS_DLOGP_MEAN) for a in ("bf16", "bf16-train-fp8-rollout", "jetrl"))
    # Most steps have 0; where a sum in another order rounds one FP8 value the other way, which depends on the processor, 4e-5.
    assert jetrl < min(1e-4, bf16 / 4), "the jetrl arm's sides do not run the same operators on the same bytes"
    assert mixed > 3 * bf16, "the mixed arm does not roll out in FP8"


def test_exact_mode_is_exact_and_drops_the_pass(arms: dict[str, Path]) -> None:
    """Every log-prob of every sampled token of the checked steps, over weight updates: equal bit for bit.  That a difference
    would show: tests/test_parity.py, and the arms with another arithmetic here."""
    data = records(arms["jetrl-exact"])
    for step in (1, 3):
        assert data[step][names.ABS_DLOGP_MAX] == 0.0 and data[step][names.K3_KL] == 0.0
    for step in (2, 4):
        assert names.ABS_DLOGP_MAX not in data[step], "the pass ran where nothing was to be checked"
        assert data[step][names.TIME_LOG_PROB] < data[3][names.TIME_LOG_PROB] / 5


def test_precision_flow_was_checked_and_printed(arms: dict[str, Path]) -> None:
    def linears(arm: str) -> list[str]:
        lines = (arms[arm] / "log.txt").read_text(errors="replace").splitlines()
        return [line.split("layers", 1)[1] for line in lines if "_proj " in line and "layers.*" in line]

    for arm, yes, fp8 in (("bf16", True, 0), ("bf16-train-fp8-rollout", False, 1), ("jetrl", True, 2)):
        rows = linears(arm)
        assert len(rows) == 4, (arm, rows)
        for row in rows:
            assert row.rstrip().endswith("yes" if yes else "NO"), (arm, row)
            assert row.count("fp8 e4m3") == fp8, (arm, row)


def test_patches_were_active_in_ray_and_vllm_workers(arms: dict[str, Path]) -> None:
    log = (arms["jetrl"] / "log.txt").read_text(errors="replace")
    assert "patches in the trainer's worker: verl_fp32_log_probs active, verl_select_rows active" in log
    assert "patches in the rollout's worker: vllm_cpu_keep_weights active, vllm_cpu_one_attention active" in log


def test_padded_vocabulary(arms: dict[str, Path]) -> None:
    """The demo's model has more ids than its tokenizer.  The stock arms leave them unmasked in the trainer and report what
    that costs; the jetrl arm masks them as the rollout does."""
    assert 0 < mean(arms["bf16"], names.PADDING_ABS_DLOGP) <= mean(arms["bf16"], names.ABS_DLOGP_MEAN)
    assert mean(arms["jetrl"], names.PADDING_ABS_DLOGP) == 0


def test_report(arms: dict[str, Path], runs: Path) -> None:
    summary = json.loads((runs / "tiny" / "summary.json").read_text())
    assert set(arms) <= set(json.dumps(summary).replace('"', " ").split())
    assert (runs / "tiny" / "report.html").stat().st_size > 10_000
    for run in arms.values():
        assert (run / "metrics.jsonl").is_file()
        assert list((run / "tensorboard").glob("events.*"))


def test_the_flow_check_as_a_command(root: Path) -> None:
    """``make flow-tiny``: both trees without a run; the rollout's engine maps an arena of zeros."""
    line = [sys.executable, "-m", "verl.jetrl.show_flow", str(root / "recipes/tiny"), "--arms", "jetrl"]
    child = subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    output, errors = child.communicate(timeout=300)
    assert child.returncode == 0, errors[-3000:]
    rows = [row for row in output.splitlines() if "_proj " in row and "layers.*" in row]
    assert len(rows) == 4 and all(row.rstrip().endswith("yes") and row.count("fp8 e4m3") == 2 for row in rows), output
    left = [path for folder in ("/dev/shm", "/tmp") for path in Path(folder).glob(f"jetrl*flow-{child.pid}*")]
    assert left == []


def wait_for(condition, child: subprocess.Popen, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert child.poll() is None, f"the run ended early: {child.stderr.read()[-2000:] if child.stderr else ''}"
        assert time.monotonic() < deadline, "timed out"
        time.sleep(0.2)


@pytest.fixture(scope="module")
def resumed(root: Path, runs: Path, arms: dict[str, Path]) -> Path:
    """The jetrl arm killed with SIGKILL (supervisor and driver) after step 3, whose last checkpoint is step 2, and resumed,
    with sharded weights from there on: those change no bit either."""
    other = runs / "killed"
    run = other / "tiny" / "jetrl"
    child = subprocess.Popen(command(root, other, "jetrl"), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    wait_for(lambda: run.is_dir() and 3 in records(run), child, 600)
    child.kill()
    child.wait()
    driver = [p for p in processes.of_run(status(run)["run_id"]) if "verl.jetrl.train" in " ".join(p.cmdline())]
    for process in driver:
        process.kill()
    # what a kill in the middle of a save leaves: a folder without its mark, and a truncated tracker
    assert (run / "checkpoints/global_step_2" / checkpoints.MARK).is_file()
    (run / "checkpoints/global_step_4").mkdir(exist_ok=True)
    (run / "checkpoints/global_step_4" / checkpoints.MARK).unlink(missing_ok=True)
    (run / "checkpoints" / checkpoints.TRACKER).write_text("")
    killed = status(run)
    overrides = (*recorded(runs), "actor_rollout_ref.actor.fsdp_config.arena=sharded")
    result = subprocess.run(command(root, other, "jetrl", *overrides), capture_output=True, text=True)
    assert result.returncode == 0, result.stderr[-3000:]
    assert "going on from step 2" in result.stdout
    assert processes.of_run(killed["run_id"]) == []
    assert [path for path in killed.get("shared_memory", ()) if os.path.exists(path)] == []
    return run


def states(run: Path) -> dict[int, dict]:
    """Step to the hashes of that step; of several, the last."""
    return {state["step"]: state for state in map(json.loads, (run / "state.jsonl").read_text().splitlines())}


def test_resume_equals_an_unbroken_run(arms: dict[str, Path], resumed: Path) -> None:
    """Prompts, weights (FP8 bytes), optimizer and RNG are an unbroken run's when the resumed run starts at step 2 and after
    each later step; the updates, from the same recorded responses, give identical losses."""
    unbroken, other = states(arms["jetrl"]), states(resumed)
    assert unbroken[4]["weights"] != unbroken[2]["weights"]
    for part in ("weights", "optimizer", "rng"):
        assert other[2][part] == unbroken[2][part], part
    for step in (3, 4):
        assert other[step] == unbroken[step], step
        for name in ("actor/pg_loss", names.GRAD_NORM, names.REWARD, *names.MISMATCH):
            assert records(resumed)[step][name] == records(arms["jetrl"])[step][name], (step, name)


def test_dropped_weight_updates_are_caught(root: Path, runs: Path) -> None:
    other = runs / "dropped"
    env = {**os.environ, "JETRL_FAULT": "drop_weight_sync"}
    started = time.monotonic()
    result = subprocess.run(command(root, other, "jetrl"), capture_output=True, text=True, env=env)
    assert result.returncode == 1
    assert "the rollout's weights are not the trainer's" in result.stderr, result.stderr[-3000:]
    run = other / "tiny" / "jetrl"
    assert status(run)["state"] == "failed" and "weight update did not arrive" in status(run)["error"]
    assert max(records(run), default=0) <= 1
    assert left_behind(run) == []
    assert time.monotonic() - started < 600


@pytest.fixture
def ray_head() -> Iterator[tuple[str, int]]:
    """Address and process of a Ray that somebody else has started."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    folder = tempfile.mkdtemp(prefix="ray-", dir="/tmp")  # the paths of its sockets must stay short
    start = ["start", "--head", "--block", "--node-ip-address=127.0.0.1", f"--port={address.rpartition(':')[2]}"]
    start += [f"--temp-dir={folder}", "--num-cpus=16", "--num-gpus=1", "--object-store-memory=500000000"]
    start += ["--include-dashboard=false", "--disable-usage-stats"]
    with open(Path(folder) / "out", "wb") as out:
        head = psutil.Popen([Path(sys.executable).parent / "ray", *start], stdout=out, stderr=out, start_new_session=True)
    deadline = time.monotonic() + 120
    try:
        while "--address=" not in (said := (Path(folder) / "out").read_text()):
            assert head.poll() is None and time.monotonic() < deadline, said
            time.sleep(0.5)
        yield address, head.pid
    finally:
        started = []
        if head.is_running():
            started = [head, *head.children(recursive=True)]
            head.terminate()
        _, alive = psutil.wait_procs(started, timeout=30)
        for process in alive:
            process.kill()
        shutil.rmtree(folder)


def test_a_ray_that_runs_already_is_joined_and_stays(root: Path, runs: Path, ray_head: tuple[str, int]) -> None:
    """Its workers do not inherit the run's environment; on a cluster every run is such a one."""
    address, head = ray_head
    before = {p.pid for p in psutil.Process(head).children(recursive=True)}
    joined = f"+ray_kwargs.ray_init.address={address}"
    result = subprocess.run(
        command(root, runs / "joined", "jetrl", "trainer.total_training_steps=1", "trainer.save_freq=-1", joined),
        capture_output=True, text=True,
    )  # fmt: skip
    run = runs / "joined" / "tiny" / "jetrl"
    assert result.returncode == 0, result.stderr[-3000:] + (run / "log.txt").read_text()[-3000:]
    assert list(records(run)) == [1]
    assert left_behind(run) == []
    here = {p.pid for p in psutil.Process(head).children(recursive=True) if p.status() != psutil.STATUS_ZOMBIE}
    assert {pid for pid in before if psutil.Process(pid).name() in ("gcs_server", "raylet")} <= here


def test_sigterm_leaves_nothing(root: Path, runs: Path) -> None:
    other = runs / "stopped"
    run = other / "tiny" / "bf16"
    child = subprocess.Popen(command(root, other, "bf16"), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    wait_for(lambda: (run / "status.json").is_file() and len(processes.of_run(status(run)["run_id"])) > 5, child, 300)
    child.send_signal(signal.SIGTERM)
    assert child.wait(timeout=60) == 128 + signal.SIGTERM
    assert status(run)["state"] == "stopped"
    assert left_behind(run) == []
