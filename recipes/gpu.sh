#!/usr/bin/env bash
# Measure on one GPU what a small model on a CPU cannot show, and write runs/gpu/page.md; see gpu.py.
#   gpu.sh           Qwen3-4B on vLLM, a few hours; options as of gpu.py, such as --model Qwen/Qwen3-8B
#   gpu.sh --tiny    no GPU: the same with SmolLM2-135M on a CPU
set -euo pipefail
cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.."
if [[ " $* " = *" --tiny "* ]]; then
  make -s setup
  python=.venv/bin/python
  trl=${PYTHON:-$($python tools/matrix.py --python trl-1.16.0)}
else
  for name in engine trl; do
    [ -x "runs/gpu/$name/bin/python" ] || "${PYTHON:-python3}" -m venv "runs/gpu/$name"
  done
  # TRL wants another vLLM than the one that returns sampling masks.
  runs/gpu/engine/bin/pip install -q . vllm==0.32.0
  runs/gpu/trl/bin/pip install -q -r recipes/trl_lora/requirements.txt .
  python=runs/gpu/engine/bin/python trl=runs/gpu/trl/bin/python
fi
PYTHONPATH=examples exec "$python" recipes/gpu.py --trl-python "$trl" "$@"
