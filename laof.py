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

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from common import evaluation, runs
from common.cli import Count, Name, NotNegative, Positive, Seed, Stopped, cli, env_and_quick, stop_requested
from common.dataset import Batch, Dataset, Sampler, TensorSampler, normalise, updates_for
from common.tasks import is_meta_world
from common.training import Meter, load_training_state, training_state

# isort: split
# --- method: imports ---
from typing import Annotated

from common import pictures
from common.cli import Range, UserError
from common.masks import check_masks, next_masks, unpack_masks
from common.raft import attach_flow, flow_picture
from common.recorded import transfer

# --- end method ---


@dataclass
class Args:
    env: Name = "cheetah-run"
    """task to train on, common/tasks.py lists all fourteen; or the name of a dataset that import_data.py made"""
    seed: Seed = 1
    """seed of the initial weights, the order of the data and the choice of labels"""
    quick: bool = False
    """small networks and a short schedule for a CPU with two cores; the code path stays the same"""
    distractors: bool = True
    """train and evaluate on the distractor render; --no-distractors takes the clean one"""
    stages: Literal["lam", "all"] = "all"
    """lam: end after the latent action model and its NMSE; the same command with all goes on from there"""
    num_labels: tuple[Count, ...] = (128_000,)
    """labelled transitions, drawn by whole episodes; several budgets train a decoder each"""
    latent_dim: Count = 128
    """dimension d_z of the latent action"""
    policy_scale: Count = 4
    """channel multiplier of the latent policy's encoder"""
    batch_size: Count = 512
    """transitions in one update, all stages"""
    lam_epochs: Positive = 2
    """latent action model: passes over the train split"""
    lam_updates: Count | None = None
    """latent action model: updates; None: from lam_epochs"""
    lam_lr: Positive = 6e-4
    """latent action model: peak learning rate"""
    lam_clip: Positive | None = None
    """latent action model: largest norm of the gradient; None: any"""
    policy_epochs: Positive = 2
    """latent policy: passes over the train split"""
    policy_updates: Count | None = None
    """latent policy: updates; None: from policy_epochs"""
    policy_lr: Positive = 4e-4
    """latent policy: peak learning rate"""
    policy_clip: Positive | None = None
    """latent policy: largest norm of the gradient; None: any"""
    decoder_updates: Count = 25_000
    """action decoder: updates"""
    decoder_lr: Positive = 1e-3
    """action decoder: peak learning rate"""
    decoder_clip: Positive | None = 1.0
    """action decoder: largest norm of the gradient; None: any"""
    decoder_dim: Count = 256
    """action decoder: hidden units of its two layers"""
    probe_weight: NotNegative = 0.01
    """weight of the linear action probe that only watches: it sees z detached"""
    weight_decay: NotNegative = 0.01
    """decoupled weight decay of AdamW"""
    eval_episodes: Count = 100
    """episodes of the decoded policy on held-out backgrounds; of recorded videos all held-out ones are used"""
    eval_steps: Count | None = None
    """steps per evaluation episode; None: the task's"""
    # --- method: hyperparameters ---
    idm_scale: Count = 4
    """channel multiplier of the IDM's encoder"""
    lam_warmup: Annotated[int, Range(0)] = 50
    """stage 1: updates, at most half, in which the learning rate rises from 0.1 of its peak; then it falls to 0.01"""
    policy_warmup: Annotated[int, Range(0)] = 1000
    """stages 2 and 3: updates, at most half, in which the rate rises from 0.01 of its peak; then it falls to 0"""
    world_model_width: Annotated[int, Range(2)] = 24
    """base width of the world model and the flow decoder"""
    mask_source: Name = "gt"
    """gt: the simulator's masks; sam or another name: the files that make_masks.py wrote beside the shards"""
    raft: Literal["large", "small"] = "large"
    """which RAFT computes the flow"""
    raft_checkpoint: Path | None = None
    """RAFT's weights, under torchvision's or its authors' names; None: the flow that is there, or torchvision's"""
    raft_iterations: Count = 12
    """RAFT's updates of the flow"""
    flow_scale: Positive = 0.01
    """speed that is drawn in full colour, as a share of the image's diagonal per step (0.9 pixels at 64 x 64)"""
    # --- end method ---
    data_dir: Path = Path("data")
    """folder of the datasets"""
    runs_dir: Path = Path("runs")
    """folder of the run directories"""
    clips_dir: Path | None = None
    """folder of the background clips that made the dataset, for the rollouts; None: data/DAVIS"""
    variant: Name = ""
    """name of this variant's run directory; empty: made from the arguments that differ from the defaults"""
    device: Literal["auto", "cuda", "cpu"] = "auto"
    """where to train; auto takes the GPU if there is one"""
    data_on_gpu: Literal["auto", "always", "never"] = "auto"
    """keep what batches hold on the GPU; auto: if enough of its memory is left for training"""
    eval_envs: Count = 16
    """environments that run in parallel during evaluation, one process each"""
    compile: bool = torch.cuda.is_available()
    """torch.compile the update"""
    compile_mode: Literal["default", "reduce-overhead", "max-autotune"] = "default"
    """mode of torch.compile"""
    log_every: Count = 100
    """updates between two lines of metrics"""
    probe_at: tuple[Count, ...] | None = None
    """updates of the latent action model after which its NMSE is measured too"""
    checkpoint_every: Count = 2000
    """updates between two checkpoints"""
    track: bool = False
    """send the metrics to Weights & Biases too"""
    wandb_project: str = "masklam"
    """project on Weights & Biases"""


