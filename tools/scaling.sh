#!/bin/sh
# Speedup over one process at the same global batch, on this machine or in a Slurm allocation. Each
# process has the cores that a rank has on the most ranks.
#
#     tools/scaling.sh [MODEL] [MOST_RANKS] [options of tfscale run]
#     tools/scaling.sh resnet20 16 --hosts node1:8,node2:8
#
# Models are those of benchmarks/workloads.py. Each line takes about a minute; files are written to
# build/scaling/. Run it from a checkout, on cores that nothing else uses.
set -eu
model=${1:-vgg_like}
most=${2:-${SLURM_NTASKS:-$(nproc)}}
[ $# -gt 2 ] && shift 2 || shift $#
threads=${SLURM_CPUS_PER_TASK:-$(($(nproc) > most ? $(nproc) / most : 1))}
export OMP_NUM_THREADS="$threads" TF_NUM_INTRAOP_THREADS="$threads"
folder=build/scaling/$model
rm -rf "$folder"
echo "$model: ranks, ms per step, speedup over one process with $threads cores, share of ranks"
ranks=1
while [ "$ranks" -le "$most" ]; do
    system=tfscale-auto
    [ "$ranks" = 1 ] && system=compute
    mkdir -p "$folder/$ranks"
    if ! tfscale run --quiet -np "$ranks" "$@" python -m benchmarks.worker_step --system "$system" \
        --model "$model" --repeats 30 --output "$folder/$ranks" > "$folder/$ranks/log" 2>&1; then
        tail -20 "$folder/$ranks/log" >&2
        exit 1
    fi
    python - "$folder" "$ranks" << 'PYTHON'
import json, statistics, sys
from pathlib import Path

folder, ranks = Path(sys.argv[1]), int(sys.argv[2])

def step_s(n):
    """The median step of the slowest rank."""
    files = [json.loads((folder / str(n) / f"rank{r}.json").read_text()) for r in range(n)]
    samples = zip(*(next(iter(file["samples"].values())) for file in files))
    return statistics.median(map(max, samples))

speedup = step_s(1) / step_s(ranks)
print(f"{ranks:6d} {1e3 * step_s(ranks):10.1f} {speedup:8.2f} {speedup / ranks:8.2f}", flush=True)
PYTHON
    ranks=$((ranks * 2))
done
