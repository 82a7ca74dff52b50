"""Prints the patch catalogue, with each patch's reason and its state in this process: ``python -m verl.jetrl.show_patches``."""

from __future__ import annotations

import inspect
import os

from verl.jetrl.patching import PINNED, apply_all, catalogue, status


def main() -> None:
    os.environ.setdefault("VLLM_LOGGING_STREAM", "ext://sys.stderr")  # what vLLM says while it is imported is no answer
    entries = []
    for scope in PINNED:
        apply_all(scope)
        for patch in catalogue(scope):
            doc = (inspect.getmodule(patch.build).__doc__ or "").strip().replace("\n", "\n  ")
            entries.append(
                f"{patch.name}  [{scope} {PINNED[scope]}]  {status(scope)[patch.name]}\n  target: {patch.target}\n  {doc}\n"
            )
    print("\n".join(entries))


if __name__ == "__main__":
    main()
