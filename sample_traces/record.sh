#!/usr/bin/env bash
# Record the samples again, in the environment whose `perfscope` and `torchrun` come first on PATH.
#
# Nothing else should run on the machine meanwhile: two ranks fill two cores, and whatever takes time from one of them
# shows in the recording, rightly. Look at the stopwatch's figures that are printed before committing new recordings.
set -euo pipefail
cd "$(dirname "$0")"
samples=$PWD
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
# Recorded from a folder that holds the script alone, so that the recording knows nothing of where it was made.
cp train.py "$scratch"
cd "$scratch"

record() { # NAME RANKS ARGUMENTS...
    local name=$1 ranks=$2
    shift 2
    # PYTHON_EXEC: the ranks' command lines say `python`, not where it was installed. Six steps keep the files small.
    CUDA_VISIBLE_DEVICES='' PYTHON_EXEC=python perfscope run --output "$name" --active 6 -- \
        torchrun --standalone --nproc-per-node "$ranks" train.py --truth truth.json "$@"
    mv truth.json "$name"
    rm -rf "$name/.bootstrap"
    # The figures that README.md cites are updated by hand: what changed must be understood, not only recorded.
    mkdir -p "$samples/$name"
    find "$samples/$name" -mindepth 1 ! -name README.md -delete
    mv "$name"/* "$samples/$name"
    python - "$samples/$name" <<'PYTHON'
import json, pathlib, statistics, sys

folder = pathlib.Path(sys.argv[1])
size = sum(path.stat().st_size for path in folder.iterdir())
print(f"{folder.name}: {size / 1e6:.2f} MB; median (least, most) ms over the last half of the steps:")
for rank in json.loads((folder / "truth.json").read_text())["ranks"]:
    for what in ("step_ms", "load_ms", "forward_ms", "backward_ms", "optimizer_ms"):
        values = rank[what][len(rank[what]) // 2 :]
        print(f"  rank {rank['rank']} {what:12} {statistics.median(values):6.1f} ({min(values):.1f}, {max(values):.1f})")
PYTHON
}

record healthy 2
record starved 2 --load-ms 120
# Small enough that what the two others do fits beside rank 1's sleep on two cores.
record slow_rank 3 --layers 2 --width 128 --batch 4 --slow-rank 1 --slow-ms 80
