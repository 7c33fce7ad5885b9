"""RAFT's weights (arXiv 2003.12039): torchvision's own, or a file under the names of torchvision or RAFT's authors."""

from __future__ import annotations

import hashlib
import pickle
import re
import zipfile
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor, nn

from common.errors import UserError

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


def to_torchvision(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Weights under the names of torchvision; those of RAFT's authors are renamed, others stay as they are.

    The norm after a downsampling convolution stands twice in the authors' files (norm3 or norm4, and downsample.1).
    """
    found = {}
    for name, value in weights.items():
        plain = re.sub(r"^module\.", "", name)
        if not plain.startswith(("fnet.", "cnet.", "update_block.")):
            found[plain] = value
            continue
        for pattern, replacement in RENAMED:
            plain = re.sub(pattern, replacement, plain)
        found[plain] = value
    last = {name: max((2, 3), key=lambda n: f"{name}.convnormrelu{n}.0.weight" in found) for name in _blocks(found)}
    return {
        name: value
        for name, value in found.items()
        if not any(name.startswith(f"{block}.convnormrelu{count + 1}.1.") for block, count in last.items())
    }


def _blocks(weights: dict[str, Tensor]) -> set[str]:
    """The residual blocks with a downsampling convolution."""
    return {name.split(".downsample.")[0] for name in weights if ".downsample." in name}


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
        weights = to_torchvision(_read(checkpoint))
    state = model.state_dict()
    counters = {name: value for name, value in state.items() if name.endswith("num_batches_tracked")}
    weights = {name: value for name, value in weights.items() if name not in counters}
    wanted = {name: value.shape for name, value in state.items() if name not in counters}
    if {name: value.shape for name, value in weights.items()} != wanted:
        fit, other = len(set(weights) & set(wanted)), "small" if large else "large"
        raise UserError(
            f"--raft-checkpoint {checkpoint}: not the weights of RAFT {size} ({len(weights)} tensors, {fit} of "
            f"{len(wanted)} names fit); is it RAFT {other}? Then add --raft {other}"
        )
    model.load_state_dict(counters | weights)
    digest = hashlib.sha256()
    for name in sorted(weights):
        digest.update(name.encode() + weights[name].float().contiguous().numpy().tobytes())
    return model.eval().requires_grad_(False).to(device), digest.hexdigest()


def _read(path: Path) -> dict[str, Tensor]:
    if not path.is_file():
        raise UserError(f"--raft-checkpoint {path}: no such file (where the flow is complete, leave the flag out)")
    try:
        weights = torch.load(path, map_location="cpu", weights_only=True)
    except (OSError, RuntimeError, ValueError, EOFError, KeyError, pickle.UnpicklingError, zipfile.BadZipFile) as error:
        raise UserError(f"--raft-checkpoint {path}: not a readable file of weights ({error})") from error
    if not isinstance(weights, dict) or not all(isinstance(value, Tensor) for value in weights.values()):
        raise UserError(f"--raft-checkpoint {path}: holds no plain dictionary of weights, as RAFT's files do")
    return weights


def _download(weights) -> dict[str, Tensor]:
    try:
        return weights.get_state_dict(progress=True, check_hash=True)
    except (OSError, RuntimeError) as error:  # no network; or a file that does not match its hash
        raise UserError(
            f"RAFT's weights cannot be downloaded ({type(error).__name__}); get {weights.url} on another machine and "
            f"name the file: --raft-checkpoint {weights.url.rsplit('/', 1)[-1]}"
        ) from error
