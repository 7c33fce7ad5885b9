"""LAOM-Labels: the loss by hand, the moving average, where gradients go, and which labels."""

import contextlib
from pathlib import Path

import numpy as np
import pytest
import torch
from methods import build, lam_sampler

import laom_labels
from common.dataset import Dataset


def test_where_gradients_go(train_set: Dataset) -> None:
    """Labels shape encoder and action head; the embedding's error does so through z alone; the target gets nothing."""
    module, args, model = build("laom_labels")
    with contextlib.closing(lam_sampler("laom_labels", args, train_set)) as sampler:
        batch = sampler.next()
    learned = {"encoder", "action_head", "observation_head", "true_action"}
    lost = {"augmentation": set(), "observation_head": {"observation_head"}, "action_head": {"encoder", "action_head"}}
    for name, without in lost.items():  # where no gradient flows back from a part's output
        cut = model.get_submodule(name).register_forward_hook(lambda _, inputs, output: output.detach())
        model.zero_grad()
        module.lam_loss(model, batch, args)[0].backward()
        cut.remove()
        shaped = {weight.split(".")[0] for weight, p in model.named_parameters() if p.grad is not None and p.grad.any()}
        assert shaped == learned - without


def test_the_loss_by_hand(train_set: Dataset) -> None:
    """Without augmentation, one stack after the other; the actions of the first batch are not looked at."""
    module, args, model = build("laom_labels", augment=False, label_weight=0.5)
    model.target.load_state_dict({name: weight * 1.5 for name, weight in model.target.state_dict().items()})
    with contextlib.closing(lam_sampler("laom_labels", args, train_set)) as sampler:
        batch = sampler.next()._replace(action=None)
    loss, z, logs = module.lam_loss(model, batch, args)

    def stack(frames: torch.Tensor, positions: list[int]) -> torch.Tensor:
        return (frames[:, positions].permute(0, 1, 4, 2, 3).float() / 255 - 0.5).flatten(1, 2)

    now, future = (model.encoder(stack(batch.frames, where)) for where in ([0, 1, 2], [4, 5, 6]))
    expected_z = model.action_head(torch.cat([now, future], 1))
    target = model.target(stack(batch.frames, [1, 2, 3]))  # the stack that ends at t+1
    embedding = (model.observation_head(expected_z, now) - target).square().mean()
    both = [model.encoder(stack(batch.labelled.frames, where)) for where in ([0, 1, 2], [4, 5, 6])]
    labels = (model.true_action(model.action_head(torch.cat(both, 1))) - batch.labelled.action).square().mean()
    torch.testing.assert_close(z, expected_z, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(torch.stack([*logs.values()]), torch.stack([embedding, labels]), rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(loss, embedding + 0.5 * labels, rtol=1e-4, atol=1e-6)
    augment = module.Args(augment=True)  # in the loss alone, another time each time
    assert len({module.lam_loss(model, batch, augment)[0].item() for _ in range(3)} - {loss.item()}) == 3
    torch.testing.assert_close(module.encode(model, batch, augment), z, rtol=1e-4, atol=1e-5)


def test_labels_and_target_of_a_run(train_set: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stage 1 sees the labels of the largest budget, which are those of stage 3; the target starts as the encoder."""
    labels = {}

    def train(run, args, stage, model, loss_fn, sampler, updates, rate, clip, probe=None, after_update=None) -> None:
        if stage == "lam":
            labels[stage] = sampler.next().labelled.action  # all of them, as they are fewer than a batch
            pairs = list(zip(model.encoder.parameters(), model.target.parameters()))
            assert all(torch.equal(*pair) for pair in pairs)
            for weight, _ in pairs:
                weight.data.add_(1)
            after_update(model)
            after_update(model)
            for weight, moved in pairs:
                torch.testing.assert_close(moved, weight - 0.9**2)
        elif stage != "policy":
            labels[stage] = sampler.tensors["action"]

    monkeypatch.setattr(laom_labels, "train", train)
    changes = {"batch_size": 64, "num_labels": (8, 33), "target_rate": 0.1, "device": "cpu", "compile": False}
    changes |= {"eval_episodes": 1, "eval_envs": 1, "eval_steps": 2}
    _, args, _ = build("laom_labels", data_dir=train_set.data_dir, runs_dir=tmp_path, **changes)
    laom_labels.main(args)
    for stage, count in (("lam", 33), ("decoder", 33), ("decoder-8", 8)):
        frames = train_set.labelled(count, 1)
        assert np.array_equal(labels[stage].numpy(), train_set.action[frames]), stage
