"""Known answers of the method scripts: networks, losses, masks, occlusion, golden losses, and a learning test."""

import dataclasses
import importlib
import json
import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import planted
import pytest
import torch
from methods import CPU, SCRIPTS, build, double_precision, lam_training

import lapo
import masklam
from common import evaluation
from common.dataset import Batch, Dataset, Sampler, sequential
from common.masks import unpack_masks

ROOT = Path(__file__).parents[1]


def first_batch(dataset: Dataset, max_offset: int, size: int = 16) -> Batch:
    sampler = Sampler(dataset, size, max_offset=max_offset, seed=1, device=CPU, masks=True)
    batch = sampler.next()
    sampler.close()
    return batch


# --- networks


def convolution(inputs: int, outputs: int, kernel: int = 3) -> int:
    return inputs * outputs * kernel**2 + outputs


def trunk_count(channels: int, m: int) -> int:
    count = 0
    for width in (16 * m, 32 * m, 32 * m):
        count += convolution(channels, width) + 4 * convolution(width, width)
        channels = width
    return count


@pytest.mark.parametrize(("size", "fdm", "idm"), [(64, 8.6e6, 2.61e6), (128, 13.3e6, 5.76e6)])
def test_parameter_counts(size: int, fdm: float, idm: float) -> None:
    """Against counts by hand, and the figures that the specification gives to three digits."""
    args = masklam.Args()
    model = masklam.LatentActionModel(args, size)
    cells = (size // 8) ** 2
    by_hand = trunk_count(24, 4) + 128 * cells * 128 + 128
    assert sum(p.numel() for p in model.idm.parameters()) == by_hand == pytest.approx(idm, rel=0.005)
    by_hand = trunk_count(12, 6) + (128 + 1) * 192 * cells
    width = 384
    for channels in (192, 192, 96):
        by_hand += convolution(width, channels, 2) + 4 * convolution(channels, channels)
        width = channels
    by_hand += convolution(96, 3, 1)
    assert sum(p.numel() for p in model.fdm.parameters()) == by_hand == pytest.approx(fdm, rel=0.005)
    window = torch.zeros(2, 7, 4, size, size)
    prediction, z = model(window)
    assert prediction.shape == (2, 3, size, size) and z.shape == (2, 128) and prediction.abs().max() <= 0.5


def test_defaults_follow_the_papers_tables() -> None:
    """The hyperparameter tables of LAPO and MaskLAM, DCS / DMW."""
    for module in (lapo, masklam):
        dcs, dmw = module.defaults(["--env", "walker-run"]), module.defaults(["--env=reach"])
        for args, batch, epochs, lam, bc in ((dcs, 512, 2, 6e-4, 4e-4), (dmw, 128, 4, 3e-4, 2e-4)):
            assert (args.batch_size, args.lam_epochs, args.policy_epochs) == (batch, epochs, epochs)
            assert (args.lam_lr, args.policy_lr, args.decoder_lr) == (lam, bc, 1e-3)
            assert (args.decoder_updates, args.decoder_clip, args.num_labels) == (25_000, 1.0, 128_000)
            assert (args.latent_dim, args.idm_scale, args.fdm_scale, args.policy_scale) == (128, 4, 6, 4)
            assert (args.decoder_dim, args.probe_weight, args.lam_updates, args.eval_episodes) == (256, 0.01, None, 100)
    assert masklam.Args().max_offset == 10 and masklam.Args().mask_norm == "sample"


# --- losses


def test_masklam_without_its_parts_is_lapo(train_set: Dataset) -> None:
    """The same initial weights give exactly the same losses and gradients."""
    batch = first_batch(train_set, max_offset=1)
    _, args, reference = build("lapo")
    _, mask_args, model = build("masklam", loss_mask=False, mask_channel=False, max_offset=1)
    model.load_state_dict(reference.state_dict())
    loss, z, _ = lapo.lam_loss(reference, batch, args)
    mask_loss, mask_z, _ = masklam.lam_loss(model, batch, mask_args)
    assert torch.equal(loss, mask_loss) and torch.equal(z, mask_z)
    loss.backward(), mask_loss.backward()
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(reference.parameters(), model.parameters()))


@pytest.mark.parametrize("norm", ["sample", "batch"])
def test_all_ones_masks_give_lapos_loss(norm: str) -> None:
    generator = torch.Generator().manual_seed(0)
    prediction, target = torch.rand(2, 5, 3, 16, 16, generator=generator)
    error = masklam.masked_error(prediction, target, torch.ones(5, 1, 16, 16), norm)
    torch.testing.assert_close(error, torch.nn.functional.mse_loss(prediction, target))


