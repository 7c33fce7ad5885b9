# --- method: about ---
"""LAOM-Labels: latent actions from predicting embeddings, with a few true actions as labels (arXiv 2502.00379).

One encoder sees augmented stacks of frames; the action head infers z from o_t and o_{t+k}, the observation head
predicts the next stack's embedding by a moving average of the encoder. A linear head learns true actions from labels.

    python laom_labels.py --env cheetah-run

The paper's NMSE on cheetah-run: 0.15 clean, 0.17 under distractors; 23.1 hours for all stages on an A100.
--policy-scale 32 is the paper's stage-2 policy; the default is the one that all methods share.
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
from common import pictures
from common.augmentation import Augmentation
from common.cli import Share
from common.dataset import LabelledBatch, LabelledSampler, sequential
from common.masks import next_masks

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
    head_dim: Count = 1024
    """hidden units of the action head and the observation head"""
    label_weight: NotNegative = 1e-3
    """weight of the true actions' error on the labelled transitions, the same ones as in stage 3"""
    target_rate: Share = 1e-3
    """tau of the encoder's exponential moving average, whose embeddings are the targets"""
    max_offset: Count = 10
    """largest k of the frame o_{t+k} that the action head sees during training"""
    max_offset_seconds: Positive | None = None
    """the same in seconds, for recorded videos of a known frame rate"""
    augment: bool = True
    """shift, rotate or distort every stack of frames at random during training"""
    lam_warmup_epochs: NotNegative = 1
    """stage 1: passes, at most half of all, in which the learning rate rises to its peak; then it falls to zero"""
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
DCS: dict[str, Any] = {"idm_scale": 6, "lam_epochs": 3, "policy_lr": 3e-4, "decoder_updates": 20_000}
DCS |= {"decoder_clip": None, "weight_decay": 0.0}
DMW = DCS | {"batch_size": 128, "lam_epochs": 5, "lam_lr": 3e-4, "policy_epochs": 5, "policy_lr": 2e-4}
QUICK = {"idm_scale": 1, "head_dim": 256, "policy_scale": 1, "batch_size": 32, "lam_updates": 640, "lam_lr": 1e-3}
QUICK |= {"policy_updates": 300, "policy_lr": 1e-3, "decoder_updates": 2000, "num_labels": (5000,), "eval_episodes": 4}
QUICK |= {"eval_envs": 2, "log_every": 20, "checkpoint_every": 100, "lam_warmup_epochs": 0.1}
QUICK |= {"augment": False, "label_weight": 1.0}  # a few hundred updates are too few for either to pay off
QUICK_DMW = {"lam_updates": 240, "policy_updates": 200, "eval_steps": 250}


