"""Tables and figures from run directories made by hand: numbers, marks for what is wrong, Eigen-CAM, the page."""

import importlib
import json
import re
import statistics
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import methods
import numpy as np
import pytest
import torch
from torch import nn

import make_figures
from benchmarks import paper
from common import results, runs
from common.errors import UserError
from common.report import Entry, Item, Table, page
from common.results import Finished, Stat, average, find_runs, iqm_interval, stat

ROOT = Path(__file__).parents[1]
A, B = "a" * 40, "b" * 40


def write_run(
    folder: Path,
    script: str,
    env: str,
    seed: int,
    nmse: float | None = 0.5,
    *,
    name: str = "x",
    commit: str = A,
    data: str = "d",
    score: float | None = 0.25,
    quick: bool = False,
    identity: dict[str, Any] | None = None,
    held: int | None = None,
    **changes: Any,
) -> Path:
    """A run directory with the arguments of a script's defaults and `changes`; without a result if `nmse` is None."""
    module = importlib.import_module(script)
    args = module.defaults([f"--env={env}", *(["--quick"] if quick else [])])
    values = runs.jsonable(args) | {"seed": seed} | changes
    identity = {"train_hash": data, "test_hash": data, "mask_hash": "gt" * 2, "device_type": "cpu"} | (identity or {})
    identity |= {} if held is None else {"lam_from_hash": "x"}
    directory = folder / script / env / name / f"seed{seed}"
    directory.mkdir(parents=True)
    (directory / "args.json").write_text(json.dumps(values | identity))
    if nmse is not None:
        metrics = {"eval/nmse": nmse, "eval/nmse_untrained": nmse + 0.125, "eval/normalised_paper": score}
        metrics["eval/normalised_dataset"] = None if score is None else score / 2
        stages = {"lam": {"seconds": 3600.0, "samples_per_s": 80.0}}
        result = {"metrics": metrics, "args": values, "commit": commit, "script": script, "env": env, "seed": seed}
        result |= {"seconds": {"lam": 3600.0, "bc": 1800.0, "probe": 360.0}, "stages": stages, "peak_memory_gib": 2.5}
        result |= {"machine": {"cpu": "a CPU", "gpu": None}}
        result |= {} if held is None else {"lam_from": {"num_labels": held, "commit": A}}
        (directory / "result.json").write_text(json.dumps(result))
    return directory


def context(folder: Path, seeds: int = 3, quick: bool = False) -> make_figures.Context:
    out = folder / "figures"
    out.mkdir(exist_ok=True)
    args = make_figures.Args(folder, out, quick, seeds, bootstrap=500)
    return make_figures.Context(Finished([r for r in find_runs(folder) if r.quick == quick], quick, seeds), out, args)


def rows(table: Table) -> dict[str, list[Entry]]:
    return {row[0].text: row[1:] for row in table.rows}


def column(table: Table, name: str) -> int:
    return table.head.index(name) - 1


# --- numbers


