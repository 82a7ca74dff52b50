"""Kernel times from a profiler's trace."""

import gzip
import json

import pytest

from benchmarks.traces import IDLE, REST, TRAINING_KINDS, kernel_times, kind_of, summary


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("void cutlass::device_kernel<flash::enable_sm90<flash::FlashAttnFwdSm90<...>>>", "attention"),
        ("void vllm::reshape_and_cache_flash_kernel<__nv_bfloat16, ...>", "KV cache write"),
        ("void deep_gemm::sm90_fp8_gemm_1d2d_impl<...>", "GEMM"),
        ("nvjet_tst_64x8_64x16_4x1_v_bz_TNT", "GEMM"),
        ("_rms_norm_rows_kernel", "norm, RoPE, activation, quantization"),
        ("triton_red_fused__to_copy_add_mean_mul_pow_rsqrt_0", "norm, RoPE, activation, quantization"),
        ("_forward_kernel", "norm, RoPE, activation, quantization"),  # q/k norm with RoPE
        ("_gumbel_sample_kernel", "sampling"),
        ("Memcpy DtoD (Device -> Device)", REST),
    ],
)
def test_kinds(name, kind):
    assert kind_of(name) == kind


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("void cutlass::device_kernel<flash::enable_sm90<flash::FlashAttnFwdSm90<...>>>", "attention, forward"),
        (
            "kernel_cutlass_kernel_flash_attncuteflash_bwd_sm90FlashAttentionBackwardSm90_object_at__tensor",
            "attention, backward",
        ),
        ("void deep_gemm::sm90_fp8_gemm_1d2d_impl<(cute::UMMA::Major)0, 0u, 4096u>", "FP8 GEMM"),
        ("void deep_gemm::sm90_bf16_gemm_impl<0u, 151936u>", "BF16 GEMM"),
        ("nvjet_tst_64x8_64x16_4x1_v_bz_TNT", "BF16 GEMM"),
        ("ncclDevKernel_ReduceScatter_Sum_f32_RING_LL", "collectives"),
        ("void at::native::(anonymous namespace)::cunn_SoftMaxForward<8, c10::BFloat16, float>", "log-probs"),
        ("void at::native::(anonymous namespace)::multi_tensor_apply_kernel<FusedAdam>", "optimizer"),
        ("_silu_mul_backward_tiles_kernel", "norm, RoPE, activation, quantization"),
        ("_forward_kernel", "norm, RoPE, activation, quantization"),
        ("void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>>", REST),
    ],
)
def test_training_kinds(name, kind):
    assert kind_of(name, TRAINING_KINDS) == kind


def test_streams_that_overlap_are_not_idle():
    events = [
        {"name": name, "ts": ts, "dur": dur} for name, ts, dur in (("nccl_a", 0, 80), ("x_gemm", 10, 20), ("x_gemm", 90, 10))
    ]
    found = summary(events, 1, TRAINING_KINDS)
    assert found["ms_per_step"] == pytest.approx({"collectives": 0.08, "BF16 GEMM": 0.03, IDLE: 0.01})
    assert found["events_per_step"] == 3
    (wait,) = found["waits"]
    assert wait == {"ms": pytest.approx(0.01), "at_ms": pytest.approx(0.08), "after": "nccl_a", "before": "x_gemm"}


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
    assert found["largest"] == {
        "KV cache write": {"reshape_and_cache_flash": pytest.approx(0.01)},
        "attention": {"flash_fwd": pytest.approx(0.08)},
        "GEMM": {"x_gemm": pytest.approx(0.06)},
    }


def test_a_trace_without_a_step_is_an_error(tmp_path):
    with pytest.raises(ValueError, match="no decode step"):
        kernel_times(tmp_path, 2)
