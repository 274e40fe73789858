#!/usr/bin/env bash
# GRPO on GSM8K with verl, from nothing to curves.
#   ENGINE=vllm run.sh [OVERRIDE...]   or ENGINE=sglang; curves in $OUT/tensorboard
#   run.sh --options                   print the options for verl, one a line
#   run.sh --tiny                      no GPU: test_agent_loop.py
set -euo pipefail
here=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)
export PYTHONPATH=$here${PYTHONPATH:+:$PYTHONPATH}
PYTHON=${PYTHON:-python3}
ENGINE=${ENGINE:-vllm}
MODEL=${MODEL:-Qwen/Qwen2.5-3B-Instruct}
GPUS=${GPUS:-1}
OUT=${OUT:-runs/verl_agent_loop}
TOKENS=16384 # of one micro batch on one GPU

OPTIONS=(
  algorithm.adv_estimator=grpo
  # The loss is corrected by the ratio of the trainer's logprobs and the recorded ones of the engine.
  algorithm.rollout_correction.rollout_is=token
  algorithm.rollout_correction.rollout_is_threshold=2.0
  data.train_files="$OUT/data/train.parquet"
  data.val_files="$OUT/data/test.parquet"
  data.train_batch_size=64
  data.max_prompt_length=1024
  data.max_response_length=2048
  actor_rollout_ref.model.path="$MODEL"
  actor_rollout_ref.model.use_remove_padding=True
  actor_rollout_ref.actor.optim.lr=1e-6
  actor_rollout_ref.actor.ppo_mini_batch_size=64
  actor_rollout_ref.actor.use_dynamic_bsz=True
  actor_rollout_ref.actor.ppo_max_token_len_per_gpu=$TOKENS
  actor_rollout_ref.actor.use_kl_loss=False
  actor_rollout_ref.actor.fsdp_config.param_offload=True
  actor_rollout_ref.actor.fsdp_config.optimizer_offload=True
  actor_rollout_ref.rollout.name="$ENGINE"
  actor_rollout_ref.rollout.tensor_model_parallel_size=1
  actor_rollout_ref.rollout.gpu_memory_utilization=0.5
  actor_rollout_ref.rollout.n=8
  actor_rollout_ref.rollout.calculate_log_probs=True
  actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu=$TOKENS
  actor_rollout_ref.rollout.agent.agent_loop_config_path="$here/agent_loop.yaml"
  trainer.logger='["console","tensorboard"]'
  trainer.project_name=verl_agent_loop
  trainer.experiment_name="$ENGINE"
  trainer.n_gpus_per_node="$GPUS"
  trainer.nnodes=1
  trainer.default_local_dir="$OUT/checkpoints"
  trainer.save_freq=50
  trainer.test_freq=10
  trainer.total_epochs=1
)
case "${1:-}" in
  --options) printf '%s\n' "${OPTIONS[@]}"; exit ;;
  --tiny) exec "$PYTHON" -W ignore "$here/test_agent_loop.py" ;;
esac

mkdir -p "$OUT"
echo transformers==5.9.0 >"$OUT/override.txt" # verl's; its SGLang asks for another
"$PYTHON" -m pip install -q uv
"$PYTHON" -m uv pip install -q --python "$PYTHON" --override "$OUT/override.txt" \
  "$(sed -n "s/^${ENGINE^^}=//p" "$here/REQUIRED_VERL.txt")" "$(sed -n 's/^STRANDS=//p' "$here/REQUIRED_VERL.txt")" "$here/../.."
"$PYTHON" "$here/prepare_data.py" "$OUT/data"
TENSORBOARD_DIR=$OUT/tensorboard "$PYTHON" -m verl.trainer.main_ppo "${OPTIONS[@]}" "$@"
echo "Curves: tensorboard --logdir $OUT/tensorboard"
