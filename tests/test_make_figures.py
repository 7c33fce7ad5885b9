"""Tables and figures from run directories made by hand: numbers, marks for what is wrong, Eigen-CAM, the page."""

import dataclasses
import json
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import methods
import numpy as np
import pytest
import torch
from methods import write_run
from PIL import Image
from torch import nn

import make_figures
import reproduce
from common import pictures, report, store
from common.cli import UserError
from common.dataset import Dataset
from common.report import Entry, Item, Stat, average, find_runs, iqm_interval, page, stat

A, B = "a" * 40, "b" * 40


@pytest.fixture(autouse=True)
def few_resamples(monkeypatch) -> None:
    monkeypatch.setattr(make_figures, "BOOTSTRAP", 200)


def context(folder: Path, seeds: int = 3, quick: bool = False) -> make_figures.Context:
    out = folder / "figures"
    out.mkdir(exist_ok=True)
    args = make_figures.Args(folder, out, quick, seeds)
    return make_figures.Context(args, [run for run in find_runs(folder)[0] if run.args["quick"] == quick])


def rows(item: Item) -> dict[str, list[Entry]]:
    return {row[0].text: row[1:] for row in item.rows}


def texts(item: Item, width: int | None = None) -> dict[str, list[str]]:
    """The first texts of each row."""
    return {name: [entry.text for entry in entries[:width]] for name, entries in rows(item).items()}


def tables(folder: Path, seeds: int = 3, quick: bool = False) -> dict[str, Item]:
    return {item.name: item for item in make_figures.score_tables(context(folder, seeds, quick))}


def column(item: Item, name: str) -> int:
    return item.head.index(name) - 1


def test_tables_have_the_numbers_computed_by_hand(tmp_path: Path) -> None:
    """Two tasks, three seeds: per task mean and deviation; in the aggregate their means; the paper's over the same."""
    values = {"cheetah-run": [0.1, 0.2, 0.3], "walker-run": [0.5, 0.5, 0.8]}
    for env, three in values.items():
        for seed, value in enumerate(three, 1):
            write_run(tmp_path, "masklam", env, seed, value)
            write_run(tmp_path, "lapo", env, seed, value + 0.1)
    of_name = tables(tmp_path)
    per_task = of_name["nmse_dcs_distractor"]
    lines, numbers = rows(per_task), texts(per_task)
    assert per_task.head[1:] == ["cheetah-run", "walker-run", "hopper-hop", "humanoid-walk"]
    assert numbers["MaskLAM@GT"] == ["0.2000 ± 0.1000", "0.6000 ± 0.1732", "-", "-"]
    assert numbers["LAPO"][:2] == ["0.3000 ± 0.1000", "0.7000 ± 0.1732"]
    assert numbers["MaskLAM@GT, untrained"][:2] == ["0.3250 ± 0.1000", "0.7250 ± 0.1732"]
    assert numbers["MaskLAM@GT, paper"][0] == "0.1171 ± 0.0007"  # the paper's table of DCS
    assert numbers["LAPO, paper"][3] == "0.6766 ± 0.0382"
    assert [entry.bold for entry in lines["MaskLAM@GT"]] == [True, True, False, False] and not lines["LAPO"][0].bold
    assert not any(entry.notes for entry in lines["MaskLAM@GT"])
    assert len(of_name) == 9 and texts(of_name["return_dmw_vanilla"])["MaskLAM@GT, paper"][0] != "-"

    table = of_name["aggregate"]
    lines, numbers, place = rows(table), texts(table), column(table, "DCS NMSE distr.")
    assert numbers["MaskLAM@GT"][place] == "0.4000 ± 0.1366"  # (0.2 + 0.6) / 2, (0.1 + 0.1732) / 2
    assert lines["MaskLAM@GT"][place].notes == ["over 2 of 4 tasks"] and lines["MaskLAM@GT"][place].bold
    assert numbers["MaskLAM@GT, untrained"][place] == "0.5250 ± 0.1366"
    assert numbers["LAPO, paper"][place] == "0.3629 ± 0.0146"  # (0.3836 + 0.3423) / 2, (0.0220 + 0.0071) / 2
    assert lines["LAPO, paper"][place].notes == ["the paper's mean over the same tasks as ours"]
    score = column(table, "DCS NR distr.")
    assert numbers["LAPO"][score] == "0.2500 ± 0.0000" and numbers["LAPO, data's expert"][score] == "0.1250 ± 0.0000"
    assert numbers["LAPO"][column(table, "DCS NMSE clean")] == "-"
    cost = texts(make_figures.cost_table(context(tmp_path)))["LAPO"]
    assert cost == ["DCS", "a CPU", "6", "1.60", "0.00", "1.00", "0.50", "0.00", "0.10", "2.5", "80", "6.3"]


