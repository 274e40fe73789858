#!/usr/bin/env bash
# GRPO of Qwen3-8B with a Python tool on slime and SGLang, from nothing to curves. Run it in slime's container.
#   run.sh           download, convert, train; curves in $ROOT/tensorboard
#   run.sh --tiny    no GPU: these arguments and this agent through slime's own parser, rollout loop and checks
set -euo pipefail
here=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)
COMMIT=624b824a898ab0ec1fcb4d373004c7f3852bf515
PYTHON=${PYTHON:-python3}
ROOT=${ROOT:-$HOME}
GPUS=${GPUS:-8}
MODEL=$ROOT/models/Qwen3-8B
[ "${1:-}" = --tiny ] && ROOT=${TMPDIR:-/tmp}
SLIME_SRC=${SLIME_SRC:-$ROOT/slime-${COMMIT:0:8}}

if [ ! -d "$SLIME_SRC" ]; then
  git clone -q https://github.com/THUDM/slime "$SLIME_SRC" || { echo "Set SLIME_SRC to slime's source." >&2; exit 1; }
  git -C "$SLIME_SRC" checkout -q $COMMIT
fi
source "$SLIME_SRC/scripts/models/qwen3-8B.sh" # sets MODEL_ARGS

# Sizes are those of slime's own Strands example with this model on eight GPUs.
ARGS=(
  "${MODEL_ARGS[@]}"
  --actor-num-nodes 1 --actor-num-gpus-per-node "$GPUS" --colocate
  --hf-checkpoint "$MODEL" --ref-load "${MODEL}_torch_dist" --load "$ROOT/retool" --save "$ROOT/retool"
  --save-interval 20
  # Prompts stay messages: no --apply-chat-template, the agent renders them.
  --prompt-data "$ROOT/data/dapo-math-17k/dapo-math-17k.jsonl" --input-key prompt --label-key label --rollout-shuffle
  --num-rollout "${ROLLOUTS:-300}" --rollout-batch-size 16 --n-samples-per-prompt 8 --global-batch-size 128 --balance-data
  --rollout-max-response-len 8192 --rollout-max-context-len 18432 --rollout-temperature 1
  --eval-interval 20 --eval-prompt-data aime "$ROOT/data/aime-2024/aime-2024.jsonl" --n-samples-per-eval-prompt 16
  --eval-top-p 1
  # The agent, its configuration, and groups that may hold branched rollouts.
  --custom-generate-function-path strands_tito.integrations.slime_generate.generate
  --custom-config-path "$here/tito.yaml"
  --custom-reward-post-process-path strands_tito.export.slime.rewards_by_group
  # The loss is corrected by the ratio of Megatron's logprobs and the recorded ones of the engine.
  --advantage-estimator grpo --eps-clip 0.2 --eps-clip-high 0.28 --entropy-coef 0.00 --use-tis
  --optimizer adam --lr 1e-6 --lr-decay-style constant --weight-decay 0.1 --adam-beta1 0.9 --adam-beta2 0.98
  --tensor-model-parallel-size 2 --sequence-parallel --recompute-granularity full --recompute-method uniform
  --recompute-num-layers 1 --use-dynamic-batch-size --max-tokens-per-gpu 18432
  --attention-dropout 0.0 --hidden-dropout 0.0 --accumulate-allreduce-grads-in-fp32 --attention-softmax-in-fp32
  --attention-backend flash
  --rollout-num-gpus-per-engine 2 --sglang-mem-fraction-static 0.4
  --use-tensorboard --tb-project-name retool --tb-experiment-name qwen3-8b
)

if [ "${1:-}" = --tiny ]; then
  exec env PYTHONPATH="$here:$SLIME_SRC" "$PYTHON" -W ignore "$here/tiny.py" "${ARGS[@]}"
fi

# The policy's code runs on this machine. Without a sandbox it reads your files and reaches your network.
export RETOOL_SANDBOX=${RETOOL_SANDBOX-bwrap --unshare-all --die-with-parent --ro-bind / / --tmpfs /root --tmpfs /home --tmpfs /tmp --dev /dev --proc /proc}
$RETOOL_SANDBOX "$PYTHON" -I -c pass || {
  echo "The sandbox does not start. Install bubblewrap and let the container make namespaces, set RETOOL_SANDBOX to" \
    "another command that runs what follows it, or set it empty to run the policy's code without isolation." >&2
  exit 1
}

pip install -q -r "$here/requirements.txt" "$here/../.."
pip install -q --no-deps -e "$SLIME_SRC"
hf download Qwen/Qwen3-8B --local-dir "$MODEL"
for data in dapo-math-17k aime-2024; do hf download --repo-type dataset "zhuzilin/$data" --local-dir "$ROOT/data/$data"; done
export PYTHONPATH=${MEGATRON:-/root/Megatron-LM}:$here:$SLIME_SRC
[ -d "${MODEL}_torch_dist" ] || "$PYTHON" "$SLIME_SRC/tools/convert_hf_to_torch_dist.py" "${MODEL_ARGS[@]}" \
  --hf-checkpoint "$MODEL" --save "${MODEL}_torch_dist"

export TENSORBOARD_DIR=$ROOT/tensorboard CUDA_DEVICE_MAX_CONNECTIONS=1
variables=$("$PYTHON" -c '
import json, os
names = ("PYTHONPATH", "RETOOL_SANDBOX", "TENSORBOARD_DIR", "CUDA_DEVICE_MAX_CONNECTIONS")
print(json.dumps({"env_vars": {name: os.environ[name] for name in names}}))')
ray start --head --num-gpus "$GPUS" --disable-usage-stats
trap 'ray stop' EXIT
ray job submit --address http://127.0.0.1:8265 --runtime-env-json "$variables" -- "$PYTHON" "$SLIME_SRC/train.py" "${ARGS[@]}"
echo "Curves: tensorboard --logdir $ROOT/tensorboard"
