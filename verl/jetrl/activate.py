"""What importing the fork's plugin does, in every process that imports verl or starts vLLM.

verl loads the entry points of ``verl.plugins`` (importing this module is activating it), vLLM calls those of
``vllm.general_plugins``.  Both swallow exceptions; the classes of the fork check with ``patching.require_active``.
"""

from verl.jetrl import patching

patching.apply_all("verl")

import verl.jetrl.platform_cpu  # noqa: E402, F401  registers the CPU platform


def vllm_plugin() -> None:
    """Registers the fork's model, loader and quantization method; without a GPU also the stock FP8 kernel vLLM lacks there."""
    from vllm import ModelRegistry
    from vllm.platforms import current_platform

    patching.apply_all("vllm")
    import verl.jetrl.rollout.vllm_quant  # noqa: F401
    from verl.jetrl.rollout import vllm_model

    ModelRegistry.register_model(vllm_model.ARCHITECTURE, vllm_model.JetRLForCausalLM)

    if current_platform.is_cpu():
        from verl.jetrl.rollout import vllm_cpu

        vllm_cpu.register()
