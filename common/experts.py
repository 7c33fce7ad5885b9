"""Expert policies: the shipped students and the LAOM teachers of the Control Suite, Meta-World's scripted policies.

Students and teachers act through the same numpy network. It uses only elementwise products and sums in a fixed order,
no BLAS, so an action is the same to the last bit for one state or a batch, whatever the number of threads or the BLAS
build.
"""

import hashlib
import inspect
import json
import warnings
import zipfile
from collections.abc import Callable
from dataclasses import dataclass, field
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
TEXT_METADATA = ("env", "teacher", "teacher_sha256", "weights_sha256")  # of a student's file; the others are JSON

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


@dataclass(frozen=True)
class Expert:
    """A deterministic policy: normalise the state, clip, MLP, mean action."""

    env: str
    name: Literal["student", "laom"]
    sha256: str
    """Of the file that it was read from."""
    mean: np.ndarray
    std: np.ndarray
    """(S,) each, or scalars: the network sees (state - mean) / std, clipped to +-`clip`."""
    clip: float
    layers: tuple[tuple[np.ndarray, np.ndarray], ...]
    """(weight (I, O), bias (O,)) of each linear layer."""
    activation: Callable[[np.ndarray], np.ndarray]
    """Of the hidden layers."""
    squash: bool = False
    """True: the last layer goes through tanh."""
    metadata: dict = field(default_factory=dict)
    """What `make_experts.py` wrote beside the weights: returns, settings, versions. Empty for the teachers."""

    @property
    def state_dim(self) -> int:
        return self.layers[0][0].shape[0]

    @property
    def action_dim(self) -> int:
        return self.layers[-1][0].shape[1]

    def act(self, state: np.ndarray) -> np.ndarray:
        """state (S,) or (B, S), in alphabetical key order -> float32 action (A,) or (B, A), not clipped.

        Raises ValueError if the state has another size.
        """
        state = np.asarray(state, np.float32)
        if state.ndim not in (1, 2) or state.shape[-1] != self.state_dim:
            raise ValueError(f"{self.env}: state has shape {state.shape}, expected (..., {self.state_dim})")
        x = np.clip((np.atleast_2d(state) - self.mean) / self.std, -self.clip, self.clip)
        for weight, bias in self.layers[:-1]:
            x = self.activation(_linear(x, weight, bias))
        x = _linear(x, *self.layers[-1])
        if self.squash:
            x = np.tanh(x)
        return x.reshape(*state.shape[:-1], self.action_dim)


@dataclass(frozen=True)
class ScriptedExpert:
    """A scripted policy of Meta-World. Its commands are clipped to [-1, 1], as the environment does."""

    env: str
    policy: Any
    sha256: str
    """Of the policy's source code and of what it calls in the same package."""
    name: Literal["scripted"] = "scripted"
    state_dim: int = 39
    action_dim: int = 4

    def act(self, state: np.ndarray) -> np.ndarray:
        """state (S,) or (B, S) -> float32 action (A,) or (B, A), in [-1, 1]. ValueError if the state has another size.

        The state tells the goal, as that of `common.envs.make_env` does.
        """
        state = np.asarray(state)
        if state.ndim not in (1, 2) or state.shape[-1] != self.state_dim:
            raise ValueError(f"{self.env}: state has shape {state.shape}, expected (..., {self.state_dim})")
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Constant")  # that it commands more than 1
            actions = [self.policy.get_action(row.copy()) for row in np.atleast_2d(state)]  # some write into it
        return np.clip(actions, -1, 1).astype(np.float32).reshape(*state.shape[:-1], self.action_dim)


def load_expert(env: str, kind: ExpertName = "student", expert_dir: Path | None = None) -> Expert | ScriptedExpert:
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
        return _load_scripted(env)
    if kind == "student":
        return _load_student(env, Path(expert_dir or STUDENT_DIR) / f"{env}.safetensors")
    return _load_laom(env, expert_dir)


def default_expert(env: str) -> ExpertName:
    """The expert that needs no download."""
    return "scripted" if get_task(env).suite == "dmw" else "student"


def _load_scripted(env: str) -> ScriptedExpert:
    policies = import_simulator("metaworld.policies")
    policy = policies.ENV_POLICY_MAP[f"{env}-v3"]()
    sources = [inspect.getsource(part) for part in (type(policy), policies.policy, policies.action)]
    return ScriptedExpert(env, policy, hashlib.sha256("".join(sources).encode()).hexdigest())


