"""The benchmarks run at tiny size and their records are complete; operations are counted right."""

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

import methods
import pytest
import torch
import tyro

from benchmarks import rendering, throughput
from common.cli import UserError
from common.runs import method_scripts
from lapo import Encoder, ForwardModel

ROOT = Path(__file__).parents[1]
TINY = ["--windows", "2", "--window-seconds", "0.01"]


def arguments(*flags: str):
    """The arguments of `python -m benchmarks.throughput` with these flags."""
    default = throughput.defaults(list(flags))
    return tyro.cli(type(default), default=default, args=flags)


def check_head(record: dict, module: str) -> None:
    """The head of a record says how, where and with what it was made."""
    assert record["command"].startswith(f"python -m {module}")
    assert record["versions"]["torch"] == torch.__version__.split("+")[0]
    assert record["machine"]["cores"] == os.cpu_count() and "commit" in record


@pytest.mark.parametrize("script", method_scripts())
def test_throughput(script, planted_dir, tmp_path):
    out = tmp_path / "throughput.json"
    flags = ["--quick", "--batch-size", "4", "--num-labels", "40", "--policy-scale", "1", "--device", "cpu"]
    flags += ["--data-dir", str(planted_dir), "--warmup", "1", "--out", str(out)]
    flags += methods.flags(script, tmp_path) if script in methods.OWN else []  # a user's script has none here
    throughput.main(arguments("--script", script, *flags, *TINY))
    record = json.loads(out.read_text())
    check_head(record, "benchmarks.throughput")
    measured = {(entry["stage"], entry["loading"]): entry for entry in record["measurements"]}
    expected = itertools.product(throughput.Options().trainings, ("included", "excluded"))
    assert record["complete"] and set(measured) == set(expected)
    for entry in measured.values():
        low, high = min(entry["samples_per_s_windows"]), max(entry["samples_per_s_windows"])
        assert len(entry["samples_per_s_windows"]) == 2 and 0 < low <= entry["samples_per_s"] <= high
        assert entry["peak_memory_gib"] > 0.05
        needed, peak = entry["flops_per_sample"] * entry["samples_per_s"], record["peaks"]["matmul"]["flops_per_s"]
        assert entry["mfu"] == {"matmul": pytest.approx(needed / peak)} and needed > 0


def test_loading(planted_dir, tmp_path):
    out = tmp_path / "loading.json"
    flags = ["--quick", "--batch-size", "4", "--data-dir", str(planted_dir), "--device", "cpu", "--out", str(out)]
    throughput.main(arguments("--script", "masklam", "--loading", *flags, "--windows", "2"))
    record = json.loads(out.read_text())
    check_head(record, "benchmarks.throughput")
    ways = [(entry["read_ahead"], entry["state"]) for entry in record["measurements"]]
    assert record["complete"] and ways == [(0, "cold"), (0, "hot"), (8, "cold"), (8, "hot")]
    for entry in record["measurements"]:
        assert len(entry["samples_per_s_windows"]) == 2 and entry["samples_per_s"] > 0
        # A file system in memory has no disk to read from.
        assert all(count == 0 for count in entry["from_disk_gb_windows"]) or entry["state"] == "cold"


def test_throughput_takes_the_scripts_flags_and_refuses_what_it_lacks(planted_dir):
    args = arguments("--script", "masklam", "--env", "reach", "--sweep", "--no-compile")
    assert (args.batch_size, args.max_offset) == (128, 10)
    first, *middle, last = ((name, each.compile, each.channels_last) for name, each in throughput.variants(args))
    assert first == ("baseline", False, True) and last == ("baseline again", False, True)
    assert {switches[1:] for switches in middle} == {(False, False), (True, True), (True, False)}
    with pytest.raises(UserError, match=r"no method script of this name; there are .*lapo"):
        arguments("--script", "laqo")
    flags = ["--quick", "--device", "cpu", "--data-dir", str(planted_dir), "--batch-size", "4", "--num-labels", "40"]
    with pytest.raises(UserError, match=r"--trainings slots: lapo\.py trains lam, .*, decoder"):
        throughput.main(arguments("--script", "lapo", *flags, "--trainings", "slots", *TINY))


