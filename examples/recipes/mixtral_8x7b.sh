#!/usr/bin/env bash
# The shape of Mixtral 8x7B: 46.7 B parameters, 12.9 B active. Needs Transformer Engine.
#
# Layout: one expert on each of eight GPUs (EP 8), so that tokens stay inside a node; attention is
# data-parallel over all GPUs; the optimizer is spread over equal ranks, so each further node takes a
# share. One node of GPUs with 141 GB is the least.
set -euo pipefail

GPUS=${GPUS:-8}
NODES=${NODES:-1}
FLAGS=(
    --num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336
    --num-attention-heads 32 --group-query-attention --num-query-groups 8
    --num-experts 8 --moe-router-topk 2 --moe-ffn-hidden-size 14336
    --moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 1e-2
    --swiglu --disable-bias-linear --normalization RMSNorm
    --position-embedding-type rope --rotary-base 1000000 --untie-embeddings-and-output-weights
    --attention-dropout 0 --hidden-dropout 0 --moe-grouped-gemm

    --expert-model-parallel-size 8 --use-distributed-optimizer
    --overlap-grad-reduce --overlap-param-gather
    --recompute-granularity full --recompute-method uniform --recompute-num-layers 1

    --seq-length 4096 --max-position-embeddings 32768 --micro-batch-size 1 --global-batch-size 256
    --train-iters 100000 --lr 1e-4 --min-lr 1e-5 --lr-decay-style cosine --lr-warmup-iters 500
    --clip-grad 1.0 --adam-beta2 0.95 --weight-decay 0.1 --bf16
    --tokenizer-type NullTokenizer --vocab-size 32000
    --log-interval 10 --eval-interval 1000 --eval-iters 10
)
source "$(dirname "${BASH_SOURCE[0]}")/launch.sh"