def test_the_papers_aggregates_follow_from_its_tasks() -> None:
    """The published means over all tasks, from the published numbers of the tasks."""
    columns = make_figures.summary_columns(dict.fromkeys(make_figures.SUITES, "eval/normalised_paper"))
    for method in reproduce.METHODS:
        for one in columns:
            suite, word, _ = one.head.lower().split()
            mean, std = make_figures.PAPER["aggregate"][method][f"{suite}_{word}_{one.render}"]
            published = make_figures.published(method, one, one.suites)
            assert published == (pytest.approx(mean, abs=6e-4), pytest.approx(std, abs=6e-4)), (method, one.head)


def test_statistics() -> None:
    assert stat([1.0, 2.0, 4.0]) == Stat(7 / 3, statistics.stdev([1, 2, 4])) and np.isnan(stat([3.0]).std)
    assert np.isnan(average([stat([1.0, 3.0]), stat([5.0])]).std)
    eight = [[0.0, 1.0, 2.0, 100.0], [3.0, 4.0, 5.0, -50.0]]
    point, low, high = iqm_interval(eight, 2000)
    assert point == (1 + 2 + 3 + 4) / 4  # -50, 0 and 5, 100 are cut off
    assert low < point < high and iqm_interval(eight, 2000) == (point, low, high)
    # Stratified: if each task's runs agree, every resample is the same, however far the tasks are apart.
    assert iqm_interval([[0.0, 0.0], [1.0, 1.0]], 500) == (0.5, 0.5, 0.5)
    assert np.isnan(iqm_interval([[0.1], [0.2, 0.3]], 100)[1]) and iqm_interval([], 100) is None


def test_both_suites_count_alike(tmp_path: Path) -> None:
    """The paper's single number: the mean of the suites' means, however many tasks each has."""
    for env, value in (("cheetah-run", 0.1), ("walker-run", 0.3), ("push", 0.6)):
        write_run(tmp_path, "lapo", env, 1, value)
    write_run(tmp_path, "masklam", "cheetah-run", 1, 0.1)  # one suite alone: no number of ours, the paper's stays whole
    table = tables(tmp_path, 1)["aggregate"]
    lines, place = rows(table), column(table, "both NMSE distr.")
    assert lines["LAPO"][place].text == "0.4000"  # (0.2 + 0.6) / 2
    assert set(lines["LAPO"][place].notes) == {"over 2 of 4 tasks", "over 1 of 10 tasks"}
    both = lines["MaskLAM@GT"][place], lines["MaskLAM@GT, paper"][place]
    assert [entry.text for entry in both] == ["-", "0.1471 ± 0.0064"]  # of its tables of tasks, by hand
    assert not both[1].notes and lines["LAPO"][column(table, "both NMSE clean")].text == "-"


def entry(folder: Path, seeds: int = 3) -> Entry:
    return rows(tables(folder, seeds)["nmse_dcs_distractor"])["MaskLAM@GT"][0]


def test_too_few_seeds_and_unfinished_runs_are_marked(tmp_path: Path) -> None:
    write_run(tmp_path, "masklam", "cheetah-run", 2, None)
    assert entry(tmp_path) == Entry("-", ["seed 2 is not finished"])
    write_run(tmp_path, "masklam", "cheetah-run", 1, 0.25)
    assert entry(tmp_path) == Entry("0.2500", ["seed 2 is not finished", "1 of 3 seeds"])


def edit_result(directory: Path, edit: Callable[[dict[str, Any]], None]) -> None:
    result = store.read_json(directory / "result.json")
    edit(result)
    store.write_json(directory / "result.json", result, with_hash=True)


def test_runs_of_stage_1_alone_are_told(tmp_path: Path) -> None:
    """They have no return, and cost less than whole runs."""

    def end_early(result: dict[str, Any]) -> None:
        result["metrics"] = {name: value for name, value in result["metrics"].items() if "nmse" in name}
        result["stages"] = {"lam": result["stages"]["lam"]}

    edit_result(write_run(tmp_path, "masklam", "cheetah-run", 1, 0.25), end_early)
    write_run(tmp_path, "masklam", "cheetah-run", 2, 0.25)
    assert entry(tmp_path, seeds=2) == Entry("0.2500 ± 0.0000", [])
    row = rows(tables(tmp_path, 2)["aggregate"])["MaskLAM@GT"]
    assert row[column(tables(tmp_path, 2)["aggregate"], "DCS NR distr.")].notes[-1] == "1 of 2 runs have it"
    cost = make_figures.cost_table(context(tmp_path))
    assert rows(cost)["MaskLAM@GT"][column(cost, "runs")].text == "1"


