"""Prints the patch catalogue, with each patch's reason and its state in this process: ``python -m verl.jetrl.show_patches``."""

from __future__ import annotations

import argparse
import inspect
import os
import sys
from collections.abc import Sequence

from verl.jetrl.patching import PINNED, PatchError, apply_all, catalogue, status


def main(argv: Sequence[str] | None = None) -> int:
    argparse.ArgumentParser(prog="python -m verl.jetrl.show_patches", description=__doc__.partition(":")[0]).parse_args(argv)
    os.environ.setdefault("VLLM_LOGGING_STREAM", "ext://sys.stderr")  # what vLLM says while it is imported is no answer
    entries = []
    for scope in PINNED:
        try:
            apply_all(scope)
        except PatchError as error:
            print(f"error: {error}", file=sys.stderr)
            return 1
        for patch in catalogue(scope):
            doc = (inspect.getmodule(patch.build).__doc__ or "").strip().replace("\n", "\n  ")
            entries.append(
                f"{patch.name}  [{scope} {PINNED[scope]}]  {status(scope)[patch.name]}\n  target: {patch.target}\n  {doc}\n"
            )
    print("\n".join(entries))
    return 0


if __name__ == "__main__":
    sys.exit(main())
