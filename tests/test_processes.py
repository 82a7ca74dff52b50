"""What a run leaves behind, and how the next one finds it: checkpoints, processes, shared memory, logs, status."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import types
import uuid
from multiprocessing import shared_memory
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from omegaconf import OmegaConf

from verl.jetrl import checkpoints, processes, run, train
from verl.jetrl import metric_names as names
from verl.jetrl.compose import compose
from verl.jetrl.environment import RUN_ID, environment, ray_address, run_tmp, socket_of_run
from verl.jetrl.report import load

# --- checkpoints ------------------------------------------------------------------------------------------------------


def checkpoint(folder: Path, step: int, complete: bool = True, actor: bool = True) -> Path:
    made = folder / f"global_step_{step}"
    (made / "actor").mkdir(parents=True)
    if actor:
        (made / "actor" / "model.pt").write_text("weights")
    if complete:
        checkpoints.mark_complete(folder, step)
    return made


def test_an_unfinished_newest_checkpoint_is_removed(tmp_path):
    kept = [checkpoint(tmp_path, 5), checkpoint(tmp_path, 10)]
    unfinished = checkpoint(tmp_path, 15, complete=False)
    (tmp_path / checkpoints.TRACKER).write_text("15")
    assert checkpoints.repair(tmp_path) == 10
    assert (tmp_path / checkpoints.TRACKER).read_text() == "10"
    assert not unfinished.exists() and all(folder.exists() for folder in kept)
    assert checkpoints.repair(tmp_path) == 10, "a second repair changes nothing"


def test_steps_are_numbers_not_text(tmp_path):
    for step in (9, 10, 100):
        checkpoint(tmp_path, step)
    assert checkpoints.repair(tmp_path) == 100


@pytest.mark.parametrize("tracker", ["", "garbage", "7", None])
def test_the_tracker_is_set_right(tmp_path, tracker):
    checkpoint(tmp_path, 5)
    if tracker is not None:
        (tmp_path / checkpoints.TRACKER).write_text(tracker)
    assert checkpoints.repair(tmp_path) == 5
    assert (tmp_path / checkpoints.TRACKER).read_text() == "5"


def test_a_checkpoint_that_verl_pruned_does_not_count(tmp_path):
    """verl removes the ``actor`` folder of an old checkpoint and leaves the rest."""
    checkpoint(tmp_path, 5)
    pruned = checkpoint(tmp_path, 10, actor=False)
    assert checkpoints.repair(tmp_path) == 5
    assert not pruned.exists()


def test_no_whole_checkpoint(tmp_path):
    checkpoint(tmp_path, 5, complete=False)
    (tmp_path / checkpoints.TRACKER).write_text("5")
    assert checkpoints.repair(tmp_path) is None
    assert list(tmp_path.iterdir()) == [], "the tracker would send verl to a checkpoint that is gone"
    assert checkpoints.repair(tmp_path / "nowhere") is None


def test_other_files_are_left_alone(tmp_path):
    others = ["global_step_", "global_step_x", "global_step_²", "my_global_step_3", "notes"]
    for name in others:
        (tmp_path / name).mkdir()
    (tmp_path / "global_step_7").write_text("a file")
    elsewhere = tmp_path / "notes" / "precious"
    elsewhere.write_text("x")
    (tmp_path / "global_step_8").symlink_to(tmp_path / "notes")
    assert checkpoints.repair(tmp_path) is None
    assert elsewhere.exists() and sorted(p.name for p in tmp_path.iterdir()) == sorted([*others, "global_step_7"])


def test_write_atomically(tmp_path, monkeypatch):
    path = tmp_path / "größe.txt"
    checkpoints.write_atomically(path, "old ä")
    checkpoints.write_atomically(path, "new ö")
    assert path.read_text(encoding="utf-8") == "new ö" and os.listdir(tmp_path) == [path.name]

    def fails(*_):
        raise OSError("disk full")

    monkeypatch.setattr(checkpoints.os, "fsync", fails)
    with pytest.raises(OSError, match="disk full"):
        checkpoints.write_atomically(path, "newest")
    assert path.read_text(encoding="utf-8") == "new ö", "a failed write leaves the old content"


# --- processes ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def run_id():
    made = f"test-{uuid.uuid4().hex[:8]}"
    yield made
    for process in processes.of_run(made):
        process.kill()


def start(run_id: str, code: str, **options) -> subprocess.Popen:
    """A Python process of the run that has run ``code``, printed "ready", and sleeps."""
    code = f"import os, signal, subprocess, sys, time\n{code}\nprint('ready', flush=True)\ntime.sleep(60)\n"
    process = subprocess.Popen(
        [sys.executable, "-S", "-c", code], env={**os.environ, RUN_ID: run_id}, stdout=subprocess.PIPE, text=True, **options
    )
    assert process.stdout.readline() == "ready\n"
    return process


def wait_for(condition) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline, "did not happen within 10 s"
        time.sleep(0.05)


CHILD = "subprocess.Popen([sys.executable, '-S', '-c', 'import time; time.sleep(60)'])"


def test_end_kills_the_whole_tree(run_id):
    other_id = f"test-{uuid.uuid4().hex[:8]}"
    bystander = start(other_id, "")
    stubborn = start(run_id, f"signal.signal(signal.SIGTERM, signal.SIG_IGN)\n{CHILD}", start_new_session=True)
    # Double fork: its parent is init, its session its own; only the environment tells whose it is.
    daemon = "if os.fork(): os._exit(0)\nos.setsid()\nif os.fork(): os._exit(0)"
    start(run_id, daemon)
    wait_for(lambda: len(processes.of_run(run_id)) == 3)
    pids = [p.pid for p in processes.of_run(run_id)]
    started = time.monotonic()
    removed = processes.end(run_id, set(), grace_s=0.5)
    assert time.monotonic() - started < 8
    assert processes.of_run(run_id) == [] and not any(_running(pid) for pid in pids)
    assert {f"process {pid}" for pid in pids} <= set(removed)
    assert stubborn.pid in pids
    assert bystander.poll() is None, "another run's process was ended"
    assert [p.pid for p in processes.of_run(other_id)] == [bystander.pid]
    processes.end(other_id, set())
    assert not _running(bystander.pid)


def _running(pid: int) -> bool:
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


def test_processes_started_while_the_run_ends_are_ended_too(run_id):
    """A supervisor inside the run (Ray's raylet, say) may start another process as its last act."""
    last_act = f"signal.signal(signal.SIGTERM, lambda *_: ({CHILD}, os._exit(0)))"
    start(run_id, last_act)
    processes.end(run_id, set(), grace_s=2)
    assert processes.of_run(run_id) == []


def test_a_process_that_overwrote_its_environment_is_found(run_id):
    """As setproctitle does, with which Ray and vLLM name their processes."""
    pytest.importorskip("setproctitle")
    code = "import setproctitle, time; setproctitle.setproctitle('VLLM::EngineCore'); print('set', flush=True); time.sleep(60)"
    parent = start(run_id, f"p = subprocess.Popen([{sys.executable!r}, '-c', {code!r}], stdout=-1); p.stdout.readline()")
    (child,) = psutil.Process(parent.pid).children()
    assert RUN_ID.encode() not in Path(f"/proc/{child.pid}/environ").read_bytes(), "the case is not the one meant"
    assert child.pid in [p.pid for p in processes.of_run(run_id)]
    processes.end(run_id, set())
    assert not _running(child.pid)


def test_end_removes_semaphores(run_id):
    """Mapped before they have their name, which /proc does not say afterwards; one was left behind by a job."""
    code = "import multiprocessing\nfrom multiprocessing import resource_tracker\nresource_tracker.register = lambda *_: None\n"
    code += "kept = multiprocessing.get_context('spawn').Semaphore()\nprint(kept._semlock.name, flush=True)"
    process = subprocess.Popen(
        [sys.executable, "-c", f"{code}\nimport time; time.sleep(60)"],
        env={**os.environ, RUN_ID: run_id},
        stdout=subprocess.PIPE,
        text=True,
    )
    path = f"/dev/shm/sem.{process.stdout.readline().strip().removeprefix('/')}"
    try:
        assert os.path.exists(path)
        assert path not in Path(f"/proc/{process.pid}/maps").read_text(), "the case is not the one meant"
        assert processes.shared_memory([psutil.Process(process.pid)]) == {path}
        assert path in processes.end(run_id, set()) and not os.path.exists(path)
    finally:
        process.kill()
        process.wait()
        Path(path).unlink(missing_ok=True)


def test_end_removes_shared_memory_and_sockets_of_the_run_alone(run_id, monkeypatch):
    hold = "from multiprocessing import shared_memory, resource_tracker\nresource_tracker.register = lambda *_: None\n"
    names_ = [f"psm_{run_id}_{i}" for i in range(3)]
    segments = [f"/dev/shm/{name}" for name in names_]
    # Two are mapped by living processes of the run; of the third only the supervisor's list still knows.
    for name in names_[:2]:
        start(run_id, f"{hold}kept = shared_memory.SharedMemory(name={name!r}, create=True, size=64)")
    Path(segments[2]).write_bytes(b"x")
    foreign = shared_memory.SharedMemory(name=f"psm_other_{run_id}", create=True, size=64)
    verls = "ipc:///tmp/rl-colocate-zmq-01000000-replica-0-rank-0.sock"  # the same in every run
    monkeypatch.setenv(RUN_ID, f"other-{run_id}")
    used = Path(socket_of_run(verls).removeprefix("ipc://"))
    monkeypatch.setenv(RUN_ID, run_id)
    stale = Path(socket_of_run(verls).removeprefix("ipc://"))
    assert used != stale and used.name == stale.name, "two runs on one machine would take each other's socket away"
    with socket.socket(socket.AF_UNIX) as old, socket.socket(socket.AF_UNIX) as living:
        old.bind(str(stale))
        old.close()
        living.bind(str(used))
        try:
            assert processes.shared_memory(processes.of_run(run_id)) == set(segments[:2])
            removed = processes.end(run_id, {segments[2], "/dev/shm/psm_gone_already"})
            assert set(segments) <= set(removed)
            assert not any(os.path.exists(path) for path in (*segments, stale, run_tmp(run_id)))
            assert used.exists(), "the socket of another, living run was removed"
            assert os.path.exists(f"/dev/shm/{foreign.name}"), "another program's segment was removed"
        finally:
            shutil.rmtree(used.parent)
            foreign.close()
            foreign.unlink()


def test_both_sides_of_a_weight_update_meet_in_the_runs_folder(run_id, monkeypatch):
    from verl.workers.rollout.vllm_rollout import vllm_rollout

    from verl.jetrl.rollout import adapter, worker_extension

    monkeypatch.setenv(RUN_ID, run_id)
    monkeypatch.setenv("VERL_RAY_JOB_ID", "01000000")
    for name, value in {"RANK": "0", "RAY_LOCAL_WORLD_SIZE": "1", "VERL_REPLICA_RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    context = SimpleNamespace(get_job_id=lambda: "01000000")
    monkeypatch.setattr(vllm_rollout.ray, "get_runtime_context", lambda: context)
    monkeypatch.setattr(vllm_rollout.BaseRollout, "__init__", lambda self, config, *_: setattr(self, "config", config))
    parallel = dict(tensor_model_parallel_size=1, data_parallel_size=1, pipeline_model_parallel_size=1)
    sender = adapter.JetRLServerAdapter(SimpleNamespace(**parallel, layered_summon=False), None, None)
    receiver = object.__new__(worker_extension.JetRLWorkerExtension)
    receiver.local_rank, receiver.model_runner = 0, None
    try:
        assert sender.zmq_handle == receiver._get_zmq_handle()
        assert Path(sender.zmq_handle.removeprefix("ipc://")).parent == run_tmp(run_id)
    finally:
        shutil.rmtree(run_tmp(run_id))


def test_verls_socket_stays_where_it_is_outside_a_run(monkeypatch):
    monkeypatch.delenv(RUN_ID, raising=False)
    assert socket_of_run("ipc:///tmp/a.sock") == "ipc:///tmp/a.sock"


def test_ending_nothing(run_id):
    assert [x for x in processes.end(run_id, set()) if run_id in x or x.startswith("process")] == []


def test_the_environment_of_a_run(tmp_path, monkeypatch):
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "3")
    monkeypatch.setenv(RUN_ID, "outer")
    monkeypatch.delenv("VERL_PLATFORM", raising=False)
    values = environment("cpu", "abc", tmp_path, tmp_path / "001.jsonl")
    assert values[RUN_ID] == "abc", "a run started from within a run is its own"
    assert values["VERL_PLATFORM"] == "cpu" and values["VLLM_CPU_KVCACHE_SPACE"] == "3", "what the user set wins"
    assert values["VLLM_RPC_BASE_PATH"] == str(run_tmp("abc")), "vLLM's sockets go with the run's folder"
    assert len(f"{run_tmp('0' * 12)}/{uuid.uuid4()}") < 107
    gpu = environment("gpu", "abc", tmp_path, tmp_path / "001.jsonl")
    assert gpu["VLLM_USE_DEEP_GEMM_E8M0"] == "0", "the format has FP32 scales"


# --- the error of a failed run ------------------------------------------------------------------------------------------

C, R = "\x1b[36m", "\x1b[0m"
NESTED = f"""\
{C}(JetRLTaskRunner pid=101){R} step 3 done
{C}(JetRLHttpServer pid=7){R} (EngineCore pid=9) ERROR 11-29 19:58:29 [core.py:1100] RuntimeError: not the reason
{C}(WorkerDict pid=88){R} Exception ignored in: <function SharedMemory.__del__ at 0x7f0bf4d34fe0>
{C}(WorkerDict pid=88){R} BufferError: cannot close exported pointers exist
Traceback (most recent call last):
  File "/x/verl/jetrl/train.py", line 70, in <module>
    main()
  File "/x/verl/jetrl/train.py", line 66, in main
    run_ppo(config, JetRLTaskRunner)
ray.exceptions.RayTaskError(WeightSyncError): {C}ray::JetRLTaskRunner.run(){R} (pid=101, ip=10.0.0.1, actor_id=ab)
  File "/x/verl/jetrl/train.py", line 45, in run
    trainer.init()
ray.exceptions.RayTaskError(WeightSyncError): {C}ray::WorkerDict.update_weights(){R} (pid=88, ip=10.0.0.1)
  File "/x/verl/jetrl/rollout/adapter.py", line 90, in update_weights
    await sender.async_send_weights(weights)
verl.jetrl.rollout.adapter.WeightSyncError: the rollout worker did not answer within 45 s of a weight update
{C}(raylet){R} some clean-up
"""
HANDLING = """\
Traceback (most recent call last):
  File "a.py", line 1, in f
KeyError: 'the reason'

During handling of the above exception, another exception occurred:

Traceback (most recent call last):
  File "b.py", line 2, in close
BufferError: cannot close exported pointers exist
"""


@pytest.mark.parametrize(
    ("log", "message"),
    [
        (NESTED, "verl.jetrl.rollout.adapter.WeightSyncError: the rollout worker did not answer within 45 s"),
        (HANDLING, "KeyError: 'the reason'"),
        (HANDLING + "Traceback (most recent call last):\n  File\nValueError: later and separate\n", "ValueError: later"),
        (
            NESTED + "Exception ignored in: <function f>\nTraceback (most recent call last):\n  File\nOSError: noise\n",
            "verl.jet",
        ),
        ("Traceback (most recent call last):\n  File\nAssertionError\n", "AssertionError"),
        (
            "omegaconf.errors.ConfigKeyError: Key 'x' is not in struct\n    full_key: x\n",
            "omegaconf.errors.ConfigKeyError: Key",
        ),
        (
            "verl.jetrl.flow_check.PrecisionMismatch: trainer and rollout differ\noperator  count\n",
            "verl.jetrl.flow_check.Prec",
        ),
        (
            f"{C}(WorkerDict pid=3, ip=10.0.0.2){R} Traceback\n{C}(WorkerDict pid=3, ip=10.0.0.2){R} OSError: no space\n",
            "OSError",
        ),
        (
            f"{C}(Server pid=7){R} (EngineCore pid=9) ERROR 11-29 19:58:29 [core.py:11] ValueError: in the engine\n",
            "ValueError: in",
        ),
        ("torch.OutOfMemoryError: CUDA out of memory. Tried\n", "torch.OutOfMemoryError: CUDA out of memory"),
        ("Exception: plain\r\n", "Exception: plain"),
    ],
)
def test_the_root_error_is_found(log, message):
    assert (run.last_error(log) or "").startswith(message)


@pytest.mark.parametrize(
    "log",
    [
        "",
        "all well\n",
        "Error handling is on\nNo Error here: fine\n",
        "INFO: 3 errors. Error rate: 0\n",
        "ray.exceptions.RayTaskError(KeyError): ray::f()\n",
        "    raise ValueError: in the source\n",
    ],
)
def test_no_error_is_made_up(log):
    assert run.last_error(log) is None


# --- one arm's supervision ------------------------------------------------------------------------------------------------


@pytest.fixture
def arm(tmp_path, monkeypatch):
    """An arm whose training is a small Python program; ``arm.code`` is its text."""

    def make(code: str, steps: int = 2) -> run.Arm:
        config = OmegaConf.create({"trainer": {"total_training_steps": steps, "save_freq": 10}})
        made = run.Arm(tmp_path, "bf16", tmp_path / "runs ä" / "bf16", config, [])
        real = subprocess.Popen

        def popen(command, **options):
            if "verl.jetrl.train" in command:
                command = [sys.executable, "-S", "-c", code, *map(str, command[3:])]
            return real(command, **options)

        monkeypatch.setattr(run.subprocess, "Popen", popen)
        monkeypatch.setattr(run, "POLL_S", 0.05)
        return made

    return make


RECORD = (
    "import json, os, sys\n"
    "def record(step): open(os.environ['VERL_FILE_LOGGER_PATH'], 'a').write(json.dumps("
    f"{{'step': step, 'data': {{{names.REWARD!r}: 0.5}}}}) + '\\n')\n"
)


def status(arm: run.Arm) -> dict:
    return json.loads((arm.folder / "status.json").read_text())


def test_a_run_to_its_end(arm, capsys):
    one = arm(RECORD + "record(1); record(2)")
    assert one.run() == 0
    assert status(one)["state"] == "finished" and status(one)["error"] is None and status(one)["total_steps"] == 2
    assert [p.name for p in sorted((one.folder / "segments").iterdir())] == ["001.jsonl"]
    again = arm("raise SystemExit('must not start')")
    assert again.run() == 0 and "finished already" in capsys.readouterr().out
    longer = arm(RECORD + "record(3)", steps=3)
    assert longer.run() == 0
    assert [p.name for p in sorted((one.folder / "segments").iterdir())] == ["001.jsonl", "002.jsonl"]
    (one.folder / "segments" / "001.jsonl").unlink()
    assert arm(RECORD + "record(4)", steps=4).run() == 0
    assert len((one.folder / "segments" / "002.jsonl").read_text().splitlines()) == 1, "an earlier start's file was reused"
    capsys.readouterr()
    assert arm(RECORD + "record(1)").run(fresh=True) == 0
    assert "earlier start" not in capsys.readouterr().out
    assert [p.name for p in (one.folder / "segments").iterdir()] == ["001.jsonl"]


def test_fewer_steps_than_there_are_is_nothing_to_do(arm, capsys, monkeypatch):
    one = arm(RECORD + "record(1); record(2)")
    assert one.run() == 0
    monkeypatch.setattr(run.checkpoints, "repair", lambda folder: 2)
    fewer = arm("raise SystemExit('must not start')", steps=1)
    assert fewer.run() == 0
    assert "already at step 2, trainer.total_training_steps=1: nothing to do" in capsys.readouterr().out
    assert status(one)["total_steps"] == 2 and status(one)["state"] == "finished", "the record of the run stays"
    fewer.config.trainer.lr = 0.5
    with pytest.raises(SystemExit, match=r"is at step 2 with other settings \(trainer.lr: .* -> 0.5\); --fresh"):
        fewer.run()


def test_an_earlier_start_without_a_checkpoint_is_named(arm, capsys):
    assert arm("raise ValueError('x')").run() == 1
    assert "no checkpoint" not in capsys.readouterr().out
    assert arm(RECORD + "record(1); record(2)").run() == 0
    assert "the earlier start left no checkpoint" in capsys.readouterr().out


def test_two_histories_are_not_mixed(arm, tmp_path, capsys):
    """After resume_mode=disable beside older checkpoints the next start went on from those; after a stop resume_path began
    with the other run's checkpoint again."""
    told = "import sys\nopen('told', 'w').write(repr(sys.argv))\n"

    def started(mode: str, given: Path | None = None, steps: int = 40) -> str:
        one = arm(told + RECORD + f"record({steps})", steps)
        one.config.trainer.update(resume_mode=mode, resume_from_path=given and str(given), nnodes=1, n_gpus_per_node=1)
        capsys.readouterr()
        assert one.run() == 0
        arguments = (one.folder / "told").read_text() if (one.folder / "told").exists() else ""
        (one.folder / "told").unlink(missing_ok=True)
        assert ("trainer.resume_mode=auto" in arguments) == ("going on from step" in capsys.readouterr().out)
        return arguments

    folder = arm("").folder / "checkpoints"
    assert started("disable") and started("auto", steps=41)
    other = checkpoint(tmp_path / "other", 30)
    assert "mode=auto" not in started("resume_path", other, 42), "its first start"
    checkpoint(folder, 35)
    checkpoint(folder, 36)
    assert "mode=auto" in started("resume_path", other, 43), "its second start began with the other run's checkpoint again"
    with pytest.raises(SystemExit, match="step 36, and .*/another/global_step_30 would begin another history"):
        started("resume_path", checkpoint(tmp_path / "another", 30), 44)
    assert "mode=auto" in started("resume_path", folder / "global_step_36", 44)
    checkpoint(folder, 40)
    assert "mode=auto" in started("resume_path", folder / "global_step_36", 45), "the same command goes on"
    for mode, given in (("resume_path", folder / "global_step_35"), ("disable", None)):
        with pytest.raises(SystemExit, match=f"step 40, and .*{mode}.* another history beside them.*=auto goes on.*--fresh"):
            started(mode, given, 46)
    shutil.rmtree(folder)
    (other / "actor" / "fsdp_config.json").write_text('{"world_size": 3}')
    with pytest.raises(SystemExit, match="global_step_30 was saved by 3 processes, this run has 1"):
        started("resume_path", other, 46)


def test_the_fullest_gpu_is_remembered_over_starts(arm, monkeypatch):
    monkeypatch.setattr(run, "machine", lambda: "gpu")
    for seen, remembered in (([3.0, 90.0, 5.0], 90.0), ([40.0], 90.0)):
        values = iter(seen + [1.0] * 1000)
        monkeypatch.setattr(run.device_memory, "meter", lambda values=values: lambda: next(values))
        one = arm("import time; time.sleep(0.6); 1 / 0")
        one.run()
        assert next(values) == 1.0 and status(one)["peak_device_gb"] == remembered
    assert load.load_arm(one.folder).status.peak_device_gb == 90.0
    monkeypatch.setattr(run, "machine", lambda: "cpu")
    monkeypatch.setattr(run.device_memory, "meter", lambda: pytest.fail("there is no GPU"))
    arm("").run(fresh=True)
    assert status(one)["peak_device_gb"] is None


@pytest.mark.parametrize(
    ("visible", "expected"), [(None, 3.0), ("0", 1.0), ("1,0", 2.0), ("GPU-b", 2.0), ("MIG-x,0", 4.0), ("0,", 1.0)]
)
def test_memory_in_use_is_that_of_the_fullest_visible_gpu(monkeypatch, visible, expected):
    from verl.jetrl import device_memory

    used = {0: 1.0, 1: 2.0, 2: 3.0, "GPU-b": 2.0, "MIG-x": 4.0}
    nvml = types.SimpleNamespace(
        nvmlInit=lambda: None,
        nvmlDeviceGetCount=lambda: 3,
        nvmlDeviceGetHandleByIndex=lambda index: index,
        nvmlDeviceGetHandleByUUID=lambda uuid: uuid,
        nvmlDeviceGetMemoryInfo=lambda handle: types.SimpleNamespace(used=used[handle] * 2**30),
    )
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    if visible is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert device_memory.meter()() == expected


def test_gpu_memory_by_process_leaves_out_what_the_driver_does_not_tell(monkeypatch):
    from verl.jetrl import device_memory

    found = {0: [(7, 2.0), (8, None)], 1: [(7, 1.0), (9, 4.0)]}
    nvml = types.SimpleNamespace(
        nvmlInit=lambda: None,
        nvmlDeviceGetCount=lambda: 2,
        nvmlDeviceGetHandleByIndex=lambda index: index,
        nvmlDeviceGetMemoryInfo=lambda handle: types.SimpleNamespace(used=10 * 2**30),
        nvmlDeviceGetComputeRunningProcesses=lambda handle: [
            types.SimpleNamespace(pid=pid, usedGpuMemory=gib and int(gib * 2**30)) for pid, gib in found[handle]
        ],
    )
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert device_memory.meter_by_process()() == (20.0, {7: 3.0, 9: 4.0})


def test_time_left_is_from_steps_and_not_from_the_start(tmp_path, monkeypatch):
    """The start takes minutes, a step seconds."""
    now = [1000.0]
    monkeypatch.setattr(run.time, "time", lambda: now[0])
    with run.tqdm(total=10, smoothing=0, file=open(tmp_path / "bar", "w")) as bar:
        bar.started, bar.start_t = False, now[0]
        monkeypatch.setattr(bar, "_time", lambda: now[0])
        segment, position = tmp_path / "001.jsonl", 0
        for step, seconds in ((1, 120.0), (2, 8.0), (4, 16.0)):
            now[0] += seconds
            with open(segment, "a") as file:
                file.write(json.dumps({"step": step, "data": {names.REWARD: 0.5}}) + "\n")
            position = run._advance(bar, segment, position)
        shown = bar.format_dict
        assert bar.postfix == "reward 0.500", "a step without a mismatch shows none"
        assert shown["n"] == 4 and shown["elapsed"] / (shown["n"] - shown["initial"]) == pytest.approx(8.0)


def test_the_results_are_printed(tmp_path):
    (tmp_path / "report.md").write_text(
        "# x\n\n## Arms\n\n- a\n\n## Results\n\n| m | a |\n|---|--:|\n| r | 1 |\n\n## Learning\n\nz\n"
    )
    assert run.results(tmp_path) == "| m | a |\n|---|--:|\n| r | 1 |\n"


def test_a_failed_run_says_why(arm, capsys):
    one = arm("raise ValueError('the reason ä')")
    assert one.run() == 1
    assert status(one)["state"] == "failed" and status(one)["error"] == "ValueError: the reason ä"
    assert "bf16 failed: ValueError: the reason" in capsys.readouterr().err
    assert arm("import os; os._exit(7)").run() == 7
    assert status(one)["error"] == "exit code 7", "an earlier start's error in the log is not this one's"


def test_a_killed_training_process_is_a_failure(arm):
    one = arm("import os, signal; os.kill(os.getpid(), signal.SIGKILL)")
    assert one.run() == 128 + signal.SIGKILL
    assert status(one)["state"] == "failed"


def test_damaged_records_do_not_stop_a_run(arm):
    write = "f = open(os.environ['VERL_FILE_LOGGER_PATH'], 'a')\nf.write('{\\n[]\\nnull\\n{\"step\": 1}\\n'); f.flush()\n"
    one = arm(RECORD + write + "import time; time.sleep(0.4); record(2)")
    assert one.run() == 0 and status(one)["state"] == "finished"


def test_a_signal_stops_the_run_and_leaves_nothing(arm, capsys):
    code = f"import os, signal, subprocess, sys, time\n{CHILD}\nos.kill(os.getppid(), signal.SIGTERM)\ntime.sleep(60)"
    one = arm(code)
    assert one.run() == 128 + signal.SIGTERM
    assert status(one)["state"] == "stopped" and status(one)["error"] == "stopped by SIGTERM"
    assert processes.of_run(one.run_id) == []
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    assert "SIGTERM, ending its processes" in capsys.readouterr().err


def test_two_at_once_are_refused(arm, tmp_path):
    one = arm("raise SystemExit('must not start')")
    one.folder.mkdir(parents=True)
    (one.folder / "status.json").write_text(json.dumps({"state": "running", "supervisor": 4711, "run_id": "x"}))
    with open(one.folder.parent / ".bf16.lock", "a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for fresh in (False, True):
            with pytest.raises(SystemExit, match="bf16 is running already .process 4711."):
                one.run(fresh)
    assert status(one)["state"] == "running", "the other's files were touched"


def test_what_a_killed_run_left_is_ended_first(arm, run_id):
    left = start(run_id, "signal.signal(signal.SIGTERM, signal.SIG_IGN)")
    segment = Path(f"/dev/shm/psm_{run_id}")
    segment.write_bytes(b"x")
    one = arm(RECORD + "record(2)")
    one.folder.mkdir(parents=True)
    # The supervisor's id has been given to another process since: it must not be taken for a supervisor.
    earlier = {"state": "running", "supervisor": os.getpid(), "run_id": run_id, "shared_memory": [str(segment)]}
    (one.folder / "status.json").write_text(json.dumps(earlier))
    checkpoint(one.folder / "checkpoints", 1)
    checkpoint(one.folder / "checkpoints", 2, complete=False)
    assert one.run() == 0
    assert not _running(left.pid) and not segment.exists()
    assert sorted(p.name for p in (one.folder / "checkpoints").glob("global*")) == ["global_step_1"]
    assert status(one)["state"] == "finished" and status(one)["run_id"] != run_id
    assert status(one)["shared_memory"] == [], "an earlier start's segments are not this one's"


@pytest.mark.parametrize("content", ["", "{", "[]", "null"])
def test_a_damaged_status_is_one_clear_error(arm, content):
    one = arm(RECORD + "record(2)")
    one.folder.mkdir(parents=True)
    (one.folder / "status.json").write_text(content)
    with pytest.raises(SystemExit, match="status.json is damaged.*--fresh"):
        one.run()
    assert one.run(fresh=True) == 0


def test_damaged_files_of_an_earlier_start_are_named(arm):
    one = arm(RECORD + "record(2)")
    one.folder.mkdir(parents=True)
    (one.folder / "config.yaml").write_text("{a: ")
    with pytest.raises(SystemExit, match="config.yaml is damaged.*--fresh"):
        one.run()
    (one.folder / "config.yaml").unlink()
    folder = one.folder / "checkpoints" / "global_step_1"
    checkpoint(one.folder / "checkpoints", 1)
    for content in ("{", "{}", "[]", '{"world_size": null}'):
        (folder / "actor" / "fsdp_config.json").write_text(content)
        with pytest.raises(SystemExit, match="fsdp_config.json is damaged"):
            one._require_shards(folder)


def test_the_command_refuses_what_does_not_fit(root, tmp_path, capsys):
    recipe, runs = str(root / "recipes/tiny"), ["--runs", str(tmp_path / "runs")]
    for arguments, message in (
        ([str(tmp_path)], "is not a recipe"),
        ([recipe, "--arms", "bf16,fp9"], "no arm 'fp9'"),
        ([recipe, "--arms", "bf16", "trainer.total_trainin_steps=3"], "trainer.total_trainin_steps"),
        ([recipe, "--print-config", "fp9"], "no arm 'fp9'"),
    ):
        assert run.main([*arguments, *runs]) == 2
        said = capsys.readouterr().err
        assert said.startswith("error: ") and message in said
    assert not (tmp_path / "runs").exists(), "something was started"


def test_changed_settings_are_named(arm, capsys):
    assert arm(RECORD + "record(1); record(2)").run() == 0
    other = arm("raise SystemExit('must not start')")
    other.config.trainer.lr = 0.5
    with pytest.raises(SystemExit, match=r"finished with other settings \(trainer.lr: .* -> 0.5\); --fresh"):
        other.run()
    capsys.readouterr()
    longer = arm(RECORD + "record(3)", steps=3)
    assert longer.run() == 0
    assert "settings changed since the last start: trainer.total_training_steps: 2 -> 3" in capsys.readouterr().out


def test_an_engines_death_names_its_cause():
    server = "\x1b[36m(JetRLHttpServer pid=17)\x1b[0m (Worker pid=18) ERROR 11-29 21:36:38 [multiproc_executor.py:1000] "
    log = "\n".join(
        [
            server + "Traceback (most recent call last):",
            server + "RuntimeError: CPU Generator does not use offset",
            "Traceback (most recent call last):",
            "ray.exceptions.RayTaskError(EngineDeadError): ray::JetRLTaskRunner.run()",
            "vllm.v1.engine.exceptions.EngineDeadError: EngineCore encountered an issue. See stack trace (above).",
        ]
    )
    assert run.last_error(log) == "RuntimeError: CPU Generator does not use offset (vLLM's engine died of it)"


def test_a_neighbour_on_the_gpu_is_named():
    said = "Exception: Call to sleep method failed: Worker failed with error 'Memory usage increased after sleeping.'"
    assert run.last_error(f"Traceback (most recent call last):\n{said}") == (
        f"{said} (another program took memory of the GPU meanwhile: docs/memory.md, Several runs on one GPU)"
    )


def test_a_ray_that_runs_already_is_told_what_its_workers_do_not_inherit(root, tmp_path, monkeypatch):
    """A test of the whole is in test_jobs.py."""
    settings = ["+ray_kwargs.ray_init.address=auto", "+ray_kwargs.ray_init.runtime_env.env_vars.NCCL_DEBUG=INFO"]
    config = compose(root / "recipes/tiny", "jetrl", tmp_path, settings)
    given = environment("cpu", "abc", tmp_path, tmp_path / "001.jsonl")
    for name, value in {**given, "JETRL_DRAIN_DEADLINE_S": "7", "UNKNOWN": "1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    assert ray_address(config) == "auto"
    train.join_ray(config)
    joined = OmegaConf.to_container(config.ray_kwargs.ray_init)
    told = joined["runtime_env"]["env_vars"]
    assert joined["address"] == "auto" and not set(joined) & set(train.STARTS_RAY), "Ray refuses what would start one"
    assert told[RUN_ID] == "abc" and told["VERL_FILE_LOGGER_PATH"].endswith("001.jsonl")
    assert told["VERL_PLATFORM"] == "cpu" and told["JETRL_DRAIN_DEADLINE_S"] == "7" and told["NCCL_DEBUG"] == "INFO"
    assert "UNKNOWN" not in told and not any(name.startswith("RAY_") for name in told)


def test_which_ray_a_run_joins(root, tmp_path, monkeypatch):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    own = compose(root / "recipes/tiny", "jetrl", tmp_path)
    assert ray_address(own) is None
    assert ray_address(compose(root / "recipes/tiny", "jetrl", tmp_path, ["+ray_kwargs.ray_init.address=local"])) is None
    monkeypatch.setenv("RAY_ADDRESS", "head:6379")
    assert ray_address(own) == "head:6379"
