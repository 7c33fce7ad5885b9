"""The README's commands parse, and its files exist."""

import importlib
import re
import shlex
from pathlib import Path

import pytest
import tyro

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
COMMANDS = sorted(set(re.findall(r"^python (?:-m )?[^\n`#]+", README, re.M)))
SCRIPTS = ("lapo", "laom_labels", "laof", "lapo_slots", "masklam")
DEFAULTS = {"make_dataset": "default_args"} | dict.fromkeys(SCRIPTS, "defaults")


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_parse(command: str) -> None:
    _, *words = shlex.split(command)
    name, argv = (words[1], words[2:]) if words[0] == "-m" else (words[0].removesuffix(".py"), words[1:])
    module = importlib.import_module("masklam" if name == "my_variant" else name)
    default = getattr(module, DEFAULTS[name])(argv) if name in DEFAULTS else module.Args()
    tyro.cli(type(default), args=argv, default=default)


def test_there_are_commands() -> None:
    assert len(COMMANDS) >= 4


def test_named_files_exist() -> None:
    names = set(re.findall(r"`((?:[\w.-]+/)*[\w.-]+\.(?:py|md|sh|json|txt))`", README))
    assert names
    made = {"args.json", "result.json", "slots.json", "my_variant.py"}  # by a run, or by the reader
    missing = [name for name in names - made if not (ROOT / name).exists()]
    assert not missing


@pytest.mark.parametrize("target", re.findall(r"^make (\w+)", README, re.M))
def test_make_targets_exist(target: str) -> None:
    assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.M)


def test_nothing_is_left_to_fill_in() -> None:
    assert not re.findall(r"\b[A-Z]+_(?:NOTE|TABLE)\b|^COMPARISON$|@[A-Z]+@", README, re.M)
