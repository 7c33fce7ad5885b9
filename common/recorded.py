"""What a run on recorded videos gives, which no simulator can replay: open-loop error, latent actions, transfer."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from common import pictures
from common.dataset import Batch, Dataset, normalise, sequential
from common.store import atomic_path

SHOWN_EPISODES = 3  # whose latent actions are drawn over time
TRANSFER_STEPS = 30  # at most
TRANSFER_COLUMNS = 10  # of its strip


class RandomEncoder(nn.Sequential):
    """A small convolutional network with fixed random weights: frames, uint8 (B, 3, H, W, 3), to (B, 1024)."""

    def __init__(self) -> None:
        layers: list[nn.Module] = []
        with torch.random.fork_rng(devices=[]):
            torch.random.default_generator.manual_seed(0)
            for channels, width in ((9, 32), (32, 64), (64, 64)):
                layers += [nn.Conv2d(channels, width, 4, stride=2, padding=1), nn.ReLU()]
        super().__init__(*layers, nn.AdaptiveAvgPool2d(4), nn.Flatten())

    def forward(self, frames: Tensor) -> Tensor:
        return super().forward(normalise(frames).flatten(1, 2))


def open_loop(
    act: Callable[[Tensor], Tensor],
    labelled: np.ndarray,
    train_set: Dataset,
    test_set: Dataset,
    *,
    batch_size: int,
    device: torch.device,
) -> dict[str, Any]:
    """How far a policy's actions are from the recorded ones on held-out episodes, beside what it has to beat.

    Every error is a mean of squares over transitions and dimensions, divided by the variance of the train split's
    actions, as NMSE is: 1 is about the error of the mean action.

    Args:
        act: uint8 frames (B, 3, H, W, 3), the newest last, to actions (B, A) in [-1, 1].
        labelled: int64 (N,), the labelled transitions, which the mean and the regression know too.

    Returns ``errors``: of the ``policy``, the ``mean_action`` (of the labelled transitions), the ``previous_action``
    (that of the step before; the mean in an episode's first step) and ``ridge`` (regression from a `RandomEncoder`);
    and ``rmse_per_dimension``: the policy's root mean squared error in the units of the data.
    """
    from sklearn.linear_model import Ridge
    from sklearn.model_selection import GridSearchCV, GroupKFold, KFold
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    def over(dataset: Dataset, indices: np.ndarray, *functions: Callable[[Tensor], Tensor]) -> list[np.ndarray]:
        """Functions of the frames of a dataset, (N, ...) each."""
        found: list[list[Tensor]] = [[] for _ in functions]
        for batch in sequential(dataset, batch_size, max_offset=0, device=device, indices=indices):
            with torch.inference_mode():
                for values, function in zip(found, functions):
                    values.append(function(batch.frames).float().cpu())
        return [torch.cat(values).numpy() for values in found]

    actions, encoder = train_set.action[labelled].clip(-1, 1), RandomEncoder().to(device)
    ridge: Any = make_pipeline(StandardScaler(), Ridge())
    if len(labelled) > 1:
        # Its penalty is chosen over whole episodes: frames of one episode are too alike to test each other.
        episodes = train_set.episode_of_frame[labelled]
        count = len(np.unique(episodes))
        folds = list((GroupKFold(min(5, count)) if count > 1 else KFold(2)).split(actions, groups=episodes))
        penalties = {"ridge__alpha": np.logspace(0, 6, 13)}
        ridge = GridSearchCV(ridge, penalties, cv=folds, scoring="neg_mean_squared_error")
    ridge.fit(over(train_set, labelled, encoder)[0], actions)

    t = test_set.transitions
    predicted, features = over(test_set, t, lambda frames: act(frames).clamp(-1, 1), encoder)
    mean = np.broadcast_to(actions.mean(0), predicted.shape)
    is_first = np.isin(t, test_set.episode_start)
    guesses = {
        "policy": predicted,
        "mean_action": mean,
        "previous_action": np.where(is_first[:, None], mean, test_set.action[t - 1].clip(-1, 1)),
        "ridge": ridge.predict(features).reshape(predicted.shape),
    }
    truth = test_set.action[t].clip(-1, 1)
    errors = {name: float(((guess - truth) ** 2).mean() / train_set.action_variance) for name, guess in guesses.items()}
    in_units = test_set.original_action(predicted) - test_set.original_action(truth)
    return {"errors": errors, "rmse_per_dimension": np.sqrt((in_units**2).mean(0)).tolist()}


def save_latents(folder: Path, dataset: Dataset, latents: Tensor) -> list[Path]:
    """Writes the latent actions of all transitions of a split and draws those of some episodes over time.

    ``<folder>/<split>.npz`` has, for each transition: `z` float32 (N, d_z); `episode` and `frame`, int (N,), where it
    is in the split; `source` (N,), the file or episode that it was imported from; `seconds` (N,), where it is in
    there, if the frame rate is known;
    and `action` (N, A), where there are any, in the units of what was imported.

    Args:
        latents: (N, d_z), in the order of `dataset.transitions`.

    Returns the picture: the first three principal components of the split's latent actions.
    """
    z, t = latents.float().numpy(), dataset.transitions
    episode = dataset.episode_of_frame[t]
    frame = t - dataset.episode_start[episode]
    values = {"z": z, "episode": episode, "frame": frame}
    if dataset.is_recorded:
        values["source"] = np.array(dataset.episode_values("source"))[episode]
        if dataset.plan["fps"]:
            values["seconds"] = np.array(dataset.episode_values("start_seconds"))[episode] + frame / dataset.plan["fps"]
    if dataset.action_dim:
        values["action"] = dataset.original_action(dataset.action[t])
    with atomic_path(folder / f"{dataset.split}.npz") as temporary:
        np.savez(temporary, **values)

    centred = z - z.mean(0)
    _, variances, axes = np.linalg.svd(centred.T @ centred.astype(np.float64))
    share = variances[:3].sum() / max(variances.sum(), 1e-300)
    shown = np.unique(np.linspace(0, dataset.num_episodes - 1, SHOWN_EPISODES).astype(int))
    figure, panels = pictures.panels(len(shown), 1, 8, 2)
    for panel, number in zip(panels, shown):
        here = episode == number
        for component, line in enumerate((centred[here] @ axes[:3].T).T, 1):
            panel.plot(frame[here], line, label=f"component {component}")
        panel.set(title=str(values["source"][here][0]) if dataset.is_recorded else f"episode {number}", xlabel="frame")
        panel.grid(alpha=0.3)
    panels[0].legend(loc="upper right", fontsize="small")
    figure.suptitle(f"latent actions of {dataset.env}, {dataset.split}: {share:.0%} of their variance")
    return [pictures.save(figure, folder / f"{dataset.split}.png")]


def transfer(
    folder: Path,
    model: nn.Module,
    inputs: Callable[[Batch], Tensor],
    dataset: Dataset,
    fields: tuple[str, ...],
    device: torch.device,
) -> list[Path]:
    """The latent actions of one held-out episode applied to the first frame of another, step after step.

    Where there is no other, to the middle of the same one. The model sees its own predictions, also where its loss did
    not train them (MaskLAM's outside the mask), and what it sees beside colours (a mask) stays that of the first frame.
    Writes ``transfer.gif`` with every step and returns ``transfer.png``, a strip of some.

    Args:
        model: has `infer`, windows (B, F, C, H, W) to z (B, d_z), and `predict`, windows and z to frames (B, 3, H, W).
        inputs: a batch, which has `fields`, to windows.
    """
    from PIL import Image

    start, stop = dataset.episode_start[:2]
    steps = np.arange(start, min(stop - 1, start + TRANSFER_STEPS))
    first, place = dataset.episode_start[-2:-1], f"the start of episode {dataset.num_episodes - 1}"
    if dataset.num_episodes == 1:
        first, place = dataset.transitions[dataset.num_transitions // 2 :][:1], "its own middle, as there is no other"
    windows = {"max_offset": 1, "device": device, "fields": fields}
    with torch.inference_mode():
        z = model.infer(inputs(next(sequential(dataset, len(steps), indices=steps, **windows))))
        window = inputs(next(sequential(dataset, 1, indices=first, **windows)))[:, :3]
        frames = []
        for latent in z:
            frame = model.predict(window, latent[None])
            frames.append(frame)
            window = torch.cat([window[:, 1:], torch.cat([frame[:, None], window[:, -1:, 3:]], dim=2)], dim=1)
        shown = ((torch.cat(frames).float() + 0.5).clamp(0, 1) * 255).round().byte().movedim(1, -1).cpu().numpy()
    recorded = dataset.frames(steps + 1)
    zoom = max(1, round(192 / dataset.image_size))
    both = np.concatenate([recorded, shown], axis=2).repeat(zoom, axis=1).repeat(zoom, axis=2)
    with atomic_path(folder / "transfer.gif") as temporary:
        images = [Image.fromarray(image) for image in both]
        duration = round(1000 / (dataset.plan.get("fps") or 10))  # milliseconds of a frame
        images[0].save(temporary, save_all=True, append_images=images[1:], duration=duration, loop=0)
    some = np.unique(np.linspace(0, len(steps) - 1, TRANSFER_COLUMNS).astype(int))
    named = {
        "latent actions\nfrom": recorded[some],
        "applied to": dataset.frames(first),
        "predicted": shown[some],
    }
    title = f"{dataset.env}: latent actions of held-out episode 0, applied to {place}"
    return [pictures.rows(folder / "transfer.png", named, None, title)]
