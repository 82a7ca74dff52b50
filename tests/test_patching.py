"""The patch guard, the catalogue, and that a patch which is not active is heard of."""

from __future__ import annotations

import inspect
import os
import pkgutil
import subprocess
import sys
import tomllib
import types
from pathlib import Path

import pytest
import torch

import jetrl_patches
from verl.jetrl import patching
from verl.jetrl.patching import Patch, PatchError, source_hash

SECTIONS = ("Why:", "What it replaces:", "Upstream:", "Remove when:")


@pytest.fixture
def upstream(tmp_path, monkeypatch):
    """A small upstream module on disk with a function, a class and a method."""
    source = "def f(x):\n    return x + 1\n\nclass C:\n    def g(self):\n        return 'upstream'\n\nready = 3\n"
    (tmp_path / "small_upstream.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    import small_upstream

    yield small_upstream
    del sys.modules["small_upstream"]


def patch_of(target: str, original: object, **changes) -> Patch:
    def build(original):
        return lambda *args: ("patched", original(*args))

    values = dict(name="demo", scope="verl", target=target, source_sha256=source_hash(original), build=build)
    return Patch(**(values | changes))


def test_a_patch_replaces_and_applying_twice_is_once(upstream):
    patch = patch_of("small_upstream:f", upstream.f)
    original = upstream.f
    assert not patch.active and upstream.f(1) == 2
    patch.apply()
    first = upstream.f
    assert patch.active and upstream.f(1) == ("patched", 2)
    patch.apply()
    assert upstream.f is first and upstream.f(1) == ("patched", 2)
    assert source_hash(upstream.f) == patch.source_sha256, "the hash is of upstream's source, patched or not"
    assert upstream.f._jetrl_original is original


def test_a_method_can_be_patched(upstream):
    patch = patch_of("small_upstream:C.g", upstream.C.g)
    patch.apply()
    assert patch.active and upstream.C().g() == ("patched", "upstream")


def refusal(patch: Patch) -> str:
    with pytest.raises(PatchError) as error:
        patch.apply()
    assert not patch.active
    return str(error.value)


def test_another_source_is_refused_by_name(upstream, monkeypatch):
    monkeypatch.setattr(patching, "version", lambda package: {"verl": "0.9.2"}[package])
    patch = patch_of("small_upstream:f", upstream.f, source_sha256="0" * 64)
    message = refusal(patch)
    found = source_hash(upstream.f)[:12]
    for part in ("'demo'", "verl 0.9.1", "verl 0.9.2", "small_upstream:f", found, "000000000000", "make setup"):
        assert part in message
    assert upstream.f(1) == 2, "a refused patch changes nothing"


@pytest.mark.parametrize(
    "target",
    [
        "small_upstream:gone",
        "small_upstream:C.gone",
        "small_upstream:Gone.g",
        "small_upstream:ready",
        "gone:f",
        "small_upstream.gone:f",
    ],
)
def test_a_target_that_is_gone_is_refused_by_name(upstream, target):
    message = refusal(patch_of(target, upstream.f))
    assert "'demo'" in message and target in message and "absent" in message


def test_a_target_whose_module_cannot_be_imported_says_why(tmp_path, monkeypatch):
    (tmp_path / "needs_more.py").write_text("import a_package_that_is_not_there\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="a_package_that_is_not_there"):
        patch_of("needs_more:f", test_table_of_contents).apply()


def test_changed_whitespace_is_another_source(upstream):
    a = types.ModuleType("a")
    assert source_hash(upstream.f) != source_hash(test_changed_whitespace_is_another_source)
    assert source_hash(a) == source_hash(len) == "absent"


@pytest.mark.parametrize("package", ["verl", "vllm"])
@pytest.mark.parametrize("found", ["0.1.0", "none"])
def test_another_upstream_version_is_refused(monkeypatch, package, found):
    def version(name: str) -> str:
        if found == "none":
            raise patching.PackageNotFoundError(name)
        return found

    monkeypatch.setattr(patching, "version", version)
    with pytest.raises(PatchError, match=rf"{package} {found} is installed.*{package} {patching.PINNED[package]}.*make setup"):
        patching.check_version(package)


def test_a_local_build_of_the_pinned_version_is_accepted(monkeypatch):
    monkeypatch.setattr(patching, "version", lambda package: patching.PINNED[package] + "+cpu")
    patching.check_version("vllm")


# --- the plugins' errors, which verl and vLLM swallow -----------------------------------------------------------------


@pytest.fixture
def fresh(monkeypatch):
    """Failures of this test stay in it."""
    monkeypatch.setattr(patching, "_failure", {})


@pytest.mark.parametrize("scope", ["verl", "vllm"])
def test_a_failed_plugin_is_loud(fresh, monkeypatch, scope):
    monkeypatch.setitem(patching.PINNED, scope, "9.9.9")
    with pytest.raises(PatchError):
        patching.apply_all(scope)  # what the plugin does; upstream logs it at debug level
    with pytest.raises(PatchError, match=f"{scope} plugin failed to load.*9.9.9"):
        patching.require_active(scope)
    monkeypatch.undo()
    patching.apply_all(scope)
    patching.require_active(scope)


def test_a_failed_patch_is_loud(fresh, upstream, monkeypatch):
    bad = patch_of("small_upstream:f", upstream.f, source_sha256="0" * 64)
    monkeypatch.setattr(patching, "catalogue", lambda scope=None: [bad])
    with pytest.raises(PatchError):
        patching.apply_all("verl")
    with pytest.raises(PatchError, match="plugin failed to load.*'demo'"):
        patching.require_active("verl")


def test_an_inactive_patch_is_loud(fresh, upstream, monkeypatch):
    idle = patch_of("small_upstream:f", upstream.f)
    spare = patch_of("small_upstream:C.g", upstream.C.g, name="spare", needed=lambda: False)
    monkeypatch.setattr(patching, "catalogue", lambda scope=None: [idle, spare])
    assert patching.status("verl") == {"demo": "INACTIVE", "spare": "not needed"}
    with pytest.raises(PatchError, match="verl patches not active in this process: demo.*make setup"):
        patching.require_active("verl")
    patching.apply_all("verl")
    assert patching.status("verl") == {"demo": "active", "spare": "not needed"}
    assert upstream.C().g() == "upstream"
    patching.require_active("verl")


def test_a_catalogue_that_is_not_installed_is_loud(fresh, monkeypatch):
    """Without the entry points nothing would be applied, and nothing missed."""
    monkeypatch.setattr(patching, "entry_points", lambda group: [])
    for call in (patching.apply_all, patching.status, patching.require_active):
        with pytest.raises(PatchError, match="verl_fp32_log_probs.*not among the installed entry points.*make setup"):
            call("verl")


def run_python(code: str, **options) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, *code], capture_output=True, text=True, timeout=120, **options)


