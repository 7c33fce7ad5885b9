"""Command lines: every script parses its defaults, declares ranges, and refuses bad input in one line, early."""

import dataclasses
import importlib
import math
import signal
import warnings
from pathlib import Path
from types import ModuleType
from typing import Any, get_args, get_type_hints

import methods
import pytest
import tyro
from methods import finish, python

from common.cli import Range, UserError, check_ranges, checked, declared_range

COMMAND_LINES = methods.command_lines()


def usual(module: ModuleType, words: list[str]) -> Any:
    """The arguments that a script has without those on the command line."""
    make = getattr(module, "defaults", getattr(module, "default_args", None))
    return make(words) if make else module.Args()


def has_number(annotation: Any) -> bool:
    """Whether a type such as `Annotated[int, ...]`, `float | None` or `tuple[int, ...]` is of numbers."""
    return annotation in (int, float) or any(map(has_number, get_args(annotation)))


@pytest.mark.parametrize("script", COMMAND_LINES)
def test_arguments(script: str) -> None:
    """They parse without a warning, and each number has a range, outside of which it is refused."""
    default = COMMAND_LINES[script]
    if script.split()[0] not in ("import_data", "export_latents"):  # which have required ones
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert tyro.cli(type(default), default=default, args=[]) == default
    check_ranges(default)
    for name, annotation in get_type_hints(type(default), include_extras=True).items():
        limits, flag = declared_range(annotation), f"--{name.replace('_', '-')}"
        assert isinstance(limits, Range) == has_number(annotation), f"{script} {flag} declares no range"
        if isinstance(limits, Range):
            low = limits.low if limits.above else limits.low - 1
            for value in (math.nan, math.inf, -math.inf, low, limits.high + 1, 10**400, -(10**400)):
                if value == 10**400 and limits.high == math.inf:
                    continue
                for values in (value, (value,)) if "tuple" in str(annotation) else (value,):
                    with pytest.raises(UserError, match=f"{flag} is .*, must be"):
                        check_ranges(dataclasses.replace(default, **{name: values}))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--env", "cheetah-rum"], "import_data.py videos DIR --name cheetah-rum"),
        (["--env", "walker-run"], "make_dataset.py --env walker-run"),
        (["--mask-source", "nothing"], "no masks named 'nothing'"),
        (["--num-labels", "5", "1000000"], "--num-labels 1,000,000 is not possible"),
        (["--num-labels", "0"], "--num-labels is 0, must be"),
        (["--occlusion", "2"], "--occlusion is 2.0, must be from 0 to 0.75"),
        (["--lam-lr", "nan"], "--lam-lr is nan"),
        (["--eval-steps", "1001"], "--eval-steps is 1001, but cheetah-run ends after 1000 steps"),
        (["--device", "cuda"], "torch finds no GPU"),
    ],
)
def test_bad_input_is_refused_before_there_is_a_run(
    words: list[str], message: str, planted_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = importlib.import_module("masklam")
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    folders = {"data_dir": planted_dir, "runs_dir": tmp_path / "runs"}
    words = [*methods.words(methods.TINY | folders), *words]
    with pytest.raises(UserError) as error:
        module.main(checked(tyro.cli(module.Args, default=usual(module, words), args=words)))
    assert message in str(error.value)
    assert not (tmp_path / "runs").exists()


def test_a_command_line_as_a_user_types_it(tmp_path: Path) -> None:
    """--help, an unknown flag, an error in one line, and a reader that has had enough."""
    done = finish(python("-W", "error::UserWarning:tyro", "masklam.py", "--help"))
    assert done.returncode == 0 and "--mask-source" in done.stdout and "warning" not in done.stderr.lower()
    assert done.stdout.index("--mask-source") < done.stdout.index("--data-dir")  # science first, then the run
    done = finish(python("lapo.py", "--mask-source", "gt"))
    assert done.returncode == 2 and "mask-source" in done.stderr + done.stdout
    done = finish(python("lapo.py", "--data-dir", tmp_path))
    assert done.returncode == 1 and done.stderr.startswith("lapo.py: error: ") and len(done.stderr.splitlines()) == 1
    code = "import dataclasses, sys\nfrom common.cli import cli\nsys.argv = ['x.py']\n"
    code += "@dataclasses.dataclass\nclass Args:\n    n: int = 1\n"
    code += "cli(lambda args: [print('line' * 99, flush=True) for _ in range(9999)], Args())"
    process = python("-c", code)
    process.stdout.readline()
    process.stdout.close()
    assert process.wait() == 128 + signal.SIGPIPE and process.stderr.read() == ""
