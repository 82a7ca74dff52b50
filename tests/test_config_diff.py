"""verl.jetrl.config_diff: which keys differ, and how the table shows them."""

import subprocess
import sys

import pytest
from omegaconf import OmegaConf

from verl.jetrl.config_diff import ABSENT, COLUMN_WIDTH, diff, format_diff, main


def test_equal_configs_have_no_rows():
    a = OmegaConf.create({"x": {"y": [1, 2], "z": None}, "nan": float("nan")})
    assert diff(a, a.copy()) == []
    assert "same configuration" in format_diff([], "bf16", "jetrl")


def test_changed_and_one_sided_keys():
    a = OmegaConf.create({"actor": {"lr": 1e-6, "fp8": None}, "only_a": {"deep": 1}, "same": "s"})
    b = OmegaConf.create({"actor": {"lr": 2e-6, "fp8": "blockwise"}, "only_b": [1], "same": "s"})
    assert diff(a, b) == [
        ("actor.fp8", None, "blockwise"),
        ("actor.lr", 1e-6, 2e-6),
        ("only_a.deep", 1, ABSENT),
        ("only_b", ABSENT, [1]),
    ]


def test_interpolations_are_compared_by_their_value():
    a = OmegaConf.create({"base": 8, "batch": "${base}"})
    b = OmegaConf.create({"base": 8, "batch": 8})
    assert diff(a, b) == []


@pytest.mark.parametrize("a, b", [(1, True), (1, "1"), (1, 1.0), ("null", None), ("", None), ([1], [True])])
def test_values_that_only_look_alike_differ(a, b):
    rows = diff(OmegaConf.create({"k": a}), OmegaConf.create({"k": b}))
    assert len(rows) == 1
    row = format_diff(rows, "a", "b").splitlines()[-1].split()
    assert len(row) == 3 and row[1] != row[2]


def test_a_dot_inside_a_key_is_not_nesting():
    a, b = OmegaConf.create({"m": {"a.b": 1}}), OmegaConf.create({"m": {"a": {"b": 1}}})
    assert [row[0] for row in diff(a, b)] == ["m.'a.b'", "m.a.b"]


def test_table_is_aligned_and_shows_absent_as_a_dash():
    rows = [("a.very.long.key", 1, ABSENT), ("b", "x y", None)]
    lines = format_diff(rows, "bf16", "jetrl").splitlines()
    column = lines[0].index("jetrl")
    assert [line[column:] for line in lines[2:]] == ["—", "null"]
    assert lines[0].startswith("key") and set(lines[1]) == {"-", " "}


def test_long_values_are_wrapped_never_cut():
    path = "/" + "x" * 200
    text = format_diff([("path", path, "short")], "a", "b")
    assert sum(line.count("x") for line in text.splitlines()) == 200
    assert all(len(line) <= len("path") + 2 * COLUMN_WIDTH + 4 for line in text.splitlines())


def test_command_names_the_arms_after_their_folders(tmp_path, capsys):
    for arm, rollout in (("bf16", None), ("jetrl", "fp8")):
        (tmp_path / arm).mkdir()
        (tmp_path / arm / "config.yaml").write_text(OmegaConf.to_yaml(OmegaConf.create({"rollout": rollout, "n": 1})))
    main([str(tmp_path / "bf16" / "config.yaml"), str(tmp_path / "jetrl" / "config.yaml")])
    header, _, row = capsys.readouterr().out.splitlines()
    assert header.split() == ["key", "bf16", "jetrl"]
    assert row.split() == ["rollout", "null", "fp8"]


def test_command_names_a_missing_file(tmp_path, capsys):
    with pytest.raises(SystemExit) as stop:
        main([str(tmp_path / "none.yaml"), str(tmp_path / "none.yaml")])
    assert stop.value.code == 2
    assert "none.yaml: no such file" in capsys.readouterr().err


def test_command_reads_pipes_and_takes_names(tmp_path, root):
    """As `make diff-tiny` calls it.  What differs in the arm's name alone is left out."""
    for arm, linear in (("bf16", "bf16"), ("jetrl", "fp8")):
        (tmp_path / arm).write_text(f"linear: {linear}\nfolder: /runs/{arm}/checkpoints\nsame: 1\n")
    command = f"{sys.executable} -m verl.jetrl.config_diff --names bf16,jetrl <(cat {tmp_path}/bf16) <(cat {tmp_path}/jetrl)"
    for extra, keys in (("", ["linear"]), (" --all", ["folder", "linear"])):
        done = subprocess.run(["bash", "-c", command + extra], capture_output=True, text=True, cwd=root)
        header, _, *rows = done.stdout.splitlines()
        assert header.split() == ["key", "bf16", "jetrl"] and [row.split()[0] for row in rows] == keys, done.stderr
    done = subprocess.run(["bash", "-c", command.replace("cat", "true")], capture_output=True, text=True, cwd=root)
    assert done.returncode == 2 and "bf16: no configuration in it" in done.stderr


def test_a_value_that_is_a_files_name_is_shown(tmp_path, capsys):
    for precision in ("bf16", "fp8"):
        (tmp_path / f"{precision}.yaml").write_text(f"linear: {precision}\n")
    main([str(tmp_path / "bf16.yaml"), str(tmp_path / "fp8.yaml")])
    assert capsys.readouterr().out.splitlines()[2].split() == ["linear", "bf16", "fp8"]