def test_verl_swallows_the_error_and_the_fork_does_not(tmp_path):
    """In a process of its own: the plugin fails while verl is imported, verl goes on, require_active raises."""
    code = (
        "import importlib.metadata as m; real = m.version\n"
        "m.version = lambda name: '0.0.1' if name == 'verl' else real(name)\n"
        "import verl\n"
        "from verl.jetrl import patching\n"
        "print('verl went on')\n"
        "patching.require_active('verl')\n"
    )
    done = run_python(["-c", code], cwd=tmp_path)
    assert "verl went on" in done.stdout, done.stderr
    assert done.returncode == 1 and "PatchError: the fork's verl plugin failed to load: verl 0.0.1 is installed" in done.stderr


# --- the catalogue ----------------------------------------------------------------------------------------------------

MODULES = sorted(module.name for module in pkgutil.iter_modules(jetrl_patches.__path__))


def test_table_of_contents(root: Path):
    """Every file of the catalogue is an entry point of its own name, in pyproject.toml and in the installation."""
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    listed = project["entry-points"]["jetrl.patches"]
    assert listed == {name: f"jetrl_patches.{name}:PATCH" for name in MODULES} and MODULES
    assert [patch.name for patch in patching.catalogue()] == MODULES
    assert sorted(p.name for scope in patching.PINNED for p in patching.catalogue(scope)) == MODULES


@pytest.mark.parametrize("name", MODULES)
def test_docstrings_say_why_and_until_when(name):
    (patch,) = [p for p in patching.catalogue() if p.name == name]
    module = inspect.getmodule(patch.build)
    assert module.__name__ == f"jetrl_patches.{name}"
    for section in SECTIONS:
        assert f"\n{section} " in module.__doc__, f"{name}: no {section!r}"
        text = module.__doc__.split(f"\n{section} ")[1].splitlines()[0]
        assert len(text) > 10, f"{name}: {section!r} says nothing"


