"""LAOF: networks and losses by hand, the flow picture, RAFT's weights, and the files of flow."""

import contextlib
import math
import re
import shutil
import urllib.error
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import planted
import pytest
import torch
import torch.nn.functional as F
import torchvision.models.optical_flow
from matplotlib.colors import hsv_to_rgb
from methods import CPU, build, contents, lam_sampler, raft_checkpoint

import laof
from common import raft, store
from common.cli import Stopped, UserError
from common.dataset import Dataset

REAL_RAFT = Path(__file__).parents[1] / "../shared/weights/raft_small.pth"


def test_what_each_network_sees_and_the_loss(train_set: Dataset) -> None:
    """The IDM sees o_t and o_{t+1}, the world model o_t, the flow decoder z alone, which comes in twice."""
    module, args, model = build("laof")
    with contextlib.closing(lam_sampler("laof", args, train_set)) as sampler:
        batch = sampler.next()
    received = {}
    for name in ("idm", "world_model.down.0", "world_model.up.0", "flow_decoder.down.0", "flow_decoder.up.0"):
        network = model.get_submodule(name)
        network.register_forward_pre_hook(lambda _, inputs, name=name: received.update({name: inputs[0]}))
    loss, z, logs = module.lam_loss(model, batch, args)
    index = batch.index.numpy()
    now, following = (torch.from_numpy(train_set.frames(t)).permute(0, 3, 1, 2) / 255 - 0.5 for t in (index, index + 1))
    torch.testing.assert_close(received["idm"], torch.cat([now, following], 1))
    tiled = z[:, :, None, None].expand(-1, -1, 32, 32)
    torch.testing.assert_close(received["world_model.down.0"], torch.cat([now, tiled], 1))
    assert torch.equal(received["flow_decoder.down.0"], tiled)
    for name in ("world_model.up.0", "flow_decoder.up.0"):  # the bottleneck is 1 x 1
        assert torch.equal(received[name][:, -16:], z[:, :, None, None])
    # The losses are plain mean squared errors against o_{t+1} and the flow picture, black outside of M_{t+1}.
    masks = np.unpackbits(train_set.masks(np.stack([index, index + 1])), axis=-1).reshape(2, -1, 1, 32, 32)
    assert (masks[0] != masks[1]).any()
    target = raft.flow_picture(batch.extra, 0.01) * torch.from_numpy(masks[1]) - 0.5
    prediction, flow, _ = model(module.model_inputs(batch, args))
    assert max(prediction.abs().max(), flow.abs().max()) <= 0.5
    torch.testing.assert_close(logs["frame"], F.mse_loss(prediction, following))
    torch.testing.assert_close(logs["flow"], F.mse_loss(flow, target))
    torch.testing.assert_close(loss, logs["frame"] + logs["flow"])


def test_flow_picture_is_hsv() -> None:
    flow = np.random.default_rng(0).normal(0, 1.5, (2, 48, 64, 2)).astype(np.float32)
    flow[0, 0, 0] = 0
    speed = np.minimum(np.linalg.norm(flow, axis=-1) / (0.02 * math.hypot(48, 64)), 1)
    hue = np.arctan2(flow[..., 1], flow[..., 0]) / (2 * np.pi) % 1
    expected = hsv_to_rgb(np.stack([hue, speed, speed], axis=-1))
    picture = raft.flow_picture(torch.from_numpy(flow), 0.02).movedim(1, -1).numpy()
    assert np.abs(picture - expected).max() < 1e-5 and (picture[0, 0, 0] == 0).all()


@pytest.mark.skipif(not REAL_RAFT.exists(), reason="no weights of RAFT beside the repository")
@pytest.mark.parametrize(("size", "iterations"), [(64, 4), (64, 12), (128, 4)])
def test_flow_of_a_translation(size: int, iterations: int) -> None:
    """Right within 0.2 pixels at 64 pixels, where RAFT works on 128 and its own error is halved."""
    model, _ = raft.load_raft("small", REAL_RAFT, CPU)
    steps = [(2, 0), (0, -3), (-1, 2), (3, 3), (0, 0)]
    first = np.stack([planted.background(np.random.default_rng(3), size)] * len(steps))
    second = np.stack([np.roll(image, (y, x), (0, 1)) for image, (x, y) in zip(first, steps)])
    flow = raft.optical_flow(model, torch.from_numpy(first), torch.from_numpy(second), iterations)
    errors = (flow[:, 8:-8, 8:-8].float() - torch.tensor(steps)[:, None, None]).norm(dim=-1)
    assert errors.mean((1, 2)).max() < 0.2 * size / 64