def test_tables_have_the_numbers_computed_by_hand(tmp_path: Path) -> None:
    """Two tasks, three seeds: per task mean and deviation; in the aggregate their means; the paper's over the same."""
    values = {"cheetah-run": [0.1, 0.2, 0.3], "walker-run": [0.5, 0.5, 0.8]}
    for env, three in values.items():
        for seed, value in enumerate(three, 1):
            write_run(tmp_path, "masklam", env, seed, value)
            write_run(tmp_path, "lapo", env, seed, value + 0.1)
    found = context(tmp_path)
    per_task, _ = make_figures.task_table(found, "nmse", "dcs", "distractor")
    lines = rows(per_task)
    assert per_task.head[1:] == ["cheetah-run", "walker-run", "hopper-hop", "humanoid-walk"]
    assert [entry.text for entry in lines["MaskLAM@GT"]] == ["0.2000 ± 0.1000", "0.6000 ± 0.1732", "-", "-"]
    assert [entry.text for entry in lines["LAPO"]][:2] == ["0.3000 ± 0.1000", "0.7000 ± 0.1732"]
    assert [entry.text for entry in lines["MaskLAM@GT, untrained"]][:2] == ["0.3250 ± 0.1000", "0.7250 ± 0.1732"]
    assert lines["MaskLAM@GT, paper"][0].text == "0.1171 ± 0.0007"  # the paper's table of DCS
    assert lines["LAPO, paper"][3].text == "0.6766 ± 0.0382"
    assert [entry.bold for entry in lines["MaskLAM@GT"]] == [True, True, False, False] and not lines["LAPO"][0].bold
    assert not any(entry.notes for entry in lines["MaskLAM@GT"])

    table = make_figures.aggregate_table(found).table
    lines, place = rows(table), column(table, "DCS NMSE distr.")
    assert lines["MaskLAM@GT"][place].text == "0.4000 ± 0.1366"  # (0.2 + 0.6) / 2, (0.1 + 0.1732) / 2
    assert lines["MaskLAM@GT"][place].notes == ["over 2 of 4 tasks"] and lines["MaskLAM@GT"][place].bold
    assert lines["MaskLAM@GT, untrained"][place].text == "0.5250 ± 0.1366"
    assert lines["LAPO, paper"][place].text == "0.3629 ± 0.0146"  # (0.3836 + 0.3423) / 2, (0.0220 + 0.0071) / 2
    assert lines["LAPO, paper"][place].notes == ["the paper's mean over the same tasks as ours"]
    score = column(table, "DCS NR distr.")
    assert lines["LAPO"][score].text == "0.2500 ± 0.0000"
    assert lines["LAPO, data's expert"][score].text == "0.1250 ± 0.0000"
    assert lines["LAPO"][column(table, "DCS NMSE clean")].text == "-"
    for suffix, mark in ((".md", "0.4000 ± 0.1366"), (".tex", r"0.4000 $\pm$ 0.1366")):
        assert mark in (tmp_path / f"figures/aggregate{suffix}").read_text()
    cost = make_figures.cost_table(found).table
    assert [entry.text for entry in cost.rows[0]][:6] == ["LAPO", "DCS", "a CPU", "6", "1.60", "0.00"]
    assert [entry.text for entry in cost.rows[0]][6:] == ["1.00", "0.50", "0.00", "0.10", "2.5", "80", "6.3"]


def test_the_papers_aggregates_follow_from_its_tasks() -> None:
    """The published means over all tasks, from the published numbers of the tasks."""
    numbers = json.loads(paper.NUMBERS.read_text())
    for method in paper.METHODS:
        for suite, envs in make_figures.SUITES.items():
            for kind, short in (("nmse", "nmse"), ("return", "nr" if suite == "dcs" else "nsr")):
                for render in ("vanilla", "distractor"):
                    found = make_figures.published(kind, suite, render, method, envs)
                    mean, std = numbers["aggregate"][method][f"{suite}_{short}_{render}"]
                    assert found.mean == pytest.approx(mean, abs=6e-4), (method, suite, kind, render)
                    assert found.std == pytest.approx(std, abs=6e-4)


def test_statistics() -> None:
    assert stat([1.0, 2.0, 4.0]) == Stat(7 / 3, statistics.stdev([1, 2, 4]), (1.0, 2.0, 4.0))
    assert stat([3.0]) == Stat(3.0, None, (3.0,))
    assert average([stat([1.0, 3.0]), stat([5.0])]).std is None
    eight = [[0.0, 1.0, 2.0, 100.0], [3.0, 4.0, 5.0, -50.0]]
    point, low, high = iqm_interval(eight, 2000)
    assert point == (1 + 2 + 3 + 4) / 4 - 0.0  # -50, 0 and 5, 100 are cut off
    assert low < point < high and iqm_interval(eight, 2000) == (point, low, high)
    # Stratified: if each task's runs agree, every resample is the same, however far the tasks are apart.
    assert iqm_interval([[0.0, 0.0], [1.0, 1.0]], 500) == (0.5, 0.5, 0.5)
    assert np.isnan(iqm_interval([[0.1], [0.2, 0.3]], 100)[1]) and iqm_interval([], 100) is None


# --- what is wrong with a cell


