"""Benchmark of the FP8 operators against BF16 (cuBLAS), Transformer Engine and memory copies, in one run.

    python -m benchmarks.ops                     # a Hopper GPU: writes benchmarks/results/ops.json, prints the tables
    python -m benchmarks.ops --quick --out x     # tiny shapes, few rounds; runs on a CPU too (checks the script itself)
    python -m benchmarks.ops --docs              # writes the tables of ops.json into docs/fp8.md

``ops.json`` holds ``command``, ``device``, ``versions``, ``notes`` (what is counted), ``samples`` (raw times in
microseconds), ``tables`` and ``figures``; every number in docs/fp8.md's tables comes from it.
"""

# ruff: noqa: B023  every workload runs within the pass of the loop that defines it
from __future__ import annotations

import argparse
import json
import statistics
import sys
from importlib import metadata
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.tables import fill, markdown, result_of
from benchmarks.timing import Clock
from verl.jetrl.fp8 import gemm, ops
from verl.jetrl.fp8.linear import SAVED, Wgrad, fp8_linear, fp8_swiglu_mlp

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "ops.json"
DOCS = ROOT / "docs" / "fp8.md"

# Qwen3-8B: (output features, input features) of one layer's linears, q/k/v and gate/up fused as in the rollout.
LAYER = {"qkv": (6144, 4096), "o": (4096, 4096), "gate_up": (24576, 4096), "down": (4096, 12288)}
QUICK_LAYER = {"qkv": (192, 128), "o": (128, 128), "gate_up": (512, 128), "down": (128, 256)}
TOKENS = (1, 16, 64, 128, 256, 512, 2048, 8192, 16384)
L2_BYTES = 128 << 20  # rotate among input sets that together exceed the L2 cache

NOTES = {
    "layer_vs_bf16": "forward + backward of the four FP8 linears of one Qwen3-8B layer (eager, autograd), against BF16 "
    "nn.Linear. Counted: quantization of x and dY in both of their forms. Not counted: quantization of the weights, done "
    "once per optimizer step; the *_with_weight_quantization figures count it in every micro-batch. dW leaves as BF16.",
    "layer_vs_te": "against te.Linear with Float8BlockScaling and FP8 weights kept from the first micro-batch; the "
    "faster of FP32 and power-of-two scales.",
    "decode_vs_bf16": "one layer's producers, quantization and GEMMs in a CUDA graph: RMSNorm with residual, qkv, o, "
    "RMSNorm with residual, gate_up, SiLU*mul, down; attention left out on both sides. BF16: vLLM's fused_add_rms_norm and "
    "silu_and_mul with cuBLAS.",
    "producer_vs_copy": "the slowest of the fused producers of FP8 (SiLU*mul, its backward, RMSNorm, RMSNorm with residual; "
    "rows alone, rows with the transposed form, and RMSNorm's transposed form, which the backward makes from the norm's "
    "input) at 8192 tokens, over a copy that reads and writes as many bytes. "
    "producer_rows_vs_copy: the slowest that writes rows alone, the rollout's form. quantizer_vs_copy: the slowest "
    "quantizer without a producer.",
    "saved_bytes_vs_bf16": "bytes that autograd keeps for the four linears' backward, weights left out, over BF16's.",
    "errors": "relative to FP64 on the same BF16 inputs: ||g - ref|| / ||ref||. te: the better of its two scale types.",
}


def relative(a: Tensor, b: Tensor) -> float:
    """||a - b|| / ||b|| in FP64."""
    return ((a.double() - b).norm() / b.norm()).item()


