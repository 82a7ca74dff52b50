"""vLLM's attention without a GPU is the same on every x86 processor.

Why: where the processor has AMX, the CPU build takes a kernel that rounds attention's probabilities to BF16; the arms' mismatch
    was then the machine's, and the arm jetrl failed what tests/test_jobs.py asks of its two sides.
What it replaces: ``_get_attn_isa``, whose answer "amx" becomes "vec", what it answers without AMX.
Upstream: none known; the kernel is right as BF16 kernels go.
Remove when: the CPU build lets one choose the kernel.
"""

from verl.jetrl.patching import Patch, vllm_is_for_cpus


def build(original):
    def _get_attn_isa(*args, **kwargs) -> str:
        isa = original(*args, **kwargs)
        return "vec" if isa == "amx" else isa

    return _get_attn_isa


PATCH = Patch(
    name="vllm_cpu_one_attention",
    scope="vllm",
    target="vllm.v1.attention.backends.cpu_attn:_get_attn_isa",
    source_sha256="1743d607f29cc53c8f3c126da1283ef0cdefc4e90a90096c1518b66926dbdbab",
    build=build,
    needed=vllm_is_for_cpus,
)
