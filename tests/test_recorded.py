"""Runs on recorded videos: what they give instead of rollouts, and without any simulator."""

import json
from pathlib import Path
from typing import Any

import methods
import numpy as np
import planted
import pytest
import torch
from methods import CPU
from PIL import Image

import export_latents
import laom_labels
import masklam
from common import recorded
from common.cli import UserError
from common.dataset import Dataset

# What a machine without simulators and OpenGL lacks; importing it is an error.
ABSENT = ("dm_control", "mujoco", "metaworld", "OpenGL")
TINY = methods.TINY | {"env": "own", "device": "cpu", "lam_updates": 3, "policy_updates": 3, "decoder_updates": 3}


def run(script: str, data_dir: Path, runs_dir: Path, **changes: Any) -> Path:
    """A whole tiny run in a process that cannot import a simulator; returns its directory."""
    values = TINY | {"data_dir": data_dir, "runs_dir": runs_dir, "variant": "test"} | changes
    words = [*methods.words(values), *methods.words(methods.OWN[script])]
    program = (
        f"import sys; sys.modules |= dict.fromkeys({ABSENT}); sys.argv = {[script + '.py', *words]}\n"
        f"import {script}; from common.cli import cli; cli({script}.main, {script}.defaults)"
    )
    done = methods.finish(methods.python("-c", program))
    assert done.returncode == 0, done.stderr
    return runs_dir / script / "own/test/seed1"


def latents(folder: Path, split: str) -> dict[str, np.ndarray]:
    with np.load(folder / f"{split}.npz") as file:
        return dict(file)


@pytest.mark.parametrize(
    ("script", "actions", "masks"),
    [("masklam", True, True), ("lapo", False, False), ("laof", False, True), ("laom_labels", True, False)],
)
def test_a_run_needs_no_simulator(script: str, actions: bool, masks: bool, tmp_path: Path) -> None:
    data_dir = planted.write_recorded(tmp_path, actions=actions, masks=masks)
    raft = methods.FROZEN["laof"] | {"raft_checkpoint": methods.raft_checkpoint(tmp_path)} if script == "laof" else {}
    folder = run(script, data_dir, tmp_path / "runs", probe_at=(2,), **raft)
    result = json.loads((folder / "result.json").read_text())
    expected = {"eval/nmse", "eval/nmse_untrained"} if actions else set()
    expected |= {f"eval/open_loop_{name}" for name in ("policy", "mean_action", "previous_action", "ridge") if actions}
    assert set(result["metrics"]) == expected and len(result["decoders"]) == actions
    assert {"lam", "policy"} <= set(result["stages"]) and ("decoder" in result["stages"]) == actions
    pictures = {"world_model.png", "transfer.png", "curves.png", "train.png", "test.png"}
    pictures |= {"flow.png"} if script == "laof" else set()
    if script == "laom_labels":  # it predicts embeddings, not pixels
        pictures = pictures - {"transfer.png"} | {"augmentations.png"}
    assert {Path(path).name for path in result["pictures"]} == pictures
    for split in ("train", "test"):
        dataset, saved = Dataset(data_dir, "own", split), latents(folder / "latents", split)
        assert saved["z"].shape == (dataset.num_transitions, 16) and np.isfinite(saved["z"]).all()
        assert (dataset.episode_start[saved["episode"]] + saved["frame"] == dataset.transitions).all()
        assert saved["source"][-1] == f"{split}{dataset.num_episodes - 1}.mp4"
        assert saved["seconds"] == pytest.approx(0.5 + saved["frame"] / 10)
    # The finished run does the same for a dataset by its name, here for its own.
    export_latents.main(export_latents.Args(run=folder, batch_size=16, device="cpu"))
    for split in ("train", "test"):
        again = latents(folder / "latents/own", split)
        for name, value in latents(folder / "latents", split).items():
            if name == "z":  # computed in other batches
                np.testing.assert_allclose(again[name], value, rtol=1e-4, atol=1e-6)
            else:
                assert np.array_equal(again[name], value)
    if script != "masklam":  # which sees masks
        planted.write_recorded(tmp_path / "bare", actions=False, masks=False)
        export_latents.main(export_latents.Args(run=folder, data_dir=tmp_path / "bare", batch_size=16, device="cpu"))
    if script != "laom_labels":
        assert (folder / "latents/own/transfer.gif").read_bytes() == (folder / "transfer.gif").read_bytes()


def test_there_is_one_render_of_recorded_videos(tmp_path: Path) -> None:
    data_dir = planted.write_recorded(tmp_path)
    assert Dataset(data_dir, "own", "train", None).render == Dataset(data_dir, "own", "train").render == "video"
    for module in (masklam, laom_labels):
        args = module.Args(
            **TINY | methods.OWN[module.__name__] | {"data_dir": data_dir, "runs_dir": tmp_path / "runs"},
            distractors=False,
        )
        with pytest.raises(UserError, match=r"recorded videos .* leave out --no-distractors"):
            module.main(args)
    assert not (tmp_path / "runs").exists()
    with pytest.raises(UserError, match=r"make_masks\.py --env own --box X0 Y0 X1 Y1 --data-dir"):
        Dataset(data_dir, "own", "train", mask_source="sam")
    with pytest.raises(UserError, match="--env all is for make_dataset"):
        Dataset(data_dir, "all", "train")


def test_what_a_method_needs_is_said_before_a_run_directory_exists(tmp_path: Path) -> None:
    data_dir = planted.write_recorded(tmp_path, actions=False, masks=False)
    for module, message in ((masklam, "has no masks; make them"), (laom_labels, "has no actions, from which")):
        args = module.Args(
            **TINY | methods.OWN[module.__name__] | {"data_dir": data_dir, "runs_dir": tmp_path / "runs"}
        )
        with pytest.raises(UserError, match=message):
            module.main(args)
    assert not (tmp_path / "runs").exists()


