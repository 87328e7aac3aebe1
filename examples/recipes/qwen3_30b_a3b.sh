#!/usr/bin/env bash
# The shape of Qwen3-30B-A3B: 30.5 B parameters, 3.3 B active. Needs Transformer Engine.
#
# Layout: 16 of the 128 experts on each of eight GPUs (EP 8), inside a node; attention is
# data-parallel over all GPUs; the optimizer is spread over equal ranks.
set -euo pipefail

GPUS=${GPUS:-8}
NODES=${NODES:-1}
FLAGS=(
    --num-layers 48 --hidden-size 2048 --ffn-hidden-size 6144
    --num-attention-heads 32 --kv-channels 128 --group-query-attention --num-query-groups 4
    --qk-layernorm
    --num-experts 128 --moe-router-topk 8 --moe-ffn-hidden-size 768
    --moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 1e-3 --moe-router-dtype fp32
    --swiglu --disable-bias-linear --normalization RMSNorm --norm-epsilon 1e-6
    --position-embedding-type rope --rotary-base 1000000 --untie-embeddings-and-output-weights
    --attention-dropout 0 --hidden-dropout 0 --moe-grouped-gemm

    --expert-model-parallel-size 8 --use-distributed-optimizer
    --overlap-grad-reduce --overlap-param-gather
    --recompute-granularity selective --recompute-modules core_attn layernorm

    --seq-length 4096 --max-position-embeddings 40960 --micro-batch-size 1 --global-batch-size 256
    --train-iters 100000 --lr 1e-4 --min-lr 1e-5 --lr-decay-style cosine --lr-warmup-iters 500
    --clip-grad 1.0 --adam-beta2 0.95 --weight-decay 0.1 --bf16
    --tokenizer-type NullTokenizer --vocab-size 151936
    --log-interval 10 --eval-interval 1000 --eval-iters 10
)
source "$(dirname "${BASH_SOURCE[0]}")/launch.sh"
