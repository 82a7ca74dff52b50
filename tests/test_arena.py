"""The weight arena: its layout, sharing it between processes, version and lease, and every way in which it cannot be had."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from decoder_cases import CPU, MODELS, config_of, make

from verl.jetrl import arena as module
from verl.jetrl.arena import ALIGN, ENGINE, ROPE, SCALE, TRAINER, Arena, ArenaError, Control, LeaseError, control_of, layout_of
from verl.jetrl.environment import run_tmp
from verl.jetrl.fp8.format import FP8, dequantize, groups, quantize_blocks
from verl.jetrl.model.decoder import Decoder

CASES = {**{name: (name, {}) for name in MODELS}, "llama, biases": ("llama", {"attention_bias": True})}
CASES["qwen3, untied, biases"] = ("qwen3", {"tie_word_embeddings": False, "attention_bias": True})


@pytest.fixture
def run(monkeypatch) -> str:
    """A run of its own; whatever it leaves in /dev/shm is an error of the test's."""
    run_id = f"test-arena-{os.getpid()}"
    monkeypatch.setenv("JETRL_RUN", run_id)
    yield run_id
    folder = run_tmp(run_id)
    for file in folder.glob("*"):
        file.unlink()
    if folder.is_dir():
        folder.rmdir()
    left = shared(run_id)
    for path in left:
        path.unlink()
    assert left == []


def shared(run_id: str) -> list[Path]:
    return sorted(Path("/dev/shm").glob(f"*{run_id}*"))


# --- the layout -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", CASES)
def test_layout_is_the_models_state_dict_once(case):
    """Every parameter of the Hugging Face model is in one entry, with all of its rows; a tied head has none of its own."""
    name, changes = CASES[case]
    model = make(name, **changes)
    layout = layout_of(model.config)
    expected = {key: p.shape for key, p in model.named_parameters()}  # tied parameters are named once
    found: dict[str, tuple[int, ...]] = {}
    for entry in layout.entries:
        if entry.name.endswith(SCALE) or entry.name == ROPE:
            continue
        assert sum(rows for _, rows in entry.parts) == entry.shape[0], entry.name
        for part, rows in entry.parts:
            assert part not in found, f"{part} twice"
            found[part] = (rows, *entry.shape[1:])
        fp8 = entry.name.endswith("_proj.weight")
        assert entry.dtype == (FP8 if fp8 else torch.bfloat16), entry.name
        if fp8:
            scales = layout[f"{entry.name.removesuffix('weight')}{SCALE}"]
            assert scales.dtype == torch.float32 and scales.shape == (sum(n for _, n in scales.parts), groups(entry.shape[1]))
            wanted = [(part.replace("weight", SCALE), groups(rows)) for part, rows in entry.parts]
            assert list(scales.parts) == wanted, "blocks must not straddle q, k, v or gate, up"
    assert found == expected
    assert ("lm_head.weight" in layout) is not model.config.tie_word_embeddings
    head = model.config.hidden_size // model.config.num_attention_heads
    assert layout[ROPE].shape == (64, getattr(model.config, "head_dim", None) or head)
    assert not layout[ROPE].parts and layout[ROPE].dtype == torch.float32


@pytest.mark.parametrize("case", CASES)
def test_entries_are_aligned_and_do_not_overlap(case):
    name, changes = CASES[case]
    layout = layout_of(config_of(name, **changes))
    assert len({entry.name for entry in layout.entries}) == len(layout.entries)
    assert layout.entries[0].offset == 0
    for entry, after in pairwise(layout.entries):
        assert after.offset % ALIGN == 0
        assert 0 <= after.offset - (entry.offset + entry.nbytes) < ALIGN, f"{entry.name} overlaps, or wastes memory"
    assert layout.nbytes == layout.entries[-1].offset + layout.entries[-1].nbytes
    fp8, bf16 = layout.bytes_of("fp8"), layout.bytes_of("bf16")
    assert fp8 + bf16 == sum(entry.nbytes for entry in layout.entries)
    weights = sum(p.numel() for key, p in make(name, **changes).named_parameters() if key.endswith("_proj.weight"))
    assert weights < fp8 < 1.01 * weights + 4 * 7 * 2 * 25, "an FP8 copy is one byte a weight, and scales"


