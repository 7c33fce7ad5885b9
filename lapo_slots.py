# --- method: about ---
"""LAPO-Slots: latent actions from one object's slot instead of the picture (Klepach et al., arXiv 2502.09680).

Stage 1 trains VideoSAUR (arXiv 2306.04829): K slots compete for the patch features of a frozen DINOv2. Stage 2 keeps
the slot that tells most about the action. Stage 3 is LAPO on that slot, 4 and 5 are latent policy and decoder.

    python lapo_slots.py --env cheetah-run

The paper's NMSE on cheetah-run: 0.29 clean, 0.66 under distractors; 37.5 hours for all stages on an A100.
It breaks where the agent changes its slot; slots.png shows it, result.json counts it.
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

from common.cli import Range, UserError
from common.dino import FeatureSampler, load_dino
from common.slots import GRUCell, agent_report, attach_slot, check_labelled, draw_slots, probe_slots
from common.weights import weights_hash

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
    slot_updates: Count = 25_000
    """slot pre-training: updates, each on batch_size clips of four frames"""
    slot_lr: Positive = 3e-4
    """slot pre-training: peak learning rate"""
    slot_warmup: Annotated[int, Range(0)] = 1250
    """slot pre-training: updates, at most half, in which the rate rises from zero; then it is halved until the end"""
    slot_clip: Positive = 0.05
    """slot pre-training: largest norm of the gradient"""
    num_slots: Annotated[int, Range(2)] = 4
    """slots per frame"""
    slot_dim: Count = 128
    """dimension of a slot, a multiple of 4"""
    slot_iterations: Count = 3
    """rounds of slot attention per frame"""
    renderer_dim: Count = 1024
    """hidden units of the decoder's three layers"""
    similarity_weight: NotNegative = 0.1
    """weight of the loss on temporal feature similarity"""
    similarity_temperature: Positive = 0.075
    """temperature of that similarity"""
    dino_model: str = "vit_base_patch14_dinov2.lvd142m"
    """timm's name of the frozen Vision Transformer"""
    dino_weights: Literal["pretrained", "random"] = "pretrained"
    """random: seeded random weights, to try the code out"""
    dino_checkpoint: Path | None = None
    """its weights, as timm or DINOv2's authors save them; None: the Hugging Face hub's"""
    dino_image_size: Count = 224
    """height and width of the frames for it; a multiple of its patches' 14 pixels"""
    pca_components: Count = 32
    """slot probing: principal components of a slot"""
    probe_folds: Annotated[int, Range(2)] = 5
    """slot probing: parts of the labelled episodes, each predicted from the others"""
    offset: Count = 10
    """k of o_{t+k}, which the IDM sees and the FDM predicts; less at the end of an episode"""
    lam_dim: Count = 1024
    """hidden units of IDM and FDM"""
    lam_blocks: Count = 3
    """residual blocks of IDM and FDM"""

    def __post_init__(self) -> None:
        if self.slot_dim % 4:
            raise UserError(f"--slot-dim is {self.slot_dim}, must be a multiple of 4: its attention has four heads")

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
DCS: dict[str, Any] = {"batch_size": 256, "lam_epochs": 1, "lam_lr": 3e-4, "policy_epochs": 1, "policy_lr": 3e-4}
DCS |= {"lam_clip": 1.0, "policy_clip": 1.0, "decoder_clip": None}
DMW = DCS | {"batch_size": 128, "lam_epochs": 4, "lam_lr": 1.5e-4, "policy_epochs": 4, "policy_lr": 1.5e-4}
DMW |= {"num_slots": 3}
QUICK = {"policy_scale": 1, "batch_size": 32, "slot_updates": 500, "slot_lr": 1e-3, "slot_warmup": 50}
QUICK |= {"renderer_dim": 256, "lam_dim": 256, "lam_updates": 3000, "lam_lr": 3e-4, "policy_updates": 300}
QUICK |= {"policy_lr": 1e-3, "decoder_updates": 2000, "num_labels": (5000,), "eval_episodes": 4, "eval_envs": 2}
QUICK |= {"dino_model": "vit_small_patch14_dinov2", "dino_weights": "random", "dino_image_size": 112}
QUICK |= {"log_every": 20, "checkpoint_every": 100}
QUICK_DMW = {"policy_updates": 200, "eval_steps": 250}


