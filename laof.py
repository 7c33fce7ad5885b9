# --- method: about ---
"""LAOF: latent actions that must also explain the agent's optical flow (Bu et al., arXiv 2511.16407).

LAPO with a U-Net as world model, and a second U-Net that gets z alone and predicts the flow between o_t and o_{t+1}
inside the agent's mask M_{t+1}. RAFT computes the flow once, into <shard>.raft.h5; --raft-checkpoint names its weights.

    python laof.py --env cheetah-run

The paper's NMSE on cheetah-run: 0.55 clean, 0.32 under distractors; 11.2 hours for all stages on an A100.
Under distractors the flow next to the agent bleeds into its mask, so z is asked for what the background does.
"""
# --- end method ---

from __future__ import annotations

import argparse
import copy
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from common import evaluation, pictures, runs
from common.cache import cached, remove_cached
from common.dataset import Batch, Dataset, Sampler, TensorSampler, normalise, sequential, unpack_masks, updates_for
from common.errors import UserError
from common.tasks import get_task

# --- method: imports ---
from common.cache import attach_per_frame
from common.raft import load_raft
# --- end method ---


@dataclass
class Args:
    env: str = "cheetah-run"
    """task to train on; common/tasks.py lists all fourteen"""
    seed: int = 1
    """seed of the initial weights, the order of the data and the choice of labels"""
    quick: bool = False
    """small networks and a short schedule for a CPU with two cores; the code path stays the same"""
    distractors: bool = True
    """train and evaluate on the distractor render; --no-distractors takes the clean one"""
    data_dir: Path = Path("data")
    """folder of the datasets that make_dataset.py wrote"""
    runs_dir: Path = Path("runs")
    """folder of the run directories"""
    variant: str = ""
    """name of this variant's run directory; empty: made from the arguments that differ from the defaults"""
    lam_from: Path | None = None
    """directory of a finished run whose latent action model this one uses, and whose policy if it is to be the same"""
    latent_dim: int = 128
    """dimension d_z of the latent action"""
    policy_scale: int = 4
    """channel multiplier of the latent policy's encoder"""
    batch_size: int = 512
    """transitions in one update, all stages"""
    lam_epochs: float = 2
    """latent action model: passes over the train split"""
    lam_updates: int | None = None
    """latent action model: updates; None: from lam_epochs"""
    lam_lr: float = 6e-4
    """latent action model: peak learning rate"""
    policy_epochs: float = 2
    """latent policy: passes over the train split"""
    policy_updates: int | None = None
    """latent policy: updates; None: from policy_epochs"""
    policy_lr: float = 4e-4
    """latent policy: peak learning rate"""
    policy_clip: float | None = None
    """latent policy: largest norm of the gradient; None: any"""
    decoder_updates: int = 25_000
    """action decoder: updates"""
    decoder_lr: float = 1e-3
    """action decoder: peak learning rate"""
    decoder_clip: float | None = 1.0
    """action decoder: largest norm of the gradient; None: any"""
    decoder_dim: int = 256
    """action decoder: hidden units of its two layers"""
    num_labels: int = 128_000
    """labelled transitions, drawn by whole episodes"""
    probe_weight: float = 0.01
    """weight of the linear action probe that only watches: it sees z detached"""
    weight_decay: float = 0.01
    """decoupled weight decay of AdamW"""
    eval_episodes: int = 100
    """episodes of the decoded policy on held-out backgrounds"""
    eval_steps: int | None = None
    """steps per evaluation episode; None: the task's"""
    eval_envs: int = 16
    """environments that run in parallel during evaluation, one process each"""
    clips_dir: Path | None = None
    """folder of the background clips that made the dataset, for the evaluation; None: data/DAVIS"""
    device: Literal["auto", "cuda", "cpu"] = "auto"
    """where to train; auto takes the GPU if there is one"""
    data_on_gpu: Literal["auto", "always", "never"] = "auto"
    """keep what batches hold on the GPU; auto: if enough of its memory is left for training"""
    compile: bool = torch.cuda.is_available()
    """torch.compile the update"""
    compile_mode: Literal["default", "reduce-overhead", "max-autotune"] = "default"
    """mode of torch.compile"""
    log_every: int = 100
    """updates between two lines of metrics"""
    checkpoint_every: int = 2000
    """updates between two checkpoints"""
    track: bool = False
    """send the metrics to Weights & Biases too"""
    wandb_project: str = "masklam"
    """project on Weights & Biases"""
    # --- method: hyperparameters ---
    idm_scale: int = 4
    """channel multiplier of the IDM's encoder"""
    lam_clip: float = 2.0
    """stage 1: largest norm of the gradient"""
    lam_warmup: int = 50
    """stage 1: updates, at most half, in which the learning rate rises from 0.1 of its peak; then it falls to 0.01"""
    policy_warmup: int = 1000
    """stages 2 and 3: updates, at most half, in which the rate rises from 0.01 of its peak; then it falls to 0"""
    world_model_width: int = 24
    """base width of the world model and the flow decoder"""
    mask_source: str = "gt"
    """gt: the simulator's masks; sam or another name: the files that make_masks.py wrote beside the shards"""
    raft: Literal["large", "small"] = "large"
    """which RAFT computes the flow"""
    raft_checkpoint: Path | None = None
    """RAFT's weights, under torchvision's or its authors' names; None: the flow that is there, or torchvision's"""
    raft_iterations: int = 12
    """RAFT's updates of the flow"""
    flow_scale: float = 0.01
    """speed that is drawn in full colour, as a share of the image's diagonal per step (0.9 pixels at 64 x 64)"""

    def __post_init__(self) -> None:
        runs.check_at_least(self, 2, "world_model_width")
        if self.raft_iterations < 1 or self.flow_scale <= 0:
            raise UserError("--raft-iterations must be at least 1, --flow-scale above 0")