AUTHORS = {  # torchvision's names -> those in the checkpoints of RAFT's authors
    r"^feature_encoder": "fnet",
    r"^context_encoder": "cnet",
    r"net\.convnormrelu\.0": "net.conv1",
    r"net\.convnormrelu\.1": "net.norm1",
    r"net\.conv\.": "net.conv2.",
    r"convnormrelu(\d)\.0": r"conv\1",
    r"convnormrelu(\d)\.1": r"norm\1",
    r"motion_encoder\.conv(c|f)[a-z]+(\d)\.0": r"encoder.conv\1\2",
    r"motion_encoder\.conv\.0": "encoder.conv",
    r"mask_predictor\.convrelu\.0": "update_block.mask.0",
    r"mask_predictor\.conv": "update_block.mask.2",
}


@pytest.mark.parametrize("size", ["small", "large"])
def test_weights_under_the_authors_names(size: str, tmp_path: Path) -> None:
    prefix, gru = ("module.", r"gru.conv\2") if size == "small" else ("", r"gru.conv\2\1")
    torch.manual_seed(1)
    state = getattr(torchvision.models.optical_flow, f"raft_{size}")().state_dict()
    theirs = {}
    for name, value in state.items():
        for pattern, replacement in (AUTHORS | {r"recurrent_block\.convgru(\d)\.conv(.)": gru}).items():
            name = re.sub(pattern, replacement, name)
        theirs[prefix + name] = value
        # The norm of a downsampling convolution stands twice in their files.
        theirs[prefix + re.sub(r"(cnet\.layer[23]\.0\.)downsample\.1", r"\1norm3", name)] = value
    assert prefix + "cnet.layer2.0.conv1.bias" in theirs and not any("convnorm" in name for name in theirs)
    torch.save(state, tmp_path / "ours.pth")
    torch.save(theirs, tmp_path / "theirs.pth")
    (_, digest), (converted, other) = (raft.load_raft(size, tmp_path / f"{who}.pth", CPU) for who in ("ours", "theirs"))
    assert digest == other and not converted.training
    assert all(torch.equal(value, state[name]) for name, value in converted.state_dict().items())


def test_weights_of_another_network_are_refused(tmp_path: Path) -> None:
    torch.save({"a": torch.zeros(1)}, tmp_path / "tensor.pth")
    for size, path, message in (
        ("large", raft_checkpoint(tmp_path), "is it RAFT small? Then add --raft small"),
        ("small", tmp_path / "tensor.pth", "not the weights of RAFT small"),
    ):
        with pytest.raises(UserError, match=re.escape(message)) as error:
            raft.load_raft(size, path, CPU)
        assert str(path) in str(error.value) and "\n" not in str(error.value)


def test_no_network_is_one_clear_message(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refused = Mock(side_effect=urllib.error.URLError("connection refused"))
    monkeypatch.setattr("torch.hub.urlopen", refused)
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))  # where nothing was downloaded before
    with pytest.raises(UserError, match=r"get https://\S+/raft_small\S+ on .* --raft-checkpoint raft_small_\S+\.pth"):
        raft.load_raft("small", None, CPU)


def attach(data: Path, render: str = "distractor", threads: int = 1, **changes: Any) -> Dataset:
    dataset = Dataset(data, "cheetah-run", "train", render)
    options = {"raft": "small", "raft_checkpoint": raft_checkpoint(data), "raft_iterations": 1}
    raft.attach_flow(dataset, laof.Args(**options | changes), CPU, threads=threads)
    return dataset


def flow_files(data: Path) -> dict[str, bytes]:
    """The files of flow, and what may be left of one that was being made."""
    return contents(data / "cheetah-run/train", "*.raft.h5*")


