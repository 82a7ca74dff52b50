"""The precision-flow check as a command: builds both module trees of each arm, without training, and prints the table.

    python -m verl.jetrl.show_flow recipes/tiny --arms bf16,jetrl

The trainer's tree is built without memory for its weights; the rollout's is a real vLLM engine with dummy weights, in the
jetrl arm with an arena of zeros.  Exits 1 when an arm's sides differ and the arm does not declare a mixed baseline.
"""

from __future__ import annotations

import argparse
import atexit
import os
import shutil
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path

from omegaconf import DictConfig

from verl.jetrl import flow_check, preflight
from verl.jetrl.compose import RecipeError, arms, compose, machine
from verl.jetrl.environment import RUN_ID, machine_environment, run_tmp
from verl.jetrl.precision import PrecisionFlow


def trainer_rows(config: DictConfig) -> list[dict[str, str]]:
    """The trainer's module tree of ``config``, on the meta device."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from verl.jetrl.model.decoder import Decoder

    model_config = AutoConfig.from_pretrained(config.actor_rollout_ref.model.path)
    if PrecisionFlow(**config.actor_rollout_ref.actor.fsdp_config.precision_flow).fp8:
        return flow_check.describe_trainer(Decoder(model_config))
    with torch.device("meta"):
        return flow_check.describe_trainer(AutoModelForCausalLM.from_config(model_config))


def rollout_rows(config: DictConfig) -> list[dict[str, str]]:
    """The module tree of a vLLM engine that is set up as the run's server sets it up."""
    from verl.utils.config import omega_conf_to_dataclass
    from vllm import LLM

    from verl.jetrl.rollout.server import JetRLHttpServer
    from verl.jetrl.rollout.vllm_model import LOAD_FORMAT

    server = JetRLHttpServer.__new__(JetRLHttpServer)
    server.config = omega_conf_to_dataclass(config.actor_rollout_ref.rollout)
    server.model_config = omega_conf_to_dataclass(config.actor_rollout_ref.model)
    quantization, hf_overrides = server._apply_quantization()
    with _arena(server.model_config.local_path) if server.flow.fp8 else nullcontext():
        engine = LLM(
            model=server.model_config.local_path,
            load_format=LOAD_FORMAT if server.flow.fp8 else "dummy",
            dtype=server.config.dtype,
            quantization=quantization,
            hf_overrides=hf_overrides,
            enforce_eager=True,
            max_model_len=server.config.max_model_len,
            gpu_memory_utilization=server.config.gpu_memory_utilization,
            worker_extension_cls=server._get_worker_extension_cls(),
        )
        return engine.collective_rpc("jetrl_describe_precision")[0]


@contextmanager
def _arena(path: str) -> Iterator[None]:
    """An arena of zeros, in the trainer's place."""
    import torch
    from transformers import AutoConfig

    from verl.jetrl.arena import Arena, layout_of

    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    arena = Arena.create(layout_of(AutoConfig.from_pretrained(path)), device, rank=0)
    arena.control.wrote()  # zeros will do for a look at the modules
    try:
        yield
    finally:
        arena.close()


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m verl.jetrl.show_flow", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("recipe", type=Path)
    parser.add_argument("--arms", help="comma-separated arms (default: all)")
    parser.add_argument("overrides", nargs="*", help="Hydra overrides")
    args = parser.parse_intermixed_args(argv)
    try:
        chosen = arms(args.recipe) if args.arms is None else [arm.strip() for arm in args.arms.split(",")]
        configs = {arm: compose(args.recipe, arm, Path("runs") / args.recipe.name / arm, args.overrides) for arm in chosen}
    except RecipeError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if found := list(dict.fromkeys(problem for config in configs.values() for problem in preflight.of_the_trees(config))):
        print(f"recipe {args.recipe.name} cannot be shown:", *(f"  - {p}" for p in found), sep="\n", file=sys.stderr)
        return 2
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # so that the arena's files go
    run_id = f"flow-{os.getpid()}"
    os.environ.update({**machine_environment(machine()), **os.environ, RUN_ID: run_id})
    atexit.register(shutil.rmtree, run_tmp(run_id), ignore_errors=True)
    code = 0
    for arm, config in configs.items():
        rows = flow_check.compare(trainer_rows(config), rollout_rows(config))
        print(f"{arm}\n{flow_check.table(rows)}\n", flush=True)
        try:
            flow_check.require_equal(rows, config.jetrl.mixed_precision)
        except flow_check.PrecisionMismatch as error:
            print(f"error: {arm}: {error}", file=sys.stderr)
            code = 1
    return code


if __name__ == "__main__":
    sys.exit(main())
