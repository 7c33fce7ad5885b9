"""A method script on Meta-World: episodes of many lengths, success, both renders, the paper's numbers for the suite."""

import importlib
import json
from pathlib import Path

import methods
import numpy as np
import planted
import pytest
import tyro

from common.cli import UserError
from common.dataset import Dataset

ENV = "window-close"
TINY = (
    "--quick --batch-size 16 --lam-updates 12 --policy-updates 12 --decoder-updates 40 --num-labels 40 --device cpu "
    "--eval-episodes 2 --eval-envs 1 --eval-steps 12 --latent-dim 16 --log-every 1 --variant test"
).split()


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A planted set whose episodes end on success, at different lengths."""
    folder = tmp_path_factory.mktemp("data")
    return planted.write(
        folder, env=ENV, action_dim=4, success=(True, False, True, True), lengths=(12, 25, 9), scale=0.0
    )


def run(script: str, *flags: str) -> None:
    module = importlib.import_module(script)
    words = ["--env", ENV, *TINY, *flags]
    module.main(tyro.cli(module.Args, args=words, default=module.defaults(words)))


@pytest.mark.parametrize(("script", "render"), [("lapo", "clean"), ("masklam", "distractor")])
def test_end_to_end(script: str, render: str, data_dir: Path, tmp_path: Path) -> None:
    flags = ["--data-dir", str(data_dir), "--runs-dir", str(tmp_path), *methods.flags(script, tmp_path)]
    run(script, *flags, *(["--no-distractors"] if render == "clean" else []))
    folder = tmp_path / script / ENV / "test" / "seed1"
    result = json.loads((folder / "result.json").read_text())
    train_set = Dataset(data_dir, ENV, "train", render)
    assert len(set(np.diff(train_set.episode_start))) > 1
    assert result["dataset"]["train"]["hash"] == train_set.hash
    metrics = result["metrics"]
    assert metrics["eval/success_rate"] == 0  # twelve steps do not close a window
    assert metrics["eval/normalised_paper"] is metrics["eval/normalised_dataset"] is None  # and are not to be compared
    assert metrics["eval/nmse"] > 0 and len(result["nmse_per_dimension"]) == 4
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    for stage in ("lam", "policy", "decoder"):
        first, *_, last = [line[f"{stage}/loss"] for line in lines if line["stage"] == stage]
        assert last < first, stage


def test_splits_of_two_sizes_are_refused_before_training(data_dir: Path, tmp_path: Path) -> None:
    for size, split in ((32, "test"), (64, "train")):
        part = planted.write(tmp_path / str(size), train=1, test=1, env=ENV, action_dim=4, size=size, success=(True,))
        (tmp_path / "sizes" / ENV).mkdir(parents=True, exist_ok=True)
        (part / ENV / split).rename(tmp_path / "sizes" / ENV / split)
    with pytest.raises(UserError, match=r"make one of them again with make_dataset\.py"):
        run("lapo", "--data-dir", str(tmp_path / "sizes"), "--runs-dir", str(tmp_path / "runs"), "--num-labels", "10")
    assert not (tmp_path / "runs").exists()
