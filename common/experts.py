"""Expert policies: the shipped students and the LAOM teachers of the Control Suite, Meta-World's scripted policies.

Students and teachers act through the same numpy network. It uses only elementwise products and sums in a fixed order,
no BLAS, so an action is the same to the last bit for one state or a batch, whatever the number of threads or the BLAS
build.
"""

import functools
import hashlib
import inspect
import warnings
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from safetensors import SafetensorError, safe_open

from common.cli import UserError
from common.rendering import import_simulator
from common.tasks import get_task

ExpertName = Literal["student", "laom", "scripted"]

EXPERT_FORMAT_VERSION = 1
STUDENT_DIR = Path(__file__).parents[1] / "experts"

LAOM_URL = "https://github.com/dunnolab/laom/raw/main/scripts/data_collection/checkpoints/"
LAOM_FILES = {  # below LAOM_URL and below --expert-dir
    "cheetah-run": "cheetah-run-expert/checkpoint.pt",
    "walker-run": "walker-run-expert/checkpoint.pt",
    "hopper-hop": "hopper-hop-expert/checkpoint.pt",
    "humanoid-walk": "sac-humanoid-walk.zip",
}
LAOM_SHA256 = {
    "cheetah-run": "81ed317a31222e47ac1787025419a3019df59605dddec9e9e272207f95e9d5c2",
    "walker-run": "87d9e0ee59914f8226981d3824e4c13c3c0993cb01105f176c43b732ae30db8c",
    "hopper-hop": "404da5bca5b67c160a2338258ac4119d197e385879673bd4d643e585a8bdca04",
    "humanoid-walk": "081c23ca55433d4a61735bce95dc30484b09767d254fee8c143c37a50758b286",
}

# Products are formed for a few states at a time, so that they stay in the processor's cache.
_CHUNK_ELEMENTS = 2**17


def _relu(x: np.ndarray) -> np.ndarray:
    return np.maximum(x, 0.0)


def _linear(x: np.ndarray, weight: np.ndarray, bias: np.ndarray) -> np.ndarray:
    """x (B, I), weight (I, O), bias (O,) -> (B, O). Sums over I by halving, in an order that B cannot change."""
    result = np.empty((len(x), weight.shape[1]), np.float32)
    step = max(1, _CHUNK_ELEMENTS // weight.size)
    for start in range(0, len(x), step):
        terms = x[start : start + step, :, None] * weight  # (b, I, O)
        size = terms.shape[1]
        while size > 1:
            half = (size + 1) // 2
            terms[:, : size - half] += terms[:, half:size]
            size = half
        result[start : start + step] = terms[:, 0] + bias
    return result


def _act(
    state: np.ndarray,
    *,
    mean: np.ndarray,
    std: np.ndarray,
    layers: list[tuple[np.ndarray, np.ndarray]],
    clip: float = 10.0,
    activation: Callable[[np.ndarray], np.ndarray] = _relu,
    squash: bool = False,
) -> np.ndarray:
    """The network: sees (state - mean) / std, clipped to +-`clip`; `layers` are weight (I, O) and bias (O,) of each
    linear layer; with `squash` the last one goes through tanh."""
    x = np.clip((np.atleast_2d(state) - mean) / std, -clip, clip)
    for weight, bias in layers[:-1]:
        x = activation(_linear(x, weight, bias))
    x = _linear(x, *layers[-1])
    if squash:
        x = np.tanh(x)
    return x if state.ndim == 2 else x[0]


def _act_scripted(state: np.ndarray, policy: Any) -> np.ndarray:
    """A scripted policy of Meta-World. Its commands are clipped to [-1, 1], as the environment does."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Constant")  # that it commands more than 1
        actions = [policy.get_action(row.copy()) for row in np.atleast_2d(state)]  # some write into it
    return np.clip(actions, -1, 1).astype(np.float32).reshape(*state.shape[:-1], -1)


@dataclass(frozen=True)
class Expert:
    """A deterministic policy."""

    env: str
    name: ExpertName
    sha256: str
    """Of the file that it was read from; of a scripted policy's source code and of what it calls in its package."""
    act: Callable[[np.ndarray], np.ndarray]
    """The state of `common.envs.make_env`, float32 (S,) or (B, S), -> action, float32 (A,) or (B, A). Those of the
    Control Suite are not clipped."""


def load_expert(env: str, kind: ExpertName = "student", expert_dir: Path | None = None) -> Expert:
    """The expert policy of a task.

    "student" reads `<expert_dir>/<env>.safetensors` (default: this repository's `experts/`). "laom" reads the
    published teacher below `expert_dir`, or downloads it once into the user's cache. "scripted" is the only expert of
    Meta-World's tasks and comes with its package.
    Raises UserError if the file is missing, damaged or another one than expected, and if the download fails.
    """
    kinds = ("scripted",) if get_task(env).suite == "dmw" else ("student", "laom")
    if kind not in kinds:
        raise UserError(f"There is no {kind} expert for {env}: choose {' or '.join(kinds)}.")
    if kind == "scripted":
        if expert_dir is not None:
            raise UserError(f"--expert-dir has no meaning for {env}: its expert is a scripted policy of Meta-World.")
        policies = import_simulator("metaworld.policies")
        policy = policies.ENV_POLICY_MAP[f"{env}-v3"]()
        sources = [inspect.getsource(part) for part in (type(policy), policies.policy, policies.action)]
        sha256 = hashlib.sha256("".join(sources).encode()).hexdigest()
        return Expert(env, "scripted", sha256, functools.partial(_act_scripted, policy=policy))
    if kind == "student":
        return _load_student(env, Path(expert_dir or STUDENT_DIR) / f"{env}.safetensors")
    return _load_laom(env, expert_dir)


def default_expert(env: str) -> ExpertName:
    """The expert that needs no download."""
    return "scripted" if get_task(env).suite == "dmw" else "student"


def weights_sha256(tensors: dict[str, np.ndarray]) -> str:
    """Over names, shapes and bytes of all tensors."""
    digest = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tensor.dtype} {tensor.shape}\n".encode())
        digest.update(np.ascontiguousarray(tensor).tobytes())
    return digest.hexdigest()


