"""The catalogue: what the fork changes in upstream verl and vLLM, one guarded patch per file.

Each file defines ``PATCH`` and states in its docstring *Why*, *What it replaces*, *Upstream* and *Remove when*.  The files
are found through the entry-point group ``jetrl.patches`` of pyproject.toml; ``make patches`` lists them.
"""
