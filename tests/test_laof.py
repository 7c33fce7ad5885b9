"""LAOF: parameter counts by hand, RAFT's flow and its files, the flow picture, and what each network sees."""

import hashlib
import json
import math
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import planted
import pytest
import torch
import torch.nn.functional as F
from methods import CPU, attach_planted_flow, build, lam_sampler, raft_checkpoint

import laof
from common import raft as raft_weights
from common.dataset import Dataset, Sampler, sequential, unpack_masks
from common.errors import UserError
from common.shards import read_sidecar, sidecar_path, write_sidecar

ROOT = Path(__file__).parents[1]
REAL_RAFT = ROOT / "../shared/weights/raft_small.pth"


@pytest.fixture
def flow_dir(tmp_path: Path) -> Path:
    """A small set of its own, in three shards, beside which flow is written."""
    return planted.write(tmp_path / "data", train=3, test=3, length=9, shards=3)


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return raft_checkpoint(tmp_path_factory.mktemp("raft"))


def flow_args(weights: Path, **changes) -> laof.Args:
    return laof.Args(**({"raft": "small", "raft_checkpoint": weights, "raft_iterations": 2} | changes))


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
def test_parameter_counts(size: int, figure: float) -> None:
    """Of the paper's networks, against counts by hand and the figures of the specification."""
    model = laof.LatentActionModel(laof.Args(), size).eval()
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
    with torch.no_grad():
        prediction, flow, z = model(torch.zeros(2, 4, 3, size, size))
    assert prediction.shape == flow.shape == (2, 3, size, size) and z.shape == (2, 128)
    assert max(prediction.abs().max(), flow.abs().max()) <= 0.5
    x = torch.zeros(1, 128 + 3, size, size)
    for level in model.world_model.down:
        x = level(x)
    assert x.shape[-2:] == (2, 2) and model.world_model.bottleneck(x).shape[-2:] == (1, 1)


def test_the_flow_decoder_sees_no_image() -> None:
    """Other frames with the same z give the same flow, bit for bit; and its gradient reaches frames through z alone."""
    _, _, model = build("laof", size=32)
    model.eval()
    window = torch.rand(4, 4, 3, 32, 32) - 0.5
    z = model.infer(window).detach()
    flows = []
    for frames in (window, torch.rand(4, 4, 3, 32, 32)):
        model.infer = lambda _: z
        flows.append(model(frames)[1])
    assert torch.equal(*flows)
    frames = window.clone().requires_grad_()
    prediction, flow, _ = model(frames)
    assert torch.autograd.grad(flow.sum(), frames, allow_unused=True)[0] is None
    assert torch.autograd.grad(prediction.sum(), frames)[0].abs().sum() > 0  # the world model does see o_t
    with pytest.raises(RuntimeError):
        model.flow_decoder(window[:, 2], z)


def test_each_network_gets_its_frames(planted_dir: Path) -> None:
    """The IDM sees o_t and o_{t+1}, the world model o_t; z comes in at the input and at the bottleneck."""
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
    prediction, flow, _ = model.train()(module.observe(batch, args))
    torch.testing.assert_close(logs["frame"], F.mse_loss(prediction, following))
    torch.testing.assert_close(logs["flow"], F.mse_loss(flow, module.flow_target(batch, args)))


def test_defaults_follow_the_papers_table() -> None:
    """The hyperparameter table of LAOF, DCS / DMW."""
    dcs, dmw = laof.defaults(["--env", "walker-run"]), laof.defaults(["--env=reach"])
    for args, batch, epochs, lam, bc in ((dcs, 512, 2, 3e-4, 2e-4), (dmw, 128, 4, 1.5e-4, 1e-4)):
        assert (args.batch_size, args.lam_epochs, args.policy_epochs) == (batch, epochs, epochs)
        assert (args.lam_lr, args.policy_lr, args.decoder_lr) == (lam, bc, 1e-3)
        assert (args.lam_clip, args.decoder_clip, args.decoder_updates, args.num_labels) == (2.0, 2.0, 25_000, 128_000)
        assert (args.latent_dim, args.idm_scale, args.world_model_width, args.policy_scale) == (128, 4, 24, 4)
        assert (args.decoder_dim, args.raft, args.mask_source) == (256, "large", "gt")


