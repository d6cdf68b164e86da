#!/usr/bin/env bash
# Draws the pictures of docs/methods and docs/reports.md: benchmarks/pictures.sh [RUNS]. Runs that are there are kept.
# Curves are on digits, ten silos, Dirichlet 0.5, three seeds. Nothing is tuned, except the learning rate of SGD with many
# rounds: 0.5 is the best for FedAvg of 0.05, 0.2 and 0.5 on validation data (--tune), and is used for all.
set -euo pipefail
cd "$(dirname "$0")/.."
runs=${1:-runs/pictures}

run() { # NAME METHOD FLAGS...
    local out="$runs/$1"
    shift
    [ -d "$out" ] || ekiden run "$@" --data digits --partition dirichlet:0.5 --clients 10 --seeds 0 1 2 --threads 1 --out "$out"
}

draw() { # PICTURE FIGURE NAMES...: docs/assets/curves-PICTURE.svg, with coordinates of two digits
    local picture=$1 figure=$2
    shift 2
    ekiden report "${@/#/$runs/}" -o "$runs/report-$picture" --details 0
    sed -E '/<text/! s/([0-9]+\.[0-9]{2})[0-9]+/\1/g' "$runs/report-$picture/figures/$figure-1.svg" \
        > "docs/assets/curves-$picture.svg"
}

# Many rounds with a server, equal rounds and equal local training.
many=(--rounds 20 --epochs 5 --optimizer sgd --lr 0.5 --clip-norm 10)
for method in fedavg fedprox scaffold fednova feddyn feddc moon feddisco criticalflserver; do
    run "$method" "$method" "${many[@]}"
done
draw rounds steps fedavg fedprox scaffold fednova
draw more-rounds steps fedavg feddyn feddc moon
draw weights steps fedavg feddisco criticalflserver

# From silo to silo, several visits.
run sequential/fedseq fedseq --rounds 3 --epochs 10
run sequential/metafed metafed --warmup 10 --epochs 20
run sequential/sfedkd sfedkd --rounds 3 --epochs 10
run sequential/spfl spfl --rounds 2 --epochs 2
draw sequential bytes sequential

# The classifier refitted after training.
run closing-lap/fedseq fedseq --epochs 24
run closing-lap/fedseq-lap fedseq+lap --epochs 24
run closing-lap/fedavg fedavg --rounds 3 --epochs 8
run closing-lap/fedavg-lap fedavg+lap --rounds 3 --epochs 8
draw closing-lap bytes closing-lap

# Fixed features and sums.
run fixed/fedgram fedgram
run fixed/deepafl deepafl
run fixed/fedpft fedpft
run fixed/fedpft-chain fedpft --topology chain --order random
draw fixed bytes fixed

# One communication, then the server combines; 30 epochs at each client.
for method in average otfusion maecho fishermerging regmean; do run merging/"$method" "$method" --epochs 30; done
draw merging bytes merging
for method in average fedfisher fedlpa pfnm fedma; do run matching/"$method" "$method" --epochs 30; done
draw matching bytes matching
run together/ensemble ensemble --epochs 30
run together/fens fens --epochs 30 --aggregator ridge
run together/fedov fedov --epochs 30
run together/fusefl fusefl --epochs 15 --adapter mean
run together/centralized centralized --epochs 30
draw together compute together
run distilled/average average --epochs 30
run distilled/dense dense --epochs 30 --distill-epochs 20 --steps-per-batch 10 --distill-batch-size 32
run distilled/coboosting coboosting --epochs 30 --distill-epochs 20 --steps-per-batch 10 --distill-batch-size 32
draw distilled compute together/ensemble distilled

# A model for each silo, measured on the silo's own test data after local training.
ekiden sweep benchmarks/personal.toml --out "$runs/personal"
draw personal steps personal/digits--{Local,FedPer,UA-PDFL,CriticalFL,DisPFL}--seed{0,1,2}
draw gossip steps personal/digits--{Local,DFedAvgM,DFedSAM}--seed{0,1,2}

# Pools of models, in a chain and in parallel; 40 epochs at each client.
pools=(--models 3 --epochs 10 --warmup 10)
run pools/average average --epochs 40
run pools/fedelmy fedelmy "${pools[@]}"
run pools/fedelmyparallel fedelmyparallel "${pools[@]}"
run pools/fedelmyparallel-same fedelmyparallel "${pools[@]}" --init same
draw pools bytes pools

# The gallery: docs/reports.md has the commands.
gallery() { # METHOD FLAGS...
    [ -d "$runs/gallery/$1" ] || ekiden run "$@" --clients 5 --seeds 0 1 2 --out "$runs/gallery/$1"
}
gallery fedelmy --models 3 --epochs 10 --warmup 10
gallery fedseq --epochs 31
gallery fedtasuki --epochs 30
gallery fedgram
ekiden report "$runs/gallery" -o "$runs/report-gallery" --details 4
for picture in docs/assets/gallery/*; do cp "$runs/report-gallery/figures/$(basename "$picture")" "$picture"; done
