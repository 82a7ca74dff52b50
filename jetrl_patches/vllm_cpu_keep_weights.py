"""vLLM's CPU linears keep their weights.

Why: the CPU build packs each linear's weight into a library handle at load and drops ``layer.weight``; a later weight
    update then finds no parameter to write to, and the rollout goes on with the old policy.
What it replaces: ``dispatch_cpu_unquantized_gemm``, by a plain ``torch.nn.functional.linear`` on ``layer.weight``.
Upstream: none known; the CPU build is not meant for weight updates.
Remove when: the CPU build updates packed weights, or the tests no longer need it.
"""

import torch

from verl.jetrl.patching import Patch, vllm_is_for_cpus


def build(original):
    def dispatch_cpu_unquantized_gemm(layer: torch.nn.Module, remove_weight: bool) -> None:
        layer.cpu_linear = torch.nn.functional.linear

    return dispatch_cpu_unquantized_gemm


PATCH = Patch(
    name="vllm_cpu_keep_weights",
    scope="vllm",
    target="vllm.model_executor.layers.utils:dispatch_cpu_unquantized_gemm",
    source_sha256="b6a587814634de21470e6694abae1d0790ce86ae08bb35e6e97eb988f26087d4",
    build=build,
    needed=vllm_is_for_cpus,
)
