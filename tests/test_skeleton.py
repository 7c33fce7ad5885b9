"""The invariant "the diff is the method": outside their marked regions all method scripts are byte-identical."""

import difflib
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from common import runs

ROOT = Path(__file__).parents[1]
REGIONS = ["about", "imports", "hyperparameters", "defaults", "networks", "loss", "stages"]
# Of the scripts shipped here: changed lines that `diff lapo.py <script>` may show. A script of yours has no budget.
BUDGET = {"laof": 220, "laom_labels": 240, "lapo_slots": 400, "masklam": 110}
# Lines of a script and of its `main`; LAPO-Slots has a stage more than the others.
LONGEST, LONGEST_MAIN = {"lapo_slots": 660}, {"lapo_slots": 130}

START = re.compile(r"^ *# --- method: (.*) ---$")
END = re.compile(r"^ *# --- end method ---$")


def read(script: str) -> str:
    return (ROOT / f"{script}.py").read_text()


def skeleton(text: str) -> tuple[list[str], list[str]]:
    """Splits a script into its lines outside the regions (the marks stay) and the names of its regions.

    Raises ValueError for a region that is nested, not closed, or not opened.
    """
    outside, names, inside = [], [], False
    for number, line in enumerate(text.splitlines(keepends=True), 1):
        stripped = line.rstrip("\n")
        start, end = START.match(stripped), END.match(stripped)
        if ("--- method" in line and not start) or ("--- end method" in line and not end):
            raise ValueError(f"line {number}: a mark that is not written exactly")
        if (bool(start) and inside) or (bool(end) and not inside):
            raise ValueError(f"line {number}: regions must not nest and must be opened")
        if start:
            names.append(start[1])
        if start or end or not inside:
            outside.append(line)
        inside = bool(start) or (inside and not end)
    if inside:
        raise ValueError("a region is not closed")
    return outside, names


def complaints(reference: str, other: str, name: str) -> str:
    """What breaks the invariant between two scripts, as a diff or a sentence; empty if nothing does."""
    skeletons = []
    for text in (reference, other):
        try:
            lines, regions = skeleton(text)
        except ValueError as error:
            return f"{name}: {error}"
        if regions != REGIONS:
            return f"{name}: regions {regions}, expected {REGIONS}"
        skeletons.append(lines)
    return "".join(difflib.unified_diff(*skeletons, "lapo.py", name))


@pytest.mark.parametrize("script", runs.method_scripts())
def test_the_diff_is_the_method(script: str) -> None:
    text = read(script)
    complaint = complaints(read("lapo"), text, f"{script}.py")
    assert not complaint, complaint
    compared = difflib.ndiff(read("lapo").splitlines(), text.splitlines())
    changed = sum(line.startswith(("- ", "+ ")) for line in compared)
    assert changed <= BUDGET.get(script, 1000), f"diff lapo.py {script}.py: {changed} lines"


@pytest.mark.parametrize("script", ["lapo", *BUDGET])
def test_scripts_stay_readable(script: str) -> None:
    text = read(script)
    assert len(text.splitlines()) <= LONGEST.get(script, 560)
    docstring = text.split('"""')[1]
    assert len(docstring.splitlines()) <= 12 and f"python {script}.py" in docstring
    main = text[text.index("def main(") : text.index("if __name__ ==")].rstrip()
    assert len(main.splitlines()) <= LONGEST_MAIN.get(script, 90)


def swap_regions(text: str) -> str:
    marks = [f"# --- method: {name} ---" for name in ("imports", "loss")]
    return text.replace(marks[0], "X").replace(marks[1], marks[0]).replace("X", marks[1])


@pytest.mark.parametrize(
    "mutate",
    [
        lambda text: text.replace("while step < updates:", "while step <= updates:"),
        lambda text: text.replace("def main(", "EXTRA = 1\n\n\ndef main("),
        lambda text: text.replace("        step += 1\n", "        step += 1 \n"),
        lambda text: text.replace("# --- method: loss ---", "# --- method: losses ---"),
        lambda text: text.replace("# --- method: loss ---", "# --- method: loss --- "),
        lambda text: text.replace("# --- end method ---", "", 1),
        swap_regions,
    ],
)
def test_an_edit_outside_a_region_is_caught(mutate: Callable[[str], str]) -> None:
    original = read("masklam")
    assert mutate(original) != original
    assert complaints(read("lapo"), mutate(original), "masklam.py")


def test_a_variant_of_ones_own_is_found_and_checked(tmp_path: Path) -> None:
    """A copy of a script under another name, with an edit of the loss, then with one outside the regions."""
    for folder in ("common", "tests"):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__"))
    for script in runs.method_scripts():
        shutil.copy(ROOT / f"{script}.py", tmp_path)
    edited = read("masklam").replace("F.mse_loss(prediction.float(), target)", "F.l1_loss(prediction.float(), target)")
    assert edited != read("masklam")
    for text, failures in ((edited, 0), (edited.replace("step += 1", "step += 2"), 1)):
        (tmp_path / "my_masklam.py").write_text(text)
        pytest_command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--noconftest"]
        done = subprocess.run(
            [*pytest_command, "-o", "pythonpath=.", "tests/test_skeleton.py", "-k", "my_masklam"],
            cwd=tmp_path, capture_output=True, text=True,
        )  # fmt: skip
        assert done.returncode == failures and f"1 {'failed' if failures else 'passed'}" in done.stdout, done.stdout
    assert "-        step += 1" in done.stdout and "+        step += 2" in done.stdout