# --- method: defaults ---
# What differs from the defaults above on each suite, with --quick, and with --quick on Distracting Meta-World.
DCS: dict[str, Any] = {"lam_lr": 3e-4, "lam_clip": 2.0, "policy_lr": 2e-4, "decoder_clip": 2.0}
DMW = DCS | {"batch_size": 128, "lam_epochs": 4, "lam_lr": 1.5e-4, "policy_epochs": 4, "policy_lr": 1e-4}
QUICK = {"idm_scale": 1, "world_model_width": 8, "policy_scale": 1, "batch_size": 32, "lam_updates": 640}
QUICK |= {"policy_updates": 300, "policy_lr": 1e-3, "decoder_updates": 2000, "num_labels": (5000,), "eval_episodes": 4}
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
    env, quick = env_and_quick(argv, Args.env)
    dmw = is_meta_world(env)
    changes = (DMW if dmw else DCS) | (QUICK if quick else {}) | (QUICK_DMW if dmw and quick else {})
    return replace(Args(), env=env, quick=quick, **changes)


class ResidualBlock(nn.Module):
    """ReLU, 3x3 convolution, ReLU, 3x3 convolution, plus the input."""

    activation = staticmethod(F.relu)

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, channels, 3, padding=1)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.conv2(self.activation(self.conv1(self.activation(x))))


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
        layers = [nn.Linear(latent_dim, hidden_dim), nn.ReLU(), nn.Linear(hidden_dim, hidden_dim), nn.ReLU()]
        super().__init__(*layers, nn.Linear(hidden_dim, action_dim))


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

    def __init__(self, args: Args, size: int, action_dim: int) -> None:
        super().__init__()
        self.idm = Encoder(2 * 3, args.idm_scale, size, args.latent_dim)
        self.world_model = UNet(3, args.world_model_width, size, args.latent_dim)
        self.flow_decoder = UNet(0, args.world_model_width, size, args.latent_dim)

    def infer(self, window: Tensor) -> Tensor:
        """The latent action (B, d_z) between the frames o_t and o_{t+1}."""
        return self.idm(window[:, 2:4].flatten(1, 2))

    def predict(self, window: Tensor, z: Tensor) -> Tensor:
        """The next frame (B, 3, H, W) after the current one, window[:, 2]."""
        return self.world_model(window[:, 2], z)

    def forward(self, window: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The predicted next frame and flow picture, both (B, 3, H, W), and the latent action."""
        z = self.infer(window)
        return self.predict(window, z), self.flow_decoder(None, z), z


# --- end method ---


# --- method: loss ---
def input_fields(args: Args) -> tuple[str, ...]:
    """What of a batch `model_inputs` looks at."""
    return ("frames",)


def open_split(args: Args, split: str) -> Dataset:
    """The data of a split as the method sees it."""
    render = "distractor" if args.distractors else "clean"
    dataset = Dataset(args.data_dir, args.env, split, render, args.mask_source)
    check_masks(dataset)
    if dataset.image_size & (dataset.image_size - 1):
        raise UserError(f"{dataset.folder}: frames of {dataset.image_size} pixels; LAOF's U-Nets need a power of two")
    return dataset


def flow_target(batch: Batch, args: Args) -> Tensor:
    """The flow picture times the agent's mask M_{t+1}, in [-1/2, 1/2] as frames are: (B, 3, H, W)."""
    mask = unpack_masks(batch.masks[:, 3:4], *batch.frames.shape[2:4])[:, 0]
    return flow_picture(batch.extra, args.flow_scale) * mask - 0.5


def model_inputs(batch: Batch, args: Args) -> Tensor:
    """What the networks see of a batch: windows (B, F, 3, H, W)."""
    return normalise(batch.frames)


def lam_loss(model: LatentActionModel, batch: Batch, args: Args) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Mean squared errors of the predicted next frame and of the predicted flow picture, added.

    Returns the loss, the latent actions (B, d_z), and further numbers to log.
    """
    window = model_inputs(batch, args)
    prediction, flow, z = model(window)
    frame_loss = F.mse_loss(prediction.float(), window[:, 3])
    flow_loss = F.mse_loss(flow.float(), flow_target(batch, args))
    return frame_loss + flow_loss, z, {"frame": frame_loss.detach(), "flow": flow_loss.detach()}


def draw(run: runs.Run, args: Args, model: LatentActionModel, test_set: Dataset, device: torch.device) -> list[Path]:
    """Predictions for held-out transitions beside the true frames and flow, and how the flow's target is made."""
    batch = evaluation.held_out_batch(test_set, device, ("frames", "masks", "raft"))
    with torch.inference_mode():
        window = model_inputs(batch, args)
        prediction, decoded, _ = model(window)
    frames, title = {"o(t)": window[:, 2], "o(t+1)": window[:, 3]}, f"{run.script}, {args.env}: held-out transitions"
    masks, target = next_masks(batch), flow_target(batch, args)
    predicted = {"predicted": prediction, "masked flow": target, "decoded flow": decoded}
    flow = flow_picture(batch.extra, args.flow_scale) - 0.5
    inputs = {"M(t+1)": masks.expand(-1, 3, -1, -1) - 0.5, "flow": flow, "masked flow": target}
    return [
        pictures.rows(run.dir / "world_model.png", frames | predicted, masks, title),
        pictures.rows(run.dir / "flow.png", frames | inputs, None, title),
        *transfer(run.dir, model, partial(model_inputs, args=args), test_set, input_fields(args), device),
    ]


# --- end method ---


def encode(model: LatentActionModel, batch: Batch, args: Args) -> Tensor:
    """The latent action (B, d_z) of each transition in a batch."""
    return model.infer(model_inputs(batch, args))


def predict_latents(policy: nn.Module, frames: Tensor) -> Tensor:
    """The policy's latent actions (B, d_z) from the current frames, uint8 (B, 3, H, W, 3), the newest last."""
    return policy(normalise(frames).flatten(1, 2))


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
) -> None:
    """Trains one stage to its end, from its newest checkpoint if there is one; AdamW at the rate of `schedule`."""
    device = next(model.parameters()).device
    done = run.finished(stage)
    if done is not None:
        model.load_state_dict(done["model"])
        return

    groups = [{"params": list(model.parameters())}] + ([{"params": list(probe.parameters())}] if probe else [])
    lr = torch.tensor(learning_rate, device=device)  # a tensor, so that a new rate does not recompile
    optimizer = torch.optim.AdamW(groups, lr=lr, weight_decay=args.weight_decay, fused=True)

    def step_loss(batch: Any) -> tuple[Tensor, dict[str, Tensor]]:
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            loss, z, logs = loss_fn(model, batch, args)
            logs = {"loss": loss.detach()} | logs
            if probe is not None and batch.action.shape[1]:
                probe_loss = F.mse_loss(probe(z.detach()).float(), batch.action)
                loss = loss + args.probe_weight * probe_loss
                logs["probe"] = probe_loss.detach()
        return loss, logs

    compiled_loss = torch.compile(step_loss, mode=args.compile_mode, dynamic=False) if args.compile else step_loss

    step, seconds = 0, 0.0
    saved = run.restore(stage)
    if saved is not None:
        step, seconds = saved["step"], saved["seconds"]
        load_training_state(saved, model, probe, optimizer)
    sampler.seek(step)

    meter = Meter(run, stage, model, sampler, updates, step, seconds)
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
        meter.add(loss, logs)
        step += 1
        if stage == "lam" and step in (args.probe_at or ()):
            meter.probe(partial(encode, args=args), input_fields(args))

        save = step % args.checkpoint_every == 0 or step == updates or stop_requested()
        if step % args.log_every == 0 or save:
            meter.report(rate)
        if save and step < updates:
            path = run.save(stage, step, training_state(model, probe, optimizer) | {"seconds": meter.seconds()})
            meter.saved = step
            if stop_requested():
                raise Stopped(f"{stage} at update {step} of {updates} is in {path}")
    meter.progress.close()
    weights = {"model": model.state_dict(), "probe": probe.state_dict() if probe else None}
    run.finish(stage, updates, weights | {"cost": meter.cost()})