@pytest.mark.parametrize("name", MODULES)
def test_every_patch_fits_the_installed_upstream_and_is_active(name):
    (patch,) = [p for p in patching.catalogue() if p.name == name]
    patching.apply_all(patch.scope)
    owner, attribute = patch.owner_and_attribute
    assert source_hash(getattr(owner, attribute)) == patch.source_sha256
    if patch.needed():
        assert patching.status()[name] == "active"
        # Nobody keeps the original under an imported name, past the patch.
        original = getattr(owner, attribute)._jetrl_original
        holders = [
            f"{module}.{key}"
            for module, loaded in list(sys.modules.items())
            if module.startswith(("verl", "vllm"))
            for key, value in list(vars(loaded).items())
            if value is original
        ]
        assert holders == []


def test_the_command_prints_all_from_any_folder(tmp_path):
    """Which also shows that ``import verl.jetrl`` works there."""
    folder = tmp_path / "größe mit leer"
    (folder / "verl").mkdir(parents=True)  # a folder of that name must not shadow the package
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = run_python(["-m", "verl.jetrl.show_patches"], cwd=folder, env=environment)
    assert done.returncode == 0, done.stderr
    for patch in patching.catalogue():
        state = "active" if patch.needed() else "not needed"
        assert f"{patch.name}  [{patch.scope} {patching.PINNED[patch.scope]}]  {state}" in done.stdout
        assert f"target: {patch.target}" in done.stdout
    assert all(done.stdout.count(section) >= len(MODULES) for section in SECTIONS)


# --- what each patch does -----------------------------------------------------------------------------------------------


def test_log_probs_are_fp32_with_gradients():
    from verl.utils.torch_functional import logprobs_from_logits_v2

    torch.manual_seed(0)
    logits = (torch.randn(3, 5, 300) * 8).bfloat16().requires_grad_()
    labels = torch.randint(300, (3, 5))
    got = logprobs_from_logits_v2(logits, labels)
    wanted_logits = logits.detach().float().requires_grad_()
    wanted = torch.log_softmax(wanted_logits, -1).gather(-1, labels[..., None]).squeeze(-1)
    assert got.dtype == torch.float32 and got.shape == labels.shape
    torch.testing.assert_close(got, wanted, rtol=0, atol=1e-5)
    bf16 = torch.log_softmax(logits.detach(), -1).gather(-1, labels[..., None]).squeeze(-1).float()
    assert (bf16 - wanted).abs().max() > 1e-3, "BF16 would be seen: the test can tell the two apart"
    seed = torch.randn(3, 5)
    got.backward(seed)
    wanted.backward(seed)
    torch.testing.assert_close(logits.grad, wanted_logits.grad.bfloat16(), rtol=2e-2, atol=1e-4)


def test_verls_log_probs_go_through_the_patch():
    """The trainer calls ``logprobs_from_logits``: without flash-attn its result must be the FP32 one."""
    from verl.utils import torch_functional as verl_F

    if verl_F.FLAH_ATTN_CROSS_ENTROPY_LOSS_AVAILABLE:
        pytest.skip("flash-attn's cross-entropy computes in FP32")
    logits = (torch.randn(4, 300, generator=torch.Generator().manual_seed(1)) * 8).bfloat16()
    labels = torch.arange(4)
    wanted = torch.log_softmax(logits.float(), -1).gather(-1, labels[:, None]).squeeze(-1)
    torch.testing.assert_close(verl_F.logprobs_from_logits(logits, labels), wanted, rtol=0, atol=1e-5)