def test_a_damaged_file_is_named_and_loses_no_figure(tmp_path: Path, capsys) -> None:
    write_run(tmp_path, "lapo", "cheetah-run", 1, 0.25)
    (write_run(tmp_path, "masklam", "cheetah-run", 1) / "result.json").write_text('{"metrics": ')
    write_run(tmp_path, "laof", "cheetah-run", 2).rename(tmp_path / "laof/cheetah-run/default/seedling")
    make_figures.main(make_figures.Args(tmp_path, tmp_path / "out"))
    printed, written = capsys.readouterr().out, (tmp_path / "out/index.html").read_text(encoding="utf-8")
    assert f"{tmp_path}/masklam/cheetah-run/default/seed1/result.json cannot be read" in printed
    assert printed.count("cannot be read") == 2 == written.count("cannot be read") and "0.2500" in written


def test_different_data_or_weights_are_never_averaged(tmp_path: Path) -> None:
    write_run(tmp_path, "masklam", "cheetah-run", 1, 0.25)
    write_run(tmp_path, "masklam", "cheetah-run", 2, 0.75, identity={"test_hash": "other"})
    write_run(tmp_path, "masklam", "walker-run", 1, 0.5)
    for seed in (1, 2):
        write_run(tmp_path, "laof", "cheetah-run", seed, 0.5, identity={"raft_weights_hash": str(seed)})
    write_run(tmp_path, "lapo", "cheetah-run", 1, 0.1)
    note = "seeds differ in test_hash, not averaged"
    assert entry(tmp_path, seeds=1) == Entry("-", [note])
    table = tables(tmp_path, 1)["aggregate"]
    lines, place = rows(table), column(table, "DCS NMSE distr.")
    assert lines["LAOF"][place] == Entry("-", ["seeds differ in raft_weights_hash, not averaged (cheetah-run)"])
    assert lines["MaskLAM@GT"][place] == Entry("0.5000", ["over 1 of 4 tasks", f"{note} (cheetah-run)"])
    assert lines["MaskLAM@GT, paper"][place].text == "0.1692 ± 0.0049"  # the same: walker-run alone
    assert not lines["LAPO"][place].bold  # over another task
    intervals = make_figures.interval_figure(context(tmp_path, 1))
    assert rows(intervals)["MaskLAM@GT"][place].text == "0.5000" and "LAOF" not in rows(intervals)
    for seed, data in ((1, "d"), (2, "other")):
        write_run(tmp_path, "masklam", "cheetah-run", seed, identity={"test_hash": data}, latent_dim=32)
    sweep = make_figures.experiment_figure(context(tmp_path, 1), "latent-dim")
    assert sweep.missing and not sweep.pictures and not sweep.rows


def test_different_commits_settings_devices_and_data_are_marked(tmp_path: Path) -> None:
    write_run(tmp_path, "masklam", "cheetah-run", 1, 0.25, commit=A + "+changes")
    assert entry(tmp_path, seeds=1).notes == ["made from uncommitted changes"]
    cuda = {"device_type": "cuda"}
    write_run(tmp_path, "masklam", "cheetah-run", 2, 0.75, commit=B, identity=cuda, variant="default", lam_updates=9)
    notes = ["seeds differ in device_type, lam_updates", f"different commits: {A[:8]}+changes, {B[:8]}"]
    assert entry(tmp_path, seeds=2) == Entry("0.5000 ± 0.3536", notes)
    intervals = make_figures.interval_figure(context(tmp_path, 2))
    assert rows(intervals)["MaskLAM@GT"][column(intervals, "DCS NMSE distr.")].notes[-2:] == notes
    later = write_run(tmp_path, "masklam", "walker-run", 1, commit=A)
    edit_result(later, lambda result: result["stages"]["lam"].update(commit=B))  # trained before, and gone on with
    assert report.read_run(later).commits == {A[:8], B[:8]}
    for script, data in (("lapo", "old"), ("laof", "d")):
        write_run(tmp_path, script, "cheetah-run", 1, identity={"train_hash": data})
    lines = rows(tables(tmp_path, 1)["nmse_dcs_distractor"])
    assert lines["LAPO"][0].notes == ["another data set than the other rows"] and not lines["LAOF"][0].notes