def test_one_layout_is_one_digest():
    digests = {}
    changes = [
        {},
        {"num_hidden_layers": 3},
        {"vocab_size": 400},
        {"tie_word_embeddings": False},
        {"intermediate_size": 256},
        {"num_key_value_heads": 4},
        {"head_dim": 32},
        {"max_position_embeddings": 128},
        {"attention_bias": True},
    ]
    for change in changes:
        digests.setdefault(layout_of(config_of("qwen3", **change)).digest, []).append(change)
    assert len(digests) == len(changes), digests
    assert layout_of(config_of("qwen3")).digest == layout_of(config_of("qwen3")).digest
    assert layout_of(config_of("qwen3")).digest != layout_of(config_of("qwen2")).digest


def test_tensors_are_views_that_do_not_touch_each_other():
    arena = Arena.private(layout_of(config_of("llama")), CPU)
    for index, entry in enumerate(arena.layout.entries):
        arena[entry.name].view(torch.uint8).fill_(index % 251 + 1)
    for index, entry in enumerate(arena.layout.entries):
        tensor = arena[entry.name]
        assert tensor.shape == entry.shape and tensor.dtype == entry.dtype and tensor.is_contiguous()
        assert (tensor.view(torch.uint8) == index % 251 + 1).all(), entry.name
    assert {name for name, _ in arena} == {entry.name for entry in arena.layout.entries} - {ROPE}
    qkv = "model.layers.0.self_attn.qkv_proj.weight"
    parts = arena.parts(qkv)
    assert [name.split(".")[-2] for name, _ in parts] == ["q_proj", "k_proj", "v_proj"]
    parts[1][1].view(torch.uint8).fill_(0)
    assert (arena[qkv].view(torch.uint8) == 0).any(1).nonzero().flatten().tolist() == list(range(576, 768))


def test_a_fused_weight_and_its_separately_quantized_parts():
    """One part where the parts' blocks line up, else each with its own blocks: the same numbers either way."""
    torch.manual_seed(0)
    for rows, count in (([256, 128, 128], 1), ([192, 64, 64], 3), ([130], 1), ([128, 64], 2)):
        separate = [quantize_blocks((torch.randn(n, 200) * 10.0**-i).bfloat16()) for i, n in enumerate(rows)]
        weight = torch.cat([part.q.view(torch.uint8) for part in separate]).view(FP8)
        parts = module.quantized_parts(weight, torch.cat([part.s for part in separate]), rows)
        assert len(parts) == count
        if count > 1:
            for part, wanted in zip(parts, separate, strict=True):
                assert torch.equal(part.s, wanted.s) and torch.equal(part.q.view(torch.uint8), wanted.q.view(torch.uint8))
        else:
            assert torch.equal(dequantize(parts[0]), torch.cat([dequantize(part) for part in separate]))


# --- the decoder on it --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", CASES)
def test_the_decoders_names_are_the_arenas(case):
    name, changes = CASES[case]
    config = config_of(name, **changes)
    arena, decoder = Arena.private(layout_of(config), CPU), Decoder(config)
    assert {p.device.type for p in decoder.parameters()} == {"meta"}, "nothing of the model's size is allocated"
    decoder.bind(arena)
    bound = dict(decoder.named_parameters())
    assert bound.keys() == dict(arena).keys()
    assert all(bound[key].data_ptr() == tensor.data_ptr() for key, tensor in arena)
    assert decoder.model.rope.data_ptr() == arena[ROPE].data_ptr()


@pytest.mark.parametrize(
    ("mine", "theirs", "message"),
    [
        ({"attention_bias": True}, {}, "the arena lacks .*qkv_proj.bias"),
        ({}, {"attention_bias": True}, "the arena has model.layers.0.self_attn.qkv_proj.bias, the model does not"),
        ({}, {"vocab_size": 400}, r"model.embed_tokens.weight: the arena has \(400, 64\).*the model \(384, 64\)"),
        ({}, {"tie_word_embeddings": False}, "the arena has lm_head.weight, the model does not"),
        ({"tie_word_embeddings": False}, {}, "the arena lacks .'lm_head.weight'"),
        ({}, {"num_hidden_layers": 3}, "the arena has model.layers.2"),
        ({"num_hidden_layers": 3}, {}, "the arena lacks .'model.layers.2"),
    ],
)
def test_another_models_arena_is_refused(mine, theirs, message):
    decoder = Decoder(config_of("qwen3", **mine))
    with pytest.raises(ValueError, match=message):
        decoder.bind(Arena.private(layout_of(config_of("qwen3", **theirs)), CPU))


