"""From a recipe's arm to verl's configuration.

A recipe is a folder ``recipes/<name>`` with ``base.yaml`` and one short YAML file per arm; both are ordinary Hydra
configurations on top of verl's own.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Sequence
from pathlib import Path

import torch
import yaml
from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

NOT_ARMS = {"base"}
CONFIGS = Path(__file__).parent / "configs"


class RecipeError(ValueError):
    """A recipe or arm that does not exist or cannot be read, or an override that does not fit."""


def machine() -> str:
    """ "gpu" or "cpu": what this machine has; ``JETRL_DEVICE`` overrides."""
    chosen = os.environ.get("JETRL_DEVICE") or ("gpu" if torch.cuda.is_available() else "cpu")
    if chosen not in ("cpu", "gpu"):
        raise RecipeError(f"the environment variable JETRL_DEVICE={chosen}: set it to cpu or gpu, or leave it out")
    return chosen


def arms(recipe: Path) -> list[str]:
    """Names of the recipe's arms."""
    if not (recipe / "base.yaml").is_file():
        raise RecipeError(f"{recipe} is not a recipe: it has no base.yaml")
    return sorted(p.stem for p in recipe.glob("*.yaml") if p.stem not in NOT_ARMS)


def compose(recipe: Path, arm: str, run_dir: Path, overrides: Sequence[str] = ()) -> DictConfig:
    """The unresolved verl configuration of ``arm``; the run's files go below ``run_dir``.

    Raises :class:`RecipeError` for an unknown arm, an override that does not fit, and YAML that cannot be read or resolved.
    """
    recipe = recipe.resolve()
    if arm not in arms(recipe):
        raise RecipeError(f"recipe {recipe.name!r} has no arm {arm!r}; it has {', '.join(arms(recipe))}")
    run_dir = run_dir.resolve()
    defaults = {
        "+jetrl.recipe_dir": recipe,
        "+jetrl.data_dir": run_dir.parent / "data",
        "+jetrl.arm": arm,
        "+jetrl.run_dir": run_dir,
        "trainer.project_name": recipe.name,
        "trainer.experiment_name": arm,
        "trainer.default_local_dir": run_dir / "checkpoints",
    }
    try:
        with initialize_config_dir(str(recipe), version_base=None):
            config = hydra_compose(
                arm,
                overrides=[
                    f"hydra.searchpath=[{_quoted(f'file://{CONFIGS}')},pkg://verl.trainer.config]",
                    f"+machine={machine()}",
                    *(f"{key}={_quoted(value)}" for key, value in defaults.items()),
                    *overrides,
                ],
            )
        OmegaConf.to_container(config, resolve=True)
    except (HydraException, OmegaConfBaseException, yaml.YAMLError, ValueError) as error:  # Hydra raises some as they come
        unknown = re.search(r"Could not override '([\w.]+)'", str(error))
        said = _unknown_setting(recipe, arm, run_dir, unknown[1]) if unknown and overrides else str(error)
        raise RecipeError(f"recipe {recipe.name!r}, arm {arm!r}: {said}") from error
    return config


def _unknown_setting(recipe: Path, arm: str, run_dir: Path, key: str) -> str:
    """What is wrong with an override of ``key``, and the setting that may be meant: Hydra's advice is to add a new one."""
    known, path = compose(recipe, arm, run_dir), key.split(".")
    parents = [OmegaConf.select(known, ".".join(path[:n]), throw_on_missing=False) if n else known for n in range(len(path))]
    depth = max(n for n, parent in enumerate(parents) if isinstance(parent, DictConfig))
    for n in range(depth):
        if OmegaConf.is_interpolation(parents[n], path[n]):
            place, source = ".".join(path[: n + 1]), OmegaConf.to_container(parents[n], resolve=False)[path[n]]
            return f"{place} follows {source}: set that, or all of it at once: '{place}={{{path[-1]}: ...}}'"
    close = difflib.get_close_matches(path[depth], list(map(str, parents[depth])), 3)
    meant = " or ".join(".".join([*path[:depth], name, *path[depth + 1 :]]) for name in close)
    hint = f"did you mean {meant}?" if close else f"python -m verl.jetrl.run {recipe} --print-config {arm} lists them"
    return f"there is no setting {key}; {hint} (+{key}=... adds a setting that verl does not know)"


def _quoted(value: object) -> str:
    """A string in Hydra's override grammar, whatever characters a path has."""
    text = re.sub(r"(\\*)('|\$\{|$)", lambda m: 2 * m[1] + "\\" * bool(m[2]) + m[2], str(value))
    return f"'{text}'"


def resolved_yaml(config: DictConfig) -> str:
    """The configuration as YAML, interpolations resolved, keys sorted."""
    return OmegaConf.to_yaml(config, resolve=True, sort_keys=True)