def schedule(args: Args, stage: str, step: int, updates: int, epoch: int) -> float:
    """Learning rate of an update, relative to its peak; constant but for the slots. `epoch`: updates in one pass."""
    if stage != "slots":
        return 1.0
    warmup = min(args.slot_warmup, updates // 2)
    return step / warmup if step < warmup else 0.5 ** ((step - warmup) / (updates - warmup))


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
class Block(nn.Module):
    """Pre-norm transformer block: attention, of tokens (B, N, D) to each other or to `memory` (B, M, D), and an MLP."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.attention = nn.MultiheadAttention(dim, num_heads=4, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.ReLU(), nn.Linear(4 * dim, dim))

    def forward(self, x: Tensor, memory: Tensor | None = None) -> Tensor:
        query = self.norm1(x)
        memory = query if memory is None else memory
        x = x + self.attention(query, memory, memory, need_weights=False)[0]
        return x + self.mlp(self.norm2(x))


class SlotAttention(nn.Module):
    """Slots (B, K, D) compete for inputs (B, N, D) (arXiv 2006.15055): new slots, and their attention (B, K, N)."""

    def __init__(self, dim: int, iterations: int) -> None:
        super().__init__()
        self.norm_inputs, self.norm_slots = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.key, self.value, self.query = (nn.Linear(dim, dim, bias=False) for _ in range(3))
        self.gru = GRUCell(dim)
        self.iterations = iterations

    def forward(self, slots: Tensor, inputs: Tensor) -> tuple[Tensor, Tensor]:
        inputs = self.norm_inputs(inputs)
        key, value = self.key(inputs), self.value(inputs)
        for _ in range(self.iterations):
            slots = self.norm_slots(slots)  # the GRU's state too, as in VideoSAUR's code
            attention = (self.query(slots) @ key.mT / math.sqrt(key.shape[-1])).softmax(dim=1)  # over the slots
            weights = attention / (attention.sum(dim=2, keepdim=True) + 1e-8)
            slots = self.gru(weights.to(value.dtype) @ value, slots)
        return slots, attention


class SlotMixer(nn.Module):
    """Decodes slots (B, K, D) patch by patch (arXiv 2206.06922): (B, N, out_dim)."""

    def __init__(self, dim: int, patches: int, hidden_dim: int, out_dim: int) -> None:
        super().__init__()
        self.position = nn.Parameter(dim**-0.5 * torch.randn(patches, dim))
        self.norm_memory, self.norm_query, self.norm_slots = (nn.LayerNorm(dim) for _ in range(3))
        self.allocator = nn.ModuleList(Block(dim) for _ in range(3))
        self.query, self.key = (nn.Linear(dim, dim, bias=False) for _ in range(2))
        layers: list[nn.Module] = []
        for width in (dim, hidden_dim, hidden_dim):
            layers += [nn.Linear(width, hidden_dim), nn.ReLU()]
        self.renderer = nn.Sequential(*layers, nn.Linear(hidden_dim, out_dim))

    def forward(self, slots: Tensor) -> Tensor:
        query, memory = self.position.expand(len(slots), -1, -1), self.norm_memory(slots)
        for block in self.allocator:
            query = block(query, memory)
        query, key = self.query(self.norm_query(query)), self.key(self.norm_slots(slots))
        mixed = (query @ key.mT / math.sqrt(key.shape[-1])).softmax(dim=2) @ slots  # each patch its own mixture
        return self.renderer(mixed + self.position)


class VideoSaur(nn.Module):
    """Features of clips (B, T, N, F) to slots that follow objects (arXiv 2306.04829)."""

    def __init__(self, args: Args, patches: int, feature_dim: int) -> None:
        super().__init__()
        dim = args.slot_dim
        self.initial = nn.Parameter(dim**-0.5 * torch.randn(args.num_slots, dim))  # the same in every clip
        hidden, last = nn.Linear(feature_dim, 2 * feature_dim), nn.Linear(2 * feature_dim, dim)
        self.project = nn.Sequential(nn.LayerNorm(feature_dim), hidden, nn.ReLU(), last)
        self.attention = SlotAttention(dim, args.slot_iterations)
        self.predictor = Block(dim)
        self.decoder = SlotMixer(dim, patches, args.renderer_dim, feature_dim + patches)

    def extract(self, features: Tensor) -> tuple[Tensor, Tensor]:
        """Slots (B, K, D) and attention (B, K, N) of frames (B, N, F), each from the learned initial slots."""
        return self.attention(self.initial.expand(len(features), -1, -1), self.project(features))

    def forward(self, features: Tensor) -> tuple[Tensor, Tensor]:
        """Of every frame the decoded features (B, T, N, F), and logits (B, T, N, N): where its patches go next."""
        state, slots = self.initial.expand(len(features), -1, -1), []
        for inputs in self.project(features).unbind(dim=1):
            slots.append(self.attention(state, inputs)[0])
            state = self.predictor(slots[-1])
        decoded = self.decoder(torch.stack(slots, dim=1).flatten(0, 1)).unflatten(0, features.shape[:2])
        return decoded.split([features.shape[-1], features.shape[-2]], dim=-1)


class ResidualMLP(nn.Module):
    """Linear layer, residual blocks x + W ReLU(W norm(x)), linear layer: (B, in_dim) to (B, out_dim)."""

    def __init__(self, in_dim: int, dim: int, blocks: int, out_dim: int) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(in_dim, dim), nn.Linear(dim, out_dim)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(dim), nn.Linear(dim, dim), nn.ReLU(), nn.Linear(dim, dim)) for _ in range(blocks)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = x + block(x)
        return self.last(x)


class LatentActionModel(nn.Module):
    """IDM and FDM on the selected slot now and later, (B, 2, D)."""

    def __init__(self, args: Args, size: int, action_dim: int) -> None:
        super().__init__()
        dim = args.slot_dim
        self.idm = ResidualMLP(2 * dim, args.lam_dim, args.lam_blocks, args.latent_dim)
        self.fdm = ResidualMLP(dim + args.latent_dim, args.lam_dim, args.lam_blocks, dim)

    def infer(self, slots: Tensor) -> Tensor:
        """The latent action (B, d_z) between the slot at t and at t + k."""
        return self.idm(slots.flatten(1))

    def forward(self, slots: Tensor) -> tuple[Tensor, Tensor]:
        """The predicted slot at t + k, (B, D), and the latent action."""
        z = self.infer(slots)
        return self.fdm(torch.cat([slots[:, 0], z], dim=1)), z


# --- end method ---


# --- method: loss ---
def input_fields(args: Args) -> tuple[str, ...]:
    """What of a batch `model_inputs` looks at."""
    return ("slots",)


def open_split(args: Args, split: str) -> Dataset:
    """The data of a split as the method sees it."""
    dataset = Dataset(args.data_dir, args.env, split, "distractor" if args.distractors else "clean").with_actions()
    if split == "train":
        check_labelled(dataset, dataset.labelled(max(args.num_labels), args.seed))
    return dataset


def temporal_similarity(keys: Tensor, temperature: float) -> Tensor:
    """How patches move: for each patch of each frame, probabilities over the patches of the next (VideoSAUR, eq. 2).

    Softmax of the keys' cosine similarity over the temperature, zero where it is negative: (B, T, N, F) to
    (B, T - 1, N, N).
    """
    keys = F.normalize(keys, dim=-1)
    similarity = keys[:, :-1] @ keys[:, 1:].mT
    logits = (similarity / temperature).masked_fill(similarity < 0, -torch.inf)
    return logits.masked_fill((similarity < 0).all(-1, keepdim=True), 0).softmax(-1)


def slot_loss(model: VideoSaur, batch: Batch, args: Args) -> tuple[Tensor, None, dict[str, Tensor]]:
    """Squared error of the decoded features plus the weighted cross-entropy to the temporal similarity."""
    features, keys = batch.extra.chunk(2, dim=-1)  # (B, T, N, F) each
    decoded, logits = model(features)
    with torch.autocast(features.device.type, enabled=False):
        target = temporal_similarity(keys, args.similarity_temperature)
    feature_loss = F.mse_loss(decoded.float(), features)
    similarity_loss = F.cross_entropy(logits[:, :-1].float().flatten(0, 2), target.flatten(0, 2))
    logs = {"feature": feature_loss.detach(), "similarity": similarity_loss.detach()}
    return feature_loss + args.similarity_weight * similarity_loss, None, logs


def model_inputs(batch: Batch, args: Args) -> Tensor:
    """What the latent action model sees of a batch: the selected slot at t and at t + k, (B, 2, D)."""
    return batch.extra.float()


def lam_loss(model: LatentActionModel, batch: Batch, args: Args) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Mean squared error of the predicted slot at t + k. Returns the loss, z (B, d_z), and further numbers to log."""
    slots = model_inputs(batch, args)
    prediction, z = model(slots)
    return F.mse_loss(prediction.float(), slots[:, 1]), z, {}


def draw(run: runs.Run, args: Args, model: LatentActionModel, test_set: Dataset, device: torch.device) -> list[Path]:
    """No pictures but those of the slots: the model predicts a slot, not a frame."""
    return [run.dir / "slots.png"]


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
    # First, slots that follow objects in short clips, from the features of a frozen network.
    dino = load_dino(args.dino_model, args.dino_checkpoint, args.dino_weights == "random", args.dino_image_size)
    run.add_identity("dino_hash", weights_hash(dino.to(device).vit.state_dict()))
    slot_model = VideoSaur(args, dino.patches, dino.dim).apply(orthogonal_init).to(device)
    model = LatentActionModel(args, size, action_dim).apply(orthogonal_init).to(device)
    untrained = copy.deepcopy(model).eval()  # the control of the probe
    # The window of a transition, [t-2, t-1, t, t+1], is a clip of four frames.
    clips = Sampler(train_set, args.batch_size, max_offset=1, **options)
    sampler = FeatureSampler(clips, dino)
    train(run, args, "slots", slot_model, slot_loss, sampler, args.slot_updates, args.slot_lr, args.slot_clip)
    sampler.close()
    slot_model.eval()

    # Then the slot from which a linear probe reads the actions best. Each frame is seen on its own from now on: a
    # slot's number means the same in all frames because all start from the same learned slots, and a model of clips of
    # four frames has not learned to follow objects for a whole episode.
    def extract(batch: Batch) -> tuple[Tensor, Tensor]:
        return slot_model.extract(dino(batch.frames[:, 2])[..., : dino.dim])  # frame t of [t-2, t-1, t]

    frames_at_once = 256 if device.type == "cuda" else 32
    of_frames = partial(evaluation.table, run, batch_size=frames_at_once, device=device, max_offset=0)
    slots = of_frames("slots_labelled", lambda batch: extract(batch)[0], train_set, labelled)
    scores = probe_slots(slots, train_set, labelled, args.pca_components, args.probe_folds)
    best = min(scores, key=lambda score: score["nmse"])["slot"]  # counted from 1
    if (run.dir / "lam.pt").exists():  # trained on the one that was selected then
        best = run.earlier.get("slots", {}).get("selected", best)
    selected = best
    watched = np.arange(test_set.episode_start[min(16, test_set.num_episodes)])  # whole episodes
    attention = of_frames("slots_attention", lambda batch: extract(batch)[1], test_set, watched)
    draw_slots(run.dir / "slots.png", test_set, attention, selected)
    run.about["slots"] = {
        "selected": selected,
        "probing": scores,
        "dino_hash": run.identity["dino_hash"],
        "agent": agent_report(attention, test_set, watched),
        "parameters": sum(weight.numel() for weight in slot_model.parameters()),
    }
    for name, dataset in (("slots_train", train_set), ("slots_test", test_set)):
        every = np.arange(dataset.num_frames)
        slots = of_frames(name, lambda batch: extract(batch)[0][:, selected - 1].half(), dataset, every)
        attach_slot(dataset, slots, selected, args.offset)

    # Last, LAPO on the selected slot.
    sampler = Sampler(train_set, args.batch_size, max_offset=1, fields=input_fields(args), **options)
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
