#!/usr/bin/env bash
# A mixture of experts of 1.0 B parameters, 0.34 B of them active, on one GPU in bf16 and byte tokens.
# `python -m moeblaze_megatron.quickstart --data-only --text FILES` makes text into bytes, and then
# DATA=runs/quickstart/data/train trains on them.
#
# Layout: all on one GPU. With GPUS=8 the same is data-parallel, the optimizer spread over the ranks.
# By default it does without Transformer Engine and Apex. IMPL=transformer_engine takes attention, norms
# and the optimizer from Transformer Engine, and with DISPATCHER=alltoall the experts and the permutation.
set -euo pipefail

GPUS=${GPUS:-1}
NODES=${NODES:-1}
FLAGS=(
    --num-layers 12 --hidden-size 1536 --num-attention-heads 12
    --num-experts 16 --moe-router-topk 4 --moe-ffn-hidden-size 1024
    --moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 1e-2 --moe-router-dtype fp32
    --swiglu --disable-bias-linear --normalization RMSNorm
    --position-embedding-type rope --untie-embeddings-and-output-weights
    --attention-dropout 0 --hidden-dropout 0

    --use-distributed-optimizer --recompute-granularity selective

    --seq-length 1024 --max-position-embeddings 1024 --micro-batch-size 8 --global-batch-size 32
    --train-iters 1000 --lr 4e-4 --min-lr 4e-5 --lr-decay-style cosine --lr-warmup-iters 50
    --clip-grad 1.0 --adam-beta2 0.95 --weight-decay 0.1 --bf16
    --tokenizer-type NullTokenizer --vocab-size 257
    --log-interval 10 --eval-interval 250 --eval-iters 10
    --transformer-impl "${IMPL:=local}" --no-gradient-accumulation-fusion
)
if [[ $IMPL == local ]]; then
    FLAGS+=(--no-masked-softmax-fusion --no-rope-fusion --no-persist-layer-norm)
else
    FLAGS+=(--moe-grouped-gemm --moe-permute-fusion)
fi
source "$(dirname "${BASH_SOURCE[0]}")/launch.sh"