def entry(folder: Path, seeds: int = 3) -> Entry:
    table, _ = make_figures.task_table(context(folder, seeds), "nmse", "dcs", "distractor")
    return rows(table)["MaskLAM@GT"][0]


def test_too_few_seeds_and_unfinished_runs_are_marked(tmp_path: Path) -> None:
    write_run(tmp_path, "masklam", "cheetah-run", 1, 0.25)
    write_run(tmp_path, "masklam", "cheetah-run", 2, None)
    damaged = write_run(tmp_path, "masklam", "cheetah-run", 3, 0.5)
    (damaged / "result.json").write_text('{"metrics": ')
    found = entry(tmp_path)
    assert found.text == "0.2500"
    assert found.notes == ["seed 2 is not finished", "seed 3 has a damaged result.json", "1 of 3 seeds"]


def test_nothing_but_unfinished_runs(tmp_path: Path) -> None:
    write_run(tmp_path, "masklam", "cheetah-run", 1, None)
    found = entry(tmp_path)
    assert found.text == "-" and found.notes == ["seed 1 is not finished"]


def test_different_data_are_never_averaged(tmp_path: Path) -> None:
    write_run(tmp_path, "masklam", "cheetah-run", 1, 0.25)
    write_run(tmp_path, "masklam", "cheetah-run", 2, 0.75, data="other")
    found = entry(tmp_path, seeds=2)
    assert found.text == "0.2500 / 0.7500" and found.notes == [
        "different data sets, masks or weights behind them, not averaged"
    ]
    table = make_figures.aggregate_table(context(tmp_path, 2)).table
    summed = rows(table)["MaskLAM@GT"][column(table, "DCS NMSE distr.")]
    assert summed.text == "-" and "different data sets, masks or weights behind them, not averaged" in summed.notes
    assert iqm_rows(tmp_path) == []


def iqm_rows(folder: Path) -> list:
    item = make_figures.interval_figure(context(folder, 2))
    assert bool(item.missing) == (item.table is None)
    return [] if item.table is None else item.table.rows


def test_different_commits_are_marked(tmp_path: Path) -> None:
    write_run(tmp_path, "masklam", "cheetah-run", 1, 0.25)
    write_run(tmp_path, "masklam", "cheetah-run", 2, 0.75, commit=B + "+changes")
    found = entry(tmp_path, seeds=2)
    assert found.text == "0.5000 ± 0.3536" and found.notes == [f"different commits: {A[:8]}, {B[:8]}+changes"]
    assert iqm_rows(tmp_path)[0][0].notes == found.notes


def test_the_papers_mean_and_bold_are_over_the_same_tasks(tmp_path: Path) -> None:
    """A task whose runs must not be averaged is in neither mean; a method with fewer tasks is not the best."""
    write_run(tmp_path, "masklam", "cheetah-run", 1, 0.25)
    write_run(tmp_path, "masklam", "cheetah-run", 2, 0.75, data="other")
    write_run(tmp_path, "masklam", "walker-run", 1, 0.5)
    write_run(tmp_path, "lapo", "cheetah-run", 1, 0.1)
    table = make_figures.aggregate_table(context(tmp_path, 1)).table
    lines, place = rows(table), column(table, "DCS NMSE distr.")
    assert lines["MaskLAM@GT"][place].text == "0.5000"
    assert lines["MaskLAM@GT, paper"][place].text == "0.1692 ± 0.0049"  # walker-run alone
    assert not lines["LAPO"][place].bold and not lines["MaskLAM@GT"][place].bold


def test_other_weights_and_devices_are_other_runs(tmp_path: Path) -> None:
    for seed, name in ((1, "a"), (2, "b")):
        write_run(tmp_path, "laof", "cheetah-run", seed, 0.5, identity={"raft_weights_hash": name})
        write_run(tmp_path, "lapo", "cheetah-run", seed, 0.5, identity={"device_type": {"a": "cpu", "b": "cuda"}[name]})
    found = context(tmp_path, 2)
    assert found.cell("LAOF", "cheetah-run").mixed
    cell = found.cell("LAPO", "cheetah-run")
    assert not cell.mixed and cell.notes == ["some on a GPU, some on a CPU"]


