"""Datasets as training sees them, on small shards of random arrays: content, windows, samplers, and faults."""

import itertools
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from common import store
from common.cli import UserError
from common.dataset import Batch, Dataset, LabelledSampler, Sampler, TensorSampler, sequential, window_index
from common.shards import derived_path, frame_schema, read_shard, write_derived, write_shard

CPU = torch.device("cpu")
ENV, SIZE = "cheetah-run", 16
LENGTHS = [[5, 9, 2], [30], [7, 1, 12]]  # transitions per episode, per shard
BOTH = ("frames", "masks")


def write(data_dir: Path, lengths=LENGTHS, seed=0, **changes) -> dict[str, np.ndarray]:
    """Writes shards of random arrays. Returns the arrays of the whole split."""
    rng, wholes = np.random.default_rng(seed), []
    plan = {
        "env": ENV,
        "split": "train",
        "image_size": SIZE,
        "action_dim": 3,
        "state_dim": 5,
        "renders": ["clean", "distractor"],
        "success": False,
        "num_transitions": sum(map(sum, lengths)),
        "num_shards": len(lengths),
    } | changes
    for number, transitions in enumerate(lengths):
        starts = np.cumsum([0] + [length + 1 for length in transitions])
        arrays = {}
        for name, (dtype, shape) in frame_schema(plan).items():
            whole = (starts[-1], *shape)
            arrays[name] = rng.integers(0, 256, whole, np.uint8) if dtype == "uint8" else rng.normal(0, 1, whole)
            arrays[name] = arrays[name] > 1.5 if dtype == "bool" else arrays[name].astype(dtype)
        arrays["action"][starts[1:] - 1] = np.nan
        wholes.append(arrays)
        path = data_dir / plan["env"] / plan["split"] / f"{number:05d}.h5"
        write_shard(path, plan, arrays | {"episode_start": starts}, {"seed": transitions}, {"command": "python make"})
    return {name: np.concatenate([arrays[name] for arrays in wholes]) for name in wholes[0]}