@pytest.fixture(scope="module")
def splits(tmp_path_factory: pytest.TempPathFactory) -> tuple[Dataset, Dataset]:
    data_dir = planted.write_recorded(tmp_path_factory.mktemp("own"))
    return Dataset(data_dir, "own", "train"), Dataset(data_dir, "own", "test")


def test_open_loop_errors_are_those_by_hand(splits: tuple[Dataset, Dataset]) -> None:
    train_set, test_set = splits
    labelled, t = train_set.labelled(30, seed=1), test_set.transitions

    def act(frames: torch.Tensor) -> torch.Tensor:
        return torch.full((len(frames), 6), 0.25)

    found = recorded.open_loop(act, labelled, train_set, test_set, batch_size=7, device=CPU)
    truth, mean = test_set.action[t], train_set.action[labelled].mean(0)
    before = np.array([mean if frame in test_set.episode_start else test_set.action[frame - 1] for frame in t])
    for name, guess in (("policy", 0.25), ("mean_action", mean), ("previous_action", before)):
        assert found["errors"][name] == pytest.approx(
            ((guess - truth) ** 2).mean() / train_set.action_variance, rel=1e-5
        )
    assert found["errors"]["ridge"] > 0
    # The stored actions are those of the data divided by 3.
    assert found["rmse_per_dimension"] == pytest.approx(3 * np.sqrt(((0.25 - truth) ** 2).mean(0)), rel=1e-5)
    # From one label the regression knows one action, as the mean does.
    errors = recorded.open_loop(act, train_set.transitions[:1], train_set, test_set, batch_size=16, device=CPU)[
        "errors"
    ]
    assert errors["ridge"] == pytest.approx(errors["mean_action"], rel=1e-4)


def test_the_regression_finds_what_the_frames_show(tmp_path: Path) -> None:
    """With the square's place as the action, on black, it is far below the mean action, whose error is about 1."""
    planted.write_recorded(tmp_path, train=12)
    splits = [Dataset(tmp_path, "own", split) for split in ("train", "test")]
    for dataset in splits:
        frames = np.arange(dataset.num_frames)
        masks = np.unpackbits(dataset.masks(frames), axis=-1).reshape(-1, 32, 32, 1)
        dataset._rows["frames"] = [dataset.frames(frames) * masks]
        place = np.stack([masks.any(axis).argmax(1)[:, 0] for axis in (2, 1)], axis=1) / 16 - 0.5
        dataset.action = np.tile(place, 3).astype(np.float32)
    act, labelled = (lambda frames: torch.zeros(len(frames), 6)), splits[0].transitions
    errors = recorded.open_loop(act, labelled, *splits, batch_size=16, device=CPU)["errors"]
    assert errors["ridge"] < 0.5 * errors["mean_action"]


def test_masks_that_vanish_when_they_shrink_are_refused(tmp_path: Path) -> None:
    data_dir = planted.write_recorded(tmp_path, size=16)  # squares of 5 pixels
    args = masklam.Args(env="own", data_dir=data_dir, mask_dilation=-3)
    with pytest.raises(UserError, match="with --mask-dilation -3, are all empty"):
        masklam.open_split(args, "train")
    masklam.open_split(masklam.Args(env="own", data_dir=data_dir, mask_dilation=-2), "train")


def test_transfer_applies_one_latent_after_the_other(splits: tuple[Dataset, Dataset], tmp_path: Path) -> None:
    """A model whose latent action is the number of the step, and that draws it as brightness added to what it sees."""

    class Counting(torch.nn.Module):
        def infer(self, window: torch.Tensor) -> torch.Tensor:
            return torch.arange(1.0, len(window) + 1)[:, None] / 255

        def predict(self, window: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
            return window[:, 2, :3] + z[:, :, None, None]

    test_set = splits[1]
    inputs = lambda batch: masklam.model_inputs(batch, masklam.Args())  # noqa: E731
    drawn = recorded.transfer(tmp_path, Counting(), inputs, test_set, ("frames", "masks"), CPU)
    assert drawn == [tmp_path / "transfer.png"] and drawn[0].exists()
    first = test_set.frames(test_set.episode_start[-2]).astype(int)
    with Image.open(tmp_path / "transfer.gif") as gif:
        assert gif.n_frames == 20
        for step in range(gif.n_frames):
            gif.seek(step)
            image = np.asarray(gif.convert("RGB")).astype(int)
            zoom = image.shape[0] // 32
            shown = image[::zoom, ::zoom][:, 32:]
            expected = np.clip(first + (step + 1) * (step + 2) // 2, 0, 255)
            assert abs(shown - expected).mean() < 12  # the colours of a GIF are a palette


def test_the_offset_may_be_said_in_seconds(splits: tuple[Dataset, Dataset], tmp_path: Path) -> None:
    """At 10 frames/s; a simulated set has no rate."""
    for seconds, frames in ((0.3, 3), (0.01, 1), (None, 10)):
        assert splits[0].max_offset(masklam.Args(max_offset_seconds=seconds)) == frames
    data_dir = planted.write(tmp_path / "data")
    for script in (masklam, laom_labels):
        args = script.Args(data_dir=data_dir, runs_dir=tmp_path / "runs", num_labels=(20,), max_offset_seconds=0.3)
        with pytest.raises(UserError, match="has no frame rate; use --max-offset, in frames"):
            script.main(args)
    assert not (tmp_path / "runs").exists()