def test_rows_on_other_data_are_marked(tmp_path: Path) -> None:
    for script, data in (("lapo", "old"), ("laof", "new"), ("masklam", "new")):
        write_run(tmp_path, script, "cheetah-run", 1, 0.5, data=data)
    table, _ = make_figures.task_table(context(tmp_path, 1), "nmse", "dcs", "distractor")
    assert rows(table)["LAPO"][0].notes == ["another data set than the other rows"]
    assert not rows(table)["LAOF"][0].notes and not rows(table)["MaskLAM@GT"][0].notes


def test_the_commit_of_a_held_model_counts(tmp_path: Path) -> None:
    write_run(tmp_path, "lapo", "cheetah-run", 1, 0.5, held=128_000, commit=B, num_labels=2000)
    notes = context(tmp_path, 1).cell("LAPO", "cheetah-run", held=128_000, num_labels=2000).notes
    assert notes == [f"different commits: {A[:8]}, {B[:8]}"]


def test_an_unfinished_held_run_is_said(tmp_path: Path) -> None:
    source = write_run(tmp_path, "lapo", "cheetah-run", 1, 0.5)
    for seed, value in ((1, 0.5), (2, None)):
        write_run(tmp_path, "lapo", "cheetah-run", seed, value, name="held", held=128_000, num_labels=2000,
                  lam_from=str(source))  # fmt: skip
    notes = context(tmp_path, 2).cell("LAPO", "cheetah-run", held=128_000, num_labels=2000).notes
    assert notes == ["seed 2 is not finished", "1 of 2 seeds"]


def test_uncommitted_changes_are_marked(tmp_path: Path) -> None:
    write_run(tmp_path, "masklam", "cheetah-run", 1, 0.25, commit=A + "+changes")
    assert entry(tmp_path, seeds=1).notes == ["made from uncommitted changes"]


def test_other_settings_are_not_mixed_in(tmp_path: Path) -> None:
    """The paper's settings win; another setting alone is shown with a mark; a factor makes another cell."""
    write_run(tmp_path, "masklam", "cheetah-run", 1, 0.75, name="long", lam_updates=99)
    assert entry(tmp_path, seeds=1).notes == ["with lam-updates=99"] and entry(tmp_path, seeds=1).text == "0.7500"
    write_run(tmp_path, "masklam", "cheetah-run", 1, 0.25, name="default")
    write_run(tmp_path, "masklam", "cheetah-run", 1, 0.9, name="no", loss_mask=False)
    write_run(tmp_path, "masklam", "cheetah-run", 1, 0.8, name="clean", distractors=False)
    write_run(tmp_path, "masklam", "cheetah-run", 1, 0.7, name="sam", mask_source="sam")
    found = entry(tmp_path, seeds=1)
    assert found.text == "0.2500" and found.notes == ["1 more with lam-updates=99 left out"]
    write_run(tmp_path, "masklam", "cheetah-run", 1, 0.3, name="again")
    assert "seed 1 is there twice" in " ".join(entry(tmp_path, seeds=1).notes)
    table = make_figures.aggregate_table(context(tmp_path, 1)).table
    assert rows(table)["MaskLAM@SAM"][column(table, "DCS NMSE distr.")].text == "0.7000"
    assert rows(table)["MaskLAM@GT"][column(table, "DCS NMSE clean")].text == "0.8000"


def test_set_moves_what_is_usual(tmp_path: Path) -> None:
    """Runs of a grid with --set are its cells without a mark, also where it changes what a sweep varies."""
    write_run(tmp_path, "lapo", "cheetah-run", 1, 0.5, name="small", lam_updates=9, num_labels=60)
    write_run(tmp_path, "lapo", "cheetah-run", 1, 0.6, name="fewer", lam_updates=9, num_labels=30)
    found = context(tmp_path, 1)
    assert found.cell("LAPO", "cheetah-run").runs == []
    found.args.set = ["lam-updates=9", "num-labels=60", "slot-updates=3", "log-every=7"]
    assert found.cell("LAPO", "cheetah-run").values("eval/nmse") == [0.5]
    assert found.cell("LAPO", "cheetah-run").notes == []
    assert found.cell("LAPO", "cheetah-run", num_labels=30).values("eval/nmse") == [0.6]


