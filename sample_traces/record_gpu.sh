#!/usr/bin/env bash
# Record the samples of a GPU again: record_gpu.sh PREFIX [cuda|cpu] [FOLDER]
#
#     sample_traces/record_gpu.sh h200                   # h200_starved, h200_pageable, h200_float32, beside the script
#     sample_traces/record_gpu.sh trial cpu /tmp/trial   # does the script itself work? Small, without a GPU
#
# In the environment whose `perfscope` and `python` come first on PATH, with a torch that sees the device. Nothing else
# should use the device or the host meanwhile.
set -euo pipefail
prefix=${1:?usage: record_gpu.sh PREFIX [cuda|cpu] [FOLDER]}
device=${2:-cuda}
here=$(cd "$(dirname "$0")" && pwd)
mkdir -p "${3:-$here}"
samples=$(cd "${3:-$here}" && pwd)
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
# Recorded from an empty folder, so that the recording knows nothing of where it was made.
cd "$scratch"
export PYTHONPATH="$here/.." # for tests.gpu.job
small=''
if [ "$device" = cpu ]; then # of two values of a field the last one counts
    small=', "batch": 4, "width": 128, "layers": 2, "context": 64, "precision": "fp32", "optimizer": "for-loop"'
fi

record() { # NAME PLANTED [CHANGED]: fields of tests.gpu.setups.Setup as JSON, without the braces
    local name=${prefix}_$1 planted="{$2$small}" changed="{${3:-}$small}"
    local job=(python -m tests.gpu.job --device "$device")
    perfscope run --output "$name" -- "${job[@]}" --out truth --steps 24 --rounds 1 "--setup=$planted"
    if [ -n "${3:-}" ]; then # without the profiler, in turn
        "${job[@]}" --out changed --steps 24 --rounds 3 "--setup=$planted" "--setup=$changed" "--setup=$planted"
    fi
    rm -rf "$name/.bootstrap"
    python - "$name" <<'PYTHON'
import json, pathlib, re, statistics, sys

folder = pathlib.Path(sys.argv[1])
# Neither the host's name nor the device's number.
for path in [*folder.glob("*.json"), *folder.glob("*.jsonl")]:
    text = re.sub(r'"host": ?"[^"]*"', '"host": "node-0"', path.read_text())
    path.write_text(re.sub(r'("uuid": ?")(GPU-)?[0-9a-f-]{36}"', rf'\1\g<2>{"0" * 8}-0000-0000-0000-{"0" * 12}"', text))
    if path.suffix == ".jsonl":
        path.rename(folder / "host-node-0.samples.jsonl")
measured = json.loads(pathlib.Path("truth.0.json").read_text())
((turn,),) = measured["turns"]
truth = {
    "setup": measured["setups"][0], "device": measured["device"], "steps_ms": turn["steps_ms"],
    "losses": turn["losses"], "memory": measured["memory"], "flops_by_hand": measured["flops_by_hand"][0],
}
changed = pathlib.Path("changed.0.json")
if changed.exists():
    measured = json.loads(changed.read_text())
    turns = [[turn["step_ms"] for turn in turns] for turns in measured["turns"]]
    truth["changed"] = {"setup": measured["setups"][1], "turns_ms": turns}
    print(f"{folder}: ms per step, planted, changed, planted: {turns}")
    changed.unlink()
(folder / "truth.json").write_text(json.dumps(truth) + "\n")
print(f"{folder}: {statistics.median(truth['steps_ms']):.2f} ms per step, median")
PYTHON
    # The figures that README.md cites are updated by hand: what changed must be understood, not only recorded.
    mkdir -p "$samples/$name"
    find "$samples/$name" -mindepth 1 ! -name README.md -delete
    mv "$name"/* "$samples/$name"
}

record starved '"load_ms": 60.0, "workers": 0, "layers": 4'
pageable='"model": "conv", "layers": 1, "batch": 64, "context": 224, "workers": 4'
record pageable "$pageable, \"pinned\": false" "$pageable, \"pinned\": true"
record float32 '"precision": "fp32", "layers": 4' '"precision": "tf32", "layers": 4'
