"""How the project's operators become torch operators of the namespace ``jetrl``."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def register(schemas: Sequence[str], cpu: type, cuda: type, fake: type) -> torch.library.Library:
    """Defines each of ``schemas`` ("name(arguments) -> results") with the static methods of its name in the three classes.

    Returns: the library; the operators last as long as it is kept.
    """
    library = torch.library.Library("jetrl", "FRAGMENT")
    for schema in schemas:
        name = schema.partition("(")[0]
        library.define(schema)
        library.impl(name, getattr(cpu, name), "CPU")
        library.impl(name, getattr(cuda, name), "CUDA")
        torch.library.register_fake(f"jetrl::{name}", getattr(fake, name), lib=library)
    return library