def main(args: Args) -> None:
    device = runs.choose_device(args.device)
    train_set, test_set = open_split(args, "train"), open_split(args, "test")
    distractors = evaluation.held_out_distractors(test_set, args, runs.directory(args, Path(__file__).stem, defaults))
    labelled = train_set.labelled(max(args.num_labels), args.seed)
    run = runs.Run.open(args, Path(__file__).stem, defaults, train_set, test_set, device)
    if run.is_finished():
        return

    torch.manual_seed(args.seed)
    size, action_dim = train_set.image_size, max(train_set.action_dim, 1)  # recorded videos may have no actions
    policy = Encoder(3 * 3, args.policy_scale, size, args.latent_dim)
    decoder = ActionDecoder(args.latent_dim, args.decoder_dim, action_dim)
    probe, policy_probe = (nn.Linear(args.latent_dim, action_dim) for _ in range(2))
    for module in (policy, decoder, probe, policy_probe):
        module.apply(orthogonal_init).to(device, memory_format=torch.channels_last)

    options = {"seed": args.seed, "device": device, "on_device": args.data_on_gpu}  # of every sampler
    # Stage 1: the latent action model.
    # --- method: stages ---
    run.spent("flow", sum(attach_flow(split, args, device) for split in (train_set, test_set)))
    for split in (train_set, test_set):  # the same RAFT made both
        run.add_identity("raft_weights_hash", split.attached["raft"]["weights"])
    model = LatentActionModel(args, size, action_dim).apply(orthogonal_init)
    model.to(device, memory_format=torch.channels_last)
    untrained = copy.deepcopy(model).eval()  # the control of the probe
    sampler = Sampler(train_set, args.batch_size, max_offset=1, fields=("frames", "masks", "raft"), **options)
    updates = updates_for(args.lam_epochs, args.lam_updates, sampler)
    train(run, args, "lam", model, lam_loss, sampler, updates, args.lam_lr, args.lam_clip, probe)
    sampler.close()
    # --- end method ---
    model.eval()
    drawn = draw(run, args, model, test_set, device)

    # What it learned: the latent actions of all transitions, and how well a linear probe reads the true ones from them.
    encode_with = partial(encode, args=args)
    windows = {"batch_size": args.batch_size, "device": device, "max_offset": 1, "fields": input_fields(args)}
    latents = evaluation.table(run, "latents", partial(encode_with, model), train_set, train_set.transitions, **windows)
    probed = evaluation.probe(run, encode_with, model, untrained, latents, **windows)

    networks = {"lam": model} | dict(model.named_children())
    if args.stages == "lam":
        evaluation.write_result(run, probed, [], networks, labelled, drawn)
        return

    # Stage 2: the latent policy clones the latent actions from the current frames.
    latents_here, transitions = latents.to(device), torch.from_numpy(train_set.transitions).to(device)

    def policy_loss(policy: nn.Module, batch: Batch, args: Args) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        z = predict_latents(policy, batch.frames)
        return F.mse_loss(z.float(), latents_here[torch.searchsorted(transitions, batch.index)]), z, {}

    sampler = Sampler(train_set, args.batch_size, max_offset=0, **options)
    updates = updates_for(args.policy_epochs, args.policy_updates, sampler)
    train(run, args, "policy", policy, policy_loss, sampler, updates, args.policy_lr, args.policy_clip, policy_probe)
    sampler.close()
    policy.eval()

    # Stage 3: an action decoder for each label budget. The policy is frozen, so its outputs are computed once.
    def decoder_loss(decoder: nn.Module, rows: dict[str, Tensor], args: Args) -> tuple[Tensor, None, dict[str, Tensor]]:
        return F.mse_loss(decoder(rows["z"]).float(), rows["action"]), None, {}

    def feature(batch: Batch) -> Tensor:
        return predict_latents(policy, batch.frames)

    windows = {"batch_size": args.batch_size, "device": device, "max_offset": 0}
    features = evaluation.table(run, "features", feature, train_set, labelled, **windows)
    decoders = {}
    for num_labels in sorted(args.num_labels, reverse=True):
        frames = train_set.labelled(num_labels, args.seed)  # some of those of the largest budget
        rows = {
            "z": features[np.searchsorted(labelled, frames)].to(device),
            "action": torch.from_numpy(train_set.action[frames].clip(-1, 1)).to(device),
        }
        episodes = train_set.episode_of_frame[frames]
        rows_sampler = TensorSampler(rows, args.batch_size, seed=args.seed, episode=episodes)
        decoders[num_labels] = copy.deepcopy(decoder)
        stage = runs.of_budget("decoder", num_labels, args)
        updates, rate = args.decoder_updates, args.decoder_lr
        train(run, args, stage, decoders[num_labels], decoder_loss, rows_sampler, updates, rate, args.decoder_clip)
        decoders[num_labels].eval()

    # Evaluation: the decoded policies on held-out backgrounds, or on held-out videos.
    def act(frames: Tensor, decoder: nn.Module) -> Tensor:
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            return decoder(predict_latents(policy, frames))

    decoded = evaluation.evaluate(run, act, decoders, distractors, device)
    networks |= {"policy": policy, "decoder": decoder}
    evaluation.write_result(run, probed, decoded, networks, labelled, drawn)


if __name__ == "__main__":
    cli(main, defaults)