@pytest.fixture(scope="module")
def complete(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small set in two shards of two episodes, ten frames, with the flow of its distractor render."""
    data = planted.write(tmp_path_factory.mktemp("complete"), train=4, length=4, shards=2)
    attach(data)
    return data


@pytest.fixture
def data(complete: Path, tmp_path: Path) -> Path:
    """A copy of `complete`."""
    return shutil.copytree(complete, tmp_path / "data")


def test_flow_is_that_of_raft_and_computed_once(complete: Path) -> None:
    """Each row is RAFT's flow to the next frame, the last of an episode zero, however the batches fall."""
    before, state = flow_files(complete), torch.get_rng_state()
    dataset, again = attach(complete), attach(complete, raft_checkpoint=None)  # the weights are not needed any more
    assert len(before) == 2 and flow_files(complete) == before and again.attached == dataset.attached
    assert torch.equal(torch.get_rng_state(), state)  # a run that computes flow starts from the same weights as others
    about = again.summary()["extra"]["raft"]
    assert (about["raft"], about["iterations"], len(about["weights"]), len(about["hash"])) == ("small", 1, 64, 64)
    model, _ = raft.load_raft("small", raft_checkpoint(complete), CPU)
    t = dataset.transitions
    pairs = [torch.from_numpy(dataset.frames(where)) for where in (t, t + 1)]
    flow = torch.from_numpy(dataset.rows("raft", np.arange(dataset.num_frames)))
    torch.testing.assert_close(flow[t], raft.optical_flow(model, *pairs, 1), atol=2e-2, rtol=1e-2)
    assert flow[t].abs().sum((1, 2, 3)).min() > 0 and (flow[dataset.episode_start[1:] - 1] == 0).all()


def test_threads_share_the_files_as_processes_do(data: Path) -> None:
    expected = flow_files(data)
    for path in (data / "cheetah-run/train").glob("*.raft.h5"):
        path.unlink()
    attach(data, threads=2)
    assert flow_files(data) == expected


def test_both_renders_share_the_files(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = attach(data)
    t = first.transitions
    before = first.rows("raft", t)
    monkeypatch.setattr(raft, "optical_flow", lambda model, frames, *_: torch.ones(*frames.shape[:3], 2))
    clean, again = attach(data, "clean"), attach(data)
    assert again.attached == first.attached != clean.attached  # so a run from before the second render can be resumed
    assert (clean.rows("raft", t) == 1).all()
    assert np.array_equal(first.rows("raft", t), before) and np.array_equal(again.rows("raft", t), before)
    again.verify()


@pytest.mark.parametrize("missing", [False, True])
def test_other_settings_are_refused(missing: bool, data: Path, monkeypatch: Any) -> None:
    """Nothing is added or lost, also where files are missing, and torchvision would download other weights."""
    if missing:
        (data / "cheetah-run/train/00000.raft.h5").unlink()
    before, changed = flow_files(data), data / "changed.pth"
    state = {name: value + 1e-3 for name, value in torch.load(raft_checkpoint(data), weights_only=True).items()}
    torch.save(state, changed)
    monkeypatch.setattr(raft, "_download", lambda _: state)
    settings = [{"raft_iterations": 2}, {"raft_checkpoint": changed}]
    for values in [*settings, {"raft_checkpoint": None}] if missing else settings:
        with pytest.raises(UserError, match=r"\((iterations|weights): .* -> .*\); .* rm \S+/\*/\*\.raft\.h5"):
            attach(data, **values)
        assert flow_files(data) == before


def test_damaged_files(data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One is truncated, one of another shard: each is named once and made again."""
    expected, folder = flow_files(data), data / "cheetah-run/train"
    (folder / "00001.raft.h5").write_bytes(expected["00000.raft.h5"])
    (folder / "00000.raft.h5").write_bytes(expected["00000.raft.h5"][:1000])
    attach(data)
    assert flow_files(data) == expected and capsys.readouterr().out.count("; making it again") == 2


def test_stopped_and_resumed_beside_another_process(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other process makes the first file all the while; a signal comes in the middle of the second."""
    expected = flow_files(data)
    first, second = (data / "cheetah-run/train" / name for name in sorted(expected))
    first.unlink()
    second.unlink()
    other_process = contextlib.ExitStack()
    other_process.enter_context(store.claim(first))
    with monkeypatch.context() as patch, pytest.raises(Stopped, match="the complete files stay"):
        patch.setattr(store, "stop_requested", Mock(side_effect=[False, True]))  # asked after each of two batches
        attach(data)
    assert list(flow_files(data)) == [f".{first.name}.claim"]

    def wait(_: float) -> None:
        assert second.exists()
        first.write_bytes(expected[first.name])
        other_process.close()

    compute = Mock(wraps=raft.optical_flow)
    monkeypatch.setattr(raft, "optical_flow", compute)
    monkeypatch.setattr(store.time, "sleep", wait)
    attach(data)
    assert flow_files(data) == expected and compute.call_count == 2  # nothing was computed twice
