"""Optical flow by RAFT (arXiv 2003.12039): its weights, and the flow of a dataset in files beside the shards."""

from __future__ import annotations

import copy
import hashlib
import math
import re
import shlex
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from common import store
from common.cli import UserError
from common.dataset import Dataset
from common.shards import Shard, derived_path, read_derived, read_finished, write_derived
from common.weights import read_weights, weights_hash

# The authors' names -> torchvision's.
RENAMED = (
    (r"^module\.", ""),
    (r"^fnet\.", "feature_encoder."),
    (r"^cnet\.", "context_encoder."),
    (r"(layer\d\.\d)\.conv(\d)\.", r"\1.convnormrelu\2.0."),
    (r"(layer\d\.\d)\.norm(\d)\.", r"\1.convnormrelu\2.1."),
    (r"_encoder\.conv1\.", "_encoder.convnormrelu.0."),
    (r"_encoder\.norm1\.", "_encoder.convnormrelu.1."),
    (r"_encoder\.conv2\.", "_encoder.conv."),
    (r"^update_block\.encoder\.convc(\d)\.", r"update_block.motion_encoder.convcorr\1.0."),
    (r"^update_block\.encoder\.convf(\d)\.", r"update_block.motion_encoder.convflow\1.0."),
    (r"^update_block\.encoder\.conv\.", "update_block.motion_encoder.conv.0."),
    (r"^update_block\.gru\.(conv[zrq])(\d)\.", r"update_block.recurrent_block.convgru\2.\1."),
    (r"^update_block\.gru\.(conv[zrq])\.", r"update_block.recurrent_block.convgru1.\1."),
    (r"^update_block\.mask\.0\.", "mask_predictor.convrelu.0."),
    (r"^update_block\.mask\.2\.", "mask_predictor.conv."),
)


def to_torchvision(name: str) -> str:
    """The name of a weight in torchvision's RAFT; those of RAFT's authors are renamed, others stay as they are."""
    for pattern, replacement in RENAMED:
        name = re.sub(pattern, replacement, name)
    return name


def load_raft(size: Literal["large", "small"], checkpoint: Path | None, device: torch.device) -> tuple[nn.Module, str]:
    """RAFT with its weights, frozen and in evaluation mode, and a hash of the weights.

    checkpoint: a file of weights; None: torchvision downloads its own. Raises UserError for a file that is missing, no
    checkpoint, or of another size, and where there is no network.
    """
    from torchvision.models import optical_flow

    large = size == "large"
    with torch.random.fork_rng(devices=[]):  # its random weights are replaced; the run's random numbers stay the same
        model = (optical_flow.raft_large if large else optical_flow.raft_small)()
    if checkpoint is None:
        weights = _download((optical_flow.Raft_Large_Weights if large else optical_flow.Raft_Small_Weights).DEFAULT)
    else:
        found = read_weights(checkpoint, "--raft-checkpoint").items()
        weights = {to_torchvision(name): value for name, value in found}
    state = model.state_dict()
    wanted = {name: value.shape for name, value in state.items() if not name.endswith("num_batches_tracked")}
    # The authors' files have the norm after a downsampling convolution under a second name too.
    weights = {name: value for name, value in weights.items() if value.shape == wanted.get(name)}
    if len(weights) < len(wanted):
        other = "small" if large else "large"
        raise UserError(
            f"--raft-checkpoint {checkpoint}: not the weights of RAFT {size} ({len(weights)} of {len(wanted)} tensors "
            f"fit); is it RAFT {other}? Then add --raft {other}"
        )
    model.load_state_dict(state | weights)
    return model.eval().requires_grad_(False).to(device), weights_hash(weights)


def _download(weights) -> dict[str, Tensor]:
    try:
        return weights.get_state_dict(progress=True, check_hash=True)
    except (OSError, RuntimeError) as error:  # no network; or a file that does not match its hash
        raise UserError(
            f"RAFT's weights cannot be downloaded ({type(error).__name__}); get {weights.url} on another machine and "
            f"name the file: --raft-checkpoint {weights.url.rsplit('/', 1)[-1]}"
        ) from error