def test_masked_error_by_hand() -> None:
    prediction = torch.zeros(3, 3, 2, 2)
    target = torch.zeros(3, 3, 2, 2)
    target[0, :, 0, 0] = 1.0  # inside the mask of one pixel: error 1
    target[1, :, 0, 0], target[1, :, 1, 1] = 2.0, 100.0  # inside a mask of two pixels: (4 + 0) / 2; the 100 is outside
    mask = torch.tensor([[[1, 0], [0, 0]], [[1, 1], [0, 0]], [[0, 0], [0, 0]]]).float()[:, None]
    assert masklam.masked_error(prediction, target, mask, "sample").item() == pytest.approx((1 + 2 + 0) / 3)
    assert masklam.masked_error(prediction, target, mask, "batch").item() == pytest.approx((1 + 4) / 3)
    empty = torch.zeros(3, 1, 2, 2)
    for norm in ("sample", "batch"):
        assert masklam.masked_error(prediction, target, empty, norm).item() == 0.0


def test_no_gradient_on_z_from_outside_the_mask(train_set: Dataset) -> None:
    """Changing the target outside the mask changes neither the loss nor, bit for bit, the gradient on z."""
    module, args, model = build("masklam")
    window, frames, masks = module.observe(first_batch(train_set, max_offset=10), args)
    gradients = []
    for noise in (0.0, 0.4):
        target = frames[:, 3] + noise * (1 - masks[:, 3]) * torch.randn_like(frames[:, 3])
        z = model.infer(window).detach().requires_grad_()
        prediction = model.fdm(window[:, :3].flatten(1, 2), z)
        module.masked_error(prediction, target, masks[:, 3], "sample").backward()
        gradients.append(z.grad)
    assert torch.equal(*gradients) and gradients[0].abs().sum() > 0


@pytest.mark.parametrize("script", SCRIPTS)
def test_the_probe_does_not_shape_the_model(script: str, planted_dir: Path, tmp_path: Path) -> None:
    """A hundred times the probe's weight leaves the model's weights exactly as they are."""
    weights = []
    for weight in (0.01, 1.0):
        module, args, model = build(script, probe_weight=weight, log_every=5, runs_dir=tmp_path / str(weight))
        weights.append(lam_training(module, args, model, planted_dir, 5).state_dict())
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


def test_windows_of_masklam_see_the_right_frames(train_set: Dataset) -> None:
    """The IDM gets o_t and o_{t+k} with their masks, the FDM o_t, the loss o_{t+1} and M_{t+1}."""
    module, args, model = build("masklam")
    sampler = Sampler(train_set, 16, max_offset=10, seed=3, device=CPU, masks=True)
    t, k = sampler.draw(0)
    batch = sampler.next()
    sampler.close()
    window, _, masks = module.observe(batch, args)
    assert window.shape == (16, 7, 4, 32, 32) and k.max() > 1
    for row, (frame, offset) in enumerate(zip(t, k)):
        for position, index in ((2, frame), (3, frame + 1), (6, frame + offset)):
            image = torch.from_numpy(train_set.frames(np.array([index]))[0]).permute(2, 0, 1) / 255 - 0.5
            mask = np.unpackbits(train_set.masks(np.array([index]))[0]).reshape(32, 32)
            torch.testing.assert_close(window[row, position, :3], image)
            assert np.array_equal(masks[row, position, 0].numpy(), mask)
    received = {}
    model.idm.register_forward_pre_hook(lambda _, inputs: received.update(idm=inputs[0]))
    model.fdm.register_forward_pre_hook(lambda _, inputs: received.update(fdm=inputs[0]))
    model(window)
    assert torch.equal(received["idm"], torch.cat([window[:, :3], window[:, 4:]], 1).flatten(1, 2))
    assert torch.equal(received["fdm"], window[:, :3].flatten(1, 2))


# --- experiment switches


@pytest.mark.parametrize("width", [-3, -1, 1, 3])
def test_mask_dilation_against_scipy(train_set: Dataset, width: int) -> None:
    from scipy import ndimage

    batch = first_batch(train_set, max_offset=10)
    _, _, masks = masklam.observe(batch, masklam.Args(mask_dilation=width))
    plain = unpack_masks(batch.masks, 32, 32).bool().numpy()
    morph = ndimage.binary_dilation if width > 0 else ndimage.binary_erosion
    options = {} if width > 0 else {"border_value": 1}
    element = np.ones((1, 1, 1, 2 * abs(width) + 1, 2 * abs(width) + 1), bool)
    assert np.array_equal(masks.bool().numpy(), morph(plain, element, **options))