# --- between processes --------------------------------------------------------------------------------------------------

READER = """
import sys
from decoder_cases import CPU, config_of
from verl.jetrl.arena import Arena, layout_of

arena = Arena.attach(layout_of(config_of("qwen2")), CPU, 3)
for line in sys.stdin:
    name, at = line.split()
    value = arena[name].reshape(-1)[int(at)].item()
    print(value, arena.control.version, arena.control.holder, flush=True)
    if name == "model.norm.weight":
        arena.control.hand_over(0)
"""


def test_another_process_sees_writes_and_hands_the_weights_back(run, root):
    arena = Arena.create(layout_of(config_of("qwen2")), CPU, 3)
    reader = subprocess.Popen(
        [sys.executable, "-c", READER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(root / "tests")},
    )

    def read(name: str, at: int) -> list[float]:
        reader.stdin.write(f"{name} {at}\n")
        reader.stdin.flush()
        return [float(value) for value in reader.stdout.readline().split()]

    assert read("lm_head.weight", 5) == [0.0, 0, TRAINER]
    arena["lm_head.weight"].view(-1)[5] = 2.5
    arena.control.wrote()
    assert read("lm_head.weight", 5) == [2.5, 1, TRAINER]
    arena["model.layers.1.mlp.down_proj.weight"].view(-1)[7] = -448.0
    arena["model.norm.weight"].view(-1)[1] = 0.5
    arena.control.wrote()
    arena.control.hand_over(ENGINE)
    assert read("model.layers.1.mlp.down_proj.weight", 7) == [-448.0, 2, ENGINE]
    assert read("model.norm.weight", 1) == [0.5, 2, ENGINE]
    arena.close()
    # The mapping outlives the files, and a closed arena is still one memory.
    assert read("model.norm.weight", 0) == [0.0, 2, TRAINER]
    reader.stdin.close()
    assert reader.wait(30) == 1, "handing over what one does not hold must raise there too"


def test_files_are_private_and_go_with_close(run):
    arena = Arena.create(layout_of(config_of("qwen3")), CPU, 0)
    handle = module.handle_path(0)
    files = [handle, *shared(run)]
    assert len(files) == 3
    assert all(path.stat().st_mode & 0o077 == 0 for path in files), "other users must not read or write the weights"
    assert sum(path.stat().st_blocks * 512 for path in shared(run)) >= arena.layout.nbytes, "memory is reserved at once"
    other = Arena.attach(arena.layout, CPU, 0)
    other.close()
    assert all(path.exists() for path in files), "only the owner removes them"
    arena.close()
    arena.close()
    assert not any(path.exists() for path in files)
    other["model.norm.weight"].fill_(3)
    assert (arena["model.norm.weight"] == 3).all()


def test_a_second_arena_of_a_rank(run):
    layout = layout_of(config_of("qwen3"))
    first = Arena.create(layout, CPU, 0)
    first["model.norm.weight"].fill_(3)
    before = [path.name for path in shared(run)]
    with pytest.raises(ArenaError, match="already has a weight arena of rank 0.*close it first"):
        Arena.create(layout, CPU, 0)
    assert [path.name for path in shared(run)] == before and (first["model.norm.weight"] == 3).all()
    assert (Arena.attach(layout, CPU, 0)["model.norm.weight"] == 3).all()
    second = Arena.create(layout, CPU, 1)
    assert not second["model.norm.weight"].any(), "ranks of one process do not share"
    first.close()
    again = Arena.create(layout, CPU, 0)
    assert not again["model.norm.weight"].any() and again.control.version == 0
    for arena in (again, second):
        arena.close()


# --- version and lease --------------------------------------------------------------------------------------------------


@pytest.fixture
def control(tmp_path) -> Control:
    return Control.create(str(tmp_path / "control"))


def test_the_lease_goes_back_and_forth(control):
    assert (control.version, control.holder) == (0, TRAINER)
    for version in (1, 2):
        control.wrote()
        control.require(TRAINER, "a test")
        control.hand_over(ENGINE)
        assert Control.attach(control.path).holder == ENGINE
        control.require(ENGINE, "a test")
        Control.attach(control.path).hand_over(TRAINER)
        assert (control.version, control.holder) == (version, TRAINER)