def test_schedule() -> None:
    args = laof.Args()
    lam = [laof.schedule(args, "lam", step, 1050, 0) for step in (0, 25, 50, 550, 1050)]
    assert lam == pytest.approx([0.1, 0.55, 1, 0.505, 0.01])
    for stage in ("bc", "decoder"):
        rates = [laof.schedule(args, stage, step, 3000, 0) for step in (0, 500, 1000, 2000, 3000)]
        assert rates == pytest.approx([0.01, 0.505, 1, 0.5, 0])
    assert [laof.schedule(args, "bc", step, 4, 0) for step in range(4)] == pytest.approx([0.01, 0.505, 1, 0.5])


# --- flow


def texture(size: int) -> np.ndarray:
    return planted.background(np.random.default_rng(3), size)


@pytest.mark.skipif(not REAL_RAFT.exists(), reason="no weights of RAFT beside the repository")
@pytest.mark.parametrize("size", [64, 128])
@pytest.mark.parametrize("iterations", [4, 12])
def test_flow_of_a_translation(size: int, iterations: int) -> None:
    """A texture that moves by a known number of pixels: right within 0.2 pixels, away from what moves into view.

    That is at 64 pixels. RAFT works on 128 pixels then, too, and its own error, here up to 0.34 pixels, is not halved.
    """
    raft, _ = raft_weights.load_raft("small", REAL_RAFT, CPU)
    large = texture(2 * size)  # cut out of a larger one, so that nothing wraps around
    steps = [(2, 0), (0, -3), (-1, 2), (3, 3), (0, 0)]
    start = size // 2
    first = np.stack([large[start : start + size, start : start + size]] * len(steps))
    second = np.stack([large[start - y : start - y + size, start - x : start - x + size] for x, y in steps])
    flow = laof.optical_flow(raft, torch.from_numpy(first), torch.from_numpy(second), iterations).float()
    inside = flow[:, 8:-8, 8:-8]
    expected = torch.tensor(steps).float()[:, None, None].expand_as(inside)
    errors = (inside - expected).norm(dim=-1)
    print("mean endpoint error", errors.mean((1, 2)).tolist())
    assert errors.mean((1, 2)).max() < 0.2 * size / 64


def test_flow_picture_is_hsv() -> None:
    from matplotlib.colors import hsv_to_rgb

    rng = np.random.default_rng(0)
    flow = rng.normal(0, 1.5, (2, 48, 64, 2)).astype(np.float32)
    flow[0, 0, 0] = 0
    speed = np.minimum(np.linalg.norm(flow, axis=-1) / (0.02 * math.hypot(48, 64)), 1)
    hue = np.arctan2(flow[..., 1], flow[..., 0]) / (2 * np.pi) % 1
    expected = hsv_to_rgb(np.stack([hue, speed, speed], axis=-1))
    found = laof.flow_picture(torch.from_numpy(flow), 0.02).movedim(1, -1).numpy()
    assert np.abs(found - expected).max() < 1e-5 and (found[0, 0, 0] == 0).all()
    directions = torch.tensor([[9.0, 0], [0, 9], [-9, 0], [0, -9]]).view(1, 2, 2, 2)  # right, down, left, up
    colours = laof.flow_picture(directions, 0.01).movedim(1, -1).view(4, 3)
    named = [[1, 0, 0], [0.5, 1, 0], [0, 1, 1], [0.5, 0, 1]]  # red, yellow-green, cyan, violet
    torch.testing.assert_close(colours, torch.tensor(named).float(), atol=1e-6, rtol=0)


def test_the_target_is_masked_by_the_next_frame(planted_dir: Path) -> None:
    dataset = Dataset(planted_dir, "cheetah-run", "train")
    attach_planted_flow(dataset)
    batch = next(sequential(dataset, 40, max_offset=1, device=CPU, masks=True, extra="raft"))
    ones = batch._replace(extra=torch.full_like(batch.extra, 3.0))
    target = laof.flow_target(ones, laof.Args())
    now, following = (
        unpack_masks(batch.masks[:, i : i + 1], 32, 32)[:, 0].bool().expand(-1, 3, -1, -1) for i in (2, 3)
    )
    assert (target[~following] == -0.5).all()  # black
    assert (target.amax(1, keepdim=True).expand_as(target)[following] == 0.5).all()  # full value
    assert (now != following).any()
    expected = laof.flow_picture(batch.extra, 0.01)[following] - 0.5
    torch.testing.assert_close(laof.flow_target(batch, laof.Args())[following], expected)


# --- files of flow