def write_masks(data_dir: Path, name="sam", numbers=(0, 1, 2), renders=("clean", "distractor")) -> np.ndarray:
    rng, whole = np.random.default_rng(7), []
    for number in numbers:
        shard = read_shard(shard_file(data_dir, number))
        masks = rng.integers(0, 256, (shard.frames, SIZE * SIZE // 8), np.uint8)
        whole.append(masks)
        arrays = {f"{render}/mask": masks ^ 255 if render == "distractor" else masks for render in renders}
        write_derived(shard, name, arrays, {"by": "hand"}, "python make_masks.py --box")
    return np.concatenate(whole)


def shard_file(data_dir: Path, number: int) -> Path:
    return data_dir / ENV / "train" / f"{number:05d}.h5"


def open_train(data_dir: Path, **options) -> Dataset:
    return Dataset(data_dir, ENV, "train", **options)


def error_of(data_dir: Path, **options) -> str:
    with pytest.raises(UserError) as caught:
        open_train(data_dir, **options).verify()
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory) -> Path:
    """The folder of a set that no test changes."""
    folder = tmp_path_factory.mktemp("data")
    write(folder)
    return folder


@pytest.fixture(scope="module")
def data(data_dir) -> Dataset:
    return open_train(data_dir)


@pytest.fixture
def copy(data_dir, tmp_path) -> Path:
    """The folder of a set to damage."""
    return shutil.copytree(data_dir, tmp_path / "copy")


@pytest.mark.parametrize(("render", "success"), [("clean", False), ("distractor", True)])
def test_content(tmp_path, render, success):
    arrays = write(tmp_path, success=success)
    data = open_train(tmp_path, render=render)
    everything, lengths = np.arange(data.num_frames), [n + 1 for n in itertools.chain(*LENGTHS)]
    for name, values in {
        "action": data.action,
        "state": data.state,
        "reward": data.reward,
        f"{render}/observation": data.frames(everything),
        f"{render}/mask": data.masks(everything),
    }.items():
        np.testing.assert_array_equal(values, arrays[name])
    assert data.episode_start.tolist() == [0, *np.cumsum(lengths)]
    assert data.episode_of_frame.tolist() == np.repeat(range(7), lengths).tolist()
    assert (data.num_episodes, data.num_transitions, len(data.transitions)) == (7, 66, 66)
    rewards = np.split(arrays["reward"].astype(np.float64), data.episode_start[1:-1])
    summary = data.summary()
    np.testing.assert_allclose(summary["mean_return"], np.mean([reward.sum() for reward in rewards]))
    np.testing.assert_allclose(summary["return_std"], np.std([reward.sum() for reward in rewards]))
    actions = arrays["action"][data.transitions].astype(np.float64)
    np.testing.assert_allclose(summary["action_variance"], np.clip(actions, -1, 1).var(0).mean())
    assert (summary["hash"], summary["transitions"], summary["render"]) == (data.hash, 66, render)
    if success:
        successes = [part.any() for part in np.split(arrays["success"], data.episode_start[1:-1])]
        assert data.episode_success.tolist() == successes and summary["success_rate"] == np.mean(successes)
    else:
        assert data.episode_success is None and summary["success_rate"] is None
    data.verify()
    write(tmp_path, seed=1)
    assert open_train(tmp_path).hash != data.hash


def test_gather_in_any_order_and_shape(data):
    everything = data.frames(np.arange(data.num_frames))
    index = np.random.default_rng(1).integers(0, data.num_frames, (4, 5, 3))
    for some in (index, np.sort(index.reshape(-1)), index[:0]):
        np.testing.assert_array_equal(data.frames(some), everything[some])
    for outside in (-1, data.num_frames):
        with pytest.raises(IndexError):
            data.frames(np.array([0, outside]))


def test_labelled(data):
    whole, budgets = np.diff(data.episode_start) - 1, (1, 8, 30, 66)
    subsets = [data.labelled(budget, seed=3) for budget in budgets]
    for budget, labelled in zip(budgets, subsets):
        assert len(labelled) == budget and (np.diff(labelled) > 0).all() and np.isin(labelled, data.transitions).all()
        episodes, counts = np.unique(data.episode_of_frame[labelled], return_counts=True)
        cut = episodes[counts < whole[episodes]]
        assert len(cut) <= 1  # whole episodes but for one, which has its beginning
        for episode in cut:
            first = data.episode_start[episode]
            assert np.isin(np.arange(first, first + counts[episodes == episode][0]), labelled).all()
    for smaller, larger in itertools.pairwise(subsets):
        assert np.isin(smaller, larger).all()
    assert len({tuple(data.labelled(8, seed=seed)) for seed in range(6)}) > 1
    with pytest.raises(UserError, match="--num-labels 67"):
        data.labelled(67, seed=0)


def test_attached_rows_are_in_batches(data_dir):
    data = open_train(data_dir)
    rows = np.random.default_rng(0).random((data.num_frames, 2, 4), np.float32)
    cuts = np.cumsum([shard.frames for shard in data.shards])[:-1]
    data.attach("slots", np.split(rows, cuts), "digest", {"by": "hand"})
    for on_device in ("never", "always"):
        sampler = Sampler(data, 6, max_offset=1, seed=0, device=CPU, fields=("slots",), on_device=on_device)
        batch = sampler.next()
        sampler.close()
        np.testing.assert_array_equal(batch.extra, rows[batch.index])
        assert batch.frames is None and batch.masks is None
    assert data.summary()["extra"] == {"slots": {"by": "hand", "hash": "digest"}}
    for parts in (np.split(rows, cuts)[:2], [rows, rows[:0], rows[:0]]):
        with pytest.raises(ValueError, match="one array per shard"):
            data.attach("slots", parts, "")


@pytest.mark.parametrize("max_offset", [0, 1, 10])
def test_windows_against_a_naive_loop(data, max_offset):
    t = data.transitions
    ends = data.episode_start[data.episode_of_frame[t] + 1]
    k = np.random.default_rng(0).integers(1, np.minimum(10, ends - 1 - t) + 1)
    windows = window_index(data, t, k, max_offset=max_offset)
    for window, now, offset in zip(windows, t, k, strict=True):
        first = max(start for start in data.episode_start if start <= now)
        expected = [now - 2, now - 1, now]
        if max_offset >= 1:
            expected.append(now + 1)
        if max_offset > 1:
            expected += [now + offset - 2, now + offset - 1, now + offset]
        assert window.tolist() == [max(index, first) for index in expected]
        assert len({data.episode_of_frame[index] for index in window}) == 1
    if max_offset:  # the first episode has transitions 0 to 4
        with pytest.raises(IndexError, match="past the end"):
            window_index(data, np.array([5 if max_offset == 1 else 0]), np.array([6]), max_offset=max_offset)


def take(sampler, count: int) -> list:
    batches = [sampler.next() for _ in range(count)]
    sampler.close()
    return batches


def assert_same(a: Batch, b: Batch) -> None:
    torch.testing.assert_close(a.tensors(), b.tensors(), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("on_device", ["never", "always"])
@pytest.mark.parametrize("max_offset", [0, 1, 10])
def test_sampler(data_dir, max_offset, on_device):
    data = open_train(data_dir)
    options = {"max_offset": max_offset, "device": CPU, "fields": BOTH, "on_device": on_device}
    sampler = Sampler(data, 6, seed=5, **options)
    batches = [sampler.next() for _ in range(26)]
    for position, batch in enumerate(batches):
        t, k = sampler.draw(position)
        window = window_index(data, t, k, max_offset=max_offset)
        np.testing.assert_array_equal(batch.index, t)
        np.testing.assert_array_equal(batch.frames, data.frames(window))
        np.testing.assert_array_equal(batch.masks, data.masks(window))
        np.testing.assert_array_equal(batch.action, np.clip(data.action[t], -1, 1))
        assert sampler.episodes(position) == np.unique(data.episode_of_frame[t]).tolist()
    noise = torch.cat([batch.noise for batch in batches])
    assert len(noise.unique()) == noise.numel() and noise.min() >= 0 and noise.max() < 1
    # every transition once per epoch of 11 batches, in another order each time
    first, second = torch.cat([batch.index for batch in batches[:22]]).view(2, -1)
    for epoch in (first, second):
        np.testing.assert_array_equal(epoch.sort().values, data.transitions)
    assert not torch.equal(first, second)
    # from any position on, whatever was asked for before
    sampler.close()
    sampler = Sampler(data, 6, seed=5, **options)
    for position in (23, 10, 0, 11):
        sampler.seek(position)
        for batch in batches[position : position + 3]:
            assert_same(sampler.next(), batch)
        assert sampler.position == position + 3
    sampler.close()
    assert not torch.equal(take(Sampler(data, 6, seed=6, **options), 1)[0].index, batches[0].index)
    with pytest.raises(UserError, match="fewer than one batch of 67"):
        Sampler(data, 67, seed=6, **options)


def test_offsets_are_uniform_and_stay_in_the_episode(tmp_path):
    write(tmp_path, lengths=[[200, 200]], image_size=8, renders=["distractor"])
    data = open_train(tmp_path)
    sampler = Sampler(data, 400, max_offset=10, seed=0, device=CPU)
    t, k = (np.concatenate(part) for part in zip(*[sampler.draw(position) for position in range(250)]))
    sampler.close()
    left = data.episode_start[data.episode_of_frame[t] + 1] - 1 - t
    assert k.min() == 1 and (k <= np.minimum(left, 10)).all()
    for limit in (1, 4, 10):
        counts = np.bincount(k[np.minimum(left, 10) == limit], minlength=limit + 1)[1:]
        expected = counts.sum() / limit
        chi_squared = ((counts - expected) ** 2 / expected).sum()
        assert len(counts) == limit and chi_squared < 30  # 9 degrees of freedom: p < 0.0005


def test_labelled_sampler(data):
    labelled = data.labelled(4, seed=0)  # fewer than a batch
    options = {"seed": 0, "max_offset": 10, "device": CPU}
    sampler = LabelledSampler(data, labelled, 6, **options)
    assert (sampler.batch_size, sampler.batches_per_epoch) == (6, 11)
    alone = take(Sampler(data, 6, **options), 5)
    batches = [sampler.next() for _ in range(5)]
    for batch, plain in zip(batches, alone, strict=True):
        assert torch.equal(batch.frames, plain.frames) and torch.equal(batch.action, plain.action)
        np.testing.assert_array_equal(batch.labelled.index, labelled)
    episodes = {*data.episode_of_frame[alone[3].index], *data.episode_of_frame[labelled]}
    assert sampler.episodes(3) == sorted(episodes)
    sampler.seek(2)
    again = take(sampler, 1)[0]
    assert torch.equal(again.frames, batches[2].frames)
    assert_same(again.labelled, batches[2].labelled)


def test_tensor_sampler():
    tensors = {"x": torch.arange(10), "y": torch.arange(10) * 2.0}
    sampler = TensorSampler(tensors, 3, seed=0, episode=np.arange(10) // 5)
    whole = [sampler.next() for _ in range(7)]
    assert len(torch.cat([batch["x"] for batch in whole[:3]]).unique()) == 9
    assert sampler.episodes(4) == np.unique(whole[4]["x"] // 5).tolist()
    sampler.seek(2)
    for batch in whole[2:]:
        again = sampler.next()
        assert torch.equal(again["x"], batch["x"]) and torch.equal(again["y"], 2.0 * batch["x"])
    assert len(TensorSampler(tensors, 64, seed=0, episode=np.zeros(10)).next()["x"]) == 10


@pytest.mark.parametrize("max_offset", [0, 1])
def test_sequential(data_dir, max_offset):
    data = open_train(data_dir)
    options = {"max_offset": max_offset, "device": CPU, "fields": BOTH}
    batches = list(sequential(data, 10, **options))
    assert [len(batch.index) for batch in batches] == [10] * 6 + [6]
    np.testing.assert_array_equal(torch.cat([batch.index for batch in batches]), data.transitions)
    window = window_index(data, data.transitions, max_offset=max_offset)
    np.testing.assert_array_equal(torch.cat([batch.frames for batch in batches]), data.frames(window))
    some = np.array([40, 3, 20])
    assert next(sequential(data, 10, indices=some, **options)).index.tolist() == [40, 3, 20]
    assert not list(sequential(data, 10, indices=some[:0], **options))
    for name in BOTH:
        data.resident(name, CPU)
    for a, b in zip(batches, sequential(data, 10, **options), strict=True):
        assert_same(a, b)


def test_missing_shards(copy, tmp_path):
    shard_file(copy, 1).unlink()
    message = error_of(copy)
    assert "incomplete, 00001.h5 is missing and 2 shards are there; finish it with: python make --data-dir" in message
    # On Meta-World the number of shards is an outcome, so only the transitions of those before tell.
    write(tmp_path, num_shards=None, success=True)
    open_train(tmp_path)
    shard_file(tmp_path, 2).unlink()
    assert "incomplete, 00002.h5 is missing" in error_of(tmp_path)
    # One made beyond the last by a process that was killed is no part of the set.
    write(tmp_path / "more", num_shards=None, success=True, num_transitions=sum(map(sum, LENGTHS[:2])))
    more = open_train(tmp_path / "more")
    shard_file(tmp_path / "more", 2).unlink()
    assert len(more.shards) == 2 and more.hash == open_train(tmp_path / "more").hash


@pytest.mark.parametrize("name", ["action", "clean/observation", "distractor/mask"])
def test_damaged_array(copy, name):
    """Of actions on opening; of frames and masks by `verify`, whichever render is open."""
    path = shard_file(copy, 2)
    data, row = path.read_bytes(), read_shard(path).arrays[name][8].tobytes()  # the first of its second episode
    assert data.count(row) == 1
    path.write_bytes(data.replace(row, row[::-1]))
    assert f"{path}: episode 1 of {name} does not match its hash; repair with: rm {path} && python" in error_of(copy)
    path.write_bytes(data[:-1])
    assert f"{path}: truncated; repair with: rm {path} && python make --data-dir {copy}" in error_of(copy)


def test_wrong_env_split_number_or_plan(copy, tmp_path):
    write(tmp_path, env="walker-run")
    write(tmp_path, split="test")
    write(tmp_path / "other", quality="fast")
    for source, expected in (
        (tmp_path / "walker-run/train/00000.h5", "holds walker-run/train, not cheetah-run/train; move it away and run"),
        (tmp_path / "cheetah-run/test/00000.h5", "holds cheetah-run/test, not cheetah-run/train; move it away and run"),
        (shard_file(copy, 1), "this is shard 1 under another name; remove it and make 00000.h5 again"),
        (shard_file(tmp_path / "other", 0), "quality: fast -> None); remove the folder"),
    ):
        shutil.copy(source, shard_file(copy, 0))
        assert expected in error_of(copy)


def test_shard_that_is_none(copy):
    """A file of the store that holds something else, and one whose arrays are not as its plan says."""
    path = shard_file(copy, 0)
    shard = read_shard(path)
    store.write(path, {"x": np.zeros(3)}, {})
    assert "not a shard" in error_of(copy)
    write_shard(path, shard.plan, shard.arrays | {"state": shard.arrays["state"][:, :4]}, shard.episodes)
    assert "state is float32 (19, 4), expected float32 (19, 5)" in error_of(copy)


def test_render_that_was_not_made(tmp_path):
    write(tmp_path, renders=["clean"])
    assert open_train(tmp_path, render=None).render == "clean"
    message = error_of(tmp_path)
    assert "holds no distractor frames, only clean" in message and message.endswith("--render both")


def test_other_mask_source(copy):
    masks = write_masks(copy)
    for render, expected in (("distractor", masks ^ 255), ("clean", masks)):
        data = open_train(copy, mask_source="sam", render=render)
        np.testing.assert_array_equal(data.masks(np.arange(data.num_frames)), expected)
        data.verify()
        assert data.summary()["mask_hash"] == data.mask_hash != "gt"
        batch = next(sequential(data, 4, max_offset=1, device=CPU, fields=BOTH))
        np.testing.assert_array_equal(batch.masks[:, 3], expected[1:5])


def test_mask_faults(copy):
    make, remembered = f"python make_masks.py --env {ENV}", f"python make_masks.py --box --data-dir {copy}"
    write_masks(copy, "hand")
    message = error_of(copy, mask_source="sam")
    assert f"no masks named 'sam'; there are: gt, hand. Make them with: {make} --data-dir {copy}" in message
    assert f"{make} --import DIR --name mine" in error_of(copy, mask_source="mine")
    write_masks(copy, numbers=(0, 2))
    message = error_of(copy, mask_source="sam")
    assert f"00001.sam.h5: masks 'sam' are missing for 1 of 3 shards; finish them with: {remembered}" in message
    write_masks(copy, renders=["clean"])
    message = error_of(copy, mask_source="sam")
    assert f"00000.sam.h5: holds no distractor/mask; add it with: {remembered} --render distractor" in message
    masks = write_masks(copy)
    path = derived_path(shard_file(copy, 1), "sam")
    data = path.read_bytes()
    path.write_bytes(data[:-1])
    assert f"{path}: truncated; repair with: rm {path} && {remembered}" in error_of(copy, mask_source="sam")
    row = (masks[20] ^ 255).tobytes()  # a frame of shard 1
    path.write_bytes(data.replace(row, row[::-1]))
    for source in ("sam", "gt"):  # `verify` reads what lies beside the shards, too
        message = error_of(copy, mask_source=source)
        assert f"{path}: distractor/mask does not match its hash; repair with: rm {path} && {remembered}" in message
    path.write_bytes(data)
    open_train(copy, mask_source="sam").verify()
    write(copy, seed=1)  # the shards are made again
    open_train(copy)
    path = derived_path(shard_file(copy, 0), "sam")
    expected = f"{path}: made from another version of 00000.h5; repair with: rm {path} && {remembered}"
    assert expected in error_of(copy, mask_source="sam")
