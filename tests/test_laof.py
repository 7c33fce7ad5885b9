"""LAOF: parameter counts by hand, RAFT's flow and its files, the flow picture, and what each network sees."""

import hashlib
import math
import re
import shutil
import time
from pathlib import Path
from typing import Any

import numpy as np
import planted
import pytest
import torch
import torch.nn.functional as F
from methods import CPU, SERVER, attach_planted_flow, build, lam_sampler, raft_checkpoint

import laof
from common import cli, raft, store
from common.cli import Stopped, UserError
from common.dataset import Dataset, Sampler, sequential
from common.masks import unpack_masks

REAL_RAFT = Path(__file__).parents[1] / "../shared/weights/raft_small.pth"


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return raft_checkpoint(tmp_path_factory.mktemp("raft"))


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory, weights: Path) -> Path:
    """A small set in three shards, beside which lies the flow of one render."""
    data = planted.write(tmp_path_factory.mktemp("made"), train=3, test=3, length=5, shards=3)
    attach(data, weights)
    return data


@pytest.fixture
def flow_dir(made: Path, tmp_path: Path) -> Path:
    """A copy of it."""
    return shutil.copytree(made, tmp_path / "data")


def attach(data: Path, checkpoint: Path | None, render: str = "distractor", iterations: int = 1) -> Dataset:
    """The train split with its flow, made where it is missing."""
    dataset = Dataset(data, "cheetah-run", "train", render)
    raft.attach_flow(dataset, "small", checkpoint, iterations, CPU)
    return dataset


# --- networks


def convolution(inputs: int, outputs: int, kernel: int = 3) -> int:
    return inputs * outputs * kernel**2 + outputs


