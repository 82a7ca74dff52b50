# The GPU stack of requirements/gpu.lock on CUDA 13: Hopper GPUs (H100, H200).
#   make docker
#   docker run --gpus all --ipc host --shm-size 16g -v /models:/models -v $PWD/runs:/jetrl/runs verl-jetrl:0.1.0 \
#       make recipe-qwen3-8b MODEL=/models/Qwen3-8B-Base
FROM nvidia/cuda:13.0.1-devel-ubuntu24.04

# DeepGEMM, Triton and flash-attn-4 compile kernels when they first run: the image keeps nvcc, a C++ compiler and headers.
RUN apt-get update \
    && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends \
        python3.12 python3.12-venv python3.12-dev g++ make git numactl libnuma1 ca-certificates \
    && rm -rf /var/lib/apt/lists/*

WORKDIR /jetrl
ENV DEVICE=gpu VENV=/opt/jetrl PATH=/opt/jetrl/bin:$PATH \
    NVTE_FRAMEWORK=pytorch NVTE_BUILD_USE_NVIDIA_WHEELS=1 TORCH_CUDA_ARCH_LIST=9.0a

# The locked packages first: a change of the project's code does not install them again.
COPY requirements/ requirements/
RUN LOCK_ONLY=1 bash requirements/install.sh

COPY . .
RUN make setup

CMD ["make", "help"]
