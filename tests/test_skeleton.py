"""The invariant "the diff is the method": outside their marked regions all method scripts are byte-identical."""

import difflib
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
METHODS = ("lapo.py", "laom_labels.py", "laof.py", "lapo_slots.py", "masklam.py")
OTHER_SCRIPTS = ("make_dataset.py", "make_masks.py", "make_experts.py", "make_figures.py")
REGIONS = ["about", "imports", "hyperparameters", "networks", "loss", "stages"]
# Changed lines that `diff lapo.py <script>` may show.
BUDGET = {"laof.py": 220, "laom_labels.py": 240, "lapo_slots.py": 400, "masklam.py": 120}
LONGEST = {"lapo_slots.py": 750}  # lines; it has two stages more than the others

START = re.compile(r"^ *# --- method: (.*) ---$")
END = re.compile(r"^ *# --- end method ---$")


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


def complaints(reference: str, other: str, name: str) -> list[str]:
    """What breaks the invariant between two scripts, as text; empty if nothing does."""
    found = []
    skeletons = []
    for text in (reference, other):
        try:
            lines, regions = skeleton(text)
        except ValueError as error:
            return [f"{name}: {error}"]
        if regions != REGIONS:
            found.append(f"{name}: regions {regions}, expected {REGIONS}")
        skeletons.append(lines)
    if skeletons[0] != skeletons[1]:
        found.append("".join(difflib.unified_diff(*skeletons, "lapo.py", name)))
    return found


def changed_lines(a: str, b: str) -> int:
    """Lines that `diff` marks with < or >."""
    return sum(line.startswith(("- ", "+ ")) for line in difflib.ndiff(a.splitlines(), b.splitlines()))


def present() -> list[str]:
    return [name for name in METHODS if (ROOT / name).exists()]


@pytest.mark.parametrize("name", present())
def test_skeleton_is_identical(name: str) -> None:
    found = complaints((ROOT / "lapo.py").read_text(), (ROOT / name).read_text(), name)
    assert not found, "\n".join(found)


@pytest.mark.parametrize("name", [name for name in present() if name in BUDGET])
def test_diff_stays_small(name: str) -> None:
    changed = changed_lines((ROOT / "lapo.py").read_text(), (ROOT / name).read_text())
    assert changed <= BUDGET[name], f"diff lapo.py {name}: {changed} lines, at most {BUDGET[name]}"


def test_every_script_is_in_a_group() -> None:
    scripts = {path.name for path in ROOT.glob("*.py")}
    unknown = scripts - set(METHODS) - set(OTHER_SCRIPTS)
    assert not unknown, f"{unknown}: add a new method to METHODS and give it the skeleton"


@pytest.mark.parametrize("name", present())
def test_scripts_stay_readable(name: str) -> None:
    text = (ROOT / name).read_text()
    assert 350 <= len(text.splitlines()) <= LONGEST.get(name, 650)
    docstring = text.split('"""')[1]
    assert len(docstring.splitlines()) <= 12
    assert f"python {name}" in docstring


def mutate_line(text: str) -> str:
    return text.replace("while step < updates:", "while step <= updates:")


def mutate_added(text: str) -> str:
    return text.replace("def main(", "EXTRA = 1\n\n\ndef main(")


def mutate_region(text: str) -> str:
    return text.replace("# --- method: loss ---", "# --- method: losses ---")


def mutate_white_space(text: str) -> str:
    return text.replace("        step += 1\n", "        step += 1 \n")


def mutate_mark(text: str) -> str:
    return text.replace("# --- method: loss ---", "# --- method: loss --- ")


def mutate_order(text: str) -> str:
    return (
        text.replace("method: imports", "method: X").replace("method: loss", "method: imports").replace(": X", ": loss")
    )


@pytest.mark.parametrize(
    "mutate", [mutate_line, mutate_added, mutate_region, mutate_white_space, mutate_mark, mutate_order]
)
def test_an_edit_outside_a_region_is_caught(mutate) -> None:
    reference = (ROOT / "lapo.py").read_text()
    other = (ROOT / "masklam.py").read_text()
    changed = mutate(other)
    assert changed != other
    assert complaints(reference, changed, "masklam.py")


def test_an_edit_inside_a_region_is_free() -> None:
    reference = (ROOT / "lapo.py").read_text()
    changed = reference.replace("# --- method: loss ---\n", "# --- method: loss ---\nEXTRA = 1\n")
    assert changed != reference
    assert not complaints(reference, changed, "lapo.py")
