#!/usr/bin/env bash
# What a machine with a CUDA GPU can tell of the engine, in under ten minutes and without the internet: the engine's tests on the
# device, a model (random weights in the shape of Qwen3-0.6B unless MODEL names one) planned and measured, benchmarks, nano-vllm.
# Every step has its own time-out, a failure does not stop the rest; ends non-zero if any step failed.
#
#   tools/gpu_check.sh            on CUDA          MODEL=/path  a folder or GGUF file of your own
#   tools/gpu_check.sh --cpu      the same steps, as far as a CPU goes
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

device=cuda
[ "${1:-}" = "--cpu" ] && device=cpu
python="${PYTHON:-}"
[ -n "$python" ] || { [ -x .venv/bin/python ] && python=.venv/bin/python || python=python3; }
work="$(mktemp -d)"
trap 'rm -rf "$work"' EXIT
export PYTHONPATH="$PWD/src${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false
[ "$device" = cpu ] && export CUDA_VISIBLE_DEVICES="" OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"

total_s=570  # all steps together: under ten minutes with what lies between them
began=$SECONDS
summary=()
failed=0

# step NAME SECONDS COMMAND...
step() {
  local name="$1" limit="$2" left=$((total_s - (SECONDS - began))) rc start=$SECONDS
  shift 2
  [ "$left" -lt "$limit" ] && limit=$left
  if [ "$limit" -le 5 ]; then
    summary+=("FAIL  $name: no time was left")
    failed=1
    return
  fi
  printf '\n== %s (at most %s s)\n' "$name" "$limit"
  timeout -k 5 "$limit" "$@"
  rc=$?
  if [ "$rc" -eq 0 ]; then
    summary+=("ok    $name: $((SECONDS - start)) s")
  else
    case "$rc" in 124 | 137) rc="$rc (time-out)" ;; esac
    summary+=("FAIL  $name: exit $rc after $((SECONDS - start)) s")
    failed=1
  fi
}

# leave_out NAME WHY
leave_out() { summary+=("-     $1: left out, $2"); }

has() { "$python" -c "import importlib.util as u, sys; sys.exit(u.find_spec('$1') is None)" 2>/dev/null; }

cat >"$work/environment.py" <<'PY'
import sys, importlib.metadata as m
import torch
print("python", sys.version.split()[0], "torch", torch.__version__)
for name in ("numpy", "transformers", "tokenizers", "safetensors", "gguf", "flash-attn", "triton", "nano-vllm-fork", "pytest"):
    try:
        print(f"  {name} {m.version(name)}")
    except m.PackageNotFoundError:
        print(f"  {name}: not installed")
if sys.argv[1] == "cuda":
    free, whole = torch.cuda.mem_get_info()
    print(torch.cuda.get_device_name(), torch.cuda.get_device_capability(), f"{free >> 20} of {whole >> 20} MiB free")
PY
step environment 60 "$python" "$work/environment.py" "$device"

cat >"$work/int4.py" <<'PY'
import sys
from laya.model.holding import CUDA_GROUPS, cuda_tiles
from laya.model.int4 import product_holds
wrong = [
    f"4-bit product of {columns} columns in groups of {group}"
    for columns in (96, 576, 1536, 4096) for group in CUDA_GROUPS
    if columns % group == 0 and not product_holds(sys.argv[1], columns, group)
]
if sys.argv[1] == "cuda":  # the layout itself, bit for bit, against the one that the tests have written down from its source
    import torch
    from laya.model.int4 import LAYOUTS
    sys.path.insert(0, "tests")
    from model import card
    for columns in (32, 64, 128, 576, 4096):
        numbers = torch.randint(0, 16, (64, columns), dtype=torch.uint8)
        expected = card.pack(numbers[:, ::2] << 4 | numbers[:, 1::2], cuda_tiles(columns))
        if not torch.equal(LAYOUTS["cuda"].pack(numbers, card.CUDA).cpu(), expected):
            wrong.append(f"tests/model/card.py packs {columns} columns in another way")
sys.exit("WRONG on this device, such weights are dense: " + "; ".join(wrong) if wrong else 0)
PY
step "4-bit linear on $device" 60 "$python" "$work/int4.py" "$device"

tests=(tests/model/test_quant.py tests/model/test_runner.py tests/model/test_sampler.py)
[ "$device" = cuda ] && tests+=(tests/model/test_equivalence.py tests/model/test_engine_equivalence.py tests/model/test_awq.py)
if has pytest && has transformers; then
  step "engine tests on $device" 170 env LAYA_TEST_DEVICE="$device" "$python" -m pytest -q -p no:cacheprovider "${tests[@]}"
  if has nanovllm; then
    step "nano-vllm driver, its device parts replaced" 60 "$python" -m pytest -q -p no:cacheprovider tests/model/test_nanovllm.py
  else
    leave_out "nano-vllm driver" "nano-vllm is not installed"
  fi
else
  leave_out "tests" "pytest or transformers is not installed"
fi

model="${MODEL:-$work/qwen3}"
layers=28
quick=()
[ "$device" = cpu ] && layers=2 quick=(--quick --window 512)
[ -n "${MODEL:-}" ] || step "a random model, $layers layers" 60 "$python" tools/random_qwen3.py "$model" --layers "$layers"
printf '{"inference": {"engine": "torch", "model": "%s", "max_seq_len": 2048, "max_num_seqs": 8}}' "$model" >"$work/plan.yaml"
step "memory plan" 30 "$python" -m laya plan --config "$work/plan.yaml"
step "torch engine: plan, peak, speed" 120 "$python" tools/engine_on_device.py "$model" --engine torch --limit-s 110 ${quick[@]+"${quick[@]}"}
if [ "$device" = cuda ] && has nanovllm && has flash_attn && has triton; then
  step "nano-vllm: plan, peak, speed" 150 "$python" tools/engine_on_device.py "$model" --engine nano-vllm --limit-s 140
else
  leave_out "nano-vllm on the device" "it needs CUDA, nano-vllm, flash-attn and triton"
fi
if [ "$device" = cpu ]; then
  leave_out "benchmarks/engine.py" "on a CPU it is run by itself, on a quiet machine"
elif [ -f benchmarks/engine.py ] && [ -f models/SmolLM2-135M-Instruct.Q4_1.gguf ]; then
  # Its exit code 1 is a target missed, and the targets are a CPU's.
  step "benchmarks/engine.py" 120 bash -c '"$0" benchmarks/engine.py --quick --json --threads 1 || [ $? -eq 1 ]' "$python"
else
  leave_out "benchmarks/engine.py" "it or the default model is not there"
fi

printf '\n== summary after %s s on %s\n' "$((SECONDS - began))" "$device"
printf '%s\n' "${summary[@]}"
exit "$failed"