# What differs from the defaults above on each suite, with --quick, and with --quick on Distracting Meta-World.
DCS: dict[str, Any] = {"lam_lr": 3e-4, "policy_lr": 2e-4, "decoder_clip": 2.0}
DMW = DCS | {"batch_size": 128, "lam_epochs": 4, "lam_lr": 1.5e-4, "policy_epochs": 4, "policy_lr": 1e-4}
QUICK = {"idm_scale": 1, "world_model_width": 8, "policy_scale": 1, "batch_size": 32, "lam_updates": 640}
QUICK |= {"policy_updates": 300, "policy_lr": 1e-3, "decoder_updates": 2000, "num_labels": 5000, "eval_episodes": 4}
QUICK |= {"eval_envs": 2, "log_every": 20, "checkpoint_every": 100, "lam_lr": 1e-3, "policy_warmup": 20}
QUICK |= {"raft": "small", "raft_iterations": 4}
QUICK_DMW = {"lam_updates": 240, "policy_updates": 200, "eval_steps": 250}


def schedule(args: Args, stage: str, step: int, updates: int, epoch: int) -> float:
    """Learning rate of an update, relative to its peak: LAPO's piecewise-linear ones. `epoch`: updates in one pass."""
    warmup, start, end = (args.lam_warmup, 0.1, 0.01) if stage == "lam" else (args.policy_warmup, 0.01, 0.0)
    if step < (warmup := min(warmup, updates // 2)):
        return start + (1 - start) * step / warmup
    return 1 + (end - 1) * (step - warmup) / (updates - warmup)


# --- end method ---


def defaults(argv: list[str]) -> Args:
    """The defaults for the --env and --quick on the command line; the remaining arguments override them."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--env", default=Args.env)
    parser.add_argument("--quick", action="store_true")
    known, _ = parser.parse_known_args(argv)
    dmw = get_task(known.env).suite == "dmw"
    changes = (DMW if dmw else DCS) | (QUICK if known.quick else {}) | (QUICK_DMW if dmw and known.quick else {})
    return replace(Args(), env=known.env, quick=known.quick, **changes)


class ResidualBlock(nn.Module):
    """ReLU, 3x3 convolution, ReLU, 3x3 convolution, plus the input."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, channels, 3, padding=1)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.conv2(F.relu(self.conv1(F.relu(x))))


class Impala(nn.Sequential):
    """IMPALA's convolutional trunk (arXiv 1802.01561): (B, in_channels, H, W) to (B, 32 m, H/8, W/8)."""

    def __init__(self, in_channels: int, scale: int) -> None:
        layers = []
        for channels in (16 * scale, 32 * scale, 32 * scale):
            layers += [nn.Conv2d(in_channels, channels, 3, padding=1), nn.MaxPool2d(3, stride=2, padding=1)]
            layers += [ResidualBlock(channels), ResidualBlock(channels)]
            in_channels = channels
        super().__init__(*layers)


class Encoder(nn.Module):
    """IMPALA trunk, flatten, ReLU, linear: (B, in_channels, size, size) to (B, out_dim)."""

    def __init__(self, in_channels: int, scale: int, size: int, out_dim: int) -> None:
        super().__init__()
        self.trunk = Impala(in_channels, scale)
        self.head = nn.Linear(32 * scale * (size // 8) ** 2, out_dim)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.relu(self.trunk(x).flatten(1)))


class ActionDecoder(nn.Sequential):
    """Latent action (B, d_z) to action (B, action_dim): two hidden layers with ReLU."""

    def __init__(self, latent_dim: int, hidden_dim: int, action_dim: int) -> None:
        super().__init__(
            nn.Linear(latent_dim, hidden_dim),
            nn.ReLU(),
            nn.Linear(hidden_dim, hidden_dim),
            nn.ReLU(),
            nn.Linear(hidden_dim, action_dim),
        )


def orthogonal_init(module: nn.Module) -> None:
    """Orthogonal weights and zero biases; for `nn.Module.apply`."""
    if isinstance(module, (nn.Linear, nn.Conv2d, nn.ConvTranspose2d)):
        nn.init.orthogonal_(module.weight)
        if module.bias is not None:
            nn.init.zeros_(module.bias)


# --- method: networks ---
class ResidualLayer(nn.Sequential):
    """ReLU, 3x3 convolution to half the channels, ReLU, 3x3 convolution back, plus the input."""

    def __init__(self, channels: int) -> None:
        half = channels // 2
        narrow, wide = nn.Conv2d(channels, half, 3, padding=1), nn.Conv2d(half, channels, 3, padding=1)
        super().__init__(nn.ReLU(), narrow, nn.ReLU(), wide)

    def forward(self, x: Tensor) -> Tensor:
        return x + super().forward(x)


class UNet(nn.Module):
    """LAPO's U-Net: z (B, d_z), and an image (B, channels, size, size) unless channels is 0, to (B, 3, size, size).

    z is tiled over the input and comes in again at the bottleneck, which is 1 x 1. Widths double from `width` to 16
    width, at the bottleneck 32; 128 pixels have one level of 16 width more than 64. Output in [-1/2, 1/2].
    """

    def __init__(self, channels: int, width: int, size: int, latent_dim: int) -> None:
        super().__init__()
        widths = [width * min(2**level, 16) for level in range(int(math.log2(size)) - 1)]  # down to 2 x 2
        back = widths[::-1]

        def level(convolution: nn.Module, channels: int, *pool: nn.Module) -> nn.Module:
            return nn.Sequential(convolution, nn.BatchNorm2d(channels), ResidualLayer(channels), *pool, nn.ReLU())

        self.down = nn.ModuleList(
            level(nn.Conv2d(a, b, 3, padding=1), b, nn.MaxPool2d(2))
            for a, b in zip([channels + latent_dim, *widths], widths)
        )
        self.bottleneck = nn.Conv2d(widths[-1], 2 * widths[-1], 2)
        self.up = nn.ModuleList(
            level(nn.ConvTranspose2d(below + beside, above, 2, stride=2), above)
            for below, beside, above in zip([2 * widths[-1], *back], [latent_dim, *back], [*back, width])
        )
        first, last = nn.Conv2d(width + channels, width, 3, padding=1), nn.Conv2d(width, 3, 1)
        self.head = nn.Sequential(first, ResidualLayer(width), nn.ReLU(), last)
        self.size = size

    def forward(self, image: Tensor | None, z: Tensor) -> Tensor:
        z = z[:, :, None, None]
        images = [] if image is None else [image]
        found = [torch.cat([*images, z.expand(-1, -1, self.size, self.size)], dim=1)]
        for level in self.down:
            found.append(level(found[-1]))
        x = self.bottleneck(found[-1])
        for level, beside in zip(self.up, [z, *found[:0:-1]]):
            x = level(torch.cat([x, beside], dim=1))
        return torch.tanh(self.head(torch.cat([x, *images], dim=1))) / 2


class LatentActionModel(nn.Module):
    """IDM, world model and flow decoder on windows of frames (B, F, 3, H, W); see common.dataset.Batch."""

    def __init__(self, args: Args, size: int) -> None:
        super().__init__()
        self.idm = Encoder(2 * 3, args.idm_scale, size, args.latent_dim)
        self.world_model = UNet(3, args.world_model_width, size, args.latent_dim)
        self.flow_decoder = UNet(0, args.world_model_width, size, args.latent_dim)

    def infer(self, window: Tensor) -> Tensor:
        """The latent action (B, d_z) between the frames o_t and o_{t+1}."""
        return self.idm(window[:, 2:4].flatten(1, 2))

    def forward(self, window: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The predicted next frame and flow picture, both (B, 3, H, W), and the latent action."""
        z = self.infer(window)
        return self.world_model(window[:, 2], z), self.flow_decoder(None, z), z


# --- end method ---


# --- method: loss ---
@torch.inference_mode()
def optical_flow(raft: nn.Module, frames: Tensor, following: Tensor, iterations: int) -> Tensor:
    """RAFT's flow in pixels per step, float16 (B, H, W, 2) with x before y, between frames uint8 (B, H, W, 3).

    RAFT needs 128 pixels and multiples of 8: smaller frames are enlarged for it, and the flow is averaged back.
    """
    size = frames.shape[1]
    large = max(128, -(-size // 8) * 8)
    pair = torch.stack([frames, following]).flatten(0, 1).movedim(-1, 1).float() / 127.5 - 1
    pair = F.interpolate(pair, size=(large, large), mode="bilinear").chunk(2)
    flow = F.interpolate(raft(*pair, num_flow_updates=iterations)[-1], size=(size, size), mode="area") * (size / large)
    return flow.movedim(1, -1).half()


def attach_flow(dataset: Dataset, args: Args, device: torch.device) -> float:
    """Attaches the flow to the next frame from <shard>.raft.h5, made if missing. Returns the seconds that it took."""
    settings: dict[str, Any] = {"raft": args.raft, "iterations": args.raft_iterations}
    named = None if args.raft_checkpoint is None else load_raft(args.raft, args.raft_checkpoint, device)
    if named is not None:  # flow that another file's weights gave is refused
        settings["weights"] = named[1]

    def prepare() -> tuple[Callable[[Tensor, Tensor], Tensor], dict[str, str]]:
        raft, weights = named or load_raft(args.raft, None, device)
        return lambda *frames: optical_flow(raft, *frames, args.raft_iterations), {"weights": weights}

    return attach_per_frame(dataset, "raft", "flow", settings, prepare, device)


def flow_picture(flow: Tensor, scale: float) -> Tensor:
    """Flow (B, H, W, 2) in pixels as a picture (B, 3, H, W) in [0, 1]: hue is direction, saturation and value speed.

    Right is red, down yellow-green, left cyan, up violet. `scale` times the diagonal, or more, is full colour.
    """
    x, y = flow.float().unbind(-1)
    value = (torch.hypot(x, y) / (scale * math.hypot(*flow.shape[1:3]))).clamp(max=1)
    hue = torch.atan2(y, x) * (3 / math.pi)  # in sixths of a turn
    shade = torch.stack([(hue + offset) % 6 for offset in (5, 3, 1)], dim=1)
    return value[:, None] * (1 - value[:, None] * torch.minimum(shade, 4 - shade).clamp(0, 1))


def flow_target(batch: Batch, args: Args) -> Tensor:
    """The flow picture times the agent's mask M_{t+1}, in [-1/2, 1/2] as frames are: (B, 3, H, W)."""
    mask = unpack_masks(batch.masks[:, 3:4], *batch.frames.shape[2:4])[:, 0]
    return flow_picture(batch.extra, args.flow_scale) * mask - 0.5


def observe(batch: Batch, args: Args) -> Tensor:
    """What the networks see of a batch: windows (B, F, 3, H, W)."""
    return normalise(batch.frames)


def encode(model: LatentActionModel, batch: Batch, args: Args) -> Tensor:
    """The latent action (B, d_z) of each transition in a batch."""
    return model.infer(observe(batch, args))


def lam_loss(model: LatentActionModel, batch: Batch, args: Args) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Mean squared errors of the predicted next frame and of the predicted flow picture, added.

    Returns the loss, the latent actions (B, d_z), and further numbers to log.
    """
    window = observe(batch, args)
    prediction, flow, z = model(window)
    frame_loss = F.mse_loss(prediction.float(), window[:, 3])
    flow_loss = F.mse_loss(flow.float(), flow_target(batch, args))
    return frame_loss + flow_loss, z, {"frame": frame_loss.detach(), "flow": flow_loss.detach()}


# --- end method ---


def train(
    run: runs.Run,
    args: Args,
    stage: str,
    model: nn.Module,
    loss_fn: Callable[[nn.Module, Any, Args], tuple[Tensor, Tensor | None, dict[str, Tensor]]],
    sampler: Any,
    updates: int,
    learning_rate: float,
    clip: float | None = None,
    probe: nn.Module | None = None,
    after_update: Callable[[nn.Module], None] = lambda model: None,
) -> dict[str, float]:
    """Trains one stage to its end, from its newest checkpoint if there is one; AdamW at the rate of `schedule`.

    Returns seconds, updates, samples/s and peak memory of the stage, also when it was finished before.
    """
    device = next(model.parameters()).device
    done = run.finished(stage)
    if done is not None:
        model.load_state_dict(done["model"])
        return done["cost"]

    groups = [{"params": list(model.parameters())}] + ([{"params": list(probe.parameters())}] if probe else [])
    lr = torch.tensor(learning_rate, device=device)  # a tensor, so that a new rate does not recompile
    optimizer = torch.optim.AdamW(groups, lr=lr, weight_decay=args.weight_decay, fused=True)

    def step_loss(batch: Any) -> tuple[Tensor, dict[str, Tensor]]:
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            loss, z, logs = loss_fn(model, batch, args)
            logs = {"loss": loss.detach()} | logs
            if probe is not None:
                probe_loss = F.mse_loss(probe(z.detach()).float(), batch.action)
                loss = loss + args.probe_weight * probe_loss
                logs["probe"] = probe_loss.detach()
        return loss, logs

    compiled_loss = torch.compile(step_loss, mode=args.compile_mode, dynamic=False) if args.compile else step_loss

    def state() -> dict[str, Any]:
        return {
            "model": model.state_dict(),
            "probe": probe.state_dict() if probe else None,
            "optimizer": optimizer.state_dict(),
            "seconds": seconds_before + time.monotonic() - start,
            "random": torch.get_rng_state(),
            "random_cuda": torch.cuda.get_rng_state(device) if device.type == "cuda" else None,
        }

    step, seconds_before, start = 0, 0.0, time.monotonic()
    saved = run.restore(stage)
    if saved is not None:
        step, seconds_before = saved["step"], saved["seconds"]
        model.load_state_dict(saved["model"])
        if probe:
            probe.load_state_dict(saved["probe"])
        optimizer.load_state_dict(saved["optimizer"])
        torch.set_rng_state(saved["random"])
        if device.type == "cuda":
            torch.cuda.set_rng_state(saved["random_cuda"], device)
    sampler.seek(step)

    progress = runs.Progress(f"{run.script} {stage}", updates, "updates", done=step)
    sums: dict[str, Tensor] = {}
    first_bad = torch.full((), -1, device=device)  # first update since the last look whose loss was not finite
    last_step, last_time, last_saved = step, time.monotonic(), step
    model.train()
    while step < updates:
        rate = learning_rate * schedule(args, stage, step, updates, sampler.batches_per_epoch)
        for group in optimizer.param_groups:
            group["lr"].fill_(rate)
        loss, logs = compiled_loss(sampler.next())
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        after_update(model)
        first_bad = torch.where((first_bad < 0) & ~loss.isfinite(), step, first_bad)
        for name, value in logs.items():
            sums[name] = sums[name] + value if name in sums else value.clone()  # a CUDA graph reuses it
        step += 1

        save = step % args.checkpoint_every == 0 or step == updates or runs.stop_requested()
        if step % args.log_every == 0 or save:
            finite = torch.stack([parameter.isfinite().all() for parameter in model.parameters()]).all()
            first_bad = torch.where((first_bad < 0) & ~finite, step - 1, first_bad)
            *means, bad = torch.stack([*sums.values(), first_bad.float()]).tolist()  # the only wait for the device
            if bad >= 0:
                raise run.not_finite(stage, int(bad), sampler.episodes(int(bad)), last_saved)
            count, now = step - last_step, time.monotonic()
            values = {f"{stage}/{name}": mean / count for name, mean in zip(sums, means)}
            values["lr"] = rate
            values["perf/samples_per_s"] = count * sampler.batch_size / (now - last_time)
            run.log(stage, step, values)
            progress.update(count, f"loss {values[f'{stage}/loss']:.4f}")
            sums, last_step, last_time = {}, step, now
        if save and step < updates:
            last_saved = step
            path = run.save(stage, step, state())
            if runs.stop_requested():
                raise runs.Stopped(f"{stage} at update {step} of {updates} is in {path}; the same command goes on")
    progress.close()
    seconds = seconds_before + time.monotonic() - start
    cost = {"seconds": seconds, "updates": updates, "samples_per_s": updates * sampler.batch_size / seconds}
    cost["peak_memory_gib"] = runs.peak_memory_gib(device)
    run.finish(
        stage, updates, {"model": model.state_dict(), "probe": probe.state_dict() if probe else None, "cost": cost}
    )
    return cost


def main(args: Args) -> None:
    task = get_task(args.env)
    runs.check_at_least(args, 0, "seed")
    runs.check_at_least(args, 1, "batch_size", "latent_dim", "policy_scale", "decoder_dim", "log_every")
    runs.check_at_least(args, 1, "lam_updates", "policy_updates", "decoder_updates", "checkpoint_every")
    runs.check_at_least(args, 1, "eval_episodes", "eval_steps", "eval_envs", *({"idm_scale"} & vars(args).keys()))
    if args.eval_steps is not None and args.eval_steps > task.max_steps:
        raise UserError(f"--eval-steps is {args.eval_steps}, but {task.name} ends after {task.max_steps} steps")
    device = runs.choose_device(args.device)
    render = "distractor" if args.distractors else "clean"
    uses_masks = hasattr(args, "mask_source")
    mask_source = args.mask_source if uses_masks else "gt"  # a method without masks shows the true ones in pictures
    train_set = Dataset(args.data_dir, args.env, "train", render, mask_source)
    test_set = Dataset(args.data_dir, args.env, "test", render, mask_source)
    size, action_dim = train_set.image_size, train_set.action_dim
    if test_set.image_size != size:
        sizes = f"{size} pixels, those of {test_set.folder} {test_set.image_size}"
        raise UserError(f"the frames of {train_set.folder} have {sizes}: make one of them again with make_dataset.py")
    distractors = evaluation.held_out_distractors(test_set, task, args.clips_dir)
    labelled = train_set.labelled(args.num_labels, args.seed)
    variant = runs.variant_name(args, defaults([f"--env={args.env}", *(["--quick"] if args.quick else [])]))
    identity = {"train_hash": train_set.hash, "test_hash": test_set.hash, "device_type": device.type}
    identity["mask_hash"] = train_set.mask_hash + test_set.mask_hash if uses_masks else ""
    run = runs.Run(args, Path(__file__).stem, variant, identity)
    print(f"{run.script}: {run.dir} on {device}, {train_set.num_transitions:,} transitions for training")
    result_path = run.dir / "result.json"
    if result_path.exists():
        remove_cached(run)
        print(f"finished before; {result_path} has the result")
        return

    torch.manual_seed(args.seed)
    torch.set_float32_matmul_precision("high")
    policy = Encoder(3 * 3, args.policy_scale, size, args.latent_dim)
    decoder = ActionDecoder(args.latent_dim, args.decoder_dim, action_dim)
    probe, policy_probe = (nn.Linear(args.latent_dim, action_dim) for _ in range(2))
    for module in (policy, decoder, probe, policy_probe):
        module.apply(orthogonal_init).to(device, memory_format=torch.channels_last)
    costs: dict[str, dict[str, float]] = {}
    on_device = {"auto": "auto", "always": True, "never": False}[args.data_on_gpu]

    # --- method: stages ---
    costs["flow"] = {"seconds": sum(attach_flow(split, args, device) for split in (train_set, test_set))}
    run.bind("raft_weights_hash", train_set.extra_settings["raft"]["weights"])
    model = LatentActionModel(args, size).apply(orthogonal_init).to(device, memory_format=torch.channels_last)
    untrained = copy.deepcopy(model).eval()  # the control of the probe
    options = {"max_offset": 1, "masks": True, "extra": "raft", "device": device}
    sampler = Sampler(train_set, args.batch_size, seed=args.seed, on_device=on_device, **options)
    updates, clip = updates_for(args.lam_epochs, args.lam_updates, sampler), args.lam_clip
    costs["lam"] = train(run, args, "lam", model, lam_loss, sampler, updates, args.lam_lr, clip, probe=probe)
    sampler.close()
    model.eval()

    shown = test_set.transitions[:: max(1, test_set.num_transitions // 8)][:8]
    batch = next(sequential(test_set, 8, indices=shown, **options))
    with torch.inference_mode():
        window = observe(batch, args)
        prediction, decoded, _ = model(window)
    named, title = {"o(t)": window[:, 2], "o(t+1)": window[:, 3]}, f"{run.script}, {args.env}: held-out transitions"
    mask, masked = unpack_masks(batch.masks[:, 3:4], size, size)[:, 0], {"masked flow": flow_target(batch, args)}
    found = {"predicted": prediction, **masked, "decoded flow": decoded}
    drawn = [pictures.rows(run.dir / "world_model.png", named | found, mask, title)]
    found = {"M(t+1)": mask.expand(-1, 3, -1, -1) - 0.5, "flow": flow_picture(batch.extra, args.flow_scale) - 0.5}
    drawn.append(pictures.rows(run.dir / "flow.png", named | found | masked, None, title))
    # --- end method ---

    # Latent policy: label every transition once, then clone the latent actions from the current frames.
    windows = {"max_offset": 1, "masks": uses_masks, "indices": train_set.transitions}
    labels, seconds = cached(
        run, "labels", lambda batch: encode(model, batch, args), train_set, args.batch_size, device, **windows
    )
    costs["labels"] = {"seconds": seconds}
    labels_here, transitions = labels.to(device), torch.from_numpy(train_set.transitions).to(device)

    def policy_loss(policy: nn.Module, batch: Batch, args: Args) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        z = policy(normalise(batch.frames).flatten(1, 2))
        return F.mse_loss(z.float(), labels_here[torch.searchsorted(transitions, batch.index)]), z, {}

    sampler = Sampler(train_set, args.batch_size, max_offset=0, seed=args.seed, device=device, on_device=on_device)
    updates = updates_for(args.policy_epochs, args.policy_updates, sampler)
    stage = policy, policy_loss, sampler, updates, args.policy_lr, args.policy_clip, policy_probe
    costs["bc"] = train(run, args, "bc", *stage)
    sampler.close()
    policy.eval()

    # Action decoder: the policy is frozen, so its outputs on the labelled transitions are computed once.
    def feature(batch: Batch) -> Tensor:
        return policy(normalise(batch.frames).flatten(1, 2))

    windows = {"max_offset": 0, "indices": labelled}
    features, seconds = cached(run, "features", feature, train_set, args.batch_size, device, **windows)
    costs["features"] = {"seconds": seconds}
    actions = torch.from_numpy(train_set.action[labelled].clip(-1, 1))
    rows = {"z": features.to(device), "action": actions.to(device)}

    def decoder_loss(
        decoder: nn.Module, batch: dict[str, Tensor], args: Args
    ) -> tuple[Tensor, None, dict[str, Tensor]]:
        return F.mse_loss(decoder(batch["z"]).float(), batch["action"]), None, {}

    rows_sampler = TensorSampler(rows, args.batch_size, seed=args.seed, episode=train_set.episode_of_frame[labelled])
    updates, clip = args.decoder_updates, args.decoder_clip
    costs["decoder"] = train(run, args, "decoder", decoder, decoder_loss, rows_sampler, updates, args.decoder_lr, clip)
    decoder.eval()

    # Evaluation: the linear probe beside its untrained control, then the decoded policy on held-out backgrounds.
    start = time.monotonic()

    def latents(model: nn.Module, dataset: Dataset) -> Iterator[tuple[Tensor, Tensor]]:
        for batch in sequential(dataset, args.batch_size, max_offset=1, device=device, masks=uses_masks):
            if runs.stop_requested():
                raise runs.Stopped("the evaluation starts over when the same command is repeated")
            with torch.inference_mode(), torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
                z = encode(model, batch, args).float()
            yield z, batch.action

    known = zip(labels.split(65536), torch.from_numpy(train_set.action[train_set.transitions].clip(-1, 1)).split(65536))
    probed = evaluation.nmse(known, latents(model, test_set), train_set.action_variance, run.dir / "latents.npz")
    control = evaluation.nmse(latents(untrained, train_set), latents(untrained, test_set), train_set.action_variance)
    costs["probe"] = {"seconds": time.monotonic() - start}

    start = time.monotonic()

    def act(frames: Tensor) -> Tensor:
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            return decoder(policy(normalise(frames).flatten(1, 2)))

    options = {"episodes": args.eval_episodes, "num_envs": args.eval_envs, "device": device, "image_size": size}
    quality, steps = test_set.plan["quality"], args.eval_steps
    rolled = evaluation.rollout(act, task, render, distractors, quality, max_steps=steps, **options)
    costs["rollout"] = {"seconds": time.monotonic() - start}
    metrics = evaluation.metrics(probed, control, rolled, evaluation.normalised_score(rolled, task, train_set))
    run.log("eval", 0, {name: value for name, value in metrics.items() if value is not None})
    drawn.append(pictures.curves(run.dir / "curves.png", run.read_metrics()))
    episodes, counts = np.unique(train_set.episode_of_frame[labelled], return_counts=True)
    networks = {"lam": model, "policy": policy, "decoder": decoder} | dict(model.named_children())
    run.write_result(
        metrics,
        seconds={name: cost["seconds"] for name, cost in costs.items()},
        stages=costs,
        parameters={
            name: sum(w.numel() for w in part.parameters() if w.requires_grad) for name, part in networks.items()
        },
        peak_memory_gib=max(cost.get("peak_memory_gib", 0) for cost in costs.values()),
        nmse_per_dimension=probed["per_dimension"],
        rollout=rolled,
        labelled_transitions=len(labelled),
        labelled_episodes=dict(zip(episodes.tolist(), counts.tolist())),  # episode: how many of its first transitions
        dataset={split.split: split.summary() for split in (train_set, test_set)},
        pictures=[str(path) for path in drawn],
    )
    remove_cached(run)
    run.close()


if __name__ == "__main__":
    runs.cli(main, defaults)