def occlude_by_the_papers_steps(masks: np.ndarray, fraction: float, noise: np.ndarray) -> np.ndarray:
    """The five steps of the paper for one window: masks bool (F, H, W) to the hidden pixels bool (H, W)."""
    hidden = np.zeros(masks.shape[1:], bool)
    union = masks.any(0)
    if not union.any():
        return hidden
    ys, xs = np.nonzero(union)
    box_height, box_width = ys.max() - ys.min() + 1, xs.max() - xs.min() + 1
    area = fraction * box_height * box_width
    ratio = math.exp(noise[0] - 0.5)
    height = min(math.sqrt(area * ratio), box_height)
    width = min(area / height, box_width)
    height, width = round(height), round(width)
    top = ys.min() + math.floor(noise[1] * (box_height - height + 1))
    left = xs.min() + math.floor(noise[2] * (box_width - width + 1))
    hidden[top : top + height, left : left + width] = True
    return hidden


@pytest.mark.parametrize("fraction", [0.25, 0.5, 0.75])
def test_occlusion_against_the_papers_steps(train_set: Dataset, fraction: float) -> None:
    batch = first_batch(train_set, max_offset=10, size=64)
    plain = unpack_masks(batch.masks, 32, 32)
    plain[0] = 0  # an empty union must hide nothing
    hidden = masklam.occluded(plain, fraction, batch.noise)[:, 0, 0].numpy()
    for row in range(64):
        expected = occlude_by_the_papers_steps(plain[row, :, 0].bool().numpy(), fraction, batch.noise[row].numpy())
        assert np.array_equal(hidden[row], expected), row
    assert hidden[1:].any((1, 2)).all()
    window, frames, masks = masklam.observe(batch, masklam.Args(occlusion=fraction))
    hidden = torch.from_numpy(masklam.occluded(unpack_masks(batch.masks, 32, 32), fraction, batch.noise).numpy())
    assert (frames.masked_select(hidden) == 0).all() and (masks.masked_select(hidden) == 0).all()
    assert torch.equal(window, torch.cat([frames, masks], 2))


def test_input_mask_hides_everything_but_the_agent(train_set: Dataset) -> None:
    batch = first_batch(train_set, max_offset=10)
    window, frames, masks = masklam.observe(batch, masklam.Args(input_mask=True))
    assert torch.equal(window[:, :, :3], frames * masks)
    assert (frames * (1 - masks)).abs().sum() > 0  # the target stays whole


# --- metrics


def test_nmse_against_scikit_learn() -> None:
    from sklearn.linear_model import LinearRegression

    rng = np.random.default_rng(0)
    z, test_z = rng.standard_normal((2, 500, 12))
    z[:, 3] = 0.0  # a dead dimension
    test_z[:, 3] = 0.0
    z[:, 5] = 1000 + 0.01 * z[:, 5]  # a badly scaled one
    test_z[:, 5] = 1000 + 0.01 * test_z[:, 5]
    weights = rng.standard_normal((12, 4))
    action, test_action = (x @ weights + rng.standard_normal((500, 4)) for x in (z, test_z))
    variance = action.var(0).mean()
    pairs = [
        [(torch.from_numpy(a), torch.from_numpy(b)) for a, b in zip(np.array_split(x, 7), np.array_split(y, 7))]
        for x, y in ((z, action), (test_z, test_action))
    ]
    found = evaluation.nmse(pairs[0], pairs[1], variance)
    reference = LinearRegression().fit(z, action).predict(test_z)
    assert found["nmse"] == pytest.approx(np.mean((reference - test_action) ** 2) / variance, rel=1e-6)
    expected = np.mean((reference - test_action) ** 2, axis=0) / variance
    assert found["per_dimension"] == pytest.approx(expected.tolist(), rel=1e-6)


def test_nmse_of_a_constant_is_one() -> None:
    rng = np.random.default_rng(0)
    action = rng.uniform(-1, 1, (4000, 3))
    pairs = [(torch.zeros(4000, 5), torch.from_numpy(action))]
    assert evaluation.nmse(pairs, pairs, action.var(0).mean())["nmse"] == pytest.approx(1.0, abs=1e-9)


# --- training


GOLDEN = Path(__file__).with_name("golden_losses.json")