def test_the_papers_policy_of_laom_labels_is_expected(tmp_path: Path) -> None:
    write_run(tmp_path, "laom_labels", "cheetah-run", 1, 0.5, name="large", policy_scale=32)
    found = context(tmp_path, 1)
    assert found.cell("LAOM-Labels", "cheetah-run").notes == []
    write_run(tmp_path, "laom_labels", "walker-run", 1, 0.5)
    assert context(tmp_path, 1).cell("LAOM-Labels", "walker-run").notes == ["with policy-scale=4"]


def test_no_runs_is_a_message_with_the_command(tmp_path: Path) -> None:
    (tmp_path / "lapo/cheetah-run/default/seed1").mkdir(parents=True)
    with pytest.raises(UserError, match=r"Start with: python -m benchmarks\.paper main-table"):
        make_figures.main(make_figures.Args(tmp_path, tmp_path / "out"))
    write_run(tmp_path, "masklam", "cheetah-run", 1, quick=True)
    with pytest.raises(UserError, match="there are 1 with --quick"):
        make_figures.main(make_figures.Args(tmp_path, tmp_path / "out"))
    done = subprocess.run(
        [sys.executable, "make_figures.py", "--runs-dir", str(tmp_path)], cwd=ROOT, capture_output=True
    )
    assert done.returncode == 1 and b"make_figures.py: error:" in done.stderr


# --- sweeps


def test_sweeps_and_ablations(tmp_path: Path) -> None:
    """Points by hand: a value with a run per seed, a missing one, and the default, which is the main table's run."""
    for seed in (1, 2):
        for dim in (32, 128, 512):
            write_run(tmp_path, "masklam", "cheetah-run", seed, dim / 1000 + seed / 100, name=f"{dim}", latent_dim=dim)
        write_run(tmp_path, "masklam", "cheetah-run", seed, 0.9, name="off", loss_mask=False)
        write_run(tmp_path, "masklam", "cheetah-run", seed, 0.95, name="off32", loss_mask=False, latent_dim=32)
        write_run(tmp_path, "masklam", "cheetah-run", seed, 0.4, name="in", loss_mask=False, input_mask=True)
    found = context(tmp_path, 2)
    lines = {item.name: item for item in make_figures.sweep_figures(found)}
    table = [[entry.text for entry in row] for row in lines["latent_dim"].table.rows]
    assert table == [
        ["cheetah-run", "with masked loss", "32", "0.0470 ± 0.0071"],
        ["cheetah-run", "with masked loss", "128", "0.1430 ± 0.0071"],
        ["cheetah-run", "with masked loss", "512", "0.5270 ± 0.0071"],
        ["cheetah-run", "without masked loss", "32", "0.9500 ± 0.0000"],
        ["cheetah-run", "without masked loss", "128", "0.9000 ± 0.0000"],
    ]
    assert lines["latent_dim"].pictures[0].exists() and not lines["latent_dim"].missing
    assert "python -m benchmarks.paper occlusion --seeds 2" in lines["occlusion"].command and lines["occlusion"].missing
    item = make_figures.ablation_figure(found)
    values = {row[0].text: (row[1].text, row[2].text) for row in item.table.rows}
    assert values["MaskLAM"] == ("-", "0.1430 ± 0.0071")
    assert values["w/o loss masking"] == ("--no-loss-mask", "0.9000 ± 0.0000")
    assert values["w/ input masking"] == ("--input-mask --no-loss-mask", "0.4000 ± 0.0000")
    assert values["w/ k=1"][1] == "-" and item.pictures[0].exists()