def residual(channels: int) -> int:
    return convolution(channels, channels // 2) + convolution(channels // 2, channels)


def unet_by_hand(image: int, b: int, size: int, z: int) -> int:
    """Level by level; every level has a convolution, a batch norm (2 per channel) and a residual layer."""
    levels = [b, 2 * b, 4 * b, 8 * b, 16 * b] + [16 * b] * (size == 128)
    count, channels = 0, image + z
    for width in levels:
        count += convolution(channels, width) + 2 * width + residual(width)
        channels = width
    count += convolution(16 * b, 32 * b, 2)
    channels, skips, outputs = 32 * b, [z, *levels[::-1]], [*levels[::-1], b]
    for skip, width in zip(skips, outputs):
        count += convolution(channels + skip, width, 2) + 2 * width + residual(width)
        channels = width
    return count + convolution(b + image, b) + residual(b) + convolution(b, 3, 1)


@pytest.mark.parametrize(("size", "figure"), [(64, 7.8e6), (128, 13.0e6)])
def test_parameter_counts_and_shapes(size: int, figure: float) -> None:
    """Of the paper's networks, against counts by hand and the figures of the specification."""
    with torch.device("meta"):
        model = laof.LatentActionModel(laof.Args(), size, 6).eval()
        prediction, flow, z = model(torch.zeros(2, 4, 3, size, size))
        levels = [torch.zeros(1, 128 + 3, size, size)]
        for level in model.world_model.down:
            levels.append(level(levels[-1]))
        bottleneck = model.world_model.bottleneck(levels[-1])
    counts = {name: sum(p.numel() for p in part.parameters()) for name, part in model.named_children()}
    m, channels, idm = 4, 6, 0
    for width in (16 * m, 32 * m, 32 * m):
        idm += convolution(channels, width) + 4 * convolution(width, width)
        channels = width
    assert counts == {
        "idm": idm + 32 * m * (size // 8) ** 2 * 128 + 128,
        "world_model": unet_by_hand(3, 24, size, 128),
        "flow_decoder": unet_by_hand(0, 24, size, 128),
    }
    assert counts["world_model"] == pytest.approx(figure, rel=0.005)
    assert counts["flow_decoder"] == pytest.approx(figure, rel=0.005)
    assert prediction.shape == flow.shape == (2, 3, size, size) and z.shape == (2, 128)
    assert levels[-1].shape[-2:] == (2, 2) and bottleneck.shape[-2:] == (1, 1)


def test_each_network_gets_its_frames(planted_dir: Path) -> None:
    """The IDM sees o_t and o_{t+1}, the world model o_t, the flow decoder z alone, at the input and the bottleneck."""
    dataset = Dataset(planted_dir, "cheetah-run", "train")
    module, args, model = build("laof")
    sampler = lam_sampler("laof", args, dataset)
    batch = sampler.next()
    sampler.close()
    received = {}
    model.idm.register_forward_pre_hook(lambda _, inputs: received.update(idm=inputs[0]))
    for name in ("world_model", "flow_decoder"):
        network = getattr(model, name)
        network.down[0].register_forward_pre_hook(lambda _, inputs, name=name: received.update({name: inputs[0]}))
        network.up[0].register_forward_pre_hook(lambda _, inputs, name=name: received.update({f"{name} up": inputs[0]}))
    _, z, logs = module.lam_loss(model, batch, args)
    index = batch.index.numpy()
    now, following = (torch.from_numpy(dataset.frames(t)).permute(0, 3, 1, 2) / 255 - 0.5 for t in (index, index + 1))
    torch.testing.assert_close(received["idm"], torch.cat([now, following], 1))
    tiled = z[:, :, None, None].expand(-1, -1, 32, 32)
    torch.testing.assert_close(received["world_model"], torch.cat([now, tiled], 1))
    assert torch.equal(received["flow_decoder"], tiled)
    for name in ("world_model", "flow_decoder"):
        assert torch.equal(received[f"{name} up"][:, -16:, 0, 0], z) and received[f"{name} up"].shape[-1] == 1
    # and the losses are plain mean squared errors against o_{t+1} and the flow picture
    prediction, flow, _ = model.train()(module.model_inputs(batch, args))
    torch.testing.assert_close(logs["frame"], F.mse_loss(prediction, following))
    torch.testing.assert_close(logs["flow"], F.mse_loss(flow, module.flow_target(batch, args)))


def test_schedule() -> None:
    args = laof.Args()
    lam = [laof.schedule(args, "lam", step, 1050, 0) for step in (0, 25, 50, 550, 1050)]
    assert lam == pytest.approx([0.1, 0.55, 1, 0.505, 0.01])
    for stage in ("policy", "decoder"):
        rates = [laof.schedule(args, stage, step, 3000, 0) for step in (0, 500, 1000, 2000, 3000)]
        assert rates == pytest.approx([0.01, 0.505, 1, 0.5, 0])
    assert [laof.schedule(args, "policy", step, 4, 0) for step in range(4)] == pytest.approx([0.01, 0.505, 1, 0.5])


# --- flow


@pytest.mark.skipif(not REAL_RAFT.exists(), reason="no weights of RAFT beside the repository")
@pytest.mark.parametrize(("size", "iterations"), [(64, 12), (128, 4)])
def test_flow_of_a_translation(size: int, iterations: int) -> None:
    """A texture that moves by a known number of pixels: right within 0.2 pixels, away from what moves into view.

    That is at 64 pixels. RAFT works on 128 pixels then, too, and its own error, here up to 0.34 pixels, is not halved.
    """
    network, _ = raft.load_raft("small", REAL_RAFT, CPU)
    large = planted.background(
        np.random.default_rng(3), 2 * size
    )  # cut out of a larger one, so that nothing wraps around
    steps = [(2, 0), (0, -3), (-1, 2), (3, 3), (0, 0)]
    start = size // 2
    first = np.stack([large[start : start + size, start : start + size]] * len(steps))
    second = np.stack([large[start - y : start - y + size, start - x : start - x + size] for x, y in steps])
    flow = raft.optical_flow(network, torch.from_numpy(first), torch.from_numpy(second), iterations).float()
    inside = flow[:, 8:-8, 8:-8]
    expected = torch.tensor(steps).float()[:, None, None].expand_as(inside)
    errors = (inside - expected).norm(dim=-1)
    assert errors.mean((1, 2)).max() < 0.2 * size / 64


def test_flow_picture_is_hsv() -> None:
    from matplotlib.colors import hsv_to_rgb

    rng = np.random.default_rng(0)
    flow = rng.normal(0, 1.5, (2, 48, 64, 2)).astype(np.float32)
    flow[0, 0, 0] = 0
    speed = np.minimum(np.linalg.norm(flow, axis=-1) / (0.02 * math.hypot(48, 64)), 1)
    hue = np.arctan2(flow[..., 1], flow[..., 0]) / (2 * np.pi) % 1
    expected = hsv_to_rgb(np.stack([hue, speed, speed], axis=-1))
    picture = raft.flow_picture(torch.from_numpy(flow), 0.02).movedim(1, -1).numpy()
    assert np.abs(picture - expected).max() < 1e-5 and (picture[0, 0, 0] == 0).all()
    directions = torch.tensor([[9.0, 0], [0, 9], [-9, 0], [0, -9]]).view(1, 2, 2, 2)  # right, down, left, up
    colours = raft.flow_picture(directions, 0.01).movedim(1, -1).view(4, 3)
    named = [[1, 0, 0], [0.5, 1, 0], [0, 1, 1], [0.5, 0, 1]]  # red, yellow-green, cyan, violet
    torch.testing.assert_close(colours, torch.tensor(named).float(), atol=1e-6, rtol=0)


def test_the_target_is_masked_by_the_next_frame(planted_dir: Path) -> None:
    dataset = Dataset(planted_dir, "cheetah-run", "train")
    attach_planted_flow(dataset)
    batch = next(sequential(dataset, 40, max_offset=1, device=CPU, fields=("frames", "masks", "raft")))
    ones = batch._replace(extra=torch.full_like(batch.extra, 3.0))
    target = laof.flow_target(ones, laof.Args())
    now, following = (
        unpack_masks(batch.masks[:, i : i + 1], 32, 32)[:, 0].bool().expand(-1, 3, -1, -1) for i in (2, 3)
    )
    assert (target[~following] == -0.5).all()  # black
    assert (target.amax(1, keepdim=True).expand_as(target)[following] == 0.5).all()  # full value
    assert (now != following).any()
    expected = raft.flow_picture(batch.extra, 0.01)[following] - 0.5
    torch.testing.assert_close(laof.flow_target(batch, laof.Args())[following], expected)


# --- files of flow


def flow_files(data: Path) -> list[Path]:
    return sorted((data / "cheetah-run/train").glob("*.raft.h5"))


def digests(data: Path) -> list[str]:
    return [hashlib.sha256(path.read_bytes()).hexdigest() for path in flow_files(data)]


def other_weights(weights: Path, folder: Path) -> Path:
    state = torch.load(weights, weights_only=True)
    torch.save({name: value + 1e-3 for name, value in state.items()}, folder / "other.pth")
    return folder / "other.pth"


def test_flow_is_computed_once_and_read_back(weights: Path, tmp_path: Path) -> None:
    """Each row is RAFT's flow to the next frame, the last of an episode zero, however the batches fall."""
    flow_dir, state = planted.write(tmp_path, train=2, test=2, length=5, shards=2), torch.get_rng_state()
    dataset = attach(flow_dir, weights)
    assert torch.equal(torch.get_rng_state(), state)  # a run that computes flow starts from the same weights as others
    batches = []
    for on_device in (False, True):  # gathered from the files, and from one tensor on the device
        options = {"max_offset": 1, "seed": 0, "device": CPU, "fields": ("frames", "raft"), "on_device": on_device}
        sampler = Sampler(dataset, 8, **options)
        batches.append(sampler.next())
        sampler.close()
    assert torch.equal(batches[0].extra, batches[1].extra)
    network, _ = raft.load_raft("small", weights, CPU)
    batch = batches[0]
    assert batch.extra.shape == (8, 32, 32, 2) and batch.extra.dtype == torch.float16
    for row, t in enumerate(batch.index.tolist()):
        pair = (torch.from_numpy(dataset.frames(np.array([where]))) for where in (t, t + 1))
        torch.testing.assert_close(batch.extra[row], raft.optical_flow(network, *pair, 1)[0], atol=2e-2, rtol=1e-2)
        assert batch.extra[row].abs().sum() > 0
    ends = dataset.episode_start[1:] - 1
    assert (next(sequential(dataset, 9, max_offset=0, device=CPU, fields=("raft",), indices=ends)).extra == 0).all()
    before, again = digests(flow_dir), attach(flow_dir, None)  # the weights are not needed any more
    assert digests(flow_dir) == before and len(before) == 2
    about = again.summary()["extra"]["raft"]
    assert about == dataset.attached["raft"] and (about["raft"], about["iterations"]) == ("small", 1)
    assert len(about["weights"]) == len(about["hash"]) == 64


def test_both_renders_share_the_files(flow_dir: Path, weights: Path) -> None:
    """The second is added; what was mapped before, and the hash of the first, stay as they are."""
    first = attach(flow_dir, None)
    clean, again = attach(flow_dir, weights, "clean"), attach(flow_dir, None)
    assert all(store.read(path).arrays.keys() == {"clean/flow", "distractor/flow"} for path in flow_files(flow_dir))
    assert again.attached == first.attached  # so a run that began before the second render was added goes on
    again.verify()
    rows = [dataset.rows("raft", np.arange(dataset.num_frames)) for dataset in (first, again, clean)]
    assert np.array_equal(rows[0], rows[1]) and np.array_equal(rows[0], rows[2])  # both renders of a planted set agree


@pytest.mark.parametrize("case", ["iterations", "weights", "weights, one file missing"])
def test_other_settings_are_refused(flow_dir: Path, weights: Path, tmp_path: Path, case: str) -> None:
    before = digests(flow_dir)
    if "missing" in case:
        flow_files(flow_dir)[0].unlink()
    with pytest.raises(UserError, match="iterations: 1 -> 3" if case == "iterations" else "weights: ") as error:
        if case == "iterations":
            attach(flow_dir, weights, iterations=3)
        else:
            attach(flow_dir, other_weights(weights, tmp_path))
    assert "rm " in str(error.value) and ".raft.h5" in str(error.value)
    assert digests(flow_dir) == (before[1:] if "missing" in case else before)  # nothing was added or lost


@pytest.mark.parametrize("damage", ["truncated", "stale", "flipped"])
def test_damaged_files(flow_dir: Path, weights: Path, damage: str, capsys: pytest.CaptureFixture) -> None:
    """What the header shows is computed again; a flipped bit in the flow is detected by --verify, as in masks."""
    before, files = digests(flow_dir), flow_files(flow_dir)
    content = bytearray(files[1].read_bytes())
    if damage == "truncated":
        files[1].write_bytes(content[: len(content) // 2])
    elif damage == "stale":
        files[1].write_bytes(files[0].read_bytes())
    else:
        content[len(content) // 2] ^= 1
        files[1].write_bytes(content)
        with pytest.raises(UserError, match=rf"{files[1].name}.*does not match its hash; repair with: rm"):
            Dataset(flow_dir, "cheetah-run", "train").verify()
        files[1].unlink()
    attach(flow_dir, weights)
    assert digests(flow_dir) == before
    assert damage == "flipped" or f"{files[1]}: " in capsys.readouterr().out


def make_flow(data: Path, weights: Path) -> None:
    """What a process of `test_killed_stopped_and_shared` does; exit code 7: stopped by a signal."""
    torch.set_num_threads(1)
    cli.install_signal_handlers()
    try:
        attach(data, weights)
    except Stopped:
        raise SystemExit(7) from None


def test_killed_stopped_and_shared(tmp_path: Path, weights: Path) -> None:
    """Killed and stopped in the middle, then two processes at once: the same files as of an undisturbed run."""
    whole, data = (planted.write(tmp_path / name, train=3, test=3, length=18, shards=3) for name in ("a", "b"))

    def start(folder: Path = data) -> Any:
        process = SERVER.Process(target=make_flow, args=(folder, weights))
        process.start()
        return process

    def wait(process: Any, files: int) -> None:
        while len(flow_files(data)) < files or not list(data.rglob("*.claim")):
            assert process.is_alive()
            time.sleep(0.002)

    undisturbed, process = start(whole), start()
    wait(process, 0)
    process.kill()
    process.join()
    assert not flow_files(data) and list(data.rglob("*.claim"))
    process = start()
    wait(process, 1)
    process.terminate()
    process.join()
    assert process.exitcode == 7 and 1 <= len(flow_files(data)) < 3 and not list(data.rglob("*.claim"))
    processes = [start(), start(), undisturbed]
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0, 0, 0]
    assert digests(data) == digests(whole) and not list(data.rglob(".*raft*"))


# --- RAFT's weights


def authors_names(size: str) -> dict[str, str]:
    """torchvision's name -> the name in RAFT's own checkpoints, spelled out module by module."""
    names = {}
    blocks = [(layer, block) for layer in (1, 2, 3) for block in (0, 1)]
    parts = (1, 2) if size == "large" else (1, 2, 3)
    for ours, theirs, norm in (("feature_encoder", "fnet", False), ("context_encoder", "cnet", size == "large")):
        pairs = [("convnormrelu.0", "conv1"), ("conv", "conv2")]
        norms = [("convnormrelu.1", "norm1")] if norm else []
        for layer, block in blocks:
            for part in parts:
                pairs.append((f"layer{layer}.{block}.convnormrelu{part}.0", f"layer{layer}.{block}.conv{part}"))
                norms += [(f"layer{layer}.{block}.convnormrelu{part}.1", f"layer{layer}.{block}.norm{part}")] * norm
            if layer > 1 and block == 0:
                pairs.append((f"layer{layer}.0.downsample.0", f"layer{layer}.0.downsample.0"))
                norms += [(f"layer{layer}.0.downsample.1", f"layer{layer}.0.downsample.1")] * norm
        for a, b in pairs:
            names |= {f"{ours}.{a}.{end}": f"{theirs}.{b}.{end}" for end in ("weight", "bias")}
        for a, b in norms:
            ends = ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")
            names |= {f"{ours}.{a}.{end}": f"{theirs}.{b}.{end}" for end in ends}
    update = [("motion_encoder.convcorr1.0", "encoder.convc1"), ("motion_encoder.convflow1.0", "encoder.convf1")]
    update += [("motion_encoder.convflow2.0", "encoder.convf2"), ("motion_encoder.conv.0", "encoder.conv")]
    update += [("flow_head.conv1", "flow_head.conv1"), ("flow_head.conv2", "flow_head.conv2")]
    if size == "large":
        update.append(("motion_encoder.convcorr2.0", "encoder.convc2"))
        update += [(f"recurrent_block.convgru{n}.conv{g}", f"gru.conv{g}{n}") for n in (1, 2) for g in "zrq"]
        for end in ("weight", "bias"):
            names |= {f"mask_predictor.convrelu.0.{end}": f"update_block.mask.0.{end}"}
            names |= {f"mask_predictor.conv.{end}": f"update_block.mask.2.{end}"}
    else:
        update += [(f"recurrent_block.convgru1.conv{g}", f"gru.conv{g}") for g in "zrq"]
    for a, b in update:
        names |= {f"update_block.{a}.{end}": f"update_block.{b}.{end}" for end in ("weight", "bias")}
    return names


@pytest.mark.parametrize("size", ["small", "large"])
def test_weights_under_the_authors_names(size: str, tmp_path: Path) -> None:
    from torchvision.models import optical_flow

    torch.manual_seed(1)
    state = {"small": optical_flow.raft_small, "large": optical_flow.raft_large}[size]().state_dict()
    names = authors_names(size)
    assert set(names) == set(state)
    theirs = {names[name]: value for name, value in state.items()}
    for name in list(theirs):  # the norm of a downsampling convolution stands twice in their files
        match = re.fullmatch(r"(.*cnet\.layer[23]\.0\.)downsample\.1\.(\w+)", name)
        if match:
            theirs[f"{match[1]}norm3.{match[2]}"] = theirs[name]
    loaded = []
    for weights in (state, theirs, {f"module.{name}": value for name, value in theirs.items()}):
        torch.save(weights, tmp_path / "weights.pth")
        loaded.append(raft.load_raft(size, tmp_path / "weights.pth", CPU))
    for network, digest in loaded:
        assert digest == loaded[0][1] and not network.training
        assert all(torch.equal(value, state[name]) for name, value in network.state_dict().items())


@pytest.mark.parametrize(
    ("size", "content", "message"),
    [
        ("large", None, "is it RAFT small? Then add --raft small"),
        ("small", b"no checkpoint", "not a readable file of weights"),
        ("small", {"a": 1}, "holds no plain dictionary of weights"),
        ("small", {"a": torch.zeros(1)}, "not the weights of RAFT small"),
        ("small", "absent", "no such file"),
    ],
)
def test_wrong_files_are_named(size: str, content: Any, message: str, weights: Path, tmp_path: Path) -> None:
    path = tmp_path / "file.pth"
    if isinstance(content, dict):
        torch.save(content, path)
    elif content != "absent":
        path.write_bytes(content or weights.read_bytes())
    with pytest.raises(UserError, match=re.escape(message)) as error:
        raft.load_raft(size, path, CPU)
    assert str(error.value).startswith(f"--raft-checkpoint {path}: ") and "\n" not in str(error.value)


def test_no_network_is_one_clear_message(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All connections are refused: the message names the file to get and the flag."""
    for name, value in {"TORCH_HOME": tmp_path, "https_proxy": "http://127.0.0.1:9", "no_proxy": ""}.items():
        monkeypatch.setenv(name, str(value))
    with pytest.raises(UserError, match=r"(?s)https://download\.pytorch\.org/models/raft_small.*--raft-checkpoint"):
        raft.load_raft("small", None, CPU)
