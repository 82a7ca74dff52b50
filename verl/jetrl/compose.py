"""From a recipe's arm to verl's configuration.

A recipe is a folder ``recipes/<name>`` with ``base.yaml`` and one short YAML file per arm; both are ordinary Hydra
configurations on top of verl's own.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import torch
from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from omegaconf import DictConfig, OmegaConf

NOT_ARMS = {"base"}
CONFIGS = Path(__file__).parent / "configs"
SEARCH_PATH = f"hydra.searchpath=[file://{CONFIGS},pkg://verl.trainer.config]"


class RecipeError(ValueError):
    """A recipe or arm that does not exist, or an override that does not fit."""


def machine() -> str:
    """ "gpu" or "cpu": what this machine has; ``JETRL_DEVICE`` overrides."""
    return os.environ.get("JETRL_DEVICE") or ("gpu" if torch.cuda.is_available() else "cpu")


def arms(recipe: Path) -> list[str]:
    """Names of the recipe's arms."""
    if not (recipe / "base.yaml").is_file():
        raise RecipeError(f"{recipe} is not a recipe: it has no base.yaml")
    return sorted(p.stem for p in recipe.glob("*.yaml") if p.stem not in NOT_ARMS)


def compose(recipe: Path, arm: str, run_dir: Path, overrides: Sequence[str] = ()) -> DictConfig:
    """The unresolved verl configuration of ``arm``; the run's files go below ``run_dir``.

    Raises :class:`RecipeError` for an unknown arm; Hydra's own error for an override that does not fit.
    """
    recipe = recipe.resolve()
    if arm not in arms(recipe):
        raise RecipeError(f"recipe {recipe.name!r} has no arm {arm!r}; it has {', '.join(arms(recipe))}")
    with initialize_config_dir(str(recipe), version_base=None):
        config = hydra_compose(
            arm,
            overrides=[
                SEARCH_PATH,
                f"+machine={machine()}",
                f"+jetrl.recipe_dir={recipe}",
                f"+jetrl.data_dir={run_dir.resolve().parent / 'data'}",
                f"+jetrl.arm={arm}",
                f"+jetrl.run_dir={run_dir.resolve()}",
                f"trainer.project_name={recipe.name}",
                f"trainer.experiment_name={arm}",
                f"trainer.default_local_dir={run_dir.resolve() / 'checkpoints'}",
                *overrides,
            ],
        )
    return config


def resolved_yaml(config: DictConfig) -> str:
    """The configuration as YAML, interpolations resolved, keys sorted."""
    return OmegaConf.to_yaml(config, resolve=True, sort_keys=True)