def flow_files(data: Path, split: str = "train") -> list[Path]:
    return sorted((data / "cheetah-run" / split).glob("*.raft.h5"))


def digests(data: Path) -> list[str]:
    return [hashlib.sha256(path.read_bytes()).hexdigest() for path in flow_files(data)]


def test_flow_is_computed_once_and_read_back(flow_dir: Path, weights: Path) -> None:
    """Each row is RAFT's flow to the next frame, the last of an episode zero, however the batches fall."""
    dataset, args, state = Dataset(flow_dir, "cheetah-run", "train"), flow_args(weights), torch.get_rng_state()
    laof.attach_flow(dataset, args, CPU)
    assert len(flow_files(flow_dir)) == 3
    assert torch.equal(torch.get_rng_state(), state)  # a run that computes flow starts from the same weights as others
    raft, _ = raft_weights.load_raft("small", weights, CPU)
    batches = []
    for on_device in (False, True):  # gathered from the files, and from one tensor on the device
        options = {"max_offset": 1, "seed": 0, "device": CPU, "masks": True, "extra": "raft", "on_device": on_device}
        sampler = Sampler(dataset, 9, **options)
        batches.append(sampler.next())
        sampler.close()
    assert all(torch.equal(*pair) for pair in zip(*batches))
    batch = batches[0]
    assert batch.extra.shape == (9, 32, 32, 2) and batch.extra.dtype == torch.float16
    for row, t in enumerate(batch.index.tolist()):
        pair = (torch.from_numpy(dataset.frames(np.array([where]))) for where in (t, t + 1))
        expected = laof.optical_flow(raft, *pair, 2)[0]
        torch.testing.assert_close(batch.extra[row], expected, atol=2e-2, rtol=1e-2)
        assert batch.extra[row].abs().sum() > 0
    last = next(sequential(dataset, 9, max_offset=0, device=CPU, extra="raft", indices=dataset.episode_start[1:] - 1))
    assert (last.extra == 0).all()
    before, again = digests(flow_dir), Dataset(flow_dir, "cheetah-run", "train")
    laof.attach_flow(again, flow_args(None), CPU)  # the weights are not needed any more
    assert digests(flow_dir) == before and again.extra_hash == dataset.extra_hash
    about = again.summary()["extra"]["raft"]
    assert about["hash"] == dataset.extra_hash["raft"] and len(about["weights"]) == len(about["hash"]) == 64
    assert (about["raft"], about["iterations"]) == ("small", 2)


def test_both_renders_share_the_files(flow_dir: Path, weights: Path) -> None:
    first = Dataset(flow_dir, "cheetah-run", "train")
    laof.attach_flow(first, flow_args(weights), CPU)
    clean = Dataset(flow_dir, "cheetah-run", "train", "clean")
    laof.attach_flow(clean, flow_args(weights), CPU)
    again = Dataset(flow_dir, "cheetah-run", "train")
    laof.attach_flow(again, flow_args(weights), CPU)
    assert again.extra_hash == first.extra_hash  # so a run that began before the second render was added goes on
    again.verify()
    raft, _ = raft_weights.load_raft("small", weights, CPU)
    for dataset in (first, again, clean):  # also what was mapped before the files had both
        rows = next(sequential(dataset, 30, max_offset=0, device=CPU, extra="raft")).extra
        pair = (torch.from_numpy(dataset.frames(np.array([where]))) for where in (0, 1))
        torch.testing.assert_close(rows[0], laof.optical_flow(raft, *pair, 2)[0], atol=2e-2, rtol=1e-2)


def test_a_file_replaced_while_others_are_computed(flow_dir: Path, weights: Path) -> None:
    """A header read before another process adds the other render: the map shows what the header said."""
    dataset = Dataset(flow_dir, "cheetah-run", "train")
    laof.attach_flow(dataset, flow_args(weights), CPU)
    shard = dataset.shards[0]
    early = read_sidecar(sidecar_path(shard.path, "raft"), shard)
    expected = np.array(early.array("distractor/flow"))
    write_sidecar(shard.path, "raft", {"clean/flow": np.ones_like(expected), "distractor/flow": expected})
    assert np.array_equal(early.array("distractor/flow"), expected)
    late = read_sidecar(sidecar_path(shard.path, "raft"), shard)
    assert late.datasets["distractor/flow"] != early.datasets["distractor/flow"]
    assert np.array_equal(late.array("distractor/flow"), expected) and (late.array("clean/flow") == 1).all()


