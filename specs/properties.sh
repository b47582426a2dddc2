#!/usr/bin/env bash
# Writes the properties of this folder and instances.csv anew; needs the data sets (see README.md of the project).
# Run it from the root of the clone, in the project's environment: python3 dev.py run bash specs/properties.sh
set -euo pipefail

# balls NETWORK DATA EPS IMAGES [options]
balls() {
    python -m verifiable_relu.spec --net "specs/$1.onnx" --data "$2" --eps "$3" --images "$4" --out specs "${@:5}"
}

rm -f specs/*.vnnlib specs/*.vnnlib.gz specs/instances.csv

balls cifar_cnn cifar10 2/255 3 --name cifar_eps

# Of each network and radius: verified by bounds, many of them closely; violated; hard, which bounds and attack leave
# open. Those of 300 s are undecided after 30 s.
balls cifar_cnn cifar10 1/255 4,15,25,36    --gzip
balls cifar_cnn cifar10 1/255 0,9           --gzip
balls cifar_cnn cifar10 2/255 1,25,97       --gzip
balls cifar_cnn cifar10 2/255 4,36          --gzip
balls cifar_cnn cifar10 2/255 39,95         --gzip
balls cifar_cnn cifar10 2/255 32,64         --gzip --timeout 300

balls mnist_cnn mnist   0.1   0,33,95       --gzip
balls mnist_cnn mnist   0.1   18,151        --gzip
balls mnist_cnn mnist   0.1   59,115,158    --gzip
balls mnist_cnn mnist   0.15  2             --gzip
balls mnist_cnn mnist   0.15  0             --gzip --timeout 300

balls mnist_mlp mnist   0.03  0,8,160       --gzip
balls mnist_mlp mnist   0.03  33,149        --gzip
balls mnist_mlp mnist   0.03  7,92          --gzip
balls mnist_mlp mnist   0.05  6,8           --gzip
balls mnist_mlp mnist   0.05  158,193       --gzip
balls mnist_mlp mnist   0.05  59,96         --gzip

# VNN-LIB 2.0
balls cifar_cnn cifar10 1/255 1             --gzip --version 2.0
balls mnist_cnn mnist   0.1   217           --gzip --version 2.0
balls mnist_mlp mnist   0.03  62            --gzip --version 2.0
