"""Every method script on a real, small set of Meta-World: episodes of many lengths, success, both renders."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import methods
import numpy as np
import planted
import pytest

from common.dataset import Dataset

ROOT = Path(__file__).parents[1]
SCRIPTS = ["lapo", "laom_labels", "laof", "masklam"]
ENV = "window-close"
TINY = (
    "--quick --batch-size 16 --lam-updates 12 --policy-updates 12 --decoder-updates 60 --num-labels 100 --device cpu "
    "--eval-episodes 3 --eval-envs 2 --eval-steps 12 --latent-dim 16 --log-every 1"
).split()
# LAPO and MaskLAM on both renders, the others on the one that the paper is about.
CASES = [("lapo", "clean"), ("masklam", "clean"), *((script, "distractor") for script in SCRIPTS)]


def python(*words: str) -> subprocess.CompletedProcess:
    variables = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.run([sys.executable, *words], cwd=ROOT, capture_output=True, text=True, env=variables)


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    data = tmp_path_factory.mktemp("data")
    flags = "--quick --backgrounds synthetic --num-videos 2 --image-size 32 --workers 1 --episodes-per-shard 1".split()
    flags += ["--train-transitions", "230", "--test-transitions", "80", "--data-dir", str(data)]
    done = python("make_dataset.py", "--env", ENV, *flags)
    assert done.returncode == 0, done.stderr
    return data


@pytest.mark.parametrize(("script", "render"), CASES)
def test_end_to_end(script: str, render: str, data_dir: Path, tmp_path: Path) -> None:
    flags = [*TINY, "--data-dir", str(data_dir), "--runs-dir", str(tmp_path), "--variant", "test"]
    flags += methods.flags(script, tmp_path)
    done = python(f"{script}.py", "--env", ENV, *flags, *(["--no-distractors"] if render == "clean" else []))
    assert done.returncode == 0, done.stderr
    run = tmp_path / script / ENV / "test" / "seed1"
    result = json.loads((run / "result.json").read_text())
    train_set = Dataset(data_dir, ENV, "train", render)
    lengths = np.diff(train_set.episode_start) - 1
    assert len(set(lengths)) > 1 and result["dataset"]["train"]["hash"] == train_set.hash
    metrics = result["metrics"]
    assert metrics["eval/success_rate"] == 0  # twelve steps do not close a window
    assert metrics["eval/normalised_paper"] is metrics["eval/normalised_dataset"] is None  # and are not to be compared
    assert metrics["eval/nmse"] > 0 and result["rollout"]["lengths"] == [12, 12, 12]
    assert result["labelled_transitions"] == 100 and len(result["nmse_per_dimension"]) == 4
    for stage in ("lam", "bc", "decoder"):
        lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        first, *_, last = [line[f"{stage}/loss"] for line in lines if line["stage"] == stage]
        assert last < first, stage


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--eval-steps", "501"], "--eval-steps is 501, but window-close ends after 500 steps"),
        (["--data-dir", "SIZES"], "test 64: make one of them again with make_dataset.py"),
    ],
)
def test_bad_input_is_refused_before_training(flags: list[str], message: str, data_dir: Path, tmp_path: Path) -> None:
    sizes = tmp_path / "sizes"
    for size, split in ((32, "train"), (64, "test")):
        made = planted.write(tmp_path / str(size), env=ENV, action_dim=4, size=size, success=(True,) * 4)
        shutil.copytree(made / ENV / split, sizes / ENV / split)
    flags = [str(sizes) if flag == "SIZES" else flag for flag in flags]
    done = python("lapo.py", "--env", ENV, "--data-dir", str(data_dir), "--runs-dir", str(tmp_path / "runs"), *flags)
    assert done.returncode == 1 and message in done.stderr and len(done.stderr.splitlines()) == 1, done.stderr
    assert not (tmp_path / "runs").exists()


def test_defaults_of_meta_world() -> None:
    """The paper's hyperparameters by --env, and the quick ones on top of them."""
    for script in SCRIPTS:
        module = __import__(script)
        plain, quick = module.defaults(["--env", "push"]), module.defaults(["--env", "push", "--quick"])
        paper = {"laom_labels": (128, 3e-4, 2e-4, 5), "laof": (128, 1.5e-4, 1e-4, 4)}.get(script, (128, 3e-4, 2e-4, 4))
        assert (plain.batch_size, plain.lam_lr, plain.policy_lr, plain.lam_epochs) == paper
        assert plain.lam_updates is None and plain.eval_steps is None
        assert quick.lam_updates < module.defaults(["--quick"]).lam_updates and quick.batch_size == 32
