"""Kernel times from a profiler's trace."""

import gzip
import json

import pytest

from benchmarks.traces import IDLE, REST, kernel_times, kind_of


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("void cutlass::device_kernel<flash::enable_sm90<flash::FlashAttnFwdSm90<...>>>", "attention"),
        ("void vllm::reshape_and_cache_flash_kernel<__nv_bfloat16, ...>", "KV cache write"),
        ("void deep_gemm::sm90_fp8_gemm_1d2d_impl<...>", "GEMM"),
        ("nvjet_tst_64x8_64x16_4x1_v_bz_TNT", "GEMM"),
        ("_rms_norm_rows_kernel", "norm, RoPE, activation, quantization"),
        ("triton_red_fused__to_copy_add_mean_mul_pow_rsqrt_0", "norm, RoPE, activation, quantization"),
        ("_gumbel_sample_kernel", "sampling"),
        ("Memcpy DtoD (Device -> Device)", REST),
    ],
)
def test_kinds(name, kind):
    assert kind_of(name) == kind


def test_times_are_per_step(tmp_path):
    def event(name, ts, dur, cat="kernel"):
        return {"name": name, "cat": cat, "ts": ts, "dur": dur, "ph": "X"}

    events = []
    for step in range(3):
        at = 1000.0 * step
        for layer in range(2):
            start = at + 100 * layer
            events += [
                event("reshape_and_cache_flash", start, 5),
                event("flash_fwd", start + 5, 40),
                event("x_gemm", start + 50, 30),
            ]
    events += [event("cudaLaunchKernel", 0, 5000, "cuda_runtime")]  # not the GPU's time
    with gzip.open(tmp_path / "a.pt.trace.json.gz", "wt") as file:
        json.dump({"traceEvents": events}, file)
    found = kernel_times(tmp_path, 2)
    assert found["steps"] == 3
    assert found["ms_per_step"]["attention"] == pytest.approx(0.08)
    assert found["ms_per_step"]["GEMM"] == pytest.approx(0.06)
    assert found["ms_per_step"]["KV cache write"] == pytest.approx(0.01)
    assert found["ms_per_step"][IDLE] == pytest.approx((2180 - 6 * 75) / 3e3)
    assert found["largest"]["flash_fwd"] == pytest.approx(0.08)


def test_a_trace_without_a_step_is_an_error(tmp_path):
    with pytest.raises(ValueError, match="no decode step"):
        kernel_times(tmp_path, 2)
