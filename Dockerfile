# laconic with its kernels for the CPU, or with a CUDA build of torch. Not tried: it was written where no Docker runs.
#
#   docker build -t laconic .
#   docker build -t laconic:cuda --build-arg TORCH_INDEX=https://download.pytorch.org/whl/cu130 --build-arg CONSTRAINTS= .
#   docker run --rm laconic                                             # laconic doctor
#   docker run --rm --gpus all --shm-size 8g -v "$PWD:/work" laconic:cuda train --run-dir runs/mine
#
# torch's CUDA wheels bring CUDA; the host brings the driver and NVIDIA's container toolkit. The compiler stays, because
# Triton and torch.compile need one at run time.
FROM python:3.12-slim
RUN apt-get update && apt-get install --yes --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*
ARG TORCH=2.13.0
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
RUN pip install --no-cache-dir "torch==${TORCH}" --index-url "${TORCH_INDEX}"
WORKDIR /source
COPY pyproject.toml constraints.txt CMakeLists.txt README.md LICENSE ./
COPY csrc csrc
COPY src src
# What CI runs with; empty for CUDA, whose torch names its own Triton.
ARG CONSTRAINTS="--constraint constraints.txt"
RUN pip install --no-cache-dir ${CONSTRAINTS} ".[all]"
WORKDIR /work
ENTRYPOINT ["laconic"]
CMD ["doctor"]
