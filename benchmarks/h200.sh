#!/usr/bin/env bash
# The measurements of docs/benchmarks.md on one GPU: four models x three batch sizes x two routings, forward and with
# backward, our backends and SonicMoE in the same runs, then the errors of all over five seeds. What SonicMoE's tuner
# tries is compiled on all cores first: one model alone takes it longer than a part may last.
#
#     benchmarks/h200.sh OUT [COMMIT]
#
# OUT gets DATE_layer.jsonl, DATE_errors.jsonl and a log of each part. COMMIT is recorded where the tree has no history.
# Builds nothing; needs torch, typer and rich, and what is measured must be importable. A part that takes too long is
# interrupted and keeps what it has measured; the others go on. The table of all records is printed last.
set -u
out=${1:?usage: benchmarks/h200.sh OUT [COMMIT]}
commit=${2:-}
models=${MODELS:-kimi-k2.7-code glm-5.2 qwen3.5-397b-a17b deepseek-v4-pro}
against=${AGAINST:-hopper,torch,sonicmoe,cublas-dense}
tokens=${TOKENS:-2048,8192,32768}
routing=${ROUTING:-random,zipf}
seconds=${SECONDS_A_PASS:-2}
limit=${LIMIT:-200} # Seconds for one part, of which there are five.
python=${PYTHON:-python3}
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
export PYTHONPATH="$root/src${PYTHONPATH:+:$PYTHONPATH}"
mkdir -p "$out"
date=$(date -u +%F)
layer="$out/${date}_layer.jsonl" errors="$out/${date}_errors.jsonl"

part() { # NAME ARGUMENTS...
    local name=$1 started=$SECONDS code
    shift
    timeout -s INT -k 15 "$limit" "$python" -m moeloom bench "$@" ${commit:+--commit "$commit"} >"$out/$name.log" 2>&1
    code=$?
    echo "$name: exit code $code after $((SECONDS - started)) s"
    [ "$code" = 0 ] || tail -n 3 "$out/$name.log"
}

if [[ ",$against," == *,sonicmoe,* ]] && "$python" -c 'import sonicmoe, torch; assert torch.cuda.is_available()' 2>"$out/warm.log"; then
    # shellcheck disable=SC2086 # several models
    timeout -k 15 300 "$python" "$root/benchmarks/warm_sonicmoe.py" $models >"$out/warm.log" 2>&1
    tail -n 1 "$out/warm.log"
fi
for model in $models; do
    part "layer-$model" layer --model "$model" --tokens "$tokens" --routing "$routing" --pass fwd,fwd+bwd \
        --against "$against" --seconds "$seconds" --json "$layer"
done
part errors errors --model "${models// /,}" --tokens "${ERROR_TOKENS:-2048}" --against "${against//,cublas-dense/}" \
    --json "$errors"
files=()
for file in "$layer" "$errors"; do [ -s "$file" ] && files+=("$file"); done
[ ${#files[@]} -gt 0 ] && "$python" -m moeloom bench table "${files[@]}"