def weights_sha256(tensors: dict[str, np.ndarray]) -> str:
    """Over names, shapes and bytes of all tensors."""
    digest = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tensor.dtype} {tensor.shape}\n".encode())
        digest.update(np.ascontiguousarray(tensor).tobytes())
    return digest.hexdigest()


def student_from_tensors(env: str, tensors: dict[str, np.ndarray], metadata: dict | None = None, sha256="") -> Expert:
    """Tensors `mean`, `std`, `<i>.weight` (O, I), `<i>.bias` (O,) -> student. Raises KeyError if one is missing."""
    count = sum(name.endswith(".weight") for name in tensors)
    return Expert(
        env=env,
        name="student",
        sha256=sha256,
        mean=tensors["mean"],
        std=tensors["std"],
        clip=10.0,
        layers=tuple((np.ascontiguousarray(tensors[f"{i}.weight"].T), tensors[f"{i}.bias"]) for i in range(count)),
        activation=_relu,
        metadata=metadata or {},
    )


def _load_student(env: str, path: Path) -> Expert:
    remedy = f"`git checkout experts/{env}.safetensors` restores it, `python make_experts.py --env {env}` makes it anew"
    try:
        with safe_open(path, "numpy") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}
            raw = file.metadata() or {}
        metadata = {key: value if key in TEXT_METADATA else json.loads(value) for key, value in raw.items()}
    except (OSError, SafetensorError, ValueError) as error:
        raise UserError(f"{path} cannot be read ({error}): {remedy}.") from error
    if (metadata.get("format_version"), metadata.get("env")) != (EXPERT_FORMAT_VERSION, env):
        other = f"format {metadata.get('format_version')} expert for {metadata.get('env')}"
        raise UserError(f"{path} is a {other}, not a format {EXPERT_FORMAT_VERSION} expert for {env}: {remedy}.")
    if weights_sha256(tensors) != metadata.get("weights_sha256"):
        raise UserError(f"{path} is damaged, its weights do not match their sha256: {remedy}.")
    return student_from_tensors(env, tensors, metadata, _sha256(path))


def _load_laom(env: str, expert_dir: Path | None) -> Expert:
    name, expected = LAOM_FILES[env], LAOM_SHA256[env]
    if expert_dir is None:
        path = _download_laom(name, expected)
    else:
        path = expert_dir / name
        advice = f"download it from {LAOM_URL}{name}, or leave --expert-dir out"
        if not path.is_file():
            raise UserError(f"{path} is missing: {advice}.")
        if (actual := _sha256(path)) != expected:
            raise UserError(f"{path} is not the published file (sha256 {actual}, expected {expected}): {advice}.")
    return _read_laom(env, path, expected)


def _download_laom(name: str, expected: str) -> Path:
    """The file in the user's cache, downloaded if it is missing or another one; whole or not at all."""
    import pooch

    try:
        return Path(pooch.retrieve(LAOM_URL + name, expected, fname=name, path=pooch.os_cache("laom")))
    except (OSError, ValueError) as error:  # no network; another file than this project was made with
        raise UserError(
            f"{LAOM_URL}{name} cannot be downloaded ({error}): try again, use --expert-dir DIR with a copy of the LAOM "
            "checkpoints, or use the shipped students (--expert student)."
        ) from error


def _read_laom(env: str, path: Path, sha256: str) -> Expert:
    import torch  # only here: workers that use a student need no torch

    from_sac = path.suffix == ".zip"
    if from_sac:  # stable-baselines3; its other members hold pickles and stay unread
        with zipfile.ZipFile(path) as archive, archive.open("policy.pth") as file:
            weights = torch.load(file, map_location="cpu", weights_only=True)
        names = ("actor.latent_pi.0", "actor.latent_pi.2", "actor.mu")
        mean, std = np.float32(0), np.float32(1)
    else:
        weights = torch.load(path, map_location="cpu", weights_only=True)
        names = ("actor_mean.0", "actor_mean.2", "actor_mean.4")
        mean, std = weights["obs_rms.mean"].numpy(), np.sqrt(weights["obs_rms.var"].numpy() + np.float32(1e-8))
    layers = [
        (np.ascontiguousarray(weights[f"{name}.weight"].numpy().T), weights[f"{name}.bias"].numpy()) for name in names
    ]
    return Expert(
        env=env,
        name="laom",
        sha256=sha256,
        mean=mean,
        std=std,
        clip=np.inf if from_sac else 10.0,
        layers=tuple(layers),
        activation=_relu if from_sac else np.tanh,
        squash=from_sac,
    )


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
