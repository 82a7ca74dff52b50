"""The difference between two resolved configurations, key by key.

    python -m verl.jetrl.config_diff runs/tiny/bf16/config.yaml runs/tiny/jetrl/config.yaml

Two values are the same when they are written the same way in YAML, so ``1``, ``1.0``, ``'1'`` and ``true`` all differ.
"""

import argparse
import textwrap
from pathlib import Path
from typing import Any

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException


class _Absent:
    """The value of a key that one side does not have (``None`` is a value: YAML's null)."""

    def __repr__(self) -> str:
        return "—"


ABSENT = _Absent()
COLUMN_WIDTH = 48  # characters; longer values continue on the next line, nothing is cut off


def diff(a: DictConfig, b: DictConfig) -> list[tuple[str, Any, Any]]:
    """Keys whose values differ, as ``(dotted key, value in a, value in b)`` sorted by key.

    A key of one side alone has the value ``ABSENT`` on the other. A list is one value: it differs as a whole.
    Interpolations are resolved first; omegaconf's error is raised where that fails.
    """
    flat_a, flat_b = _flatten(a), _flatten(b)
    rows = []
    for key in sorted(flat_a.keys() | flat_b.keys()):
        value_a, value_b = flat_a.get(key, ABSENT), flat_b.get(key, ABSENT)
        if format_value(value_a) != format_value(value_b):
            rows.append((key, value_a, value_b))
    return rows


def format_value(value: Any) -> str:
    """A value as YAML on one line; ``—`` for ``ABSENT``."""
    if value is ABSENT:
        return repr(value)
    text = yaml.safe_dump(value, default_flow_style=True, allow_unicode=True, width=float("inf"))
    return text.removesuffix("\n").removesuffix("...").rstrip("\n")


def format_diff(rows: list[tuple[str, Any, Any]], name_a: str, name_b: str) -> str:
    """The rows of ``diff`` as an aligned table of three columns: key, a, b."""
    if not rows:
        return f"{name_a} and {name_b} have the same configuration."
    table = [("key", name_a, name_b)] + [(key, format_value(a), format_value(b)) for key, a, b in rows]
    key_width = max(len(row[0]) for row in table)
    a_width = min(COLUMN_WIDTH, max(len(row[1]) for row in table))
    lines = []
    for key, a, b in table:
        a_lines, b_lines = _wrap(a), _wrap(b)
        for i in range(max(len(a_lines), len(b_lines))):
            cells = (key if i == 0 else "", _at(a_lines, i), _at(b_lines, i))
            lines.append(f"{cells[0]:<{key_width}}  {cells[1]:<{a_width}}  {cells[2]}".rstrip())
    lines.insert(1, f"{'-' * key_width}  {'-' * a_width}  {'-' * min(COLUMN_WIDTH, max(len(row[2]) for row in table))}")
    return "\n".join(lines)


def load_config(path: Path) -> DictConfig:
    """Read a YAML file that holds a mapping, its interpolations resolved.

    Raises ``FileNotFoundError``, or ``ValueError`` for anything else.
    """
    try:
        config = OmegaConf.load(path)
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: no YAML: {error}") from error
    if not isinstance(config, DictConfig):
        raise ValueError(f"{path}: not a mapping of keys to values")
    try:
        OmegaConf.resolve(config)
    except OmegaConfBaseException as error:
        raise ValueError(f"{path}: {str(error).partition(chr(10))[0]}") from error
    return config


def _flatten(config: DictConfig) -> dict[str, Any]:
    flat: dict[str, Any] = {}

    def walk(node: Any, path: tuple[str, ...]) -> None:
        if isinstance(node, dict) and (node or not path):
            for key, value in node.items():
                # A dot inside a key must not look like nesting.
                walk(value, (*path, f"'{key}'" if "." in str(key) else str(key)))
        else:
            flat[".".join(path)] = node

    walk(OmegaConf.to_container(config, resolve=True, enum_to_str=True), ())
    return flat


def _wrap(text: str) -> list[str]:
    return textwrap.wrap(text, COLUMN_WIDTH, break_on_hyphens=False) or [""]


def _at(lines: list[str], i: int) -> str:
    return lines[i] if i < len(lines) else ""


def _name(path: Path) -> str:
    """A run's file is called config.yaml in every arm: there the folder is the name."""
    return path.resolve().parent.name if path.stem == "config" else path.stem


def _only_the_name(row: tuple, name_a: str, name_b: str) -> bool:
    """A path, or the arm's own name; any other value that happens to be a name (a precision, say) is a difference."""
    key, a, b = row
    named = isinstance(a, str) and ("/" in a or key.endswith(("jetrl.arm", "experiment_name")))
    return named and isinstance(b, str) and a.replace(name_a, name_b) == b


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m verl.jetrl.config_diff", description=diff.__doc__.splitlines()[0])
    parser.add_argument("a", type=Path, metavar="A.yaml", help="a resolved configuration")
    parser.add_argument("b", type=Path, metavar="B.yaml", help="the one to compare it with")
    parser.add_argument("--names", help="what to call the two, comma-separated: for pipes, whose paths say nothing")
    parser.add_argument(
        "--all", action="store_true", help="also what differs only in these names: folders, the experiment's name"
    )
    args = parser.parse_args(argv)
    for path in (args.a, args.b):
        if not path.exists() or path.is_dir():  # a pipe will do
            parser.error(f"{path}: {'a folder, not a file' if path.is_dir() else 'no such file'}")
    names = [_name(args.a), _name(args.b)] if args.names is None else args.names.split(",")
    if len(names) != 2 or not all(names):
        parser.error(f"--names {args.names}: give two names, separated by a comma")
    name_a, name_b = names if names[0] != names[1] else (str(args.a), str(args.b))
    try:
        configs = [load_config(path) for path in (args.a, args.b)]
    except ValueError as error:
        parser.error(str(error))
    for name, config in zip((name_a, name_b), configs, strict=True):
        if not config:
            parser.error(f"{name}: no configuration in it")
    rows = diff(*configs)
    if not args.all:
        rows = [row for row in rows if not _only_the_name(row, name_a, name_b)]
    print(format_diff(rows, name_a, name_b))


if __name__ == "__main__":
    main()
