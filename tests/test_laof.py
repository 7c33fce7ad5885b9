"""LAOF: networks and losses by hand, the flow picture, RAFT's weights, and the files of flow."""

import math
import multiprocessing
import re
import shutil
import signal
import time
import urllib.error
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import planted
import pytest
import torch
import torch.nn.functional as F
from methods import CPU, attach_planted_flow, build, lam_sampler, raft_checkpoint

import laof
from common import raft, store
from common.cli import Stopped, UserError
from common.dataset import Dataset, Sampler, sequential
from common.masks import unpack_masks

REAL_RAFT = Path(__file__).parents[1] / "../shared/weights/raft_small.pth"

# --- networks and loss


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
    channels = 32 * b
    for skip, width in zip([z, *levels[::-1]], [*levels[::-1], b]):
        count += convolution(channels + skip, width, 2) + 2 * width + residual(width)
        channels = width
    return count + convolution(b + image, b) + residual(b) + convolution(b, 3, 1)


@pytest.mark.parametrize(("size", "figure"), [(64, 7.8e6), (128, 13.0e6)])
def test_parameter_counts_and_shapes(size: int, figure: float) -> None:
    """Of the paper's networks, against counts by hand and the figures of the specification."""
    with torch.device("meta"):
        model = laof.LatentActionModel(laof.Args(), size, 6)
        prediction, flow, z = model(torch.zeros(2, 4, 3, size, size))
        x = torch.zeros(2, 128 + 3, size, size)
        for level in model.world_model.down:
            x = level(x)
    counts = {name: sum(p.numel() for p in part.parameters()) for name, part in model.named_children()}
    unets = {"world_model": unet_by_hand(3, 24, size, 128), "flow_decoder": unet_by_hand(0, 24, size, 128)}
    idm = counts.pop("idm")
    assert counts == unets == pytest.approx(dict.fromkeys(unets, figure), rel=0.005)
    assert idm == sum(p.numel() for p in laof.Encoder(6, 4, size, 128).parameters())
    assert prediction.shape == flow.shape == (2, 3, size, size) and z.shape == (2, 128)
    assert x.shape[-2:] == (2, 2) and model.world_model.bottleneck(x).shape[-2:] == (1, 1)


def test_what_each_network_sees_and_the_loss(train_set: Dataset) -> None:
    """The IDM sees o_t and o_{t+1}, the world model o_t, the flow decoder z alone, which comes in twice."""
    module, args, model = build("laof")
    sampler = lam_sampler("laof", args, train_set)
    batch = sampler.next()
    sampler.close()
    received = {}
    model.idm.register_forward_pre_hook(lambda _, inputs: received.update(idm=inputs[0]))
    for name in ("world_model", "flow_decoder"):
        for end in ("down", "up"):
            key = f"{name} {end}"
            first = getattr(getattr(model, name), end)[0]
            first.register_forward_pre_hook(lambda _, inputs, key=key: received.update({key: inputs[0]}))
    loss, z, logs = module.lam_loss(model, batch, args)
    index = batch.index.numpy()
    now, following = (torch.from_numpy(train_set.frames(t)).permute(0, 3, 1, 2) / 255 - 0.5 for t in (index, index + 1))
    torch.testing.assert_close(received["idm"], torch.cat([now, following], 1))
    tiled = z[:, :, None, None].expand(-1, -1, 32, 32)
    torch.testing.assert_close(received["world_model down"], torch.cat([now, tiled], 1))
    assert torch.equal(received["flow_decoder down"], tiled)
    for name in ("world_model up", "flow_decoder up"):
        assert torch.equal(received[name][:, -16:], z[:, :, None, None])
    # The losses are plain mean squared errors against o_{t+1} and the masked flow picture.
    prediction, flow, _ = model(module.model_inputs(batch, args))
    assert max(prediction.abs().max(), flow.abs().max()) <= 0.5
    torch.testing.assert_close(logs["frame"], F.mse_loss(prediction, following))
    torch.testing.assert_close(logs["flow"], F.mse_loss(flow, module.flow_target(batch, args)))
    torch.testing.assert_close(loss, logs["frame"] + logs["flow"])


