"""The commands in README.md and docs/ parse, and what the pages name exists."""

import importlib
import re
import shlex
from pathlib import Path

import pytest
import tyro

ROOT = Path(__file__).parents[1]
PAGES = {
    path.relative_to(ROOT): path.read_text() for path in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
}
COMMANDS = sorted(
    {
        re.sub(r"\s+#.*", "", line)
        for text in PAGES.values()
        for block in re.findall(r"^```bash\n(.*?)^```", text, re.M | re.S)
        for line in block.splitlines()
        if line
    }
)
MADE = {"my_masklam": "masklam"}  # copies that a page tells the reader to make
BY_A_RUN = {"args.json", "result.json"}


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_parse(command: str) -> None:
    program, *words = shlex.split(command)
    if program == "make":
        assert re.search(rf"^{words[0]}:", (ROOT / "Makefile").read_text(), re.M)
    elif program in ("cp", "diff"):
        assert all((ROOT / name).exists() or Path(name).stem in MADE for name in words)
    else:
        assert program == "python", f"{command}: not a command that this test can check"
        module_given = words[0] == "-m"
        name = words[1] if module_given else words[0].removesuffix(".py")
        argv = words[2 if module_given else 1 :]
        module = importlib.import_module(MADE.get(name, name))
        # Defaults that depend on --env and --quick: of a method script, of make_dataset.py.
        defaults = getattr(module, "defaults", None) or getattr(module, "default_args", None)
        default = defaults(argv) if defaults else module.Args()
        tyro.cli(type(default), args=argv, default=default)


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_named_files_exist(page: Path) -> None:
    names = set(re.findall(r"`((?:[\w.-]+/)*[\w.-]+\.(?:py|md|sh|json|txt|cff))`", PAGES[page]))
    names -= set(re.findall(r"`([\w./]+)`\s+at\s+[0-9a-f]{7}\b", PAGES[page]))  # no longer part of the program
    missing = [name for name in names - BY_A_RUN if not (ROOT / name).exists()]
    assert not missing


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\((?!https?:)([^)]+)\)", PAGES[page]):
        name, _, anchor = target.partition("#")
        path = (ROOT / page).parent / name if name else ROOT / page
        assert path.exists(), target
        if anchor:
            headings = re.findall(r"^#+ (.+)$", path.read_text(), re.M)
            assert anchor in {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}, target


def test_every_record_is_cited() -> None:
    pages = "".join(PAGES.values())
    records = {f"benchmarks/results/{path.name}" for path in (ROOT / "benchmarks" / "results").glob("*.json")}
    assert {name for name in records if name not in pages} == set()


def test_readme_is_short_and_has_commands() -> None:
    assert len(PAGES[Path("README.md")].splitlines()) <= 170 and len(COMMANDS) >= 20
