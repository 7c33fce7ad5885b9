"""The shard format, its reader and the sampler, on small shards of random arrays."""

import json
import os
import shutil
import time
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch

from common.dataset import Dataset, Sampler, TensorSampler, normalise, sequential, unpack_masks, window_index
from common.errors import UserError
from common.shards import ShardTaken, ShardWriter, claim_part, read_shard, remove_stale_parts, write_sidecar

CPU = torch.device("cpu")
LENGTHS = [[5, 9, 2], [30], [7, 1, 12]]  # transitions per episode, per shard


def make_plan(lengths=LENGTHS, **changes):
    plan = {
        "env": "cheetah-run",
        "split": "train",
        "image_size": 16,
        "action_dim": 3,
        "state_dim": 5,
        "renders": ["clean", "distractor"],
        "success": False,
        "num_transitions": sum(map(sum, lengths)),
        "num_shards": len(lengths),
        "expert": "student",
        "expert_sha256": "0" * 64,
    }
    return plan | changes


def random_episode(plan, length, rng):
    size = plan["image_size"]
    episode = {
        "action": rng.normal(0, 1, (length + 1, plan["action_dim"])).astype(np.float32),
        "state": rng.normal(0, 1, (length + 1, plan["state_dim"])).astype(np.float32),
        "reward": rng.random(length + 1, np.float32),
        "success": rng.random(length + 1) > 0.9,
    }
    episode["action"][-1], episode["reward"][-1] = np.nan, 0
    for render in plan["renders"]:
        episode[f"{render}/observation"] = rng.integers(0, 256, (length + 1, size, size, 3), np.uint8)
        episode[f"{render}/mask"] = rng.integers(0, 256, (length + 1, size * size // 8), np.uint8)
    return episode


def write_dataset(data_dir: Path, lengths=LENGTHS, seed=0, room=0, **changes) -> list[dict]:
    """Write random shards, return the episodes in order. room: frames allocated beyond those written."""
    plan, rng, episodes = make_plan(lengths, **changes), np.random.default_rng(seed), []
    folder = data_dir / plan["env"] / plan["split"]
    folder.mkdir(parents=True, exist_ok=True)
    for shard, shard_lengths in enumerate(lengths):
        frames = sum(shard_lengths) + len(shard_lengths)
        with ShardWriter(folder / f"{shard:05d}.h5", plan, shard, frames + room, len(shard_lengths)) as writer:
            for length in shard_lengths:
                episodes.append(random_episode(plan, length, rng))
                writer.append(episodes[-1], seed=len(episodes), background=("clip", 3, -1))
            writer.commit()
    return episodes


@pytest.fixture
def data(tmp_path):
    write_dataset(tmp_path)
    return tmp_path


def open_train(data_dir, **arguments):
    return Dataset(data_dir, "cheetah-run", "train", **arguments)


def shard_file(data_dir, number=0):
    return data_dir / "cheetah-run" / "train" / f"{number:05d}.h5"


def expect_error(match, data_dir, **arguments):
    with pytest.raises(UserError) as caught:
        open_train(data_dir, **arguments).verify()
    message = str(caught.value)
    assert match in message, message
    assert "\n" not in message
    return message


# ------------------------------------------------------------------------------------------------------------- content


@pytest.mark.parametrize("success", [False, True])
def test_read_back(tmp_path, success):
    episodes = write_dataset(tmp_path, success=success)
    for render in ("clean", "distractor"):
        dataset = open_train(tmp_path, render=render)
        everything = np.arange(dataset.num_frames)
        for name, found in {
            "action": dataset.action,
            "state": dataset.state,
            "reward": dataset.reward,
            f"{render}/observation": dataset.frames(everything),
            f"{render}/mask": dataset.masks(everything),
        }.items():
            np.testing.assert_array_equal(found, np.concatenate([episode[name] for episode in episodes]))
        lengths = [len(episode["action"]) for episode in episodes]
        assert dataset.episode_start.tolist() == [0, *np.cumsum(lengths)]
        assert dataset.num_episodes == len(episodes)
        assert dataset.num_transitions == sum(map(sum, LENGTHS)) == len(dataset.transitions)
        assert dataset.episode_of_frame.tolist() == [i for i, n in enumerate(lengths) for _ in range(n)]
        returns = [episode["reward"].sum(dtype=np.float64) for episode in episodes]
        np.testing.assert_allclose(dataset.mean_return, np.mean(returns))
        if success:
            assert dataset.episode_success.tolist() == [episode["success"].any() for episode in episodes]
        dataset.verify()
    actions = np.concatenate([episode["action"][:-1] for episode in episodes]).astype(np.float64)
    np.testing.assert_allclose(dataset.action_variance, np.clip(actions, -1, 1).var(0).mean())


def test_hdf5_reads_the_same(tmp_path):
    episodes = write_dataset(tmp_path)
    with h5py.File(shard_file(tmp_path), "r") as file:
        assert file["distractor/observation"].chunks is None
        np.testing.assert_array_equal(file["clean/mask"][:6], episodes[0]["clean/mask"])
        assert list(file.attrs["background"]) == [b"clip"] * 3
        assert file.attrs["complete"] and file.attrs["env"] == "cheetah-run" and file.attrs["format_version"] == 1


def test_gather_in_any_order_and_shape(data):
    dataset = open_train(data)
    everything = dataset.frames(np.arange(dataset.num_frames))
    index = np.random.default_rng(1).integers(0, dataset.num_frames, (4, 5, 3))
    np.testing.assert_array_equal(dataset.frames(index), everything[index])
    index = np.sort(index.reshape(-1))
    np.testing.assert_array_equal(dataset.frames(index), everything[index])
    with pytest.raises(IndexError):
        dataset.frames(np.array([0, dataset.num_frames]))


def test_same_content_same_bytes(tmp_path):
    """With spare room (episodes that ended early) and without, a second later: the same file."""
    write_dataset(tmp_path / "a")
    time.sleep(1.1)  # HDF5 would store whole seconds
    write_dataset(tmp_path / "b", room=100)
    for number in range(3):
        assert shard_file(tmp_path / "a", number).read_bytes() == shard_file(tmp_path / "b", number).read_bytes()
    assert not list((tmp_path / "b").rglob("*.part"))
    a, b = open_train(tmp_path / "a"), open_train(tmp_path / "b")
    assert a.hash == b.hash
    write_dataset(tmp_path / "c", seed=1)
    assert open_train(tmp_path / "c").hash != a.hash


@pytest.mark.parametrize("count", [1, 8, 30, 66])
def test_labelled(data, count):
    dataset = open_train(data)
    labelled = dataset.labelled(count, seed=3)
    assert len(labelled) == len(np.unique(labelled)) == count
    assert (np.diff(labelled) > 0).all() and np.isin(labelled, dataset.transitions).all()
    episode = dataset.episode_of_frame[labelled]
    whole = np.diff(dataset.episode_start) - 1
    cut = [e for e in np.unique(episode) if (episode == e).sum() < whole[e]]
    assert len(cut) <= 1  # whole episodes but for one
    for e in cut:
        assert labelled[episode == e].tolist() == list(range(dataset.episode_start[e], labelled[episode == e][-1] + 1))
    np.testing.assert_array_equal(labelled, dataset.labelled(count, seed=3))


def test_labelled_differs_by_seed_and_knows_its_limit(data):
    dataset = open_train(data)
    assert len({tuple(dataset.labelled(8, seed=seed)) for seed in range(6)}) > 1
    with pytest.raises(UserError, match="--num-labels 67"):
        dataset.labelled(67, seed=0)


# ------------------------------------------------------------------------------------------------------------- windows


@pytest.mark.parametrize("max_offset", [0, 1, 10])
def test_windows_against_a_naive_loop(data, max_offset):
    dataset = open_train(data)
    t = dataset.transitions
    ends = dataset.episode_start[dataset.episode_of_frame[t] + 1]
    k = np.random.default_rng(0).integers(1, np.minimum(max_offset or 1, ends - 1 - t) + 1)
    found = window_index(dataset, t, k, max_offset=max_offset)
    for row, ti, ki in zip(found, t, k):
        first = max(start for start in dataset.episode_start if start <= ti)
        expected = [ti - 2, ti - 1, ti]
        if max_offset >= 1:
            expected.append(ti + 1)
        if max_offset > 1:
            expected += [ti + ki - 2, ti + ki - 1, ti + ki]
        expected = [max(index, first) for index in expected]
        assert row.tolist() == expected
        assert len({dataset.episode_of_frame[index] for index in row}) == 1


def test_window_past_the_episode_is_refused(data):
    dataset = open_train(data)
    with pytest.raises(IndexError):
        window_index(dataset, np.array([5]), max_offset=1)  # the last frame of the first episode
    with pytest.raises(IndexError):
        window_index(dataset, np.array([0]), np.array([6]), max_offset=10)
    assert window_index(dataset, np.array([5]), max_offset=0).tolist() == [[3, 4, 5]]


# ------------------------------------------------------------------------------------------------------------- sampler


def batches(sampler, count):
    found = [sampler.next() for _ in range(count)]
    sampler.close()
    return found


def assert_same(a, b):
    for x, y in zip(a.tensors(), b.tensors(), strict=True):
        torch.testing.assert_close(x, y, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("on_device", [False, True])
@pytest.mark.parametrize("max_offset", [0, 1, 10])
def test_batches_hold_what_the_index_says(data, max_offset, on_device):
    dataset = open_train(data)
    sampler = Sampler(dataset, 8, max_offset=max_offset, seed=0, device=CPU, masks=True, on_device=on_device)
    for position, batch in enumerate(batches(sampler, 10)):
        t, k = sampler.draw(position)
        window = window_index(dataset, t, k, max_offset=max_offset)
        np.testing.assert_array_equal(batch.index, t)
        np.testing.assert_array_equal(batch.frames, dataset.frames(window))
        np.testing.assert_array_equal(batch.masks, dataset.masks(window))
        np.testing.assert_array_equal(batch.action, np.clip(dataset.action[t], -1, 1))
        assert batch.frames.shape[1] == {0: 3, 1: 4, 10: 7}[max_offset]


def test_every_transition_once_per_epoch(data):
    dataset = open_train(data)
    sampler = Sampler(dataset, 6, max_offset=10, seed=0, device=CPU)
    assert sampler.batches_per_epoch * 6 == dataset.num_transitions
    found = [batch.index for batch in batches(sampler, 2 * sampler.batches_per_epoch)]
    epochs = torch.cat(found).view(2, -1)
    for epoch in epochs:
        np.testing.assert_array_equal(epoch.sort().values, dataset.transitions)
    assert not torch.equal(epochs[0], epochs[1])


@pytest.mark.parametrize("position", [1, 10, 11, 25])
def test_resume_from_a_position(data, position):
    dataset = open_train(data)
    arguments = {"max_offset": 10, "seed": 5, "device": CPU, "masks": True}
    whole = batches(Sampler(dataset, 6, **arguments), position + 4)
    sampler = Sampler(dataset, 6, start=position, **arguments)
    assert sampler.position == position
    for a, b in zip(whole[position:], batches(sampler, 4), strict=True):
        assert_same(a, b)
    assert sampler.position == position + 4
    other = batches(Sampler(dataset, 6, max_offset=10, seed=6, device=CPU), 1)[0]
    assert not torch.equal(other.index, whole[0].index)


def test_offsets_are_uniform_and_stay_in_the_episode(tmp_path):
    write_dataset(tmp_path, lengths=[[200, 200]], image_size=8, renders=["distractor"])
    dataset = open_train(tmp_path)
    sampler = Sampler(dataset, 400, max_offset=10, seed=0, device=CPU)
    draws = [sampler.draw(position) for position in range(250)]
    sampler.close()
    t, k = (np.concatenate(part) for part in zip(*draws))
    left = dataset.episode_start[dataset.episode_of_frame[t] + 1] - 1 - t
    assert k.min() == 1 and (k <= np.minimum(left, 10)).all()
    for limit in (1, 4, 10):
        counts = np.bincount(k[np.minimum(left, 10) == limit], minlength=limit + 1)[1:]
        expected = counts.sum() / limit
        chi_squared = ((counts - expected) ** 2 / expected).sum()
        assert len(counts) == limit and chi_squared < 30  # 9 degrees of freedom: p < 0.0005


def test_offsets_and_noise_have_their_own_numbers(data):
    """numpy seeds [s, e] and [s, e, 0] alike: what a batch draws must not come from the permutation's numbers."""
    dataset = open_train(data)
    sampler = Sampler(dataset, 22, max_offset=10, seed=0, device=CPU)
    t, k = sampler.draw(0)
    noise = [batch.noise for batch in batches(sampler, 6)]
    left = dataset.episode_start[dataset.episode_of_frame[t] + 1] - 1 - t
    rng = np.random.default_rng(np.random.SeedSequence([0, 0]))
    assert not np.array_equal(k, rng.integers(1, np.minimum(10, left) + 1))
    assert len(torch.cat(noise).unique()) == torch.cat(noise).numel()
    assert 0 <= torch.cat(noise).min() and torch.cat(noise).max() < 1


def test_seek(data):
    dataset = open_train(data)
    sampler = Sampler(dataset, 6, max_offset=10, seed=5, device=CPU, masks=True)
    whole = [sampler.next() for _ in range(14)]
    sampler.seek(9)
    for batch in whole[9:]:
        assert_same(batch, sampler.next())
    assert sampler.position == 14
    sampler.close()
    assert sampler.episodes(3) == np.unique(dataset.episode_of_frame[whole[3].index]).tolist()


def test_batches_that_are_kept_stay_as_they_were(data):
    """Host memory is used again, but not while a view of it lives."""
    dataset = open_train(data)
    sampler = Sampler(dataset, 6, max_offset=10, seed=0, device=CPU)
    views = [sampler.next().frames[:, 3:4, ::2] for _ in range(30)]
    for position, view in enumerate(views):
        t, k = sampler.draw(position)
        np.testing.assert_array_equal(view, dataset.frames(window_index(dataset, t, k, max_offset=10))[:, 3:4, ::2])
    del views, view
    addresses = {sampler.next().frames.data_ptr() for _ in range(30)}
    sampler.close()
    assert len(addresses) <= 8


def test_tensor_sampler():
    tensors = {"x": torch.arange(10), "y": torch.arange(10) * 2.0}
    sampler = TensorSampler(tensors, 3, seed=0, episode=np.arange(10) // 5)
    whole = [sampler.next() for _ in range(7)]
    assert len(torch.cat([batch["x"] for batch in whole[:3]]).unique()) == 9
    sampler.seek(2)
    for batch in whole[2:]:
        again = sampler.next()
        assert torch.equal(again["x"], batch["x"]) and torch.equal(again["y"], 2.0 * batch["x"])
    assert len(TensorSampler(tensors, 64, seed=0, episode=np.zeros(10)).next()["x"]) == 10


def test_indices_restrict_the_sampler(data):
    dataset = open_train(data)
    labelled = dataset.labelled(20, seed=0)
    sampler = Sampler(dataset, 10, max_offset=1, seed=0, device=CPU, indices=labelled)
    np.testing.assert_array_equal(torch.cat([b.index for b in batches(sampler, 2)]).sort().values, labelled)
    with pytest.raises(IndexError):
        Sampler(dataset, 1, max_offset=1, seed=0, device=CPU, indices=np.array([5]))


def test_set_smaller_than_a_batch(data):
    with pytest.raises(UserError, match="batch of 67"):
        Sampler(open_train(data), 67, max_offset=1, seed=0, device=CPU)


@pytest.mark.parametrize("max_offset", [0, 1])
def test_sequential(data, max_offset):
    dataset = open_train(data)
    found = list(sequential(dataset, 10, max_offset=max_offset, device=CPU, masks=True))
    assert [len(batch.index) for batch in found] == [10] * 6 + [6]
    np.testing.assert_array_equal(torch.cat([batch.index for batch in found]), dataset.transitions)
    window = window_index(dataset, dataset.transitions, max_offset=max_offset)
    np.testing.assert_array_equal(torch.cat([batch.frames for batch in found]), dataset.frames(window))
    for a, b in zip(found[3:], sequential(dataset, 10, max_offset=max_offset, device=CPU, masks=True, start=3)):
        assert_same(a, b)
    some = np.array([40, 3, 20])
    assert next(sequential(dataset, 10, max_offset=max_offset, device=CPU, indices=some)).index.tolist() == [40, 3, 20]
    assert not list(sequential(dataset, 10, max_offset=max_offset, device=CPU, start=7))
    dataset.resident("frames", CPU), dataset.resident("masks", CPU)
    for a, b in zip(found, sequential(dataset, 10, max_offset=max_offset, device=CPU, masks=True), strict=True):
        assert_same(a, b)


def test_normalise_and_unpack(data):
    batch = next(sequential(open_train(data), 4, max_offset=1, device=CPU, masks=True))
    frames = normalise(batch.frames)
    expected = batch.frames.numpy().transpose(0, 1, 4, 2, 3).astype(np.float32) / np.float32(255) - np.float32(0.5)
    np.testing.assert_array_equal(frames, expected)
    assert frames.dtype == torch.float32 and frames.min() >= -0.5 and frames.max() <= 0.5
    masks = unpack_masks(batch.masks, 16, 16)
    expected = np.unpackbits(batch.masks.numpy(), axis=-1).reshape(4, 4, 1, 16, 16)
    np.testing.assert_array_equal(masks, expected)
    assert masks.dtype == torch.float32


# -------------------------------------------------------------------------------------------------------------- faults


def test_no_dataset(tmp_path):
    message = expect_error("python make_dataset.py --env cheetah-run", tmp_path)
    assert str(tmp_path / "cheetah-run" / "train") in message and f"--data-dir {tmp_path}" in message


@pytest.mark.parametrize("number", [0, 1, 2])
def test_missing_shard(data, number):
    shard_file(data, number).unlink()
    assert f"{number:05d}.h5" in expect_error("incomplete", data)


def test_too_few_transitions(tmp_path):
    """Meta-World: the number of shards follows from the episodes, so only the transitions tell."""
    write_dataset(tmp_path, num_shards=None, success=True)
    open_train(tmp_path)
    shard_file(tmp_path, 2).unlink()
    expect_error("46 of 66 transitions", tmp_path)


@pytest.mark.parametrize("keep", [0, 100, 5000, -1])
def test_truncated(data, keep):
    path = shard_file(data, 1)
    os.truncate(path, keep if keep >= 0 else path.stat().st_size - 1)
    message = expect_error(str(path), data)
    assert "make_dataset.py" in message


def test_flipped_bits(data):
    """In whichever byte: the reader or `verify` names the file, for frames also the episode; never a silent pass."""
    path = shard_file(data, 0)
    good, offset = path.read_bytes(), read_shard(path).offset
    frame = 16 * 16 * 3
    for name, stride in (("clean/observation", frame), ("distractor/mask", 32), ("state", 20), ("reward", 4)):
        broken = bytearray(good)
        broken[offset[name] + 7 * stride + 1] ^= 4  # frame 7 lies in episode 1
        path.write_bytes(broken)
        assert "episode 1 (frames 6 to 15)" in expect_error(str(path), data)
    rng = np.random.default_rng(0)
    for position in rng.integers(0, len(good), 60):
        broken = bytearray(good)
        broken[position] ^= 1 << int(rng.integers(8))
        path.write_bytes(broken)
        try:
            dataset = open_train(data)
            dataset.verify()
        except UserError as error:
            assert str(path) in str(error)
            continue
        path.write_bytes(good)  # a byte of padding, versions or command: the content must still be the same
        assert dataset.hash == open_train(data).hash
    path.write_bytes(good)
    open_train(data).verify()


def edit(path, **attributes):
    with h5py.File(path, "r+") as file:
        for name, value in attributes.items():
            if value is None:
                del file.attrs[name]
            else:
                file.attrs[name] = value


def test_not_complete(data):
    edit(shard_file(data), complete=None)
    expect_error("00000.h5: not complete", data)


def test_other_version(data):
    edit(shard_file(data, 2), format_version=2)
    expect_error("00002.h5: format version 2", data)


def test_edited_header(data):
    edit(shard_file(data, 2), plan=json.dumps(make_plan(seed=9)))
    expect_error("00002.h5: the header does not match", data)


def test_wrong_env_split_number_or_plan(tmp_path):
    write_dataset(tmp_path)
    write_dataset(tmp_path, env="walker-run")
    write_dataset(tmp_path, split="test")
    write_dataset(tmp_path / "other", quality="fast")
    good = shard_file(tmp_path).read_bytes()
    for source, match in (
        (tmp_path / "walker-run" / "train" / "00000.h5", "holds walker-run/train, not cheetah-run/train"),
        (tmp_path / "cheetah-run" / "test" / "00000.h5", "holds cheetah-run/test, not cheetah-run/train"),
        (shard_file(tmp_path, 1), "this is shard 1 under another name"),
        (shard_file(tmp_path / "other"), "quality"),
    ):
        shutil.copy(source, shard_file(tmp_path))
        expect_error(match, tmp_path)
    shard_file(tmp_path).write_bytes(good)
    open_train(tmp_path)


def test_render_that_was_not_made(tmp_path):
    write_dataset(tmp_path, renders=["clean"])
    open_train(tmp_path, render="clean")
    expect_error("--render both", tmp_path)


def test_not_hdf5(data):
    shard_file(data).write_text("hello")
    expect_error("00000.h5: not a readable shard", data)


def test_damaged_action(data):
    path = shard_file(data)
    with h5py.File(path, "r+") as file:
        file["action"][7] = np.nan
    assert "episode 1" in expect_error(str(path), data)


# --------------------------------------------------------------------------------------------------------------- masks


def write_masks(data_dir, name="sam", numbers=(0, 1, 2)):
    rng, masks = np.random.default_rng(7), []
    for number in numbers:
        shard = read_shard(shard_file(data_dir, number))
        masks.append(rng.integers(0, 256, (shard.frames, 32), np.uint8))
        write_sidecar(shard.path, name, {"clean/mask": masks[-1], "distractor/mask": masks[-1] ^ 255})
    return np.concatenate(masks)


def test_other_mask_source(data):
    masks = write_masks(data)
    dataset = open_train(data, mask_source="sam")
    np.testing.assert_array_equal(dataset.masks(np.arange(dataset.num_frames)), masks ^ 255)
    dataset.verify()
    clean = open_train(data, mask_source="sam", render="clean")
    np.testing.assert_array_equal(clean.masks(np.arange(clean.num_frames)), masks)
    batch = next(sequential(dataset, 4, max_offset=1, device=CPU, masks=True))
    np.testing.assert_array_equal(batch.masks[:, 3], (masks ^ 255)[1:5])


def test_no_masks_wanted(data):
    dataset = open_train(data, mask_source=None)
    with pytest.raises(ValueError):
        dataset.masks(np.array([0]))
    assert next(sequential(dataset, 4, max_offset=1, device=CPU)).masks is None


def test_mask_faults(data):
    command = "python make_masks.py --env cheetah-run"
    assert "gt" in expect_error("no masks named 'sam'", data, mask_source="sam")
    write_masks(data, "hand")
    message = expect_error("no masks named 'sam'", data, mask_source="sam")
    assert "gt, hand" in message and command in message
    write_masks(data, numbers=(0, 2))
    message = expect_error("00001.sam.h5: masks 'sam' are missing for 1 of 3 shards", data, mask_source="sam")
    assert command in message
    write_masks(data)
    path = shard_file(data, 1).with_suffix(".sam.h5")
    good = path.read_bytes()
    edit(path, complete=None)
    assert command in expect_error("00001.sam.h5: not complete", data, mask_source="sam")
    path.write_bytes(good)
    edit(path, shard_hash="0" * 64)
    assert command in expect_error("00001.sam.h5: made from another version", data, mask_source="sam")
    path.write_bytes(good[:-1])
    assert command in expect_error(str(path), data, mask_source="sam")
    path.write_bytes(good)
    with h5py.File(path, "r+") as file:
        file["distractor/mask"][3, 3] ^= 1
    expect_error("00001.sam.h5: does not match its hash", data, mask_source="sam")
    path.write_bytes(good)
    with h5py.File(path, "r+") as file:
        del file["distractor/mask"]
    expect_error("00001.sam.h5: holds no distractor/mask", data, mask_source="sam")
    path.write_bytes(good)
    open_train(data, mask_source="sam").verify()


def test_remade_shard_makes_its_masks_stale(data):
    write_masks(data)
    write_dataset(data, seed=1)
    open_train(data)
    expect_error("made from another version of 00000.h5", data, mask_source="sam")


# ------------------------------------------------------------------------------------------------------------- writing


def test_only_a_live_writer_holds_its_claim(tmp_path):
    plan = make_plan([[3]])
    path = tmp_path / "00000.h5"
    dead = tmp_path / "00001.h5.part"
    dead.write_bytes(b"left by a killed run")
    with ShardWriter(path, plan, 0, 4, 1) as writer:
        with pytest.raises(ShardTaken):
            ShardWriter(path, plan, 0, 4, 1)
        assert remove_stale_parts(tmp_path) == [dead]
        writer.append(random_episode(plan, 3, np.random.default_rng(0)), seed=0)
        writer.commit()
    assert [p.name for p in tmp_path.iterdir()] == ["00000.h5"]
    os.close(claim_part(dead))  # free again


def test_unfinished_shard_leaves_nothing(tmp_path):
    plan = make_plan([[3, 3]])
    with pytest.raises(ValueError), ShardWriter(tmp_path / "00000.h5", plan, 0, 8, 2) as writer:
        writer.append(random_episode(plan, 3, np.random.default_rng(0)), seed=0)
        writer.commit()  # one episode short
    assert not list(tmp_path.iterdir())


def test_many_episodes_in_a_shard(tmp_path):
    """Attributes that grow with the episodes outgrow HDF5's 64 KiB object headers."""
    write_dataset(tmp_path, lengths=[[1] * 3000], image_size=8, renders=["clean"])
    dataset = open_train(tmp_path, render="clean")
    assert dataset.num_transitions == 3000 and len(dataset.shards[0].background) == 3000