def test_the_mean_over_tasks_needs_every_task(tmp_path: Path, monkeypatch) -> None:
    """A point or a baseline that a task lacks is not drawn in the mean of the tasks; one seed has no band."""
    for env, values in (("push", (-1, 0, 1)), ("reach", (0, 1))):
        for value in values:
            write_run(tmp_path, "masklam", env, 1, 0.5 + value / 10, name=str(value), mask_dilation=value)
        write_run(tmp_path, "laof", env, 1, 0.7)
    write_run(tmp_path, "lapo", "reach", 1, 0.9)
    figures = []
    monkeypatch.setattr(make_figures, "save", lambda figure, path: figures.append(figure) or path)
    found = context(tmp_path, 1)
    items = make_figures.sweep_figures(found)
    item = next(item for item in items if item.name == "mask_dilation")
    assert [row[2].text for row in item.table.rows if row[0].text == "push"] == ["-1", "0", "1", "dashed"]
    mean, first, second = figures[-1].axes
    assert [axis.get_title() for axis in (mean, first, second)] == ["DMW, mean of 2 tasks", "reach", "push"]
    drawn = {
        axis.get_title(): {line.get_label(): line.get_xydata().tolist() for line in axis.lines}
        for axis in figures[-1].axes
    }
    assert drawn["DMW, mean of 2 tasks"]["MaskLAM@GT"] == [[0, 0.5], [1, 0.6]]
    assert set(drawn["DMW, mean of 2 tasks"]) == {"MaskLAM@GT", "LAOF"} and "LAPO" in drawn["reach"]
    assert len(drawn["push"]["MaskLAM@GT"]) == 3


def test_label_budgets_hold_the_model_fixed(tmp_path: Path) -> None:
    """The default budget is the main table's run; others have its model, and a run with its own is not mixed in."""
    for seed in (1, 2):
        write_run(tmp_path, "laom_labels", "cheetah-run", seed, score=0.5, name="whole", policy_scale=32)
        write_run(tmp_path, "laom_labels", "cheetah-run", seed, score=0.2, name="held", held=128_000, num_labels=2000,
                  policy_scale=32)  # fmt: skip
    write_run(tmp_path, "laom_labels", "cheetah-run", 2, score=0.9, name="own", num_labels=2000, policy_scale=32)
    write_run(tmp_path, "lapo", "cheetah-run", 1, score=0.3)
    write_run(tmp_path, "lapo", "cheetah-run", 1, score=0.1, name="own", num_labels=4000)
    item = make_figures.sweep_figures(context(tmp_path, 2))[0]
    table = {(row[1].text, row[2].text): row[3] for row in item.table.rows}
    assert table["LAOM-Labels", "128000"].text == "0.5000 ± 0.0000" and not table["LAOM-Labels", "128000"].notes
    assert table["LAOM-Labels", "2000"].text == "0.2000 ± 0.0000"
    assert table["LAOM-Labels", "2000"].notes == ["1 more with policy-scale=32 left out"]
    assert table["LAPO", "4000"].notes == ["with a latent action model of its own", "1 of 2 seeds"]
    assert item.pictures[0].exists()


def test_the_score_is_the_one_that_most_runs_have(tmp_path: Path) -> None:
    for seed in (1, 2, 3):
        directory = write_run(tmp_path, "lapo", "cheetah-run", seed)
        result = json.loads((directory / "result.json").read_text())
        result["metrics"]["eval/return"] = 5.0
        if seed > 1:
            result["metrics"]["eval/normalised_paper"] = None
        if seed > 2:
            result["metrics"]["eval/normalised_dataset"] = None
        (directory / "result.json").write_text(json.dumps(result))
    found = find_runs(tmp_path)
    assert make_figures.score_name("dcs", found) == "eval/normalised_dataset"
    assert make_figures.score_name("dcs", found[:1]) == "eval/normalised_paper"
    assert make_figures.score_name("dcs", found[2:]) == "eval/return"
    assert "short episodes" in make_figures.score_label("dcs", found[2:])
    assert make_figures.score_name("dmw", found) == "eval/success_rate"