def test_runs_are_found_by_their_names(tmp_path: Path) -> None:
    """Each experiment's runs have their place; what no experiment has is a row of its own, clean beside distractors."""
    write_run(tmp_path, "masklam", "cheetah-run", 1, 0.25)
    write_run(tmp_path, "masklam", "cheetah-run", 1, 0.9, loss_mask=False)  # an ablation, no row
    write_run(tmp_path, "masklam", "cheetah-run", 1, 0.8, distractors=False)
    write_run(tmp_path, "masklam", "cheetah-run", 1, 0.7, mask_source="sam")
    write_run(tmp_path, "laom_labels", "cheetah-run", 1, 0.6, policy_scale=32)  # the paper's, at its scale
    write_run(tmp_path, "masklam", "cheetah-run", 1, 0.5, variant="mine", lam_updates=9)
    write_run(tmp_path, "masklam", "cheetah-run", 1, 0.4, lam_updates=7)
    write_run(tmp_path, "masklam", "cheetah-run", 1, 0.3, lam_updates=7, distractors=False)
    (tmp_path / "masklam").rename(tmp_path / "x")
    write_run(tmp_path, "masklam", "cheetah-run", 1, 0.2)
    (tmp_path / "masklam").rename(tmp_path / "my_masklam")
    (tmp_path / "x").rename(tmp_path / "masklam")
    table = tables(tmp_path, 1)["aggregate"]
    places = [column(table, f"DCS NMSE {word}") for word in ("distr.", "clean")]
    numbers = {name: [row[place].text for place in places] for name, row in rows(table).items() if "," not in name}
    assert {name: pair for name, pair in numbers.items() if pair != ["-", "-"]} == {
        "LAOM-Labels": ["0.6000", "-"],
        "MaskLAM@GT": ["0.2500", "0.8000"],
        "MaskLAM@SAM": ["0.7000", "-"],
        "masklam mine": ["0.5000", "-"],
        "masklam lam-updates=7": ["0.4000", "0.3000"],
        "my_masklam": ["0.2000", "-"],
    }
    write_run(tmp_path, "lapo", "cheetah-run", 1, 0.5, quick=True)
    quick = tables(tmp_path, 1, quick=True)["aggregate"]
    assert rows(quick)["LAPO"][places[0]].text == "0.5000" and "my_masklam" not in rows(quick)


def test_no_runs_is_a_message_with_the_command(tmp_path: Path) -> None:
    (tmp_path / "lapo/cheetah-run/default/seed1").mkdir(parents=True)
    with pytest.raises(UserError, match=r"Start with: python reproduce\.py main-table"):
        make_figures.main(make_figures.Args(tmp_path, tmp_path / "out"))
    write_run(tmp_path, "masklam", "cheetah-run", 1, quick=True)
    with pytest.raises(UserError, match="there are 1 with --quick"):
        make_figures.main(make_figures.Args(tmp_path, tmp_path / "out"))


def test_sweeps_and_ablations(tmp_path: Path) -> None:
    """Points by hand: a value with a run per seed, one that is not the paper's, and the default's run."""
    for seed in (1, 2):
        for dim in (32, 48, 128):
            write_run(tmp_path, "masklam", "cheetah-run", seed, dim / 1000 + seed / 100, latent_dim=dim)
        write_run(tmp_path, "masklam", "cheetah-run", seed, 0.9, loss_mask=False)
        write_run(tmp_path, "masklam", "cheetah-run", seed, 0.95, loss_mask=False, latent_dim=32)
        write_run(tmp_path, "masklam", "cheetah-run", seed, 0.4, loss_mask=False, input_mask=True)
    there = context(tmp_path, 2)
    item = make_figures.experiment_figure(there, "latent-dim")
    assert texts(item, 1) == {
        "with masked loss, 32": ["0.0470 ± 0.0071"],
        "with masked loss, 48": ["0.0630 ± 0.0071"],
        "with masked loss, 128": ["0.1430 ± 0.0071"],
        "without masked loss, 32": ["0.9500 ± 0.0000"],
        "without masked loss, 128": ["0.9000 ± 0.0000"],
    }
    assert item.pictures[0].exists() and not item.missing
    item = make_figures.experiment_figure(there, "occlusion")
    assert "python reproduce.py occlusion --seeds 2" in item.command and item.missing
    item = make_figures.experiment_figure(there, "ablations")
    assert texts(item, 1) == {
        "MaskLAM": ["0.1430 ± 0.0071"],
        "w/o loss masking": ["0.9000 ± 0.0000"],
        "w/ input masking": ["0.4000 ± 0.0000"],
    }
    assert "w/ input masking: --input-mask" in item.text and item.pictures[0].exists()


