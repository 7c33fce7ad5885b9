"""What tests need to build and train each method script on a planted data set."""

import contextlib
import importlib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import nn

from common.dataset import Dataset, LabelledSampler, Sampler

SCRIPTS = ("lapo", "laom_labels", "laof", "lapo_slots", "masklam")
CPU = torch.device("cpu")
TINY = {"policy_scale": 1, "batch_size": 16, "latent_dim": 16}
OWN: dict[str, dict[str, Any]] = {
    "lapo": {"idm_scale": 1, "fdm_scale": 1},
    "laom_labels": {"idm_scale": 1, "head_dim": 32, "num_labels": (40,)},
    "laof": {"idm_scale": 1, "world_model_width": 4},
    "lapo_slots": {"slot_dim": 8, "renderer_dim": 16, "lam_dim": 32},
    "masklam": {"idm_scale": 1, "fdm_scale": 1},
}
# The same as flags, for runs as a subprocess. LAOF gets flow of a small RAFT with random weights; see raft_checkpoint.
# LAPO-Slots gets features of a small DINOv2 with random weights.
FLAGS = {
    "lapo": "--idm-scale 1 --fdm-scale 1".split(),
    "laom_labels": "--idm-scale 1 --head-dim 32".split(),
    "laof": "--idm-scale 1 --world-model-width 4 --raft small --raft-iterations 2 --raft-checkpoint RAFT".split(),
    "lapo_slots": "--slot-updates 10 --slot-warmup 2 --slot-dim 16 --renderer-dim 32 --lam-dim 32".split()
    + "--dino-model vit_small_patch14_dinov2 --dino-weights random --dino-image-size 42".split(),
    "masklam": "--idm-scale 1 --fdm-scale 1".split(),
}


def raft_checkpoint(folder: Path) -> Path:
    """Writes random weights of RAFT small, seeded, as a checkpoint: the real ones are not on every machine."""
    from torchvision.models.optical_flow import raft_small

    path = folder / "raft_random.pth"
    if not path.exists():
        torch.manual_seed(0)
        torch.save(raft_small().state_dict(), path)
    return path


def flags(script: str, folder: Path) -> list[str]:
    """A script's own flags for a tiny run; files that they name are written to `folder`."""
    return [str(raft_checkpoint(folder)) if word == "RAFT" else word for word in FLAGS[script]]


def build(script: str, size: int = 32, seed: int = 0, action_dim: int = 6, **changes) -> tuple[ModuleType, Any, Any]:
    """The script's module, tiny arguments, and its model with seeded weights."""
    module = importlib.import_module(script)
    args = module.Args(**(TINY | OWN[script] | changes))
    torch.manual_seed(seed)
    model = module.LatentActionModel(args, size, action_dim).apply(module.orthogonal_init)
    if script == "laom_labels":
        model.reset_target()
    return module, args, model


@contextlib.contextmanager
def double_precision() -> Iterator[None]:
    """Trains in float64 on one thread, where rounding differs between processors by 1e-16, not 1e-7.

    The methods write `.float()` where autocast would leave bfloat16; here that must not round to float32.
    """
    threads, to_float = torch.get_num_threads(), torch.Tensor.float
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    torch.Tensor.float = torch.Tensor.double
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        torch.set_default_dtype(torch.float32)
        torch.Tensor.float = to_float


class DoubleActions:
    """A sampler whose actions are float64, so that a loss does not mix types."""

    def __init__(self, sampler: Any) -> None:
        self.sampler = sampler

    def __getattr__(self, name: str) -> Any:
        return getattr(self.sampler, name)

    def next(self) -> Any:
        batch = self.sampler.next()
        if hasattr(batch, "labelled"):
            batch = batch._replace(labelled=batch.labelled._replace(action=batch.labelled.action.double()))
        return batch._replace(action=batch.action.double())


def attach_planted_flow(dataset: Dataset) -> None:
    """The true flow of a planted set as LAOF's: the square's displacement inside its mask, zero elsewhere."""
    size = dataset.image_size
    masks = np.unpackbits(dataset.masks(np.arange(dataset.num_frames)), axis=-1).reshape(-1, size, size, 1)
    step = np.diff(np.round(dataset.state), axis=0, append=0)[:, ::-1]  # to the next frame, x before y
    step[dataset.episode_start[1:] - 1] = 0
    flow = (masks * step[:, None, None]).astype(np.float16)
    cuts = np.cumsum([shard.frames for shard in dataset.shards])[:-1]
    dataset.attach("raft", [np.ascontiguousarray(part) for part in np.split(flow, cuts)], "planted")


def attach_planted_slots(dataset: Dataset, args: Any) -> None:
    """Slots of a planted set that depend on the state: the second is a random function of where the square is."""
    from common.slots import attach_slot

    rng = np.random.default_rng(0)
    mixing = rng.standard_normal((dataset.state_dim, args.slot_dim))  # the same for every split
    table = rng.standard_normal((dataset.num_frames, args.num_slots, args.slot_dim)).astype(np.float16)
    table[:, 1] = np.tanh(2 / dataset.image_size * dataset.state @ mixing)
    attach_slot(dataset, torch.from_numpy(table), 2, args.offset)


def lam_sampler(script: str, args: Any, dataset: Dataset) -> Any:
    """The sampler of stage 1."""
    options: dict[str, Any] = {"max_offset": getattr(args, "max_offset", 1), "seed": args.seed, "device": CPU}
    if script == "laof":
        attach_planted_flow(dataset)
        return Sampler(dataset, args.batch_size, fields=("frames", "masks", "raft"), **options)
    if script == "lapo_slots":
        attach_planted_slots(dataset, args)
        return Sampler(dataset, args.batch_size, fields=("slots",), **options)
    if script == "laom_labels":
        labelled = dataset.labelled(max(args.num_labels), args.seed)
        return LabelledSampler(dataset, labelled, args.batch_size, **options)
    return Sampler(dataset, args.batch_size, fields=("frames", "masks"), **options)


def lam_training(
    module: ModuleType, args: Any, model: nn.Module, data_dir: Path, updates: int, updated=lambda model: None
) -> nn.Module:
    """Trains stage 1 on a planted set and returns the model. `updated` is called after every update."""
    from common import runs

    script = module.__name__
    dataset = Dataset(data_dir, "cheetah-run", "train")
    run = runs.Run(args, script, "test", {})
    probe = nn.Linear(args.latent_dim, dataset.action_dim)
    sampler = lam_sampler(script, args, dataset)
    if torch.get_default_dtype() == torch.float64:
        sampler = DoubleActions(sampler)

    def after_update(model: nn.Module) -> None:
        updated(model)
        if script == "laom_labels":
            model.move_target(args.target_rate)

    stage = (
        run,
        args,
        "lam",
        model,
        module.lam_loss,
        sampler,
        updates,
        args.lam_lr,
        args.lam_clip,
        probe,
        after_update,
    )
    module.train(*stage)
    sampler.close()
    run.close()
    return model
