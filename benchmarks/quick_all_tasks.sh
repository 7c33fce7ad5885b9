#!/usr/bin/env bash
# Runs LAPO and MaskLAM with --quick on all fourteen tasks, from data to table, and goes on where it was stopped.
#
#   benchmarks/quick_all_tasks.sh [FOLDER]      # default: quick_all
#
# FOLDER gets data, runs, a log of each run, table.md and table.json. About two hours on two cores (summed from runs).
# Environment: TASKS (all fourteen), JOBS (one-thread runs side by side; one per core), PYTHON (.venv/bin/python).
set -euo pipefail
repository=$(realpath "$(dirname "${BASH_SOURCE[0]}")/..")
folder=$(realpath -m "${1:-$repository/quick_all}")
cd "$repository"
export folder PYTHON=${PYTHON:-.venv/bin/python} OMP_NUM_THREADS=1
tasks=${TASKS:-$("$PYTHON" -c 'from common.tasks import TASKS; print(*TASKS)')}
mkdir -p "$folder/logs"

for task in $tasks; do
    "$PYTHON" make_dataset.py --env "$task" --quick --backgrounds synthetic --preview --data-dir "$folder/data"
done | tee -a "$folder/logs/make_dataset.log"

run() { # METHOD ENV
    local status=0
    echo "$(date -u +%FT%TZ) start $1 $2"
    "$PYTHON" "$1.py" --env "$2" --quick --data-dir "$folder/data" --runs-dir "$folder/runs" \
        >"$folder/logs/$1-$2.log" 2>&1 || status=$?
    echo "$(date -u +%FT%TZ) end $1 $2, exit code $status"
    return "$status"
}
export -f run
failed=0
for task in $tasks; do printf '%s\n' "lapo $task" "masklam $task"; done |
    xargs -P "${JOBS:-$(nproc)}" -L 1 bash -c 'run "$@"' _ | tee -a "$folder/logs/loop.log" || failed=1
mapfile -t finished < <(for task in $tasks; do for method in lapo masklam; do
    run_dir=$folder/runs/$method/$task/quick/seed1
    [ ! -f "$run_dir/result.json" ] || echo "$run_dir"
done; done)
if [ "${#finished[@]}" -gt 0 ]; then
    "$PYTHON" -m benchmarks.table "${finished[@]}" --out "$folder/table.md" --json "$folder/table.json"
fi
if [ "$failed" = 1 ]; then
    echo "quick_all_tasks.sh: error: some runs failed, see $folder/logs; the same command goes on" >&2
    exit 1
fi
