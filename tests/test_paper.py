"""The paper's grid: what each experiment consists of; running it with a failing run and interrupts; its figures."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import planted
import pytest

from benchmarks import paper
from common import runs
from common.errors import UserError
from common.tasks import TASKS

ROOT = Path(__file__).parents[1]
TINY = (
    "--set idm-scale=1 fdm-scale=1 policy-scale=1 latent-dim=16 batch-size=16 num-labels=40 log-every=1 lam-updates=6"
)
TINY += " policy-updates=6 decoder-updates=10 device=cpu eval-episodes=1 eval-envs=1 eval-steps=20 checkpoint-every=2"


def planned(experiment: str, **options) -> list[paper.Command]:
    return paper.plan(paper.Args(experiment, **options))


def test_the_experiments_of_the_paper() -> None:
    """Counts by hand; every command is one that its script takes, and no directory stands for two commands."""
    table = planned("main-table")
    assert len(table) == 6 * 14 * 2 * 3
    assert Counter(one.script for one in table) == {
        "masklam": 168,
        "lapo": 84,
        "laof": 84,
        "laom_labels": 84,
        "lapo_slots": 84,
    }
    assert {one.args.policy_scale for one in table if one.script == "laom_labels"} == {32}  # the paper's table
    assert {one.planned.env for one in table} == set(TASKS)
    assert {one.args.seed for one in table} == {1, 2, 3}
    budget = planned("label-budget", env=["reach"], seeds=1)
    assert len(budget) == 6 * 7
    held = [one for one in budget if one.planned.lam_from is not None]
    assert sorted({one.args.num_labels for one in held}) == [2000, 4000, 8000, 16_000, 32_000, 64_000]
    whole = {one.run_dir for one in budget} - {one.run_dir for one in held}
    assert {one.args.lam_from for one in held} == whole and len(whole) == 6
    latent = planned("latent-dim", env=["cheetah-run"], seeds=1)
    assert sorted((one.args.latent_dim, one.args.loss_mask) for one in latent) == sorted(
        (dim, mask) for dim in (32, 64, 128, 256, 512, 1024) for mask in (False, True)
    )
    assert {one.planned.env for one in planned("latent-dim")} == {
        "cheetah-run",
        "walker-run",
        "hopper-hop",
        "humanoid-walk",
    }
    hidden = planned("occlusion", env=["cheetah-run"], seeds=1)
    assert {(one.args.occlusion, one.args.loss_mask) for one in hidden} == {
        (share, mask) for share in (0.0, 0.25, 0.5, 0.75) for mask in (False, True)
    }
    grown = planned("mask-dilation", seeds=1)
    assert len(grown) == 7 * 10 and {one.args.mask_dilation for one in grown} == set(range(-3, 4))
    parts = planned("ablations", env=["push"], seeds=1)
    assert [
        (one.args.loss_mask, one.args.mask_channel, one.args.max_offset, one.args.input_mask) for one in parts
    ] == [
        (True, True, 10, False), (False, True, 10, False), (True, False, 10, False), (False, False, 10, False),
        (True, True, 1, False), (False, False, 1, False), (False, True, 10, True),
    ]  # fmt: skip
    together = planned("all", env=["cheetah-run"], seeds=1)
    separate = [one.run_dir for name in paper.EXPERIMENTS for one in planned(name, env=["cheetah-run"], seeds=1)]
    assert len(together) == len({one.run_dir for one in together}) == len(set(separate)) < len(separate)


def test_what_cannot_be_planned_is_refused() -> None:
    for options, message in (
        ({"env": ["cheetah"]}, "did you mean 'cheetah-run'"),
        ({"methods": ["Lapo"]}, "no such row"),
        ({"seeds": 0}, "at least 1"),
        ({"set": ["no-such-flag=3"]}, "no method script has --no-such-flag"),
        ({"set": ["lam-updates=many"]}, "refuses"),
        ({"set": ["lam updates=3"]}, "NAME=VALUE"),
        ({"values": ["3"]}, "for one of the sweeps"),
        ({"set": ["variant=try"]}, "the experiments decide this"),
        ({"set": ["seed=7"]}, "the experiments decide this"),
    ):
        with pytest.raises(UserError, match=message):
            planned("main-table", **options)
    small = planned("label-budget", quick=True, env=["reach"], methods=["LAPO"], seeds=1)
    assert max(one.args.num_labels for one in small) == 5000  # what the quick data of Meta-World have
    clips = planned("main-table", env=["reach"], methods=["LAPO"], seeds=1, data_set=["davis-dir=elsewhere"])
    assert str(clips[0].args.clips_dir) == "elsewhere"
    for data_set, set_, expected in (
        (["davis_dir=elsewhere", "backgrounds=synthetic"], [], "None"), (["backgrounds=own"], [], "own"),
        (["davis-dir=elsewhere"], ["clips_dir=mine"], "mine"), (["backgrounds"], [], "None"),
    ):  # fmt: skip
        one = planned("main-table", env=["reach"], methods=["LAPO"], seeds=1, data_set=data_set, set=set_)[0]
        assert str(one.args.clips_dir) == expected
    quick = planned("main-table", quick=True, env=["cheetah-run"], set=["slot-updates=7", "no-augment"])
    assert {one.args.slot_updates for one in quick if one.script == "lapo_slots"} == {7}
    assert {one.args.policy_scale for one in quick} == {1}
    small = planned(
        "label-budget", quick=True, env=["reach"], methods=["LAPO"], seeds=1, set=["num-labels=60"], values=["30"]
    )
    assert [one.args.num_labels for one in small] == [60, 30]  # --set moves the default and not the sweep


def run(*words: str, **more) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "benchmarks.paper", *words]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"})


def grid_words(data: Path, runs_dir: Path) -> list[str]:
    words = "occlusion --env cheetah-run --seeds 1 --values 0.0 0.5 --jobs 2".split()
    return [*words, "--data-dir", str(data), "--runs-dir", str(runs_dir), *TINY.split()]


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    return planted.write(tmp_path_factory.mktemp("data"), train=3, test=2, length=20, size=64)


@pytest.fixture(scope="module")
def grid(data: Path, tmp_path_factory) -> Path:
    """A grid of four runs that was interrupted twice, with one run that fails until its directory is mended."""
    runs_dir = tmp_path_factory.mktemp("grid") / "runs"
    words = grid_words(data, runs_dir)
    commands = paper.plan(paper.Args("occlusion", ["cheetah-run"], [], 1, ["0.0", "0.5"], set=TINY.split()[1:],
                                     data_dir=data, runs_dir=runs_dir))  # fmt: skip
    assert len(commands) == 4
    broken = next(one for one in commands if not one.args.loss_mask and one.args.occlusion)
    broken.run_dir.mkdir(parents=True)
    (broken.run_dir / "args.json").write_text(json.dumps(runs.jsonable(broken.args) | {"lam_updates": 99}))

    for _ in range(2):
        process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.paper", *words], cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        before = len(list(runs_dir.glob("masklam/*/*/*/*.pt")))
        for line in process.stdout:
            if line.startswith("start:"):
                break
        deadline = time.monotonic() + 120  # until a run has ended a stage that it had not ended before
        while len(list(runs_dir.glob("masklam/*/*/*/*.pt"))) == before:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=120)
        assert process.returncode == 130, (out, err)
        assert "the same command goes on" in err

    done = run(*words)
    assert done.returncode == 1, done.stdout
    assert "1 of 4 jobs did not finish" in done.stderr and "lam_updates: 99 there, 6 now" in done.stderr
    finished = [one for one in commands if one.finished]
    assert len(finished) == 3 and broken not in finished
    times = {one.run_dir: (one.run_dir / "result.json").stat().st_mtime_ns for one in finished}
    shutil.rmtree(broken.run_dir)
    done = run(*words)
    assert done.returncode == 0, done.stderr
    assert "3 finished, 0 to go on with, 1 to start" in done.stdout and "make_figures.py" in done.stdout
    assert all((path / "result.json").stat().st_mtime_ns == time_ for path, time_ in times.items())
    return runs_dir


def test_dry_run_and_nothing_left_to_run(grid: Path, data: Path, tmp_path: Path, capsys) -> None:
    """A dry run says what there is and makes nothing; a finished grid is not run again."""
    for folder, counts in ((tmp_path / "runs", "0 finished, 0 to go on with, 4 to start"), (grid, "4 finished")):
        for dry_run in (True, False) if folder == grid else (True,):
            args = paper.Args("occlusion", ["cheetah-run"], [], 1, ["0.0", "0.5"], set=TINY.split()[1:], data_dir=data,
                              runs_dir=folder, dry_run=dry_run)  # fmt: skip
            paper.main(args)
            out = capsys.readouterr().out
            assert f"4 runs: {counts}" in out
            assert out.count("python masklam.py") == 4 * dry_run and ("nothing to run" in out) == (not dry_run)
    assert not (tmp_path / "runs").exists()


def test_the_interrupted_grid_has_the_numbers_of_an_undisturbed_run(grid: Path, data: Path, tmp_path: Path) -> None:
    results = [json.loads(path.read_text()) for path in grid.glob("masklam/*/*/*/result.json")]
    assert len(results) == 4
    plain = next(one for one in results if one["args"]["loss_mask"] and not one["args"]["occlusion"])
    flags = [word for item in TINY.split()[1:] for word in (f"--{item.split('=')[0]}", item.split("=")[1])]
    done = subprocess.run(
        [sys.executable, "masklam.py", "--data-dir", str(data), "--runs-dir", str(tmp_path), *flags], cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    alone = json.loads((tmp_path / f"masklam/cheetah-run/{plain['variant']}/seed1/result.json").read_text())
    assert alone["metrics"] == plain["metrics"]


def test_figures_of_the_grid(grid: Path, tmp_path: Path) -> None:
    """One command draws what the runs allow, lists the rest, and the page needs no other file."""
    pytest.importorskip("umap")
    words = [sys.executable, "make_figures.py", "--runs-dir", str(grid), "--out", str(tmp_path), "--seeds", "1"]
    words += TINY.split()
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    names = {path.name for path in tmp_path.iterdir()}
    assert names >= {
        "aggregate.md", "aggregate.tex", "aggregate.png", "nmse_dcs_distractor.md", "iqm.png", "cost.md",
        "occlusion.png",
        "umap_cheetah-run.png", "eigen_cam_cheetah-run.png", "world_model_cheetah-run.png", "index.html",
        "world_model_occlusion_cheetah-run_with.png", "world_model_occlusion_cheetah-run_without.png",
        "mask_dilation_masks_cheetah-run.png",
    }  # fmt: skip
    page = (tmp_path / "index.html").read_text()
    assert "src=" in page and 'src="data:image/png;base64,' in page
    assert page.count("src=") == page.count('src="data:') and "href=" in page and "http" not in page
    assert "python -m benchmarks.paper label-budget" in page and "missing: Score against labels" in done.stdout
    results = {path.parents[1].name: json.loads(path.read_text()) for path in grid.glob("masklam/*/*/*/result.json")}
    for result in results.values():
        assert f"{result['metrics']['eval/nmse']:.4f}" in (tmp_path / "occlusion_table.md").read_text()
    assert "</sup> with " not in (tmp_path / "occlusion_table.md").read_text()  # --set names all that they changed


def test_data_and_masks_are_made_first(tmp_path: Path) -> None:
    """What is missing becomes jobs that the runs need, by shards; nothing is made for what is finished."""
    args = paper.Args("main-table", ["cheetah-run"], ["LAPO", "MaskLAM@SAM"], 1, quick=True, data_dir=tmp_path / "data",
                      runs_dir=tmp_path / "runs", data_jobs=2, data_set=["backgrounds=synthetic"])  # fmt: skip
    jobs = {job.name: job for job in paper.all_jobs(args, paper.plan(args))}
    made, masks = jobs["data-cheetah-run-2"], jobs["masks-sam-cheetah-run-1"]
    assert made.command.startswith(
        "python make_dataset.py --env cheetah-run --quick --backgrounds synthetic --data-dir"
    )
    assert {job.name for job in masks.needs} == {"data-cheetah-run-1", "data-cheetah-run-2"}
    lapo = jobs["lapo-cheetah-run-quick-seed1"]
    assert {job.name for job in lapo.needs} == {"data-cheetah-run-1", "data-cheetah-run-2"}
    masked = jobs["masklam-cheetah-run-quick_mask-source=sam-seed1"]
    assert {job.name for job in masked.needs} >= {"masks-sam-cheetah-run-1", "masks-sam-cheetah-run-2", made.name}
    assert not any(job.done() for job in jobs.values())
    planted.write(tmp_path / "data", train=3, test=2, length=20, size=64)
    assert made.done() and not masks.done()
    jobs = {job.name: job for job in paper.all_jobs(args, paper.plan(args))}
    assert not any(name.startswith("data-") for name in jobs) and jobs["lapo-cheetah-run-quick-seed1"].needs == []
    text = paper.describe(args, paper.plan(args), list(jobs.values()))
    assert "data cheetah-run: there, 60 + 40 transitions, 64 pixels" in text and "2 for masks" in text
    other = paper.Args("main-table", ["cheetah-run"], ["MaskLAM@GT"], 1, quick=True, set=["mask-source=mine"],
                       data_dir=tmp_path / "data", runs_dir=tmp_path / "runs")  # fmt: skip
    with pytest.raises(UserError, match="--import DIR --name mine"):
        paper.all_jobs(other, paper.plan(other))


def test_estimates_count_what_was_recorded(tmp_path: Path) -> None:
    """Hours by hand from a record with round numbers, scaled to other updates, without what a held LAM leaves out."""
    record = {
        "script": "lapo", "env": "walker-run", "machine": {"gpu": None}, "args": {"quick": True, "eval_episodes": 4,
        "eval_steps": None}, "seconds": {"lam": 1280.0, "bc": 300.0, "decoder": 200.0, "rollout": 40.0, "probe": 5.0},
        "stages": {"lam": {"updates": 640}, "bc": {"updates": 300}, "decoder": {"updates": 2000}},
    }  # fmt: skip
    numbers = json.loads(paper.NUMBERS.read_text())
    usual = {"quick": True, "env": ["cheetah-run"], "methods": ["LAPO"], "seeds": 1, "runs_dir": tmp_path}
    one = planned("main-table", **usual)[0]
    assert paper.run_hours(one, [record], numbers) == (pytest.approx(1825 / 3600), "core of a CPU")
    short = planned("main-table", **usual, set=["lam-updates=64", "eval-episodes=1"])[0]
    assert paper.run_hours(short, [record], numbers)[0] == pytest.approx((128 + 300 + 200 + 10 + 5) / 3600)
    held = planned("label-budget", **usual, values=["1000"])[1]
    assert paper.run_hours(held, [record], numbers)[0] == pytest.approx((200 + 40 + 5) / 3600)
    whole = planned("main-table", env=["cheetah-run"], methods=["MaskLAM@GT"], seeds=1, runs_dir=tmp_path)[0]
    assert paper.run_hours(whole, [record], numbers) == (11.133, "A100, the paper's figures")
    assert paper.weight_bytes(whole, 64) == pytest.approx(4e6 * (8.6 + 2.61 + 2.60), rel=0.01)  # see SPEC's counts
    assert len(paper.recorded_runs()) > 30