def test_both_suites_count_alike(tmp_path: Path) -> None:
    """The paper's single number: the mean of the suites' means, however many tasks each has."""
    for env, value in (("cheetah-run", 0.1), ("walker-run", 0.3), ("push", 0.6)):
        write_run(tmp_path, "lapo", env, 1, value)
    table = make_figures.aggregate_table(context(tmp_path, 1)).table
    lines, place = rows(table), column(table, "both NMSE distr.")
    assert lines["LAPO"][place].text == "0.4000"  # (0.2 + 0.6) / 2
    assert set(lines["LAPO"][place].notes) == {"over 2 of 4 tasks", "over 1 of 10 tasks"}
    assert lines["MaskLAM@GT, paper"][place].text == "0.1471 ± 0.0064"  # of its tables of tasks, by hand
    assert lines["LAPO"][column(table, "both NMSE clean")].text == "-"
    write_run(tmp_path, "masklam", "cheetah-run", 1, 0.1)  # one suite alone: no number of ours, the paper's stays whole
    table = make_figures.aggregate_table(context(tmp_path, 1)).table
    both = rows(table)["MaskLAM@GT"][place], rows(table)["MaskLAM@GT, paper"][place]
    assert [entry.text for entry in both] == ["-", "0.1471 ± 0.0064"] and not both[1].notes


# --- pictures


