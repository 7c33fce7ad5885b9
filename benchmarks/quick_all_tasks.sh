#!/usr/bin/env bash
# Runs LAPO and MaskLAM with --quick on all fourteen tasks, from data to table, and goes on where it was stopped.
#
#   benchmarks/quick_all_tasks.sh [FOLDER]      # default: quick_all
#
# Datasets, runs and one log per run are in FOLDER; the table is FOLDER/table.md and FOLDER/table.json. JOBS runs (default:
# one per core) go side by side with one thread each. PYTHON names the interpreter (default: .venv/bin/python). About three
# hours on two cores.
set -euo pipefail
cd "$(dirname "$0")/.."
folder=$(realpath -m "${1:-quick_all}")
export PYTHON=${PYTHON:-.venv/bin/python} OMP_NUM_THREADS=1 folder
mkdir -p "$folder/logs"
tasks=$("$PYTHON" -c 'from common.tasks import TASKS; print(*TASKS)')

"$PYTHON" make_dataset.py --env all --quick --backgrounds synthetic --preview --data-dir "$folder/data" |
    tee "$folder/logs/make_dataset.log"

run() { # METHOD ENV
    echo "$(date -u +%FT%TZ) start $1 $2"
    status=0
    "$PYTHON" "$1.py" --env "$2" --quick --data-dir "$folder/data" --runs-dir "$folder/runs" \
        > "$folder/logs/$1-$2.log" 2>&1 || status=$?
    echo "$(date -u +%FT%TZ) end $1 $2, exit code $status"
    return "$status"
}
export -f run
failed=0
for task in $tasks; do
    for method in lapo masklam; do echo "$method $task"; done
done | xargs -P "${JOBS:-$(nproc)}" -L 1 bash -c 'run "$@"' _ | tee -a "$folder/logs/loop.log" || failed=1
finished=("$folder"/runs/*/*/quick/seed1/result.json)
"$PYTHON" -m benchmarks.table "${finished[@]%/result.json}" --out "$folder/table.md" --json "$folder/table.json"
[ "$failed" = 0 ] || { echo "some runs failed; their logs are in $folder/logs, the same command repeats them" >&2; exit 1; }
