# docker build -t verifiable-relu .
# docker run --rm -v "$PWD/specs:/data" verifiable-relu --spec /data/cifar_eps.vnnlib
FROM python:3.12-slim
# PyTorch for CPUs; the default build brings several gigabytes of libraries for GPUs.
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
WORKDIR /app
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY verifiable_relu verifiable_relu
RUN pip install --no-cache-dir -c constraints.txt --extra-index-url "$TORCH_INDEX" . \
    && useradd --create-home user
USER user
WORKDIR /data
ENTRYPOINT ["python", "-m", "verifiable_relu.certify"]
CMD ["--help"]