def schedule(args: Args, stage: str, step: int, updates: int, epoch: int) -> float:
    """Learning rate of an update, relative to its peak: up to 1, then down to 0. `epoch`: updates in one pass."""
    warmup = min(round(args.lam_warmup_epochs * epoch), updates // 2) if stage == "lam" else 0
    return (step + 1) / warmup if step < warmup else (updates - step) / (updates - warmup)


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
class ResidualBlock6(ResidualBlock):
    """As ResidualBlock, with ReLU6."""

    activation = staticmethod(F.relu6)


class StackEncoder(nn.Sequential):
    """IMPALA with stride-2 convolutions instead of pooling: (B, channels, size, size) to (B, 32 m size^2 / 64)."""

    def __init__(self, channels: int, scale: int, size: int) -> None:
        layers: list[nn.Module] = []
        for width in (16 * scale, 32 * scale, 32 * scale):
            layers += [nn.Conv2d(channels, width, 3, stride=2, padding=1), ResidualBlock6(width), ResidualBlock6(width)]
            channels = width
        super().__init__(*layers, nn.Flatten())
        self.out_dim = math.prod((32 * scale, size // 8, size // 8))


class MLPBlock(nn.Module):
    """LayerNorm of the input plus an MLP of it with one hidden layer, four times as wide, and ReLU6."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.ReLU6(), nn.Linear(4 * dim, dim))
        self.norm = nn.LayerNorm(dim)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x + self.mlp(x))


class Head(nn.Module):
    """Three times a linear layer and a block, then a linear layer: to (B, out_dim).

    Every linear layer but the last sees `context` (B, context_dim); the first one `x` (B, first_dim) too, if given.
    """

    def __init__(self, context_dim: int, first_dim: int, dim: int, out_dim: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(context_dim + width, dim) for width in (first_dim, dim, dim))
        self.blocks = nn.ModuleList(MLPBlock(dim) for _ in range(3))
        self.last = nn.Linear(dim, out_dim)

    def forward(self, context: Tensor, x: Tensor | None = None) -> Tensor:
        for layer, block in zip(self.layers, self.blocks):
            x = block(layer(context if x is None else torch.cat([context, x], dim=1)))
        return self.last(x)


def stacks_of(window: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The stacks (B, 9, H, W) of a window (B, F, 3, H, W) that end at t, at t+k and at t+1."""
    return window[:, :3].flatten(1, 2), window[:, -3:].flatten(1, 2), window[:, 1:4].flatten(1, 2)


class LatentActionModel(nn.Module):
    """Encoder, its moving average, and the heads, on windows of frames (B, F, 3, H, W); see common.dataset.Batch."""

    def __init__(self, args: Args, size: int, action_dim: int) -> None:
        super().__init__()
        self.augmentation = Augmentation(size)
        self.encoder = StackEncoder(3 * 3, args.idm_scale, size)
        self.target = copy.deepcopy(self.encoder).requires_grad_(False)
        dim = self.encoder.out_dim
        self.action_head = Head(2 * dim, 0, args.head_dim, args.latent_dim)
        self.observation_head = Head(args.latent_dim, dim, args.head_dim, dim)
        self.true_action = nn.Linear(args.latent_dim, action_dim)

    def embed(self, current: Tensor, future: Tensor) -> tuple[Tensor, Tensor]:
        """The latent actions (B, d_z) between stacks, and the embeddings (B, dim) of the current ones."""
        now, later = self.encoder(torch.cat([current, future])).chunk(2)
        return self.action_head(torch.cat([now, later], dim=1)), now

    def infer(self, window: Tensor) -> Tensor:
        """The latent action (B, d_z) between the current stack and the one that ends k frames later."""
        current, future, _ = stacks_of(window)
        return self.embed(current, future)[0]

    def forward(self, window: Tensor) -> tuple[Tensor, Tensor]:
        """The predicted embedding (B, dim) of the next stack, and the latent action."""
        current, future, _ = stacks_of(window)
        z, now = self.embed(current, future)
        return self.observation_head(z, now), z

    @torch.no_grad()
    def move_target(self, rate: float) -> None:
        """target = (1 - rate) target + rate encoder, for every weight."""
        torch._foreach_lerp_(list(self.target.parameters()), list(self.encoder.parameters()), rate)


# --- end method ---


# --- method: loss ---
def input_fields(args: Args) -> tuple[str, ...]:
    """What of a batch `model_inputs` looks at."""
    return ("frames",)


def open_split(args: Args, split: str) -> Dataset:
    """The data of a split as the method sees it, which has actions."""
    dataset = Dataset(args.data_dir, args.env, split, "distractor" if args.distractors else "clean").with_actions()
    dataset.max_offset(args)  # seconds without a frame rate are refused before the run begins
    return dataset


def model_inputs(batch: Batch | LabelledBatch, args: Args) -> Tensor:
    """What the networks see of a batch: windows (B, F, 3, H, W)."""
    return normalise(batch.frames)


def lam_loss(model: LatentActionModel, batch: LabelledBatch, args: Args) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Mean squared error of the next stack's embedding, and a little of the true actions' on the labelled batch.

    Returns the loss, the latent actions (B, d_z), and further numbers to log.
    """
    current, future, following = stacks_of(model_inputs(batch, args))
    labelled, labelled_future, _ = stacks_of(model_inputs(batch.labelled, args))
    count, both = len(current), len(current) + len(labelled)
    stacks = torch.cat([current, labelled, future, labelled_future, following])
    if args.augment:
        stacks = model.augmentation(stacks, torch.rand(len(stacks), 12, device=stacks.device))
    current, future, following = stacks.split([both, both, count])
    z, now = model.embed(current, future)
    target = model.target(following)  # its weights take no gradient
    predicted = model.observation_head(z[:count], now[:count].detach())  # no gradient to the present
    embedding_loss = F.mse_loss(predicted.float(), target.float())
    label_loss = F.mse_loss(model.true_action(z[count:]).float(), batch.labelled.action)
    logs = {"embedding": embedding_loss.detach(), "labelled": label_loss.detach()}
    return embedding_loss + args.label_weight * label_loss, z[:count], logs


def draw(run: runs.Run, args: Args, model: LatentActionModel, test_set: Dataset, device: torch.device) -> list[Path]:
    """The held-out frames whose embeddings are nearest to the predicted ones, and what the augmentations do."""
    batch = evaluation.held_out_batch(test_set, device, ("frames", "masks"))
    candidates = test_set.transitions[:: max(1, test_set.num_transitions // 512)][:512]
    with torch.inference_mode():
        batches = sequential(test_set, 64, max_offset=1, device=device, indices=candidates)
        embeddings = [model.target(stacks_of(model_inputs(each, args))[2]) for each in batches]
        window = model_inputs(batch, args)
        distances = torch.cdist(model(window)[0], torch.cat(embeddings))
    nearest = test_set.frames(candidates[distances.argmin(1).cpu().numpy()] + 1)
    named = {"o(t)": window[:, 2], "o(t+1)": window[:, 3], "nearest to\nprediction": nearest}
    drawn = [pictures.rows(run.dir / "world_model.png", named, next_masks(batch), f"{run.script}, {args.env}")]
    if args.augment:
        current = stacks_of(window)[0]
        noise = torch.rand(len(current), 12, device=device)
        noise[:, 0] = (torch.arange(len(current), device=device) + 0.5) / 8  # the eight choices in turn
        named = {"o(t)": current[:, -3:], "augmented": model.augmentation(current, noise)[:, -3:]}
        drawn.append(pictures.rows(run.dir / "augmentations.png", named, None, f"{run.script}, {args.env}"))
    return drawn


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
    with torch.device(device):  # hundreds of millions of weights, so they are initialised where they stay
        model = LatentActionModel(args, size, action_dim).apply(orthogonal_init).to(memory_format=torch.channels_last)
    model.move_target(rate=1.0)  # it starts as the encoder
    untrained = copy.deepcopy(model).eval()  # the control of the probe
    sampler = LabelledSampler(train_set, labelled, args.batch_size, max_offset=train_set.max_offset(args), **options)
    updates = updates_for(args.lam_epochs, args.lam_updates, sampler)
    move_target = partial(LatentActionModel.move_target, rate=args.target_rate)
    train(run, args, "lam", model, lam_loss, sampler, updates, args.lam_lr, args.lam_clip, probe, move_target)
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