def test_flops_match_a_count_by_hand():
    macs = 16**2 * 9 * 3 * 8  # pixels, kernel, channels
    network, x = torch.nn.Conv2d(3, 8, 3, padding=1), torch.randn(5, 3, 16, 16)
    assert throughput.count_flops(lambda: network(x).sum(), backward=False) == 5 * 2 * macs
    # Backward computes the gradients of the weights; the input needs none.
    assert throughput.count_flops(lambda: network(x).sum(), backward=True) == 5 * 2 * 2 * macs
    # MaskLAM's networks at the paper's size: 0.51 and 4.25 GMAC per sample at 64 pixels.
    idm, fdm = Encoder(24, 4, 64, 128), ForwardModel(12, 6, 64, 128)
    x, z = torch.randn(1, 24, 64, 64), torch.randn(1, 128)
    assert throughput.count_flops(lambda: idm(x), backward=False) / 2e9 == pytest.approx(0.51, abs=0.01)
    assert throughput.count_flops(lambda: fdm(x[:, :12], z), backward=False) / 2e9 == pytest.approx(4.25, abs=0.01)


def test_rendering(tmp_path):
    args = rendering.Args(envs=("reach",), kinds=("physics", "clean", "masks"), qualities=("fast",), image_size=32)
    args.windows, args.window_seconds, args.out = 1, 0.01, tmp_path / "rendering.json"
    try:
        rendering.main(args)
    except UserError as error:
        if "OpenGL" in str(error):
            pytest.skip(str(error))
        raise
    record = json.loads(args.out.read_text())
    check_head(record, "benchmarks.rendering")
    views = {"physics": 0, "clean": 1, "masks": 2}
    assert [entry["kind"] for entry in record["measurements"]] == list(views)
    for entry in record["measurements"]:
        assert min(entry["states_per_s"], entry["states_per_cpu_s"], entry["reset_seconds"]) > 0
        assert entry["frames_per_s"] == pytest.approx(views[entry["kind"]] * entry["states_per_s"])
        assert (entry["renderer"] is None) == (entry["kind"] == "physics")


def test_a_machine_that_trains_needs_no_reader_of_videos_and_no_downloads():
    """A GPU machine without a network may lack these packages."""
    code = "import sys; sys.modules |= dict.fromkeys(('imageio_ffmpeg', 'pooch', 'pyarrow'))\n"
    code += f"import make_dataset, benchmarks.rendering, benchmarks.sam, {', '.join(method_scripts())}"
    done = methods.finish(methods.python("-c", code))
    assert done.returncode == 0, done.stderr


def gpu_script(*arguments: str, **environment: str) -> subprocess.CompletedProcess:
    environment = os.environ | {"PYTHON": sys.executable, "GPU_SH_TINY": "1", "OMP_NUM_THREADS": "1"} | environment
    command = ["bash", "benchmarks/gpu.sh", *arguments]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=1200)


def test_gpu_script_runs_at_tiny_size(tmp_path):
    done = gpu_script("run", str(tmp_path), GPU_SH_SECONDS="1100")
    steps = dict(line.split("\t")[:2] for line in (tmp_path / "steps.tsv").read_text().splitlines())
    assert done.returncode == 0 and set(steps.values()) == {"ok"}, (steps, (tmp_path / "gpu.log").read_text()[-3000:])
    for script in ("lapo", "masklam"):
        assert json.loads((tmp_path / script / "result.json").read_text())["metrics"]["eval/nmse"] > 0
        assert (tmp_path / script / "world_model.png").exists()
    for step in steps.keys() - {"dataset", "dataset_small", "lapo", "masklam", "raft_weights"}:
        check_head(json.loads((tmp_path / f"{step}.json").read_text()), f"benchmarks.{step.split('_')[0]}")
    rows = json.loads((tmp_path / "sam.json").read_text())["rows"]
    assert [row["path"] for row in rows] == ["package", "ours", "ours"] and all(row["frames_per_s"] > 0 for row in rows)
    assert [point["frame"] for point in rows[1]["memory"]] == [2, 4]


def test_gpu_script_notes_what_had_no_time_and_explains_its_use(tmp_path):
    done = gpu_script("run", str(tmp_path), GPU_SH_SECONDS="5")
    assert done.returncode == 0, done.stderr
    assert "masklam\tskipped, no time left" in (tmp_path / "steps.tsv").read_text()
    done = gpu_script("pack")
    assert done.returncode == 1 and done.stderr == "gpu.sh: error: usage: benchmarks/gpu.sh run [OUT_DIR]\n"
