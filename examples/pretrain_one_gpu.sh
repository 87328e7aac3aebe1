#!/usr/bin/env bash
# A mixture-of-experts GPT of 0.66 B parameters (0.2 B active) on one GPU in bf16, on byte tokens.
#
#   examples/pretrain_one_gpu.sh                           the text of an earlier quickstart
#   examples/pretrain_one_gpu.sh DATA [Megatron's flags]   DATA.bin and DATA.idx, tokens below 257
#
# The third group of flags does without Transformer Engine and Apex; with them, leave it out.
set -euo pipefail

DATA=${1:-runs/quickstart/data/train}
shift || true
if [[ ! -f $DATA.bin || ! -f $DATA.idx ]]; then
    echo "$0: there are no $DATA.bin and $DATA.idx: the data come first, before Megatron's flags;" \
        "\`python -m moeblaze_megatron.quickstart --data-only --text FILES\` makes some of text" >&2
    exit 2
fi

exec torchrun --standalone --nproc-per-node 1 \
    -m moeblaze_megatron --moe-token-dispatcher-type moeblaze \
    --num-layers 12 --hidden-size 1024 --num-attention-heads 16 \
    --num-experts 16 --moe-router-topk 4 --moe-ffn-hidden-size 1024 \
    --moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 1e-2 \
    --moe-router-dtype fp32 --swiglu --disable-bias-linear --normalization RMSNorm \
    --position-embedding-type rope --untie-embeddings-and-output-weights \
    \
    --seq-length 1024 --max-position-embeddings 1024 --micro-batch-size 8 --global-batch-size 32 \
    --train-iters 1000 --lr 4e-4 --min-lr 4e-5 --lr-decay-style cosine --lr-warmup-iters 50 \
    --clip-grad 1.0 --adam-beta2 0.95 --weight-decay 0.1 --bf16 \
    --attention-dropout 0 --hidden-dropout 0 --recompute-granularity selective \
    \
    --transformer-impl local --no-gradient-accumulation-fusion --no-masked-softmax-fusion \
    --no-rope-fusion --no-persist-layer-norm \
    \
    --data-path "$DATA" --split 98,2,0 --tokenizer-type NullTokenizer --vocab-size 257 \
    --log-interval 10 --eval-interval 250 --eval-iters 10 \
    --save runs/one_gpu --save-interval 500 \
    "$@"