def test_defaults_follow_the_papers_table() -> None:
    """The hyperparameter table of LAOF, DCS / DMW."""
    dcs, dmw = laof.defaults(["--env", "walker-run"]), laof.defaults(["--env=reach"])
    for args, batch, epochs, lam, policy in ((dcs, 512, 2, 3e-4, 2e-4), (dmw, 128, 4, 1.5e-4, 1e-4)):
        assert (args.batch_size, args.lam_epochs, args.policy_epochs) == (batch, epochs, epochs)
        assert (args.lam_lr, args.policy_lr, args.decoder_lr) == (lam, policy, 1e-3)
        assert (args.lam_clip, args.decoder_clip, args.decoder_updates, args.num_labels) == (2, 2, 25_000, (128_000,))
        assert (args.latent_dim, args.idm_scale, args.world_model_width, args.policy_scale) == (128, 4, 24, 4)
        assert (args.decoder_dim, args.raft, args.mask_source) == (256, "large", "gt")


def test_schedule() -> None:
    def rates(stage: str, updates: int, steps: tuple[int, ...]) -> list[float]:
        return [laof.schedule(laof.Args(), stage, step, updates, 0) for step in steps]

    assert rates("lam", 1050, (0, 25, 50, 550, 1050)) == pytest.approx([0.1, 0.55, 1, 0.505, 0.01])
    for stage in ("policy", "decoder"):
        assert rates(stage, 3000, (0, 500, 1000, 2000, 3000)) == pytest.approx([0.01, 0.505, 1, 0.5, 0])
    assert rates("policy", 4, (0, 1, 2, 3)) == pytest.approx([0.01, 0.505, 1, 0.5])


# --- the flow picture and the target


def test_flow_picture_is_hsv() -> None:
    from matplotlib.colors import hsv_to_rgb

    flow = np.random.default_rng(0).normal(0, 1.5, (2, 48, 64, 2)).astype(np.float32)
    flow[0, 0, 0] = 0
    speed = np.minimum(np.linalg.norm(flow, axis=-1) / (0.02 * math.hypot(48, 64)), 1)
    hue = np.arctan2(flow[..., 1], flow[..., 0]) / (2 * np.pi) % 1
    expected = hsv_to_rgb(np.stack([hue, speed, speed], axis=-1))
    picture = raft.flow_picture(torch.from_numpy(flow), 0.02).movedim(1, -1).numpy()
    assert np.abs(picture - expected).max() < 1e-5 and (picture[0, 0, 0] == 0).all()
    directions = torch.tensor([[9.0, 0], [0, 9], [-9, 0], [0, -9]]).view(1, 2, 2, 2)  # right, down, left, up
    colours = raft.flow_picture(directions, 0.01).movedim(1, -1).view(4, 3)
    named = torch.tensor([[1, 0, 0], [0.5, 1, 0], [0, 1, 1], [0.5, 0, 1]])  # red, yellow-green, cyan, violet
    torch.testing.assert_close(colours, named, atol=1e-6, rtol=0)


def test_the_target_is_masked_by_the_next_frame(train_set: Dataset) -> None:
    attach_planted_flow(train_set)
    batch = next(sequential(train_set, 40, max_offset=1, device=CPU, fields=("frames", "masks", "raft")))
    now, following = unpack_masks(batch.masks[:, 2:4], 32, 32).bool().expand(-1, -1, 3, -1, -1).unbind(1)
    target = laof.flow_target(batch._replace(extra=torch.full_like(batch.extra, 3.0)), laof.Args())
    assert (target[~following] == -0.5).all()  # black
    assert (target.amax(1, keepdim=True).expand_as(target)[following] == 0.5).all()  # full value
    assert (now != following).any()
    expected = raft.flow_picture(batch.extra, 0.01)[following] - 0.5
    torch.testing.assert_close(laof.flow_target(batch, laof.Args())[following], expected)


# --- RAFT


