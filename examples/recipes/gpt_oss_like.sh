#!/usr/bin/env bash
# Like gpt-oss-20b: 20.9 B parameters, 3.6 B active; experts with biases and a clamped quick-GeGLU with
# an offset, attention over windows in every second layer, with a learnt sink. Needs Transformer
# Engine.
#
# Layout: four of the 32 experts on each of eight GPUs (EP 8), inside a node; attention is
# data-parallel over all GPUs; the optimizer is spread over equal ranks. Biases want experts whole
# (expert TP 1), and Megatron's grouped experts, with DISPATCHER=alltoall, no bias-dropout fusion.
set -euo pipefail

GPUS=${GPUS:-8}
NODES=${NODES:-1}
FLAGS=(
    --num-layers 24 --hidden-size 2880 --ffn-hidden-size 2880
    --num-attention-heads 64 --kv-channels 64 --group-query-attention --num-query-groups 8
    --window-size 128,0 --window-attn-skip-freq 2 --softmax-type learnable
    --num-experts 32 --moe-router-topk 4 --moe-ffn-hidden-size 2880
    --moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 1e-3 --moe-router-dtype fp32
    --quick-geglu --glu-linear-offset 1.0 --activation-func-clamp-value 7.0
    --no-bias-dropout-fusion --normalization RMSNorm
    --position-embedding-type rope --rotary-base 150000 --untie-embeddings-and-output-weights
    --attention-dropout 0 --hidden-dropout 0 --moe-grouped-gemm

    --expert-model-parallel-size 8 --use-distributed-optimizer
    --overlap-grad-reduce --overlap-param-gather
    --recompute-granularity selective --recompute-modules layernorm

    --seq-length 4096 --max-position-embeddings 4096 --micro-batch-size 1 --global-batch-size 256
    --train-iters 100000 --lr 1e-4 --min-lr 1e-5 --lr-decay-style cosine --lr-warmup-iters 500
    --clip-grad 1.0 --adam-beta2 0.95 --weight-decay 0.1 --bf16
    --tokenizer-type NullTokenizer --vocab-size 201088
    --log-interval 10 --eval-interval 1000 --eval-iters 10
)
source "$(dirname "${BASH_SOURCE[0]}")/launch.sh"
