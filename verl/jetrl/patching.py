"""Guarded patches of upstream functions.

A patch names one upstream function, the hash of the source it was written against and its replacement.  Patches are found
through the entry-point group ``jetrl.patches`` (the catalogue lives in the package ``jetrl_patches``) and applied when
verl or vLLM loads its plugins.  verl and vLLM both swallow errors of plugins, so :func:`require_active` is called by the
fork's own trainer, worker, server and engine classes: a patch that is not active ends the run with the reason.
"""

from __future__ import annotations

import hashlib
import importlib
import inspect
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, entry_points, version
from typing import Any, Literal

Scope = Literal["verl", "vllm"]
PINNED = {"verl": "0.9.1", "vllm": "0.24.0"}


class PatchError(RuntimeError):
    """A patch cannot be applied to the installed upstream version, or is not active where it must be."""


@dataclass(frozen=True)
class Patch:
    """One replacement of one upstream function.

    Args:
        name: the patch's name, that of its file.
        scope: "verl" patches are applied in every process that imports verl, "vllm" patches in every vLLM process.
        target: ``package.module:attribute`` (``attribute`` may be ``Class.method``).
        source_sha256: hash of the target's source in the pinned version, see :func:`source_hash`.
        build: takes the original, returns the replacement.
        needed: tells whether this machine needs the patch (default: always).
    """

    name: str
    scope: Scope
    target: str
    source_sha256: str
    build: Callable[[Any], Any]
    needed: Callable[[], bool] = lambda: True

    @property
    def owner_and_attribute(self) -> tuple[Any, str]:
        """The module or class that holds the target, None where this version has none, and the target's name in it."""
        module, _, path = self.target.partition(":")
        *parents, attribute = path.split(".")
        try:
            owner: Any = importlib.import_module(module)
        except ModuleNotFoundError as error:
            if not f"{module}.".startswith(f"{error.name}."):
                raise  # the module is there, something that it imports is not
            owner = None
        for parent in parents:
            owner = getattr(owner, parent, None)
        return owner, attribute

    @property
    def active(self) -> bool:
        owner, attribute = self.owner_and_attribute
        return getattr(getattr(owner, attribute, None), "_jetrl_patch", None) == self.name

    def apply(self) -> None:
        """Replaces the target; twice is the same as once.  Another upstream source is a :class:`PatchError`."""
        if self.active:
            return
        owner, attribute = self.owner_and_attribute
        original = getattr(owner, attribute, None)
        found = source_hash(original)
        if found != self.source_sha256:
            raise PatchError(
                f"patch {self.name!r} was written for {self.scope} {PINNED[self.scope]} and does not fit the installed "
                f"{self.scope} {installed_version(self.scope)}: the source of {self.target} is {found[:12]}, not "
                f"{self.source_sha256[:12]}. Install the pinned version (`make setup`) or port the patch."
            )
        replacement = self.build(original)
        replacement._jetrl_patch = self.name
        replacement._jetrl_original = original
        setattr(owner, attribute, replacement)


def source_hash(function: Any) -> str:
    """SHA-256 of a function's source text, of the original when it is patched; "absent" where there is none to read."""
    function = getattr(function, "_jetrl_original", function)
    try:
        return hashlib.sha256(inspect.getsource(function).encode()).hexdigest()
    except (TypeError, OSError):
        return "absent"


def installed_version(package: str) -> str:
    """Version of the installed ``package`` ("verl" or "vllm"), "none" without it; the CPU build of vLLM counts as vLLM."""
    try:
        return version(package).split("+")[0]
    except PackageNotFoundError:
        return "none"


def catalogue(scope: Scope | None = None) -> list[Patch]:
    """Every patch of the installed catalogue, sorted by name; those of one scope when given.

    Raises :class:`PatchError` when the installation does not know a file of the catalogue: its patch would be missing
    without a word.
    """
    import jetrl_patches

    patches = {entry.name: entry.load() for entry in entry_points(group="jetrl.patches")}
    unknown = {module.name for module in pkgutil.iter_modules(jetrl_patches.__path__)} - patches.keys()
    if unknown:
        raise PatchError(
            f"patches {', '.join(sorted(unknown))} are not among the installed entry points: run `make setup`, and see that "
            "pyproject.toml lists them"
        )
    return sorted((p for p in patches.values() if scope in (None, p.scope)), key=lambda p: p.name)


def vllm_is_for_cpus() -> bool:
    """Whether the installed vLLM is the CPU build: what patches of that build need."""
    from vllm.platforms import current_platform

    return current_platform.is_cpu()


# Upstream swallows what a plugin raises; require_active() raises it again where it is heard.
_failure: dict[str, BaseException] = {}


def apply_all(scope: Scope) -> None:
    """Applies the catalogue's needed patches of ``scope``; an error is raised and kept for :func:`require_active`."""
    _failure.pop(scope, None)
    try:
        check_version(scope)
        for patch in catalogue(scope):
            if patch.needed():
                patch.apply()
    except BaseException as error:
        _failure[scope] = error
        raise


def check_version(package: Scope) -> None:
    """Raises a :class:`PatchError` when the installed upstream package is not the pinned version."""
    if installed_version(package) != PINNED[package]:
        raise PatchError(
            f"{package} {installed_version(package)} is installed, the fork is written for {package} "
            f"{PINNED[package]}: run `make setup`."
        )


def status(scope: Scope | None = None) -> dict[str, str]:
    """Patch name to "active", "not needed" or "INACTIVE", in this process."""
    return {p.name: "active" if p.active else "INACTIVE" if p.needed() else "not needed" for p in catalogue(scope)}


def require_active(scope: Scope) -> None:
    """Raises :class:`PatchError` unless every needed patch of ``scope`` is active in this process."""
    if scope in _failure:
        raise PatchError(f"the fork's {scope} plugin failed to load: {_failure[scope]}") from _failure[scope]
    missing = [name for name, state in status(scope).items() if state == "INACTIVE"]
    if missing:
        raise PatchError(
            f"{scope} patches not active in this process: {', '.join(missing)}. The plugin entry points of verl-jetrl "
            "were not loaded: is the package installed (`make setup`), and VERL_USE_EXTERNAL_PLUGINS / VLLM_PLUGINS unset?"
        )
