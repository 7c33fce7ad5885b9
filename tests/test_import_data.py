"""import_data.py: real files of every kind it reads, and what is wrong with them."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from common.cli import UserError
from common.dataset import Dataset, Sampler
from common.shards import frame_schema, write_shard

# ------------------------------------------------------------------------------------- a set that lacks something


def write_set(data_dir: Path, **changes: Any) -> dict[str, np.ndarray]:
    """Writes two episodes (4 and 3 frames) of random arrays as data/own/train, and returns the arrays."""
    plan = {
        "env": "own",
        "split": "train",
        "image_size": 16,
        "action_dim": 2,
        "state_dim": 3,
        "renders": ["video"],
        "success": False,
        "num_transitions": 5,
        "num_shards": 1,
        "masks": True,
        "reward": True,
        "action_scale": None,
    } | changes
    rng = np.random.default_rng(0)
    arrays = {
        name: rng.integers(0, 256, (7, *shape)).astype(dtype) for name, (dtype, shape) in frame_schema(plan).items()
    }
    path = data_dir / "own/train/00000.h5"
    write_shard(path, plan, arrays | {"episode_start": np.array([0, 4, 7])}, {"source": ["a.mp4", "b.mp4"]})
    return arrays


@pytest.mark.parametrize(
    ("absent", "changes"),
    [
        ("nothing", {}),
        ("action", {"action_dim": 0}),
        ("state", {"state_dim": 0}),
        ("reward", {"reward": False}),
        ("video/mask", {"masks": False}),
    ],
)
def test_a_set_may_lack_anything_but_frames(tmp_path, absent, changes):
    arrays = write_set(tmp_path, **changes)
    assert arrays.keys() == {"action", "state", "reward", "video/mask", "video/observation"} - {absent}
    dataset = Dataset(tmp_path, "own", "train", "distractor")
    dataset.verify()
    assert dataset.render == "video" and dataset.mask_hash == ("none" if absent == "video/mask" else "gt")
    assert dataset.action.shape == (7, 0 if absent == "action" else 2) and dataset.action.dtype == np.float32
    assert dataset.state.shape == (7, 0 if absent == "state" else 3)
    summary = dataset.summary()
    for name in ("mean_return", "return_std"):
        assert (summary[name] is None) == (absent == "reward")
    assert (dataset.reward is None) == (dataset.episode_return is None) == (absent == "reward")
    assert (summary["action_variance"] is None) == (absent == "action")
    sampler = Sampler(dataset, 2, max_offset=2, seed=0, device=torch.device("cpu"))
    assert sampler.next().action.shape == (2, dataset.action_dim)
    sampler.close()
    if absent == "action":
        assert len(dataset.labelled(2, seed=0)) == 0
    if absent == "video/mask":
        command = r"make_masks\.py --env own --data-dir"
        with pytest.raises(UserError, match=f"the set has no masks; make them .* --mask-source: python {command}"):
            dataset.masks(np.arange(2))
        sampler = Sampler(dataset, 2, max_offset=2, seed=0, device=torch.device("cpu"), fields=("frames", "masks"))
        with pytest.raises(UserError, match="the set has no masks"):
            sampler.next()
        sampler.close()
        with pytest.raises(UserError, match=r"no masks named 'sam'; there are: none\. Make them"):
            Dataset(tmp_path, "own", "train", mask_source="sam")


def test_actions_leave_in_their_own_units(tmp_path):
    write_set(tmp_path, action_scale={"low": [-90, 5], "high": [90, 5], "names": None})
    dataset = Dataset(tmp_path, "own", "train")
    assert dataset.original_action(np.array([[-1, 0], [0.5, 0]], np.float32)).tolist() == [[-90, 5], [45, 5]]
    write_set(tmp_path)
    action = np.ones((2, 2), np.float32)
    assert Dataset(tmp_path, "own", "train").original_action(action) is action


def test_what_is_not_there_names_the_command(tmp_path):
    with pytest.raises(UserError, match=r"make it with: python import_data\.py videos DIR --name own --data-dir"):
        Dataset(tmp_path, "own", "train")