def test_the_mean_over_tasks_needs_every_task(tmp_path: Path, monkeypatch) -> None:
    """A point or a baseline that a task lacks is not drawn in the mean of the tasks; one seed has no interval."""
    for env, values in (("push", (-1, 0, 1)), ("reach", (0, 1))):
        for value in values:
            write_run(tmp_path, "masklam", env, 1, 0.5 + value / 10, mask_dilation=value)
        write_run(tmp_path, "laof", env, 1, 0.7)
    write_run(tmp_path, "lapo", "reach", 1, 0.9)
    panels: list[make_figures.Panel] = []
    monkeypatch.setattr(make_figures, "draw", lambda path, drawn, *more: panels.extend(drawn) or path)
    make_figures.experiment_figure(context(tmp_path, 1), "mask-dilation")
    mean, reach, push = panels
    assert [panel.title for panel in panels] == ["mean of DMW: NMSE", "reach: NMSE", "push: NMSE"]
    assert [(x, value) for x, (value, _, _) in mean.lines["MaskLAM@GT"].items()] == [(0, 0.5), (1, 0.6)]
    assert mean.dashed == {"LAOF": 0.7} and reach.dashed == {"LAPO": 0.9, "LAOF": 0.7}
    assert len(push.lines["MaskLAM@GT"]) == 3 and np.isnan(push.lines["MaskLAM@GT"][0][1])


def test_learning_curves_are_the_probes_on_the_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of finished and unfinished runs, by samples; seeds that saw different data are not averaged."""
    probes = {("lapo", 1): [(10, 0.9), (20, 0.8)], ("lapo", 2): [(10, 0.7)], ("laof", 1): [(10, 0.6)]}
    for (script, seed), lines in probes.items():
        folder = write_run(tmp_path, script, "push", seed, 0.8 if seed == 1 else None, batch_size=64)
        logged = [{"stage": "lam", "step": step, "lam/loss": 1.0, "lam/nmse": nmse} for step, nmse in lines]
        (folder / "metrics.jsonl").write_text("\n".join(map(json.dumps, logged)) + '\n{"torn')
    for seed in (1, 2):
        folder = write_run(
            tmp_path, "laom_labels", "push", seed, identity={"train_hash": f"other{seed}"}, batch_size=64
        )
        (folder / "metrics.jsonl").write_text('{"stage": "lam", "step": 10, "lam/nmse": 0.5}\n')
    panels: list[make_figures.Panel] = []
    monkeypatch.setattr(make_figures, "draw", lambda path, drawn, *more: panels.extend(drawn) or path)
    item = make_figures.learning_curves(context(tmp_path))
    (panel,) = panels
    middle = {line: {x: value for x, (value, _, _) in points.items()} for line, points in panel.lines.items()}
    assert middle == {"laof": {640: 0.6}, "lapo": {640: pytest.approx(0.8), 1280: 0.8}}
    assert panel.dashed == {"laof": 0.925, "lapo": 0.925}
    published = make_figures.PAPER["nmse"]["dmw"]["distractor"]
    assert panel.stars == {f"{name}, paper": (4_000_000, published[name]["push"][0]) for name in ("LAOF", "LAPO")}
    notes = {name: [entry.notes for entry in entries] for name, entries in rows(item).items()}
    assert notes["lapo"][1:] == [[], [], ["1 of 2 seeds"]] and "seed 2 is not finished" in notes["lapo"][0]
    assert "laom_labels" in item.missing and "different data" in item.missing


def test_a_line_has_one_colour_in_all_panels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The legend stands in the first panel alone."""
    saved: list[Any] = []
    monkeypatch.setattr(make_figures.pictures, "save", lambda figure, path: saved.append(figure) or path)
    points = {500: (0.5, 0.4, 0.6), 16_000: (0.2, 0.1, 0.3)}
    first = make_figures.Panel("a", {"lapo": points, "masklam": points}, log=True)
    second = make_figures.Panel("b", {"masklam": points}, {"masklam": 0.7}, {"paper": (18_000_000, 0.1)}, log=True)
    make_figures.draw(tmp_path / "x.png", [first, second], "samples")
    left, right = saved[0].axes
    found: dict[str, set[str]] = {"lapo": set(), "masklam": set(), "paper": set()}
    for axis in (left, right):
        for handle, name in zip(*axis.get_legend_handles_labels()):
            found[name].add((handle[0] if isinstance(handle, tuple) else handle).get_color())
    colours = set().union(*found.values())
    assert [len(each) for each in found.values()] == [1, 1, 1] and len(colours) == 3
    assert {text.get_text() for text in left.get_legend().get_texts()} == found.keys()
    assert {line.get_color() for line in right.get_lines()} == found["masklam"] | found["paper"]  # the dashed line too
    assert (right.get_xscale(), right.get_yscale()) == ("log", "log")
    assert [text.get_text() for text in right.get_xticklabels()] == ["500", "16k", "18M"]