class Planted(nn.Module):
    """An encoder whose last block answers to one colour only, in one of its channels, and nothing else."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 4, 3, padding=1)
        self.last = nn.Conv2d(4, 6, 3, stride=4, padding=1)
        nn.init.zeros_(self.first.weight), nn.init.zeros_(self.first.bias)
        nn.init.zeros_(self.last.weight), nn.init.zeros_(self.last.bias)
        with torch.no_grad():
            self.first.weight[2, 0, 1, 1] = 1.0
            self.last.weight[5, 2, 1, 1], self.last.weight[1, 2, 1, 1] = 2.0, -3.0  # the ReLU cuts the second off

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.first(x)).flatten(1)


def test_eigen_cam_finds_a_planted_moving_square() -> None:
    encoder, frames = Planted(), torch.zeros(10, 3, 64, 64)
    frames[:, 1:] = torch.rand(10, 2, 64, 64, generator=torch.Generator().manual_seed(0))  # what it does not answer to
    corners = [(4 * t, 48 - 4 * t) for t in range(10)]
    for t, (top, left) in enumerate(corners):
        frames[t, 0, top : top + 8, left : left + 8] = 1.0
    found = make_figures.last_activations(encoder, lambda: encoder(frames))
    assert found.shape == (10, 6, 16, 16) and found.min() == 0  # of the last block, after the ReLU
    saliency = make_figures.eigen_cam(found)
    for t, (top, left) in enumerate(corners):
        expected = torch.zeros(16, 16)
        expected[top // 4 : top // 4 + 2, left // 4 : left // 4 + 2] = 1.0
        assert torch.allclose(saliency[t], expected, atol=1e-5), t
    drawn = make_figures.heat(frames, saliency)
    assert drawn.shape == (10, 64, 64, 3)
    red = drawn[..., 0].astype(int) - drawn[..., 2].astype(int)
    for t, (top, left) in enumerate(corners):
        away = red[t, (top + 32) % 64 : (top + 32) % 64 + 8, (left + 32) % 64 : (left + 32) % 64 + 8]
        assert red[t, top + 2 : top + 6, left + 2 : left + 6].min() > 0 > away.max()
    assert not make_figures.eigen_cam(torch.zeros(2, 3, 4, 4)).any()


def test_eigen_cam_is_the_first_principal_direction() -> None:
    """Against numpy, with channels that disagree: the first right singular vector of (places, channels)."""
    activations = torch.rand(3, 5, 4, 6, generator=torch.Generator().manual_seed(1))
    found = make_figures.eigen_cam(activations)
    for one, saliency in zip(activations.double().numpy(), found.numpy()):
        matrix = one.reshape(5, 24).T
        values, vectors = np.linalg.eigh(matrix.T @ matrix)
        projected = np.abs(matrix @ vectors[:, values.argmax()])
        expected = (projected - projected.min()) / (projected.max() - projected.min())
        np.testing.assert_allclose(saliency, expected.reshape(4, 6), atol=1e-5)


@pytest.mark.parametrize("script", methods.SCRIPTS)
def test_load_model(script: str, tmp_path: Path) -> None:
    """The trained model of every method comes back from its run directory; other weights are refused by name."""
    module, args, model = methods.build(script, size=32)
    changes = {key: value for key, value in runs.jsonable(args).items() if key not in ("seed", "env")}
    directory = write_run(tmp_path, script, "cheetah-run", 1, **changes)
    torch.save({"model": model.state_dict()}, directory / "lam.pt")
    result = json.loads((directory / "result.json").read_text())
    result["dataset"] = {"train": {"plan": {"image_size": 32}}}
    (directory / "result.json").write_text(json.dumps(result))
    run = find_runs(tmp_path)[0]
    loaded_module, loaded_args, loaded = results.load_model(run)
    assert loaded_module is module and loaded_args.latent_dim == args.latent_dim and not loaded.training
    expected = model.state_dict()
    assert all(torch.equal(value, expected[name]) for name, value in loaded.state_dict().items())
    torch.save({"model": {}}, directory / "lam.pt")
    with pytest.raises(UserError, match=re.escape(str(directory / "lam.pt"))):
        results.load_model(run)


def test_umap_is_seeded_and_optional(tmp_path: Path, monkeypatch) -> None:
    pytest.importorskip("umap")
    directory = write_run(tmp_path, "lapo", "cheetah-run", 1)
    rng = np.random.default_rng(0)
    np.savez(
        directory / "latents.npz", z=rng.random((60, 8), np.float32), action=rng.random((60, 6), np.float32), step=1
    )
    found = context(tmp_path, 1)
    item = make_figures.umap_figure(found, "cheetah-run")
    first = item.pictures[0].read_bytes()
    assert make_figures.umap_figure(found, "cheetah-run").pictures[0].read_bytes() == first
    monkeypatch.setitem(sys.modules, "umap", None)
    assert "pip install umap-learn" in make_figures.umap_figure(found, "cheetah-run").missing
    (directory / "latents.npz").unlink()
    assert "older versions" in make_figures.umap_figure(found, "cheetah-run").missing


# --- tables and page


def test_footnotes_are_lettered_once(tmp_path: Path) -> None:
    table = Table("A & B", ["method", "x_1"], caption="50%")
    table.rows = [[Entry("one"), Entry("0.1 ± 0.2", ["few"], True)], [Entry("two"), Entry("-", ["few", "other"])]]
    table.rows += [[Entry("many"), Entry("1", [str(i) for i in range(30)])]]
    letters = list(table.footnotes().values())
    assert letters[:2] == ["a", "b"] and len(set(letters)) == 32 and letters[25:28] == ["z", "aa", "ab"]
    text = table.markdown()
    assert "**0.1 ± 0.2** <sup>a</sup>" in text and "- <sup>a,b</sup>" in text and text.count("<sup>b</sup> other") == 1
    lines = [line for line in text.splitlines() if line.startswith("|")]
    assert all(len(a) == len(b) for a, b in pairwise(lines))
    latex = table.latex()
    assert r"\caption{A \& B. 50\%}" in latex and r"x\_1" in latex and r"\textbf{0.1 $\pm$ 0.2}" in latex
    assert latex.count("&") - latex.count(r"\&") == 4 and r"\textsuperscript{a,b}" in latex
    written = table.write(tmp_path, "t")
    assert [path.suffix for path in written] == [".md", ".tex", ".png"] and all(path.exists() for path in written)


def test_the_page_escapes_and_embeds(tmp_path: Path) -> None:
    table = Table("t", ["<m>"], [[Entry("a<b", ["x & y"])]])
    (tmp_path / "p.png").write_bytes(b"\x89PNG")
    items = [Item("one", "One", "Tables", "python <x>", table=table), Item("two", "Two", "P", "c", missing="no <runs>")]
    items.append(Item("three", "Three", "P", "c", table=table, pictures=[tmp_path / "p.png"]))
    text = page(tmp_path / "index.html", "T", "about", items).read_text()
    assert (
        "a&lt;b<sup>a</sup>" in text
        and "x &amp; y" in text
        and "python &lt;x&gt;" in text
        and "no &lt;runs&gt;" in text
    )
    assert text.count("a&lt;b<sup>a</sup>") == 2 and text.count("<details>") == 1  # below its picture, folded
    assert 'src="data:image/png;base64,iVBORw=="' in text and "http" not in text and 'name="viewport"' in text