@pytest.mark.parametrize("case", ["iterations", "weights", "weights, one file missing"])
def test_other_settings_are_refused(flow_dir: Path, weights: Path, tmp_path: Path, case: str) -> None:
    laof.attach_flow(Dataset(flow_dir, "cheetah-run", "train"), flow_args(weights), CPU)
    before = digests(flow_dir)
    state = torch.load(weights, weights_only=True)
    torch.save({name: value + 1e-3 for name, value in state.items()}, tmp_path / "other.pth")
    if "missing" in case:
        flow_files(flow_dir)[0].unlink()
    changes = {"raft_iterations": 3} if case == "iterations" else {"raft_checkpoint": tmp_path / "other.pth"}
    with pytest.raises(UserError, match="iterations: 2 -> 3" if case == "iterations" else "weights: ") as error:
        laof.attach_flow(Dataset(flow_dir, "cheetah-run", "train"), flow_args(weights, **changes), CPU)
    assert "rm " in str(error.value) and ".raft.h5" in str(error.value)
    assert digests(flow_dir) == (before[1:] if "missing" in case else before)  # nothing was added or lost


def test_a_run_goes_on_with_its_own_flow_only(flow_dir: Path, weights: Path, tmp_path: Path) -> None:
    """Files removed and made again with other weights: the run that used the first ones says so."""
    from common import runs

    args, hashes = laof.Args(runs_dir=tmp_path / "runs"), []
    state = torch.load(weights, weights_only=True)
    torch.save({name: value + 1e-3 for name, value in state.items()}, tmp_path / "other.pth")
    for checkpoint in (weights, tmp_path / "other.pth"):
        dataset = Dataset(flow_dir, "cheetah-run", "train")
        laof.attach_flow(dataset, flow_args(checkpoint), CPU)
        hashes.append(dataset.extra_settings["raft"]["weights"])
        for path in flow_files(flow_dir):
            path.unlink()
    assert hashes[0] != hashes[1]
    for first in (True, False):
        run = runs.Run(args, "laof", "test", {"train_hash": "a"})
        run.bind("raft_weights_hash", hashes[0])
        run.close()
        assert first or json.loads((run.dir / "args.json").read_text())["raft_weights_hash"] == hashes[0]
    run = runs.Run(args, "laof", "test", {"train_hash": "a"})
    with pytest.raises(UserError, match="was made with another raft_weights_hash"):
        run.bind("raft_weights_hash", hashes[1])
    run.close()
    with pytest.raises(UserError, match="train_hash"):
        runs.Run(args, "laof", "test", {"train_hash": "b"})


@pytest.mark.parametrize("damage", ["truncated", "stale", "flipped"])
def test_damaged_files(flow_dir: Path, weights: Path, damage: str, capsys: pytest.CaptureFixture) -> None:
    """What the header shows is computed again; a flipped bit in the flow is found by --verify, as in masks."""
    laof.attach_flow(Dataset(flow_dir, "cheetah-run", "train"), flow_args(weights), CPU)
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
    laof.attach_flow(Dataset(flow_dir, "cheetah-run", "train"), flow_args(weights), CPU)
    assert digests(flow_dir) == before
    assert damage == "flipped" or f"{files[1]}: " in capsys.readouterr().out


PROGRAM = """
import sys
from pathlib import Path
import torch, laof
from common import runs
from common.dataset import Dataset
from common.errors import UserError
runs.install_signal_handlers()
torch.set_num_threads(1)
args = laof.Args(raft="small", raft_iterations=2, raft_checkpoint=Path(sys.argv[2]))
print("start", flush=True)
try:
    laof.attach_flow(Dataset(Path(sys.argv[1]), "cheetah-run", "train"), args, torch.device("cpu"))
except runs.Stopped as stopped:
    print(f"stopped: {stopped}", flush=True)
print("end", flush=True)
"""


def start(data: Path, weights: Path) -> subprocess.Popen:
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(data), str(weights)], cwd=ROOT, stdout=subprocess.PIPE, text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": "."},
    )  # fmt: skip
    assert process.stdout.readline() == "start\n"
    return process