def test_label_budgets_are_the_decoders_of_one_run(tmp_path: Path) -> None:
    for seed in (1, 2):
        write_run(tmp_path, "lapo", "cheetah-run", seed, decoders={2000: seed / 10, 128_000: 0.5})
    write_run(tmp_path, "masklam", "cheetah-run", 1, decoders={2000: 0.3})
    item = make_figures.experiment_figure(context(tmp_path, 1), "label-budget")
    assert texts(item, 1) == {
        "LAPO, 2000": ["0.1500 ± 0.0707"],
        "LAPO, 128000": ["0.5000 ± 0.0000"],
        "MaskLAM@GT, 2000": ["0.3000"],
    }
    assert item.pictures[0].exists()


def test_short_episodes_are_scored_by_what_they_have(tmp_path: Path) -> None:
    """Scores relative to the paper's expert need whole episodes; those to the data's expert need its return."""
    names = {"eval/normalised_paper": None, "eval/normalised_dataset": None}
    write_run(tmp_path, "lapo", "cheetah-run", 1, metrics=names)
    assert make_figures.score_metric("dcs", context(tmp_path).main) == "eval/return"
    assert make_figures.score_metric("dmw", context(tmp_path).main) == "eval/success_rate"
    write_run(tmp_path, "lapo", "cheetah-run", 2, metrics={"eval/normalised_paper": None})
    assert make_figures.score_metric("dcs", context(tmp_path).main) == "eval/normalised_dataset"


def test_eigen_cam_finds_a_planted_moving_square() -> None:
    """In an encoder whose last block answers to one colour only, in one of its channels, and nothing else."""
    encoder = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 6, 3, stride=4, padding=1), nn.Flatten())
    for parameter in encoder.parameters():
        nn.init.zeros_(parameter)
    with torch.no_grad():
        encoder[0].weight[2, 0, 1, 1] = 1.0
        encoder[1].weight[5, 2, 1, 1], encoder[1].weight[1, 2, 1, 1] = 2.0, -3.0  # the ReLU cuts the second off
    frames = torch.zeros(10, 3, 64, 64)
    frames[:, 1:] = torch.rand(10, 2, 64, 64, generator=torch.Generator().manual_seed(0))  # what it does not answer to
    expected = torch.zeros(10, 16, 16)
    for t in range(10):
        frames[t, 0, 4 * t : 4 * t + 8, 48 - 4 * t : 56 - 4 * t] = 1.0
        expected[t, t : t + 2, 12 - t : 14 - t] = 1.0
    encoder.infer = encoder.forward
    activations = make_figures.last_activations(encoder, frames)
    assert activations.shape == (10, 6, 16, 16) and activations.min() == 0  # of the last block, after the ReLU
    saliency = make_figures.eigen_cam(activations)
    assert torch.allclose(saliency, expected, atol=1e-5)
    drawn = make_figures.heat(frames, saliency)
    red = drawn[0, ..., 0].astype(int) - drawn[0, ..., 2].astype(int)
    assert red[2:6, 50:54].min() > 0 > red[34:40, 18:24].max()
    assert not make_figures.eigen_cam(torch.zeros(2, 3, 4, 4)).any()


def test_eigen_cam_is_the_first_principal_direction() -> None:
    """Against numpy, with channels that disagree: the first right singular vector of (places, channels)."""
    activations = torch.rand(3, 5, 4, 6, generator=torch.Generator().manual_seed(1))
    for one, saliency in zip(activations.double().numpy(), make_figures.eigen_cam(activations).numpy()):
        matrix = one.reshape(5, 24).T
        values, vectors = np.linalg.eigh(matrix.T @ matrix)
        projected = np.abs(matrix @ vectors[:, values.argmax()])
        expected = (projected - projected.min()) / (projected.max() - projected.min())
        np.testing.assert_allclose(saliency, expected.reshape(4, 6), atol=1e-5)


def write_model(folder: Path, script: str, variant: str, **changes: Any) -> tuple[Path, nn.Module]:
    """A run directory with an untrained tiny model for 32 pixels."""
    _, args, model = methods.build(script, size=32, **{key: changes[key] for key in changes.keys() - {"identity"}})
    settings = {key: value for key, value in vars(args).items() if key not in ("seed", "env", "variant")}
    directory = write_run(folder, script, "cheetah-run", 1, variant=variant, **(settings | changes))
    torch.save({"model": model.state_dict()}, directory / "lam.pt")
    return directory, model