def student_from_tensors(env: str, tensors: dict[str, np.ndarray], sha256: str = "") -> Expert:
    """Tensors `mean`, `std`, `<i>.weight` (O, I), `<i>.bias` (O,) -> student. Raises KeyError if one is missing."""
    count = sum(name.endswith(".weight") for name in tensors)
    layers = [(np.ascontiguousarray(tensors[f"{i}.weight"].T), tensors[f"{i}.bias"]) for i in range(count)]
    act = functools.partial(_act, mean=tensors["mean"], std=tensors["std"], layers=layers)
    return Expert(env, "student", sha256, act)


def _load_student(env: str, path: Path) -> Expert:
    try:
        with safe_open(path, "numpy") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}
            metadata = file.metadata() or {}
        if (metadata.get("format_version"), metadata.get("env")) != (str(EXPERT_FORMAT_VERSION), env):
            raise ValueError(f"it is of format {metadata.get('format_version')} and for {metadata.get('env')}")
        if weights_sha256(tensors) != metadata.get("weights_sha256"):
            raise ValueError("its weights do not match their sha256")
    except (OSError, SafetensorError, ValueError) as error:
        raise UserError(
            f"{path} is no format {EXPERT_FORMAT_VERSION} expert for {env} ({error}): `git checkout "
            f"experts/{env}.safetensors` restores it, `python make_experts.py --env {env}` makes it anew."
        ) from error
    return student_from_tensors(env, tensors, _sha256(path))


def _load_laom(env: str, expert_dir: Path | None) -> Expert:
    import torch  # only here: workers that use a student need no torch

    name, expected = LAOM_FILES[env], LAOM_SHA256[env]
    try:
        if expert_dir is None:
            import pooch

            # In the user's cache, downloaded if it is missing or another one.
            path = Path(pooch.retrieve(LAOM_URL + name, expected, fname=name, path=pooch.os_cache("laom")))
        else:
            path = expert_dir / name
            if (actual := _sha256(path)) != expected:
                raise ValueError(f"{path} has sha256 {actual}, expected {expected}")
    except (OSError, ValueError) as error:  # missing; no network; not the published file
        raise UserError(
            f"no expert for {env} ({error}): try again to download {LAOM_URL}{name}, use --expert-dir DIR with a copy "
            f"of it at DIR/{name}, or use the shipped students (--expert student)."
        ) from error
    if path.suffix == ".zip":  # stable-baselines3's SAC; its other members hold pickles and stay unread
        with zipfile.ZipFile(path) as archive, archive.open("policy.pth") as file:
            weights = torch.load(file, map_location="cpu", weights_only=True)
        names = ("actor.latent_pi.0", "actor.latent_pi.2", "actor.mu")
        act = functools.partial(_act, mean=np.float32(0), std=np.float32(1), clip=np.inf, squash=True)
    else:
        weights = torch.load(path, map_location="cpu", weights_only=True)
        names = ("actor_mean.0", "actor_mean.2", "actor_mean.4")
        mean, std = weights["obs_rms.mean"].numpy(), np.sqrt(weights["obs_rms.var"].numpy() + np.float32(1e-8))
        act = functools.partial(_act, mean=mean, std=std, activation=np.tanh)
    layers = [
        (np.ascontiguousarray(weights[f"{name}.weight"].numpy().T), weights[f"{name}.bias"].numpy()) for name in names
    ]
    return Expert(env, "laom", expected, functools.partial(act, layers=layers))


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
