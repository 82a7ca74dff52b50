"""Runs one arm of a recipe: ``python -m verl.jetrl.train RECIPE_DIR ARM RUN_DIR [hydra overrides]``.

:mod:`verl.jetrl.run` starts this for every arm, watches it and cleans up after it.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from pprint import pformat

import ray
from omegaconf import DictConfig, OmegaConf
from ray._common.constants import HEAD_NODE_RESOURCE_NAME
from verl.trainer.main_ppo import run_ppo
from verl.trainer.ppo.utils import need_critic, need_reference_policy
from verl.utils.config import validate_config

from verl.jetrl import patching
from verl.jetrl.compose import RecipeError, compose
from verl.jetrl.environment import passed_on, ray_address

# What starts a Ray, and is refused by one that runs.
STARTS_RAY = ("_temp_dir", "num_cpus", "num_gpus", "object_store_memory", "include_dashboard")


# On the head, where the launcher reads what it logs.
@ray.remote(resources={HEAD_NODE_RESOURCE_NAME: 0.001})
class JetRLTaskRunner:
    """Holds the trainer in a Ray actor, as verl's task runner does."""

    def run(self, config: DictConfig) -> None:
        import transfer_queue as tq
        from verl.utils.import_utils import load_class_from_fqn
        from verl.utils.logging_utils import configure_verl_logging

        from verl.jetrl.trainer.ppo import JetRLTrainer

        patching.require_active("verl")
        configure_verl_logging()
        config.transfer_queue.enable = True
        OmegaConf.resolve(config)
        tq.init(config.transfer_queue)
        trainer, failed = None, 1
        try:
            trainer = JetRLTrainer(config)
            trainer.init()
            manager = load_class_from_fqn(config.actor_rollout_ref.rollout.agent.agent_loop_manager_class, "agent loop manager")
            agent_loop = manager.create(
                config=config,
                llm_client=trainer.get_llm_client(),
                teacher_client=trainer.get_teacher_client(),
                reward_loop_worker_handles=trainer.get_reward_handles(),
            )
            trainer.fit(agent_loop)
            failed = 0
        finally:
            tracking = getattr(trainer, "logger", None)  # made in init, late
            if tracking is not None:
                tracking.finish(exit_code=failed)  # or a tracker takes a failed run for a finished one
            tq.close()


def join_ray(config: DictConfig) -> None:
    """Changes ``ray_kwargs.ray_init`` for a Ray that runs already, whose workers do not inherit this environment."""
    settings = OmegaConf.to_container(config.ray_kwargs.ray_init, resolve=True)
    settings = {name: value for name, value in settings.items() if name not in STARTS_RAY}
    of_user = settings.get("runtime_env") or {}
    settings["runtime_env"] = {**of_user, "env_vars": {**passed_on(), **(of_user.get("env_vars") or {})}}
    OmegaConf.update(config, "ray_kwargs.ray_init", settings, merge=False, force_add=True)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m verl.jetrl.train", description=__doc__.splitlines()[0])
    parser.add_argument("recipe", type=Path)
    parser.add_argument("arm")
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("overrides", nargs="*", help="Hydra overrides, as for verl: trainer.total_training_steps=5")
    args = parser.parse_args(argv)

    patching.require_active("verl")
    try:
        config = compose(args.recipe, args.arm, args.run_dir, args.overrides)
    except RecipeError as error:
        print(f"RecipeError: {error}", file=sys.stderr)  # so written, verl.jetrl.run finds it in the log
        return 2
    if ray_address(config):
        join_ray(config)
    validate_config(config=config, use_reference_policy=need_reference_policy(config), use_critic=need_critic(config))
    print(pformat(OmegaConf.to_container(config.jetrl)), flush=True)
    run_ppo(config, JetRLTaskRunner)
    return 0


if __name__ == "__main__":
    os.environ.setdefault("HYDRA_FULL_ERROR", "1")
    sys.exit(main())