@torch.inference_mode()
def optical_flow(raft: nn.Module, frames: Tensor, following: Tensor, iterations: int) -> Tensor:
    """RAFT's flow in pixels per step, float16 (B, H, W, 2) with x before y, between frames uint8 (B, H, W, 3).

    RAFT needs 128 pixels and multiples of 8: smaller frames are enlarged for it, and the flow is averaged back.
    """
    size = frames.shape[1]
    large = max(128, -(-size // 8) * 8)
    pair = torch.stack([frames, following]).flatten(0, 1).movedim(-1, 1).float() / 127.5 - 1
    pair = F.interpolate(pair, size=(large, large), mode="bilinear").chunk(2)
    with torch.autocast(frames.device.type, torch.bfloat16, enabled=frames.device.type == "cuda"):
        flow = raft(*pair, num_flow_updates=iterations)[-1].float()
    return (F.interpolate(flow, size=(size, size), mode="area") * (size / large)).movedim(1, -1).half()


def flow_picture(flow: Tensor, scale: float) -> Tensor:
    """Flow (B, H, W, 2) in pixels as a picture (B, 3, H, W) in [0, 1]: hue is direction, saturation and value speed.

    Right is red, down yellow-green, left cyan, up violet. `scale` times the diagonal, or more, is full colour.
    """
    x, y = flow.float().unbind(-1)
    value = (torch.hypot(x, y) / (scale * math.hypot(*flow.shape[1:3]))).clamp(max=1)
    hue = torch.atan2(y, x) * (3 / math.pi)  # in sixths of a turn
    shade = torch.stack([(hue + offset) % 6 for offset in (5, 3, 1)], dim=1)
    return value[:, None] * (1 - value[:, None] * torch.minimum(shade, 4 - shade).clamp(0, 1))


def attach_flow(dataset: Dataset, args: Any, device: torch.device, threads: int | None = None) -> float:
    """Attaches the flow from each frame to the next as `raft`; the last frame of an episode has none, so it gets zeros.

    It lies as <render>/flow in <shard>.raft.h5. Files that are missing are made first, together with other processes
    that do the same; those of another version of their shard are made again. Returns the seconds that it took.

    args: laof.py's; raft (large or small), raft_checkpoint and raft_iterations decide what the flow is.

    threads: files that are made side by side, so that one is read or written while another is computed; None: 2 on a
    GPU, 1 on a CPU, which has no time to spare.

    Raises UserError for files that were made with other settings, and Stopped at a signal; complete files stay.
    """
    start, name = time.monotonic(), f"{dataset.render}/flow"
    shards = {derived_path(shard.path, "raft"): shard for shard in dataset.shards}
    settings: dict[str, Any] = {"raft": args.raft, "iterations": args.raft_iterations}
    advice = "use those, or compute everything again after: "
    advice += f"rm {shlex.quote(str(dataset.folder.parent))}/*/*.raft.h5"
    model: nn.Module | None = None

    def load() -> None:
        nonlocal model
        model, settings["weights"] = load_raft(args.raft, args.raft_checkpoint, device)
        for shard in dataset.shards:  # refuse flow of other settings before any file is added to it
            read_finished(shard, "raft", settings, advice)

    def is_missing(path: Path) -> bool:  # the file may hold the other render's flow only
        stored = read_finished(shards[path], "raft", settings, advice)
        return stored is None or name not in stored.arrays

    def make(path: Path, model: nn.Module) -> None:
        stored = read_finished(shards[path], "raft", settings, advice, announce=True)
        arrays = {} if stored is None else stored.arrays
        write_derived(shards[path], "raft", arrays | {name: compute(shards[path], model)}, settings)

    def compute(shard: Shard, model: nn.Module) -> np.ndarray:
        frames, ends = shard.arrays[f"{dataset.render}/observation"], shard.episode_start[1:] - 1
        flow = np.zeros((*frames.shape[:3], 2), np.float16)
        batch = 64 if device.type == "cuda" else 8
        for first in range(0, shard.frames, batch):
            index = np.arange(first, min(first + batch, shard.frames))
            pair = [frames[index], frames[np.minimum(index + 1, shard.frames - 1)]]
            now, following = (torch.from_numpy(side).to(device) for side in pair)
            flow[index] = optical_flow(model, now, following, args.raft_iterations).cpu().numpy()
            progress.update(len(index))
        flow[ends] = 0
        if not np.isfinite(flow).all():
            raise UserError(f"{shard.path}: its flow is not finite; the weights may be damaged ({settings})")
        return flow

    if args.raft_checkpoint is not None:  # so that flow of other weights is refused, also where nothing is missing
        load()
    if missing := sum(shard.frames for path, shard in shards.items() if is_missing(path)):
        if model is None:
            load()
        threads = threads or (2 if device.type == "cuda" else 1)
        with (
            store.StoppableProgress(f"flow {dataset.env} {dataset.split}", missing, "frames") as progress,
            ThreadPoolExecutor(threads, thread_name_prefix="flow") as pool,
        ):
            # Threads share the files as processes do; each has a network, which keeps what it computes in itself.
            makers = [partial(make, model=copy.deepcopy(model)) for _ in range(threads)]
            for filled in [pool.submit(store.fill, lambda: shards, is_missing, maker) for maker in makers]:
                filled.result()
    files = [read_derived(shard, "raft") for shard in dataset.shards]
    digest = hashlib.sha256("".join(file.array_hash(name) for file in files).encode()).hexdigest()
    settings = files[0].attributes["settings"]
    dataset.attach("raft", [file.arrays[name] for file in files], digest, settings)
    about = ", ".join(f"{key} {str(value)[:8]}" for key, value in settings.items())
    print(f"flow of {dataset.folder}, {dataset.render}: {about}", flush=True)
    return time.monotonic() - start