@pytest.mark.skipif(not REAL_RAFT.exists(), reason="no weights of RAFT beside the repository")
@pytest.mark.parametrize(("size", "iterations"), [(64, 4), (64, 12), (128, 4)])
def test_flow_of_a_translation(size: int, iterations: int) -> None:
    """A texture that moves by a known number of pixels: right within 0.2 pixels, away from what moves into view.

    That is at 64 pixels. RAFT works on 128 pixels then, too, and its own error, here up to 0.34 pixels, is not halved.
    """
    model, _ = raft.load_raft("small", REAL_RAFT, CPU)
    large = planted.background(np.random.default_rng(3), 2 * size)  # cut out of it, so that nothing wraps around
    steps = [(2, 0), (0, -3), (-1, 2), (3, 3), (0, 0)]
    start = size // 2
    first = np.stack([large[start : start + size, start : start + size]] * len(steps))
    second = np.stack([large[start - y : start - y + size, start - x : start - x + size] for x, y in steps])
    flow = raft.optical_flow(model, torch.from_numpy(first), torch.from_numpy(second), iterations)
    assert flow.shape == (5, size, size, 2) and flow.dtype == torch.float16
    errors = (flow[:, 8:-8, 8:-8].float() - torch.tensor(steps)[:, None, None]).norm(dim=-1)
    assert errors.mean((1, 2)).max() < 0.2 * size / 64


AUTHORS = (  # torchvision's names -> those in the checkpoints of RAFT's authors
    (r"^feature_encoder", "fnet"),
    (r"^context_encoder", "cnet"),
    (r"net\.convnormrelu\.0", "net.conv1"),
    (r"net\.convnormrelu\.1", "net.norm1"),
    (r"net\.conv\.", "net.conv2."),
    (r"convnormrelu(\d)\.0", r"conv\1"),
    (r"convnormrelu(\d)\.1", r"norm\1"),
    (r"motion_encoder\.conv(corr|flow)(\d)\.0", lambda match: f"encoder.conv{match[1][0]}{match[2]}"),
    (r"motion_encoder\.conv\.0", "encoder.conv"),
    (r"mask_predictor\.convrelu\.0", "update_block.mask.0"),
    (r"mask_predictor\.conv", "update_block.mask.2"),
)
SOME_NAMES = {  # as they stand in the authors' files
    "small": ("cnet.layer2.0.conv3.bias", "update_block.gru.convz.weight"),
    "large": (
        "cnet.norm1.running_var",
        "cnet.layer3.0.norm3.weight",
        "update_block.gru.convq2.bias",
        "update_block.encoder.convc2.weight",
        "update_block.encoder.convf1.weight",
        "update_block.mask.2.bias",
    ),
}


@pytest.mark.parametrize("size", ["small", "large"])
@pytest.mark.parametrize("prefix", ["module.", ""])
def test_weights_under_the_authors_names(size: str, prefix: str, tmp_path: Path) -> None:
    from torchvision.models import optical_flow

    torch.manual_seed(1)
    state = {"small": optical_flow.raft_small, "large": optical_flow.raft_large}[size]().state_dict()
    gru = r"gru.conv\2\1" if size == "large" else r"gru.conv\2"
    theirs = {}
    for name, value in state.items():
        for pattern, replacement in (*AUTHORS, (r"recurrent_block\.convgru(\d)\.conv(.)", gru)):
            name = re.sub(pattern, replacement, name)
        theirs[prefix + name] = value
        # The norm of a downsampling convolution stands twice in their files.
        theirs[prefix + re.sub(r"(cnet\.layer[23]\.0\.)downsample\.1", r"\1norm3", name)] = value
    names = {name.removeprefix(prefix) for name in theirs}
    assert names >= set(SOME_NAMES[size]) and not any("convnorm" in name for name in names)
    torch.save(state, tmp_path / "ours.pth")
    torch.save(theirs, tmp_path / "theirs.pth")
    (_, digest), (converted, other) = (raft.load_raft(size, tmp_path / f"{who}.pth", CPU) for who in ("ours", "theirs"))
    assert digest == other and not converted.training
    assert all(torch.equal(value, state[name]) for name, value in converted.state_dict().items())


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return raft_checkpoint(tmp_path_factory.mktemp("raft"))


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
def test_wrong_files_are_refused_in_one_line(
    size: str, content: Any, message: str, weights: Path, tmp_path: Path
) -> None:
    path = tmp_path / "file.pth"
    if isinstance(content, dict):
        torch.save(content, path)
    elif content != "absent":
        path.write_bytes(content or weights.read_bytes())
    with pytest.raises(UserError, match=re.escape(message)) as error:
        raft.load_raft(size, path, CPU)
    assert str(path) in str(error.value) and "\n" not in str(error.value)


