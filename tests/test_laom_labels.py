"""LAOM-Labels: parameter counts by hand, the moving average, where gradients go, and which labels are used."""

from pathlib import Path

import numpy as np
import pytest
import torch
from methods import CPU, build, lam_sampler, lam_training

import laom_labels
from common.dataset import Dataset, LabelledBatch, sequential


def first_batch(args, dataset: Dataset) -> LabelledBatch:
    sampler = lam_sampler("laom_labels", args, dataset)
    batch = sampler.next()
    sampler.close()
    return batch


def linear(inputs: int, outputs: int) -> int:
    return inputs * outputs + outputs


@pytest.mark.parametrize(
    ("size", "action", "observation", "whole"), [(64, 103e6, 53e6, 159e6), (128, 329e6, 128e6, 461e6)]
)
def test_parameter_counts(size: int, action: float, observation: float, whole: float) -> None:
    """Of the paper's networks, against counts by hand and the figures of the specification."""
    args = laom_labels.defaults(["--env", "cheetah-run" if size == 64 else "reach"])
    with torch.device("meta"):
        model = laom_labels.LatentActionModel(args, size, 6)
    counts = {name: sum(p.numel() for p in part.parameters()) for name, part in model.named_children()}
    dim, hidden, z = 192 * (size // 8) ** 2, 1024, 128
    block = linear(hidden, 4 * hidden) + linear(4 * hidden, hidden) + 2 * hidden
    encoder, channels = 0, 9
    for width in (96, 192, 192):
        encoder += 9 * channels * width + width + 4 * (9 * width * width + width)
        channels = width
    by_hand = {
        "augmentation": 0,
        "encoder": encoder,
        "target": encoder,
        "action_head": linear(2 * dim, hidden) + 2 * linear(hidden + 2 * dim, hidden) + 3 * block + linear(hidden, z),
        "observation_head": linear(dim + z, hidden) + 2 * linear(hidden + z, hidden) + 3 * block + linear(hidden, dim),
        "true_action": linear(z, 6),
    }
    assert counts == by_hand
    assert counts["action_head"] == pytest.approx(action, rel=0.005)
    assert counts["observation_head"] == pytest.approx(observation, rel=0.005)
    assert sum(counts.values()) - counts["target"] == pytest.approx(whole, rel=0.005)


def test_defaults_follow_the_papers_table() -> None:
    """The hyperparameter table of LAOM-Labels, DCS / DMW."""
    dcs, dmw = laom_labels.defaults(["--env", "walker-run"]), laom_labels.defaults(["--env=reach"])
    for args, batch, epochs, bc_epochs, lam, bc in ((dcs, 512, 3, 2, 6e-4, 3e-4), (dmw, 128, 5, 5, 3e-4, 2e-4)):
        assert (args.batch_size, args.lam_epochs, args.policy_epochs) == (batch, epochs, bc_epochs)
        assert (args.lam_lr, args.policy_lr, args.decoder_lr, args.weight_decay) == (lam, bc, 1e-3, 0)
        assert (args.decoder_updates, args.num_labels, args.lam_warmup_epochs) == (20_000, 128_000, 1)
        assert (args.latent_dim, args.idm_scale, args.head_dim, args.decoder_dim) == (128, 6, 1024, 256)
        assert (args.max_offset, args.label_weight, args.target_rate, args.augment) == (10, 1e-3, 1e-3, True)


def test_schedule() -> None:
    args = laom_labels.Args(lam_warmup_epochs=1)
    rates = [laom_labels.schedule(args, "lam", step, 300, 100) for step in range(300)]
    assert rates[0] == 0.01 and rates[49] == 0.5 and rates[99] == 1 and rates[100] == 1
    assert rates[200] == 0.5 and rates[299] == pytest.approx(1 / 200)
    assert (
        laom_labels.schedule(args, "bc", 0, 300, 100) == 1 and laom_labels.schedule(args, "decoder", 150, 300, 9) == 0.5
    )
    short = [laom_labels.schedule(args, "lam", step, 5, 100) for step in range(5)]  # shorter than the warm-up
    assert short == pytest.approx([1 / 2, 1, 1, 2 / 3, 1 / 3])


def test_the_moving_average_has_its_closed_form(planted_dir: Path, tmp_path: Path) -> None:
    """After n updates: (1 - tau)^n theta_0 + tau sum (1 - tau)^(n - i) theta_i over the encoder's weights theta_i."""
    module, args, model = build("laom_labels", target_rate=0.1, runs_dir=tmp_path, lam_lr=1e-2)
    history = [[weight.detach().double().clone() for weight in model.encoder.parameters()]]

    def remember(model: torch.nn.Module) -> None:
        history.append([weight.detach().double().clone() for weight in model.encoder.parameters()])

    lam_training(module, args, model, planted_dir, 7, remember)
    for number, weight in enumerate(model.target.parameters()):
        expected = 0.9**7 * history[0][number]
        expected = expected + sum(0.1 * 0.9 ** (7 - i) * history[i][number] for i in range(1, 8))
        torch.testing.assert_close(weight.double(), expected, rtol=1e-5, atol=1e-7)
        assert not weight.requires_grad and weight.grad is None
    moved = [torch.equal(a.double(), b) for a, b in zip(model.target.parameters(), history[0])]
    assert len(history) == 8 and not any(moved)


def gradients(loss: torch.Tensor, model: torch.nn.Module) -> dict[str, bool]:
    """Which parts of the model get a gradient that is not zero."""
    model.zero_grad()
    loss.backward(retain_graph=True)
    found = {}
    for name, part in model.named_children():
        found[name] = any(p.grad is not None and bool(p.grad.abs().sum() > 0) for p in part.parameters())
    return found


def test_where_gradients_go(train_set: Dataset) -> None:
    """Labels shape encoder and action head; the embedding's error does so through z alone; the target gets nothing."""
    module, args, model = build("laom_labels")
    batch = first_batch(args, train_set)
    loss, _, logs = module.lam_loss(model, batch, args)
    assert loss.item() == pytest.approx((logs["embedding"] + args.label_weight * logs["labelled"]).item(), rel=1e-5)
    learned = {"augmentation": False, "encoder": True, "target": False, "action_head": True}
    assert gradients(loss, model) == learned | {"observation_head": True, "true_action": True}
    current, future, _ = module.observe(batch.labelled, args)
    error = (model.true_action(model.infer(current, future)[0]) - batch.labelled.action).square().mean()
    assert gradients(error, model) == learned | {"observation_head": False, "true_action": True}
    known, now = model.infer(current, future)
    assert gradients(model.predict(known.detach(), now).square().mean(), model) == {
        "augmentation": False, "encoder": False, "target": False, "action_head": False, "observation_head": True,
        "true_action": False,
    }  # fmt: skip


def test_the_labelled_actions_of_the_first_batch_do_not_matter(train_set: Dataset) -> None:
    module, args, model = build("laom_labels", augment=False)
    batch = first_batch(args, train_set)
    other = batch._replace(action=torch.zeros_like(batch.action))
    assert torch.equal(module.lam_loss(model, batch, args)[0], module.lam_loss(model, other, args)[0])
    other = batch._replace(labelled=batch.labelled._replace(action=batch.labelled.action + 1))
    assert not torch.equal(module.lam_loss(model, batch, args)[0], module.lam_loss(model, other, args)[0])


def test_one_pass_equals_separate_ones(train_set: Dataset) -> None:
    """The loss without augmentation, put together by hand from the stacks that its docstring names."""
    module, args, model = build("laom_labels", augment=False)
    model.target.load_state_dict({name: weight * 1.5 for name, weight in model.target.state_dict().items()})
    batch = first_batch(args, train_set)
    loss, z, _ = module.lam_loss(model, batch, args)

    def stack(frames: torch.Tensor, positions: list[int]) -> torch.Tensor:
        return (frames[:, positions].permute(0, 1, 4, 2, 3).float() / 255 - 0.5).flatten(1, 2)

    now, future = (model.encoder(stack(batch.frames, where)) for where in ([0, 1, 2], [4, 5, 6]))
    expected_z = model.action_head(torch.cat([now, future], 1))
    target = model.target(stack(batch.frames, [1, 2, 3]))  # the stack that ends at t+1
    embedding = (model.observation_head(expected_z, now) - target).square().mean()
    known = [model.encoder(stack(batch.labelled.frames, where)) for where in ([0, 1, 2], [4, 5, 6])]
    labels = (model.true_action(model.action_head(torch.cat(known, 1))) - batch.labelled.action).square().mean()
    torch.testing.assert_close(z, expected_z, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(loss, embedding + 1e-3 * labels, rtol=1e-4, atol=1e-6)


def test_encoding_is_deterministic_and_without_augmentation(train_set: Dataset) -> None:
    module, args, model = build("laom_labels")
    batch = next(sequential(train_set, 8, max_offset=1, device=CPU))
    z = module.encode(model, batch, args)
    assert torch.equal(z, module.encode(model, batch, args))
    assert torch.equal(z, module.encode(model, batch, module.Args(augment=False)))
    losses = {module.lam_loss(model, first_batch(args, train_set), args)[0].item() for _ in range(3)}
    assert len(losses) == 3  # while the loss draws new transformations each time


def test_only_the_chosen_labels_are_seen(train_set: Dataset) -> None:
    """Stage 1 reads actions of the transitions of stage 3 alone, and comes back to them when it is resumed."""
    _, args, _ = build("laom_labels", num_labels=33)
    chosen = train_set.labelled(33, args.seed)
    sampler = lam_sampler("laom_labels", args, train_set)
    seen = [sampler.next() for _ in range(6)]
    index = np.concatenate([batch.labelled.index.numpy() for batch in seen])
    assert set(index.tolist()) == set(chosen.tolist()) and len(chosen) == 33
    expected = np.clip(train_set.action[index], -1, 1)
    assert np.array_equal(np.concatenate([batch.labelled.action.numpy() for batch in seen]), expected)
    sampler.seek(4)
    again = sampler.next()
    assert torch.equal(again.frames, seen[4].frames) and torch.equal(again.labelled.frames, seen[4].labelled.frames)
    sampler.close()


def test_fewer_labels_than_a_batch(planted_dir: Path, tmp_path: Path) -> None:
    module, args, model = build("laom_labels", num_labels=5, runs_dir=tmp_path)
    before = [weight.clone() for weight in model.true_action.parameters()]
    lam_training(module, args, model, planted_dir, 2)
    assert not any(torch.equal(a, b) for a, b in zip(before, model.true_action.parameters()))