@pytest.mark.parametrize("script", methods.SCRIPTS)
def test_load_model(script: str, tmp_path: Path) -> None:
    """The trained model of every method comes back from its run directory; other weights are refused by name."""
    directory, model = write_model(tmp_path, script, "default")
    run = report.read_run(directory)
    _, args, loaded = report.load_model(run)
    assert args.latent_dim == methods.TINY["latent_dim"] and not loaded.training
    expected = model.state_dict()
    assert all(torch.equal(value, expected[name]) for name, value in loaded.state_dict().items())
    torch.save({"model": {}}, directory / "lam.pt")
    with pytest.raises(UserError, match=r"lam\.pt"):
        report.load_model(run)
    with pytest.raises(UserError, match=r"gone\.py is missing"):
        report.load_model(dataclasses.replace(run, script="gone"))


def test_pictures_of_models(tmp_path: Path, planted_dir: Path, monkeypatch) -> None:
    """A row per model that sees or predicts frames, below the frames as it sees them; other data is refused."""
    usual = {"data_dir": planted_dir, "identity": {"test_hash": Dataset(planted_dir, "cheetah-run", "test").hash}}
    write_model(tmp_path, "lapo", "default", **usual)
    write_model(tmp_path, "laom_labels", "policy-scale=32", **usual)
    write_model(tmp_path, "masklam", "default", **usual)
    write_model(tmp_path, "masklam", "occlusion=0.5", occlusion=0.5, **usual)
    write_model(tmp_path, "laof", "default", data_dir=planted_dir)
    shown: dict[str, dict[str, Any]] = {}
    draw = pictures.rows
    monkeypatch.setattr(
        pictures, "rows", lambda path, rows, *more: shown.update({path.stem: rows}) or draw(path, rows, *more)
    )
    items = list(make_figures.strip_figures(context(tmp_path, 1), "cheetah-run"))
    assert {name: list(rows) for name, rows in shown.items()} == {
        "eigen_cam_cheetah-run": ["o(t)", "LAPO", "LAOM-Labels", "MaskLAM@GT"],
        "world_model_cheetah-run": ["o(t+1)", "LAPO", "MaskLAM@GT"],
        "occlusion_cheetah-run_with": ["o(t+1)", "0%", "o(t+1), 50%", "50%"],
    }
    frames = shown["occlusion_cheetah-run_with"]
    assert (frames["o(t+1), 50%"] != frames["o(t+1)"]).any() and len(frames["50%"]) == make_figures.STRIP
    assert "is not the data that" in items[0].missing and items[3].missing == "No finished runs for this."
    make_figures.dilation_figure(context(tmp_path, 1), "cheetah-run")
    sizes = [int((image > 0).sum()) for image in shown["mask_dilation_masks_cheetah-run"]["erosion"][1:]]
    assert sizes == sorted(sizes, reverse=True) and len(set(sizes)) == 4
    sam = make_figures.sam_figure(context(tmp_path, 1))
    assert "python make_masks.py --env cheetah-run" in sam.missing and not sam.pictures


def test_footnotes_are_lettered_once(tmp_path: Path) -> None:
    item = Item("x", "A & B", text="50%", head=["method", "x_1"])
    item.add("one", [Entry("0.1 ± 0.2", ["few"], bold=True)])
    item.add("two", [Entry("-", ["few", "other"])], always=True)
    item.add("empty", ["-"])
    item.add("many", [Entry("1", [str(number) for number in range(30)])])
    letters = list(item.footnotes.values())
    assert letters[:2] == ["a", "b"] and len(set(letters)) == 32 and letters[25:28] == ["z", "aa", "ab"]
    item.write(tmp_path)
    text, latex = ((tmp_path / f"x.{kind}").read_text(encoding="utf-8") for kind in ("md", "tex"))
    assert "**0.1 ± 0.2** <sup>a</sup>" in text and "- <sup>a,b</sup>" in text and text.count("<sup>b</sup> other") == 1
    assert len([line for line in text.splitlines() if line.startswith("|")]) == 5  # without the empty one
    assert r"\caption{A \& B. 50\%}" in latex and r"x\_1" in latex and r"\textbf{0.1 $\pm$ 0.2}" in latex