def test_killed_stopped_and_shared(tmp_path: Path, weights: Path) -> None:
    """Killed and stopped in the middle, then two processes at once: the same files as of an undisturbed run."""
    made = [planted.write(tmp_path / name, train=3, test=3, length=30, shards=3) for name in ("a", "b")]
    torch.set_num_threads(1)  # as the other processes, so that the same sums are rounded in the same order
    laof.attach_flow(Dataset(made[0], "cheetah-run", "train"), flow_args(weights), CPU)
    folder = made[1] / "cheetah-run/train"

    def wait(files: int, part: bool) -> None:
        deadline = time.monotonic() + 60
        while len(flow_files(made[1])) < files or (part and not list(folder.glob("*.raft.h5.part"))):
            assert time.monotonic() < deadline
            time.sleep(0.002)

    process = start(made[1], weights)
    wait(0, part=True)
    process.kill()
    process.wait()
    assert not flow_files(made[1]) and list(folder.glob("*.part"))
    process = start(made[1], weights)
    wait(1, part=True)
    process.send_signal(signal.SIGTERM)
    assert "the same command goes on" in process.stdout.read()
    process.wait()
    assert 1 <= len(flow_files(made[1])) < 3 and not list(folder.glob("*.part"))
    both = [start(made[1], weights) for _ in range(2)]
    said = [process.stdout.read() for process in both]
    assert [process.wait() for process in both] == [0, 0]
    assert all(text.endswith("end\n") and "stopped: " not in text for text in said)
    assert digests(made[1]) == digests(made[0]) and not list(folder.glob("*.part"))


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
@pytest.mark.parametrize("prefix", ["module.", ""])
def test_weights_under_the_authors_names(size: str, prefix: str, tmp_path: Path) -> None:
    from torchvision.models import optical_flow

    torch.manual_seed(1)
    model = {"small": optical_flow.raft_small, "large": optical_flow.raft_large}[size]()
    state, names = model.state_dict(), authors_names(size)
    assert set(names) == set(state)
    theirs = {prefix + names[name]: value for name, value in state.items()}
    for name in list(theirs):  # the norm of a downsampling convolution stands twice in their files
        match = re.fullmatch(r"(.*cnet\.layer[23]\.0\.)downsample\.1\.(\w+)", name)
        if match:
            theirs[f"{match[1]}norm3.{match[2]}"] = theirs[name]
    torch.save(state, tmp_path / "ours.pth")
    torch.save(theirs, tmp_path / "theirs.pth")
    (ours, digest), (converted, other) = (
        raft_weights.load_raft(size, tmp_path / name, CPU) for name in ("ours.pth", "theirs.pth")
    )
    assert digest == other and not converted.training
    for name, value in converted.state_dict().items():
        assert torch.equal(value, state[name]), name
    pair = torch.rand(2, 1, 3, 128, 128) * 2 - 1
    with torch.inference_mode():
        assert torch.equal(ours(*pair, num_flow_updates=1)[-1], converted(*pair, num_flow_updates=1)[-1])


def test_wrong_files_are_named(weights: Path, tmp_path: Path) -> None:
    for size, content, message in (
        ("large", None, "is it RAFT small? Then add --raft small"),
        ("small", b"no checkpoint", "not a readable file of weights"),
        ("small", {"a": 1}, "holds no plain dictionary of weights"),
        ("small", {"a": torch.zeros(1)}, "not the weights of RAFT small"),
    ):
        path = tmp_path / "file.pth"
        if isinstance(content, dict):
            torch.save(content, path)
        else:
            path.write_bytes(weights.read_bytes() if content is None else content)
        with pytest.raises(UserError, match=re.escape(message)):
            raft_weights.load_raft(size, path, CPU)
    with pytest.raises(UserError, match="no such file"):
        raft_weights.load_raft("small", tmp_path / "absent.pth", CPU)


def test_no_network_is_one_clear_message(planted_dir: Path, tmp_path: Path) -> None:
    """All connections are refused: the message names the file to get and the flag."""
    environment = os.environ | {"TORCH_HOME": str(tmp_path), "https_proxy": "http://127.0.0.1:9", "no_proxy": ""}
    command = [sys.executable, "laof.py", "--data-dir", str(planted_dir), "--runs-dir", str(tmp_path / "runs")]
    command += "--quick --batch-size 16 --num-labels 40 --eval-steps 20".split()
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=environment)
    assert done.returncode == 1 and "Traceback" not in done.stderr, done.stderr
    assert "https://download.pytorch.org/models/raft_small" in done.stderr and "--raft-checkpoint" in done.stderr
    assert json.loads((tmp_path / "runs/laof/cheetah-run").rglob("args.json").__next__().read_text())["raft"] == "small"