@pytest.mark.parametrize(
    ("holder", "act", "message"),
    [
        (TRAINER, lambda c: c.require(ENGINE, "a request"), "a request while the trainer holds"),
        (TRAINER, lambda c: c.hand_over(TRAINER), "handing the weights to the trainer while the trainer holds"),
        (ENGINE, lambda c: c.require(TRAINER, "a step"), "a step while the engine holds"),
        (ENGINE, lambda c: c.hand_over(ENGINE), "handing the weights to the engine while the engine holds"),
        (ENGINE, lambda c: c.wrote(), "a weight update while the engine holds"),
    ],
)
def test_what_the_lease_forbids(control, holder, act, message):
    for _ in range(7):
        control.wrote()
    if holder == ENGINE:
        control.hand_over(ENGINE)
    with pytest.raises(LeaseError, match=message) as error:
        act(control)
    assert "trainer" in str(error.value) and "engine" in str(error.value) and "version 7" in str(error.value)
    assert (control.version, control.holder) == (7, holder), "a refused step changes nothing"


# --- where it cannot be had ---------------------------------------------------------------------------------------------


def test_without_a_run(monkeypatch):
    monkeypatch.delenv("JETRL_RUN", raising=False)
    layout = layout_of(config_of("qwen3"))
    for act in (lambda: Arena.create(layout, CPU, 0), lambda: Arena.attach(layout, CPU, 0), lambda: control_of(0)):
        with pytest.raises(ArenaError, match="JETRL_RUN is not set.*verl.jetrl.run"):
            act()


def test_before_the_trainer_has_made_it(run):
    for act in (lambda: Arena.attach(layout_of(config_of("qwen3")), CPU, 2), lambda: control_of(2)):
        with pytest.raises(ArenaError, match="of trainer rank 2.*arena-2.json is missing.*trainer starts before"):
            act()


def test_with_another_models_layout(run):
    mine, theirs = layout_of(config_of("qwen3")), layout_of(config_of("qwen2"))
    arena = Arena.create(mine, CPU, 0)
    with pytest.raises(ArenaError, match=f"{mine.digest}.*{theirs.digest}.*same model configuration"):
        Arena.attach(theirs, CPU, 0)
    arena.close()


def test_on_another_device(run):
    arena = Arena.create(layout_of(config_of("qwen3")), CPU, 0)
    handle = json.loads(module.handle_path(0).read_text())
    module.handle_path(0).write_text(json.dumps({**handle, "device": "GPU-1234"}))
    with pytest.raises(ArenaError, match="lies on GPU-1234, this worker runs on cpu.*same GPU"):
        Arena.attach(arena.layout, CPU, 0)
    arena.close()


@pytest.mark.parametrize("which", ["control", "data"])
def test_after_the_trainer_has_ended(run, which):
    arena = Arena.create(layout_of(config_of("qwen3")), CPU, 0)
    (path,) = [path for path in shared(run) if path.name.endswith(which)]
    path.unlink()
    with pytest.raises(ArenaError, match="is gone: the trainer that made it has ended"):
        Arena.attach(arena.layout, CPU, 0)
    if which == "control":
        with pytest.raises(ArenaError, match="is gone: the trainer that made it has ended"):
            control_of(0)
    assert path not in shared(run), "looking for it must not make it"
    arena.close()


def test_a_file_that_is_no_control_block(tmp_path):
    path = tmp_path / "control"
    path.write_bytes(bytes(64))
    with pytest.raises(ArenaError, match="is not the control block of a weight arena"):
        Control.attach(str(path))


def test_without_room_in_shared_memory(run, monkeypatch):
    """An error with the size, nothing left; later, with room, it works."""
    layout, reserve = layout_of(config_of("qwen3")), os.posix_fallocate
    refused = {"now": lambda nbytes: True}

    def allocate(fd: int, start: int, nbytes: int) -> None:
        if refused["now"](nbytes):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        reserve(fd, start, nbytes)

    monkeypatch.setattr(os, "posix_fallocate", allocate)
    cases = {
        "no room at all": lambda nbytes: True,
        "room for the control block": lambda nbytes: nbytes > 1000,
        "room for all but the control block": lambda nbytes: nbytes <= 1000,
    }
    for case, refused["now"] in cases.items():
        with pytest.raises(ArenaError, match=r"no room for \d.\d\d GiB of weights in /dev/shm: No space left on device"):
            Arena.create(layout, CPU, 0)
        assert shared(run) == [] and not module.handle_path(0).exists(), case
    refused["now"] = lambda nbytes: False
    Arena.create(layout, CPU, 0).close()