def test_the_page_escapes_and_embeds(tmp_path: Path) -> None:
    (tmp_path / "p.png").write_bytes(b"\x89PNG")
    item = Item("three", "Three", "P", "python <x>", head=["<m>", "x"], pictures=[tmp_path / "p.png"])
    item.add("a<b", [Entry("0", ["x & y"], bold=True)], beside=True)
    items = [item, Item("two", "Two", "P", missing="no <runs>")]
    text = page(tmp_path / "index.html", "T", "about", items).read_text(encoding="utf-8")
    for escaped in ("x &amp; y", "python &lt;x&gt;", "no &lt;runs&gt;", "<th>&lt;m&gt;</th>"):
        assert escaped in text
    assert '<tr class="beside"><th>a&lt;b</th><td><b>0</b><sup>a</sup></td></tr>' in text
    assert 'src="data:image/png;base64,iVBORw=="' in text and "http" not in text


def test_axes_and_labels_can_be_read() -> None:
    figure, (axis,) = pictures.panels(1, 1, 3, 3)
    axis.plot([1, 2, 3], [0.018, 0.02, 0.031])
    pictures.log_scale(axis)
    figure.canvas.draw()
    texts = {label.get_text() for label in axis.get_yticklabels()}
    assert {"0.02", "0.03"} <= texts and not any("$" in text for text in texts)
    assert pictures.label("worst\nepisode 3") == "worst\nepisode 3"
    lines = pictures.label("masklam quick_lam-updates=12_policy-updates=6_decoder-updates=20").splitlines()
    assert len(lines) == 3 and max(map(len, lines)) <= 28


def test_curves_of_stages_that_logged_once_are_points(tmp_path: Path) -> None:
    pixels = []
    for count in (1, 2):
        lines = [{"stage": "lam", "step": step, "lam/loss": 0.5} for step in range(count)]
        path = pictures.curves(tmp_path / f"{count}.png", lines)
        with Image.open(path) as image:
            pixels.append(np.asarray(image.convert("L")))
    assert all((picture < 200).sum() > 100 for picture in pixels)


def test_compare_prints_a_small_table(tmp_path: Path, capsys) -> None:
    one = write_run(tmp_path, "lapo", "cheetah-run", 1, 0.25)
    other = write_run(tmp_path, "lapo", "cheetah-run", 2, 0.75, metrics={"eval/normalised_paper": None})
    make_figures.main(make_figures.Args(compare=[one, other]))
    lines = capsys.readouterr().out.splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("|")]
    assert cells[0][4:8] == ["NMSE", "untrained", "return", "of the paper's expert"]  # what no run has is left out
    assert cells[2][:8] == ["lapo", "cheetah-run", "default", "1", "0.250", "0.375", "5.0", "25.0%"]
    assert cells[3][7:] == ["-", "3600", "1800", "360", "99"]
    assert "lapo cheetah-run default: NMSE 0.5000 ± 0.3536 over 2 seeds" in lines
    elsewhere = write_run(tmp_path / "elsewhere", "lapo", "cheetah-run", 1, 0.75, identity={"train_hash": "other"})
    make_figures.main(make_figures.Args(compare=[one, elsewhere]))
    make_figures.main(make_figures.Args(compare=[one, one]))
    assert "seeds" not in capsys.readouterr().out  # other data, or one seed twice
    for paths, message in (
        ([], "--compare needs directories of finished runs"),
        ([one.parent], "name the directory of"),
    ):
        with pytest.raises(UserError, match=message):
            make_figures.main(make_figures.Args(compare=paths))
    unfinished = write_run(tmp_path, "lapo", "cheetah-run", 3, None)
    with pytest.raises(UserError, match="is not finished: rerun its command"):
        make_figures.main(make_figures.Args(compare=[unfinished]))


def test_hours_of_all_runs_and_experts(tmp_path: Path) -> None:
    """Two runs of 1.6275 hours each, one of them a sweep's; the data's expert beside the paper's."""
    write_run(tmp_path, "masklam", "cheetah-run", 1)
    write_run(tmp_path, "masklam", "cheetah-run", 1, latent_dim=32)
    write_run(tmp_path, "lapo", "cheetah-run", 1)
    hours = texts(make_figures.compute_table(context(tmp_path)))
    assert hours == {"lapo": ["1", "0.0", "1.6"], "masklam": ["2", "0.0", "3.3"]}
    experts = make_figures.expert_table(context(tmp_path))
    assert texts(experts) == {"cheetah-run": ["laom", "123.500", "837.67", "0.6250", "0.6787"]}
    assert rows(experts)["cheetah-run"][1].notes == ["episodes of at most 250 steps, the task has 1000"]