@pytest.mark.parametrize("rows", [[2, 0], torch.tensor([3, 3, 1]), [0, 1, 2, 3], [1], []])
def test_selected_rows_are_upstreams(rows):
    """Jagged tensors of one and of two dimensions, with the lengths that padding reads; others, and what is no tensor."""
    from tensordict import NonTensorStack, TensorDict
    from verl.utils import tensordict_utils as tu

    def jagged(*lengths: int, width: tuple[int, ...] = ()) -> torch.Tensor:
        generator = torch.Generator().manual_seed(sum(lengths))
        rows = [torch.randn(n, *width, generator=generator) for n in lengths]
        return torch.nested.as_nested_tensor(rows, layout=torch.jagged)

    tensors = {
        "a": jagged(3, 5, 1, 4),
        "b": jagged(2, 2, 2, 2),
        "wide": jagged(3, 5, 1, 4, width=(6,)),
        "dense": torch.randn(4, 2),
    }
    batch = TensorDict(tensors | {"names": NonTensorStack("p", "q", "r", "s")}, batch_size=4)
    tu.assign_non_tensor(batch, temperature=0.7)
    upstream = tu.index_select_tensor_dict._jetrl_original
    if not len(rows):  # upstream's error
        for select in (upstream, tu.index_select_tensor_dict):
            with pytest.raises(AssertionError, match="at least one"):
                select(batch, rows)
        return
    wanted, got = upstream(batch, rows), tu.index_select_tensor_dict(batch, rows)
    assert set(got.keys()) == set(wanted.keys()) and got.batch_size == wanted.batch_size == (len(rows),)
    for name in ("a", "b", "wide"):
        mine, theirs = got[name], wanted[name]
        assert torch.equal(mine.values(), theirs.values()) and torch.equal(mine.offsets(), theirs.offsets()), name
        assert mine.offsets().dtype == theirs.offsets().dtype and mine.dtype == theirs.dtype
        if name != "wide":
            assert (mine._min_seqlen, mine._max_seqlen) == (theirs._min_seqlen, theirs._max_seqlen), name
            assert torch.equal(mine.to_padded_tensor(0.0), theirs.to_padded_tensor(0.0))
    assert torch.equal(got["dense"], wanted["dense"]) and got["names"] == wanted["names"]
    assert got["temperature"] == wanted["temperature"] == 0.7
    assert tu.index_select_tensor_dict(None, rows) is None


def test_a_micro_batch_takes_its_rows_alone(monkeypatch):
    """The whole batch is not taken apart for each micro-batch."""
    from tensordict import TensorDict
    from verl.utils import tensordict_utils as tu
    from verl.utils.seqlen_balancing import rearrange_micro_batches

    ids = torch.nested.as_nested_tensor([torch.arange(n) for n in (3, 5, 4, 2)], layout=torch.jagged)
    unbind = torch.Tensor.unbind
    refuse = lambda t, *dim: pytest.fail("a batch was taken apart") if t.is_nested else unbind(t, *dim)  # noqa: E731
    monkeypatch.setattr(torch.Tensor, "unbind", refuse)
    micro_batches, rows = rearrange_micro_batches(TensorDict({"input_ids": ids}, batch_size=4), max_token_len=7)
    assert sorted(sum(rows, [])) == [0, 1, 2, 3] and len(micro_batches) == 2
    for of, micro_batch in zip(rows, micro_batches, strict=True):
        lengths = [(3, 5, 4, 2)[row] for row in of]
        assert micro_batch["input_ids"].values().tolist() == [i for n in lengths for i in range(n)]
    assert tu.index_select_tensor_dict._jetrl_patch == "verl_select_rows"


def test_vllm_linears_on_the_cpu_keep_their_weight():
    """An update written into the weight changes the output; the unpatched CPU build drops the weight."""
    from vllm.model_executor.layers.linear import UnquantizedLinearMethod
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        pytest.skip("the CPU build's patch")
    patching.apply_all("vllm")
    layer = torch.nn.Linear(64, 32, bias=False, dtype=torch.bfloat16).requires_grad_(False)
    method = UnquantizedLinearMethod()
    method.process_weights_after_loading(layer)
    x = torch.randn(3, 64).bfloat16()
    assert layer.weight.shape == (32, 64)
    torch.testing.assert_close(method.apply(layer, x), x @ layer.weight.t())
    layer.weight.data.zero_()
    assert method.apply(layer, x).abs().max() == 0, "a weight update must reach the rollout's output"


def test_attention_without_a_gpu_is_the_same_on_every_processor(monkeypatch):
    """As if this one had AMX: with its kernel the arm jetrl's two sides would not compute the same."""
    from vllm.v1.attention.backends import cpu_attn

    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: True)
    patching.apply_all("vllm")
    assert cpu_attn._get_attn_isa(torch.bfloat16, 32, 64) == "vec"