class Bench:
    def __init__(self, quick: bool, seed: int = 0):
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        self.gpu = self.device == "cuda"
        self.quick = quick
        self.layer = QUICK_LAYER if quick else LAYER
        self.tokens = (1, 130) if quick else TOKENS
        self.training_tokens = (130,) if quick else (8192, 16384)
        self.decode_tokens = (8,) if quick else (64, 128, 256)
        self.clock = Clock(self.device, quick)
        self.tables: dict[str, list[dict]] = {}
        self.figures: dict[str, float | None] = {}
        torch.manual_seed(seed)

    # -- helpers --

    def randn(self, *shape: int, scale: float = 1.0) -> Tensor:
        return (torch.randn(*shape, device=self.device) * scale).bfloat16()

    def row(self, table: str, **values) -> None:
        self.tables.setdefault(table, []).append(values)
        print(table, {k: round(v, 3) if isinstance(v, float) else v for k, v in values.items()}, flush=True)

    def rotation(self, nbytes: int) -> int:
        return 1 if self.quick else max(1, min(8, -(-L2_BYTES // nbytes)))

    # -- ceilings --

    def ceilings(self) -> None:
        """The largest copy bandwidth and FP8 GEMM rate of this run."""
        n = 1 << (16 if self.quick else 29)
        x, y = torch.empty(n, dtype=torch.uint8, device=self.device), torch.empty(n, dtype=torch.uint8, device=self.device)
        x.random_(0, 255)
        us = self.clock.graph("copy", lambda i: y.copy_(x), calls=3)
        self.figures["copy_tb_s"] = 2 * n / us / 1e6
        N = 256 if self.quick else 8192
        a, b = ops.quantize_rows(self.randn(N, N)), ops.quantize_blocks(self.randn(N, N))
        us = self.clock.graph("fp8_gemm_8192", lambda i: ops.fprop(a, b), calls=4)
        self.figures["fp8_tflop_s"] = 2 * N**3 / us / 1e6

    # -- per shape and M --

    def gemms(self) -> None:
        for name, (N, K) in self.layer.items():
            copies = self.rotation(N * K)
            masters = [self.randn(N, K, scale=0.02) for _ in range(copies)]
            weights = [ops.quantize_weight(w) for w in masters]
            te_linear = self.te_linears([(N, K)])
            for M in self.tokens:
                x, dy = self.randn(M, K), self.randn(M, N)
                x_q = ops.quantize_rows(x)
                dy_t, x_b, x_g = ops.quantize_cols(dy), ops.quantize_transposed(x, "block"), ops.quantize_cols(x)
                acc = torch.zeros(N, K, device=self.device)
                calls = max(copies, 4 if M >= 2048 else 8)
                workloads = {
                    "forward bf16": lambda i: F.linear(x, masters[i % copies]),
                    "forward fp8": lambda i: ops.fprop(ops.quantize_rows(x), weights[i % copies].forward),
                    "fprop fp8": lambda i: ops.fprop(x_q, weights[i % copies].forward),
                }
                if M >= 128:
                    dy_q = ops.quantize_rows(dy)
                    workloads |= {
                        "dgrad bf16": lambda i: dy @ masters[i % copies],
                        "dgrad fp8": lambda i: ops.dgrad(dy_q, weights[i % copies].transposed),
                        "wgrad bf16": lambda i: dy.t() @ x,
                        "wgrad fp8 block": lambda i: ops.wgrad(dy_t, x_b, out_dtype=torch.bfloat16),
                        "wgrad fp8 block += fp32": lambda i: ops.wgrad(dy_t, x_b, acc),
                        "wgrad fp8 group += fp32": lambda i: ops.wgrad(dy_t, x_g, acc),
                    }
                    if self.gpu:
                        workloads |= {
                            "wgrad cublaslt block fp32": lambda i: gemm.cublaslt_gemm_nt(dy_t, x_b, torch.float32),
                            "wgrad cublaslt group fp32": lambda i: gemm.cublaslt_gemm_nt(dy_t, x_g, torch.float32),
                            "fprop cublaslt": lambda i: gemm.cublaslt_gemm_nt(x_q, weights[i % copies].forward),
                        }
                if te_linear and M % 8 == 0:
                    run_te = te_linear["fp32"].forward_only
                    workloads["forward te"] = lambda i: run_te(x)
                for op, work in workloads.items():
                    us = self.clock.graph(f"{name} M={M} {op}", work, calls=calls)
                    rate = 2 * M * N * K / us / 1e6
                    base = self.clock.samples.get(f"{name} M={M} {op.split()[0].replace('fprop', 'forward')} bf16")
                    weight_tb_s = N * K * (2 if "bf16" in op else 1) / us / 1e6 if M <= 256 else None
                    self.row(
                        "gemm", shape=name, M=M, op=op, us=us, tflop_s=rate, weight_tb_s=weight_tb_s,
                        vs_bf16=statistics.median(base) / us if base else None,
                    )  # fmt: skip
        best = max(r["tflop_s"] for r in self.tables["gemm"] if "fp8" in r["op"] and r["op"] != "forward fp8")
        self.figures["fp8_tflop_s"] = max(self.figures["fp8_tflop_s"], best)
        for r in self.tables["gemm"]:
            compute = r["tflop_s"] / self.figures["fp8_tflop_s"]
            memory = (r["weight_tb_s"] or 0) / self.figures["copy_tb_s"]
            r["share_of_ceiling"] = max(compute, memory)

    def lm_head(self) -> None:
        V, K = (1024, 128) if self.quick else (151936, 4096)
        w = self.randn(V, K, scale=0.02)
        for M in (8,) if self.quick else (1, 64, 256, 2048):
            x = self.randn(M, K)
            bf16 = self.clock.graph(f"lm_head M={M} bf16", lambda i: F.linear(x, w), calls=3)
            ours = self.clock.graph(f"lm_head M={M} deep_gemm", lambda i: ops.bf16_gemm_nt(x, w), calls=3)
            self.row("lm_head", M=M, cublas_us=bf16, deep_gemm_us=ours, vs_cublas=bf16 / ours)

    # -- producers --

    def producers(self) -> None:
        K, I = (256, 512) if self.quick else (4096, 12288)
        for M in (130,) if self.quick else (8192, 16384):
            x, residual, weight = self.randn(M, K), self.randn(M, K), self.randn(K)
            gate_up, dy, wide, dn = self.randn(M, 2 * I), self.randn(M, I), self.randn(M, I), self.randn(M, K)
            norm = ops.rms_norm(x, weight, 1e-6)[1]
            # name: (work, bytes read and written per value of the first shape, number of values)
            work = {
                "quantize rows": (lambda i: ops.quantize_rows(wide), 3, M * I),
                "quantize rows + blocks": (lambda i: ops.quantize_both(wide, "block"), 4, M * I),
                "quantize rows + groups": (lambda i: ops.quantize_both(wide, "group"), 4, M * I),
                "silu_mul rows": (lambda i: ops.silu_mul_quantize(gate_up), 5, M * I),
                "silu_mul rows + blocks": (lambda i: ops.silu_mul_quantize_both(gate_up), 6, M * I),
                "silu_mul backward, bf16": (lambda i: ops.silu_mul_backward(gate_up, dy), 10, M * I),
                "silu_mul backward rows + groups": (lambda i: ops.silu_mul_backward_quantize(gate_up, dy), 10, M * I),
                "rms_norm rows": (lambda i: ops.rms_norm_quantize(x, weight, 1e-6), 3, M * K),
                "rms_norm + residual rows": (lambda i: ops.rms_norm_quantize(x, weight, 1e-6, residual), 7, M * K),
                "rms_norm blocks": (lambda i: ops.rms_norm_transposed(norm, weight), 3, M * K),
                "rms_norm backward, bf16": (lambda i: ops.rms_norm_backward(dn, norm, weight, x), 8, M * K),
                "quantize weight (both layouts)": (lambda i: ops.quantize_weight(wide), 4, M * I),
            }
            for name, (run, per_value, values) in work.items():
                nbytes = per_value * values
                half = nbytes // 2
                a, b = (torch.empty(half, dtype=torch.uint8, device=self.device) for _ in range(2))
                copy = self.clock.graph(f"producer M={M} copy for {name}", lambda i: b.copy_(a), calls=6)
                us = self.clock.graph(f"producer M={M} {name}", run, calls=6)
                self.row("producer", M=M, name=name, us=us, tb_s=nbytes / us / 1e6, copy_us=copy, vs_copy=us / copy)
        copies = [r["tb_s"] * r["us"] / r["copy_us"] for r in self.tables["producer"]]
        self.figures["copy_tb_s"] = max(self.figures.get("copy_tb_s") or 0.0, *copies)
        first = self.tables["producer"][0]["M"]
        ratios = {r["name"]: r["vs_copy"] for r in self.tables["producer"] if r["M"] == first}
        self.figures["producer_vs_copy"] = max(
            v for n, v in ratios.items() if n.startswith(("silu", "rms")) and n.endswith(("rows", "blocks", "groups"))
        )
        self.figures["producer_rows_vs_copy"] = max(v for n, v in ratios.items() if n.endswith("rows"))
        self.figures["quantizer_vs_copy"] = max(v for n, v in ratios.items() if n.startswith("quantize"))

    # -- one layer, forward + backward --

    def te_linears(self, shapes: list[tuple[int, int]]) -> dict[str, TeLayer] | None:
        if not self.gpu:
            return None
        return {scales: TeLayer(shapes, scales) for scales in ("fp32", "power of two")}

    def layer_step(self) -> None:
        shapes = list(self.layer.values())
        for M in self.training_tokens:
            xs = [self.randn(M, K).requires_grad_() for _, K in shapes]
            dys = [self.randn(M, N) for N, _ in shapes]
            ws = [nn.Parameter(self.randn(N, K, scale=0.02)) for N, K in shapes]
            quantized = [ops.quantize_weight(w.detach()) for w in ws]

            def step(linear, xs=xs, ws=ws, dys=dys) -> None:
                for i in range(len(xs)):
                    torch.autograd.grad(linear(i), (xs[i], ws[i]), dys[i])

            def fp8(wgrad: Wgrad, keep: bool = True, xs=xs, ws=ws, quantized=quantized):
                def run(call: int) -> None:
                    step(lambda i: fp8_linear(xs[i], ws[i], quantized=quantized[i] if keep else None, wgrad=wgrad))

                return run

            runs = {
                f"layer M={M} bf16": lambda call: step(lambda i: F.linear(xs[i], ws[i])),
                f"layer M={M} fp8": fp8(Wgrad()),
                f"layer M={M} fp8, weights quantized each time": fp8(Wgrad(), keep=False),
                f"layer M={M} fp8, wgrad x in groups": fp8(Wgrad("group")),
                f"layer M={M} fp8, x saved in bf16": fp8(Wgrad(saved="bf16")),
                f"layer M={M} fp8, x regrouped": fp8(Wgrad(saved="regrouped")),
            }
            te_linears = self.te_linears(shapes)
            for scales, te in (te_linears or {}).items():
                runs[f"layer M={M} te, {scales} scales"] = lambda call, te=te: te.step(xs, dys, keep=True)
                runs[f"layer M={M} te, {scales} scales, weights quantized each time"] = (
                    lambda call, te=te: te.step(xs, dys, keep=False)
                )  # fmt: skip
            times = self.clock.compare(runs)
            bf16 = times[f"layer M={M} bf16"]
            flop = 6 * M * sum(N * K for N, K in shapes)
            for name, us in times.items():
                self.row("layer", M=M, name=name.split(" ", 2)[2], us=us, tflop_s=flop / us / 1e6, vs_bf16=bf16 / us)
            ours = times[f"layer M={M} fp8"]
            self.figures[f"layer_vs_bf16_{M}"] = bf16 / ours
            each = times[f"layer M={M} fp8, weights quantized each time"]
            self.figures[f"layer_vs_bf16_{M}_with_weight_quantization"] = bf16 / each
            if te_linears:
                kept = [times[f"layer M={M} te, {s} scales"] for s in te_linears]
                again = [times[f"layer M={M} te, {s} scales, weights quantized each time"] for s in te_linears]
                self.figures[f"layer_vs_te_{M}"] = min(kept) / ours
                self.figures[f"layer_vs_te_{M}_with_weight_quantization"] = min(again) / each
            if M == self.training_tokens[0]:
                self.saved_bytes(xs, ws, quantized)

    def saved_bytes(self, xs, ws, quantized) -> None:
        weights = {t.untyped_storage().data_ptr() for t in [*ws, *(t for w in quantized for t in w)]}

        def saved(linear) -> int:
            kept: dict[int, int] = {}

            def pack(t: Tensor) -> Tensor:
                if t.untyped_storage().data_ptr() not in weights:
                    kept[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
                return t

            outputs = []  # keeps the graphs, and with them the storages, alive until all are counted
            with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
                for i in range(len(xs)):
                    outputs.append(linear(i))
            return sum(kept.values())

        bf16 = saved(lambda i: F.linear(xs[i], ws[i]))
        for saving in SAVED:
            fp8 = saved(lambda i, saving=saving: fp8_linear(xs[i], ws[i], quantized=quantized[i], wgrad=Wgrad(saved=saving)))
            self.row("saved_bytes", saved=saving, bf16_bytes=bf16, fp8_bytes=fp8, ratio=fp8 / bf16)
            if saving == Wgrad().saved:
                self.figures["saved_bytes_vs_bf16"] = fp8 / bf16

    def mlp(self) -> None:
        """The MLP block with everything fused, against its BF16 form under torch.compile."""
        (N, K), (_, I) = self.layer["gate_up"], self.layer["down"]
        for M in self.training_tokens:
            h, residual, dy = self.randn(M, K).requires_grad_(), self.randn(M, K).requires_grad_(), self.randn(M, K)
            norm = nn.Parameter(self.randn(K))
            gate_up, down = nn.Parameter(self.randn(N, K, scale=0.02)), nn.Parameter(self.randn(K, I, scale=0.02))
            quantized = ops.quantize_weight(gate_up.detach()), ops.quantize_weight(down.detach())

            def bf16_block(h, residual, norm, gate_up, down):
                s = h + residual
                n = s.float() * torch.rsqrt(s.float().square().mean(-1, keepdim=True) + 1e-6)
                gate, up = F.linear(n.to(torch.bfloat16) * norm, gate_up).chunk(2, -1)
                return F.linear(F.silu(gate) * up, down), s

            compiled = torch.compile(bf16_block) if self.gpu else bf16_block
            inputs = (h, residual, norm, gate_up, down)
            runs = {
                f"mlp M={M} bf16 compiled": lambda call: torch.autograd.grad(compiled(*inputs), inputs, (dy, dy)),
                f"mlp M={M} fp8 fused": lambda call: torch.autograd.grad(
                    fp8_swiglu_mlp(h, norm, 1e-6, gate_up, down, residual, quantized=quantized), inputs, (dy, dy)
                ),
            }
            times = self.clock.compare(runs, calls=3)
            bf16, fp8 = times.values()
            self.row("mlp", M=M, bf16_us=bf16, fp8_us=fp8, vs_bf16=bf16 / fp8)
            self.figures[f"mlp_vs_bf16_{M}"] = bf16 / fp8

    # -- decode --

    def decode(self) -> None:
        layers = 1 if self.quick else 3
        K = self.layer["qkv"][1]
        masters = [{n: self.randn(*s, scale=0.02) for n, s in self.layer.items()} for _ in range(layers)]
        quantized = [{n: ops.quantize_blocks(w) for n, w in layer.items()} for layer in masters]
        norm = self.randn(K)
        for M in self.decode_tokens:
            x, attention = self.randn(M, K), self.randn(M, K)

            def bf16(call: int, x=x, attention=attention, M=M) -> Tensor:
                w = masters[call % layers]
                residual, h = attention.clone(), x.clone()
                self.add_rms_norm_(h, residual, norm)
                F.linear(h, w["qkv"])
                h = F.linear(attention, w["o"])
                self.add_rms_norm_(h, residual, norm)
                return F.linear(self.silu_and_mul(F.linear(h, w["gate_up"])), w["down"])

            def fp8(call: int, x=x, attention=attention) -> Tensor:
                w = quantized[call % layers]
                residual, h = attention.clone(), x.clone()  # as in the BF16 chain
                n, norm_1 = ops.rms_norm_quantize(h, norm, 1e-6, residual)
                ops.fprop(n, w["qkv"])
                h = ops.fprop(ops.quantize_rows(attention), w["o"])
                n, _ = ops.rms_norm_quantize(h, norm, 1e-6, norm_1.h)
                return ops.fprop(ops.silu_mul_quantize(ops.fprop(n, w["gate_up"])), w["down"])

            runs = {"bf16": bf16, "fp8": fp8}
            times = {n: self.clock.graph(f"decode M={M} {n}", run, calls=2 * layers) for n, run in runs.items()}
            if self.gpu:
                # Programmatic dependent launch lets a GEMM start its prologue under the kernel before it.
                gemm.deep_gemm().set_pdl(True)
                times["fp8 pdl"] = self.clock.graph(f"decode M={M} fp8 pdl", fp8, calls=2 * layers)
                gemm.deep_gemm().set_pdl(False)
            for n, us in times.items():
                weight_bytes = sum(N * K for N, K in self.layer.values()) * (2 if n == "bf16" else 1)
                self.row("decode", M=M, name=n, us=us, weight_tb_s=weight_bytes / us / 1e6, vs_bf16=times["bf16"] / us)
            self.figures[f"decode_vs_bf16_{M}"] = times["bf16"] / times["fp8"]

    def add_rms_norm_(self, h: Tensor, residual: Tensor, norm: Tensor) -> None:
        if self.gpu:
            import vllm._custom_ops as vllm_ops

            vllm_ops.fused_add_rms_norm(h, residual, norm, 1e-6)
        else:
            residual.add_(h)
            h.copy_(F.rms_norm(residual, (residual.shape[-1],), norm, 1e-6))

    def silu_and_mul(self, gate_up: Tensor) -> Tensor:
        if not self.gpu:
            gate, up = gate_up.chunk(2, -1)
            return F.silu(gate) * up
        import vllm._custom_ops  # noqa: F401  registers torch.ops._C

        y = torch.empty(gate_up.shape[0], gate_up.shape[1] // 2, dtype=gate_up.dtype, device=gate_up.device)
        torch.ops._C.silu_and_mul(y, gate_up)
        return y

    # -- gradient errors --

    def inputs(self, kind: str, M: int, K: int) -> tuple[Tensor, Tensor]:
        """x (M, K), and a mask (K,) of its ordinary channels."""
        x = torch.randn(M, K, device=self.device)
        ordinary = torch.ones(K, dtype=torch.bool, device=self.device)
        if kind == "heavy-tailed":  # Student's t with 3 degrees of freedom
            x = x / (torch.randn(3, M, K, device=self.device).square().mean(0).sqrt())
        if kind == "channel outliers":  # a few input features 50 times as large, as in trained transformers
            ordinary[torch.randperm(K, device=self.device)[: max(1, K // 512)]] = False
            x[:, ~ordinary] *= 50
        return x.bfloat16(), ordinary

    def errors(self) -> None:
        M = 130 if self.quick else 4096
        kinds = ("random", "heavy-tailed", "channel outliers")
        for kind in kinds:
            for name, (N, K) in self.layer.items():
                x, ordinary = self.inputs(kind, M, K)
                x.requires_grad_()
                dy, _ = self.inputs("heavy-tailed" if kind == "heavy-tailed" else "random", M, N)
                w = nn.Parameter(self.randn(N, K, scale=0.02))
                want = F.linear(x.double(), w.double()), dy.double() @ w.double(), dy.double().t() @ x.double()

                def row(of: str, y: Tensor, dx: Tensor, dw: Tensor) -> None:
                    errors = {g: relative(a, b) for g, a, b in zip(("y", "dx", "dw"), (y, dx, dw), want, strict=True)}
                    # What outliers do to their neighbours is invisible in the norm of the whole gradient.
                    errors["dw_ordinary"] = relative(dw[:, ordinary], want[2][:, ordinary])
                    self.row("error", inputs=kind, layer=name, of=of, **errors)

                for groups in ops.TRANSPOSED_GROUPS:
                    for saved, label in (("fp8", "rounded once"), ("regrouped", "regrouped")):
                        y = fp8_linear(x, w, wgrad=Wgrad(groups, saved))
                        row(f"x in {groups}s, {label}", y, *torch.autograd.grad(y, (x, w), dy))
                y = F.linear(x, w)
                row("bf16", y, *torch.autograd.grad(y, (x, w), dy))
                for scales, te in (self.te_linears([(N, K)]) or {}).items():
                    row(f"te, {scales} scales", *te.gradients(x, w, dy))
        if self.gpu:
            for figure, which in (("", kinds[:2]), ("_channel_outliers", kinds[2:])):
                for g in ("dx", "dw", "dw_ordinary"):
                    self.figures[f"{g}_error_vs_te{figure}"] = max(
                        self.error(kind, name, f"x in {Wgrad().x_groups}s, rounded once", g)
                        / min(self.error(kind, name, f"te, {s} scales", g) for s in ("fp32", "power of two"))
                        for kind in which
                        for name in self.layer
                    )

    def error(self, kind: str, layer: str, of: str, gradient: str) -> float:
        return next(r[gradient] for r in self.tables["error"] if (r["inputs"], r["layer"], r["of"]) == (kind, layer, of))


class TeLayer:
    """``te.Linear`` modules under Float8BlockScaling, with FP32 or power-of-two scales."""

    def __init__(self, shapes: list[tuple[int, int]], scales: str):
        import transformer_engine.pytorch as te
        from transformer_engine.common.recipe import Float8BlockScaling, QParams

        self.autocast = te.autocast
        self.recipe = Float8BlockScaling()
        for field in ("fp8_quant_fwd_inp", "fp8_quant_fwd_weight", "fp8_quant_bwd_grad"):
            setattr(self.recipe, field, QParams(power_2_scale=scales == "power of two", amax_epsilon=0.0))
        self.linears = [
            te.Linear(K, N, bias=False, params_dtype=torch.bfloat16, device="cuda") for N, K in shapes
        ]  # fmt: skip
        self.kept = False

    def _forward(self, i: int, x: Tensor, first: bool | None) -> Tensor:
        with self.autocast(enabled=True, recipe=self.recipe):
            return self.linears[i](x, is_first_microbatch=first)

    def step(self, xs, dys, keep: bool) -> None:
        """Forward and backward; ``keep`` uses the FP8 weights of the first micro-batch again."""
        first = (not self.kept) if keep else None
        for i, linear in enumerate(self.linears):
            y = self._forward(i, xs[i], first)
            torch.autograd.grad(y, (xs[i], linear.weight), dys[i])
        self.kept = self.kept or keep

    @torch.no_grad()
    def forward_only(self, x: Tensor) -> Tensor:
        y = self._forward(0, x, not self.kept)
        self.kept = True
        return y

    def gradients(self, x: Tensor, w: Tensor, dy: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        linear = self.linears[0]
        with torch.no_grad():
            linear.weight.copy_(w)
        y = self._forward(0, x, None)
        return (y.detach(), *torch.autograd.grad(y, (x, linear.weight), dy))


def versions() -> dict[str, str | None]:
    found: dict[str, str | None] = {"cuda": torch.version.cuda}
    for name in ("torch", "triton", "vllm", "transformer-engine", "nvidia-cublas"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = None
    found["deep_gemm"] = gemm.deep_gemm().__version__ if torch.cuda.is_available() else None
    return found


SECTIONS = ("ceilings", "layer_step", "decode", "producers", "errors", "mlp", "lm_head", "gemms")


def measure(quick: bool, sections: tuple[str, ...]) -> dict:
    bench = Bench(quick)
    for section in sections:
        getattr(bench, section)()
        if bench.gpu:
            torch.cuda.empty_cache()
    device = {"type": bench.device, "name": torch.cuda.get_device_name() if bench.gpu else "cpu"}
    if bench.gpu:
        p = torch.cuda.get_device_properties(0)
        device |= {"multiprocessors": p.multi_processor_count, "memory_bytes": p.total_memory}
    return {
        "command": " ".join(["python", *sys.orig_argv[1:]]),
        "device": device,
        "versions": versions(),
        "notes": NOTES,
        "figures": {k: v if v is None else round(v, 4) for k, v in bench.figures.items()},
        "tables": bench.tables,
        "samples": bench.clock.samples,
    }


# -- tables --------------------------------------------------------------------------------------------------------------


BARS = {
    "layer_vs_bf16_8192": (1.45, "at least"), "layer_vs_bf16_16384": (1.45, "at least"), "layer_vs_te_8192": (1.15, "at least"),
    "decode_vs_bf16_64": (1.35, "at least"), "decode_vs_bf16_128": (1.35, "at least"), "decode_vs_bf16_256": (1.35, "at least"),
    "producer_vs_copy": (1.2, "at most"), "saved_bytes_vs_bf16": (0.55, "at most"), "dx_error_vs_te": (1.1, "at most"),
    "dw_error_vs_te": (1.1, "at most"), "dw_error_vs_te_channel_outliers": (1.2, "at most"),
}  # fmt: skip


def figure_rows(figures: dict) -> list[list]:
    rows = []
    for name, value in figures.items():
        bar, sense = BARS.get(name, (None, ""))
        met = None if bar is None or value is None else (value >= bar if sense == "at least" else value <= bar)
        rows.append([name, value, f"{sense} {bar}" if bar else None, None if met is None else "yes" if met else "**no**"])
    return rows


def report(result: dict) -> dict[str, str]:
    """The tables of docs/fp8.md by name, in Markdown."""
    t = result["tables"]
    out = {"figures": markdown(["figure", "value", "bar", "met"], figure_rows(result["figures"]))}

    def table(name: str, columns: list[str], where=lambda r: True) -> str:
        return markdown(columns, [[r.get(c) for c in columns] for r in t.get(name, []) if where(r)])

    out["layer"] = table("layer", ["M", "name", "us", "tflop_s", "vs_bf16"])
    out["decode"] = table("decode", ["M", "name", "us", "weight_tb_s", "vs_bf16"])
    out["producer"] = table("producer", ["M", "name", "us", "tb_s", "copy_us", "vs_copy"])
    out["saved"] = table("saved_bytes", ["saved", "bf16_bytes", "fp8_bytes", "ratio"])
    out["mlp"] = table("mlp", ["M", "bf16_us", "fp8_us", "vs_bf16"])
    out["lm_head"] = table("lm_head", ["M", "cublas_us", "deep_gemm_us", "vs_cublas"])
    out["error"] = table("error", ["inputs", "layer", "of", "y", "dx", "dw", "dw_ordinary"])
    gemm_columns = ["shape", "M", "op", "us", "tflop_s", "vs_bf16", "share_of_ceiling"]
    out["forward"] = table("gemm", gemm_columns, lambda r: r["op"].startswith(("forward", "fprop")))
    out["backward"] = table("gemm", gemm_columns, lambda r: r["op"].startswith(("dgrad", "wgrad")))
    out["notes"] = "\n".join(f"- `{name}`: {note}" for name, note in result["notes"].items())
    out["environment"] = markdown(
        ["what", "value"],
        [["command", f"`{result['command']}`"], ["device", result["device"]["name"]]]
        + [[k, v] for k, v in result["versions"].items()],
    )
    return out


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.ops", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--quick", action="store_true", help="tiny shapes and few rounds")
    parser.add_argument("--docs", action="store_true", help="only write the tables of --out into docs/fp8.md")
    parser.add_argument("--sections", nargs="+", default=SECTIONS, choices=SECTIONS)
    args = parser.parse_args()
    if args.docs:
        fill(DOCS, report(result_of(args.out)))
        return
    if not torch.cuda.is_available() and not args.quick:
        sys.exit("benchmarks.ops needs a Hopper GPU; --quick --out FILE checks the script on a CPU")
    result = measure(args.quick, tuple(args.sections))
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(result, indent=1) + "\n")
    tables = report(result)
    print("\n".join(f"\n{name}\n{tables[name]}" for name in ("layer", "decode", "producer", "saved", "mlp", "figures")))


if __name__ == "__main__":
    main()