def test_no_network_is_one_clear_message(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: Any, **__: Any) -> None:
        raise urllib.error.URLError("connection refused")

    monkeypatch.setenv("TORCH_HOME", str(tmp_path))  # where nothing was downloaded before
    monkeypatch.setattr("torch.hub.urlopen", refused)
    with pytest.raises(UserError, match=r"get https://\S+/raft_small\S+ on .* --raft-checkpoint raft_small_\S+\.pth"):
        raft.load_raft("small", None, CPU)


# --- files of flow

ITERATIONS = 2


def attach(data: Path, checkpoint: Path | None, render: str = "distractor", iterations: int = ITERATIONS) -> Dataset:
    dataset = Dataset(data, "cheetah-run", "train", render)
    settings = SimpleNamespace(raft="small", raft_checkpoint=checkpoint, raft_iterations=iterations)
    raft.attach_flow(dataset, settings, CPU)
    return dataset


def contents(data: Path) -> dict[str, bytes]:
    """What the split's folder holds beside the shards."""
    return {path.name: path.read_bytes() for path in (data / "cheetah-run/train").glob("*.raft.h5*")}


@pytest.fixture(scope="module")
def complete(weights: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small set in three shards of two episodes, with the flow of its distractor render."""
    data = planted.write(tmp_path_factory.mktemp("complete"), train=6, test=3, length=4, shards=3)
    attach(data, weights)
    return data


@pytest.fixture
def copy(complete: Path, tmp_path: Path) -> Callable[..., Path]:
    """Copies of `complete`, without some of the files of flow."""

    def copied(name: str, without: str = "no file") -> Path:
        return shutil.copytree(complete, tmp_path / name, ignore=shutil.ignore_patterns(without))

    return copied


@pytest.fixture(scope="module")
def other_weights(weights: Path) -> Path:
    path = weights.with_name("other.pth")
    torch.save({name: value + 1e-3 for name, value in torch.load(weights, weights_only=True).items()}, path)
    return path


def test_flow_is_raft_s_and_computed_once(complete: Path, weights: Path) -> None:
    """Each row is RAFT's flow to the next frame, the last of an episode zero, however the batches fall."""
    before, state = contents(complete), torch.get_rng_state()
    assert len(before) == 3
    dataset, again = attach(complete, weights), attach(complete, None)  # the weights are not needed any more
    assert contents(complete) == before and again.attached == dataset.attached
    assert torch.equal(torch.get_rng_state(), state)  # a run that computes flow starts from the same weights as others
    about = again.summary()["extra"]["raft"]
    assert (about["raft"], about["iterations"]) == ("small", ITERATIONS)
    assert len(about["weights"]) == len(about["hash"]) == 64
    model, _ = raft.load_raft("small", weights, CPU)
    t = dataset.transitions
    pairs = [torch.from_numpy(dataset.frames(where)) for where in (t, t + 1)]
    flow = torch.from_numpy(dataset.rows("raft", np.arange(dataset.num_frames)))
    torch.testing.assert_close(flow[t], raft.optical_flow(model, *pairs, ITERATIONS), atol=2e-2, rtol=1e-2)
    assert flow[t].abs().sum((1, 2, 3)).min() > 0 and (flow[dataset.episode_start[1:] - 1] == 0).all()
    options = {"max_offset": 1, "seed": 0, "device": CPU, "fields": ("frames", "masks", "raft")}
    for on_device in ("never", "always"):  # gathered from the files, and from one tensor on the device
        sampler = Sampler(dataset, 9, on_device=on_device, **options)
        batch = sampler.next()
        sampler.close()
        assert torch.equal(batch.extra, flow[batch.index])


def test_both_renders_share_the_files(copy: Callable[..., Path], weights: Path) -> None:
    data = copy("data")
    first = attach(data, weights)
    before = first.rows("raft", first.transitions)
    clean = attach(data, weights, "clean")
    again = attach(data, weights)
    assert again.attached == first.attached != clean.attached  # so a run from before the second render can be resumed
    for dataset in (first, again, clean):  # also what was mapped before the files had both; both renders look the same
        assert np.array_equal(dataset.rows("raft", first.transitions), before)
    again.verify()


@pytest.mark.parametrize("missing", ["no file", "00000.raft.h5"])
@pytest.mark.parametrize("field", ["iterations", "weights"])
def test_other_settings_are_refused(
    field: str, missing: str, copy: Callable[..., Path], weights: Path, other_weights: Path
) -> None:
    """Nothing is added or lost, also where files are missing."""
    data = copy("data", without=missing)
    before = contents(data)
    checkpoint, iterations = (other_weights, ITERATIONS) if field == "weights" else (weights, 3)
    with pytest.raises(UserError, match=rf"({field}: .* -> .*); .* rm \S+/\*/\*\.raft\.h5"):
        attach(data, checkpoint, iterations=iterations)
    assert contents(data) == before


def test_missing_files_of_other_weights_are_refused(
    copy: Callable[..., Path], other_weights: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the weights that torchvision downloads are not those of the files that are there."""
    data = copy("data", without="00000.raft.h5")
    before = contents(data)
    monkeypatch.setattr(raft, "_download", lambda _: torch.load(other_weights, weights_only=True))
    with pytest.raises(UserError, match="weights: "):
        attach(data, None)
    assert contents(data) == before


@pytest.mark.parametrize("damage", ["truncated", "stale", "flipped"])
def test_damaged_files(
    damage: str, copy: Callable[..., Path], weights: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What the header shows is said once and made again; a flipped bit in the flow is found by --verify."""
    data = copy("data")
    before, path = contents(data), data / "cheetah-run/train/00001.raft.h5"
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    if damage == "stale":
        content = before["00000.raft.h5"]  # of another shard
    path.write_bytes(content[: len(content) // 2] if damage == "truncated" else content)
    if damage == "flipped":
        with pytest.raises(UserError, match=rf"{path.name}.*does not match its hash; repair with: rm"):
            Dataset(data, "cheetah-run", "train").verify()
        path.unlink()
    attach(data, weights)
    assert contents(data) == before
    assert capsys.readouterr().out.count("; it is made again") == (damage != "flipped")


@pytest.mark.usefixtures("signals")
def test_a_signal_stops_and_the_rest_is_made(
    copy: Callable[..., Path], weights: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the middle of the second shard: the first stays, nothing is left of the second."""
    data, compute, calls = copy("data", without="*.raft.h5"), raft.optical_flow, []

    def interrupted(*arguments: Any) -> torch.Tensor:
        calls.append(arguments)
        if len(calls) == 3:  # a shard has ten frames, two batches
            signal.raise_signal(signal.SIGTERM)
        return compute(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(raft, "optical_flow", interrupted)
        with pytest.raises(Stopped, match=r"the complete files in \S+ stay"):
            attach(data, weights)
    assert len(calls) == 3 and list(contents(data)) == ["00000.raft.h5"]


def attach_in_a_process(data: Path, weights: Path, threads: int) -> None:
    torch.set_num_threads(threads)  # so that sums are rounded as in the other process
    attach(data, weights)


def test_two_processes_share_the_work(copy: Callable[..., Path], complete: Path, weights: Path) -> None:
    """One leaves out the file that the other is making, waits for it and reads it; both make the same bytes."""
    data = copy("data", without="*.raft.h5")
    first, *others = (data / "cheetah-run/train" / name for name in sorted(contents(complete)))
    process = multiprocessing.get_context("forkserver").Process(
        target=attach_in_a_process, args=(data, weights, torch.get_num_threads())
    )
    with store.claim(first):
        process.start()
        deadline = time.monotonic() + 120
        while not all(path.exists() for path in others):
            assert process.is_alive() and time.monotonic() < deadline
            time.sleep(0.01)
        assert not first.exists()
        shutil.copy(complete / first.relative_to(data), first)
        written = first.stat().st_mtime_ns
    process.join(120)
    assert process.exitcode == 0 and first.stat().st_mtime_ns == written
    assert contents(data) == contents(complete) and not list(first.parent.glob(".*"))