@pytest.mark.parametrize("script", SCRIPTS)
def test_golden_losses(script: str, planted_dir: Path, tmp_path: Path) -> None:
    """Ten updates from a fixed seed in float64; a pure refactoring must reproduce them on every processor.

    Remake: python tests/test_methods.py.
    """
    losses = golden(script, planted_dir, tmp_path)
    torch.testing.assert_close(losses, json.loads(GOLDEN.read_text())[script], rtol=1e-8, atol=0)


def golden(script: str, data_dir: Path, runs_dir: Path) -> list[float]:
    with double_precision():
        module, args, model = build(script, log_every=1, runs_dir=runs_dir, lam_lr=1e-3)
        lam_training(module, args, model, data_dir, 10)
    lines = (runs_dir / script / "cheetah-run/test/seed1/metrics.jsonl").read_text().splitlines()
    return [json.loads(line)["lam/loss"] for line in lines]


def test_compile_equals_eager(planted_dir: Path, tmp_path: Path) -> None:
    """The whole update, on a model that keeps one residual block per network: compiling all of them takes minutes."""
    losses = []
    for compiled in (False, True):
        module, args, model = build("masklam", compile=compiled, log_every=1, runs_dir=tmp_path / str(compiled))
        for network in (model.idm, model.fdm):
            blocks = [name for name, part in network.named_modules() if isinstance(part, module.ResidualBlock)]
            for name in blocks[1:]:
                network.set_submodule(name, torch.nn.Identity())
        lam_training(module, args, model, planted_dir, 3)
        lines = (args.runs_dir / "masklam/cheetah-run/test/seed1/metrics.jsonl").read_text().splitlines()
        losses.append([json.loads(line)["lam/loss"] for line in lines])
    torch.testing.assert_close(*losses, rtol=1e-4, atol=1e-6)


def test_masklam_recovers_planted_actions_better_than_lapo(tmp_path: Path) -> None:
    """The method's claim, small: a moving background costs LAPO much of the action, MaskLAM next to none."""
    data = planted.write(tmp_path / "data", train=40, test=8, length=50, size=16, action_dim=2)
    found = {}
    for script in ("lapo", "masklam"):
        changes = {"batch_size": 32, "lam_lr": 2e-3, "runs_dir": tmp_path, "latent_dim": 16}
        if script == "masklam":
            changes["max_offset"] = 1  # as LAPO: these actions are independent, so o_{t+10} says nothing about a_t
        module, args, model = build(script, size=16, **changes)
        control = pair_nmse(module, args, model, data)
        lam_training(module, args, model, data, 500)
        found[script] = pair_nmse(module, args, model.eval(), data)
        print(f"{script}: NMSE {found[script]:.3f}, untrained {control:.3f}")
        assert found[script] < 0.5 * control
    assert found["masklam"] < 0.5 * found["lapo"]


def pair_nmse(module, args, model, data: Path) -> float:
    sets = [Dataset(data, "cheetah-run", split) for split in ("train", "test")]

    def pairs(dataset: Dataset):
        with torch.inference_mode():
            for batch in sequential(dataset, 256, max_offset=1, device=CPU, masks=True):
                yield module.encode(model, batch, args), batch.action

    return evaluation.nmse(pairs(sets[0]), pairs(sets[1]), sets[0].action_variance)["nmse"]


# --- command line


@pytest.mark.parametrize("script", [*SCRIPTS, "make_dataset", "make_experts", "make_figures"])
def test_help(script: str) -> None:
    command = [sys.executable, "-W", "error::UserWarning:tyro", f"{script}.py", "--help"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "warning" not in done.stderr.lower()
    assert "--env" in done.stdout and "--seed" in done.stdout


def test_common_flags_are_the_same() -> None:
    """Every flag of LAPO but its networks' sizes exists in every method, with the same type and default, in order."""
    common = [(field.name, field.type, field.default) for field in dataclasses.fields(lapo.Args)][:-2]
    assert dataclasses.fields(lapo.Args)[-2].name == "idm_scale" and common[-1][0] == "wandb_project"
    for script in SCRIPTS:
        fields = dataclasses.fields(importlib.import_module(script).Args)
        assert [(field.name, field.type, field.default) for field in fields][: len(common)] == common


if __name__ == "__main__":  # writes the golden losses anew
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        planted_data = planted.write(Path(folder) / "planted")
        losses = {script: golden(script, planted_data, Path(folder)) for script in SCRIPTS}
    GOLDEN.write_text(json.dumps(json.loads(GOLDEN.read_text()) | losses, indent=1) + "\n")
